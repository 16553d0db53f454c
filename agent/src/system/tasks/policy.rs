//! What gpushd does when a background task ends. A pure state machine; the caller gives the time.
//!
//! ```text
//!             failed                         failed after more than a minute
//!  Running ────────────► Restarted(time) ───────────────┐
//!   │ │                    │    │  ▲────────────────────┘
//!   │ │ failed, Final      │    │ failed within a minute
//!   │ └────────────────────│────┴──────────► Fatal     gpushd ends with an error
//!   │                      │
//!   └──────────────────────┴───────────────► Ended     the end was expected, or gpushd stops, or a OneShot failed
//! ```
//!
//! A task fails if it panics or returns an error. A task that must run until gpushd stops also fails if it returns earlier.

use std::time::{Duration, Instant};

use gpush_api::TaskKind;

/// A task that fails twice within this time ends gpushd.
pub(super) const FAILS_AGAIN: Duration = Duration::from_secs(60);

/// The state of a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TaskState {
    /// The task runs, and has not failed.
    Running,
    /// The task runs again, after a failure at this time.
    Restarted(Instant),
    /// The task does not run any more.
    Ended,
    /// The task has failed, and gpushd must end.
    Fatal,
}

/// How the future of a task ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TaskEnd {
    Returned,
    /// The future panicked, or returned an error.
    Failed,
}

/// Returns whether this end is a failure. While gpushd stops, a task may return.
pub(super) fn is_failure(kind: TaskKind, end: TaskEnd, stopping: bool) -> bool {
    match (end, kind) {
        (TaskEnd::Failed, _) => true,
        (TaskEnd::Returned, TaskKind::Service | TaskKind::Final) => !stopping,
        (TaskEnd::Returned, TaskKind::PerObject | TaskKind::OneShot) => false,
    }
}

/// Returns the state of a running task after the end of its future.
pub(super) fn step(kind: TaskKind, state: TaskState, end: TaskEnd, stopping: bool, now: Instant) -> TaskState {
    if stopping || !is_failure(kind, end, stopping) {
        return TaskState::Ended;
    }
    match (kind, state) {
        (_, TaskState::Ended | TaskState::Fatal) => state,
        (TaskKind::OneShot, _) => TaskState::Ended,
        (TaskKind::Final, _) => TaskState::Fatal,
        (TaskKind::Service | TaskKind::PerObject, TaskState::Running) => TaskState::Restarted(now),
        (TaskKind::Service | TaskKind::PerObject, TaskState::Restarted(before)) => {
            if now.saturating_duration_since(before) < FAILS_AGAIN {
                TaskState::Fatal
            } else {
                TaskState::Restarted(now)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const KINDS: [TaskKind; 4] = [TaskKind::Service, TaskKind::PerObject, TaskKind::Final, TaskKind::OneShot];

    #[test]
    fn service_that_fails_again_within_a_minute_is_fatal() {
        let start = Instant::now();
        let step = |state, seconds: f64| {
            let now = start + Duration::from_secs_f64(seconds);
            super::step(TaskKind::Service, state, TaskEnd::Failed, false, now)
        };
        let first = step(TaskState::Running, 0.0);
        assert_eq!(first, TaskState::Restarted(start));
        assert_eq!(step(first, 59.9), TaskState::Fatal);
        let second = step(first, 60.0);
        assert_eq!(second, TaskState::Restarted(start + FAILS_AGAIN));
        assert_eq!(step(second, 119.9), TaskState::Fatal, "the minute begins with the last failure");
    }

    #[test]
    fn early_return_is_a_failure_only_of_tasks_that_never_return() {
        let after = |kind| step(kind, TaskState::Running, TaskEnd::Returned, false, Instant::now());
        assert!(matches!(after(TaskKind::Service), TaskState::Restarted(_)));
        assert_eq!(after(TaskKind::Final), TaskState::Fatal);
        assert_eq!(after(TaskKind::PerObject), TaskState::Ended);
        assert_eq!(after(TaskKind::OneShot), TaskState::Ended);
    }

    proptest! {
        /// Runs tasks through random ends. After each step, the state must follow from the history of the failures.
        #[test]
        fn state_follows_from_the_failures_so_far(
            kind in prop::sample::select(KINDS.to_vec()),
            ends in prop::collection::vec((0_u64..130, prop::bool::ANY), 1..20),
            stops_after in 0_usize..25,
        ) {
            let start = Instant::now();
            let (mut state, mut now, mut failures) = (TaskState::Running, start, Vec::new());
            for (position, (pause, panics)) in ends.into_iter().enumerate() {
                now += Duration::from_secs(pause);
                let end = if panics { TaskEnd::Failed } else { TaskEnd::Returned };
                let stopping = position >= stops_after;
                state = step(kind, state, end, stopping, now);
                if stopping {
                    prop_assert_eq!(state, TaskState::Ended, "a task that ends while gpushd stops is left alone");
                }
                if is_failure(kind, end, stopping) {
                    failures.push(now);
                }
                match state {
                    // The caller starts no future again.
                    TaskState::Ended => {
                        prop_assert!(stopping || kind == TaskKind::OneShot || kind == TaskKind::PerObject && !panics);
                        break;
                    }
                    TaskState::Fatal => {
                        let again = failures.windows(2).any(|pair| pair[1] - pair[0] < FAILS_AGAIN);
                        prop_assert!(kind != TaskKind::OneShot && (kind == TaskKind::Final || again));
                        break;
                    }
                    TaskState::Restarted(at) => {
                        prop_assert!(failures.windows(2).all(|pair| pair[1] - pair[0] >= FAILS_AGAIN));
                        prop_assert_eq!((Some(&at), kind == TaskKind::Final), (failures.last(), false));
                    }
                    TaskState::Running => prop_assert!(false, "an end always changes the state"),
                }
            }
        }
    }
}
