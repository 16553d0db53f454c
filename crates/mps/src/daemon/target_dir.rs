//! The directory of a target's daemon: where it is, what lies in it, who may look.
//!
//! ```text
//! /run/gpush-mps/                 0711                the base
//!   g5d1b03a2/                    0711                one a target
//!     spec.json                   0600                what was started last
//!     lock                        0600                held by the daemon and all that it started
//!     3/                          0700, access list   CUDA_MPS_PIPE_DIRECTORY: of the third user
//! ```
//!
//! A pipe directory is one user's, or nobody's yet, and never another's afterwards: who keeps it open,
//! or left something in it, finds no successor there. That the lock is held means that something of the
//! daemon runs, if only a server that it left behind. NVIDIA's daemon ends without a word when the path
//! of its pipe directory has 88 bytes, so that is looked at before.

use std::{
    collections::BTreeSet,
    fs::{self, File, OpenOptions, Permissions, TryLockError},
    io::{self, Write},
    os::unix::{
        ffi::OsStrExt,
        fs::{DirBuilderExt, FileTypeExt, OpenOptionsExt, PermissionsExt},
    },
    path::{Path, PathBuf},
    time::Duration,
};

use gpush_api::{ApiError, Code, MpsSettings};
use gpush_host::{acl, proc::FileId};
use serde::{Deserialize, Serialize};

use super::launcher;

/// Longest path of a pipe directory in bytes: at one more the daemon ends without a word.
pub(super) const LONGEST: usize = 87;

/// Largest number of a pipe directory: for checking the length before there is one.
const LARGEST: u32 = 9_999_999;

/// How often a lock is tried for that somebody else has, and the pause between.
const TRIES: u32 = 20;
const AGAIN: Duration = Duration::from_millis(2);

/// What a daemon is started with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spec {
    /// Short name of the target.
    pub target: String,
    /// UUID of the GPU or MIG device.
    pub uuid: String,
    /// UUID of the GPU that it is, or is of.
    pub gpu_uuid: String,
    /// Number of the pipe directory.
    pub tenure: u32,
    /// Whose it is; nobody's yet without.
    #[serde(default)]
    pub user: Option<u32>,
    /// `nvidia-cuda-mps-control`: the file that was checked.
    pub control: PathBuf,
    /// The name that it is called by.
    pub name: PathBuf,
    /// Directory of `nvidia-cuda-mps-server`.
    pub servers: PathBuf,
    /// Directory of its logs.
    pub logs: PathBuf,
    /// What its clients may have from the first one on. The memory limit is set once it answers.
    pub settings: MpsSettings,
}

/// A target's directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TargetDir {
    dir: PathBuf,
}

impl TargetDir {
    /// The place of a target below the base; nothing is made.
    pub fn of(base: &Path, target: &str) -> Self {
        Self { dir: base.join(target) }
    }

    /// The place in this directory.
    pub fn at(dir: &Path) -> Self {
        Self { dir: dir.to_owned() }
    }

    /// Those below the base in which a daemon was started, by name. One whose GPU is not known is left out: it is
    /// found when somebody wants its target. So is one that was renamed: nobody who was let in finds it there.
    pub fn all(base: &Path) -> Vec<(Self, Spec)> {
        let entries = fs::read_dir(base).into_iter().flatten().filter_map(Result::ok);
        let mut all: Vec<_> = entries
            .filter_map(|entry| {
                let place = Self::at(&entry.path());
                let spec = place.known().filter(|spec| !spec.gpu_uuid.is_empty())?;
                if entry.file_name() != spec.target.as_str() {
                    return None;
                }
                Some((place, spec))
            })
            .collect();
        all.sort_by(|(one, _), (other, _)| one.dir.cmp(&other.dir));
        all
    }

    /// The directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Pipe directory of a number.
    pub fn pipe(&self, tenure: u32) -> PathBuf {
        self.dir.join(tenure.to_string())
    }

    /// What was started here last.
    pub fn spec(&self) -> Option<Spec> {
        serde_json::from_slice(&fs::read(self.dir.join("spec.json")).ok()?).ok()
    }

    /// The same, by the word of the daemon that runs here when what was written down can't be read.
    pub(super) fn known(&self) -> Option<Spec> {
        self.spec().or_else(|| launcher::recovered_spec(self))
    }

    /// Refuses a place whose pipe directories would have too long a path.
    ///
    /// # Errors
    /// [`Code::Unsupported`] then.
    pub(super) fn is_short(&self) -> Result<(), ApiError> {
        let length = self.pipe(LARGEST).as_os_str().as_bytes().len();
        if length <= LONGEST {
            return Ok(());
        }
        let message = format!("{} is too long a path for an MPS daemon", self.dir.display());
        Err(ApiError::new(Code::Unsupported, message)
            .cause(format!("its pipe directory would have {length} bytes, and NVIDIA's daemon takes {LONGEST}"))
            .hint("start gpushd with a shorter --mps-dir, such as /run/gpush-mps"))
    }

    /// Lays the place out for a start: the pipe directory of the spec, free of what a daemon before left
    /// in it, then the spec. Pipe directories of other numbers go.
    ///
    /// # Errors
    /// When it can't be written, or something else is in the way.
    pub(super) fn lay(&self, spec: &Spec) -> io::Result<()> {
        directory(&self.dir, 0o711)?;
        directory(&spec.logs, 0o750)?;
        let own = spec.tenure.to_string();
        for entry in fs::read_dir(&self.dir)? {
            let entry = entry?;
            let name = entry.file_name();
            let numbered = name.to_str().is_some_and(|name| name.parse::<u32>().is_ok());
            if numbered && name != own.as_str() {
                fs::remove_dir_all(entry.path())?;
            }
        }
        let pipe = self.pipe(spec.tenure);
        directory(&pipe, 0o700)?;
        sweep(&pipe)?;
        // Closed to its user as well, until the daemon serves.
        acl::admit(&pipe, &BTreeSet::new())?;
        self.note(spec)
    }

    /// Writes the spec down.
    ///
    /// # Errors
    /// When it can't be written.
    pub(super) fn note(&self, spec: &Spec) -> io::Result<()> {
        let new = self.dir.join("spec.json.new");
        let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
        file.write_all(&serde_json::to_vec(spec)?)?;
        file.sync_all()?;
        fs::rename(&new, self.dir.join("spec.json"))
    }

    /// Who is let to the daemon of a pipe directory.
    ///
    /// # Errors
    /// When it can't be read.
    pub(super) fn admitted(&self, tenure: u32) -> io::Result<BTreeSet<u32>> {
        acl::admitted(&self.pipe(tenure))
    }

    /// Lets these users, and nobody else, to the daemon of a pipe directory.
    ///
    /// # Errors
    /// When the file system can't say so.
    pub(super) fn admit(&self, tenure: u32, uids: &BTreeSet<u32>) -> io::Result<()> {
        acl::admit(&self.pipe(tenure), uids)
    }

    /// The lock, if nothing of a daemon runs here.
    ///
    /// # Errors
    /// When it can't be opened.
    pub fn lock(&self) -> io::Result<Option<File>> {
        let path = self.dir.join("lock");
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)?;
        match file.try_lock() {
            Ok(()) => Ok(Some(file)),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(error)) => Err(error),
        }
    }

    /// Whether something of a daemon runs here. Whoever takes the lock at this moment is made to try again.
    pub fn is_taken(&self) -> bool {
        self.dir.join("lock").exists() && !matches!(self.lock(), Ok(Some(_)))
    }

    /// The same lock, for who is to become a daemon: that somebody only looks whether it is held costs a
    /// moment.
    ///
    /// # Errors
    /// When it can't be opened.
    pub fn lock_soon(&self) -> io::Result<Option<File>> {
        for _ in 0..TRIES {
            if let Some(lock) = self.lock()? {
                return Ok(Some(lock));
            }
            std::thread::sleep(AGAIN);
        }
        self.lock()
    }

    /// The file of the lock, if there is one: a daemon and all that it started have it as their standard input.
    pub(super) fn lock_file(&self) -> Option<FileId> {
        fs::symlink_metadata(self.dir.join("lock")).ok().filter(fs::Metadata::is_file).map(|meta| FileId::of(&meta))
    }

    /// Removes the directory, once nothing runs here. It is renamed first: a gpushd that is killed in between leaves a
    /// name that no target has, and the next one removes it ([`sweep_removed`]).
    pub fn remove(&self) {
        let name = self.dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let removed = self.dir.with_file_name(format!("{REMOVED}{name}"));
        // A file that another program put there is not ours to remove.
        if !fs::symlink_metadata(&self.dir).is_ok_and(|meta| meta.is_dir()) {
            return;
        }
        // What an earlier removal left under that name.
        let _none = fs::remove_dir_all(&removed);
        let renamed = fs::rename(&self.dir, &removed).and_then(|()| fs::remove_dir_all(&removed));
        match renamed {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!("{} can't be removed: {error}", self.dir.display());
            }
            Ok(()) | Err(_) => {}
        }
    }
}

/// How the name of a directory begins that is being removed.
const REMOVED: &str = ".removed-";

/// Removes what a gpushd that was killed left of directories that it was removing.
pub fn sweep_removed(base: &Path) {
    let entries = fs::read_dir(base).into_iter().flatten().filter_map(Result::ok);
    for entry in entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(REMOVED)) {
        if let Err(error) = fs::remove_dir_all(entry.path()) {
            tracing::warn!("{} can't be removed: {error}", entry.path().display());
        }
    }
}

/// Makes a directory of ours with this mode, or gives it to one that is there.
pub(super) fn directory(path: &Path, mode: u32) -> io::Result<()> {
    match fs::DirBuilder::new().mode(mode).create(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            fs::DirBuilder::new().recursive(true).mode(0o711).create(path.parent().unwrap_or(path))?;
            fs::DirBuilder::new().mode(mode).create(path)?;
        }
        other => other?,
    }
    let meta = fs::symlink_metadata(path)?;
    if !meta.is_dir() {
        return Err(io::Error::other(format!("{} is no directory", path.display())));
    }
    // Which also fails where it is somebody else's.
    fs::set_permissions(path, Permissions::from_mode(mode))
}

/// Removes what a daemon leaves in its pipe directory when it is killed. A stale pid file it would only
/// overwrite in part, and clients that find stale sockets run without MPS.
fn sweep(pipe: &Path) -> io::Result<()> {
    for entry in fs::read_dir(pipe)? {
        let entry = entry?;
        let kind = entry.file_type()?;
        if kind.is_socket() || kind.is_fifo() || kind.is_file() || kind.is_symlink() {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(base: &Path, tenure: u32) -> Spec {
        Spec {
            target: "g5d1b03a2".to_owned(),
            uuid: "GPU-5d1b03a2".to_owned(),
            gpu_uuid: "GPU-5d1b03a2".to_owned(),
            tenure,
            user: None,
            control: "/usr/bin/nvidia-cuda-mps-control".into(),
            name: "/usr/bin/nvidia-cuda-mps-control".into(),
            servers: "/usr/bin".into(),
            logs: base.join("logs"),
            settings: MpsSettings::default(),
        }
    }

    #[test]
    fn a_pipe_directory_is_one_users_and_swept_before_each_start() {
        let scratch = tempfile::tempdir().unwrap();
        let place = TargetDir::of(scratch.path(), "g5d1b03a2");
        assert!(!place.is_taken() && place.spec().is_none());
        place.lay(&spec(scratch.path(), 1)).unwrap();
        place.admit(1, &BTreeSet::from([1000])).unwrap();
        fs::write(place.pipe(1).join("nvidia-cuda-mps-control.pid"), "4711").unwrap();
        std::os::unix::net::UnixListener::bind(place.pipe(1).join("control")).unwrap();
        // The same user's again: what was left goes, and nobody is let in before the daemon serves.
        place.lay(&spec(scratch.path(), 1)).unwrap();
        assert_eq!(fs::read_dir(place.pipe(1)).unwrap().count(), 0);
        assert_eq!(acl::admitted(&place.pipe(1)).unwrap(), BTreeSet::new());
        // Another's.
        place.lay(&spec(scratch.path(), 2)).unwrap();
        assert!(!place.pipe(1).exists() && place.pipe(2).is_dir());
        assert_eq!(TargetDir::all(scratch.path()), [(place.clone(), spec(scratch.path(), 2))]);
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(place.dir()), mode(&place.dir().join("spec.json"))), (0o711, 0o600));
        assert!(!place.is_taken());
        let lock = place.lock().unwrap().unwrap();
        assert!(place.is_taken() && place.lock().unwrap().is_none());
        drop(lock);
        place.remove();
        assert!(!place.dir().exists());
    }

    /// A kill between two unlinks used to leave an empty directory for ever.
    #[test]
    fn directory_of_an_interrupted_removal_is_no_target_and_is_swept() {
        let scratch = tempfile::tempdir().unwrap();
        let place = TargetDir::of(scratch.path(), "g5d1b03a2");
        place.lay(&spec(scratch.path(), 1)).unwrap();
        // As a kill right after the rename leaves it, and then one within the removal.
        let half = scratch.path().join(".removed-g5d1b03a2");
        fs::rename(place.dir(), &half).unwrap();
        assert!(!place.dir().exists() && TargetDir::all(scratch.path()).is_empty());
        fs::remove_file(half.join("spec.json")).unwrap();
        sweep_removed(scratch.path());
        assert!(!half.exists());
        // A target of that name comes back, and its next removal meets no leftover.
        fs::create_dir(&half).unwrap();
        place.lay(&spec(scratch.path(), 1)).unwrap();
        place.remove();
        assert!(!half.exists() && !place.dir().exists());
        // A file that another program put there stays.
        fs::write(place.dir(), "").unwrap();
        place.remove();
        assert!(place.dir().is_file());
    }

    #[test]
    fn a_path_that_the_daemon_would_not_take_is_refused_before() {
        let base = |length: usize| PathBuf::from(format!("/{}", "x".repeat(length - 1)));
        // A slash, nine letters, a slash, seven figures.
        let most = LONGEST - 18;
        assert_eq!(TargetDir::of(&base(most), "g5d1b03a2").is_short(), Ok(()));
        let error = TargetDir::of(&base(most + 1), "g5d1b03a2").is_short().unwrap_err();
        assert!(error.causes[0].contains("88 bytes"), "{error:?}");
    }

    #[test]
    fn what_is_no_directory_of_ours_is_not_used() {
        let scratch = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("/tmp", scratch.path().join("g5d1b03a2")).unwrap();
        let place = TargetDir::of(scratch.path(), "g5d1b03a2");
        assert!(place.lay(&spec(scratch.path(), 1)).is_err());
    }
}
