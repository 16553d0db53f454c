//! Uids that systemd-nsresourced gives to user namespaces for a time.
//!
//! Any user can have 256 such namespaces, each with 65,536 uids. nss-systemd names each of these uids `ns-NAME-OFFSET`, so
//! the user database knows them, but they are not users. They belong to the account of all unknown uids, because systemd
//! does not report their owner.

use gpush_locked::Locked;
use std::{
    collections::BTreeSet,
    sync::{Arc, MutexGuard},
};

/// The first and the last uid of containers: <https://systemd.io/UIDS-GIDS/>. A namespace has 65,536 of them, and the first
/// one is a multiple of 65,536.
const CONTAINERS: [u32; 2] = [0x8_0000, 0x6FFF_FFFF];

/// The first and the last dynamic uid. A namespace can also have only one uid, which is one of these.
const DYNAMIC: [u32; 2] = [61_184, 65_519];

/// Maximum number of namespaces that gpushd remembers.
const MOST_NAMESPACES: usize = 4096;

/// The ranges of namespaces. A handle, cheap to clone. Remembers the ranges, so that the other uids of a range need no
/// lookup.
#[derive(Debug, Clone, Default)]
pub(crate) struct TransientUids(Arc<Locked<BTreeSet<u32>>>);

impl TransientUids {
    /// Returns whether a uid with this name belongs to a namespace. Remembers its range.
    pub(crate) fn note(&self, uid: u32, name: &str) -> bool {
        let is_container = is_in(uid, CONTAINERS);
        let offset = if is_container { uid & 0xFFFF } else { 0 };
        let named = name.strip_prefix("ns-").and_then(|rest| rest.rsplit_once('-')?.1.parse().ok());
        let is_transient = named == Some(offset) && (is_container || is_in(uid, DYNAMIC));
        if is_transient && is_container {
            let mut ranges = self.ranges();
            if ranges.len() >= MOST_NAMESPACES {
                ranges.clear();
            }
            ranges.insert(uid >> 16);
        }
        is_transient
    }

    /// Returns whether a uid is in the range of a namespace that gpushd remembers.
    pub(crate) fn has(&self, uid: u32) -> bool {
        self.ranges().contains(&(uid >> 16))
    }

    fn ranges(&self) -> MutexGuard<'_, BTreeSet<u32>> {
        self.0.lock()
    }
}

fn is_in(uid: u32, [first, last]: [u32; 2]) -> bool {
    (first..=last).contains(&uid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_name_with_the_offset_of_the_uid_is_transient() {
        let uids = TransientUids::default();
        for (uid, name) in [
            (0x9_0007, "ns-1-8"),
            (0x9_0007, "alice"),
            (0x9_0007, "ns-7"),
            (1007, "ns-a-7"),
            (1000, "ns-a-0"),
            (0x7000_0000, "ns-a-0"),
        ] {
            assert!(!uids.note(uid, name), "{uid} {name}");
        }
        assert!(!uids.has(0x9_0007));
        assert!(uids.note(61_200, "ns-a-0") && !uids.has(61_201), "a namespace with one uid");
        assert!(uids.note(0x9_0007, "ns-my-box-7"));
        assert!(uids.has(0x9_FFFF) && !uids.has(0xA_0000));
    }
}
