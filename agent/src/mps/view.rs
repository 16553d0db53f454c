//! Describes daemons for the API, and finds the daemon that a request names.

use std::{cmp::Ordering, collections::BTreeMap, time::Duration};

use futures_util::future::join_all;
use gpush_api::{ApiError, Code, Gpu, Mode, MpsDaemon, MpsLogs, MpsServer, MpsState, MpsUsers};
use gpush_core::{
    sharing::{self, SharingTarget},
    supervisor::SupervisorState,
};
use gpush_host::proc;
use gpush_mps::daemon::{Report, log};
use jiff::Unit;

use super::{
    Entry, Mps, clients, compute_mode, control_connection, leases, missing, multi_user_support,
    targets::{self, DesiredTargets},
};
use crate::{
    caller::{Caller, Viewer},
    eligibility,
    state::redact,
};

/// Maximum age of the data about a daemon that a response shows.
const FRESH: Duration = Duration::from_secs(1);

/// The hint for a GPU that is too old for MPS.
pub(super) const OTHER_MODE: &str = "set another mode in the GPU's rule, such as \"exclusive\" or \"timeslice\"";

/// Environment variable in which an MPS client names its lease.
pub(crate) const LEASE_VARIABLE: &str = "GPUSH_LEASE";

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

/// Returns an error for each daemon that should serve clients but does not. A daemon that is starting, draining, or
/// stopped by an administrator counts as healthy.
pub(crate) fn health(mps: &Mps) -> Vec<ApiError> {
    let entries = mps.entries().clone();
    let ill = entries.iter().filter_map(|(uuid, entry)| {
        let seen = entry.daemon.last_report();
        let ill = match seen.state {
            // This includes `BackingOff` without failures: processes of the previous daemon still run.
            SupervisorState::Hung { .. }
            | SupervisorState::Fault { .. }
            | SupervisorState::GivenUp
            | SupervisorState::BackingOff { .. } => true,
            SupervisorState::Stopped
            | SupervisorState::Starting { .. }
            | SupervisorState::Found { .. }
            | SupervisorState::Ready { .. }
            | SupervisorState::Draining { .. }
            | SupervisorState::Stopping { .. } => false,
        };
        ill.then(|| not_granting_error(&label(entry, uuid), entry, &seen, false))
    });
    let open = entries.iter().filter_map(|(uuid, entry)| {
        compute_mode::bypass_error(mps, &entry.gpu_uuid, &label(entry, uuid)).filter(|_| *uuid == entry.gpu_uuid)
    });
    // Report each GPU that is too old for MPS, because an administrator must change the config.
    let too_old = DesiredTargets::of(mps, Viewer::Agent).gpus.into_iter().filter(|gpu| gpu.mode == Mode::Mps);
    let too_old = too_old.filter_map(|gpu| {
        let error = ApiError::new(Code::Unsupported, format!("GPU {} can't be shared through MPS", gpu.index));
        sharing::mps_unsupported_reason(&gpu).map(|why| error.cause(why).hint(OTHER_MODE))
    });
    ill.chain(open).chain(too_old).collect()
}

/// Returns all daemons, sorted by GPU and MIG device.
///
/// # Errors
/// If gpushd does not know the GPUs yet.
pub(crate) async fn all(mps: &Mps, caller: &Caller) -> Result<Vec<MpsDaemon>, ApiError> {
    let entries = mps.entries().clone();
    let host = mps.handles.state.now();
    if entries.is_empty() {
        missing::gpus_known(&host)?;
    }
    missing::gpus_can_be_named(&host, unplaced(entries.values()))?;
    let fresh = join_all(entries.values().map(|entry| entry.daemon.fresh(FRESH))).await;
    let outlook = DesiredTargets::of(mps, caller.viewer);
    let mut all = Vec::new();
    for ((uuid, entry), seen) in entries.into_iter().zip(fresh) {
        all.push(shown(mps, caller, &outlook, (&uuid, &entry), seen).await);
    }
    all.sort_by(in_order);
    Ok(all)
}

fn in_order(one: &MpsDaemon, other: &MpsDaemon) -> Ordering {
    (one.gpu, &one.device, &one.uuid).cmp(&(other.gpu, &other.device, &other.uuid))
}

/// Polls the daemon that a text names, and describes this daemon.
///
/// # Errors
/// If the text matches no daemon, or several, or if gpushd does not know the GPU of the daemon yet.
pub(crate) async fn one(mps: &Mps, caller: &Caller, text: &str) -> Result<MpsDaemon, ApiError> {
    let (uuid, entry) = find(mps, text)?;
    missing::gpus_can_be_named(&mps.handles.state.now(), unplaced([&entry]))?;
    Ok(describe(mps, caller, &uuid, &entry).await)
}

/// Returns the UUIDs of the GPUs of those daemons whose targets gpushd has not found yet.
fn unplaced<'a>(entries: impl IntoIterator<Item = &'a Entry>) -> impl Iterator<Item = &'a str> {
    entries.into_iter().filter(|entry| entry.target.is_none()).map(|entry| entry.gpu_uuid.as_str())
}

/// Polls a daemon, and describes it.
pub(super) async fn describe(mps: &Mps, caller: &Caller, uuid: &str, entry: &Entry) -> MpsDaemon {
    // Only requests of administrators always cause a poll, because a daemon accepts only one connection at a time. For
    // other users, answers may be up to [`FRESH`] old.
    let seen = entry.daemon.fresh(if caller.viewer.is_admin() { Duration::ZERO } else { FRESH }).await;
    shown(mps, caller, &DesiredTargets::of(mps, caller.viewer), (uuid, entry), seen).await
}

/// Returns the last lines of the logs of the daemon that a text names.
///
/// # Errors
/// If the text matches no daemon.
pub(crate) async fn logs_of(mps: &Mps, text: &str, lines: usize, all: bool) -> Result<MpsLogs, ApiError> {
    let (_, entry) = find(mps, text)?;
    match entry.daemon.last_report().logs {
        Some(dir) => Ok(log::last(&dir, lines, all)),
        None => Ok(MpsLogs { files: Vec::new() }),
    }
}

/// Finds the target that a text names.
///
/// # Errors
/// If the text matches no target, or several.
pub(super) fn find(mps: &Mps, text: &str) -> Result<(String, Entry), ApiError> {
    let entries = mps.entries().clone();
    let outlook = DesiredTargets::of(mps, Viewer::Agent);
    let mut known: Vec<MpsDaemon> =
        entries.iter().map(|(uuid, entry)| describe_without_users(&outlook, uuid, entry)).collect();
    known.sort_by(in_order);
    let at = sharing::resolve(text, &known).map_err(|mut error| {
        error.causes.extend(mps.findings());
        let due = |gpu: &&Gpu| gpu.mode == Mode::Mps && !entries.contains_key(&gpu.uuid);
        let due = outlook.gpus.iter().filter(due).filter(|gpu| sharing::mps_unsupported_reason(gpu).is_none());
        error.causes.extend(due.map(|gpu| {
            format!(
                "the rule of GPU {0} has mode `mps`, but the GPU is not shared yet: `gpushctl apply {0}` \
                (administrator) shares it",
                gpu.index
            )
        }));
        match error.code {
            Code::NotFound => missing::explain(mps, &outlook, text, error),
            _ => error,
        }
    })?;
    let uuid = known.swap_remove(at).uuid;
    let entry =
        entries.get(&uuid).cloned().ok_or_else(|| ApiError::new(Code::NotFound, "the MPS daemon has just ended"))?;
    Ok((uuid, entry))
}

/// Returns the description of a daemon. Its clients, leases and users are not filled in.
fn describe_without_users(outlook: &DesiredTargets, uuid: &str, entry: &Entry) -> MpsDaemon {
    let seen = entry.daemon.last_report();
    // If no rule requires the target any more, find its GPU and MIG device in the current layouts.
    let place = match &entry.target {
        Some(target) => Some((target.gpu, target.device.clone())),
        None => sharing::locate_target(&outlook.gpus, uuid),
    };
    let pid = |pid: i32| u32::try_from(pid).ok();
    MpsDaemon {
        target: entry.short.clone(),
        uuid: uuid.to_owned(),
        gpu: place.as_ref().map(|(gpu, _)| *gpu),
        device: place.and_then(|(_, device)| device),
        state: state(&seen),
        reasons: reasons(&seen, &name(entry)),
        findings: Vec::new(),
        wanted: seen.policy.clone().unwrap_or_default(),
        rule: None,
        in_force: seen.in_force.clone(),
        pid: seen.pid.and_then(pid),
        since: seen.since,
        next_start_at: seen.next_start,
        clients_end_at: seen.until,
        failures: u32::try_from(seen.failures).unwrap_or(u32::MAX),
        ends: None,
        protocol: seen.protocol.clone(),
        pipe_directory: seen.pipe.as_ref().map(|path| path.display().to_string()),
        log_directory: seen.logs.as_ref().map(|path| path.display().to_string()),
        uid: None,
        user: None,
        servers: seen
            .servers
            .iter()
            .filter_map(|(server, state)| {
                Some(MpsServer { pid: Some(pid(*server)?), uid: None, user: None, state: *state })
            })
            .collect(),
        clients: Vec::new(),
        clients_known: seen.clients_known,
        leases: Vec::new(),
        granted_percent: 0,
        stays_stopped: false,
    }
}

async fn shown(
    mps: &Mps,
    caller: &Caller,
    outlook: &DesiredTargets,
    (uuid, entry): (&str, &Entry),
    seen: Report,
) -> MpsDaemon {
    let held = mps.leases_on(uuid);
    let clients = clients::of(mps, &seen, &held).await;
    let mut findings = clients::findings(&seen, &clients, &held);
    if entry.target.as_ref().is_some_and(|target| target.policy.users == MpsUsers::Many) {
        findings.extend(mps.multi_user().as_ref().and_then(multi_user_support::reason_single_user));
    }
    let servers: BTreeMap<u32, u32> = seen
        .servers
        .iter()
        .filter_map(|(pid, _)| u32::try_from(*pid).ok())
        .filter_map(|pid| Some((pid, proc::owner(pid)?)))
        .collect();
    let mut daemon = describe_without_users(outlook, uuid, entry);
    daemon.reasons.extend(control_connection::holders(mps, caller, &seen).await);
    findings.extend(clients::waiting(mps, caller, &seen).await);
    findings.extend(mps.findings_of(&entry.gpu_uuid, uuid));
    let open = compute_mode::bypass_error(mps, &entry.gpu_uuid, &label(entry, uuid));
    findings.extend(open.filter(|_| uuid == entry.gpu_uuid).map(|error| error.sentences().join(": ")));
    let gpu = outlook.gpus.iter().find(|gpu| gpu.uuid == entry.gpu_uuid);
    daemon.ends = outlook.why_removed(uuid, entry);
    match (&daemon.ends, gpu) {
        (Some(why), Some(gpu)) => findings.push(match gpu.mode {
            // If no rule claims the GPU, gpushd stops the daemon itself, so the finding names no command.
            Mode::NoRule | Mode::Unmanaged => {
                format!("no lease is granted: {why}; running leases may finish, then the daemon ends")
            }
            Mode::Exclusive | Mode::Mig | Mode::Mps | Mode::Timeslice => format!(
                "no lease is granted: {why}; running leases may finish, then `gpushctl apply {}` (administrator) \
                ends the daemon",
                gpu.index
            ),
        }),
        (_, gpu) => {
            findings.extend(gpu.and_then(|gpu| eligibility::refusal(gpu, "a lease")).map(|error| error.message));
        }
    }
    for server in &mut daemon.servers {
        server.uid = server.pid.and_then(|pid| servers.get(&pid).copied());
        server.user = match server.uid {
            Some(uid) => mps.handles.users.user(uid).await,
            None => None,
        };
    }
    let tenths: u32 = held.iter().map(|lease| leases::tenths_on(lease, uuid)).sum();
    let leases: Vec<_> = held.iter().map(|lease| lease.to_api(caller.viewer)).collect();
    // Show the user to every caller, as the list of leases does: users who wait for the daemon must see who uses it.
    let taken = !leases.is_empty() || !clients.is_empty() || !seen.waiting.is_empty();
    let uid = seen.user.filter(|_| taken);
    let user = match uid {
        Some(uid) => mps.handles.users.user(uid).await,
        None => None,
    };
    let rule = mps.record(uuid).set.map(|set| set.rule);
    if let Some(target) = &entry.target {
        // A stopped daemon does not report the desired settings, because it has not received them. So add them here.
        daemon.wanted = targets::policy(mps, target);
    }
    let granted_percent = tenths.div_ceil(10);
    let stays_stopped = mps.record(uuid).stopped.is_some();
    let mut daemon = MpsDaemon { findings, clients, leases, granted_percent, uid, user, rule, stays_stopped, ..daemon };
    redact::mps(&mut daemon, caller.viewer);
    daemon
}
