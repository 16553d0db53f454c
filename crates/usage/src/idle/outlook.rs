//! The due time of the action for an unused lease, for `lease show` and lists.

use super::{
    machine::{IdleEvent, IdleMachine, IdleStage},
    policy::{IdleAction, IdlePolicy, LeaseTerms},
};
use crate::{judge::UseState, moment::Moment};

/// The action for an unused lease, if it stays unused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IdleOutlook {
    /// The action.
    pub action: IdleAction,
    /// `Idle` or `Empty`.
    pub state: UseState,
    /// Start of the unused time.
    pub unused_since: Moment,
    /// Earliest time of the action. The time of a report may have passed.
    pub due: Moment,
    /// Whether the holder was warned of this unused time.
    pub is_warned: bool,
}

impl IdleMachine {
    /// Returns the outlook for a lease with this observation; `None` if the lease is used or exempt, or if its use is
    /// not known.
    #[must_use]
    pub fn outlook(
        &self,
        observed: &IdleEvent,
        policy: &IdlePolicy,
        terms: LeaseTerms,
        now: Moment,
    ) -> Option<IdleOutlook> {
        let &IdleEvent::Observed { state, since, unused_since: Some(unused_since) } = observed else { return None };
        if terms.is_exempt || self.keep(now).is_some() {
            return None;
        }
        let deadline = policy.deadline(terms, state, unused_since, since, self.kept_until());
        let action = policy.action_for(terms);
        let end = self.end(deadline, &policy.warnings(deadline), now);
        let (due, is_warned) = match (action, self.stage()) {
            (IdleAction::Report, _) => (deadline.at, false),
            (_, IdleStage::Warned { recorded, .. }) => (end, recorded.is_some()),
            (_, IdleStage::Watching) => (end, false),
            (_, IdleStage::Done { .. }) => (deadline.at, true),
        };
        Some(IdleOutlook { action, state, unused_since, due, is_warned })
    }
}
