//! Adds targets, and runs the supervisor task of each daemon.

use gpush_api::{GpuUuid, TargetUuid};
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, atomic::Ordering},
};

use gpush_core::{
    mps::MpsTarget,
    sharing::{self, SharingTarget},
    supervisor::{KillReason, SupervisorState},
};
use gpush_mps::daemon::{Daemon, DaemonTask, RecordedUsers, Report, ReportChange, Sources, TargetDir, sweep_removed};
use gpush_store::{AuditEvent, DONE};

use super::{DaemonHandle, Mps, clients};
use crate::system::tasks::TaskName;

/// Adopts the daemons that a previous gpushd left running. Call this before gpushd serves any request, because requests
/// find only adopted daemons.
pub(crate) fn adopt_daemons(mps: &Mps) {
    let mut known = BTreeSet::new();
    sweep_removed(&mps.base);
    // Skip daemons whose GPU is not known. gpushd adopts them later, when it finds their targets.
    let placed = TargetDir::all(&mps.base).into_iter().filter(|(_, spec)| !spec.gpu_uuid.is_empty());
    for (place, spec) in placed {
        known.insert(spec.target.clone());
        let new = NewTarget { uuid: spec.uuid, short: spec.target, gpu_uuid: spec.gpu_uuid, desired: None };
        add(mps, &mut mps.daemons(), &new, place);
    }
    let (launcher, stopping) = (mps.launcher.clone(), mps.handles.context.stopping.clone());
    mps.handles.context.tasks.once(TaskName::MpsOrphans, async move {
        stopping.run_until_cancelled(launcher.end_orphans(known)).await;
    });
}

/// Adds a target, or stores what the config says about it.
pub(super) fn add_or_update(mps: &Mps, desired: &SharingTarget) {
    // Keep this lock until the target is added, so that no other target gets the same short name meanwhile.
    let mut daemons = mps.daemons();
    let targets = mps.handles.context.state.mps();
    if targets.get(&desired.uuid).is_some() {
        mps.handles.context.state.change_mps(|targets| targets.set_desired(desired));
        return;
    }
    let taken: BTreeSet<String> = targets.all().map(|target| target.short.clone()).collect();
    let (uuid, short, gpu_uuid) =
        (desired.uuid.clone(), sharing::short_name(&desired.uuid, &taken), desired.gpu_uuid.clone());
    let place = TargetDir::of(&mps.base, &short);
    add(mps, &mut daemons, &NewTarget { uuid, short, gpu_uuid, desired: Some(desired.clone()) }, place);
}

/// Removes a target whose daemon has exited.
pub(super) fn remove(mps: &Mps, uuid: &TargetUuid) {
    let mut daemons = mps.daemons();
    daemons.remove(uuid);
    mps.handles.context.state.remove_mps_target(uuid);
}

/// A target that gets a supervisor task.
#[derive(Debug, Clone)]
struct NewTarget {
    uuid: TargetUuid,
    short: String,
    gpu_uuid: GpuUuid,
    desired: Option<SharingTarget>,
}

/// Adds a target. `place` is the directory of its daemon.
fn add(mps: &Mps, daemons: &mut BTreeMap<TargetUuid, DaemonHandle>, new: &NewTarget, place: TargetDir) {
    let supervisor = mps.supervisors.fetch_add(1, Ordering::Relaxed) + 1;
    let (daemon, task) = supervise(mps, new, supervisor, place);
    let NewTarget { uuid, short, gpu_uuid, desired } = new.clone();
    let report = daemon.last_report().daemon;
    mps.handles.context.state.add_mps_target(MpsTarget { uuid, short, gpu_uuid, desired, supervisor, report });
    daemons.insert(new.uuid.clone(), DaemonHandle { daemon, turn: Arc::default() });
    // The task reports only about targets that it finds in the state.
    let (task, object) = (Arc::new(task), format!("MPS daemon {}", new.short));
    mps.handles.context.tasks.spawn_for(TaskName::MpsDaemon, object, move || Arc::clone(&task).run());
}

/// Records in the audit trail that gpushd killed a daemon. Does not wait for the record.
fn record_kill(mps: &Mps, uuid: &TargetUuid, gpu_uuid: &GpuUuid, why: KillReason) {
    let event = AuditEvent::MpsKill { gpu_uuid: gpu_uuid.clone(), reason: why.to_string() };
    let audit = event.record(None, uuid, DONE);
    drop(mps.handles.context.store.write_ending(move |tx| tx.audit(audit.clone()).map(|_| ())));
}

/// Creates the supervisor task of a target.
fn supervise(mps: &Mps, new: &NewTarget, supervisor: u64, place: TargetDir) -> (Daemon, DaemonTask) {
    let (shared, of) = (mps.clone(), new.clone());
    let receive = move |seen: &Report, news: Option<ReportChange>| receive_report(&shared, &of, supervisor, seen, news);
    let driver_clients = clients::driver_clients(mps, &new.gpu_uuid, &new.uuid);
    let (shared, of) = (mps.clone(), new.uuid.clone());
    let recorded_users: RecordedUsers = Arc::new(move || shared.admitted(&of));
    let shared = mps.clone();
    let start_blocked = Arc::new(move || {
        let entered = shared.handles.context.state.maintenance().is_some();
        entered.then(|| "the host is in maintenance: MPS daemons start when maintenance has ended".to_owned())
    });
    let sources = Sources { driver_clients, recorded_users, start_blocked };
    Daemon::with_task(&new.short, &new.uuid, place, mps.launcher.clone(), sources, receive)
}

/// Stores a report about a daemon. If it has changed, logs it, and wakes the tasks that may wait for it.
fn receive_report(mps: &Mps, of: &NewTarget, supervisor: u64, seen: &Report, news: Option<ReportChange>) {
    let killed = news.as_ref().and_then(|news| news.killed);
    let is_restarted = news.as_ref().is_some_and(|news| news.is_restarted);
    let sentences = news.map(|ReportChange { servers, killed, .. }| {
        let killed = killed.map(|why| format!("gpushd killed it: {why}"));
        servers.into_iter().chain(killed).collect()
    });
    let state = &mps.handles.context.state;
    let Some(event) = state.report_daemon((&of.uuid, supervisor), seen.daemon.clone(), sentences) else { return };
    if let Some(why) = killed {
        record_kill(mps, &of.uuid, &of.gpu_uuid, why);
    }
    let (short, name) = (&of.short, event.state.name());
    match seen.daemon.state {
        // Log why the daemon does not serve its clients well, because no other log line says so.
        SupervisorState::Hung { .. } | SupervisorState::Fault { .. } => {
            let reasons = event.reasons.join("; ");
            tracing::warn!(mps = short, "the MPS daemon {short} is in state `{name}`: {reasons}");
        }
        SupervisorState::Stopped
        | SupervisorState::Starting { .. }
        | SupervisorState::Found { .. }
        | SupervisorState::Ready { .. }
        | SupervisorState::BackingOff { .. }
        | SupervisorState::GivenUp
        | SupervisorState::Draining { .. }
        | SupervisorState::Stopping { .. } => {
            tracing::info!(mps = short, "the MPS daemon {short} is in state `{name}`");
        }
    }
    // Wake the requests for leases, because the daemon may admit clients now.
    mps.handles.context.lanes.make_room();
    // The daemon may have started after its operation stopped waiting, and may then need the compute mode. So wake the
    // reconciler. A task that runs again needs the desired state.
    if is_restarted || matches!(seen.daemon.state, SupervisorState::Stopped | SupervisorState::Ready { .. }) {
        mps.wakes.wake(&of.gpu_uuid);
    }
}
