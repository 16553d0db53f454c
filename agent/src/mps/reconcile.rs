//! Starts and stops daemons as desired. Each GPU has one task, which holds the lane of the GPU while it starts and
//! stops daemons.
//!
//! ```text
//! a daemon was found, or its target is desired ──► an entry, with a supervisor task
//!    desired ───────────────────────────────────► started, or set to its policy
//!    not desired, or stopped on request ────────► drained, then stopped
//!    its GPU cannot be read ────────────────────► unchanged: it may be in use
//! stopped, and not desired ─────────────────────► no entry, no directory
//! ```
//!
//! An operation holds the lanes of its GPUs, so it reconciles their daemons itself, with [`reconcile_owned`]. If the
//! reading of a GPU hangs, only the task of this GPU waits.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use gpush_api::{Actor, Gpu, GpuState, MpsScope, MpsUsers, Override};
use gpush_core::{
    config::Config,
    desired,
    sharing::{self, SharingTarget},
    supervisor::SupervisorState,
};
use gpush_host::subtask;
use gpush_mps::daemon::{DaemonRequest, Desired, Report, TargetDir};
use jiff::{SignedDuration, Timestamp};
use tokio::task::JoinSet;

use super::{
    Entry, Mps, compute_mode, daemon_state, multi_user_support, records,
    targets::{add_or_update, desired_state, gets_daemon, is_reading_conclusive, program},
};
use crate::{
    caller::Viewer,
    state::{GpuSnapshot, HostState},
};

/// Interval at which gpushd checks the daemons even if nothing has changed.
const INTERVAL: Duration = Duration::from_secs(30);

/// Reconciles the daemons until gpushd stops. After that, the daemons keep running.
pub(crate) async fn run(mps: Mps) {
    let mut snapshots = mps.handles.state.watch();
    let mut reconcilers = JoinSet::new();
    let mut reconciled = BTreeSet::new();
    loop {
        let listed = snapshots.borrow_and_update().gpus.iter().map(|gpu| gpu.gpu.uuid.clone()).collect::<Vec<_>>();
        let with_daemon = mps.entries().values().map(|entry| entry.gpu_uuid.clone()).collect::<Vec<_>>();
        for uuid in listed.iter().cloned().chain(with_daemon) {
            if reconciled.insert(uuid.clone()) {
                reconcilers.spawn(reconcile_periodically(mps.clone(), uuid));
            }
        }
        let is_new = |host: &Arc<HostState>| host.gpus.iter().any(|gpu| !reconciled.contains(&gpu.gpu.uuid));
        tokio::select! {
            () = mps.handles.stopping.cancelled() => break,
            _ = snapshots.wait_for(is_new) => {}
            // A reconciler returns only if gpushd stops. If it has panicked, this task panics too.
            Some(()) = subtask::next(&mut reconcilers) => {}
            () = tokio::time::sleep(INTERVAL) => {}
        }
    }
    reconcilers.join_all().await;
}

/// Reconciles the daemons of a GPU until gpushd stops: first at once, then when the GPU or the config changes, when
/// another task wakes this one, and after each [`INTERVAL`].
async fn reconcile_periodically(mps: Mps, gpu_uuid: String) {
    let mut snapshots = mps.handles.state.watch();
    let mut wakeups = mps.wakes.follow(&gpu_uuid);
    let stopping = mps.handles.stopping.clone();
    loop {
        let before = Arc::clone(&snapshots.borrow_and_update());
        wakeups.mark_unchanged();
        let reconciled = async {
            reconcile(&mps, &gpu_uuid).await;
            mps.handles.shared_gpus.wake_leftover_check();
        };
        if stopping.run_until_cancelled(reconciled).await.is_none() {
            return;
        }
        tokio::select! {
            () = stopping.cancelled() => return,
            _ = snapshots.wait_for(|host| has_changed(&before, host, &gpu_uuid)) => {}
            _ = wakeups.changed() => {}
            () = tokio::time::sleep(INTERVAL) => {}
        }
    }
}

/// Returns whether the GPU or the config has changed between two snapshots.
fn has_changed(before: &HostState, now: &HostState, gpu_uuid: &str) -> bool {
    let differs = match (before.gpu(gpu_uuid), now.gpu(gpu_uuid)) {
        // An override changes the layout, but no field that events report.
        (Some(before), Some(now)) => before.differs_from(now) || before.gpu.layout != now.gpu.layout,
        (None, None) => false,
        (Some(_), None) | (None, Some(_)) => true,
    };
    differs || !Arc::ptr_eq(&before.config, &now.config)
}

/// Reconciles the daemons of a GPU with their desired state. Returns `true` if an operation is changing the GPU: that
/// operation reconciles the daemons itself.
pub(super) async fn reconcile(mps: &Mps, gpu_uuid: &str) -> bool {
    if !concerns(mps, gpu_uuid) {
        return false;
    }
    let Some(_turn) = mps.handles.lanes.lock(gpu_uuid).await else { return true };
    reconcile_owned(mps, gpu_uuid).await;
    false
}

/// Returns whether a GPU has a daemon, or whether its rule or override requests a daemon. Otherwise the reconciler need
/// not read the GPU.
fn concerns(mps: &Mps, gpu_uuid: &str) -> bool {
    if mps.entries().values().any(|entry| entry.gpu_uuid == gpu_uuid) {
        return true;
    }
    let host = mps.handles.state.now();
    let Some(gpu) = host.gpu(gpu_uuid) else { return false };
    let wish = desired::desired_state(&host.config, gpu.rule, &gpu.gpu);
    let is_wanted = match wish.mode.mps_scope() {
        MpsScope::WholeGpu => true,
        // If the layout of the override cannot be parsed, gpushd does not know whether the layout requests a daemon. So
        // assume that it does.
        MpsScope::MigDevices => wish.layout.map_or(gpu.gpu.overridden.is_some(), |layout| layout.shared().is_some()),
        MpsScope::Nothing => false,
    };
    if !is_wanted {
        mps.set_findings(gpu_uuid, Vec::new());
    }
    is_wanted
}

/// Reconciles the daemons of a GPU. The caller must hold the lane of the GPU.
pub(super) async fn reconcile_owned(mps: &Mps, gpu_uuid: &str) {
    let Ok(observed) = mps.handles.readings.gpu(gpu_uuid).await else { return };
    if observed.host.gpu(gpu_uuid).is_some_and(GpuSnapshot::is_unread) {
        // Running daemons keep their settings until gpushd has read the GPU. The first reading wakes this reconciler
        // again.
        return;
    }
    let config = Arc::clone(&observed.host.config);
    let at = observed.host.gpus.iter().position(|gpu| gpu.gpu.uuid == gpu_uuid);
    let moving = mps.all_operation_daemons();
    let mut seen = at.map(|at| observed.at(at, Viewer::Log));
    // The state is `Changing` only because an operation starts the daemon as its last step. So treat it as `Ready`.
    if let Some(gpu) = seen.as_mut().filter(|_| moving.starting.contains(gpu_uuid)) {
        if gpu.state == GpuState::Changing {
            gpu.state = GpuState::Ready;
        }
        // The plan has checked that no lease delays the change any more, and no lease is granted during the operation.
        gpu.pending.clear();
    }
    if let Some(gpu) = &mut seen
        && let Some(layout) = moving.layouts.get(gpu_uuid)
    {
        gpu.overridden = Some(override_of_operation(gpu, layout));
    }
    let had: BTreeSet<String> = mps.entries().keys().cloned().collect();
    let rule = at.and_then(|at| observed.host.gpus[at].rule);
    let decided = seen.as_ref().map(|gpu| sharing::decide_gpu(&config, rule, gpu, &had)).unwrap_or_default();
    mps.set_findings(gpu_uuid, decided.findings);
    let targets: BTreeMap<String, SharingTarget> =
        decided.targets.into_iter().map(|target| (target.uuid.clone(), target)).collect();
    for target in targets.values().filter(|target| gets_daemon(mps, &moving, target)) {
        add_or_update(mps, target);
        // If the rule has changed, remove the settings that override it.
        records::drop_overridden_settings(mps, target).await;
    }
    if targets.values().any(|target| target.policy.users == MpsUsers::Many) {
        probe_multi_user(mps, &config).await;
    }
    let driver = mps.handles.hardware.status().driver.map(|driver| driver.version);
    let unseen = decided.unseen.contains(gpu_uuid) || !is_reading_conclusive(seen.as_ref());
    let entries = mps.entries().clone();
    let mut reconciled = JoinSet::new();
    for (uuid, entry) in entries.into_iter().filter(|(_, entry)| entry.gpu_uuid == gpu_uuid) {
        // A daemon of a whole GPU is desired only if an operation has started it or is starting it. After a rollback,
        // it is not desired.
        let target = targets.get(&uuid).filter(|target| gets_daemon(mps, &moving, target));
        let target = target.filter(|_| !moving.aside.contains(&uuid)).cloned();
        let aside = moving.aside.contains(&uuid);
        // If an operation started the daemon, only an operation may stop it. The daemon of a MIG device continues as
        // long as the layout of the GPU differs from the config.
        let stands = mps.is_active(&uuid) && seen.as_ref().is_none_or(|gpu| gpu.mode.is_managed())
            || seen.as_ref().is_some_and(|gpu| uuid != gpu.uuid && (!gpu.drift.is_empty() || is_pending(gpu, &uuid)));
        // After a reload, a daemon that is no longer desired continues until its leases have ended.
        if target.is_none() && !aside && (unseen || stands || mps.is_leased(&uuid)) {
            continue;
        }
        let wanted = target.map(|target| Box::new(desired_state(mps, &config, &entry, &target, driver.clone())));
        let mps = mps.clone();
        reconciled.spawn(async move { reconcile_target(&mps, &uuid, &entry, wanted).await });
    }
    reconciled.join_all().await;
}

/// Returns whether a change of a MIG device is pending.
fn is_pending(gpu: &Gpu, uuid: &str) -> bool {
    gpu.pending.iter().any(|change| change.aim.device() == Some(uuid))
}

/// Returns an override with the layout that a GPU has after an operation. gpushd records the override only with the end
/// of the operation.
fn override_of_operation(gpu: &Gpu, layout: &[String]) -> Override {
    Override {
        uuid: gpu.uuid.clone(),
        gpu: Some(gpu.index),
        rule: gpu.rule.clone(),
        layout: layout.to_vec(),
        by: Actor { uid: 0, user: None, pid: None },
        reason: String::new(),
        created_at: Timestamp::now(),
        expires_at: None,
        generation: 0,
    }
}

/// Finds out whether the control program can serve several users, unless this is already known.
async fn probe_multi_user(mps: &Mps, config: &Config) {
    let program = program(mps, &config.mps.control, &gpush_core::config::Mps::default().control);
    let _asking = mps.asking_many.lock().await;
    let before = mps.multi_user().clone();
    let asked = multi_user_support::probe(&program, before).await;
    *mps.multi_user() = Some(asked);
}

/// Reconciles one daemon, and sets or restores the compute mode of its GPU.
async fn reconcile_target(mps: &Mps, uuid: &str, entry: &Entry, wanted: Option<Box<Desired>>) {
    let full = entry.target.as_ref().filter(|target| target.full_gpu);
    let is_wanted = wanted.is_some();
    if let (Some(wanted), Some(target)) = (&wanted, full) {
        // Set the mode before the daemon starts, so that no program can bypass the daemon.
        compute_mode::set_compute_mode(mps, target, wanted.policy.compute_mode).await;
    }
    // Actions of administrators, operations and grants use this lock too. So this function does not start a daemon that
    // one of them has just stopped.
    let turn = entry.turn.lock().await;
    let aside = mps.all_operation_daemons().aside.contains(uuid);
    let stopped = mps.record(uuid).stopped;
    let want = if stopped.is_some() || aside { None } else { wanted };
    let admitted = daemon_state::admits(&entry.daemon.last_report());
    if let Err(error) = entry.daemon.send(DaemonRequest::SetDesired(want)).await {
        tracing::error!(mps = entry.short, "{error}");
    }
    // An adopted daemon can begin to admit clients without a change of its state. So wake the waiting requests here.
    if !admitted && daemon_state::admits(&entry.daemon.last_report()) {
        mps.handles.lanes.make_room();
    }
    // After a restart of gpushd, set the recorded deadline of the drain again.
    if let Some(end_at) = stopped.and_then(|stopped| stopped.end_at)
        && is_drained_for_ever(&entry.daemon.last_report())
    {
        let left = Duration::try_from(end_at.duration_since(Timestamp::now())).unwrap_or_default();
        if let Err(error) = entry.daemon.send(DaemonRequest::Drain(Some(left))).await {
            tracing::error!(mps = entry.short, "{error}");
        }
    }
    if let Err(error) = entry.daemon.send(DaemonRequest::Users(mps.admitted(uuid))).await {
        tracing::error!(mps = entry.short, "{error}");
    }
    drop(turn);
    if is_wanted || aside || entry.daemon.last_report().state != SupervisorState::Stopped {
        return;
    }
    let place = TargetDir::of(&mps.base, &entry.short);
    if place.is_locked() {
        // The processes of the daemon are still exiting, or still serve clients. Check again soon, but only for the
        // first 5 seconds.
        if entry.daemon.last_report().since > Timestamp::now() - SignedDuration::from_secs(5) {
            mps.wake_soon(&entry.gpu_uuid);
        }
        return;
    }
    // The daemon has exited and is not desired any more, so remove it.
    compute_mode::restore_compute_mode(mps, uuid).await;
    place.remove();
    mps.entries().remove(uuid);
    records::remove_record(mps, uuid).await;
    mps.handles.timeslice.wake();
}

/// Returns whether a daemon waits for its clients without a deadline.
fn is_drained_for_ever(seen: &Report) -> bool {
    seen.until.is_none() && (seen.behind || matches!(seen.state, SupervisorState::Draining { .. }))
}
