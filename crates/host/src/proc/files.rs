//! Executable and open files of a process.

use std::{
    ffi::OsStr,
    fs,
    os::unix::{ffi::OsStrExt, fs::MetadataExt},
    path::{Path, PathBuf},
};

use super::{AnyPid, positive};

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
    fs::read_link(format!("/proc/{}/exe", positive(pid)?)).ok()
}

/// Returns the identity of the file that a process executes.
pub fn executable_id(pid: impl AnyPid) -> Option<FileId> {
    fs::metadata(format!("/proc/{}/exe", positive(pid)?)).ok().map(|meta| FileId::of(&meta))
}

/// Returns the path of the file that a process executes, without ` (deleted)`.
pub fn program(pid: impl AnyPid) -> Option<PathBuf> {
    executable(pid).map(|path| undeleted(&path))
}

/// Returns the path of an open file of a process, without ` (deleted)`.
pub fn open_file(pid: impl AnyPid, fd: u32) -> Option<PathBuf> {
    fs::read_link(format!("/proc/{}/fd/{fd}", positive(pid)?)).ok().map(|path| undeleted(&path))
}

/// Returns metadata of an open file of a process.
pub fn open_file_metadata(pid: impl AnyPid, fd: u32) -> Option<fs::Metadata> {
    fs::metadata(format!("/proc/{}/fd/{fd}", positive(pid)?)).ok()
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
