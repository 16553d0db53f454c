//! The policy of a rule, and the deadlines that follow from it. All times are in milliseconds.

pub use gpush_api::IdleAction;

use crate::{judge::UseState, moment::Moment};

/// `[idle]`, as it applies to one lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IdlePolicy {
    /// Action for an unused lease.
    pub action: IdleAction,
    /// Time from the grant in which nothing counts as unused.
    pub start_grace_ms: u64,
    /// Unused time after which the action is due.
    pub after_ms: u64,
    /// Time without a process after which the action is due.
    pub empty_after_ms: u64,
    /// Times before the deadline at which gpushd warns the holder, in any order.
    pub warn_before_ms: Vec<u64>,
    /// Longest time for which a holder can keep an unused lease.
    pub max_keep_ms: u64,
    /// Whether the lease of a Slurm job may be ended.
    pub ends_slurm_jobs: bool,
}

impl Default for IdlePolicy {
    fn default() -> Self {
        const MINUTE_MS: u64 = 60_000;
        Self {
            action: IdleAction::Report,
            start_grace_ms: 60 * MINUTE_MS,
            after_ms: 240 * MINUTE_MS,
            empty_after_ms: 30 * MINUTE_MS,
            warn_before_ms: vec![60 * MINUTE_MS, 15 * MINUTE_MS],
            max_keep_ms: 480 * MINUTE_MS,
            ends_slurm_jobs: false,
        }
    }
}

/// The facts about a lease that the policy needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LeaseTerms {
    /// Time of the grant, as [`crate::ledger::LeaseFigures::begun`] has it.
    pub granted: Moment,
    /// Whether the lease belongs to a Slurm job.
    pub is_slurm_job: bool,
    /// Whether the config exempts the user, the group, the job or the rule.
    pub is_exempt: bool,
}

/// When the action for an unused lease is due.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IdleDeadline {
    /// Time of the action.
    pub at: Moment,
    /// Unused time that the deadline allows.
    pub span_ms: u64,
    /// Whether the deadline is the one for leases without a process.
    pub is_empty: bool,
}

impl IdlePolicy {
    /// Returns the action for a lease. For a Slurm job, `release` and `end` become `report`, unless the config permits
    /// `scancel`.
    #[must_use]
    pub fn action_for(&self, terms: LeaseTerms) -> IdleAction {
        match self.action {
            IdleAction::Release | IdleAction::End if terms.is_slurm_job && !self.ends_slurm_jobs => IdleAction::Report,
            action => action,
        }
    }

    /// Returns the deadline of a lease that is unused since `unused`, and in its present state since `since`. `kept` is
    /// the end of its keep.
    #[must_use]
    pub fn deadline(
        &self,
        terms: LeaseTerms,
        state: UseState,
        unused: Moment,
        since: Moment,
        kept: Option<Moment>,
    ) -> IdleDeadline {
        let grace = terms.granted.plus_ms(self.start_grace_ms);
        let from = |start: Moment| start.later(grace).later(kept.unwrap_or(start));
        let idle = from(unused).plus_ms(self.after_ms);
        let empty = from(since).plus_ms(self.empty_after_ms);
        if state == UseState::Empty && idle.ms_since(empty) > 0 {
            IdleDeadline { at: empty, span_ms: self.empty_after_ms, is_empty: true }
        } else {
            IdleDeadline { at: idle, span_ms: self.after_ms, is_empty: false }
        }
    }

    /// Returns the warnings before a deadline: those that are shorter than the time that it allows. There is always one.
    #[must_use]
    pub fn warnings(&self, deadline: IdleDeadline) -> Vec<u64> {
        let mut warnings: Vec<u64> =
            self.warn_before_ms.iter().copied().filter(|before| *before > 0 && *before < deadline.span_ms).collect();
        if warnings.is_empty() {
            warnings.push(deadline.span_ms / 2);
        }
        warnings.sort_unstable();
        warnings.dedup();
        warnings
    }
}
