//! Decides how recovery continues an interrupted operation.
//!
//! ```text
//! all as planned, and not failed before ─────────────────────► Done
//! same boot, not being rolled back, no other program has changed
//!   a GPU, and what remains is feasible ─────────────────────► Forward
//! all as before ─────────────────────────────────────────────► RolledBack
//! another boot: the instances are gone ──────────────────────► Rebooted
//! otherwise ─────────────────────────────────────────────────► Back
//! ```
//!
//! The first line that applies determines the action.

/// What is known about an interrupted operation after its GPUs were read.
#[derive(Debug, Clone, Copy)]
pub(super) struct RecoveryFacts {
    /// The operation began on this boot.
    pub(super) same_boot: bool,
    /// The operation was being rolled back when gpushd exited, or the operation has been cancelled
    /// since.
    pub(super) rolling_back: bool,
    /// The journal has an error of the operation.
    pub(super) has_failed: bool,
    /// All GPUs were read, and the remaining steps are feasible on each.
    pub(super) plannable: bool,
    /// No GPU has remaining steps.
    pub(super) nothing_remains: bool,
    /// Every GPU is as it was before the operation.
    pub(super) as_before: bool,
    /// Another program has created an instance on one of the operation's GPUs.
    pub(super) changed_by_others: bool,
}

/// What recovery does with an interrupted operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RecoveryAction {
    /// All GPUs are as planned. The operation ends as done.
    Done,
    /// The remaining steps are executed.
    Forward,
    /// All GPUs are as before. The operation ends as rolled back.
    RolledBack,
    /// The host was rebooted, so the created instances are gone. The operation ends as failed.
    Rebooted,
    /// The GPUs are restored to their state before the operation.
    Back,
}

impl RecoveryFacts {
    /// Returns what recovery does.
    pub(super) fn action(self) -> RecoveryAction {
        // If gpushd ended during the rollback of a failed operation, the rollback continues, even
        // if no step remains.
        let failed_before = self.has_failed && self.rolling_back;
        if self.plannable && self.nothing_remains && !failed_before {
            RecoveryAction::Done
        } else if self.plannable && self.same_boot && !self.rolling_back && !self.changed_by_others {
            RecoveryAction::Forward
        } else if self.as_before {
            RecoveryAction::RolledBack
        } else if !self.same_boot {
            RecoveryAction::Rebooted
        } else {
            RecoveryAction::Back
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns every combination of facts.
    fn all() -> impl Iterator<Item = RecoveryFacts> {
        (0_u32..1 << 7).map(|bits| {
            let bit = |n: u32| bits >> n & 1 == 1;
            RecoveryFacts {
                same_boot: bit(0),
                rolling_back: bit(1),
                has_failed: bit(2),
                plannable: bit(3),
                nothing_remains: bit(4),
                as_before: bit(5),
                changed_by_others: bit(6),
            }
        })
    }

    #[test]
    fn nothing_is_executed_on_another_boot() {
        let actions = all().filter(|facts| !facts.same_boot).map(RecoveryFacts::action);
        assert!(actions.into_iter().all(|action| !matches!(action, RecoveryAction::Forward | RecoveryAction::Back)));
    }

    #[test]
    fn recovery_goes_forward_only_with_a_plan_and_no_foreign_change() {
        for facts in all().filter(|facts| facts.action() == RecoveryAction::Forward) {
            assert!(facts.plannable && !facts.rolling_back && !facts.changed_by_others, "{facts:?}");
        }
    }

    #[test]
    fn rollback_skips_gpus_that_are_unchanged() {
        for facts in all().filter(|facts| facts.action() == RecoveryAction::Back) {
            assert!(!facts.as_before && facts.same_boot, "{facts:?}");
        }
    }

    #[test]
    fn recovery_is_done_when_nothing_remains_and_no_rollback_runs() {
        for facts in all() {
            let done = facts.plannable && facts.nothing_remains && !(facts.has_failed && facts.rolling_back);
            assert_eq!(facts.action() == RecoveryAction::Done, done, "{facts:?}");
        }
    }
}
