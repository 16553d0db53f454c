//! Time-sliced GPUs: keeps their time-slice level and compute mode according to the rules.
//!
//! ```text
//! config, layouts of the GPUs ──► core::turns: keep, wait, let go
//!                                        │
//!   woken, or a minute has passed ──► settle ──► compute mode, through the driver worker
//!                                        │
//!                                        └─────► level: read ─ as desired ────────────► seen
//!                                                       │ differs                        ▲
//!                                                       └─► recorded ─► set ─► read ─────┘
//! ```
//!
//! The reconciler sets the compute mode of each GPU in its own task, and a level only under the lane of its GPU. An
//! operation has the lanes of its GPUs and sets both itself.
//!
//! Only `nvidia-smi compute-policy` reads and sets a level: NVML has no call for it. The program is slow. So one run
//! reads all GPUs, at most once a minute while nothing changes, and only while a time-sliced GPU has levels. The driver
//! forgets both settings at a reboot, at a reset, and when its last user ends. gpushd sets them again as soon as it
//! sees that the driver or the GPU is back.
//!
//! Neither setting ends or slows running processes: both apply only to new contexts. Neither isolates processes: they
//! share memory and faults, and no process has a guaranteed part of the time.
//!
//! | file | subject |
//! |---|---|
//! | `settle` | which GPUs there are, and when they are checked |
//! | `modes` | their compute modes |
//! | `levels` | their levels |
//! | `pace` | retries after failures |
//! | `smi` | `nvidia-smi compute-policy` |
//! | `moves` | what operations do with them |

mod levels;
mod modes;
mod moves;
mod pace;
mod settle;
mod smi;

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Deref,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use gpush_api::{ApiError, TimesliceLevel, TimesliceState, TimesliceView};
use gpush_nvml::Hardware;
use jiff::Timestamp;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::{
    lanes::Lanes,
    outside::Outside,
    shared_gpus::SharedGpus,
    state::{State, readings::Readings, words},
};

pub(crate) use self::{
    moves::{plan, settled, to_let_go},
    settle::run,
};

/// Time-sliced GPUs, and the handles that keep their settings. A handle, cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Timeslice(Arc<Inner>);

impl Deref for Timeslice {
    type Target = Inner;

    fn deref(&self) -> &Inner {
        &self.0
    }
}

/// The state behind a [`Timeslice`].
#[derive(Debug)]
pub(crate) struct Inner {
    state: State,
    readings: Readings,
    hardware: Hardware,
    lanes: Lanes,
    shared_gpus: SharedGpus,
    outside: Arc<Outside>,
    stopping: CancellationToken,
    seen: Mutex<BTreeMap<String, Seen>>,
    /// UUIDs of GPUs whose level was read once: they have levels, even if the driver denies it for a moment. No GPU
    /// changes that while the host is up, so it is never forgotten.
    proven: Mutex<BTreeSet<String>>,
    troubles: Mutex<BTreeMap<TroubleSubject, ApiError>>,
    /// Counts how often the reconciler was woken.
    wake: watch::Sender<u64>,
    /// Held while `nvidia-smi` runs.
    smi: tokio::sync::Mutex<()>,
    afresh: AtomicBool,
}

/// The subject of a trouble.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum TroubleSubject {
    /// `nvidia-smi`, and so all levels.
    Program,
    /// The level of a GPU, by UUID.
    Level(String),
    /// The compute mode of a GPU, by UUID.
    ComputeMode(String),
}

/// The last reading of a level.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Seen {
    level: Level,
    since: Timestamp,
    /// When it was last read, or should have been.
    read_at: Timestamp,
    /// Why it is not the desired level.
    failed: Option<String>,
    /// The level at which this gpushd kept the GPU. Any other level is drift.
    kept: Option<TimesliceLevel>,
}

/// A level, or why there is none.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Level {
    Known(TimesliceLevel),
    /// The driver has no levels for this GPU model; its message.
    Unsupported(String),
    /// Why the level is not known.
    Unknown(String),
}

impl Timeslice {
    /// Knows no level yet.
    pub(crate) fn new(
        state: State,
        readings: Readings,
        hardware: Hardware,
        lanes: Lanes,
        shared_gpus: SharedGpus,
        outside: Arc<Outside>,
        stopping: CancellationToken,
    ) -> Self {
        Self(Arc::new(Inner {
            state,
            readings,
            hardware,
            lanes,
            shared_gpus,
            outside,
            stopping,
            seen: Mutex::default(),
            proven: Mutex::default(),
            troubles: Mutex::default(),
            wake: watch::Sender::new(0),
            smi: tokio::sync::Mutex::default(),
            afresh: AtomicBool::new(false),
        }))
    }

    /// Wakes the reconciler.
    pub(crate) fn settle(&self) {
        self.wake.send_modify(|times| *times += 1);
    }

    /// Wakes the reconciler, and retries at once what failed before.
    pub(crate) fn settle_afresh(&self) {
        self.afresh.store(true, Ordering::Relaxed);
        self.settle();
    }

    fn is_afresh(&self) -> bool {
        self.afresh.swap(false, Ordering::Relaxed)
    }

    /// Returns the levels as last read, by UUID of the GPU, without the desired level, which is in the config.
    fn views(&self) -> BTreeMap<String, TimesliceView> {
        self.all_seen().iter().map(|(uuid, seen)| (uuid.clone(), view(seen.clone()))).collect()
    }

    /// Returns why GPUs differ from their desired settings.
    pub(crate) fn health(&self) -> Vec<ApiError> {
        self.all_troubles().values().cloned().collect()
    }

    fn all_seen(&self) -> MutexGuard<'_, BTreeMap<String, Seen>> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn all_troubles(&self) -> MutexGuard<'_, BTreeMap<TroubleSubject, ApiError>> {
        self.troubles.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records the level of a GPU. Returns the previous one.
    fn see(&self, uuid: &str, level: Level) -> Option<Level> {
        let mut seen = self.all_seen();
        let before = seen.get(uuid).cloned();
        let same = before.as_ref().filter(|before| before.level == level);
        let read_at = Timestamp::now();
        let since = same.map_or(read_at, |before| before.since);
        let failed = same.and_then(|before| before.failed.clone());
        let kept = before.as_ref().and_then(|before| before.kept);
        seen.insert(uuid.to_owned(), Seen { level, since, read_at, failed, kept });
        before.map(|before| before.level)
    }

    /// Records why a level is not the desired one.
    fn failed(&self, uuid: &str, why: String) {
        if let Some(seen) = self.all_seen().get_mut(uuid) {
            seen.failed = Some(why);
        }
    }

    /// Records that a GPU has its desired level.
    fn keep(&self, uuid: &str, level: TimesliceLevel) {
        if let Some(seen) = self.all_seen().get_mut(uuid) {
            (seen.failed, seen.kept) = (None, Some(level));
        }
    }

    /// Returns whether a GPU was kept at this level before.
    fn was_kept(&self, uuid: &str, level: TimesliceLevel) -> bool {
        self.all_seen().get(uuid).is_some_and(|seen| seen.kept == Some(level))
    }

    /// Returns whether a GPU was kept before at a level other than the driver's default.
    fn was_kept_at_any(&self, uuid: &str) -> bool {
        let own = TimesliceLevel::Default;
        self.all_seen().get(uuid).is_some_and(|seen| seen.kept.is_some_and(|kept| kept != own))
    }

    /// Records that a level was read from a GPU.
    fn prove(&self, uuid: &str) {
        self.proven.lock().unwrap_or_else(PoisonError::into_inner).insert(uuid.to_owned());
    }

    /// Returns whether a level was ever read from a GPU.
    fn is_proven(&self, uuid: &str) -> bool {
        self.proven.lock().unwrap_or_else(PoisonError::into_inner).contains(uuid)
    }

    /// Returns whether the driver has no levels for a GPU.
    fn is_unsupported(&self, uuid: &str) -> bool {
        matches!(self.all_seen().get(uuid), Some(Seen { level: Level::Unsupported(_), .. }))
    }

    /// Forgets the readings of GPUs that are not time-sliced, and the troubles of GPUs that need no action.
    fn retain(&self, takes_turns: impl Fn(&str) -> bool, is_tended: impl Fn(&str) -> bool) {
        self.all_seen().retain(|uuid, _| takes_turns(uuid));
        self.all_troubles().retain(|subject, _| match subject {
            TroubleSubject::Program => true,
            TroubleSubject::Level(uuid) | TroubleSubject::ComputeMode(uuid) => is_tended(uuid),
        });
    }

    /// Forgets all readings: no GPU is time-sliced.
    fn forget(&self) {
        self.all_seen().clear();
        self.all_troubles().clear();
    }

    /// Records a trouble. Logs it if it differs from the last one.
    fn note(&self, subject: TroubleSubject, error: &ApiError) {
        let before = self.all_troubles().insert(subject, error.clone());
        if before.as_ref() != Some(error) {
            tracing::error!("{}", words::in_full(error));
        }
    }

    fn well(&self, subject: &TroubleSubject) {
        self.all_troubles().remove(subject);
    }
}

/// A level as the API shows it.
fn view(seen: Seen) -> TimesliceView {
    let Seen { level, since, read_at, failed, kept: _ } = seen;
    let (state, level, reason) = match level {
        Level::Known(level) => (TimesliceState::Known, Some(level), failed),
        Level::Unsupported(why) => (TimesliceState::Unsupported, None, Some(why)),
        Level::Unknown(why) => (TimesliceState::Unknown, None, Some(why)),
    };
    let (replicas, wanted) = (0, TimesliceLevel::Default);
    TimesliceView { replicas, wanted, state, level, reason, since: Some(since), read_at: Some(read_at) }
}
