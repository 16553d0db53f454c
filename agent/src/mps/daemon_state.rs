//! The state of a daemon as the API shows it, with the reasons, and the errors that follow from the state.

use gpush_api::{ApiError, Code, MpsState};
use gpush_core::{sharing::SharingTarget, supervisor::SupervisorState};
use gpush_mps::daemon::Report;
use jiff::Unit;

use super::Entry;

/// Returns the state of a daemon for the API.
pub(super) fn state(seen: &Report) -> MpsState {
    match &seen.state {
        // The daemon has exited, but some of its clients still run and may finish.
        SupervisorState::Stopped if seen.behind => MpsState::Draining,
        SupervisorState::Stopped => MpsState::Stopped,
        // If gpushd has just found the daemon, show it as starting, because gpushd polls it at once.
        SupervisorState::Starting { .. } | SupervisorState::Found { .. } => MpsState::Starting,
        SupervisorState::Ready { .. } => MpsState::Ready,
        SupervisorState::Hung { .. } => MpsState::Hung,
        SupervisorState::Fault { .. } => MpsState::Fault,
        SupervisorState::BackingOff { .. } => MpsState::BackingOff,
        SupervisorState::GivenUp => MpsState::GivenUp,
        SupervisorState::Draining { .. } => MpsState::Draining,
        SupervisorState::Stopping { .. } => MpsState::Stopping,
    }
}

/// Returns whether the daemon admits new clients.
pub(super) fn admits(seen: &Report) -> bool {
    seen.wanted && matches!(seen.state, SupervisorState::Ready { .. })
}

/// Returns the reasons for the state of a daemon, one sentence each.
pub(super) fn reasons(seen: &Report, short: &str) -> Vec<String> {
    let mut reasons = seen.trouble.clone();
    let inside = seen.clients.len() + seen.waiting.len();
    let clients = if inside == 1 { "its client".to_owned() } else { format!("its {inside} clients") };
    match &seen.state {
        SupervisorState::Hung { .. } if !seen.clients_known => reasons.push(format!(
            "gpushd does not restart the daemon, because its clients are not known; to restart it and end all \
            clients: `gpushctl mps restart {short} --force` (administrator)"
        )),
        SupervisorState::Hung { .. } if inside > 0 => {
            reasons.push(format!("gpushd does not restart the daemon, because that would end {clients}"));
        }
        SupervisorState::BackingOff { .. } if seen.failures == 0 => {
            reasons.push("gpushd tries again until it can start a daemon".to_owned());
        }
        SupervisorState::GivenUp => reasons.push(format!(
            "the daemon failed {} times, so gpushd does not start it again: remove the cause, then start it with \
            `gpushctl mps start {short}` (administrator)",
            seen.failures
        )),
        SupervisorState::Draining { .. } => reasons.push(finishing(&clients, inside, seen)),
        SupervisorState::Stopped if seen.behind => reasons.push(finishing(&clients, inside, seen)),
        SupervisorState::Stopped
        | SupervisorState::Starting { .. }
        | SupervisorState::Found { .. }
        | SupervisorState::Ready { .. }
        | SupervisorState::Hung { .. }
        | SupervisorState::Fault { .. }
        | SupervisorState::BackingOff { .. }
        | SupervisorState::Stopping { .. } => {}
    }
    reasons
}

/// Returns a sentence that says until when the clients of a draining daemon may run.
fn finishing(clients: &str, inside: usize, seen: &Report) -> String {
    if seen.serves_leases {
        return for_leases(inside, seen);
    }
    let end = if inside == 1 { "is then ended" } else { "are then ended" };
    match seen.until {
        Some(until) => {
            let until = until.strftime("%Y-%m-%d %H:%M:%S UTC");
            format!("no new client is admitted; {clients} may run until {until}, and {end}")
        }
        None => format!("no new client is admitted; {clients} may finish"),
    }
}

/// Returns a sentence that says that the daemon ends when the leases on its target have ended.
fn for_leases(inside: usize, seen: &Report) -> String {
    let clients = match inside {
        0 => String::new(),
        1 => " and its client".to_owned(),
        more => format!(" and its {more} clients"),
    };
    let end = match seen.until {
        Some(until) => format!(", at the latest at {}", until.round(Unit::Second).unwrap_or(until)),
        None => String::new(),
    };
    format!(
        "no new lease is granted; the daemon ends after the leases on its GPU or MIG device{clients} have ended{end}"
    )
}

/// Returns the name of a target in messages, such as `GPU 0`.
pub(super) fn label(entry: &Entry, uuid: &str) -> String {
    entry.target.as_ref().map_or_else(|| uuid.to_owned(), SharingTarget::label)
}

/// Returns the name of a target in commands.
pub(super) fn name(entry: &Entry) -> String {
    match &entry.target {
        Some(SharingTarget { gpu, device: None, .. }) => gpu.to_string(),
        Some(SharingTarget { gpu, device: Some(device), .. }) => format!("{gpu}:{device}"),
        None => entry.short.clone(),
    }
}

/// Returns the error for a request to a target that is about to be removed.
pub(super) fn removed_target_error(label: &str, entry: &Entry, why: String) -> ApiError {
    let error = ApiError::new(Code::Conflict, format!("the config no longer shares {label} through MPS")).cause(why);
    match entry.target.as_ref().map(|target| target.gpu) {
        Some(gpu) => error.hint(format!("`gpushctl mig plan --gpu {gpu}` shows the layout that the config wants")),
        None => error.hint("`gpushctl config show` lists the rules"),
    }
}

/// Returns the error for a target that grants no leases. The reason is the state of its daemon.
pub(super) fn not_granting_error(label: &str, entry: &Entry, seen: &Report, is_stopped: bool) -> ApiError {
    let state = match state(seen) {
        MpsState::Fault => "has failed".to_owned(),
        other => format!("is {}", other.name().replace('_', " ")),
    };
    let mut error = ApiError::new(Code::Conflict, format!("cannot grant a lease on {label}: its MPS daemon {state}"));
    let short = name(entry);
    error.causes = reasons(seen, &short);
    match seen.state {
        // The daemon runs, but this gpushd has not adopted it yet.
        SupervisorState::Ready { .. } => {
            error.hint("try again in a moment: gpushd is about to adopt the daemon").retryable()
        }
        SupervisorState::Stopped if !is_stopped => {
            error.hint("try again in a moment: gpushd is about to start the daemon").retryable()
        }
        SupervisorState::Stopped | SupervisorState::GivenUp => {
            error.hint(format!("start it with `gpushctl mps start {short}` (administrator)"))
        }
        SupervisorState::Starting { .. }
        | SupervisorState::Found { .. }
        | SupervisorState::Hung { .. }
        | SupervisorState::Fault { .. }
        | SupervisorState::BackingOff { .. }
        | SupervisorState::Draining { .. }
        | SupervisorState::Stopping { .. } => {
            error.hint(format!("see its state with `gpushctl mps show {short}`")).retryable()
        }
    }
}

/// Returns the error for a target whose daemon has ended, although gpushd has not handled this yet.
pub(super) fn just_ended_error(label: &str) -> ApiError {
    ApiError::new(Code::Unavailable, format!("cannot grant a lease on {label}: its MPS daemon has just ended"))
        .hint("try again in a moment: gpushd is about to start the daemon")
        .retryable()
}
