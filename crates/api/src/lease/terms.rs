//! The lease settings of a config rule.

use serde::{Deserialize, Serialize};

/// Whether processes need a lease to use a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum LeaseRequirement {
    /// Processes may run without a lease.
    Optional,
    /// Processes need a lease. `[processes]` in the config says what gpushd does about processes
    /// without one.
    Required,
    /// Processes need a lease, and the kernel denies the GPU to login sessions, except to the processes of a lease. This
    /// needs a part of the host that `gpushctl enforce on` installs.
    Enforced,
}

impl LeaseRequirement {
    /// Returns the name in the config and in messages.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Optional => "optional",
            Self::Required => "required",
            Self::Enforced => "enforced",
        }
    }

    /// Returns whether processes need a lease.
    #[must_use]
    pub fn needs_lease(self) -> bool {
        match self {
            Self::Optional => false,
            Self::Required | Self::Enforced => true,
        }
    }
}

/// What gpushd does with requests for GPUs whose rule says `enforced`, while the host does not enforce it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum EnforceMissing {
    /// gpushd grants no leases of the GPUs.
    #[default]
    Refuse,
    /// gpushd grants leases as with `required`.
    Grant,
}

impl EnforceMissing {
    /// Returns the name in the config and in messages.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Refuse => "refuse",
            Self::Grant => "grant",
        }
    }

    #[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
    fn is_refuse(&self) -> bool {
        *self == Self::Refuse
    }
}

/// What happens to the processes of a lease that expires or is revoked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum AtLeaseEnd {
    /// They may run until they finish. Until then, the lease is in the state `releasing`.
    #[default]
    Report,
    /// gpushd ends them with SIGTERM, and with SIGKILL after the grace period.
    End,
}

impl AtLeaseEnd {
    /// Returns the name in the config and in messages.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Report => "report",
            Self::End => "end",
        }
    }
}

/// Who may request leases on the GPUs of a rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum LeaseOwner {
    /// Every user, within the quotas.
    #[default]
    Users,
    /// Only Slurm's hooks, for the users of jobs.
    Slurm,
}

impl LeaseOwner {
    /// Returns the name in the config and in messages.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Users => "users",
            Self::Slurm => "slurm",
        }
    }
}

/// The lease settings of a config rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct LeaseTerms {
    /// Whether processes need a lease. If absent, processes need a lease only on targets that are
    /// shared through MPS.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requirement: Option<LeaseRequirement>,
    /// What happens to the processes of a lease that expires or is revoked.
    pub at_end: AtLeaseEnd,
    /// Who may request leases.
    pub owner: LeaseOwner,
    /// What gpushd does with requests while the host does not enforce leases. It matters only with the requirement
    /// `enforced`.
    #[serde(default, skip_serializing_if = "EnforceMissing::is_refuse")]
    pub enforce_missing: EnforceMissing,
}

impl LeaseTerms {
    /// Returns whether a process needs a lease on a target of the rule. `through_mps` says whether
    /// the target is shared through MPS.
    #[must_use]
    pub fn requirement_for(&self, through_mps: bool) -> LeaseRequirement {
        let default = if through_mps { LeaseRequirement::Required } else { LeaseRequirement::Optional };
        self.requirement.unwrap_or(default)
    }

    /// Returns whether the kernel must deny the GPUs of the rule to processes without a lease.
    #[must_use]
    pub fn is_enforced(&self) -> bool {
        self.requirement == Some(LeaseRequirement::Enforced)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lease_requirement_default_depends_on_mps() {
        let terms = LeaseTerms::default();
        assert_eq!(terms.requirement_for(true), LeaseRequirement::Required);
        assert_eq!(terms.requirement_for(false), LeaseRequirement::Optional);
        let optional = LeaseTerms { requirement: Some(LeaseRequirement::Optional), ..terms };
        assert_eq!(optional.requirement_for(true), LeaseRequirement::Optional);
    }
}
