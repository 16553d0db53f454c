//! Which changes of a lease's recorded state are legal. The answer comes from the state machine: this module follows
//! [`step`] from a recorded state until an effect or event changes the record.

use std::{
    collections::{BTreeSet, HashSet},
    sync::LazyLock,
    time::Duration,
};

use gpush_api::LeaseState;

use super::{Effect, EndProcesses, Event, Instant, Remaining, State, step};

/// All pairs of a recorded state and a state that may be recorded next.
static LEGAL: LazyLock<BTreeSet<(LeaseState, LeaseState)>> = LazyLock::new(|| {
    let all = [LeaseState::Queued, LeaseState::Granting, LeaseState::Active, LeaseState::Releasing, LeaseState::Ended];
    all.into_iter().flat_map(|from| next_records(from).into_iter().map(move |to| (from, to))).collect()
});

/// Returns whether the record of a lease may change from one state to the other.
#[must_use]
pub fn may_record(from: LeaseState, to: LeaseState) -> bool {
    LEGAL.contains(&(from, to))
}

/// Returns all events; `Probed` once without processes, and once with unknown processes.
fn events() -> Vec<Event> {
    let end = EndProcesses { notice: Duration::ZERO, grace: Duration::ZERO };
    vec![
        Event::Reserved,
        Event::Committed,
        Event::OperationBegun,
        Event::CommitFailed,
        Event::CommitPostponed,
        Event::OperationFailed,
        Event::Refused,
        Event::Released,
        Event::BindingEnded,
        Event::WaitTimedOut,
        Event::Expired,
        Event::Revoked,
        Event::GpuLost,
        Event::EndProcesses(end),
        Event::ReleaseRecorded,
        Event::Probed(Remaining::NONE),
        Event::Probed(Remaining::default()),
        Event::EndRecorded,
        Event::EndNotRecorded,
        Event::Tick,
    ]
}

/// Returns the states that an effect may record.
fn recorded_by(effect: Effect) -> &'static [LeaseState] {
    match effect {
        Effect::CommitGrant => &[LeaseState::Active, LeaseState::Granting],
        Effect::RecordReleasing(_) => &[LeaseState::Releasing],
        Effect::RecordEnd(_) => &[LeaseState::Ended],
        Effect::CancelOperation
        | Effect::WaitAgain
        | Effect::OpenAdmission
        | Effect::CloseAdmission
        | Effect::WatchProcesses
        | Effect::TellEnd(_)
        | Effect::Notify(_)
        | Effect::Terminate
        | Effect::Kill
        | Effect::FreeCapacity
        | Effect::ReportGrant
        | Effect::ReportEnd(_) => &[],
    }
}

/// Returns the states that the last commit of an operation records, if the event reports the end of an operation.
fn recorded_by_operation(state: State, event: Event, next: State) -> Option<LeaseState> {
    match (state, event) {
        (State::Creating { .. }, Event::Committed) => Some(LeaseState::Active),
        (State::Creating { .. }, Event::OperationFailed) => Some(next.name()),
        _ => None,
    }
}

fn next_records(from: LeaseState) -> BTreeSet<LeaseState> {
    let (mut found, mut seen) = (BTreeSet::new(), HashSet::new());
    let mut open = vec![State::restored(from, None)];
    while let Some(state) = open.pop() {
        if !seen.insert(state) {
            continue;
        }
        for event in events() {
            let (next, effects) = step(state, event, Instant::ZERO);
            found.extend(recorded_by_operation(state, event, next));
            found.extend(effects.iter().flat_map(|effect| recorded_by(*effect)));
            // Follow only what happens before the record changes.
            let is_recorded = recorded_by_operation(state, event, next).is_some()
                || effects.iter().any(|effect| !recorded_by(*effect).is_empty());
            if !is_recorded {
                open.push(next);
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn legal_records_are_those_of_the_machine() {
        use LeaseState::{Active, Ended, Granting, Queued, Releasing};
        let expected = [
            (Queued, Granting),
            (Queued, Active),
            (Queued, Ended),
            (Granting, Active),
            (Granting, Ended),
            (Active, Releasing),
            (Active, Ended),
            (Releasing, Ended),
        ];
        assert_eq!(*LEGAL, BTreeSet::from(expected));
        assert!(may_record(Queued, Active) && !may_record(Ended, Active) && !may_record(Releasing, Active));
    }
}
