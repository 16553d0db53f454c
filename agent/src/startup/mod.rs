//! Applies layouts when gpushd starts, and repairs drift if the config says so.
//!
//! MIG instances do not survive a reboot. So gpushd applies the layouts of the config when it starts for the first time
//! on a boot. On later starts on the same boot gpushd changes nothing, because a difference may be intended. With
//! `auto_reconcile`, gpushd also repairs drift: at start, after a reload and periodically.
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
//! | `trigger` | snapshots after which gpushd tries again at once |

mod attempt;
mod layouts;
mod trigger;

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use gpush_api::{ApiError, Gpu, GpuState, LayoutsAtStart};
use gpush_core::config::Config;
use gpush_store::{BootRecord, Store};
use tokio::{
    task::JoinSet,
    time::{Instant, sleep_until},
};
use tokio_util::sync::CancellationToken;

use self::{attempt::LayoutResult, layouts::Layouts, trigger::Trigger};
use crate::{
    apply::{Engine, Planner},
    caller::Viewer,
    operation::Operations,
    state::{State, readings::Readings},
};

/// Normal and longest interval at which gpushd checks for drift if `auto_reconcile` is on. The interval grows after
/// failures.
const RECONCILE: (Duration, Duration) = (Duration::from_secs(60), Duration::from_secs(3600));

/// Which layouts gpushd could not apply at its start, and why. A handle, cheap to clone.
#[derive(Debug, Clone, Default)]
pub(crate) struct Startup(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    troubles: Mutex<Vec<(ProblemSubject, ApiError)>>,
    /// The record of this boot.
    recorded: Mutex<Option<BootRecord>>,
    /// UUIDs of GPUs that users have changed on this boot. gpushd does not apply the layouts of these GPUs at start.
    left: Mutex<BTreeSet<String>>,
}

/// What a problem is about.
#[derive(Debug, Clone, PartialEq, Eq)]
enum ProblemSubject {
    /// The record of the boot cannot be written.
    Boot,
    /// GPUs that the driver cannot identify.
    Unidentified,
    /// A GPU by UUID.
    Gpu(String),
}

impl Startup {
    /// Returns the current problems. Removes the problems of GPUs that have their layout now.
    pub(crate) fn troubles(&self, gpus: &[Gpu]) -> Vec<ApiError> {
        let mut troubles = self.0.troubles.lock().unwrap_or_else(PoisonError::into_inner);
        let unread = |gpu: &Gpu| match gpu.state {
            GpuState::Unknown | GpuState::Lost | GpuState::Maintenance => true,
            GpuState::Ready | GpuState::Cordoned | GpuState::Degraded | GpuState::Changing | GpuState::Held => false,
        };
        let lacks = |gpu: &Gpu| !gpu.drift.is_empty() || unread(gpu);
        troubles.retain(|(subject, _)| match subject {
            ProblemSubject::Boot | ProblemSubject::Unidentified => true,
            ProblemSubject::Gpu(uuid) => gpus.iter().any(|gpu| gpu.uuid == *uuid && lacks(gpu)),
        });
        troubles.iter().map(|(_, error)| error.clone()).collect()
    }

    /// Returns which GPUs are settled: they have their layout, or gpushd no longer tries.
    pub(crate) fn layouts(&self) -> Option<LayoutsAtStart> {
        let recorded = self.0.recorded.lock().unwrap_or_else(PoisonError::into_inner);
        let layouts = |record: &BootRecord| LayoutsAtStart {
            complete: record.complete,
            settled: record.settled.iter().cloned().collect(),
        };
        recorded.as_ref().map(layouts)
    }

    fn recorded(&self, record: BootRecord) {
        *self.0.recorded.lock().unwrap_or_else(PoisonError::into_inner) = Some(record);
    }

    /// Marks that users have changed these GPUs on this boot.
    pub(crate) fn mark_changed(&self, uuids: impl Iterator<Item = String>) {
        self.0.left.lock().unwrap_or_else(PoisonError::into_inner).extend(uuids);
    }

    fn is_changed_by_caller(&self, uuid: &str) -> bool {
        self.0.left.lock().unwrap_or_else(PoisonError::into_inner).contains(uuid)
    }

    fn note(&self, subject: ProblemSubject, error: ApiError) {
        let mut troubles = self.0.troubles.lock().unwrap_or_else(PoisonError::into_inner);
        troubles.retain(|(other, _)| *other != subject);
        troubles.push((subject, error));
    }

    fn forget(&self, subject: &ProblemSubject) {
        let mut troubles = self.0.troubles.lock().unwrap_or_else(PoisonError::into_inner);
        troubles.retain(|(other, _)| other != subject);
    }
}

/// What gpushd must do at its start.
#[derive(Debug)]
pub(crate) struct StartupWork {
    /// Which layouts gpushd has already applied on this boot; `None` if none is missing.
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
                StartupWork { record: None, reconcile: config.auto_reconcile }
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
pub(crate) struct Handles {
    /// Stores which layouts could not be applied.
    pub(crate) startup: Startup,
    pub(crate) engine: Engine,
    pub(crate) planner: Planner,
    /// Shows when operations end.
    pub(crate) operations: Operations,
    /// Provides the config, and shows when a condition, such as a cordon, ends.
    pub(crate) state: State,
    pub(crate) readings: Readings,
    /// Records which GPUs have their layout.
    pub(crate) store: Store,
    /// Cancelled when gpushd stops.
    pub(crate) stopping: CancellationToken,
}

/// Applies layouts that no user requested: the layouts of a new boot, and with `auto_reconcile` the layouts of GPUs
/// with drift. When gpushd stops, waits for the running operations and begins no new ones.
pub(crate) async fn run(handles: Handles, due: StartupWork) {
    let mut layouts = due.record.map(Layouts::new);
    let mut snapshots = handles.state.watch();
    let mut trigger = Trigger::new(&snapshots.borrow_and_update());
    let mut pause = RECONCILE.0;
    let mut reconcile_at = Instant::now() + if due.reconcile { Duration::ZERO } else { pause };
    while !handles.stopping.is_cancelled() {
        let mut next = reconcile_at;
        if let Some(due) = &mut layouts {
            match due.round(&handles).await {
                Some(again) => next = next.min(again),
                None => layouts = None,
            }
        }
        if Instant::now() >= reconcile_at {
            // Increase the interval after a failure, because each attempt may destroy instances.
            pause =
                if reconcile(&handles, layouts.as_ref()).await { RECONCILE.0 } else { (pause * 2).min(RECONCILE.1) };
            reconcile_at = Instant::now() + pause;
            next = next.min(reconcile_at);
        }
        tokio::select! {
            () = handles.stopping.cancelled() => {}
            Ok(_) = snapshots.wait_for(|host| trigger.fires(host)) => {
                pause = RECONCILE.0;
                reconcile_at = Instant::now();
            }
            () = sleep_until(next) => {}
        }
    }
}

/// Applies the layout of each GPU with drift whose rule has mode `mig` or `mps`. Skips cordoned GPUs, and GPUs that
/// have not got their layout of this boot yet. Returns whether all attempts succeeded.
async fn reconcile(handles: &Handles, layouts: Option<&Layouts>) -> bool {
    if !handles.state.config().auto_reconcile {
        return true;
    }
    let observed = tokio::select! {
        observed = handles.readings.host() => observed,
        () = handles.stopping.cancelled() => return true,
    };
    // Without a driver, there is nothing to repair, so this does not count as a failure.
    let Ok(observed) = observed else { return true };
    let mut tasks = JoinSet::new();
    for gpu in observed.gpus(Viewer::Agent) {
        let due = layouts.is_some_and(|layouts| layouts.is_due(&gpu.uuid));
        // Skip a cordoned GPU, because an administrator may be working on it.
        let kept = !gpu.cordons.is_empty() || matches!(gpu.state, GpuState::Held | GpuState::Maintenance);
        if !layouts::needs_operation(gpu.mode) || gpu.drift.is_empty() || due || kept {
            continue;
        }
        let handles = handles.clone();
        tasks.spawn(async move {
            match attempt::apply_layout(&handles, "mig.reconcile", &gpu).await {
                LayoutResult::Given | LayoutResult::Stopping => true,
                LayoutResult::Cancelled(error) | LayoutResult::Busy(error) => {
                    tracing::info!(gpu = gpu.uuid, "GPU {}: its drift is not corrected now: {error}", gpu.uuid);
                    false
                }
                LayoutResult::Never(error) | LayoutResult::NotYet(error) | LayoutResult::Failed(error) => {
                    attempt::log(&gpu, &error);
                    handles.startup.note(ProblemSubject::Gpu(gpu.uuid), error);
                    false
                }
            }
        });
    }
    tasks.join_all().await.into_iter().all(|given| given)
}
