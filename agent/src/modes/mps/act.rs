//! Actions on an MPS daemon: start, stop, restart, drain, and change the settings of its clients.
//!
//! Without `force`, gpushd does not stop or restart a daemon that is in use. The error then names the clients and the
//! leases. A lease counts as use even before the holder's program connects, because the program may take seconds until
//! it calls `cuInit`. If the daemon stopped before that call, the program would run without MPS, and no error would say
//! so.
//!
//! A stopped daemon stays stopped when gpushd restarts, until an administrator starts it.

use std::{sync::Arc, time::Duration};

use gpush_api::{ApiError, Code, MpsActionRequest, MpsDaemon, MpsSetRequest, MpsSetResponse, MpsSettings};
use gpush_core::{
    mps::{DaemonReport, MpsSet, MpsStopped, MpsTarget, MpsTargetRecord},
    sharing,
    supervisor::SupervisorState,
};
use gpush_host::proc;
use gpush_mps::daemon::{DaemonRequest, RequestError};
use gpush_store::{AuditEvent, AuditedTarget};
use jiff::{SignedDuration, Timestamp};
use tokio::time::Instant;

use super::{
    DaemonHandle, Mps, clients, leases_on,
    outlook::{find, outlook},
    reconcile, records, view,
};
use crate::{
    modes::eligibility,
    requests::{caller::Caller, request::Request},
    state::{HostState, words},
};

/// Maximum time that a request may give the clients to finish, in seconds.
const LONGEST: u64 = 30 * 24 * 3600;

/// Maximum time from the record of a change of settings until the answer. Meanwhile, gpushd waits until the daemon has
/// the settings. If a probe of the daemon fails, the next probe follows within 2 s.
const EFFECTIVE_WAIT: Duration = Duration::from_secs(5);

/// An action on a daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MpsAction {
    /// Starts the daemon, even if an administrator stopped it, or gpushd has given up starting it.
    Start,
    /// Stops the daemon.
    Stop,
    /// Stops the daemon and starts it again.
    Restart,
    /// Stops the daemon when its clients and the leases on its target have ended.
    Drain,
}

impl MpsAction {
    /// Returns the name of the action in the path of a request.
    pub(crate) fn verb(self) -> &'static str {
        match self {
            Self::Start => "start",
            Self::Stop => "stop",
            Self::Restart => "restart",
            Self::Drain => "drain",
        }
    }

    /// Returns the name of the action in the audit trail.
    fn name(self) -> &'static str {
        match self {
            Self::Start => "mps.start",
            Self::Stop => "mps.stop",
            Self::Restart => "mps.restart",
            Self::Drain => "mps.drain",
        }
    }
}

/// Performs an action on a daemon. Returns the state of the daemon after the action.
///
/// # Errors
/// If the daemon is in use and `force` is not set, or the action cannot be recorded.
pub(crate) async fn act(
    mps: &Mps,
    caller: &Caller,
    text: &str,
    act: MpsAction,
    how: MpsActionRequest,
    request: Request,
) -> Result<MpsDaemon, ApiError> {
    let target = Arc::clone(find(&mps.handles.context.state.now(), text)?);
    let MpsTarget { uuid, short, gpu_uuid, .. } = &*target;
    let Some(DaemonHandle { daemon, turn }) = mps.daemon(uuid) else { return Err(just_ended()) };
    let within = match how.end_after_s {
        Some(seconds @ 0..=LONGEST) => Some(Duration::from_secs(seconds)),
        Some(seconds) => {
            let message = format!("`end_after_s` must be at most {LONGEST} (30 days), not {seconds}");
            return Err(ApiError::new(Code::BadRequest, message));
        }
        None => None,
    };
    // Grants and operations use this lock too, so none of them can begin between the checks below and the stop of the
    // daemon.
    let turn = turn.lock().await;
    let host = mps.handles.context.state.now();
    let Some(now) = host.mps.get(uuid) else { return Err(just_ended()) };
    if matches!(act, MpsAction::Start | MpsAction::Restart) {
        may_start(mps, &host, caller, now)?;
    }
    // A daemon that is not wanted, for example after a stop, has no policy. A restart of such a daemon must therefore
    // use [`start`], which sets the policy and starts the daemon.
    let settles = host.mps.is_stopped(uuid) || !now.report.wanted;
    let unless_used = !how.force;
    if unless_used && ends_use(act, &now.report) && host.leases.is_occupied(uuid) {
        // Poll the daemon, so that the error also names new clients.
        daemon.refresh(Duration::ZERO).await;
        return Err(in_use(mps, caller, act, &target).await);
    }
    let end = match act {
        MpsAction::Start | MpsAction::Drain => None,
        MpsAction::Restart if !settles => Some(DaemonRequest::Restart { unless_used }),
        MpsAction::Stop | MpsAction::Restart => Some(DaemonRequest::Stop { unless_used }),
    };
    let stopped = match act {
        MpsAction::Start | MpsAction::Restart => None,
        MpsAction::Stop => Some(MpsStopped { by: request.by.clone(), end_at: None }),
        MpsAction::Drain => Some(MpsStopped { by: request.by.clone(), end_at: within.and_then(time_after) }),
    };
    let uid = request.by.uid;
    let recorded = request.recorded(short.clone(), |reason| AuditEvent::MpsAction {
        action: act.name(),
        target: identity(&target),
        reason,
    });
    let change = move |record: MpsTargetRecord| MpsTargetRecord { stopped: stopped.clone(), ..record };
    let record = records::change(mps, uuid, change, recorded);
    match end {
        None => record.await?,
        // With `force`, record the action first and then kill the clients.
        Some(end) if how.force => {
            record.await?;
            daemon.send(end).await?;
        }
        // Without `force`, record the action only after the supervisor has accepted the stop. If this record fails, the
        // reconciler or the next gpushd starts the daemon again.
        Some(end) => {
            if let Err(error) = daemon.send(end).await {
                return Err(match error {
                    RequestError::InUse(_) => in_use(mps, caller, act, &target).await,
                    RequestError::NotYet(error) | RequestError::Failed(error) => error,
                });
            }
            record.await.inspect_err(|_| mps.wakes.wake(gpu_uuid))?;
        }
    }
    tracing::info!(mps = short, uid, "{}", act.name());
    if act == MpsAction::Drain {
        daemon.send(DaemonRequest::Drain(within)).await?;
    }
    let last = mps.target(uuid).unwrap_or_else(|| Arc::clone(&target));
    drop(turn);
    if act == MpsAction::Start || (act == MpsAction::Restart && settles) {
        start(mps, caller, &target).await?;
    }
    Ok(view::describe(mps, caller, &last).await)
}

/// Returns the error for a target that was removed during the request.
fn just_ended() -> ApiError {
    ApiError::new(Code::NotFound, "the MPS daemon has just ended")
}

/// Returns whether an action takes the daemon away from the leases on its target. A restart takes the daemon away only
/// if the daemon runs.
fn ends_use(act: MpsAction, seen: &DaemonReport) -> bool {
    match act {
        MpsAction::Start | MpsAction::Drain => false,
        MpsAction::Stop => !matches!(seen.state, SupervisorState::Stopped),
        MpsAction::Restart => seen.pid.is_some(),
    }
}

/// Starts a daemon. The caller has already recorded that the daemon is not stopped.
async fn start(mps: &Mps, caller: &Caller, target: &MpsTarget) -> Result<(), ApiError> {
    let Some(DaemonHandle { daemon, turn }) = mps.daemon(&target.uuid) else { return Ok(()) };
    let _is_changing = reconcile::reconcile(mps, &target.gpu_uuid).await;
    let _turn = turn.lock().await;
    let host = mps.handles.context.state.now();
    // Do nothing if an administrator has stopped the daemon meanwhile.
    if host.mps.is_stopped(&target.uuid) {
        return Ok(());
    }
    may_start(mps, &host, caller, host.mps.get(&target.uuid).map_or(target, Arc::as_ref))?;
    Ok(daemon.send(DaemonRequest::Start).await?)
}

fn time_after(span: Duration) -> Option<Timestamp> {
    Timestamp::now().checked_add(SignedDuration::try_from(span).ok()?).ok()
}

/// Returns an error if the daemon is not desired, or if maintenance or an operation blocks its start.
fn may_start(mps: &Mps, host: &Arc<HostState>, caller: &Caller, target: &MpsTarget) -> Result<(), ApiError> {
    if let Some(maintenance) = &host.maintenance {
        return Err(words::refusal(maintenance));
    }
    if let Some(why) = outlook(host, caller.viewer).why_removed(target) {
        return Err(target.removed_error(why));
    }
    let Some(target) = &target.desired else {
        let message = format!("cannot start the MPS daemon of {}: its settings are not known yet", target.label());
        return Err(ApiError::new(Code::Unavailable, message)
            .hint("see the state of its GPU with `gpushctl status`, then try again")
            .retryable());
    };
    // While an operation is changing the GPU, refuse the start: the operation may keep the daemon stopped until the
    // operation ends.
    eligibility::not_changing(&mps.handles.context.state, target.gpu, &target.gpu_uuid)
}

/// Returns the error for a daemon that cannot be stopped or restarted because it is in use.
async fn in_use(mps: &Mps, caller: &Caller, act: MpsAction, target: &Arc<MpsTarget>) -> ApiError {
    let host = mps.handles.context.state.now();
    let target = host.mps.get(&target.uuid).unwrap_or(target);
    let (seen, label, name) = (&target.report, target.label(), target.name());
    let leases = leases_on(&host, &target.uuid);
    let inside = seen.client_count();
    let is_leased = host.leases.is_occupied(&target.uuid);
    let why = use_clause(seen.clients_known.then_some(inside), leases.len(), is_leased);
    let verb = act.verb();
    let mut error = ApiError::new(Code::Blocked, format!("cannot {verb} the MPS daemon of {label}: {why}"));
    for client in clients::of(mps, seen, &target.uuid).await {
        let (Some(pid), true) = (client.pid, caller.viewer.may_see(client.uid)) else { continue };
        let whose = match (client.user, client.uid) {
            (Some(user), _) => user,
            (None, Some(uid)) => format!("uid {uid}"),
            (None, None) => "an unknown user".to_owned(),
        };
        error = error.cause(format!("pid {pid} of {whose}: {}", client.command.unwrap_or_default()));
    }
    for pid in seen.waiting.iter().filter(|pid| caller.viewer.may_see(proc::owner(**pid))) {
        error = error.cause(format!("process {pid} is connected and waits for an MPS server"));
    }
    for lease in &leases {
        error = error.cause(lease.describe());
    }
    let force = format!("`gpushctl mps {verb} {name} --force`");
    let hint = match (seen.clients_known && inside == 0, leases.first()) {
        (true, Some(lease)) => {
            format!("release the lease with `gpushctl lease end {}`, or use {force}", lease.id())
        }
        (true, None) => format!("try again, or use {force}"),
        (false, _) => format!("wait for the clients with `gpushctl mps stop {name} --wait`, or end them with {force}"),
    };
    error.hint(hint).retryable()
}

/// Describes the use of a target, as a clause. `clients` is `None` if gpushd does not know the clients. `is_leased` is
/// whether the target has a lease, or a grant that is being recorded.
fn use_clause(clients: Option<usize>, leases: usize, is_leased: bool) -> String {
    match (clients, leases) {
        (None, _) => "gpushd cannot tell whether the MPS daemon has clients".to_owned(),
        (Some(0), 0) if is_leased => "a lease on it is being granted".to_owned(),
        (Some(0), 0) => "its last client has just ended".to_owned(),
        (Some(0), leases) => format!("{} in use", words::leases_clause(leases)),
        (Some(1), _) => "1 client is connected".to_owned(),
        (Some(clients), _) => format!("{clients} clients are connected"),
    }
}

/// Changes the settings of a daemon's clients. The new settings override the settings of the rule.
///
/// # Errors
/// If the settings do not fit the target, or cannot be recorded.
pub(crate) async fn set(
    mps: &Mps,
    caller: &Caller,
    text: &str,
    change: MpsSetRequest,
    request: Request,
) -> Result<MpsSetResponse, ApiError> {
    let target = Arc::clone(find(&mps.handles.context.state.now(), text)?);
    let (uuid, label) = (&target.uuid, target.label());
    let Some(DaemonHandle { turn, .. }) = mps.daemon(uuid) else { return Err(just_ended()) };
    // Lock before reading the settings, so that no concurrent change is lost.
    let turn = turn.lock().await;
    let host = mps.handles.context.state.now();
    if let Some(why) = outlook(&host, caller.viewer).why_removed(&target) {
        return Err(target.removed_error(why));
    }
    let Some(desired) = &target.desired else {
        return Err(ApiError::new(Code::Conflict, format!("{label} is no longer shared through MPS")));
    };
    let rule = desired.policy.settings.clone();
    let before = host.mps.record(uuid).set.map_or_else(|| rule.clone(), |set| set.settings);
    let settings = changed_settings(&change, if change.reset { &rule } else { &before });
    if let Some(memory) = desired.memory_mib {
        sharing::check_memory_limit(&settings, memory, &label)?;
    }
    let set = (settings != rule).then(|| MpsSet { settings: settings.clone(), rule: rule.clone() });
    let set = move |record: MpsTargetRecord| MpsTargetRecord { set: set.clone(), ..record };
    let recorded =
        request.recorded(target.short.clone(), |reason| audited(&change, &settings, identity(&target), reason));
    records::change(mps, uuid, set, recorded).await?;
    drop(turn);
    let deadline = Instant::now() + EFFECTIVE_WAIT;
    let is_changing = reconcile::reconcile(mps, &target.gpu_uuid).await;
    let seen = wait_until_effective(mps, &target, &settings, deadline).await.report.clone();
    let daemon = view::describe(mps, caller, &target).await;
    let latest = mps.handles.context.state.mps().record(uuid).set.map_or(rule, |set| set.settings);
    let reaches = if latest != settings {
        vec!["another request has changed the settings again".to_owned()]
    } else if is_changing && !is_desired(&seen, &settings) {
        vec!["the change takes effect when the operation that changes the GPU has ended".to_owned()]
    } else {
        describe_effect(&before, &settings, daemon.clients.len(), &seen)
    };
    Ok(MpsSetResponse { daemon, reaches })
}

/// Returns the settings `from` with the changes of a request.
fn changed_settings(change: &MpsSetRequest, from: &MpsSettings) -> MpsSettings {
    MpsSettings {
        percentage: change.percentage.unwrap_or(from.percentage),
        memory_limit_mib: change.memory_limit_mib.or(from.memory_limit_mib),
        priority: change.priority.unwrap_or(from.priority),
    }
}

/// Returns whether the report `seen` has `settings` as the desired settings.
fn is_desired(seen: &DaemonReport, settings: &MpsSettings) -> bool {
    seen.policy.as_ref().is_some_and(|policy| policy.settings == *settings)
}

/// Waits until the settings of a running daemon are effective. Returns the target as last reported. Does not wait if these
/// are not the desired settings, for example because a later request has changed them.
async fn wait_until_effective(
    mps: &Mps,
    target: &Arc<MpsTarget>,
    settings: &MpsSettings,
    deadline: Instant,
) -> Arc<MpsTarget> {
    let is_over = |seen: &DaemonReport| {
        let runs = match seen.state {
            SupervisorState::Ready { .. }
            | SupervisorState::Found { .. }
            | SupervisorState::Hung { .. }
            | SupervisorState::Fault { .. } => true,
            SupervisorState::Starting { .. }
            | SupervisorState::Draining { .. }
            | SupervisorState::Stopping { .. }
            | SupervisorState::Stopped
            | SupervisorState::BackingOff { .. }
            | SupervisorState::GivenUp => false,
        };
        !runs || seen.in_force.as_ref() == Some(settings) || !is_desired(seen, settings)
    };
    let mut snapshots = mps.handles.context.state.watch();
    let effective = snapshots.wait_for(|host| host.mps.get(&target.uuid).is_none_or(|target| is_over(&target.report)));
    // After the deadline, the last report says what is known.
    let _late = tokio::time::timeout_at(deadline, effective).await.is_err();
    mps.target(&target.uuid).unwrap_or_else(|| Arc::clone(target))
}

/// Returns the event of a change of settings: the settings that the request changes, with their new values.
fn audited(change: &MpsSetRequest, now: &MpsSettings, target: AuditedTarget, reason: Option<String>) -> AuditEvent {
    AuditEvent::MpsSet {
        target,
        percentage: change.percentage.map(|_| now.percentage),
        memory_limit_mib: change.memory_limit_mib.and(now.memory_limit_mib),
        priority: change.priority.map(|_| now.priority),
        from_rule: change.reset,
        reason,
    }
}

fn identity(target: &MpsTarget) -> AuditedTarget {
    AuditedTarget { uuid: target.uuid.clone(), gpu_uuid: target.gpu_uuid.clone() }
}

/// Describes which clients a change of settings affects, according to NVIDIA's documentation. `running` is the number of
/// clients.
fn describe_effect(before: &MpsSettings, now: &MpsSettings, running: usize, seen: &DaemonReport) -> Vec<String> {
    let is_effective = seen.in_force.as_ref() == Some(now);
    if before == now && (is_effective || seen.pid.is_none()) {
        return vec!["no change: the daemon already had these settings".to_owned()];
    }
    match seen.state {
        SupervisorState::Ready { .. } if is_effective => {}
        SupervisorState::Ready { .. } if is_desired(seen, now) => {
            return vec!["the change takes effect when the daemon answers gpushd".to_owned()];
        }
        SupervisorState::Ready { .. } => {
            return vec!["the change takes effect when gpushd has read the GPU".to_owned()];
        }
        SupervisorState::Found { .. } | SupervisorState::Hung { .. } | SupervisorState::Fault { .. } => {
            return vec!["the change takes effect when the daemon is ready".to_owned()];
        }
        SupervisorState::Draining { .. } | SupervisorState::Stopping { .. } | SupervisorState::Stopped => {
            return vec!["the change takes effect when the daemon is started again".to_owned()];
        }
        SupervisorState::Starting { .. } | SupervisorState::BackingOff { .. } | SupervisorState::GivenUp => {
            return vec!["the change takes effect when the daemon has started".to_owned()];
        }
    }
    let mut reaches = vec!["the change applies to clients that start from now on".to_owned()];
    if running > 0 {
        reaches.push(format!("the clients that run now ({running}) keep their settings"));
    }
    if before.memory_limit_mib != now.memory_limit_mib && !seen.servers.is_empty() {
        reaches.push("an MPS server that runs now keeps its memory limit until it ends".to_owned());
    }
    reaches
}

#[cfg(test)]
mod tests;
