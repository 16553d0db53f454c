//! Keeps the time-slice level and compute mode of time-sliced GPUs as their rules require.
//!
//! ```text
//! config, layouts of the GPUs ──► core::timeslice_plan: keep, wait, restore
//!                                        │
//!   woken, or a minute has passed ► reconcile ─► compute mode, through the driver worker
//!                                        │
//!                                        └─────► level: read ─ as desired ────────────► seen
//!                                                       │ differs                        ▲
//!                                                       └─► recorded ─► set ─► read ─────┘
//! ```
//!
//! The reconciler sets the compute mode of each GPU in a separate task. The reconciler sets a level only while it holds
//! the lane of the GPU. An operation already holds the lanes of its GPUs, so it sets the compute modes and levels of
//! these GPUs itself.
//!
//! NVML has no call for levels, so gpushd reads and sets them with `nvidia-smi compute-policy`. That program is slow,
//! but one call reads all GPUs. While nothing changes, gpushd calls it at most once a minute, and only if a time-sliced
//! GPU supports levels.
//!
//! The driver resets the level and the compute mode at a reboot, at a GPU reset, and when the last
//! process that uses the driver exits. gpushd sets both again when it detects that the driver or
//! the GPU is back. Both settings apply only to new contexts, so they do not end or slow running
//! processes. Neither setting isolates processes: the processes on a GPU share memory and faults,
//! and no process has a guaranteed share of the time.
//!
//! | file | subject |
//! |---|---|
//! | `reconciler` | when time-sliced GPUs are checked |
//! | `target` | which GPUs are time-sliced, and their desired settings |
//! | `modes` | compute modes of time-sliced GPUs |
//! | `levels` | time-slice levels |
//! | `schedule` | intervals of readings and retries |
//! | `smi` | `nvidia-smi compute-policy` |
//! | `plan_steps` | steps of operations |

mod levels;
mod modes;
mod plan_steps;
mod reconciler;
mod schedule;
mod smi;
mod target;

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Deref,
    sync::{
        Arc, MutexGuard,
        atomic::{AtomicBool, Ordering},
    },
};

use gpush_api::{ApiError, TimesliceLevel, TimesliceState, TimesliceView};
use gpush_locked::Locked;
use gpush_nvml::Hardware;
use jiff::Timestamp;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::{
    host_services::HostServices,
    lanes::Lanes,
    shared_gpus::SharedGpus,
    state::{State, readings::Readings, words},
    tasks::Tasks,
};

pub(crate) use self::{
    plan_steps::{apply_and_read_back, gpus_to_release, plan},
    reconciler::run,
};

/// Keeps the settings of time-sliced GPUs. A handle, cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Timeslice(Arc<Inner>);

impl Deref for Timeslice {
    type Target = Inner;

    fn deref(&self) -> &Inner {
        &self.0
    }
}

#[derive(Debug)]
pub(crate) struct Inner {
    state: State,
    readings: Readings,
    hardware: Hardware,
    lanes: Lanes,
    shared_gpus: SharedGpus,
    host_services: Arc<HostServices>,
    tasks: Tasks,
    stopping: CancellationToken,
    seen: Locked<BTreeMap<String, LevelState>>,
    /// UUIDs of GPUs that are known to support time-slice levels, because their level was read at
    /// least once. Support cannot change while the host is up, so entries are never removed.
    proven: Locked<BTreeSet<String>>,
    troubles: Locked<BTreeMap<TroubleSubject, ApiError>>,
    /// Each new value wakes the reconciler.
    wake: watch::Sender<()>,
    /// Locked while `nvidia-smi` runs.
    smi: tokio::sync::Mutex<()>,
    afresh: AtomicBool,
}

/// What has a problem.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum TroubleSubject {
    /// `nvidia-smi`, which affects all levels.
    Program,
    /// The level of a GPU, by UUID.
    Level(String),
    /// The compute mode of a GPU, by UUID.
    ComputeMode(String),
}

/// The level of a GPU as gpushd last read it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct LevelState {
    level: Level,
    since: Timestamp,
    /// When gpushd last tried to read the level.
    read_at: Timestamp,
    /// Why gpushd could not set the desired level.
    failed: Option<String>,
    /// The desired level that this gpushd last set on the GPU, or found to be set already. Any other level is drift.
    kept: Option<TimesliceLevel>,
}

/// A level, or why gpushd does not know a level.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Level {
    Known(TimesliceLevel),
    /// The driver has no levels for this GPU. The text says why.
    Unsupported(String),
    /// gpushd could not read the level. The text says why.
    Unknown(String),
}

impl Timeslice {
    /// Creates the handle. gpushd has not read a level yet.
    pub(crate) fn new(
        state: State,
        readings: Readings,
        hardware: Hardware,
        lanes: Lanes,
        shared_gpus: SharedGpus,
        host_services: Arc<HostServices>,
        tasks: Tasks,
    ) -> Self {
        Self(Arc::new(Inner {
            state,
            readings,
            hardware,
            lanes,
            shared_gpus,
            host_services,
            stopping: tasks.stopping().clone(),
            tasks,
            seen: Locked::default(),
            proven: Locked::default(),
            troubles: Locked::default(),
            wake: watch::Sender::new(()),
            smi: tokio::sync::Mutex::default(),
            afresh: AtomicBool::new(false),
        }))
    }

    /// Wakes the reconciler.
    pub(crate) fn wake(&self) {
        self.wake.send_replace(());
    }

    /// Wakes the reconciler, and makes it repeat attempts that have failed before.
    pub(crate) fn restart_reconcile(&self) {
        self.afresh.store(true, Ordering::Relaxed);
        self.wake();
    }

    fn take_restart_request(&self) -> bool {
        self.afresh.swap(false, Ordering::Relaxed)
    }

    /// Returns the last known levels, by UUID of the GPU. The caller must add the desired levels, which come from the
    /// config.
    fn views(&self) -> BTreeMap<String, TimesliceView> {
        self.level_states().iter().map(|(uuid, seen)| (uuid.clone(), view(seen.clone()))).collect()
    }

    /// Returns an error for each GPU that does not have its desired settings.
    pub(crate) fn health(&self) -> Vec<ApiError> {
        self.all_troubles().values().cloned().collect()
    }

    fn level_states(&self) -> MutexGuard<'_, BTreeMap<String, LevelState>> {
        self.seen.lock()
    }

    fn all_troubles(&self) -> MutexGuard<'_, BTreeMap<TroubleSubject, ApiError>> {
        self.troubles.lock()
    }

    /// Stores the level of a GPU. Returns the previous level.
    fn set_level(&self, uuid: &str, level: Level) -> Option<Level> {
        let mut seen = self.level_states();
        let before = seen.get(uuid).cloned();
        let same = before.as_ref().filter(|before| before.level == level);
        let read_at = Timestamp::now();
        let since = same.map_or(read_at, |before| before.since);
        let failed = same.and_then(|before| before.failed.clone());
        let kept = before.as_ref().and_then(|before| before.kept);
        seen.insert(uuid.to_owned(), LevelState { level, since, read_at, failed, kept });
        before.map(|before| before.level)
    }

    /// Stores why gpushd could not set the desired level.
    fn failed(&self, uuid: &str, why: String) {
        if let Some(seen) = self.level_states().get_mut(uuid) {
            seen.failed = Some(why);
        }
    }

    /// Stores that a GPU has its desired level.
    fn mark_set(&self, uuid: &str, level: TimesliceLevel) {
        if let Some(seen) = self.level_states().get_mut(uuid) {
            (seen.failed, seen.kept) = (None, Some(level));
        }
    }

    /// Returns whether this is the desired level that gpushd last set or found on a GPU.
    fn was_set(&self, uuid: &str, level: TimesliceLevel) -> bool {
        self.level_states().get(uuid).is_some_and(|seen| seen.kept == Some(level))
    }

    /// Returns whether the desired level that gpushd last set or found on a GPU was not the driver's default.
    fn was_set_before(&self, uuid: &str) -> bool {
        let own = TimesliceLevel::Default;
        self.level_states().get(uuid).is_some_and(|seen| seen.kept.is_some_and(|kept| kept != own))
    }

    /// Remembers that a GPU supports levels, because its level was read.
    fn prove(&self, uuid: &str) {
        self.proven.lock().insert(uuid.to_owned());
    }

    /// Returns whether a GPU is known to support levels.
    fn is_proven(&self, uuid: &str) -> bool {
        self.proven.lock().contains(uuid)
    }

    /// Returns whether the driver reports no levels for a GPU.
    fn is_unsupported(&self, uuid: &str) -> bool {
        matches!(self.level_states().get(uuid), Some(LevelState { level: Level::Unsupported(_), .. }))
    }

    /// Removes the levels of GPUs that are not time-sliced. Removes the problems of a GPU unless gpushd still keeps its
    /// settings or must remove them.
    fn retain(&self, takes_turns: impl Fn(&str) -> bool, is_tended: impl Fn(&str) -> bool) {
        self.level_states().retain(|uuid, _| takes_turns(uuid));
        self.all_troubles().retain(|subject, _| match subject {
            TroubleSubject::Program => true,
            TroubleSubject::Level(uuid) | TroubleSubject::ComputeMode(uuid) => is_tended(uuid),
        });
    }

    /// Removes all levels and problems, because no GPU is time-sliced.
    fn forget(&self) {
        self.level_states().clear();
        self.all_troubles().clear();
    }

    /// Stores a problem. Logs the error if it is new.
    fn note(&self, subject: TroubleSubject, error: &ApiError) {
        let before = self.all_troubles().insert(subject, error.clone());
        if before.as_ref() != Some(error) {
            tracing::error!("{}", words::one_line(error));
        }
    }

    fn clear_error(&self, subject: &TroubleSubject) {
        self.all_troubles().remove(subject);
    }
}

/// Converts a level for the API.
fn view(seen: LevelState) -> TimesliceView {
    let LevelState { level, since, read_at, failed, kept: _ } = seen;
    let (state, level, reason) = match level {
        Level::Known(level) => (TimesliceState::Known, Some(level), failed),
        Level::Unsupported(why) => (TimesliceState::Unsupported, None, Some(why)),
        Level::Unknown(why) => (TimesliceState::Unknown, None, Some(why)),
    };
    let (replicas, wanted) = (0, TimesliceLevel::Default);
    TimesliceView { replicas, wanted, state, level, reason, since: Some(since), read_at: Some(read_at) }
}
