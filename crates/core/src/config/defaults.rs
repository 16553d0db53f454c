//! `[defaults]`: the lease keys of all rules that do not set them.

use gpush_api::{AtLeaseEnd, EnforceMissing, LeaseOwner, LeaseRequirement};

/// `[defaults]`
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RuleDefaults {
    /// Whether processes need a lease.
    pub lease: Option<LeaseRequirement>,
    /// What gpushd does with requests while the host does not enforce leases.
    pub enforce_missing: Option<EnforceMissing>,
    /// What happens to the processes of a lease that ends.
    pub at_end: Option<AtLeaseEnd>,
    /// Who may request leases.
    pub owner: Option<LeaseOwner>,
}

impl RuleDefaults {
    /// Returns the defaults of a file with `enforce = true`, which has the lowest precedence.
    pub(super) fn or_enforced(self) -> Self {
        Self {
            lease: self.lease.or(Some(LeaseRequirement::Enforced)),
            at_end: self.at_end.or(Some(AtLeaseEnd::End)),
            ..self
        }
    }

    /// Returns the keys with their values; `None` if the key is not set.
    pub(super) fn written(&self) -> [(&'static str, Option<&'static str>); 4] {
        let Self { lease, enforce_missing, at_end, owner } = self;
        [
            ("lease", lease.map(LeaseRequirement::name)),
            ("enforce_missing", enforce_missing.map(EnforceMissing::name)),
            ("at_end", at_end.map(AtLeaseEnd::name)),
            ("owner", owner.map(LeaseOwner::name)),
        ]
    }
}
