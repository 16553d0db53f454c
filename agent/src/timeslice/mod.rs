//! GPUs that are shared by turns: their time-slice level and compute mode are kept as the rule wants them.
//!
//! ```text
//! config, what stands on the GPUs ──► core::turns: keep, wait, let go
//!                                        │
//!   woken, or a minute has passed ──► settle ──► compute mode, through the driver worker
//!                                        │
//!                                        └─────► level: read ─ as wanted ─────────────► seen
//!                                                       │ differs                        ▲
//!                                                       └─► recorded ─► set ─► read ─────┘
//! ```
//!
//! The reconciler sets the compute mode of each GPU in its own task, and a level only under the lane of its GPU. An
//! operation has the lanes of its GPUs and sets both itself.
//!
//! A level is had from `nvidia-smi compute-policy` alone: no NVML call tells or sets it. That program takes
//! its time, so one run reads all GPUs together, at most once a minute while nothing is different, and none
//! is run while no GPU takes turns that has levels. What the driver forgets (at a reboot, a reset, with the
//! end of its last user) is set again as soon as gpushd sees that the driver or the GPU is back.
//!
//! Neither setting ends or slows what runs: both reach only contexts that are made later. And neither is a
//! wall: holders by turns share memory and faults, and nobody is sure of any part of the time.
//!
//! | file | subject |
//! |---|---|
//! | `settle` | which GPUs there are, and when to look |
//! | `modes` | their compute modes |
//! | `levels` | their levels |
//! | `pace` | when what failed is tried again |
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

/// What is known of GPUs that are shared by turns, and what is used to keep them so. A handle, cheap to clone.
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
    /// UUIDs of GPUs of which a level was read: they have levels, whatever the driver says for a moment. No
    /// part changes that while the host is up, so it is not forgotten.
    proven: Mutex<BTreeSet<String>>,
    troubles: Mutex<BTreeMap<Subject, ApiError>>,
    /// Counts how often the reconciler was woken.
    wake: watch::Sender<u64>,
    /// Held while `nvidia-smi` runs.
    smi: tokio::sync::Mutex<()>,
    afresh: AtomicBool,
}

/// What a trouble is about.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Subject {
    /// `nvidia-smi`, and so all levels.
    Program,
    /// The level of a GPU, by UUID.
    Level(String),
    /// The compute mode of a GPU, by UUID.
    ComputeMode(String),
}

/// A level as it was seen.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Seen {
    level: Level,
    since: Timestamp,
    /// When it was read last, or was to be.
    read_at: Timestamp,
    /// Why it is not the wanted one.
    failed: Option<String>,
    /// The one that it was kept at by this agent: another one is drift.
    kept: Option<TimesliceLevel>,
}

/// What is known of a level.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Level {
    Known(TimesliceLevel),
    /// The driver has none for this part, in its words.
    Unsupported(String),
    /// Why not.
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

    /// Wakes the reconciler; what failed before is tried again at once.
    pub(crate) fn settle_afresh(&self) {
        self.afresh.store(true, Ordering::Relaxed);
        self.settle();
    }

    fn is_afresh(&self) -> bool {
        self.afresh.swap(false, Ordering::Relaxed)
    }

    /// The levels as last read, by UUID of the GPU. The desired level is not in there: the config tells it.
    fn views(&self) -> BTreeMap<String, TimesliceView> {
        self.all_seen().iter().map(|(uuid, seen)| (uuid.clone(), view(seen.clone()))).collect()
    }

    /// What keeps GPUs from being as they are wanted.
    pub(crate) fn health(&self) -> Vec<ApiError> {
        self.all_troubles().values().cloned().collect()
    }

    fn all_seen(&self) -> MutexGuard<'_, BTreeMap<String, Seen>> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn all_troubles(&self) -> MutexGuard<'_, BTreeMap<Subject, ApiError>> {
        self.troubles.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes in what a GPU's level is; the one that was known before.
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

    /// Notes why a level is not the wanted one.
    fn failed(&self, uuid: &str, why: String) {
        if let Some(seen) = self.all_seen().get_mut(uuid) {
            seen.failed = Some(why);
        }
    }

    /// Notes that a GPU has the level that it shall have.
    fn keep(&self, uuid: &str, level: TimesliceLevel) {
        if let Some(seen) = self.all_seen().get_mut(uuid) {
            (seen.failed, seen.kept) = (None, Some(level));
        }
    }

    /// Whether a GPU was kept at a level before.
    fn was_kept(&self, uuid: &str, level: TimesliceLevel) -> bool {
        self.all_seen().get(uuid).is_some_and(|seen| seen.kept == Some(level))
    }

    /// Whether a GPU was kept at another level than the driver's own before.
    fn was_kept_at_any(&self, uuid: &str) -> bool {
        let own = TimesliceLevel::Default;
        self.all_seen().get(uuid).is_some_and(|seen| seen.kept.is_some_and(|kept| kept != own))
    }

    /// Notes that a level was read of a GPU.
    fn prove(&self, uuid: &str) {
        self.proven.lock().unwrap_or_else(PoisonError::into_inner).insert(uuid.to_owned());
    }

    /// Whether one was, ever.
    fn is_proven(&self, uuid: &str) -> bool {
        self.proven.lock().unwrap_or_else(PoisonError::into_inner).contains(uuid)
    }

    /// Whether the driver has no levels for a GPU.
    fn is_unsupported(&self, uuid: &str) -> bool {
        matches!(self.all_seen().get(uuid), Some(Seen { level: Level::Unsupported(_), .. }))
    }

    /// Forgets what was seen of GPUs that do not take turns, and the troubles of those that nothing is to be
    /// done for.
    fn retain(&self, takes_turns: impl Fn(&str) -> bool, is_tended: impl Fn(&str) -> bool) {
        self.all_seen().retain(|uuid, _| takes_turns(uuid));
        self.all_troubles().retain(|subject, _| match subject {
            Subject::Program => true,
            Subject::Level(uuid) | Subject::ComputeMode(uuid) => is_tended(uuid),
        });
    }

    /// No GPU takes turns.
    fn forget(&self) {
        self.all_seen().clear();
        self.all_troubles().clear();
    }

    /// Notes a trouble, and logs it when it is another than before.
    fn note(&self, subject: Subject, error: &ApiError) {
        let before = self.all_troubles().insert(subject, error.clone());
        if before.as_ref() != Some(error) {
            tracing::error!("{}", words::in_full(error));
        }
    }

    fn well(&self, subject: &Subject) {
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
