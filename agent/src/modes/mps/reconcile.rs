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

use gpush_api::{Actor, Gpu, GpuState, GpuUuid, MpsPolicy, MpsScope, MpsUsers, Override, TargetUuid};
use gpush_core::{
    config::Config,
    desired,
    mps::{DaemonReport, MpsTarget, MultiUserSupport, is_reading_conclusive},
    sharing::{self, Finding, SharingTarget},
    supervisor::SupervisorState,
};
use gpush_host::subtask;
use gpush_mps::daemon::{DaemonRequest, Desired, RequestError, TargetDir};
use jiff::{SignedDuration, Timestamp};
use tokio::task::JoinSet;

use super::{
    DaemonHandle, Mps, compute_mode,
    desired::{desired_state, program},
    multi_user_support, records, supervise,
};
use crate::{
    requests::caller::Viewer,
    state::{GpuSnapshot, HostState},
};

/// Interval at which gpushd checks the daemons even if nothing has changed.
const INTERVAL: Duration = Duration::from_secs(30);

/// Reconciles the daemons until gpushd stops. After that, the daemons keep running.
pub(crate) async fn run(mps: Mps) {
    let mut snapshots = mps.handles.context.state.watch();
    let mut reconcilers = JoinSet::new();
    let mut reconciled = BTreeSet::new();
    loop {
        let listed = snapshots.borrow_and_update().gpus.iter().map(|gpu| gpu.gpu.uuid.clone()).collect::<Vec<_>>();
        let with_daemon =
            mps.handles.context.state.mps().all().map(|target| target.gpu_uuid.clone()).collect::<Vec<_>>();
        for uuid in listed.iter().cloned().chain(with_daemon) {
            if reconciled.insert(uuid.clone()) {
                reconcilers.spawn(reconcile_periodically(mps.clone(), uuid));
            }
        }
        let is_new = |host: &Arc<HostState>| host.gpus.iter().any(|gpu| !reconciled.contains(&gpu.gpu.uuid));
        tokio::select! {
            () = mps.handles.context.stopping.cancelled() => break,
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
async fn reconcile_periodically(mps: Mps, gpu_uuid: GpuUuid) {
    let mut snapshots = mps.handles.context.state.watch();
    let mut wakeups = mps.wakes.follow(&gpu_uuid);
    let stopping = mps.handles.context.stopping.clone();
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
fn has_changed(before: &HostState, now: &HostState, gpu_uuid: &GpuUuid) -> bool {
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
pub(super) async fn reconcile(mps: &Mps, gpu_uuid: &GpuUuid) -> bool {
    if !concerns(mps, gpu_uuid) {
        return false;
    }
    let Some(_turn) = mps.handles.context.lanes.lock(gpu_uuid).await else { return true };
    reconcile_owned(mps, gpu_uuid).await;
    false
}

/// Returns whether a GPU has a daemon, or whether its rule or override requests a daemon. Otherwise the reconciler need
/// not read the GPU.
fn concerns(mps: &Mps, gpu_uuid: &GpuUuid) -> bool {
    let host = mps.handles.context.state.now();
    if host.mps.on_gpu(gpu_uuid).next().is_some() {
        return true;
    }
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
        set_findings(mps, gpu_uuid, Vec::new());
    }
    is_wanted
}

/// Stores why the desired targets of a GPU cannot exist. Logs the findings that are new.
fn set_findings(mps: &Mps, gpu_uuid: &GpuUuid, findings: Vec<Finding>) {
    for finding in mps.handles.context.state.change_mps(|targets| targets.set_findings(gpu_uuid, findings)) {
        tracing::warn!("not shared through MPS: {finding}");
    }
}

/// Reconciles the daemons of a GPU. The caller must hold the lane of the GPU.
pub(super) async fn reconcile_owned(mps: &Mps, gpu_uuid: &GpuUuid) {
    let Ok(observed) = mps.handles.context.readings.gpu(gpu_uuid).await else { return };
    if observed.host.gpu(gpu_uuid).is_some_and(GpuSnapshot::is_unread) {
        // Running daemons keep their settings until gpushd has read the GPU. The first reading wakes this reconciler
        // again.
        return;
    }
    let at = observed.host.gpus.iter().position(|gpu| gpu.gpu.uuid == *gpu_uuid);
    let mut seen = at.map(|at| observed.at(at, Viewer::Log));
    let before = mps.handles.context.state.mps();
    // The state is `Changing` only because an operation starts the daemon as its last step. So treat it as `Ready`.
    if let Some(gpu) = seen.as_mut().filter(|_| before.is_starting(gpu_uuid)) {
        if gpu.state == GpuState::Changing {
            gpu.state = GpuState::Ready;
        }
        // The plan has checked that no lease delays the change any more, and no lease is granted during the operation.
        gpu.pending.clear();
    }
    if let Some(gpu) = &mut seen
        && let Some(layout) = before.layout_after_operation(gpu_uuid)
    {
        gpu.overridden = Some(override_of_operation(gpu, layout));
    }
    let rule = at.and_then(|at| observed.host.gpus[at].rule);
    let config = &observed.host.config;
    let decided = seen.as_ref().map(|gpu| sharing::decide_gpu(config, rule, gpu, &before.uuids())).unwrap_or_default();
    set_findings(mps, gpu_uuid, decided.findings);
    let targets: BTreeMap<TargetUuid, SharingTarget> =
        decided.targets.into_iter().map(|target| (target.uuid.clone(), target)).collect();
    for target in targets.values().filter(|target| before.gets_daemon(target)) {
        supervise::add_or_update(mps, target);
        // If the rule has changed, remove the settings that override it.
        records::drop_overridden_settings(mps, target).await;
    }
    if targets.values().any(|target| target.policy.users == MpsUsers::Many) {
        probe_multi_user(mps, config).await;
    }
    let driver = mps.handles.context.hardware.status().driver.map(|driver| driver.version);
    let unseen = decided.unseen.contains(gpu_uuid) || !is_reading_conclusive(seen.as_ref());
    let host = mps.handles.context.state.now();
    let mut reconciled = JoinSet::new();
    for existing in host.mps.on_gpu(gpu_uuid) {
        let uuid = &existing.uuid;
        // A daemon of a whole GPU is desired only if an operation has started it or is starting it. After a rollback,
        // it is not desired.
        let kept_stopped = before.is_kept_stopped(uuid);
        let target = targets.get(uuid).filter(|target| before.gets_daemon(target) && !kept_stopped);
        let stands = continues_without_rule(uuid, host.mps.is_active(uuid), seen.as_ref());
        // After a reload, a daemon that is no longer desired continues until its leases have ended.
        if target.is_none() && !kept_stopped && (unseen || stands || host.leases.is_occupied(uuid)) {
            continue;
        }
        let wanted = target.map(|target| desired_state(mps, &host, &existing.short, target, driver.clone()));
        let (mps, existing) = (mps.clone(), Arc::clone(existing));
        reconciled.spawn(async move { reconcile_target(&mps, &existing, wanted.map(Box::new)).await });
    }
    reconciled.join_all().await;
}

/// Returns whether the daemon of a target continues although no rule requests it any more. `is_active` is whether an
/// operation has started the daemon.
fn continues_without_rule(uuid: &TargetUuid, is_active: bool, gpu: Option<&Gpu>) -> bool {
    // If an operation started the daemon, it continues until an operation stops it or its GPU is no longer managed. The
    // daemon of a MIG device also continues while its GPU differs from the config, or while a change of the device is
    // pending.
    is_active && gpu.is_none_or(|gpu| gpu.mode.is_managed())
        || gpu.is_some_and(|gpu| *uuid != gpu.uuid && (!gpu.drift.is_empty() || is_pending(gpu, uuid)))
}

/// Returns whether a change of a MIG device is pending.
fn is_pending(gpu: &Gpu, uuid: &TargetUuid) -> bool {
    gpu.pending.iter().any(|change| change.aim.device() == Some(uuid))
}

/// Returns an override with the layout that a GPU has after an operation. gpushd records the override only with the end
/// of the operation.
fn override_of_operation(gpu: &Gpu, layout: &[String]) -> Override {
    Override {
        gpu_uuid: gpu.uuid.clone(),
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

impl Mps {
    /// Returns why the daemons serve one user at a time, if a rule of the config has `users = "many"`.
    pub(crate) async fn reason_single_user(&self, config: &Config) -> Option<String> {
        let is_many = |policy: &MpsPolicy| policy.users == MpsUsers::Many;
        if !config.rules.iter().any(|rule| rule.mps.as_ref().is_some_and(is_many)) {
            return None;
        }
        probe_multi_user(self, config).await;
        match &self.handles.context.state.mps().multi_user {
            MultiUserSupport::Unsupported(why) => Some(why.clone()),
            MultiUserSupport::NotProbed | MultiUserSupport::Supported => None,
        }
    }
}

/// Finds out whether the control program can serve several users, unless this is already known.
async fn probe_multi_user(mps: &Mps, config: &Config) {
    let program = program(mps, &config.mps.control, &gpush_core::config::Mps::default().control);
    let mut known = mps.control_program.lock().await;
    let probed = multi_user_support::probe(&program, known.take()).await;
    mps.handles.context.state.change_mps(|targets| targets.multi_user = multi_user_support::of(&probed));
    *known = Some(probed);
}

/// Reconciles one daemon, and sets or restores the compute mode of its GPU.
async fn reconcile_target(mps: &Mps, target: &MpsTarget, wanted: Option<Box<Desired>>) {
    let MpsTarget { uuid, short, gpu_uuid, .. } = target;
    let Some(DaemonHandle { daemon, turn }) = mps.daemon(uuid) else { return };
    let full = target.desired.as_ref().filter(|target| target.full_gpu);
    let is_wanted = wanted.is_some();
    if let (Some(wanted), Some(target)) = (&wanted, full) {
        // Set the mode before the daemon starts, so that no program can bypass the daemon.
        compute_mode::set_compute_mode(mps, target, wanted.policy.compute_mode).await;
    }
    let log_error = |error: RequestError| tracing::error!(mps = short, "{error}");
    // Actions of administrators, operations and grants use this lock too. So this function does not start a daemon that
    // one of them has just stopped.
    let turn = turn.lock().await;
    let before = mps.handles.context.state.mps();
    let kept_stopped = before.is_kept_stopped(uuid);
    let stopped = before.record(uuid).stopped;
    let want = if stopped.is_some() || kept_stopped { None } else { wanted };
    daemon.send(DaemonRequest::SetDesired(want)).await.unwrap_or_else(log_error);
    let seen = |check: fn(&DaemonReport) -> bool| mps.target(uuid).is_some_and(|target| check(&target.report));
    // An adopted daemon can begin to admit clients without a change of its state. So wake the waiting requests here.
    if !before.get(uuid).is_some_and(|target| target.report.admits()) && seen(DaemonReport::admits) {
        mps.handles.context.lanes.make_room();
    }
    // After a restart of gpushd, set the recorded deadline of the drain again.
    if let Some(end_at) = stopped.and_then(|stopped| stopped.end_at)
        && seen(DaemonReport::drains_without_deadline)
    {
        let left = Duration::try_from(end_at.duration_since(Timestamp::now())).unwrap_or_default();
        daemon.send(DaemonRequest::Drain(Some(left))).await.unwrap_or_else(log_error);
    }
    daemon.send(DaemonRequest::Users(mps.admitted(uuid))).await.unwrap_or_else(log_error);
    drop(turn);
    let Some(now) = mps.target(uuid) else { return };
    if is_wanted || kept_stopped || now.report.state != SupervisorState::Stopped {
        return;
    }
    let place = TargetDir::of(&mps.base, short);
    if place.is_locked() {
        // The processes of the daemon are still exiting, or still serve clients. Check again soon, but only for the
        // first 5 seconds.
        if now.report.since > Timestamp::now() - SignedDuration::from_secs(5) {
            mps.wake_soon(gpu_uuid);
        }
        return;
    }
    // The daemon has exited and is not desired any more, so remove it.
    compute_mode::restore_compute_mode(mps, uuid).await;
    place.remove();
    supervise::remove(mps, uuid);
    records::remove_record(mps, uuid).await;
    mps.handles.timeslice.wake();
}

#[cfg(test)]
mod tests {
    use gpush_api::{Mode, PendingAim, PendingChange};

    use super::*;
    use crate::{
        modes::scene::{mig_gpu, whole_gpu},
        state::{
            State,
            tests::{cordon, list, read},
        },
    };

    #[test]
    fn daemon_of_a_whole_gpu_continues_until_an_operation_ends_it() {
        for (mode, expected) in [
            (Mode::Mps, true),
            (Mode::Mig, true),
            (Mode::Exclusive, true),
            (Mode::Timeslice, true),
            (Mode::NoRule, false),
            (Mode::Unmanaged, false),
        ] {
            let gpu = Gpu { mode, drift: vec!["it differs".to_owned()], ..whole_gpu() };
            assert_eq!(continues_without_rule(&"GPU-0".into(), true, Some(&gpu)), expected, "{mode:?}");
            assert!(
                !continues_without_rule(&"GPU-0".into(), false, Some(&gpu)),
                "no operation has started it: {mode:?}"
            );
        }
        assert!(continues_without_rule(&"GPU-0".into(), true, None), "the GPU is not known");
    }

    #[test]
    fn daemon_of_a_mig_device_continues_while_its_gpu_differs() {
        let gpu = mig_gpu(&["3g.40gb@4", "2g.20gb@0"]);
        let aim = |uuid: &str| PendingAim::UnshareDevice { uuid: uuid.into(), device: "3g.40gb@4".to_owned() };
        let pending = |uuid| Gpu { pending: vec![PendingChange { aim: aim(uuid), leases: Vec::new() }], ..gpu.clone() };
        let drifted = Gpu { drift: vec!["it differs".to_owned()], ..gpu.clone() };
        assert!(!continues_without_rule(&"MIG-1".into(), false, Some(&gpu)));
        assert!(continues_without_rule(&"MIG-1".into(), false, Some(&drifted)));
        assert!(continues_without_rule(&"MIG-1".into(), false, Some(&pending("MIG-1"))));
        assert!(!continues_without_rule(&"MIG-1".into(), false, Some(&pending("MIG-0"))), "another device is pending");
        assert!(!continues_without_rule(&"MIG-1".into(), false, None));
    }

    #[test]
    fn only_changes_of_the_gpu_or_the_config_wake_its_reconciler() {
        let state = State::empty();
        list(&state, &[0, 1]);
        (0..2).for_each(|gpu| read(&state, gpu));
        let before = state.now();
        let wakes = |gpu: &str| has_changed(&before, &state.now(), &gpu.into());
        assert!(!wakes("GPU-0") && !wakes("GPU-9"));
        state.apply(&[cordon("GPU-1")]);
        assert!(!wakes("GPU-0") && wakes("GPU-1"));
        list(&state, &[0, 1, 2]);
        assert!(!wakes("GPU-0") && wakes("GPU-2"), "it appears");
        state.replace_config(Arc::new(Config::default()), 1);
        assert!(wakes("GPU-0") && wakes("GPU-9"));
    }
}
