use std::time::Duration;

use proptest::prelude::*;

use super::*;

fn at(seconds: u64) -> Instant {
    Duration::from_secs(seconds)
}

const END: Event =
    Event::EndProcesses(EndProcesses { notice: Duration::from_secs(60), grace: Duration::from_secs(10) });

fn one(bound: u32) -> Remaining {
    Remaining { bound: Some(bound), ..Remaining::NONE }
}

/// Applies events. Returns the last state and the effects of all events.
fn run(mut state: State, events: &[Event]) -> (State, Vec<Effect>) {
    let mut all = Vec::new();
    for event in events {
        let (next, effects) = step(state, *event, at(0));
        state = next;
        all.extend(effects);
    }
    (state, all)
}

const NEW: State = State::Queued { recorded: false };

#[test]
fn free_share_needs_one_commit_and_ends_after_its_processes() {
    let (state, effects) = run(NEW, &[Event::Reserved, Event::Committed]);
    assert_eq!(state, State::Active);
    assert_eq!(effects, [Effect::CommitGrant, Effect::OpenAdmission, Effect::ReportGrant]);
    let (state, effects) = run(state, &[Event::BindingEnded, Event::Probed(one(2))]);
    assert_eq!(state.name(), gpush_api::LeaseState::Releasing);
    let released = EndReason::Released;
    let expected = [Effect::CloseAdmission, Effect::WatchProcesses, Effect::RecordReleasing(released)];
    assert_eq!(effects, expected);
    let (state, effects) = run(state, &[Event::ReleaseRecorded, Event::Probed(one(1))]);
    assert_eq!(effects, [], "recorded once");
    let (state, effects) = run(state, &[Event::Probed(Remaining::NONE), Event::EndRecorded]);
    assert_eq!(state, State::Ended(released));
    assert_eq!(effects, [Effect::RecordEnd(released), Effect::FreeCapacity, Effect::ReportEnd(released)]);
}

#[test]
fn lease_without_processes_needs_only_the_record_of_its_end() {
    let (_, effects) = run(State::Active, &[Event::Expired, Event::Probed(Remaining::NONE)]);
    let tell = Effect::TellEnd(EndReason::Expired);
    let end = Effect::RecordEnd(EndReason::Expired);
    assert_eq!(effects, [Effect::CloseAdmission, tell, Effect::WatchProcesses, end]);
}

/// gpushd tells the holder about the end of the lease before a signal, unless the holder has ended the lease.
#[test]
fn holder_is_told_of_an_end_by_others_before_any_signal() {
    for (event, reason) in [
        (Event::Expired, EndReason::Expired),
        (Event::Revoked, EndReason::Revoked),
        (Event::GpuLost, EndReason::GpuLost),
    ] {
        let (_, effects) = run(State::Active, &[event, END, Event::Tick, Event::Probed(one(1))]);
        let tell = effects.iter().position(|effect| *effect == Effect::TellEnd(reason));
        let signal = effects.iter().position(|effect| matches!(effect, Effect::Terminate | Effect::Kill));
        assert!(tell.is_some() && signal.is_none_or(|signal| tell < Some(signal)), "{effects:?}");
        assert_eq!(effects.iter().filter(|effect| matches!(effect, Effect::TellEnd(_))).count(), 1);
    }
    for event in [Event::Released, Event::BindingEnded] {
        let (_, effects) = step(State::Active, event, at(0));
        assert!(!effects.iter().any(|effect| matches!(effect, Effect::TellEnd(_))), "{effects:?}");
    }
    // The holder never had access, and its client gets an error.
    let (_, effects) = run(NEW, &[Event::Reserved, Event::Revoked, Event::Committed]);
    assert!(!effects.iter().any(|effect| matches!(effect, Effect::TellEnd(_))), "{effects:?}");
}

#[test]
fn recorded_request_leaves_queue_after_its_end_is_recorded() {
    for recorded in [false, true] {
        let (state, effects) = step(State::Queued { recorded }, Event::WaitTimedOut, at(0));
        let reason = EndReason::TimedOut;
        if !recorded {
            assert_eq!((state, effects), (State::Ended(reason), vec![Effect::ReportEnd(reason)]));
            continue;
        }
        assert_eq!((state.name(), effects), (gpush_api::LeaseState::Queued, vec![Effect::RecordEnd(reason)]));
        let (state, effects) = run(state, &[Event::Reserved, Event::EndNotRecorded, Event::Tick, Event::EndRecorded]);
        assert_eq!(state, State::Ended(reason));
        assert_eq!(effects, [Effect::RecordEnd(reason), Effect::ReportEnd(reason)], "it gets no capacity");
    }
}

#[test]
fn postponed_grant_frees_its_capacity_and_waits_again() {
    let queued = State::Queued { recorded: true };
    let (state, effects) = run(queued, &[Event::Reserved, Event::CommitPostponed]);
    assert_eq!((state, &effects[1..]), (queued, &[Effect::FreeCapacity, Effect::WaitAgain][..]));
    let (state, effects) = run(queued, &[Event::Reserved, Event::Released, Event::CommitPostponed]);
    assert_eq!(state, State::Leaving { reason: EndReason::Cancelled, retry: false });
    assert_eq!(effects[1..], [Effect::FreeCapacity, Effect::RecordEnd(EndReason::Cancelled)]);
}

#[test]
fn release_waits_while_any_source_is_silent_or_lists_a_process() {
    let (releasing, _) = run(State::Active, &[Event::Released]);
    let sources = [None, Some(0), Some(1)];
    for bound in sources {
        for driver in sources {
            for daemon in sources {
                let remaining = Remaining { bound, driver, daemon };
                let (_, effects) = step(releasing, Event::Probed(remaining), at(0));
                let ends = effects.contains(&Effect::RecordEnd(EndReason::Released));
                assert_eq!(ends, remaining == Remaining::NONE, "{remaining:?}");
            }
        }
    }
}

#[test]
fn grant_in_progress_is_aborted_only_after_its_outcome_is_known() {
    let (state, effects) = run(NEW, &[Event::Reserved, Event::OperationBegun, Event::Released, Event::Revoked]);
    assert_eq!(effects, [Effect::CommitGrant, Effect::CancelOperation], "cancelled once");
    assert_eq!((state.name(), state.reason()), (gpush_api::LeaseState::Granting, Some(EndReason::Cancelled)));
    let (failed, effects) = run(state, &[Event::OperationFailed]);
    assert_eq!(failed, State::Ended(EndReason::Cancelled));
    assert_eq!(effects, [Effect::FreeCapacity, Effect::ReportEnd(EndReason::Cancelled)]);
    // The operation finished before it could be cancelled. The instance exists, so the lease goes
    // through a release.
    let (done, effects) = run(state, &[Event::Committed]);
    assert_eq!(done.reason(), Some(EndReason::Cancelled));
    assert!(!effects.contains(&Effect::OpenAdmission) && !effects.contains(&Effect::FreeCapacity), "{effects:?}");
    // The request was cancelled while the operation was being recorded.
    let (state, effects) = run(NEW, &[Event::Reserved, Event::Released, Event::OperationBegun]);
    assert_eq!(effects, [Effect::CommitGrant, Effect::CancelOperation]);
    assert_eq!(state, State::Creating { abort: Some(EndReason::Cancelled) });
}

#[test]
fn end_of_processes_is_announced_then_term_then_kill() {
    let (releasing, _) = step(State::Active, Event::Revoked, at(100));
    let (mut state, effects) = step(releasing, END, at(100));
    assert_eq!(effects, [Effect::Notify(at(160))]);
    let mut sent = Vec::new();
    while let Some(due) = state.due() {
        assert_eq!(step(state, Event::Tick, due - Duration::from_millis(1)).1, []);
        let (next, effects) = step(state, Event::Tick, due);
        sent.extend(effects.into_iter().map(|effect| (due, effect)));
        state = next;
    }
    assert_eq!(sent, [(at(160), Effect::Terminate), (at(170), Effect::Kill)]);
    assert_eq!(step(state, END, at(999)).1, [], "a second revocation does not start again");
    let (state, effects) = run(state, &[Event::ReleaseRecorded, Event::Probed(one(1)), Event::Probed(one(1))]);
    assert_eq!(effects, [Effect::Kill; 2], "processes that started later");
    assert_eq!(step(state, Event::Probed(Remaining::NONE), at(0)).1, [Effect::RecordEnd(EndReason::Revoked)]);
    // An administrator can revoke a lease that has expired, to end its remaining processes.
    let (expired, _) = step(State::Active, Event::Expired, at(0));
    let (state, effects) = run(expired, &[Event::Revoked, END]);
    assert_eq!((effects, state.reason()), (vec![Effect::Notify(at(60))], Some(EndReason::Expired)));
}

#[test]
fn unrecorded_end_keeps_the_capacity_and_is_retried() {
    let (state, effects) = run(
        State::Active,
        &[Event::Released, Event::Probed(Remaining::NONE), Event::EndNotRecorded, Event::EndRecorded],
    );
    assert!(!effects.contains(&Effect::FreeCapacity));
    let (state, effects) = run(state, &[Event::Tick, Event::EndRecorded]);
    assert_eq!(effects[..2], [Effect::RecordEnd(EndReason::Released), Effect::FreeCapacity]);
    assert_eq!(state, State::Ended(EndReason::Released));
}

#[test]
fn restored_lease_has_the_recorded_state() {
    use gpush_api::LeaseState;
    for recorded in [LeaseState::Queued, LeaseState::Granting, LeaseState::Active, LeaseState::Releasing] {
        assert_eq!(State::restored(recorded, None).name(), recorded);
    }
}

/// The simulated host. The test tracks its state independently of the state machine.
#[derive(Debug, Default)]
struct World {
    reserved: bool,
    durable: bool,
    end_recorded: bool,
    admitted: bool,
    processes: u32,
    granting: bool,
    was_admitted: bool,
    was_freed: bool,
}

/// Returns the next event of the test, if that event is possible in this world.
fn event(world: &mut World, state: &State, what: u8, now: Instant) -> Option<Event> {
    let recording = match state {
        State::Releasing(releasing) => releasing.step == ReleaseStep::Recording,
        State::Leaving { retry, .. } => !retry,
        _ => false,
    };
    let is_commit = matches!(state, State::Committing { .. });
    Some(match what {
        0 if !world.reserved && matches!(state, State::Queued { .. }) => {
            (world.reserved, world.granting, world.was_freed) = (true, true, false);
            Event::Reserved
        }
        1 if world.granting => {
            (world.granting, world.durable) = (false, true);
            Event::Committed
        }
        2 if world.granting => {
            world.granting = false;
            match (is_commit, now.as_secs().is_multiple_of(2)) {
                (true, true) => Event::CommitFailed,
                (true, false) => Event::CommitPostponed,
                (false, _) => Event::OperationFailed,
            }
        }
        3 => Event::Released,
        4 => Event::Expired,
        5 => Event::Revoked,
        6 => Event::GpuLost,
        7 => Event::BindingEnded,
        8 => Event::WaitTimedOut,
        // Processes can start while the holder has access, and can fork while any of them runs.
        9 if world.admitted || world.processes > 0 => {
            world.processes += 1;
            return None;
        }
        10 if world.processes > 0 => {
            world.processes -= 1;
            return None;
        }
        11 => Event::Probed(one(world.processes)),
        12 => Event::Probed(Remaining { driver: None, ..one(world.processes) }),
        13 if recording => {
            world.end_recorded = true;
            Event::EndRecorded
        }
        14 if recording => Event::EndNotRecorded,
        15 => Event::Tick,
        16 if world.granting && is_commit => Event::OperationBegun,
        17 => END,
        18 => Event::ReleaseRecorded,
        19 => Event::Refused,
        _ => return None,
    })
}

fn execute(world: &mut World, effect: Effect) -> Result<(), TestCaseError> {
    match effect {
        Effect::OpenAdmission => {
            prop_assert!(world.reserved && world.durable, "admitted without a reserved and durable grant");
            prop_assert!(!world.was_admitted, "admitted twice");
            (world.admitted, world.was_admitted) = (true, true);
        }
        Effect::CloseAdmission => {
            prop_assert!(world.admitted);
            world.admitted = false;
        }
        Effect::FreeCapacity => {
            prop_assert!(world.reserved && !world.was_freed, "freed without a reservation, or twice");
            prop_assert!(!world.admitted && world.processes == 0, "freed under {} processes", world.processes);
            prop_assert!(!world.durable || world.end_recorded, "freed before the end is durable");
            prop_assert!(!world.granting, "freed while the grant may still take effect");
            (world.reserved, world.was_freed) = (false, true);
        }
        Effect::Kill => world.processes = 0,
        Effect::CommitGrant => prop_assert!(world.reserved),
        Effect::CancelOperation
        | Effect::WaitAgain
        | Effect::RecordReleasing(_)
        | Effect::WatchProcesses
        | Effect::TellEnd(_)
        | Effect::Notify(_)
        | Effect::Terminate
        | Effect::RecordEnd(_)
        | Effect::ReportGrant
        | Effect::ReportEnd(_) => {}
    }
    Ok(())
}

proptest! {
    /// Checks for any order of events: the holder has access only after a durable grant. Capacity
    /// is freed once, and only when no process is left. A lease without obstacles ends.
    #[test]
    fn lease_never_frees_capacity_under_a_process(happens in proptest::collection::vec((0_u8..20, 0_u64..9), 1..120)) {
        let (mut state, mut world, mut now) = (NEW, World::default(), at(0));
        for (what, later) in happens {
            now += at(later);
            let Some(event) = event(&mut world, &state, what, now) else { continue };
            let before = state;
            let (next, effects) = step(state, event, now);
            if let State::Ended(_) = before {
                prop_assert_eq!((next, effects.len()), (before, 0), "ended is final");
            }
            prop_assert!(next.name() >= before.name(), "{:?} after {:?}", next, before);
            prop_assert!(!next.name().holds_capacity() || next.reserves(), "{:?}", next);
            state = next;
            for effect in effects {
                execute(&mut world, effect)?;
            }
            prop_assert_eq!(state.admits(), world.admitted);
            prop_assert_eq!(state.reserves(), world.reserved);
        }
        // Nothing prevents the end any more, so the lease must end.
        for _ in 0..10 {
            world.processes = 0;
            let last = if world.granting { 1 } else { 3 };
            for what in [last, 15, 11, 13] {
                now += at(100);
                let Some(event) = event(&mut world, &state, what, now) else { continue };
                let (next, effects) = step(state, event, now);
                state = next;
                for effect in effects {
                    execute(&mut world, effect)?;
                }
            }
        }
        prop_assert!(matches!(state, State::Ended(_)), "{:?}", state);
        prop_assert!(!world.reserved);
    }
}
