//! The observation of a lease by the idle policy. Only a time in which every sample is present and shows no work by
//! strong evidence counts as unused. A single missing sample can hide the work of a server between two requests.

use super::machine::IdleEvent;
use crate::{judge::UseState, ledger::LeaseFigures};

impl IdleEvent {
    /// Returns the observation of a lease with these figures. Weak evidence counts as if the use were not known. With
    /// `judges_by_memory`, a lease on a device that reports no activity is idle while neither its processes nor their memory
    /// change.
    #[must_use]
    pub fn observed(figures: &LeaseFigures, judges_by_memory: bool) -> Self {
        let LeaseFigures { state, since, unused_since, quiet_since, .. } = *figures;
        match (state, quiet_since) {
            (UseState::Idle | UseState::Empty, Some(quiet)) => Self::Observed {
                state,
                since: since.later(quiet),
                unused_since: unused_since.map(|unused| unused.later(quiet)),
            },
            (UseState::Unknown, Some(quiet)) if judges_by_memory => {
                Self::Observed { state: UseState::Idle, since: quiet, unused_since: Some(quiet) }
            }
            (UseState::Idle | UseState::Empty | UseState::Unknown, _) => {
                Self::Observed { state: UseState::Unknown, since, unused_since: None }
            }
            (UseState::Busy, _) => Self::Observed { state, since, unused_since: None },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ledger::StateTimes, moment::Moment};

    fn at(minute: u64) -> Moment {
        Moment { boot: 1, monotonic_ms: minute * 60_000, wall_ms: 0 }
    }

    /// Returns the observation of a lease that is in this state since minute 10.
    fn seen(state: UseState, quiet_since: Option<u64>, judges_by_memory: bool) -> (UseState, Option<Moment>) {
        let unused_since = matches!(state, UseState::Idle | UseState::Empty).then(|| at(10));
        let figures = LeaseFigures {
            state,
            since: at(10),
            unused_since,
            quiet_since: quiet_since.map(at),
            begun: at(0),
            times: StateTimes::default(),
            members: Vec::new(),
        };
        match IdleEvent::observed(&figures, judges_by_memory) {
            IdleEvent::Observed { state, unused_since, .. } => (state, unused_since),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn unused_time_begins_after_missing_samples_and_weak_evidence() {
        for state in [UseState::Idle, UseState::Empty] {
            assert_eq!(seen(state, Some(5), false), (state, Some(at(10))));
            assert_eq!(seen(state, Some(90), false), (state, Some(at(90))));
            assert_eq!(seen(state, None, false), (UseState::Unknown, None), "the last sample is missing or weak");
        }
        assert_eq!(seen(UseState::Busy, None, true), (UseState::Busy, None));
    }

    #[test]
    fn device_without_activity_is_idle_only_if_the_rule_says_so() {
        assert_eq!(seen(UseState::Unknown, Some(7), false), (UseState::Unknown, None));
        assert_eq!(seen(UseState::Unknown, Some(7), true), (UseState::Idle, Some(at(7))));
        assert_eq!(seen(UseState::Unknown, None, true), (UseState::Unknown, None));
    }
}
