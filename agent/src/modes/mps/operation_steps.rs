//! Executes the steps of operations that stop and start MPS daemons.
//!
//! Only an operation changes how a GPU is shared; a reload alone does not. The daemon of a whole GPU is *in force* if
//! an operation has started it on this boot.
//!
//! ```text
//! StopDaemon  ─► used since the plan ──► refused
//!             └─ idle ─► stopped before all other steps, and stays stopped until the operation ends
//! StartDaemon ─► started after all other steps
//! end ─► done: in force, or no longer, recorded with the end
//!     └► rolled back: as before, according to the record
//! ```
//!
//! An MPS server of gpushd without clients does not count as a use of its GPU, so it does not block an operation. MIG
//! mode allows only the default compute mode. So when the daemon exits, gpushd restores the compute mode before it
//! enables MIG mode.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use futures_util::future::join_all;
use gpush_api::{ApiError, Code, GpuUuid, TargetUuid};
use gpush_core::{
    mps::{DaemonReport, MpsTarget},
    supervisor::SupervisorState,
};
use gpush_mps::daemon::{DaemonRequest, TargetDir};
use tokio::{task::JoinSet, time::timeout};

use super::{DaemonHandle, Mps, compute_mode, outlook::outlook, reconcile, uses};
use crate::{requests::caller::Viewer, state::HostState};

/// Extra time that gpushd waits after the time limit for the stop or start of a daemon.
const MARGIN: Duration = Duration::from_secs(5);

/// Interval at which gpushd checks whether all processes of an exited daemon have ended.
const CHECK: Duration = Duration::from_millis(5);

/// Stops the daemon of target `uuid` on GPU `gpu`, and keeps it stopped until the operation ends. `label` is the
/// target's name in errors.
///
/// # Errors
/// If the daemon does not exit, or a lease or a client has appeared since the plan was made.
pub(crate) async fn stop_for_operation(
    mps: &Mps,
    operation: &str,
    gpu: &GpuUuid,
    uuid: &TargetUuid,
    label: &str,
) -> Result<(), ApiError> {
    // If the daemon no longer exists, there is nothing to stop.
    let Some(DaemonHandle { daemon, turn }) = mps.daemon(uuid) else { return Ok(()) };
    // While this lock is held, no lease can be granted. After admission is closed, the daemon refuses new clients. So
    // no new use can begin after the check below.
    let turn = turn.lock().await;
    let shut = daemon.send(DaemonRequest::CloseAdmission).await;
    let host = mps.handles.context.state.now();
    let Some(target) = host.mps.get(uuid) else { return Ok(()) };
    let used = uses(&host, target);
    if !used.is_empty() {
        let _it_is = daemon.send(DaemonRequest::OpenAdmission).await;
        let mut error = ApiError::new(Code::Blocked, format!("{label} is in use now")).retryable();
        error.causes = used;
        return Err(error);
    }
    shut?;
    mps.handles.context.state.change_mps(|targets| targets.operation(operation).kept_stopped.insert(uuid.clone()));
    daemon.send(DaemonRequest::Stop { unless_used: false }).await?;
    drop(turn);
    wait_until_exited(mps, target, mps.handles.context.host_services.constants.mps.stop + MARGIN).await?;
    compute_mode::restore_compute_mode(mps, uuid).await;
    mps.handles.context.readings.invalidate(gpu);
    Ok(())
}

/// Waits until all processes of a daemon have exited.
async fn wait_until_exited(mps: &Mps, target: &MpsTarget, patience: Duration) -> Result<(), ApiError> {
    let place = TargetDir::of(&mps.base, &target.short);
    let mut snapshots = mps.handles.context.state.watch();
    let is_stopped = |host: &Arc<HostState>| {
        host.mps.get(&target.uuid).is_none_or(|target| target.report.state == SupervisorState::Stopped)
    };
    let gone = async {
        loop {
            let stopped = snapshots.wait_for(is_stopped).await.is_ok();
            if stopped && !place.is_locked() {
                return;
            }
            // Check again after a pause, because no event reports that the last process has released its lock.
            tokio::time::sleep(CHECK).await;
        }
    };
    if timeout(patience, gone).await.is_ok() {
        return Ok(());
    }
    let message = format!("the MPS daemon {} does not end", target.short);
    Err(ApiError::new(Code::Unavailable, message)
        .hint(format!("see its state with `gpushctl mps show {}`", target.name())))
}

/// Starts the daemon of a whole GPU, and waits until it serves clients.
///
/// # Errors
/// If the daemon does not serve in time.
pub(crate) async fn start_and_wait(mps: &Mps, operation: &str, uuid: &GpuUuid) -> Result<(), ApiError> {
    mps.handles.context.state.change_mps(|targets| targets.operation(operation).starting.insert(uuid.clone()));
    // Read the GPU, because the last reading may be from before the earlier steps of the operation.
    if let Err(error) = mps.handles.context.readings.read_now(uuid).await {
        tracing::warn!(gpu = uuid.as_str(), "cannot read GPU {uuid} before its MPS daemon is started: {error}");
    }
    reconcile::reconcile_owned(mps, uuid).await;
    let patience = mps.handles.context.host_services.constants.mps.start + MARGIN;
    let host = mps.handles.context.state.now();
    let target = host.mps.get(uuid.as_target());
    let label = target.map_or_else(|| format!("GPU {uuid}"), |target| target.label());
    if let Some(error) = host.mps.bypass_error(uuid, &label) {
        compute_mode::restore_after_failed_start(mps, operation, uuid).await;
        return Err(error.hint(
            "remove the cause, then apply again; to leave the compute mode unchanged, set `compute_mode = \"keep\"` \
            in the rule",
        ));
    }
    if target.is_none() {
        let mut error = ApiError::new(Code::Unsupported, "an MPS daemon cannot run on this GPU");
        error.causes = outlook(&host, Viewer::Agent).findings();
        return Err(error.hint("remove the cause, then apply again"));
    }
    let mut snapshots = mps.handles.context.state.watch();
    let decided = snapshots.wait_for(|host| {
        host.mps
            .get(uuid.as_target())
            .is_none_or(|target| is_decided(&target.report, host.mps.is_stopped(uuid.as_target())))
    });
    let _in_time = timeout(patience, decided).await.is_ok();
    let host = mps.handles.context.state.now();
    let seen = host.mps.get(uuid.as_target()).map(|target| &target.report);
    match seen.map(|seen| &seen.state) {
        Some(SupervisorState::Ready { .. }) => return Ok(()),
        // An administrator has stopped the daemon, so the operation does not start it.
        Some(SupervisorState::Stopped) if host.mps.is_stopped(uuid.as_target()) => return Ok(()),
        _ => {}
    }
    compute_mode::restore_after_failed_start(mps, operation, uuid).await;
    let mut error = ApiError::new(Code::Conflict, format!("the MPS daemon of {label} does not start"));
    error.causes = seen.map(|seen| seen.trouble.clone()).unwrap_or_default();
    // A daemon that has never run has no logs.
    let logs = seen.and_then(|seen| seen.logs.as_ref()).filter(|logs| logs.exists());
    Err(match logs {
        Some(logs) => error.hint(format!("see its log in {}", logs.display())),
        None => error.hint("remove the cause, then apply again"),
    })
}

/// Returns whether the start of a daemon has ended, with success or with a failure. `is_stopped` is whether an administrator has stopped the
/// daemon.
fn is_decided(report: &DaemonReport, is_stopped: bool) -> bool {
    match report.state {
        SupervisorState::Ready { .. } | SupervisorState::GivenUp => true,
        // After the first failure, gpushd starts the daemon again at once. Wait for this second attempt.
        SupervisorState::BackingOff { .. } => report.failures != 1,
        SupervisorState::Stopped => is_stopped,
        SupervisorState::Starting { .. }
        | SupervisorState::Found { .. }
        | SupervisorState::Hung { .. }
        | SupervisorState::Fault { .. }
        | SupervisorState::Draining { .. }
        | SupervisorState::Stopping { .. } => false,
    }
}

/// Starts the desired daemons of these GPUs and their MIG devices. Waits until each daemon serves clients, has failed, or
/// the time is over. `layouts` has for each GPU, by UUID, the layout of the new override; `None` if the operation changes
/// no override. Returns a sentence for each daemon that did not start. The operation does not fail because of such a
/// daemon.
pub(crate) async fn start_device_daemons(
    mps: &Mps,
    operation: &str,
    layouts: BTreeMap<GpuUuid, Option<Vec<String>>>,
) -> Vec<String> {
    let on: BTreeSet<GpuUuid> = layouts.keys().cloned().collect();
    if on.is_empty() {
        return Vec::new();
    }
    mps.handles.context.state.change_mps(|targets| {
        let daemons = targets.operation(operation);
        daemons.starting.extend(on.iter().cloned());
        daemons.layouts.extend(layouts.into_iter().filter_map(|(gpu, layout)| Some((gpu, layout?))));
    });
    // The last readings may be from before the earlier steps of the operation.
    let uuids: Vec<GpuUuid> = on.iter().cloned().collect();
    let _read = mps.handles.context.readings.now(&uuids).await;
    // The operation already has the lanes of these GPUs, so reconcile without locking them.
    let reconciled = on.iter().map(|uuid| {
        let (mps, uuid) = (mps.clone(), uuid.clone());
        async move { reconcile::reconcile_owned(&mps, &uuid).await }
    });
    reconciled.collect::<JoinSet<()>>().join_all().await;
    let host = mps.handles.context.state.now();
    // Wait only for daemons that are desired. An operation keeps others stopped, such as the daemon of the whole GPU. And
    // the daemon of a device that an earlier operation has destroyed stays stopped until gpushd removes the target.
    let awaited = host.mps.all().filter(|target| on.contains(&target.gpu_uuid) && target.report.wanted);
    let awaited: Vec<&Arc<MpsTarget>> = awaited.collect();
    let patience = mps.handles.context.host_services.constants.mps.start + MARGIN;
    let decided = awaited.iter().map(|target| async {
        let _is_decided = mps.handles.context.state.watch().wait_for(|host| !is_late(host, target)).await.is_ok();
    });
    let _in_time = timeout(patience, join_all(decided)).await.is_ok();
    let host = mps.handles.context.state.now();
    awaited.into_iter().filter_map(|target| sentence_on(&host, target)).collect()
}

/// Returns whether the daemon of a target may still start, so that waiting makes sense. Do not wait for a daemon that an
/// administrator has stopped.
fn is_late(host: &HostState, target: &MpsTarget) -> bool {
    let is_stopped = host.mps.is_stopped(&target.uuid);
    host.mps.get(&target.uuid).is_some_and(|target| match target.report.state {
        SupervisorState::Stopped
        | SupervisorState::Starting { .. }
        | SupervisorState::Found { .. }
        | SupervisorState::Stopping { .. } => !is_stopped,
        // After the first failure, gpushd starts the daemon again at once. Wait for this second attempt.
        SupervisorState::BackingOff { .. } => target.report.failures == 1 && !is_stopped,
        // Do not wait: the daemon serves clients, or its state shows the problem.
        SupervisorState::Ready { .. }
        | SupervisorState::Hung { .. }
        | SupervisorState::Fault { .. }
        | SupervisorState::Draining { .. }
        | SupervisorState::GivenUp => false,
    })
}

/// Returns the sentence that an operation reports if a daemon does not serve, unless an administrator has stopped it.
fn sentence_on(host: &HostState, target: &MpsTarget) -> Option<String> {
    let target = host.mps.get(&target.uuid).filter(|target| !host.mps.is_stopped(&target.uuid))?;
    match &target.report.state {
        SupervisorState::BackingOff { .. } | SupervisorState::GivenUp => {
            let why = target.report.trouble.join(", ");
            Some(format!("the MPS daemon of {} does not start: {why}", target.label()))
        }
        _ => is_late(host, target).then(|| format!("the MPS daemon of {} is not ready yet", target.label())),
    }
}

impl Mps {
    /// Forgets which daemons an operation starts or keeps stopped. After that, only the records determine which daemons
    /// gpushd starts or keeps stopped.
    pub(crate) fn forget_operation(&self, operation: &str) {
        if self.handles.context.state.change_mps(|targets| targets.operations.remove(operation)).is_some() {
            self.wake_all();
        }
    }
}

#[cfg(test)]
mod tests;
