//! Who besides its owner may go through a directory: a POSIX access list, as Linux keeps it in an
//! extended attribute.
//!
//! Only what is needed: some users may look into a directory and reach what is in it, nobody else may.
//! The bytes are those of `acl(5)` in the kernel's `posix_acl_xattr.h`: version 2, then entries of tag,
//! permissions and id, little-endian, sorted.

use std::{collections::BTreeSet, io, path::Path};

/// Where the kernel keeps it.
const ATTRIBUTE: &str = "system.posix_acl_access";

const VERSION: u32 = 2;
const OWNER: u16 = 0x01;
const USER: u16 = 0x02;
const GROUP: u16 = 0x04;
const MASK: u16 = 0x10;
const OTHERS: u16 = 0x20;
/// For entries that are nobody's in particular.
const NO_ID: u32 = u32::MAX;

const ALL: u16 = 0o7;
const LOOK: u16 = 0o5;
const NOTHING: u16 = 0;

/// Lets these users into a directory, and nobody else but its owner.
///
/// # Errors
/// When the file system keeps no access lists, or the directory is not ours.
pub fn admit(dir: &Path, uids: &BTreeSet<u32>) -> io::Result<()> {
    rustix::fs::setxattr(dir, ATTRIBUTE, &list(uids), rustix::fs::XattrFlags::empty())?;
    if admitted(dir)? == *uids {
        return Ok(());
    }
    Err(io::Error::other("the access list that was set is not the one that is there"))
}

/// Who is let into a directory besides its owner.
///
/// # Errors
/// When it can't be read.
pub fn admitted(dir: &Path) -> io::Result<BTreeSet<u32>> {
    let mut bytes = [0; 4096];
    match rustix::fs::getxattr(dir, ATTRIBUTE, &mut bytes) {
        Ok(read) => users(&bytes[..read]).ok_or_else(|| io::Error::other("its access list can't be read")),
        // None was ever set.
        Err(rustix::io::Errno::NODATA) => Ok(BTreeSet::new()),
        Err(error) => Err(error.into()),
    }
}

fn list(uids: &BTreeSet<u32>) -> Vec<u8> {
    let named = uids.iter().map(|uid| (USER, LOOK, *uid));
    let entries = std::iter::once((OWNER, ALL, NO_ID)).chain(named).chain([(GROUP, NOTHING, NO_ID)]);
    let mask = if uids.is_empty() { NOTHING } else { LOOK };
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
        Some((tag == USER && permissions & LOOK == LOOK).then_some(id))
    };
    rest.chunks(8).map(entry).collect::<Option<Vec<_>>>().map(|uids| uids.into_iter().flatten().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_admitted_is_read_back() {
        let scratch = tempfile::tempdir().unwrap();
        assert_eq!(admitted(scratch.path()).unwrap(), BTreeSet::new());
        for uids in [BTreeSet::from([1000]), BTreeSet::from([1, 70_000, u32::MAX - 1]), BTreeSet::new()] {
            admit(scratch.path(), &uids).unwrap();
            assert_eq!(admitted(scratch.path()).unwrap(), uids);
        }
        assert!(admit(&scratch.path().join("none"), &BTreeSet::new()).is_err());
    }

    #[test]
    fn what_is_no_list_is_told() {
        assert_eq!(users(b""), None);
        assert_eq!(users(&[2, 0, 0, 0, 1]), None);
        assert_eq!(users(&[3, 0, 0, 0]), None);
    }
}
