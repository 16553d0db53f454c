//! Who may read the file of a job: the user of the job, who does not own it.
//!
//! The owner of a file can make it writable. A user who owned a file here could fill the file system, and then no other
//! job could begin: Prolog would fail and Slurm would drain the node. So the file belongs to root, and its access list
//! (`acl(5)`) lets the user read it. The format of the list is in the kernel's `posix_acl_xattr.h`.

use std::{
    fs, io,
    os::unix::fs::{MetadataExt, chown},
    path::Path,
};

use nix::{
    fcntl::{AT_FDCWD, AtFlags},
    unistd::{AccessFlags, faccessat, geteuid},
};
use rustix::fs::{XattrFlags, setxattr};

/// The extended attribute with the list.
const ATTRIBUTE: &str = "system.posix_acl_access";

const VERSION: u32 = 2;
const OWNER: u16 = 0x01;
const USER: u16 = 0x02;
const GROUP: u16 = 0x04;
const MASK: u16 = 0x10;
const OTHERS: u16 = 0x20;
/// Id in entries that name no user or group.
const NO_ID: u32 = u32::MAX;

const READ: u16 = 0o4;
const NOTHING: u16 = 0;

/// Lets a user read a file that stays root's. On a file system without access lists the file becomes the user's.
pub(super) fn let_read(file: &Path, uid: u32) -> io::Result<()> {
    let entries = [
        (OWNER, READ, NO_ID),
        (USER, READ, uid),
        (GROUP, NOTHING, NO_ID),
        (MASK, READ, NO_ID),
        (OTHERS, NOTHING, NO_ID),
    ];
    let mut list = VERSION.to_le_bytes().to_vec();
    for (tag, permissions, id) in entries {
        list.extend(tag.to_le_bytes());
        list.extend(permissions.to_le_bytes());
        list.extend(id.to_le_bytes());
    }
    match setxattr(file, ATTRIBUTE, &list, XattrFlags::empty()) {
        Err(rustix::io::Errno::OPNOTSUPP) => chown(file, Some(uid), None),
        result => Ok(result?),
    }
}

/// Returns whether the file is for jobs of the calling user.
pub(super) fn is_own(file: &Path) -> bool {
    let Ok(meta) = fs::metadata(file) else { return false };
    if meta.uid() == geteuid().as_raw() {
        // The group bits show that an access list names another user.
        return meta.mode() & 0o040 == 0;
    }
    faccessat(AT_FDCWD, file, AccessFlags::R_OK, AtFlags::AT_EACCESS).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fault: the file belonged to the user, who could fill `/run` with it. Then Prologs of other jobs failed.
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
