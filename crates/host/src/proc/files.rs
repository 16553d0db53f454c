//! Executable and open files of a process.

use std::{
    ffi::OsStr,
    fs, io,
    os::unix::{ffi::OsStrExt, fs::MetadataExt},
    path::{Path, PathBuf},
};

use rustix::fs::{AtFlags, CWD, FileType, StatxFlags, makedev};

use super::{AnyPid, positive, stat::stat_if_alive, threads, time_limit};

/// The suffix that `/proc` adds to the path of a file that was deleted or replaced.
const DELETED: &[u8] = b" (deleted)";

/// Device and inode of a file. This pair identifies the file even if its path later leads to
/// another file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileId {
    /// Device number.
    pub device: u64,
    /// Inode number.
    pub inode: u64,
}

impl FileId {
    /// Returns the identity of the file that this metadata describes.
    pub fn of(meta: &fs::Metadata) -> Self {
        Self { device: meta.dev(), inode: meta.ino() }
    }
}

/// The status of a file that a process has opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileStatus {
    /// Identity of the file.
    pub id: FileId,
    /// Uid of its owner.
    pub owner: u32,
    /// Whether it is a regular file.
    pub is_regular: bool,
}

impl FileStatus {
    /// Takes the status from the kernel's cache if possible, so that a file system of a user (FUSE) cannot block gpushd.
    fn of(link: &Path) -> io::Result<Self> {
        let status = rustix::fs::statx(CWD, link, AtFlags::STATX_DONT_SYNC, StatxFlags::BASIC_STATS)?;
        let device = makedev(status.stx_dev_major, status.stx_dev_minor);
        Ok(Self {
            id: FileId { device, inode: status.stx_ino },
            owner: status.stx_uid,
            is_regular: FileType::from_raw_mode(status.stx_mode.into()).is_file(),
        })
    }
}

/// Returns the path of the file that a process executes, as the kernel reports it. If the file was deleted or replaced,
/// the path ends with ` (deleted)`.
pub fn executable(pid: impl AnyPid) -> Option<PathBuf> {
    of_executable(pid, |exe| fs::read_link(exe).ok())
}

/// Returns the identity of the file that a process executes. Blocks if a network file system does not answer.
pub fn executable_id(pid: impl AnyPid) -> Option<FileId> {
    of_executable(pid, |exe| FileStatus::of(exe).ok()).map(|status| status.id)
}

/// Does the same as [`executable_id`], with a [time limit](time_limit). Call it on a blocking thread.
///
/// # Errors
/// The file system does not answer in time, or a thread cannot be started.
pub fn executable_id_in_time(pid: impl AnyPid) -> io::Result<Option<FileId>> {
    let Some(pid) = positive(pid) else { return Ok(None) };
    time_limit::within_limit(pid, move || executable_id(pid))
}

/// Reads something from `/proc/PID/exe`. If the first thread has ended, reads it from another thread, because all
/// threads of a process execute the same file.
fn of_executable<T>(pid: impl AnyPid, read: impl Fn(&Path) -> Option<T>) -> Option<T> {
    let of_first = read(Path::new(&format!("/proc/{}/exe", positive(pid)?)));
    of_first.or_else(|| threads::of_living(pid, |dir| Ok(read(&dir.join("exe")))).ok().flatten())
}

/// Returns the path of the file that a process executes, without ` (deleted)`.
pub fn program(pid: impl AnyPid) -> Option<PathBuf> {
    executable(pid).map(|path| undeleted(&path))
}

/// Returns whether a process is executing a new program that the kernel has not loaded completely. Until the program is
/// loaded, the environment of the process is empty. Returns `false` if gpushd is not permitted to see this.
pub fn is_executing(pid: impl AnyPid) -> bool {
    // The kernel sets the address of the code last.
    let is_loading = stat_if_alive(pid).is_some_and(|stat| stat.startcode == 0);
    // A process that ends has no memory, and so no program.
    is_loading && has_program(pid)
}

/// Returns whether the first thread of a process has memory with a program, and gpushd may see that program.
fn has_program(pid: impl AnyPid) -> bool {
    positive(pid).is_some_and(|pid| fs::read_link(format!("/proc/{pid}/exe")).is_ok())
}

/// Returns the path of an open file of a process, without ` (deleted)`.
pub fn open_file(pid: impl AnyPid, fd: u32) -> Option<PathBuf> {
    fs::read_link(format!("/proc/{}/fd/{fd}", positive(pid)?)).ok().map(|path| undeleted(&path))
}

/// Returns the status of an open file of a process. Blocks if a network file system does not answer.
pub fn open_file_status(pid: impl AnyPid, fd: u32) -> Option<FileStatus> {
    FileStatus::of(Path::new(&format!("/proc/{}/fd/{fd}", positive(pid)?))).ok()
}

/// Returns the identity of the regular file that a process sees at an absolute path; `None` if there is none. Has a
/// [time limit](time_limit), because the path may be on a file system of the user. Call it on a blocking thread.
///
/// # Errors
/// The file system does not answer in time, or a thread cannot be started.
pub fn visible_file(pid: impl AnyPid, path: &Path) -> io::Result<Option<FileId>> {
    let (Some(pid), Ok(path)) = (positive(pid), path.strip_prefix("/")) else { return Ok(None) };
    let path = PathBuf::from(format!("/proc/{pid}/root")).join(path);
    let status = time_limit::within_limit(pid, move || FileStatus::of(&path).ok())?;
    Ok(status.filter(|status| status.is_regular).map(|status| status.id))
}

/// Returns the identity of the file at a path. Has a [time limit](time_limit), because a network file system may not
/// answer. Call it on a blocking thread.
///
/// # Errors
/// The file cannot be looked up, the file system does not answer in time, or a thread cannot be started.
pub fn file_id_in_time(path: &Path) -> io::Result<FileId> {
    let file = path.to_owned();
    time_limit::file_within_limit(path, move || FileStatus::of(&file))?.map(|status| status.id)
}

fn undeleted(path: &Path) -> PathBuf {
    let bytes = path.as_os_str().as_bytes();
    OsStr::from_bytes(bytes.strip_suffix(DELETED).unwrap_or(bytes)).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deleted_file_is_given_by_the_path_that_it_had() {
        assert_eq!(undeleted(Path::new("/run/g1/lock (deleted)")), Path::new("/run/g1/lock"));
        assert_eq!(undeleted(Path::new("/run/g1/lock")), Path::new("/run/g1/lock"));
    }

    #[test]
    fn own_executable_is_the_current_one() {
        let (me, path) = (std::process::id(), std::env::current_exe().unwrap());
        assert_eq!((program(me).as_deref(), executable(me).as_deref()), (Some(&*path), Some(&*path)));
        assert_eq!(executable_id(me), Some(FileId::of(&fs::metadata(path).unwrap())));
        assert_eq!((executable(i32::MAX), open_file(-1, 0)), (None, None));
        assert_eq!(executable_id_in_time(me).unwrap(), executable_id(me));
        assert_eq!(visible_file(me, &std::env::current_exe().unwrap()).unwrap(), executable_id(me));
        assert_eq!(file_id_in_time(&std::env::current_exe().unwrap()).ok(), executable_id(me));
        assert_eq!(file_id_in_time(Path::new("/none")).unwrap_err().kind(), io::ErrorKind::NotFound);
        for path in ["/proc", "/none", "Cargo.toml"] {
            assert_eq!(visible_file(me, Path::new(path)).unwrap(), None, "{path}");
        }
    }

    #[test]
    fn status_of_an_open_file_is_that_of_the_file() {
        use std::os::fd::AsRawFd;
        let file = tempfile::tempfile().unwrap();
        let (me, fd) = (std::process::id(), file.as_raw_fd().cast_unsigned());
        let owner = nix::unistd::geteuid().as_raw();
        let expected = FileStatus { id: FileId::of(&file.metadata().unwrap()), owner, is_regular: true };
        assert_eq!(open_file_status(me, fd), Some(expected));
        assert_eq!(open_file_status(i32::MAX, 0), None);
    }
}
