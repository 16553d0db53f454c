//! The states of one lease, as a pure state machine: events in, effects out. The caller executes
//! the effects.
//!
//! ```text
//!             CommitPostponed
//!          ┌───────────────────┐
//!          ▼                   │
//!  ──► Queued ──Reserved──► Committing ──Committed───────► Active ──released, expired, revoked, ──► Releasing
//!        │                   │     │                        ▲        binding ended, GPU lost            │
//!        │                   │     └─OperationBegun──► Creating                                         │
//!        │ cancelled,        │                          │  │                                            │
//!        │ timed out,        │ CommitFailed             │  └─ aborted, and the operation ended ────────►│
//!        │ revoked, refused  │                          │                                               │
//!        ▼                   ▼                          │ OperationFailed       no process left:        │
//!      Leaving ◄─────────────┘                          │                       end recorded            │
//!        │ end recorded                                 ▼                                               │
//!        └────────────────────────────────────────►  Ended  ◄───────────────────────────────────────────┘
//! ```
//!
//! - The holder has access only in `Active`. A lease becomes `Active` only after the grant is
//!   durable.
//! - Capacity is reserved from `Committing` on. Capacity is freed once for each reservation: when the grant has
//!   certainly failed, or when the end is durable. The end of an active lease is recorded only after all sources
//!   (cgroup, driver, MPS daemon) have reported that no process of the lease is left.
//! - If the end of a lease is requested in `Committing` or `Creating`, the end waits for the outcome of the grant,
//!   because a commit or a driver call may still take effect.
//! - `Releasing` has no time limit. The first reason for the end does not change, but a later
//!   revocation can still end the processes. The state is recorded when the first probe has found a process: most leases
//!   end without one, and need only the record of their end.
//! - The end of a lease that was never recorded needs no record, so it skips `Leaving`.
//! - An event that does not fit the state is late or repeated, and changes nothing. `Ended` is
//!   final.

use gpush_api::EndReason;

mod records;
mod state;

pub use records::may_record;
pub use state::{Effect, EndProcesses, Event, Instant, ProcessEnding, ReleaseStep, Releasing, Remaining, State};

/// Applies one event to a state. Returns the next state and the effects, in order.
#[must_use]
pub fn step(state: State, event: Event, now: Instant) -> (State, Vec<Effect>) {
    match state {
        State::Queued { recorded } => queued(recorded, event),
        State::Committing { recorded, abort } => committing(recorded, abort, event),
        State::Creating { abort } => creating(abort, event),
        State::Active => active(event),
        State::Releasing(releasing) => release(releasing, event, now),
        State::Leaving { reason, retry } => leaving(reason, retry, event),
        State::Ended(reason) => (State::Ended(reason), Vec::new()),
    }
}

fn queued(recorded: bool, event: Event) -> (State, Vec<Effect>) {
    let end = |reason| leave(recorded, reason, Vec::new());
    match event {
        Event::Reserved => (State::Committing { recorded, abort: None }, vec![Effect::CommitGrant]),
        Event::Refused => end(EndReason::Failed),
        Event::Released | Event::BindingEnded => end(EndReason::Cancelled),
        Event::WaitTimedOut => end(EndReason::TimedOut),
        Event::Revoked => end(EndReason::Revoked),
        // These events change nothing. If one GPU is lost, the request still waits for other GPUs.
        // A queued lease cannot expire, because its end time counts from the grant.
        Event::GpuLost
        | Event::Expired
        | Event::Committed
        | Event::OperationBegun
        | Event::CommitFailed
        | Event::CommitPostponed
        | Event::OperationFailed
        | Event::EndProcesses(_)
        | Event::ReleaseRecorded
        | Event::Probed(_)
        | Event::EndRecorded
        | Event::EndNotRecorded
        | Event::Tick => (State::Queued { recorded }, Vec::new()),
    }
}

/// Ends a lease that was not granted, after these effects.
fn leave(recorded: bool, reason: EndReason, mut effects: Vec<Effect>) -> (State, Vec<Effect>) {
    if recorded {
        effects.push(Effect::RecordEnd(reason));
        (State::Leaving { reason, retry: false }, effects)
    } else {
        effects.push(Effect::ReportEnd(reason));
        (State::Ended(reason), effects)
    }
}

/// Returns the reason for which a grant must be aborted because of this event.
fn abort_reason(event: Event) -> Option<EndReason> {
    match event {
        Event::Released | Event::BindingEnded => Some(EndReason::Cancelled),
        Event::WaitTimedOut => Some(EndReason::TimedOut),
        Event::Revoked => Some(EndReason::Revoked),
        Event::GpuLost => Some(EndReason::GpuLost),
        Event::Reserved
        | Event::Committed
        | Event::OperationBegun
        | Event::CommitFailed
        | Event::CommitPostponed
        | Event::OperationFailed
        | Event::Refused
        | Event::Expired
        | Event::EndProcesses(_)
        | Event::ReleaseRecorded
        | Event::Probed(_)
        | Event::EndRecorded
        | Event::EndNotRecorded
        | Event::Tick => None,
    }
}

fn committing(recorded: bool, abort: Option<EndReason>, event: Event) -> (State, Vec<Effect>) {
    match event {
        Event::Committed => granted(abort),
        Event::OperationBegun => {
            let cancel = abort.map(|_| Effect::CancelOperation);
            (State::Creating { abort }, cancel.into_iter().collect())
        }
        Event::CommitFailed => leave(recorded, abort.unwrap_or(EndReason::Failed), vec![Effect::FreeCapacity]),
        Event::CommitPostponed => match abort {
            Some(reason) => leave(recorded, reason, vec![Effect::FreeCapacity]),
            None => (State::Queued { recorded }, vec![Effect::FreeCapacity, Effect::WaitAgain]),
        },
        event => (State::Committing { recorded, abort: abort.or(abort_reason(event)) }, Vec::new()),
    }
}

fn creating(abort: Option<EndReason>, event: Event) -> (State, Vec<Effect>) {
    match event {
        Event::Committed => granted(abort),
        Event::OperationFailed => {
            let reason = abort.unwrap_or(EndReason::Failed);
            (State::Ended(reason), vec![Effect::FreeCapacity, Effect::ReportEnd(reason)])
        }
        event => {
            let next = abort.or(abort_reason(event));
            let cancel = (abort.is_none() && next.is_some()).then_some(Effect::CancelOperation);
            (State::Creating { abort: next }, cancel.into_iter().collect())
        }
    }
}

fn granted(abort: Option<EndReason>) -> (State, Vec<Effect>) {
    match abort {
        None => (State::Active, vec![Effect::OpenAdmission, Effect::ReportGrant]),
        // The holder never had access. The lease still goes through a release, because the
        // holder may have found a MIG device or an environment in another way.
        Some(reason) => start_release(reason, false),
    }
}

fn active(event: Event) -> (State, Vec<Effect>) {
    match event {
        Event::Released | Event::BindingEnded => start_release(EndReason::Released, true),
        Event::Expired => start_release(EndReason::Expired, true),
        Event::Revoked => start_release(EndReason::Revoked, true),
        Event::GpuLost => start_release(EndReason::GpuLost, true),
        Event::Reserved
        | Event::Committed
        | Event::OperationBegun
        | Event::CommitFailed
        | Event::CommitPostponed
        | Event::OperationFailed
        | Event::Refused
        | Event::WaitTimedOut
        | Event::EndProcesses(_)
        | Event::ReleaseRecorded
        | Event::Probed(_)
        | Event::EndRecorded
        | Event::EndNotRecorded
        | Event::Tick => (State::Active, Vec::new()),
    }
}

fn release(releasing: Releasing, event: Event, now: Instant) -> (State, Vec<Effect>) {
    let stay = |releasing: Releasing| (State::Releasing(releasing), Vec::new());
    let record = |releasing: Releasing| {
        let state = State::Releasing(Releasing { step: ReleaseStep::Recording, ..releasing });
        (state, vec![Effect::RecordEnd(releasing.reason)])
    };
    match event {
        Event::Probed(remaining) => match releasing.step {
            ReleaseStep::Processes if remaining.is_none() => record(Releasing { remaining, ..releasing }),
            ReleaseStep::Processes => {
                let record = (!releasing.recorded).then_some(Effect::RecordReleasing(releasing.reason));
                // After the first SIGKILL, also kill processes that started later.
                let kill = (releasing.ending == ProcessEnding::Killed).then_some(Effect::Kill);
                (State::Releasing(Releasing { remaining, ..releasing }), record.into_iter().chain(kill).collect())
            }
            // A late probe changes nothing: no new process can start, because admission is closed.
            ReleaseStep::Recording | ReleaseStep::Retry => stay(releasing),
        },
        Event::ReleaseRecorded => stay(Releasing { recorded: true, ..releasing }),
        Event::EndRecorded => match releasing.step {
            ReleaseStep::Recording => {
                let reason = releasing.reason;
                (State::Ended(reason), vec![Effect::FreeCapacity, Effect::ReportEnd(reason)])
            }
            ReleaseStep::Processes | ReleaseStep::Retry => stay(releasing),
        },
        Event::EndNotRecorded => match releasing.step {
            ReleaseStep::Recording => stay(Releasing { step: ReleaseStep::Retry, ..releasing }),
            ReleaseStep::Processes | ReleaseStep::Retry => stay(releasing),
        },
        Event::EndProcesses(EndProcesses { notice, grace }) => match (releasing.ending, releasing.step) {
            (ProcessEnding::No, ReleaseStep::Processes) => {
                let until = now.saturating_add(notice);
                let ending = ProcessEnding::Notice { until, grace };
                (State::Releasing(Releasing { ending, ..releasing }), vec![Effect::Notify(until)])
            }
            // Keep the times that were already reported to the holder.
            _ => stay(releasing),
        },
        Event::Tick => match (releasing.step, releasing.ending) {
            (ReleaseStep::Retry, _) => record(releasing),
            (ReleaseStep::Processes, ProcessEnding::Notice { until, grace }) if until <= now => {
                let ending = ProcessEnding::Terminated { until: now.saturating_add(grace) };
                (State::Releasing(Releasing { ending, ..releasing }), vec![Effect::Terminate])
            }
            (ReleaseStep::Processes, ProcessEnding::Terminated { until }) if until <= now => {
                (State::Releasing(Releasing { ending: ProcessEnding::Killed, ..releasing }), vec![Effect::Kill])
            }
            (ReleaseStep::Processes | ReleaseStep::Recording, _) => stay(releasing),
        },
        Event::Reserved
        | Event::Committed
        | Event::OperationBegun
        | Event::CommitFailed
        | Event::CommitPostponed
        | Event::OperationFailed
        | Event::Refused
        | Event::Released
        | Event::BindingEnded
        | Event::WaitTimedOut
        | Event::Expired
        | Event::Revoked
        | Event::GpuLost => stay(releasing),
    }
}

fn leaving(reason: EndReason, retry: bool, event: Event) -> (State, Vec<Effect>) {
    match event {
        Event::EndRecorded => (State::Ended(reason), vec![Effect::ReportEnd(reason)]),
        Event::EndNotRecorded => (State::Leaving { reason, retry: true }, Vec::new()),
        Event::Tick if retry => (State::Leaving { reason, retry: false }, vec![Effect::RecordEnd(reason)]),
        Event::Reserved
        | Event::Committed
        | Event::OperationBegun
        | Event::CommitFailed
        | Event::CommitPostponed
        | Event::OperationFailed
        | Event::Refused
        | Event::Released
        | Event::BindingEnded
        | Event::WaitTimedOut
        | Event::Expired
        | Event::Revoked
        | Event::GpuLost
        | Event::EndProcesses(_)
        | Event::ReleaseRecorded
        | Event::Probed(_)
        | Event::Tick => (State::Leaving { reason, retry }, Vec::new()),
    }
}

/// Begins the release of a granted lease. `admitted` says whether the holder has had access.
fn start_release(reason: EndReason, admitted: bool) -> (State, Vec<Effect>) {
    let (step, remaining, ending) = (ReleaseStep::Processes, Remaining::default(), ProcessEnding::No);
    let close = admitted.then_some(Effect::CloseAdmission);
    let tell = (admitted && is_unexpected(reason)).then_some(Effect::TellEnd(reason));
    let effects = close.into_iter().chain(tell).chain([Effect::WatchProcesses]).collect();
    (State::Releasing(Releasing { reason, recorded: false, step, remaining, ending }), effects)
}

/// Returns whether the holder of a granted lease does not know that it ends, because the holder did not end it.
fn is_unexpected(reason: EndReason) -> bool {
    match reason {
        EndReason::Expired | EndReason::Revoked | EndReason::GpuLost => true,
        EndReason::Released | EndReason::Cancelled | EndReason::TimedOut | EndReason::Rebooted | EndReason::Failed => {
            false
        }
    }
}

#[cfg(test)]
mod tests;
