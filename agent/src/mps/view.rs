//! Describes daemons for the API, and finds the daemon that a request names.

use std::{cmp::Ordering, collections::BTreeMap, time::Duration};

use futures_util::future::join_all;
use gpush_api::{ApiError, Code, Gpu, MemberShare, Mode, MpsDaemon, MpsLogs, MpsServer, MpsUsers};
use gpush_core::{sharing, supervisor::SupervisorState};
use gpush_host::proc;
use gpush_mps::daemon::{Report, log};

use super::{
    Entry, Mps, clients, compute_mode, control_connection,
    daemon_state::{label, name, not_granting_error, reasons, state},
    missing, multi_user_support,
    targets::{self, DesiredTargets},
};
use crate::{
    caller::{Caller, Viewer},
    eligibility,
    state::{OpenLease, redact},
};

/// Maximum age of the data about a daemon that a response shows.
const FRESH: Duration = Duration::from_secs(1);

/// The hint for a GPU that is too old for MPS.
pub(super) const OTHER_MODE: &str = "set another mode in the GPU's rule, such as \"exclusive\" or \"timeslice\"";

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
    let clients = clients::of(mps, &seen, uuid).await;
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
    let tenths: u32 = held.iter().map(|lease| tenths_on(lease, uuid)).sum();
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

/// Returns which part of a target a lease may use, in tenths of a percent.
fn tenths_on(lease: &OpenLease, target: &str) -> u32 {
    let here = lease.record.members.iter().filter(|member| member.target == target);
    here.map(|member| match &member.share {
        MemberShare::Mps { percentage, .. } => u32::from(percentage.tenths()),
        MemberShare::Mig { .. } | MemberShare::Timeslice { .. } | MemberShare::Whole => 0,
    })
    .sum()
}
