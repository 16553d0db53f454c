//! Access to the file of a job: the user of the job can read the file, but does not own it.
//!
//! If a user owned the file, the user could make it writable and fill the file system. Then every
//! Prolog would fail, and Slurm would drain the node. So root owns the file, and its access list
//! allows the user to read it.

use std::{
    fs, io,
    os::unix::fs::{MetadataExt, chown},
    path::Path,
};

use gpush_host::acl;
use nix::{
    fcntl::{AT_FDCWD, AtFlags},
    unistd::{AccessFlags, faccessat, geteuid},
};

/// Allows a user to read a file of root. If the file system has no access lists, makes the user the
/// owner of the file.
pub(super) fn let_read(file: &Path, uid: u32) -> io::Result<()> {
    if acl::grant_read(file, uid)? { Ok(()) } else { chown(file, Some(uid), None) }
}

/// Returns whether the file belongs to a job of the user who runs this command.
pub(super) fn is_own(file: &Path) -> bool {
    let Ok(meta) = fs::metadata(file) else { return false };
    if meta.uid() == geteuid().as_raw() {
        // If the group bits are set, an access list names another user.
        return meta.mode() & 0o040 == 0;
    }
    faccessat(AT_FDCWD, file, AccessFlags::R_OK, AtFlags::AT_EACCESS).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fault: the user owned the file, and could fill `/run` with it. Then the Prologs of other
    /// jobs failed.
    #[test]
    fn user_of_the_job_does_not_own_its_file() {
        let dir = tempfile::tempdir().unwrap();
        let own = geteuid().as_raw();
        let path = dir.path().join("file");
        fs::write(&path, "text").unwrap();
        fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o400)).unwrap();
        assert!(is_own(&path));
        let_read(&path, 4_000_000).unwrap();
        let meta = fs::metadata(&path).unwrap();
        assert_eq!((meta.uid(), meta.mode() & 0o777), (own, 0o440), "the group bits are the mask of the list");
        assert!(!is_own(&path), "it is for another user");
    }
}
