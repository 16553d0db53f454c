//! MPS daemons that an operation stops or starts.
//!
//! Only an operation changes how a GPU is shared; a reload alone does not. The daemon of a whole GPU is *in force* if
//! an operation has started it on this boot.
//!
//! ```text
//! plan ─► daemons of removed targets ────┬─ used by a lease or a client ──► blocked, with their names
//!                                        └─ idle ─► stopped before all steps ────────────────────┐
//!      ─► mode mps, and no daemon in force ─► started after all steps ───────────────────────────┤
//! end  ─► done: in force, or no longer, recorded with the end  ◄─────────────────────────────────┘
//!      └► rolled back: as before, according to the record
//! ```
//!
//! An MPS server of gpushd without clients does not count as a use of its GPU, so it does not block an operation. MIG
//! mode allows only the default compute mode. So when the daemon exits, gpushd restores the compute mode before it
//! enables MIG mode.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use gpush_api::{ApiError, Code, Gpu, GpuPlan, InstanceStep, Mig, Mode, MpsStep, Refusal, Step};
use gpush_core::{layout::Layout, lease::usage, sharing, supervisor::SupervisorState};
use gpush_mps::daemon::{DaemonRequest, Report, TargetDir};
use tokio::{task::JoinSet, time::timeout};

use super::{Entry, Mps, compute_mode, reconcile, view};
use crate::lanes::Reserve;

/// Extra time that gpushd waits after the time limit for the stop or start of a daemon.
const MARGIN: Duration = Duration::from_secs(5);

/// Interval at which gpushd checks whether all processes of an exited daemon have ended.
const CHECK: Duration = Duration::from_millis(5);

/// The daemons that an operation starts or keeps stopped. Removed when the operation ends.
#[derive(Debug, Clone, Default)]
pub(super) struct OperationDaemons {
    /// UUIDs of the targets whose daemons the operation keeps stopped.
    pub(super) aside: BTreeSet<String>,
    /// UUIDs of the targets whose daemons the operation starts.
    pub(super) starting: BTreeSet<String>,
}

impl Mps {
    /// Returns the daemons that any running operation starts or keeps stopped.
    pub(super) fn all_operation_daemons(&self) -> OperationDaemons {
        let mut all = OperationDaemons::default();
        for moves in self.operation_daemons().values() {
            all.aside.extend(moves.aside.iter().cloned());
            all.starting.extend(moves.starting.iter().cloned());
        }
        all
    }

    /// Forgets which daemons an operation starts or keeps stopped. After that, only the records determine which daemons
    /// gpushd starts or keeps stopped.
    pub(crate) fn forget_operation(&self, operation: &str) {
        if self.operation_daemons().remove(operation).is_some() {
            self.wake_all();
        }
    }

    /// Returns the pids of processes that do no work for a user: the MPS daemons and servers on targets without clients
    /// and leases.
    pub(crate) fn idle(&self) -> BTreeSet<u32> {
        let entries = self.entries().clone();
        let idle = entries.iter().filter(|(uuid, entry)| users(self, uuid, entry).is_empty());
        let pids = idle.flat_map(|(_, entry)| {
            let seen = entry.daemon.last_report();
            seen.servers.iter().map(|(server, _)| *server).chain(seen.pid).collect::<Vec<_>>()
        });
        pids.filter_map(|pid| u32::try_from(pid).ok()).collect()
    }
}

/// Returns one sentence for each use of a target; empty if it is not in use.
fn users(mps: &Mps, uuid: &str, entry: &Entry) -> Vec<String> {
    let (seen, label) = (entry.daemon.last_report(), view::label(entry, uuid));
    if !seen.clients_known {
        return vec![format!("it is not known whether {label} has clients")];
    }
    let mut users: Vec<String> =
        mps.leases_on(uuid).iter().map(|lease| format!("{label} has {}", lease.describe())).collect();
    if users.is_empty() && mps.is_leased(uuid) {
        users.push(format!("a lease on {label} is being granted"));
    }
    match seen.clients.len() + seen.waiting.len() {
        0 => {}
        1 => users.push(format!("{label} has 1 client")),
        clients => users.push(format!("{label} has {clients} clients")),
    }
    users
}

/// Polls the daemons of the GPUs in `asked`, so that clients that have exited do not block a plan. Does not poll other
/// daemons, because they may hang.
pub(crate) async fn poll(mps: &Mps, asked: &BTreeSet<String>) {
    let entries: Vec<Entry> = mps.entries().values().filter(|entry| asked.contains(&entry.gpu_uuid)).cloned().collect();
    let polls = entries.into_iter().map(|entry| tokio::spawn(async move { entry.daemon.fresh(Duration::ZERO).await }));
    for poll in polls.collect::<Vec<_>>() {
        let _as_it_was = poll.await;
    }
}

/// Returns what a plan needs exclusively on its GPU: certain targets, or the whole GPU. While the operation waits, it
/// reserves these targets or this GPU, even if leases still use them. A refused plan reserves nothing.
pub(crate) fn reserve_of_plan(gpu: &Gpu, plan: &GpuPlan) -> Reserve {
    if plan.error.is_some() {
        return Reserve::Targets(BTreeSet::new());
    }
    if plan.mig_mode().is_some() || plan.reset().is_some() {
        return Reserve::Gpu;
    }
    let instances = gpu.mig.iter().flat_map(|mig| &mig.instances);
    let devices = instances.flat_map(|instance| &instance.compute).filter_map(|compute| compute.uuid.as_ref());
    // If MIG is on, no lease can use the whole GPU.
    let is_whole = gpu.mig.as_ref().is_none_or(Mig::is_off);
    let targets = devices.chain(is_whole.then_some(&gpu.uuid));
    Reserve::Targets(targets.filter(|uuid| is_removed(gpu, plan, uuid)).cloned().collect())
}

/// Adds to each plan the daemons that it stops and starts. Refuses plans that would stop a daemon in use.
pub(crate) fn plan(mps: &Mps, gpus: &[Gpu], plans: &mut [GpuPlan]) {
    let entries = mps.entries().clone();
    for plan in plans.iter_mut() {
        let Some(gpu) = gpus.iter().find(|gpu| gpu.uuid == plan.uuid) else { continue };
        let ended: BTreeMap<&String, &Entry> = entries
            .iter()
            .filter(|(uuid, entry)| {
                // Include a daemon that an administrator stopped: its record must be removed, and the compute mode
                // restored.
                let stands = is_present(entry) || mps.is_active(uuid);
                entry.gpu_uuid == gpu.uuid && stands && is_removed(gpu, plan, uuid)
            })
            .collect();
        // Replace an earlier refusal, because it may name only the MPS server. The new refusal names the clients and
        // leases.
        let held = matches!(plan.refusal, Some(Refusal::Held { .. } | Refusal::Blocked { .. }));
        if plan.error.is_some() && !held {
            continue;
        }
        let used: Vec<(&Entry, Vec<String>)> = ended
            .iter()
            .map(|(uuid, entry)| (*entry, users(mps, uuid, entry)))
            .filter(|(_, who)| !who.is_empty())
            .collect();
        if let Some((first, _)) = used.first() {
            let message = format!("GPU {} is shared through MPS, and in use", gpu.index);
            let name = view::name(first);
            let mut error = ApiError::new(Code::Blocked, message);
            error.causes.extend(used.iter().flat_map(|(_, who)| who.iter().cloned()));
            let leases = ended.keys().flat_map(|uuid| mps.leases_on(uuid)).map(|lease| lease.record.id);
            let hint = usage::hint(leases)
                .unwrap_or_else(|| format!("see the clients with `gpushctl mps show {name}`, and try again later"));
            *plan = plan.without_steps().refused(error.hint(hint).retryable());
            continue;
        }
        if plan.error.is_some() {
            continue;
        }
        let starts = gpu.mode == Mode::Mps && plan.leaves_whole(gpu) && !mps.is_active(&gpu.uuid);
        if let Some(why) = sharing::mps_unsupported_reason(gpu).filter(|_| starts) {
            let message = format!("GPU {} can't be shared through MPS", gpu.index);
            let error = ApiError::new(Code::Unsupported, message).cause(why).hint(view::OTHER_MODE);
            *plan = plan.without_steps().refused(error);
            continue;
        }
        for (uuid, entry) in ended {
            plan.add(Step::Mps(MpsStep::StopDaemon { uuid: uuid.clone(), label: view::label(entry, uuid) }));
        }
        if starts {
            plan.add(Step::Mps(MpsStep::StartDaemon));
        }
    }
}

/// Returns whether a daemon is desired or runs.
fn is_present(entry: &Entry) -> bool {
    let seen = entry.daemon.last_report();
    seen.wanted || seen.state != SupervisorState::Stopped
}

/// Returns whether a plan removes the target `uuid` of a daemon.
fn is_removed(gpu: &Gpu, plan: &GpuPlan, uuid: &str) -> bool {
    if plan.error.is_some() {
        // A refused plan has no steps, so they do not show whether the plan would remove the target. Assume that it
        // would.
        return true;
    }
    if uuid == gpu.uuid {
        return plan.mig_mode().is_some() || gpu.mode != Mode::Mps;
    }
    let instances = gpu.mig.iter().flat_map(|mig| &mig.instances);
    let mut devices = instances.flat_map(|gi| gi.compute.iter().map(move |ci| (gi.id, ci.id, ci.uuid.as_deref())));
    let Some((gi, ci, _)) = devices.find(|(_, _, device)| *device == Some(uuid)) else { return false };
    let gone = |step: &InstanceStep| match step {
        InstanceStep::DestroyCompute { gi: of, ci: which, .. } => (*of, *which) == (gi, ci),
        InstanceStep::DestroyGpuInstance { gi: which, .. } => *which == gi,
        InstanceStep::CreateGpuInstance { .. } | InstanceStep::CreateCompute { .. } => false,
    };
    plan.mig_mode() == Some(false) || plan.reset().is_some() || plan.instance_steps().any(gone)
}

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
    let used = users(mps, uuid, &entry);
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
        .hint(format!("see its state with `gpushctl mps show {}`", view::name(entry))))
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
    let label = mps.entries().get(uuid).map_or_else(|| format!("GPU {uuid}"), |entry| view::label(entry, uuid));
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
    let label = view::label(&entry, uuid);
    let mut error = ApiError::new(Code::Conflict, format!("the MPS daemon of {label} does not start"));
    error.causes = seen.trouble;
    // A daemon that has never run has no logs.
    let logs = seen.logs.filter(|logs| logs.exists());
    Err(match logs {
        Some(logs) => error.hint(format!("see its log in {}", logs.display())),
        None => error.hint("remove the cause, then apply again"),
    })
}

/// Waits until the daemons of shared MIG devices serve clients. Returns a sentence for each daemon that does not serve
/// in time. The operation does not fail because of such a daemon.
pub(crate) async fn wait_for_device_daemons(mps: &Mps, operation: &str, plans: &[GpuPlan]) -> Vec<String> {
    let shares = |plan: &&GpuPlan| Layout::shares_devices(&plan.layout);
    let on: BTreeSet<String> = plans.iter().filter(shares).map(|plan| plan.uuid.clone()).collect();
    if on.is_empty() {
        return Vec::new();
    }
    mps.operation_daemons().entry(operation.to_owned()).or_default().starting.extend(on.iter().cloned());
    // The operation already has the lanes of these GPUs, so reconcile without locking them.
    let reconciled = on.iter().map(|uuid| {
        let (mps, uuid) = (mps.clone(), uuid.clone());
        async move { reconcile::reconcile_owned(&mps, &uuid).await }
    });
    reconciled.collect::<JoinSet<()>>().join_all().await;
    let entries = mps.entries().clone();
    let here = entries.into_iter().filter(|(_, entry)| on.contains(&entry.gpu_uuid) && entry.target.is_some());
    // Do not wait for daemons that an operation keeps stopped, such as the daemon of the whole GPU.
    let aside = mps.all_operation_daemons().aside;
    let awaited: Vec<(String, Entry)> =
        here.filter(|(uuid, _)| !aside.contains(uuid) && mps.record(uuid).stopped.is_none()).collect();
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
    let (seen, label) = (entry.daemon.last_report(), view::label(entry, uuid));
    match seen.state {
        SupervisorState::BackingOff { .. } | SupervisorState::GivenUp => {
            Some(format!("the MPS daemon of {label} does not start: {}", seen.trouble.join(", ")))
        }
        state => is_late(&state).then(|| format!("the MPS daemon of {label} is not ready yet")),
    }
}
