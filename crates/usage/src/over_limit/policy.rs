//! The policy of a rule, as it applies to one lease.

use gpush_api::OverLimitAction;

/// `over_limit` and `over_limit_grace` of a rule, as they apply to one lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OverLimitPolicy {
    /// Action for a lease above its limit.
    pub action: OverLimitAction,
    /// Time from the recorded notice to the end of the lease, in ms.
    pub grace_ms: u64,
    /// Whether the lease belongs to a Slurm job.
    pub is_slurm_job: bool,
    /// Whether the lease of a Slurm job may be ended.
    pub ends_slurm_jobs: bool,
}

impl OverLimitPolicy {
    /// Returns the action. For a Slurm job, `end` becomes `report`, unless the config permits `scancel`.
    #[must_use]
    pub fn action(&self) -> OverLimitAction {
        match self.action {
            OverLimitAction::End if self.is_slurm_job && !self.ends_slurm_jobs => OverLimitAction::Report,
            action => action,
        }
    }
}
