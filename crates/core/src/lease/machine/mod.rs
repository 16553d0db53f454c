//! The states of one lease, as a pure state machine: events in, effects out. The caller executes
//! the effects.
//!
//! ```text
//!  Queued ──Reserved──► Granting ──Committed──► Active ──released, expired, revoked, ──► Releasing
//!    │                   │   │                           binding ended, GPU lost            │
//!    │                   │   └─ Committed, but aborted meanwhile ──────────────────────────►│
//!    │ cancelled,        │ CommitFailed,                          no process left:          │
//!    │ timed out,        │ OperationFailed                        end recorded              │
//!    ▼ revoked           ▼                                                                  ▼
//!  Ended ◄───────────────┴──────────────────────────────────────────────────────────────── Ended
//! ```
//!
//! - The holder has access only in `Active`. A lease becomes `Active` only after the grant is
//!   durable.
//! - Capacity is reserved from `Granting` on. Capacity is freed once: when the grant has certainly
//!   failed, or when the end is durable. An end is recorded only after all sources (cgroup,
//!   driver, MPS daemon) have reported that no process of the lease is left.
//! - If the end of a lease is requested in `Granting`, the end waits for the outcome of the grant,
//!   because a commit or a driver call may still take effect.
//! - `Releasing` has no time limit. The first reason for the end does not change, but a later
//!   revocation can still end the processes.
//! - An event that does not fit the state is late or repeated, and changes nothing. `Ended` is
//!   final.
//! - After a reboot, no process of the lease exists, so no source is probed.

use gpush_api::EndReason;

mod state;

pub use state::{
    Effect, EndProcesses, Event, GrantBy, Granting, Instant, ProcessEnding, ReleaseStep, Releasing, Remaining, State,
};

/// Applies one event to a state. Returns the next state and the effects, in order.
#[must_use]
pub fn step(state: State, event: Event, now: Instant) -> (State, Vec<Effect>) {
    match state {
        State::Queued { recorded } => queued(recorded, event),
        State::Granting(granting) => grant(granting, event),
        State::Active => active(event, now),
        State::Releasing(releasing) => release(releasing, event, now),
        State::Ended(reason) => (State::Ended(reason), Vec::new()),
    }
}

fn queued(recorded: bool, event: Event) -> (State, Vec<Effect>) {
    let end = |reason| (State::Ended(reason), ended_without_grant(recorded, reason));
    match event {
        Event::QueueRecorded => (State::Queued { recorded: true }, Vec::new()),
        Event::Reserved(by) => {
            let effect = match by {
                GrantBy::Commit => Effect::CommitGrant,
                GrantBy::Operation => Effect::BeginOperation,
            };
            (State::Granting(Granting { by, recorded, abort: None }), vec![effect])
        }
        Event::Released | Event::BindingEnded => end(EndReason::Cancelled),
        Event::WaitTimedOut => end(EndReason::TimedOut),
        Event::Revoked(_) => end(EndReason::Revoked),
        Event::Rebooted => end(EndReason::Rebooted),
        // These events change nothing. If one GPU is lost, the request still waits for other GPUs.
        // A queued lease cannot expire, because its end time counts from the grant.
        Event::GpuLost
        | Event::Expired(_)
        | Event::Committed
        | Event::CommitFailed
        | Event::OperationFailed
        | Event::Probed(_)
        | Event::EndRecorded
        | Event::EndNotRecorded
        | Event::Tick => (State::Queued { recorded }, Vec::new()),
    }
}

fn ended_without_grant(recorded: bool, reason: EndReason) -> Vec<Effect> {
    let record = recorded.then_some(Effect::RecordEnd(reason));
    record.into_iter().chain([Effect::ReportEnd(reason)]).collect()
}

fn grant(granting: Granting, event: Event) -> (State, Vec<Effect>) {
    let abort = |reason| {
        let first = granting.abort.is_none();
        let cancels = first && granting.by == GrantBy::Operation;
        let state = State::Granting(Granting { abort: granting.abort.or(Some(reason)), ..granting });
        (state, if cancels { vec![Effect::CancelOperation] } else { Vec::new() })
    };
    match event {
        Event::Committed => match granting.abort {
            None => (State::Active, vec![Effect::OpenAdmission, Effect::ReportGrant]),
            // The holder never had access. The lease still goes through a release, because the
            // holder may have found a MIG device or an environment in another way.
            Some(reason) => start_release(reason, ProcessEnding::No, false),
        },
        Event::CommitFailed => {
            let reason = granting.abort.unwrap_or(EndReason::Failed);
            let record = granting.recorded.then_some(Effect::RecordEnd(reason));
            let rest = [Effect::FreeCapacity, Effect::ReportEnd(reason)];
            (State::Ended(reason), record.into_iter().chain(rest).collect())
        }
        Event::OperationFailed => {
            let reason = granting.abort.unwrap_or(EndReason::Failed);
            (State::Ended(reason), vec![Effect::FreeCapacity, Effect::ReportEnd(reason)])
        }
        Event::Released | Event::BindingEnded => abort(EndReason::Cancelled),
        Event::WaitTimedOut => abort(EndReason::TimedOut),
        Event::Revoked(_) => abort(EndReason::Revoked),
        Event::GpuLost => abort(EndReason::GpuLost),
        Event::Rebooted => start_recording(EndReason::Rebooted),
        Event::QueueRecorded
        | Event::Reserved(_)
        | Event::Expired(_)
        | Event::Probed(_)
        | Event::EndRecorded
        | Event::EndNotRecorded
        | Event::Tick => (State::Granting(granting), Vec::new()),
    }
}

fn active(event: Event, now: Instant) -> (State, Vec<Effect>) {
    match event {
        Event::Released | Event::BindingEnded => start_release(EndReason::Released, ProcessEnding::No, true),
        Event::Expired(end) => start_release(EndReason::Expired, ending(end, now), true),
        Event::Revoked(end) => start_release(EndReason::Revoked, ending(end, now), true),
        Event::GpuLost => start_release(EndReason::GpuLost, ProcessEnding::No, true),
        Event::Rebooted => start_recording(EndReason::Rebooted),
        Event::QueueRecorded
        | Event::Reserved(_)
        | Event::Committed
        | Event::CommitFailed
        | Event::OperationFailed
        | Event::WaitTimedOut
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
            ReleaseStep::Processes => stay(Releasing { remaining, ..releasing }),
            // A late probe changes nothing: no new process can start, because admission is closed.
            ReleaseStep::Recording | ReleaseStep::Retry => stay(releasing),
        },
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
        Event::Revoked(end) | Event::Expired(end) => match (releasing.ending, releasing.step) {
            (ProcessEnding::No, ReleaseStep::Processes) => {
                let ending = ending(end, now);
                let effects = notify(ending).into_iter().collect();
                (State::Releasing(Releasing { ending, ..releasing }), effects)
            }
            // Keep the times that were already reported to the holder.
            _ => stay(releasing),
        },
        Event::Rebooted => match releasing.step {
            ReleaseStep::Processes | ReleaseStep::Retry => record(releasing),
            ReleaseStep::Recording => stay(releasing),
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
        Event::QueueRecorded
        | Event::Reserved(_)
        | Event::Committed
        | Event::CommitFailed
        | Event::OperationFailed
        | Event::Released
        | Event::BindingEnded
        | Event::WaitTimedOut
        | Event::GpuLost => stay(releasing),
    }
}

fn start_release(reason: EndReason, ending: ProcessEnding, admitted: bool) -> (State, Vec<Effect>) {
    let (step, remaining) = (ReleaseStep::Processes, Remaining::default());
    let close = admitted.then_some(Effect::CloseAdmission);
    let effects = close.into_iter().chain([Effect::RecordReleasing(reason)]).chain(notify(ending));
    let effects = effects.chain([Effect::WatchProcesses]).collect();
    (State::Releasing(Releasing { reason, step, remaining, ending }), effects)
}

fn start_recording(reason: EndReason) -> (State, Vec<Effect>) {
    let (step, remaining) = (ReleaseStep::Recording, Remaining::NONE);
    let releasing = Releasing { reason, step, remaining, ending: ProcessEnding::No };
    (State::Releasing(releasing), vec![Effect::RecordEnd(reason)])
}

fn ending(end: Option<EndProcesses>, now: Instant) -> ProcessEnding {
    match end {
        None => ProcessEnding::No,
        Some(EndProcesses { notice, grace }) => ProcessEnding::Notice { until: now.saturating_add(notice), grace },
    }
}

fn notify(ending: ProcessEnding) -> Option<Effect> {
    match ending {
        ProcessEnding::Notice { until, .. } => Some(Effect::Notify(until)),
        ProcessEnding::No | ProcessEnding::Terminated { .. } | ProcessEnding::Killed => None,
    }
}

#[cfg(test)]
mod tests;
