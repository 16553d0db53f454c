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
}

impl LeaseRequirement {
    /// Returns the name in the config and in messages.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Optional => "optional",
            Self::Required => "required",
        }
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
}

impl LeaseTerms {
    /// Returns whether a process needs a lease on a target of the rule. `through_mps` says whether
    /// the target is shared through MPS.
    #[must_use]
    pub fn requirement_for(&self, through_mps: bool) -> LeaseRequirement {
        let default = if through_mps { LeaseRequirement::Required } else { LeaseRequirement::Optional };
        self.requirement.unwrap_or(default)
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
