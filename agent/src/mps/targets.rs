//! Determines the desired daemons from the config, the layouts of the GPUs, and the daemons that exist.

use std::{collections::BTreeSet, path::PathBuf, sync::Arc, time::Duration};

use gpush_api::{EventPayload, Gpu, GpuState, MpsChange, MpsPolicy};
use gpush_core::{
    config::Config,
    sharing::{self, Sharing, SharingTarget},
    supervisor::{KillReason, SupervisorState},
};
use gpush_locked::Locked;
use gpush_mps::daemon::{Daemon, Desired, RecordedUsers, Report, Sources, TargetDir, sweep_removed};
use gpush_store::NewAudit;

use super::{Entry, Mps, clients, daemon_state, multi_user_support, operation_daemons::OperationDaemons};
use crate::{caller::Viewer, eligibility, tasks::TaskName};

/// Adopts the daemons that a previous gpushd left running. Call this before gpushd serves any request, because requests
/// find only adopted daemons.
pub(crate) fn adopt_daemons(mps: &Mps) {
    let mut known = BTreeSet::new();
    sweep_removed(&mps.base);
    // Skip daemons whose GPU is not known. gpushd adopts them later, when it finds their targets.
    let placed = TargetDir::all(&mps.base).into_iter().filter(|(_, spec)| !spec.gpu_uuid.is_empty());
    for (place, spec) in placed {
        known.insert(spec.target.clone());
        let daemon = supervise(mps, &spec.target, &spec.gpu_uuid, &spec.uuid, place);
        let turn = Arc::default();
        let entry = Entry { short: spec.target, gpu_uuid: spec.gpu_uuid, target: None, daemon, turn };
        mps.entries().insert(spec.uuid, entry);
    }
    let (launcher, stopping) = (mps.launcher.clone(), mps.handles.stopping.clone());
    mps.handles.tasks.once(TaskName::MpsOrphans, async move {
        stopping.run_until_cancelled(launcher.end_orphans(known)).await;
    });
}

/// Records in the audit trail that gpushd killed a daemon. Does not wait for the record.
fn record_kill(mps: &Mps, uuid: &str, gpu_uuid: &str, why: KillReason) {
    let audit = NewAudit {
        by: None,
        action: "mps.kill".to_owned(),
        object: uuid.to_owned(),
        result: "done".to_owned(),
        detail: serde_json::json!({ "gpu_uuid": gpu_uuid, "reason": why.to_string() }),
    };
    drop(mps.handles.store.write_ending(move |tx| tx.audit(audit.clone()).map(|_| ())));
}

fn supervise(mps: &Mps, short: &str, gpu_uuid: &str, uuid: &str, place: TargetDir) -> Daemon {
    let (shared, of, woken) = (mps.clone(), uuid.to_owned(), gpu_uuid.to_owned());
    let target = short.to_owned();
    let published: Locked<Option<MpsChange>> = Locked::default();
    let changed = move |seen: &Report| {
        let Some(entry) = shared.entries().get(&of).cloned() else { return };
        let name = daemon_state::name(&entry);
        let (gpu_uuid, gpu) = (entry.gpu_uuid, entry.target.map(|target| target.gpu));
        let state = daemon_state::state(seen);
        let mut reasons = daemon_state::reasons(seen, &name);
        reasons.extend(seen.news.clone());
        if let Some(why) = seen.killed {
            reasons.push(format!("gpushd killed it: {why}"));
            record_kill(&shared, &of, &gpu_uuid, why);
        }
        match seen.state {
            // Log why the daemon does not serve its clients well, because no other log line says so.
            SupervisorState::Hung { .. } | SupervisorState::Fault { .. } => {
                tracing::warn!(
                    mps = target,
                    "the MPS daemon {target} is in state `{}`: {}",
                    state.name(),
                    reasons.join("; ")
                );
            }
            SupervisorState::Stopped
            | SupervisorState::Starting { .. }
            | SupervisorState::Found { .. }
            | SupervisorState::Ready { .. }
            | SupervisorState::BackingOff { .. }
            | SupervisorState::GivenUp
            | SupervisorState::Draining { .. }
            | SupervisorState::Stopping { .. } => {
                tracing::info!(mps = target, "the MPS daemon {target} is in state `{}`", state.name());
            }
        }
        let (uuid, target) = (of.clone(), target.clone());
        let change = MpsChange { target, uuid, gpu_uuid, gpu, state, reasons };
        // The API has fewer states than the supervisor. So two states of the supervisor can give the same event.
        let before = published.lock().replace(change.clone());
        if before.as_ref() != Some(&change) {
            shared.handles.state.events().publish(EventPayload::Mps(Box::new(change)));
        }
        // Wake the requests for leases, because the daemon may admit clients now.
        shared.handles.lanes.make_room();
        // The daemon may have started after its operation stopped waiting, and may then need the compute mode. So wake
        // the reconciler.
        if matches!(seen.state, SupervisorState::Stopped | SupervisorState::Ready { .. }) {
            shared.wakes.wake(&woken);
        }
    };
    let driver_clients = clients::driver_clients(mps, gpu_uuid, uuid);
    let (shared, of) = (mps.clone(), uuid.to_owned());
    let recorded_users: RecordedUsers = Arc::new(move || shared.admitted(&of));
    let shared = mps.clone();
    let start_blocked = Arc::new(move || {
        let entered = shared.handles.state.maintenance().is_some();
        entered.then(|| "the host is in maintenance: MPS daemons start when maintenance has ended".to_owned())
    });
    let sources = Sources { driver_clients, recorded_users, start_blocked };
    let (daemon, task) = Daemon::with_task(short, uuid, place, mps.launcher.clone(), sources, changed);
    let task = Arc::new(task);
    mps.handles.tasks.spawn_for(TaskName::MpsDaemon, format!("MPS daemon {short}"), move || Arc::clone(&task).run());
    daemon
}

/// Returns whether a target gets a daemon. A MIG device gets a daemon if the layout of its GPU shares the device. A
/// whole GPU gets a daemon only if an operation has started it on this boot or is starting it.
pub(super) fn gets_daemon(mps: &Mps, moving: &OperationDaemons, target: &SharingTarget) -> bool {
    !target.full_gpu || mps.is_active(&target.uuid) || moving.starting.contains(&target.uuid)
}

/// Returns whether the reading of a GPU permits gpushd to remove the GPU's daemons. If the driver does not list the GPU
/// at the moment, returns `false`: the GPU may return, and its daemons may be in use.
pub(super) fn is_reading_conclusive(gpu: Option<&Gpu>) -> bool {
    gpu.is_some_and(|gpu| match gpu.state {
        GpuState::Ready | GpuState::Cordoned | GpuState::Degraded => !gpu.stale,
        GpuState::Changing | GpuState::Held | GpuState::Unknown | GpuState::Lost | GpuState::Maintenance => false,
    })
}

/// The targets that the config and the last readings require. For callers that change nothing.
#[derive(Debug)]
pub(super) struct DesiredTargets {
    pub(super) gpus: Vec<Gpu>,
    decided: Sharing,
}

impl DesiredTargets {
    pub(super) fn of(mps: &Mps, viewer: Viewer) -> Self {
        let gpus = eligibility::known_gpus(&mps.handles.readings, viewer);
        let had = mps.entries().keys().cloned().collect();
        let decided = sharing::decide(&mps.handles.state.config(), &gpus, &had);
        Self { gpus, decided }
    }

    /// Returns whether a target will soon appear: its GPU was read, and no operation is needed, but the reconciler has
    /// not added the target yet.
    pub(super) fn has_pending(&self, mps: &Mps) -> bool {
        let known: BTreeSet<String> = mps.entries().keys().cloned().collect();
        let comes = |target: &SharingTarget| !target.full_gpu || mps.is_active(&target.uuid);
        self.decided.targets.iter().any(|target| !known.contains(&target.uuid) && comes(target))
    }

    /// Returns why the reconciler will remove a target; `None` if the target stays. The leases and clients of the
    /// target may finish first.
    pub(super) fn why_removed(&self, uuid: &str, entry: &Entry) -> Option<String> {
        let gpu = self.gpus.iter().find(|gpu| gpu.uuid == entry.gpu_uuid)?;
        let is_wanted = self.decided.targets.iter().any(|target| target.uuid == uuid);
        if is_wanted || self.decided.unseen.contains(&gpu.uuid) || !is_reading_conclusive(Some(gpu)) {
            return None;
        }
        let its = self.decided.findings.iter().filter(|finding| finding.target.as_deref() == Some(uuid));
        let reasons: Vec<&str> = its.map(|finding| finding.reason.as_str()).collect();
        Some(match (reasons.is_empty(), uuid == gpu.uuid) {
            (false, _) => reasons.join(", "),
            (true, true) => format!("the config wants GPU {} in mode `{}`", gpu.index, gpu.mode.name()),
            (true, false) => "the desired layout of its GPU no longer shares this MIG device".to_owned(),
        })
    }
}

/// Adds an entry for a target, or updates its entry.
pub(super) fn add_or_update(mps: &Mps, target: &SharingTarget) {
    let mut entries = mps.entries();
    if let Some(entry) = entries.get_mut(&target.uuid) {
        entry.target = Some(target.clone());
        return;
    }
    let taken: BTreeSet<String> = entries.values().map(|entry| entry.short.clone()).collect();
    let short = sharing::short_name(&target.uuid, &taken);
    let place = TargetDir::of(&mps.base, &short);
    let daemon = supervise(mps, &short, &target.gpu_uuid, &target.uuid, place);
    let (gpu_uuid, turn) = (target.gpu_uuid.clone(), Arc::default());
    let entry = Entry { short, gpu_uuid, target: Some(target.clone()), daemon, turn };
    entries.insert(target.uuid.clone(), entry);
}

/// Returns the policy of a target, with the settings of its rule or the recorded settings that override them.
pub(super) fn policy(mps: &Mps, target: &SharingTarget) -> MpsPolicy {
    let set = mps.record(&target.uuid).set.filter(|set| set.rule == target.policy.settings);
    let settings = set.map_or_else(|| target.policy.settings.clone(), |set| set.settings);
    multi_user_support::effective_policy(MpsPolicy { settings, ..target.policy.clone() }, mps.multi_user().as_ref())
}

/// Returns the desired state of a target's daemon.
pub(super) fn desired_state(
    mps: &Mps,
    config: &Config,
    entry: &Entry,
    target: &SharingTarget,
    driver: Option<String>,
) -> Desired {
    let settings = &config.mps;
    let usual = gpush_core::config::Mps::default();
    Desired {
        policy: policy(mps, target),
        gpu_uuid: target.gpu_uuid.clone(),
        supervision: settings.policy(),
        health: Duration::from_secs(settings.health_s.into()),
        control: program(mps, &settings.control, &usual.control),
        server: program(mps, &settings.server, &usual.server),
        driver,
        logs: mps.log_directory(&settings.log_directory, &usual.log_directory).join(&entry.short),
        log_bytes: u64::from(settings.log_mib) << 20,
    }
}

/// Returns the path of one of NVIDIA's programs.
pub(super) fn program(mps: &Mps, configured: &str, usual: &str) -> PathBuf {
    match &mps.programs {
        Some(dir) if configured == usual => dir.join(PathBuf::from(usual).file_name().unwrap_or_default()),
        Some(_) | None => PathBuf::from(configured),
    }
}
