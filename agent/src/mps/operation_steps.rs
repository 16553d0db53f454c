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
    time::Duration,
};

use gpush_api::{ApiError, Code};
use gpush_core::supervisor::SupervisorState;
use gpush_mps::daemon::{DaemonRequest, Report, TargetDir};
use tokio::{task::JoinSet, time::timeout};

use super::{Entry, Mps, compute_mode, daemon_state, present, reconcile};

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
    gpu: &str,
    uuid: &str,
    label: &str,
) -> Result<(), ApiError> {
    // If the daemon no longer exists, there is nothing to stop.
    let Some(entry) = mps.entries().get(uuid).cloned() else { return Ok(()) };
    // While this lock is held, no lease can be granted. After admission is closed, the daemon refuses new clients. So
    // no new use can begin after the check below.
    let turn = entry.turn.lock().await;
    let shut = entry.daemon.send(DaemonRequest::CloseAdmission).await;
    let used = present::users(mps, uuid, &entry);
    if !used.is_empty() {
        let _it_is = entry.daemon.send(DaemonRequest::OpenAdmission).await;
        let mut error = ApiError::new(Code::Blocked, format!("{label} is in use now")).retryable();
        error.causes = used;
        return Err(error);
    }
    shut?;
    mps.operation_daemons().entry(operation.to_owned()).or_default().aside.insert(uuid.to_owned());
    entry.daemon.send(DaemonRequest::Stop { unless_used: false }).await?;
    drop(turn);
    let config = mps.handles.state.config();
    wait_until_exited(mps, &entry, Duration::from_secs(config.mps.stop_s.into()) + MARGIN).await?;
    compute_mode::restore_compute_mode(mps, uuid).await;
    mps.handles.readings.invalidate(gpu);
    Ok(())
}

/// Waits until all processes of a daemon have exited.
async fn wait_until_exited(mps: &Mps, entry: &Entry, patience: Duration) -> Result<(), ApiError> {
    let place = TargetDir::of(&mps.base, &entry.short);
    let mut seen = entry.daemon.follow();
    let gone = async {
        loop {
            let stopped = seen.wait_for(|seen| seen.state == SupervisorState::Stopped).await.is_ok();
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
    let message = format!("the MPS daemon {} does not end", entry.short);
    Err(ApiError::new(Code::Unavailable, message)
        .hint(format!("see its state with `gpushctl mps show {}`", daemon_state::name(entry))))
}

/// Starts the daemon of a whole GPU, and waits until it serves clients.
///
/// # Errors
/// If the daemon does not serve in time.
pub(crate) async fn start_and_wait(mps: &Mps, operation: &str, uuid: &str) -> Result<(), ApiError> {
    mps.operation_daemons().entry(operation.to_owned()).or_default().starting.insert(uuid.to_owned());
    // Read the GPU, because the last reading may be from before the earlier steps of the operation.
    if let Err(error) = mps.handles.readings.read_now(uuid).await {
        tracing::warn!(gpu = uuid, "cannot read GPU {uuid} before its MPS daemon is started: {error}");
    }
    reconcile::reconcile_owned(mps, uuid).await;
    let patience = Duration::from_secs(mps.handles.state.config().mps.start_s.into()) + MARGIN;
    let label = mps.entries().get(uuid).map_or_else(|| format!("GPU {uuid}"), |entry| daemon_state::label(entry, uuid));
    if let Some(error) = compute_mode::bypass_error(mps, uuid, &label) {
        compute_mode::restore_after_failed_start(mps, operation, uuid).await;
        return Err(error.hint(
            "remove the cause, then apply again; to leave the compute mode unchanged, set `compute_mode = \"keep\"` \
            in the rule",
        ));
    }
    let Some(entry) = mps.entries().get(uuid).cloned() else {
        let mut error = ApiError::new(Code::Unsupported, "an MPS daemon cannot run on this GPU");
        error.causes = mps.findings();
        return Err(error.hint("remove the cause, then apply again"));
    };
    let is_stopped = || mps.record(uuid).stopped.is_some();
    let mut follow = entry.daemon.follow();
    let decided = follow.wait_for(|seen| match seen.state {
        SupervisorState::Ready { .. } | SupervisorState::GivenUp => true,
        // After the first failure, gpushd starts the daemon again at once. Wait for this second attempt.
        SupervisorState::BackingOff { .. } => seen.failures != 1,
        SupervisorState::Stopped => is_stopped(),
        SupervisorState::Starting { .. }
        | SupervisorState::Found { .. }
        | SupervisorState::Hung { .. }
        | SupervisorState::Fault { .. }
        | SupervisorState::Draining { .. }
        | SupervisorState::Stopping { .. } => false,
    });
    let _in_time = timeout(patience, decided).await.is_ok();
    let seen = entry.daemon.last_report();
    match seen.state {
        SupervisorState::Ready { .. } => return Ok(()),
        // An administrator has stopped the daemon, so the operation does not start it.
        SupervisorState::Stopped if is_stopped() => return Ok(()),
        _ => {}
    }
    compute_mode::restore_after_failed_start(mps, operation, uuid).await;
    let label = daemon_state::label(&entry, uuid);
    let mut error = ApiError::new(Code::Conflict, format!("the MPS daemon of {label} does not start"));
    error.causes = seen.trouble;
    // A daemon that has never run has no logs.
    let logs = seen.logs.filter(|logs| logs.exists());
    Err(match logs {
        Some(logs) => error.hint(format!("see its log in {}", logs.display())),
        None => error.hint("remove the cause, then apply again"),
    })
}

/// Starts the desired daemons of these GPUs and their MIG devices. Waits until each daemon serves clients, has failed, or
/// the time is over. `layouts` has for each GPU, by UUID, the layout of the new override; `None` if the operation changes
/// no override. Returns a sentence for each daemon that did not start. The operation does not fail because of such a
/// daemon.
pub(crate) async fn start_device_daemons(
    mps: &Mps,
    operation: &str,
    layouts: BTreeMap<String, Option<Vec<String>>>,
) -> Vec<String> {
    let on: BTreeSet<String> = layouts.keys().cloned().collect();
    if on.is_empty() {
        return Vec::new();
    }
    {
        let mut daemons = mps.operation_daemons();
        let moves = daemons.entry(operation.to_owned()).or_default();
        moves.starting.extend(on.iter().cloned());
        moves.layouts.extend(layouts.into_iter().filter_map(|(gpu, layout)| Some((gpu, layout?))));
    }
    // The last readings may be from before the earlier steps of the operation.
    let uuids: Vec<String> = on.iter().cloned().collect();
    let _read = mps.handles.readings.now(&uuids).await;
    // The operation already has the lanes of these GPUs, so reconcile without locking them.
    let reconciled = on.iter().map(|uuid| {
        let (mps, uuid) = (mps.clone(), uuid.clone());
        async move { reconcile::reconcile_owned(&mps, &uuid).await }
    });
    reconciled.collect::<JoinSet<()>>().join_all().await;
    let entries = mps.entries().clone();
    // Wait only for daemons that are desired. An operation keeps others stopped, such as the daemon of the whole GPU. And
    // the daemon of a device that an earlier operation has destroyed stays stopped until gpushd removes its entry.
    let here = |entry: &Entry| on.contains(&entry.gpu_uuid) && entry.daemon.last_report().wanted;
    let awaited: Vec<(String, Entry)> = entries.into_iter().filter(|(_, entry)| here(entry)).collect();
    let patience = Duration::from_secs(mps.handles.state.config().mps.start_s.into()) + MARGIN;
    let decided = awaited.iter().map(|(uuid, entry)| {
        let (mps, uuid, mut seen) = (mps.clone(), uuid.clone(), entry.daemon.follow());
        async move {
            // Stop waiting for a daemon if an administrator stops it.
            let is_decided = |seen: &Report| !is_late(&seen.state) || mps.record(&uuid).stopped.is_some();
            let _gone = seen.wait_for(is_decided).await.is_err();
        }
    });
    let _in_time = timeout(patience, decided.collect::<JoinSet<()>>().join_all()).await.is_ok();
    awaited.iter().filter(|(uuid, _)| mps.record(uuid).stopped.is_none()).filter_map(sentence_on).collect()
}

/// Returns whether a daemon may still start, so that waiting makes sense.
fn is_late(state: &SupervisorState) -> bool {
    match state {
        SupervisorState::Stopped
        | SupervisorState::Starting { .. }
        | SupervisorState::Found { .. }
        | SupervisorState::Stopping { .. } => true,
        // Do not wait: the daemon serves clients, or its state shows the problem.
        SupervisorState::Ready { .. }
        | SupervisorState::Hung { .. }
        | SupervisorState::Fault { .. }
        | SupervisorState::Draining { .. } => false,
        SupervisorState::BackingOff { .. } | SupervisorState::GivenUp => false,
    }
}

/// Returns the sentence that an operation reports if a daemon does not serve.
fn sentence_on((uuid, entry): &(String, Entry)) -> Option<String> {
    let (seen, label) = (entry.daemon.last_report(), daemon_state::label(entry, uuid));
    match seen.state {
        SupervisorState::BackingOff { .. } | SupervisorState::GivenUp => {
            Some(format!("the MPS daemon of {label} does not start: {}", seen.trouble.join(", ")))
        }
        state => is_late(&state).then(|| format!("the MPS daemon of {label} is not ready yet")),
    }
}
