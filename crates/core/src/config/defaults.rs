//! `[defaults]`: the lease keys of all rules that do not set them.

use gpush_api::{AtLeaseEnd, LeaseOwner, LeaseRequirement};

/// `[defaults]`
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RuleDefaults {
    /// Whether processes need a lease.
    pub lease: Option<LeaseRequirement>,
    /// What happens to the processes of a lease that ends.
    pub at_end: Option<AtLeaseEnd>,
    /// Who may request leases.
    pub owner: Option<LeaseOwner>,
}

impl RuleDefaults {
    /// Returns the keys with their values; `None` if the key is not set.
    pub(super) fn written(&self) -> [(&'static str, Option<&'static str>); 3] {
        let Self { lease, at_end, owner } = self;
        [
            ("lease", lease.map(LeaseRequirement::name)),
            ("at_end", at_end.map(AtLeaseEnd::name)),
            ("owner", owner.map(LeaseOwner::name)),
        ]
    }
}
