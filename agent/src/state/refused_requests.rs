//! The refused requests of each user, until they are recorded.

use std::collections::BTreeMap;

use gpush_api::LeaseKind;
use gpush_locked::Locked;

/// Maximum number of entries between two records. There is one for each user and kind.
const MOST: usize = 10_000;

/// The refused requests since the last record: the uid and the kind of the share, and their number.
pub(crate) type RefusedByUser = BTreeMap<(u32, Option<LeaseKind>), u64>;

/// Counts the refused requests.
#[derive(Debug, Default)]
pub(crate) struct RefusedRequests(Locked<RefusedByUser>);

impl RefusedRequests {
    /// Counts a request that was refused or cancelled, or that has timed out.
    pub(crate) fn note(&self, uid: u32, kind: Option<LeaseKind>) {
        let mut counts = self.0.lock();
        if counts.len() < MOST || counts.contains_key(&(uid, kind)) {
            *counts.entry((uid, kind)).or_default() += 1;
        }
    }

    /// Returns the counts.
    pub(crate) fn counts(&self) -> RefusedByUser {
        self.0.lock().clone()
    }

    /// Takes the counts: from now on, requests count for the next record.
    pub(crate) fn take(&self) -> RefusedByUser {
        std::mem::take(&mut self.0.lock())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refused_requests_count_by_user_and_kind_until_they_are_taken() {
        let refused = RefusedRequests::default();
        for (uid, kind) in [(1000, Some(LeaseKind::Mig)), (1000, Some(LeaseKind::Mig)), (1001, None)] {
            refused.note(uid, kind);
        }
        let expected = RefusedByUser::from([((1000, Some(LeaseKind::Mig)), 2), ((1001, None), 1)]);
        assert_eq!(refused.counts(), expected);
        assert_eq!(refused.take(), expected);
        assert_eq!(refused.take(), RefusedByUser::new());
    }

    #[test]
    fn many_users_do_not_fill_the_memory() {
        let refused = RefusedRequests::default();
        (0..2 * MOST).for_each(|uid| refused.note(u32::try_from(uid).unwrap(), None));
        assert_eq!(refused.counts().len(), MOST);
    }
}
