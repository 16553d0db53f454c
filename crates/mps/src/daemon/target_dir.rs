//! The directory of a target: its files and its pipe directory.
//!
//! ```text
//! /run/gpush-mps/                 0711                the base
//!   g5d1b03a2/                    0711                one per target
//!     spec.json                   0600                the parameters that the daemon was started with
//!     lock                        0600                held by the daemon and everything that it started
//!     3/                          0700, access list   CUDA_MPS_PIPE_DIRECTORY of the third user
//! ```
//!
//! A pipe directory belongs to one user, or to no user yet. gpushd never reuses a pipe directory for another user. So a
//! process that keeps an old directory open, or has left files in it, cannot reach the next daemon. While the file
//! `lock` is locked, at least one process of the daemon runs, possibly only a server that has outlived the daemon. If
//! the path of the pipe directory has 88 bytes or more, NVIDIA's daemon ends without a message. So gpushd checks the
//! length first.

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

use gpush_api::{ApiError, Code, GpuUuid, MpsSettings, TargetUuid};
use gpush_host::{acl, proc::FileId};
use serde::{Deserialize, Serialize};

/// Name of the file with the start parameters, in the directory of a target.
pub const SPEC: &str = "spec.json";

/// Maximum length of the path of a pipe directory in bytes. With a longer path, NVIDIA's daemon
/// ends without a message.
pub(super) const LONGEST: usize = 87;

/// Largest number of a pipe directory. Used only to check the length of the path.
const LARGEST: u32 = 9_999_999;

/// Number of attempts to take a lock that another process holds, and the pause between attempts.
const TRIES: u32 = 20;
const RETRY_PAUSE: Duration = Duration::from_millis(2);

/// The parameters that a daemon is started with: the content of `spec.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spec {
    /// Short name of the target.
    pub target: String,
    /// UUID of the GPU or MIG device.
    pub uuid: TargetUuid,
    /// UUID of the GPU that is the target or contains it.
    pub gpu_uuid: GpuUuid,
    /// Number of the pipe directory.
    pub tenure: u32,
    /// User of the pipe directory; `None` if there is no user yet, or several.
    #[serde(default)]
    pub user: Option<u32>,
    /// Whether one server, run by root, serves clients of all users: `-multiuser-server`.
    #[serde(default)]
    pub multi_user: bool,
    /// Path of `nvidia-cuda-mps-control` with symbolic links resolved: the file that gpushd has checked.
    pub control: PathBuf,
    /// The path from the config, for `argv[0]`.
    pub name: PathBuf,
    /// Directory of `nvidia-cuda-mps-server`.
    pub servers: PathBuf,
    /// Directory of the logs.
    pub logs: PathBuf,
    /// Settings at the start. gpushd sets the memory limit only after the first reply.
    pub settings: MpsSettings,
}

/// The directory of a target.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TargetDir {
    dir: PathBuf,
}

impl TargetDir {
    /// Returns the directory of a target below the base. Creates nothing.
    pub fn of(base: &Path, target: &str) -> Self {
        Self { dir: base.join(target) }
    }

    /// Returns the target directory with this path.
    pub fn at(dir: &Path) -> Self {
        Self { dir: dir.to_owned() }
    }

    /// Returns the path of the directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Returns the pipe directory with this number.
    pub fn pipe(&self, tenure: u32) -> PathBuf {
        self.dir.join(tenure.to_string())
    }

    /// Reads the spec of the last daemon; `None` if there is no readable `spec.json`.
    pub fn spec(&self) -> Option<Spec> {
        serde_json::from_slice(&fs::read(self.dir.join(SPEC)).ok()?).ok()
    }

    /// Checks that the paths of pipe directories are not too long.
    ///
    /// # Errors
    /// [`Code::Unsupported`] if the paths are too long.
    pub(super) fn check_path_length(&self) -> Result<(), ApiError> {
        let length = self.pipe(LARGEST).as_os_str().as_bytes().len();
        if length <= LONGEST {
            return Ok(());
        }
        let message = format!("the path {} is too long for an MPS daemon", self.dir.display());
        Err(ApiError::new(Code::Unsupported, message)
            .cause(format!(
                "the path of the pipe directory would have {length} bytes, but NVIDIA's daemon allows only {LONGEST}"
            ))
            .hint("start gpushd with a shorter --mps-dir, such as /run/gpush-mps"))
    }

    /// Prepares the directory for a start. Removes other pipe directories. Creates the pipe
    /// directory of the spec, and removes the files of a previous daemon from it. Then writes the
    /// spec.
    ///
    /// # Errors
    /// The file system refuses, or the path is not a directory of gpushd.
    pub(super) fn create(&self, spec: &Spec) -> io::Result<()> {
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
        remove_files(&pipe)?;
        // The user gets no access until the daemon serves.
        acl::grant_access(&pipe, &BTreeSet::new())?;
        self.write_spec(spec)
    }

    /// Writes `spec.json`.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(super) fn write_spec(&self, spec: &Spec) -> io::Result<()> {
        let new = self.dir.join("spec.json.new");
        let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
        file.write_all(&serde_json::to_vec(spec)?)?;
        file.sync_all()?;
        fs::rename(&new, self.dir.join(SPEC))
    }

    /// Returns the users with access to a pipe directory.
    ///
    /// # Errors
    /// The access list cannot be read.
    pub(super) fn users_with_access(&self, tenure: u32) -> io::Result<BTreeSet<u32>> {
        acl::users_with_access(&self.pipe(tenure))
    }

    /// Grants access to a pipe directory to exactly these users.
    ///
    /// # Errors
    /// The file system has no access lists, or refuses.
    pub(super) fn set_access(&self, tenure: u32, uids: &BTreeSet<u32>) -> io::Result<()> {
        acl::grant_access(&self.pipe(tenure), uids)
    }

    /// Takes the lock; `None` if a process of a daemon runs here.
    ///
    /// # Errors
    /// The lock cannot be opened.
    pub fn lock(&self) -> io::Result<Option<File>> {
        let path = self.dir.join("lock");
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)?;
        match file.try_lock() {
            Ok(()) => Ok(Some(file)),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(error)) => Err(error),
        }
    }

    /// Returns whether a process of a daemon runs here. The check itself takes the lock for a
    /// moment.
    pub fn is_locked(&self) -> bool {
        self.dir.join("lock").exists() && !matches!(self.lock(), Ok(Some(_)))
    }

    /// Takes the lock for a process that becomes a daemon. Retries, because [`Self::is_locked`] holds the lock for a
    /// moment.
    ///
    /// # Errors
    /// The lock cannot be opened.
    pub fn lock_with_retry(&self) -> io::Result<Option<File>> {
        for _ in 0..TRIES {
            if let Some(lock) = self.lock()? {
                return Ok(Some(lock));
            }
            std::thread::sleep(RETRY_PAUSE);
        }
        self.lock()
    }

    /// Returns the identity of the lock file. The lock file is the standard input of a daemon and
    /// of everything that the daemon started.
    pub(super) fn lock_file(&self) -> Option<FileId> {
        fs::symlink_metadata(self.dir.join("lock")).ok().filter(fs::Metadata::is_file).map(|meta| FileId::of(&meta))
    }

    /// Removes the directory. Call this only when no process of a daemon runs here. Renames the
    /// directory first, to a name that no target has. If gpushd is killed before the removal is
    /// complete, the next gpushd removes the rest ([`sweep_removed`]).
    pub fn remove(&self) {
        let name = self.dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let removed = self.dir.with_file_name(format!("{REMOVED}{name}"));
        // gpushd must not remove a file of another program.
        if !fs::symlink_metadata(&self.dir).is_ok_and(|meta| meta.is_dir()) {
            return;
        }
        // Remove the leftovers of an earlier removal.
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

/// Prefix of the name of a directory that is being removed.
const REMOVED: &str = ".removed-";

/// Removes directories whose removal was interrupted because gpushd was killed.
pub fn sweep_removed(base: &Path) {
    let entries = fs::read_dir(base).into_iter().flatten().filter_map(Result::ok);
    for entry in entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(REMOVED)) {
        if let Err(error) = fs::remove_dir_all(entry.path()) {
            tracing::warn!("{} can't be removed: {error}", entry.path().display());
        }
    }
}

/// Creates a directory of gpushd with this mode. If the directory exists, sets its mode.
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
        return Err(io::Error::other(format!("{} is not a directory", path.display())));
    }
    // This call fails if the directory belongs to another user.
    fs::set_permissions(path, Permissions::from_mode(mode))
}

/// Removes the files that a killed daemon left in its pipe directory. A client that finds a stale
/// socket runs without MPS, and a new daemon overwrites only a part of a stale pid file.
fn remove_files(pipe: &Path) -> io::Result<()> {
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
            uuid: "GPU-5d1b03a2".into(),
            gpu_uuid: "GPU-5d1b03a2".into(),
            tenure,
            user: None,
            multi_user: false,
            control: "/usr/bin/nvidia-cuda-mps-control".into(),
            name: "/usr/bin/nvidia-cuda-mps-control".into(),
            servers: "/usr/bin".into(),
            logs: base.join("logs"),
            settings: MpsSettings::default(),
        }
    }

    #[test]
    fn pipe_directory_of_a_user_is_emptied_before_each_start() {
        let scratch = tempfile::tempdir().unwrap();
        let place = TargetDir::of(scratch.path(), "g5d1b03a2");
        assert!(!place.is_locked() && place.spec().is_none());
        place.create(&spec(scratch.path(), 1)).unwrap();
        place.set_access(1, &BTreeSet::from([1000])).unwrap();
        fs::write(place.pipe(1).join("nvidia-cuda-mps-control.pid"), "4711").unwrap();
        std::os::unix::net::UnixListener::bind(place.pipe(1).join("control")).unwrap();
        // If the same user gets the directory again, old files are removed, and access is revoked until the daemon
        // serves.
        place.create(&spec(scratch.path(), 1)).unwrap();
        assert_eq!(fs::read_dir(place.pipe(1)).unwrap().count(), 0);
        assert_eq!(acl::users_with_access(&place.pipe(1)).unwrap(), BTreeSet::new());
        // Another user gets another pipe directory.
        place.create(&spec(scratch.path(), 2)).unwrap();
        assert!(!place.pipe(1).exists() && place.pipe(2).is_dir());
        assert_eq!(TargetDir::all(scratch.path()), [(place.clone(), spec(scratch.path(), 2))]);
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(place.dir()), mode(&place.dir().join("spec.json"))), (0o711, 0o600));
        assert!(!place.is_locked());
        let lock = place.lock().unwrap().unwrap();
        assert!(place.is_locked() && place.lock().unwrap().is_none());
        drop(lock);
        place.remove();
        assert!(!place.dir().exists());
    }

    /// Regression test: when gpushd was killed between two unlinks, an empty directory remained.
    #[test]
    fn directory_of_an_interrupted_removal_is_deleted() {
        let scratch = tempfile::tempdir().unwrap();
        let place = TargetDir::of(scratch.path(), "g5d1b03a2");
        place.create(&spec(scratch.path(), 1)).unwrap();
        // Test two states: gpushd was killed right after the rename, or during the removal.
        let half = scratch.path().join(".removed-g5d1b03a2");
        fs::rename(place.dir(), &half).unwrap();
        assert!(!place.dir().exists() && TargetDir::all(scratch.path()).is_empty());
        fs::remove_file(half.join("spec.json")).unwrap();
        sweep_removed(scratch.path());
        assert!(!half.exists());
        // A new target with the same name can be removed although the remains of an earlier removal
        // exist.
        fs::create_dir(&half).unwrap();
        place.create(&spec(scratch.path(), 1)).unwrap();
        place.remove();
        assert!(!half.exists() && !place.dir().exists());
        // The removal keeps a file of another program.
        fs::write(place.dir(), "").unwrap();
        place.remove();
        assert!(place.dir().is_file());
    }

    #[test]
    fn path_of_88_bytes_is_refused() {
        let base = |length: usize| PathBuf::from(format!("/{}", "x".repeat(length - 1)));
        // The path of a pipe directory is 18 bytes longer than the base: a slash, nine letters, a slash, seven digits.
        let most = LONGEST - 18;
        assert_eq!(TargetDir::of(&base(most), "g5d1b03a2").check_path_length(), Ok(()));
        let error = TargetDir::of(&base(most + 1), "g5d1b03a2").check_path_length().unwrap_err();
        assert!(error.causes[0].contains("88 bytes"), "{error:?}");
    }

    #[test]
    fn symbolic_link_is_not_used_as_target_directory() {
        let scratch = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("/tmp", scratch.path().join("g5d1b03a2")).unwrap();
        let place = TargetDir::of(scratch.path(), "g5d1b03a2");
        assert!(place.create(&spec(scratch.path(), 1)).is_err());
    }
}
