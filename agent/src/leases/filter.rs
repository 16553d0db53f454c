//! Which leases a list has: those of a holder, and those of a Slurm job.

use gpush_api::LeaseBinding;

use super::Leases;
use crate::requests::caller::Caller;

/// The leases in a list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Whose {
    /// All leases that the caller may see.
    All,
    /// The leases of the caller, and those of the caller's subordinate uids.
    Caller,
    /// The leases of this uid, and those of its subordinate uids.
    Holder(u32),
}

/// A selection of leases.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LeaseFilter {
    pub(crate) whose: Whose,
    /// Only leases of the Slurm job with this id.
    pub(crate) job: Option<u32>,
}

impl LeaseFilter {
    /// Returns whether the leases of a holder are selected. Until the name service has answered, those of subordinate uids
    /// are not.
    pub(super) fn has_holder(self, leases: &Leases, caller: &Caller, holder: u32) -> bool {
        let accounts = leases.handles.context.users.accounts();
        match self.whose {
            Whose::All => true,
            Whose::Caller => is_of_caller(leases, caller, holder),
            Whose::Holder(uid) => uid == holder || accounts.last_owns(uid, holder) == Ok(true),
        }
    }

    pub(super) fn has_job(self, binding: &LeaseBinding) -> bool {
        self.job.is_none_or(|wanted| matches!(binding, LeaseBinding::Job { job, .. } if *job == wanted))
    }
}

/// Returns whether `holder` is the caller, or a known subordinate uid of the caller. Until the name service has answered,
/// returns `false` for subordinate uids.
pub(super) fn is_of_caller(leases: &Leases, caller: &Caller, holder: u32) -> bool {
    caller.holds(holder) || leases.handles.context.users.accounts().last_owns(caller.uid(), holder) == Ok(true)
}
