//! The files of jobs, in a directory of root.
//!
//! | file | contents | owner |
//! |---|---|---|
//! | `CLUSTER-JOB` | what Prolog did: the environment, or the refusal | the user of the job, 0400 |
//! | `CLUSTER-LEADER` | link to the file of a component of a heterogeneous job | root |
//! | `CLUSTER-JOB.ended` | an end of a job that was not delivered to gpushd yet | root |
//! | `owned` | the GPUs with `owner = "slurm"`, from the last answer of gpushd | root |
//!
//! Prolog makes the file of a job before it asks gpushd. So Epilog knows from the file whether a lease can exist.

use std::{
    fs, io,
    io::Write,
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt, chown, symlink},
    path::{Path, PathBuf},
};

use gpush_api::{SlurmGpu, SlurmJobEnd};
use gpush_core::slurm::{Job, environment::file_name, file::JobFile};

/// Largest file that is read, in bytes.
const LARGEST: u64 = 1 << 20;

/// Suffix of files with ends that were not delivered yet.
const ENDED: &str = ".ended";

/// The GPUs with `owner = "slurm"`.
const OWNED: &str = "owned";

/// The directory of the files of jobs.
#[derive(Debug, Clone)]
pub(super) struct Directory(PathBuf);

impl Directory {
    pub(super) fn new(path: &Path) -> Self {
        Self(path.to_owned())
    }

    /// Path of the file of a job.
    fn of(&self, job: &Job) -> PathBuf {
        self.0.join(job.file_name())
    }

    /// Creates the directory. Only root may write there.
    pub(super) fn create(&self) -> io::Result<()> {
        match fs::DirBuilder::new().recursive(true).mode(0o755).create(&self.0) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
        let meta = fs::metadata(&self.0)?;
        let own = nix::unistd::geteuid().as_raw();
        if !meta.is_dir() || meta.uid() != own && meta.uid() != 0 || meta.mode() & 0o022 != 0 {
            let why = format!("{} is not a directory of root that only root can write to", self.0.display());
            return Err(io::Error::other(why));
        }
        if meta.uid() == own && meta.mode() & 0o777 != 0o755 {
            // The umask of slurmd may be narrow, and users read their files there.
            fs::set_permissions(&self.0, fs::Permissions::from_mode(0o755))?;
        }
        Ok(())
    }

    /// Writes the file of a job, for its user.
    pub(super) fn write(&self, job: &Job, file: &JobFile) -> io::Result<()> {
        let text = serde_json::to_vec(file)?;
        self.replace(&self.of(job), &text, 0o400, job.uid)?;
        let Some(leader) = job.leader else { return Ok(()) };
        // Tasks of a heterogeneous job know the job by its leader. The leader's own file comes first.
        match symlink(job.file_name(), self.0.join(file_name(&job.cluster, leader))) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
            Ok(()) | Err(_) => Ok(()),
        }
    }

    /// Whether Prolog made a file for a job, and not for a later run of it.
    pub(super) fn has(&self, job: &Job) -> bool {
        self.of(job).symlink_metadata().is_ok()
    }

    /// Removes the file of a job, unless it is that of a later run.
    pub(super) fn remove(&self, job: &Job) {
        let path = self.of(job);
        if let Ok(file) = read_file(&path)
            && file.restart > job.restart
        {
            return;
        }
        let _absent = fs::remove_file(&path);
        let name = job.file_name();
        if let Some(leader) = job.leader {
            let alias = self.0.join(file_name(&job.cluster, leader));
            if fs::read_link(&alias).is_ok_and(|to| to == Path::new(&name)) {
                let _absent = fs::remove_file(alias);
            }
        }
    }

    /// Reads the file of a job. Without a cluster, the only job with this id is meant.
    pub(super) fn read(&self, cluster: Option<&str>, job: u32) -> io::Result<Option<JobFile>> {
        let named = cluster.map(|cluster| self.0.join(file_name(cluster, job)));
        let path = match named {
            Some(path) => path,
            None => {
                let suffix = format!("-{job}");
                let entries = match fs::read_dir(&self.0) {
                    Ok(entries) => entries,
                    Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
                    Err(error) => return Err(error),
                };
                let is_its = |name: &std::ffi::OsStr| name.to_str().is_some_and(|name| name.ends_with(&suffix));
                let mut found = entries.filter_map(Result::ok).filter(|entry| is_its(&entry.file_name()));
                match (found.next(), found.next()) {
                    (Some(one), None) => one.path(),
                    (_, _) => return Ok(None),
                }
            }
        };
        match read_file(&path) {
            Ok(file) => Ok(Some(file)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Records an end that could not be delivered to gpushd.
    pub(super) fn note_end(&self, job: &Job, end: &SlurmJobEnd) -> io::Result<()> {
        let path = self.0.join(format!("{}{ENDED}", job.file_name()));
        self.replace(&path, &serde_json::to_vec(end)?, 0o600, None)
    }

    /// Removes the record of an end that was delivered.
    pub(super) fn end_told(&self, end: &SlurmJobEnd) {
        let _absent = fs::remove_file(self.0.join(format!("{}{ENDED}", file_name(&end.cluster, end.job))));
    }

    /// Returns the ends that were not delivered to gpushd.
    pub(super) fn untold_ends(&self) -> Vec<SlurmJobEnd> {
        let Ok(entries) = fs::read_dir(&self.0) else { return Vec::new() };
        let is_end = |entry: &fs::DirEntry| entry.file_name().to_str().is_some_and(|name| name.ends_with(ENDED));
        let ends = entries.filter_map(Result::ok).filter(is_end);
        ends.filter_map(|entry| serde_json::from_slice(&read_bytes(&entry.path()).ok()?).ok()).collect()
    }

    /// Keeps the list of GPUs with `owner = "slurm"`. Ignores failures: the next hook writes the list again.
    pub(super) fn keep_owned(&self, owned: &[SlurmGpu]) {
        if self.owned().as_deref() == Some(owned) {
            return;
        }
        let kept = serde_json::to_vec(owned).map_err(io::Error::other);
        let _failed = kept.and_then(|text| self.replace(&self.0.join(OWNED), &text, 0o644, None));
    }

    /// The GPUs with `owner = "slurm"`, from the last answer of gpushd; `None` if there was no answer on this boot.
    pub(super) fn owned(&self) -> Option<Vec<SlurmGpu>> {
        serde_json::from_slice(&read_bytes(&self.0.join(OWNED)).ok()?).ok()
    }

    /// Replaces a file as a whole.
    fn replace(&self, path: &Path, text: &[u8], mode: u32, owner: Option<u32>) -> io::Result<()> {
        let mut name = path.file_name().unwrap_or_default().to_owned();
        name.push(format!(".{}.new", std::process::id()));
        let new = path.with_file_name(name);
        let written = fs::OpenOptions::new().write(true).create_new(true).mode(mode).open(&new).and_then(|mut file| {
            file.write_all(text)?;
            file.set_permissions(fs::Permissions::from_mode(mode))?;
            let own = nix::unistd::geteuid().as_raw();
            match owner.filter(|owner| *owner != own) {
                Some(uid) => chown(&new, Some(uid), None),
                None => Ok(()),
            }
        });
        let replaced = written.and_then(|()| fs::rename(&new, path));
        if replaced.is_err() {
            let _absent = fs::remove_file(&new);
        }
        replaced
    }
}

fn read_file(path: &Path) -> io::Result<JobFile> {
    serde_json::from_slice(&read_bytes(path)?).map_err(io::Error::other)
}

fn read_bytes(path: &Path) -> io::Result<Vec<u8>> {
    let file = fs::File::open(path)?;
    let mut bytes = Vec::new();
    io::Read::read_to_end(&mut io::Read::take(file, LARGEST), &mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use gpush_core::slurm::file::JobState;

    use super::*;

    fn job(restart: u32) -> Job {
        let uid = Some(nix::unistd::geteuid().as_raw());
        Job { cluster: "ci".to_owned(), id: 42, uid, restart, leader: Some(41), ..Job::default() }
    }

    fn file(restart: u32) -> JobFile {
        JobFile { cluster: "ci".to_owned(), job: 42, node: "n1".to_owned(), restart, state: JobState::Begun }
    }

    #[test]
    fn file_of_a_job_is_its_users_and_is_found_by_the_leader() {
        let dir = tempfile::tempdir().unwrap();
        let directory = Directory::new(&dir.path().join("jobs"));
        directory.create().unwrap();
        directory.write(&job(0), &file(0)).unwrap();
        let meta = fs::metadata(dir.path().join("jobs/ci-42")).unwrap();
        assert_eq!(
            (meta.mode() & 0o777, fs::metadata(dir.path().join("jobs")).unwrap().mode() & 0o777),
            (0o400, 0o755)
        );
        assert_eq!(directory.read(Some("ci"), 41).unwrap(), Some(file(0)));
        assert_eq!(directory.read(None, 42).unwrap(), Some(file(0)));
        assert_eq!(directory.read(Some("other"), 42).unwrap(), None);
        // Prolog runs again.
        directory.write(&job(1), &file(1)).unwrap();
        // The Epilog of the first run comes late.
        directory.remove(&job(0));
        assert!(directory.has(&job(1)));
        directory.remove(&job(1));
        assert!(!directory.has(&job(1)));
        assert_eq!(fs::read_dir(dir.path().join("jobs")).unwrap().count(), 0, "the link is removed as well");
    }

    #[test]
    fn directory_that_others_can_write_to_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o777)).unwrap();
        assert!(Directory::new(dir.path()).create().is_err());
    }
}
