//! Applies layouts when gpushd starts, and repairs drift if the config says so.
//!
//! MIG instances do not survive a reboot. So gpushd applies the layouts of the config when it starts for the first time
//! on a boot. After all GPUs are settled, later starts on the same boot change nothing, because a difference may be
//! intended. With `auto_reconcile`, gpushd also repairs drift: at start, after a reload and periodically.
//!
//! ```text
//! start ─► this boot recorded as complete? ─── yes ─► drift is shown
//!             │ no                                      │ auto_reconcile
//!             ▼                                         ▼
//!         each GPU not recorded ──► layouts           repaired
//! ```
//!
//! | file | subject |
//! |---|---|
//! | `layouts` | the layouts of a boot, GPU by GPU, until each is settled |
//! | `attempt` | one attempt for a GPU, and its result |
//! | `running` | the attempts that are running, at most one for each GPU |
//! | `trigger` | snapshots after which gpushd tries again at once |

mod attempt;
mod due_layout;
mod layouts;
mod running;
mod trigger;

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use gpush_api::{ApiError, GpuState, GpuUuid, LayoutsAtStart, Mig, Mode};
use gpush_core::config::Config;
use gpush_locked::Locked;
use gpush_store::BootRecord;
use tokio::time::{Instant, sleep_until};

use self::{
    attempt::{InUse, LayoutResult},
    layouts::{Layouts, Progress},
    running::{AttemptPurpose, EndedAttempt, RunningAttempts},
    trigger::Trigger,
};
use crate::{
    operations::{
        apply::{Engine, Planner},
        operation::Operations,
    },
    requests::caller::Viewer,
    state::{HostState, context::HostContext},
};

/// Normal and longest interval at which gpushd checks for drift if `auto_reconcile` is on. The interval grows after
/// failures.
const RECONCILE: (Duration, Duration) = (Duration::from_secs(60), Duration::from_secs(3600));

/// Which layouts gpushd could not apply at its start, and why. A handle, cheap to clone.
#[derive(Debug, Clone, Default)]
pub(crate) struct Startup(Arc<StartupParts>);

#[derive(Debug, Default)]
struct StartupParts {
    troubles: Locked<Vec<(ProblemSubject, ApiError)>>,
    /// The record of this boot.
    recorded: Locked<Option<BootRecord>>,
    /// UUIDs of GPUs that users have changed on this boot. gpushd does not apply the layouts of these GPUs at start.
    left: Locked<BTreeSet<GpuUuid>>,
}

/// What a problem is about.
#[derive(Debug, Clone, PartialEq, Eq)]
enum ProblemSubject {
    /// The record of the boot cannot be written.
    Boot,
    /// GPUs that the driver cannot identify.
    Unidentified,
    /// A GPU by UUID.
    Gpu(GpuUuid),
}

impl ProblemSubject {
    /// Returns whether the problem may still exist. A GPU that cannot be read, or is being changed, may still lack its
    /// layout.
    fn is_current(&self, host: &HostState) -> bool {
        let Self::Gpu(uuid) = self else { return true };
        host.gpu(uuid).is_some_and(|snapshot| {
            let is_unread = match snapshot.gpu.state {
                GpuState::Unknown | GpuState::Lost | GpuState::Maintenance | GpuState::Changing => true,
                GpuState::Ready | GpuState::Cordoned | GpuState::Degraded | GpuState::Held => false,
            };
            is_unread || !snapshot.gpu.drift.is_empty()
        })
    }
}

impl Startup {
    /// Returns the current problems, except those of GPUs that have their layout now.
    pub(crate) fn troubles(&self, host: &HostState) -> Vec<ApiError> {
        let troubles = self.0.troubles.lock();
        troubles.iter().filter(|(subject, _)| subject.is_current(host)).map(|(_, error)| error.clone()).collect()
    }

    /// Removes the problems of GPUs that have their layout now, so that a later difference does not show an old problem.
    fn forget_mended(&self, host: &HostState) {
        let mut troubles = self.0.troubles.lock();
        troubles.retain(|(subject, _)| subject.is_current(host));
    }

    /// Returns which GPUs are settled: they have their layout, or gpushd no longer tries to apply it.
    pub(crate) fn layouts(&self) -> Option<LayoutsAtStart> {
        let recorded = self.0.recorded.lock();
        let layouts = |record: &BootRecord| LayoutsAtStart {
            complete: record.complete,
            settled: record.settled.iter().cloned().collect(),
            waiting: record.waiting.iter().cloned().collect(),
        };
        recorded.as_ref().map(layouts)
    }

    fn last_record(&self) -> Option<BootRecord> {
        self.0.recorded.lock().clone()
    }

    fn recorded(&self, record: BootRecord) {
        *self.0.recorded.lock() = Some(record);
    }

    /// Marks that users have changed these GPUs on this boot.
    pub(crate) fn mark_changed(&self, uuids: impl Iterator<Item = GpuUuid>) {
        self.0.left.lock().extend(uuids);
    }

    fn is_changed_by_caller(&self, uuid: &GpuUuid) -> bool {
        self.0.left.lock().contains(uuid)
    }

    fn note(&self, subject: ProblemSubject, error: ApiError) {
        let mut troubles = self.0.troubles.lock();
        troubles.retain(|(other, _)| *other != subject);
        troubles.push((subject, error));
    }

    fn forget(&self, subject: &ProblemSubject) {
        let mut troubles = self.0.troubles.lock();
        troubles.retain(|(other, _)| other != subject);
    }
}

/// What gpushd must do at its start.
#[derive(Debug, Clone)]
pub(crate) struct StartupWork {
    /// Which layouts gpushd has already applied on this boot; `None` if it has no layout left to apply.
    record: Option<BootRecord>,
    /// Whether gpushd repairs drift at once.
    reconcile: bool,
}

impl Startup {
    /// Finds out what to do at this start, by comparing this boot with the recorded boot. If `unknown` is set, records
    /// were lost, and gpushd applies no layout.
    pub(crate) fn due(
        &self,
        config: &Config,
        boot: Result<String, ApiError>,
        recorded: Option<BootRecord>,
        unknown: bool,
    ) -> StartupWork {
        let boot_id = match boot {
            Ok(boot_id) => boot_id,
            Err(error) => {
                tracing::error!("{error}: layouts are not applied at start");
                self.note(ProblemSubject::Boot, error);
                return StartupWork { record: None, reconcile: false };
            }
        };
        if unknown {
            tracing::warn!(
                "it is not known whether the layouts of this boot were applied: gpushd does not change \
                the GPUs"
            );
            let mut record = BootRecord::new(boot_id);
            record.complete = true;
            self.recorded(record);
            return StartupWork { record: None, reconcile: config.auto_reconcile };
        }
        let recorded = recorded.filter(|record| record.boot_id == boot_id);
        self.recorded(recorded.clone().unwrap_or_else(|| BootRecord::new(boot_id.clone())));
        match recorded {
            None => StartupWork { record: Some(BootRecord::new(boot_id)), reconcile: false },
            Some(record) if record.complete => {
                if !config.auto_reconcile {
                    tracing::info!(
                        "gpushd was restarted without a reboot and applied the layouts before, so it reports drift \
                        but does not correct it"
                    );
                }
                let record = Some(record).filter(|record| !record.waiting.is_empty());
                StartupWork { record, reconcile: config.auto_reconcile }
            }
            Some(record) => {
                tracing::info!(
                    "gpushd was restarted without a reboot, and applies the layouts that it did not apply before"
                );
                StartupWork { record: Some(record), reconcile: config.auto_reconcile }
            }
        }
    }
}

/// The handles for layouts at start and for the repair of drift. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct StartupHandles {
    pub(crate) context: Arc<HostContext>,
    /// Stores which layouts could not be applied.
    pub(crate) startup: Startup,
    pub(crate) engine: Engine,
    pub(crate) planner: Planner,
    /// Shows when operations end.
    pub(crate) operations: Operations,
}

/// Applies layouts that no user requested: the layouts of a new boot, and with `auto_reconcile` the layouts of GPUs
/// with drift. When gpushd stops, waits for the running operations and begins no new ones.
pub(crate) async fn run(handles: StartupHandles, due: StartupWork) {
    // If this task has failed before, GPUs were settled meanwhile.
    let recorded = due.record.map(|record| handles.startup.last_record().unwrap_or(record));
    let mut layouts = recorded.map(Layouts::new);
    let mut attempts = RunningAttempts::default();
    let mut drift = DriftTimer::new(due.reconcile);
    let mut snapshots = handles.context.state.watch();
    let mut trigger = Trigger::new(&snapshots.borrow_and_update());
    while !handles.context.stopping.is_cancelled() {
        let mut next = drift.next;
        if let Some(due) = &mut layouts {
            match due.round(&handles, &mut attempts).await {
                Progress::Complete => layouts = None,
                Progress::Waiting(again) => next = again.map_or(next, |again| next.min(again)),
            }
        }
        if drift.begins_round() {
            start_reconciling(&handles, layouts.as_ref(), &mut attempts).await;
            next = next.min(drift.next);
        }
        let ended = tokio::select! {
            () = handles.context.stopping.cancelled() => None,
            Ok(_) = snapshots.wait_for(|host| {
                handles.startup.forget_mended(host);
                trigger.fires(host)
            }) => {
                drift.trigger(!attempts.is_empty());
                None
            }
            ended = attempts.next(), if !attempts.is_empty() => ended,
            () = sleep_until(next) => None,
        };
        if let Some(ended) = ended {
            record(&handles, ended, layouts.as_mut(), &mut drift).await;
            drift.attempt_ended(!attempts.is_empty());
        }
    }
    while let Some(ended) = attempts.next().await {
        record(&handles, ended, layouts.as_mut(), &mut drift).await;
    }
}

/// When gpushd checks for drift. After a failure the interval grows, because each attempt may destroy instances.
#[derive(Debug)]
struct DriftTimer {
    next: Instant,
    interval: Duration,
    /// Whether an attempt of the present round has failed.
    has_failed: bool,
    /// Whether a trigger fired during an attempt. The attempt may have used the config before the trigger, and the round
    /// after the trigger skipped its GPU.
    is_due_again: bool,
}

impl DriftTimer {
    fn new(at_once: bool) -> Self {
        let wait = if at_once { Duration::ZERO } else { RECONCILE.0 };
        Self { next: Instant::now() + wait, interval: RECONCILE.0, has_failed: false, is_due_again: false }
    }

    /// Returns whether a round begins now. If so, the next round begins after the interval.
    fn begins_round(&mut self) -> bool {
        let now = Instant::now();
        if now < self.next {
            return false;
        }
        if !self.has_failed {
            self.interval = RECONCILE.0;
        }
        self.has_failed = false;
        self.next = now + self.interval;
        true
    }

    /// Doubles the interval, but at most once in each round.
    fn attempt_failed(&mut self) {
        if !std::mem::replace(&mut self.has_failed, true) {
            self.interval = (self.interval * 2).min(RECONCILE.1);
            self.next = Instant::now() + self.interval;
        }
    }

    /// Begins a round at once, with the normal interval. If attempts are running, another round follows after each of
    /// them.
    fn trigger(&mut self, has_attempts: bool) {
        *self = Self { is_due_again: has_attempts, ..Self::new(true) };
    }

    /// Begins the round that is due after an attempt, if any.
    fn attempt_ended(&mut self, has_attempts: bool) {
        if self.is_due_again {
            self.trigger(has_attempts);
        }
    }
}

/// Starts to apply the layout of each GPU with drift that needs an operation. Skips cordoned GPUs, and GPUs
/// that are not settled on this boot yet.
async fn start_reconciling(handles: &StartupHandles, layouts: Option<&Layouts>, attempts: &mut RunningAttempts) {
    if !handles.context.state.config().auto_reconcile {
        return;
    }
    let observed = tokio::select! {
        observed = handles.context.readings.host() => observed,
        () = handles.context.stopping.cancelled() => return,
    };
    // Without a driver, there is nothing to repair, so this does not count as a failure.
    let Ok(observed) = observed else { return };
    for gpu in observed.gpus(Viewer::Agent) {
        let due = layouts.is_some_and(|layouts| layouts.is_due(&gpu.uuid));
        // Skip a cordoned GPU, because an administrator may be working on it.
        let kept = !gpu.cordons.is_empty() || matches!(gpu.state, GpuState::Held | GpuState::Maintenance);
        // Leases delay the change of the GPU. When the last of them ends, gpushd checks all GPUs again.
        let delayed = gpu.pending.iter().any(|change| !change.leases.is_empty());
        // The next reboot of the virtual machine gives the GPU its MIG mode.
        let next_mode = gpu.mig.as_ref().map(Mig::pending_mode);
        let waits = gpu.waits_for_reboot() && next_mode == Some(gpu.mode == Mode::Mig);
        let skipped = due || kept || delayed || waits || attempts.is_running(&gpu.uuid);
        if skipped || !due_layout::needs_operation(&gpu) || gpu.drift.is_empty() {
            continue;
        }
        let (handles, one) = (handles.clone(), gpu.clone());
        let attempt = async move { attempt::apply_layout(&handles, "mig.reconcile", &one).await };
        attempts.start(AttemptPurpose::Drift, gpu, attempt);
    }
}

/// Records the outcome of an attempt.
async fn record(handles: &StartupHandles, ended: EndedAttempt, layouts: Option<&mut Layouts>, drift: &mut DriftTimer) {
    let EndedAttempt { purpose, gpu, result } = ended;
    match purpose {
        AttemptPurpose::Boot | AttemptPurpose::Waiting => {
            if let Some(layouts) = layouts {
                layouts.record_outcome(handles, &gpu, result).await;
            }
        }
        AttemptPurpose::Drift => match result {
            LayoutResult::Given => drop(handles.context.state.set_blocked_by(&gpu.uuid, Vec::new())),
            LayoutResult::Stopping => {}
            LayoutResult::Cancelled(error) | LayoutResult::Busy(error) => {
                tracing::info!(gpu = gpu.uuid.as_str(), "GPU {}: its drift is not corrected now: {error}", gpu.uuid);
                drift.attempt_failed();
            }
            LayoutResult::InUse(InUse { error, holders, .. }) => {
                if handles.context.state.set_blocked_by(&gpu.uuid, holders) {
                    attempt::log(&gpu, &error);
                }
                handles.startup.note(ProblemSubject::Gpu(gpu.uuid.clone()), error);
                drift.attempt_failed();
            }
            LayoutResult::Never(error) | LayoutResult::NotYet(error) | LayoutResult::Failed(error) => {
                attempt::log(&gpu, &error);
                handles.startup.note(ProblemSubject::Gpu(gpu.uuid.clone()), error);
                drift.attempt_failed();
            }
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fault: if the config was reloaded while gpushd repaired drift, gpushd followed the new config up to a minute later.
    #[tokio::test]
    async fn reload_during_an_attempt_causes_a_round_after_the_attempt() {
        let mut drift = DriftTimer::new(true);
        assert!(drift.begins_round() && !drift.begins_round());
        drift.attempt_ended(false);
        assert!(!drift.begins_round(), "no trigger fired during the attempt");
        drift.trigger(true);
        assert!(drift.begins_round() && !drift.begins_round());
        drift.attempt_ended(true);
        assert!(drift.begins_round(), "the GPU of the attempt that ended");
        drift.attempt_ended(false);
        assert!(drift.begins_round(), "the GPU of the other attempt");
        drift.attempt_ended(false);
        assert!(!drift.begins_round());
    }
}
