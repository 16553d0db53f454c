//! Restrictions of waiting requests: a request that waits only for its own account must not keep capacity from others.

use std::collections::{BTreeMap, BTreeSet};

use gpush_api::{GpuIndex, LeaseId};
use gpush_core::schedule::Ticket;

use crate::state::{LeaseTable, OpenLease};

/// The restrictions of the waiting requests.
pub(super) type Restrictions = BTreeMap<Ticket, Restriction>;

/// What a waiting request may reserve.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Restriction {
    /// The GPUs on which the request may reserve capacity, by index; `None` if it may not reserve any.
    pub(super) only_on: Option<BTreeSet<GpuIndex>>,
    /// Why the request is restricted.
    pub(super) why: String,
    /// The restriction applies while all of these leases hold capacity.
    while_held: Vec<LeaseId>,
}

impl Restriction {
    /// The request exceeds a quota.
    pub(super) fn beyond_quota(why: String) -> Self {
        Self { only_on: None, why, while_held: Vec::new() }
    }

    /// Only leases of the account of the request block it, except perhaps on the GPUs `only_on`. `together` says whether all
    /// these leases must end, or one of them.
    pub(super) fn blocked_by_own(leases: Vec<LeaseId>, together: bool, only_on: Option<BTreeSet<GpuIndex>>) -> Self {
        let noun = if leases.len() > 1 && together { "leases" } else { "a lease" };
        let names: Vec<String> = leases.iter().map(LeaseId::to_string).collect();
        let names = names.join(if together { ", " } else { " or " });
        let uses = match leases.as_slice() {
            [one] => format!("; to use {one} now: `gpushctl run --lease {one} -- COMMAND`"),
            _ => String::new(),
        };
        let why = format!("waits only for {noun} of the same user ({names}), so it reserves no capacity{uses}");
        Self { only_on, why, while_held: leases }
    }

    /// Returns whether the restriction still applies.
    pub(super) fn applies(&self, table: &LeaseTable) -> bool {
        let is_held =
            |id: &LeaseId| table.get(*id).is_some_and(|lease: &OpenLease| lease.state.name().holds_capacity());
        self.while_held.iter().all(is_held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::leases::tests::record;

    /// Fault: after the blocking lease had ended, a new request got the capacity before the waiting request was considered
    /// again.
    #[test]
    fn restriction_ends_with_the_leases_that_block() {
        let mut table = LeaseTable::default();
        table.insert(record(1, 1000, "GPU-0"));
        table.insert(record(2, 1000, "GPU-1"));
        let both = Restriction::blocked_by_own(vec![LeaseId(1), LeaseId(2)], true, None);
        assert!(both.applies(&table) && both.why.contains("leases of the same user (L1, L2), so"), "{}", both.why);
        table.open.remove(&LeaseId(2));
        assert!(!both.applies(&table));
        let one = Restriction::blocked_by_own(vec![LeaseId(1), LeaseId(2)], false, None);
        assert!(one.why.contains("a lease of the same user (L1 or L2), so"), "{}", one.why);
        let own = Restriction::blocked_by_own(vec![LeaseId(2)], true, None);
        assert!(own.why.ends_with("; to use L2 now: `gpushctl run --lease L2 -- COMMAND`"), "{}", own.why);
        assert!(Restriction::beyond_quota("2 GPUs".to_owned()).applies(&table));
    }
}
