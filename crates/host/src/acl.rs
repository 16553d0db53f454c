//! POSIX access lists (`acl(5)`): which users may enter a directory or read a file, in addition to the owner.
//!
//! Linux stores the list in an extended attribute. The kernel's `posix_acl_xattr.h` defines the format of this
//! attribute: version 2, then sorted entries of tag, permissions and id, little-endian. nix does not support extended
//! attributes, and the crates for access lists link libacl. So this module uses `rustix`.

use std::{collections::BTreeSet, io, path::Path};

use rustix::fs::XattrFlags;

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

const ALL: u16 = 0o7;
const READ: u16 = 0o4;
const READ_AND_ENTER: u16 = 0o5;
const NOTHING: u16 = 0;

/// Maximum size of an extended attribute on Linux (`XATTR_SIZE_MAX`), in bytes. A list of this size has about 8,000 users.
const LARGEST: usize = 64 << 10;

/// Lets the owner and these users, and no other users, enter and list a directory.
///
/// # Errors
/// The file system has no access lists, or the directory belongs to another user.
pub fn grant_access(dir: &Path, uids: &BTreeSet<u32>) -> io::Result<()> {
    rustix::fs::setxattr(dir, ATTRIBUTE, &list(ALL, READ_AND_ENTER, uids), XattrFlags::empty())?;
    if users_with_access(dir)? == *uids {
        return Ok(());
    }
    Err(io::Error::other("the access list of the directory differs from the one that gpushd set"))
}

/// Returns the users that may enter a directory, in addition to its owner.
///
/// # Errors
/// The access list cannot be read.
pub fn users_with_access(dir: &Path) -> io::Result<BTreeSet<u32>> {
    let mut bytes = vec![0; LARGEST];
    match rustix::fs::getxattr(dir, ATTRIBUTE, &mut bytes) {
        Ok(read) => users(&bytes[..read])
            .ok_or_else(|| io::Error::other("the access list of the directory has an unknown format")),
        // The directory has no access list.
        Err(rustix::io::Errno::NODATA) => Ok(BTreeSet::new()),
        Err(error) => Err(error.into()),
    }
}

/// Lets the owner and one other user read a file, and lets neither of them write it. Returns false
/// if the file system has no access lists.
///
/// # Errors
/// The file belongs to another user, or does not exist.
pub fn grant_read(file: &Path, uid: u32) -> io::Result<bool> {
    match rustix::fs::setxattr(file, ATTRIBUTE, &list(READ, READ, &BTreeSet::from([uid])), XattrFlags::empty()) {
        Ok(()) => Ok(true),
        Err(rustix::io::Errno::OPNOTSUPP) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Returns a list that gives the permissions `owner` to the owner and `others` to each of the
/// users.
fn list(owner: u16, others: u16, uids: &BTreeSet<u32>) -> Vec<u8> {
    let named = uids.iter().map(|uid| (USER, others, *uid));
    let entries = std::iter::once((OWNER, owner, NO_ID)).chain(named).chain([(GROUP, NOTHING, NO_ID)]);
    let mask = if uids.is_empty() { NOTHING } else { others };
    let mut bytes = VERSION.to_le_bytes().to_vec();
    for (tag, permissions, id) in entries.chain([(MASK, mask, NO_ID), (OTHERS, NOTHING, NO_ID)]) {
        bytes.extend(tag.to_le_bytes());
        bytes.extend(permissions.to_le_bytes());
        bytes.extend(id.to_le_bytes());
    }
    bytes
}

fn users(bytes: &[u8]) -> Option<BTreeSet<u32>> {
    let (version, rest) = bytes.split_first_chunk::<4>()?;
    if u32::from_le_bytes(*version) != VERSION || !rest.len().is_multiple_of(8) {
        return None;
    }
    let entry = |entry: &[u8]| {
        let (tag, rest) = entry.split_first_chunk::<2>()?;
        let (permissions, id) = rest.split_first_chunk::<2>()?;
        let (tag, permissions) = (u16::from_le_bytes(*tag), u16::from_le_bytes(*permissions));
        let id = u32::from_le_bytes(id.try_into().ok()?);
        Some((tag == USER && permissions & READ_AND_ENTER == READ_AND_ENTER).then_some(id))
    };
    rest.chunks(8).map(entry).collect::<Option<Vec<_>>>().map(|uids| uids.into_iter().flatten().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_in_access_list_are_read_back() {
        let scratch = tempfile::tempdir().unwrap();
        assert_eq!(users_with_access(scratch.path()).unwrap(), BTreeSet::new());
        for uids in [BTreeSet::from([1000]), BTreeSet::from([1, 70_000, u32::MAX - 1]), BTreeSet::new()] {
            grant_access(scratch.path(), &uids).unwrap();
            assert_eq!(users_with_access(scratch.path()).unwrap(), uids);
        }
        assert!(grant_access(&scratch.path().join("none"), &BTreeSet::new()).is_err());
    }

    /// Fault: gpushd read at most 4096 bytes of a list, so a list of 511 users could not be read.
    #[test]
    fn access_list_of_5000_users_is_read_back() {
        // The directories of MPS daemons are in /run, which is a tmpfs. ext4 stores only small lists.
        let Ok(scratch) = tempfile::tempdir_in("/dev/shm") else {
            return println!("SKIPPED a list of 5,000 users: no tmpfs in /dev/shm");
        };
        let uids: BTreeSet<u32> = (10_000..15_000).collect();
        match grant_access(scratch.path(), &uids) {
            Err(error) if error.raw_os_error() == Some(nix::libc::ENOSPC) => {
                println!("SKIPPED a list of 5,000 users: the file system of /dev/shm does not store it");
            }
            result => {
                result.unwrap();
                assert_eq!(users_with_access(scratch.path()).unwrap(), uids);
            }
        }
    }

    #[test]
    fn malformed_access_list_is_refused() {
        assert_eq!(users(b""), None);
        assert_eq!(users(&[2, 0, 0, 0, 1]), None);
        assert_eq!(users(&[3, 0, 0, 0]), None);
    }
}
