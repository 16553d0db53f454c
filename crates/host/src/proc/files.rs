//! Executable and open files of a process.

use std::{
    ffi::OsStr,
    fs,
    os::unix::{ffi::OsStrExt, fs::MetadataExt},
    path::{Path, PathBuf},
};

use super::{AnyPid, positive, threads, time_limit};

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

/// Returns the path of the file that a process executes, as the kernel reports it. If the file was deleted or replaced,
/// the path ends with ` (deleted)`.
pub fn executable(pid: impl AnyPid) -> Option<PathBuf> {
    of_executable(pid, |exe| fs::read_link(exe).ok())
}

/// Returns the identity of the file that a process executes. Asks the file system of the file, with a
/// [time limit](time_limit). Blocks, so call it on a blocking thread.
pub fn executable_id(pid: impl AnyPid) -> Option<FileId> {
    let pid = positive(pid)?;
    let read = move || of_executable(pid, |exe| fs::metadata(exe).ok()).map(|meta| FileId::of(&meta));
    time_limit::within_limit(pid, read).ok()?
}

/// Reads something from `/proc/PID/exe`. All threads of a process execute the same file.
fn of_executable<T>(pid: impl AnyPid, read: impl Fn(&Path) -> Option<T>) -> Option<T> {
    let of_first = read(Path::new(&format!("/proc/{}/exe", positive(pid)?)));
    of_first.or_else(|| threads::of_living(pid, |dir| Ok(read(&dir.join("exe")))).ok().flatten())
}

/// Returns the path of the file that a process executes, without ` (deleted)`.
pub fn program(pid: impl AnyPid) -> Option<PathBuf> {
    executable(pid).map(|path| undeleted(&path))
}

/// Returns the path of an open file of a process, without ` (deleted)`.
pub fn open_file(pid: impl AnyPid, fd: u32) -> Option<PathBuf> {
    fs::read_link(format!("/proc/{}/fd/{fd}", positive(pid)?)).ok().map(|path| undeleted(&path))
}

/// Returns metadata of an open file of a process. Asks the file system of the file, with a [time limit](time_limit).
/// Blocks, so call it on a blocking thread.
pub fn open_file_metadata(pid: impl AnyPid, fd: u32) -> Option<fs::Metadata> {
    let pid = positive(pid)?;
    time_limit::within_limit(pid, move || fs::metadata(format!("/proc/{pid}/fd/{fd}")).ok()).ok()?
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
    }
}
