//! The files of jobs, in a directory of root.
//!
//! | file | contents | owner |
//! |---|---|---|
//! | `CLUSTER-JOB@NODE` | what Prolog did: the environment, or the refusal | root; the user of the job can read it |
//! | `CLUSTER-LEADER+JOB@NODE` | link to the file of a component of a heterogeneous job | root |
//! | `CLUSTER-JOB@NODE+run` | to which run the file of the job belongs, and whether a lease may exist | root, 0600 |
//! | `CLUSTER-JOB@NODE+ended` | an ended job that was not reported to gpushd yet | root, 0600 |
//! | `owned` | the GPUs with `owner = "slurm"`, from the last answer of gpushd | root |
//! | `places` | the clusters and nodes whose hooks run on this host | root |
//! | `lock` | locked while a hook changes a file | root, 0600 |
//!
//! Prolog creates the file of a job before it sends a request to gpushd. So if a job has no file, Epilog knows that
//! the job has no lease.
//!
//! The file of a job is only for its user. Hooks that run as root do not decide anything by its contents. Hooks of
//! several jobs and runs change the directory at the same time, so each hook holds the lock while it reads and writes.
//! TaskProlog only reads. It needs no lock, because each file is replaced as a whole.
//!
//! | file | subject |
//! |---|---|
//! | `access` | who may read the file of a job |
//! | `jobs` | files of jobs |
//! | `ends` | ended jobs that were not reported to gpushd yet |

mod access;
mod ends;
mod jobs;

use std::{
    fs, io,
    io::Write,
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use gpush_api::SlurmGpu;
use gpush_core::slurm::job_files::HookPlace;
use serde::{Serialize, de::DeserializeOwned};

pub use self::jobs::BegunRun;
pub(crate) use self::jobs::{EndedRun, FileWritten, Found, PossibleLeases};

/// Maximum number of bytes that a hook reads from a file.
const LARGEST: u64 = 1 << 20;

/// Name of the file with the GPUs that are reserved for Slurm (`owner = "slurm"`).
const OWNED: &str = "owned";

/// Name of the file with the clusters and nodes whose hooks run on this host.
const PLACES: &str = "places";

/// Name of the file that hooks lock. Only root can open it, because a user who can open it could keep the lock.
const LOCK: &str = "lock";

/// Mode of the directory. Users can open files whose names they know, but cannot list the names.
const MODE: u32 = 0o711;

/// Pause before a hook tries again to get the lock. Other hooks hold it only for microseconds.
const PAUSE: Duration = Duration::from_millis(2);

/// A hook waits at least this long for the lock, even after its deadline. Several hooks may reach their deadlines
/// together, and each must still record an end or remove a file.
const LOCK_WAIT: Duration = Duration::from_secs(1);

/// The directory with the files of jobs.
#[derive(Debug, Clone)]
pub struct Directory {
    path: PathBuf,
    /// The deadline of the hook.
    until: Instant,
}

/// The lock of the directory. Dropping this value releases the lock.
#[derive(Debug)]
struct Locked {
    _file: fs::File,
}

impl Directory {
    /// Creates the handle of the directory at `path`. Methods wait for the lock until `until`, but
    /// for at least [`LOCK_WAIT`].
    pub(crate) fn new(path: &Path, until: Instant) -> Self {
        Self { path: path.to_owned(), until }
    }

    /// Returns the path of the directory.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Creates the directory. Only root can write in it or list it, because the names of the files contain job ids.
    pub(crate) fn create(&self) -> io::Result<()> {
        match fs::DirBuilder::new().recursive(true).mode(MODE).create(&self.path) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
        let meta = fs::metadata(&self.path)?;
        let own = nix::unistd::geteuid().as_raw();
        if !meta.is_dir() || meta.uid() != own && meta.uid() != 0 || meta.mode() & 0o022 != 0 {
            let why = format!(
                "{} must be a directory that belongs to root and that only root can write to",
                self.path.display()
            );
            return Err(io::Error::other(why));
        }
        if meta.uid() == own && meta.mode() & 0o777 != MODE {
            // slurmd may have a restrictive umask, but users must be able to open their files in this directory.
            fs::set_permissions(&self.path, fs::Permissions::from_mode(MODE))?;
        }
        Ok(())
    }

    /// Locks the directory, so that no other hook changes it.
    ///
    /// # Errors
    /// If the lock is not free in time, or if the directory does not exist.
    fn lock(&self) -> io::Result<Locked> {
        let path = self.path.join(LOCK);
        let file = fs::OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&path)?;
        let until = self.until.max(Instant::now() + LOCK_WAIT);
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(Locked { _file: file }),
                Err(fs::TryLockError::WouldBlock) if Instant::now() < until => std::thread::sleep(PAUSE),
                Err(fs::TryLockError::WouldBlock) => {
                    let why = format!("another hook holds the lock {}", path.display());
                    return Err(io::Error::new(io::ErrorKind::TimedOut, why));
                }
                Err(fs::TryLockError::Error(error)) => return Err(error),
            }
        }
    }

    /// Stores which GPUs are reserved for Slurm. Ignores errors, because the next hook stores them again.
    pub(crate) fn keep_owned(&self, owned: &[SlurmGpu]) {
        if self.owned().as_deref() == Some(owned) {
            return;
        }
        let _failed = self.lock().and_then(|_locked| self.replace(OWNED, &serde_json::to_vec(owned)?, 0o644, None));
    }

    /// Returns which GPUs are reserved for Slurm, from the last answer of gpushd. `None` if gpushd has not answered on
    /// this boot.
    pub(crate) fn owned(&self) -> Option<Vec<SlurmGpu>> {
        self.read_json(OWNED).ok()
    }

    /// Records that hooks of this cluster and node run on this host. Does nothing if the directory does not exist.
    /// Ignores errors, because the next hook records this again.
    pub(crate) fn keep_place(&self, place: &HookPlace) {
        if !self.path.exists() || self.places().contains(place) {
            return;
        }
        let _failed = self.lock().and_then(|locked| self.add_place(&locked, place));
    }

    fn add_place(&self, _locked: &Locked, place: &HookPlace) -> io::Result<()> {
        let mut places = self.places();
        if places.contains(place) {
            return Ok(());
        }
        places.push(place.clone());
        self.replace(PLACES, &serde_json::to_vec(&places)?, 0o644, None)
    }

    /// Returns the clusters and nodes whose hooks run on this host.
    fn places(&self) -> Vec<HookPlace> {
        self.read_json(PLACES).unwrap_or_default()
    }

    /// Returns the names of all files.
    fn names(&self) -> io::Result<Vec<String>> {
        let entries = match fs::read_dir(&self.path) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(error),
        };
        Ok(entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect())
    }

    /// Replaces the whole file. The user `reader` can then read it. The caller must hold the lock.
    fn replace(&self, name: &str, text: &[u8], mode: u32, reader: Option<u32>) -> io::Result<()> {
        // A hook that was killed may have left this temporary file.
        let new = self.path.join(".new");
        self.remove_file(".new");
        let written = fs::OpenOptions::new().write(true).create_new(true).mode(mode).open(&new).and_then(|mut file| {
            file.write_all(text)?;
            file.set_permissions(fs::Permissions::from_mode(mode))?;
            let own = nix::unistd::geteuid().as_raw();
            match reader.filter(|reader| *reader != own) {
                Some(uid) => access::let_read(&new, uid),
                None => Ok(()),
            }
        });
        let replaced = written.and_then(|()| fs::rename(&new, self.path.join(name)));
        if replaced.is_err() {
            self.remove_file(".new");
        }
        replaced
    }

    fn remove_file(&self, name: &str) {
        let _absent = fs::remove_file(self.path.join(name));
    }

    fn read_json<T: DeserializeOwned>(&self, name: &str) -> io::Result<T> {
        let file = fs::File::open(self.path.join(name))?;
        let mut bytes = Vec::new();
        io::Read::read_to_end(&mut io::Read::take(file, LARGEST), &mut bytes)?;
        serde_json::from_slice(&bytes).map_err(io::Error::other)
    }

    fn write_json<T: Serialize>(&self, name: &str, value: &T) -> io::Result<()> {
        self.replace(name, &serde_json::to_vec(value)?, 0o600, None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directory_that_others_can_write_to_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o777)).unwrap();
        assert!(Directory::new(dir.path(), Instant::now()).create().is_err());
    }

    /// Case: one hook is suspended and holds the lock. Another hook waits only until its own deadline.
    #[test]
    fn lock_is_awaited_until_the_deadline_alone() {
        let dir = tempfile::tempdir().unwrap();
        let patient = Directory::new(dir.path(), Instant::now() + Duration::from_secs(600));
        let locked = patient.lock().unwrap();
        let late = Directory::new(dir.path(), Instant::now());
        assert_eq!(late.lock().unwrap_err().kind(), io::ErrorKind::TimedOut);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| patient.lock().map(drop));
            drop(locked);
            waiting.join().unwrap().unwrap();
        });
        assert!(late.lock().is_ok(), "the lock is free");
    }

    /// Fault: after its deadline, a hook tried only once to get the lock, and failed if another hook held it.
    #[test]
    fn hooks_that_reach_the_deadline_together_all_get_the_lock() {
        let dir = tempfile::tempdir().unwrap();
        let (late, begin) = (Directory::new(dir.path(), Instant::now()), std::sync::Barrier::new(8));
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    begin.wait();
                    for _ in 0..20 {
                        // Hold the lock only for a moment: a slow disk must not make another hook give up.
                        drop(late.lock().unwrap());
                    }
                });
            }
        });
    }

    #[test]
    fn half_written_file_of_a_killed_hook_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(".new"), "half").unwrap();
        let directory = Directory::new(dir.path(), Instant::now());
        directory.keep_place(&HookPlace::new("ci", "n1"));
        assert_eq!(directory.places(), [HookPlace::new("ci", "n1")]);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2, "the list and the lock");
    }
}
