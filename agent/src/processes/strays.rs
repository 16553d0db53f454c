//! What was done about each stray.
//!
//! ```text
//! seen ─► warned
//!      ├► left: why, looked at again each time
//!      └► asked (SIGTERM, until when) ─► killed
//! ```
//!
//! A stray that is none any more, or on a GPU that is not seen as it is now, is forgotten: when it is one again
//! it is asked again.

use std::{
    collections::HashMap,
    ops::Deref,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use gpush_api::{ApiError, GpuProcess};
use gpush_host::proc;
use gpush_store::Store;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{held::Held, lease::SeenLeases};
use crate::{
    mps::Mps,
    state::{State, readings::Readings},
};

/// What was done about each stray, and what strays are found and ended with. A handle, cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Strays(Arc<Inner>);

impl Deref for Strays {
    type Target = Inner;

    fn deref(&self) -> &Inner {
        &self.0
    }
}

/// The state behind [`Strays`].
#[derive(Debug)]
pub(crate) struct Inner {
    pub(super) state: State,
    pub(super) readings: Readings,
    pub(super) mps: Mps,
    pub(super) store: Store,
    pub(super) stopping: CancellationToken,
    /// Why nothing can be recorded, and so no process is ended.
    pub(super) read_only: Option<ApiError>,
    /// By pid.
    cases: Mutex<HashMap<u32, Case>>,
    /// Shares that processes were seen with.
    pub(super) leases: Arc<SeenLeases>,
    /// Files that the config allows and gpushd can't see.
    unseen: Mutex<Vec<ApiError>>,
}

#[derive(Debug)]
pub(super) struct Case {
    /// Start of the process: another one may get its pid.
    pub(super) start: u64,
    pub(super) stage: Stage,
}

#[derive(Debug, Clone)]
pub(super) enum Stage {
    Warned,
    /// It is left, for this reason.
    Left(String),
    /// It was asked to end.
    Asked {
        process: Arc<Held>,
        kill_at: Instant,
    },
    Killed,
}

impl Strays {
    /// Nothing was done about any process yet. `shares` is what is remembered of leases of processes.
    pub(crate) fn new(
        state: State,
        readings: Readings,
        mps: Mps,
        store: Store,
        stopping: CancellationToken,
        read_only: Option<ApiError>,
        leases: Arc<SeenLeases>,
    ) -> Self {
        let (cases, unseen) = (Mutex::default(), Mutex::default());
        Self(Arc::new(Inner { state, readings, mps, store, stopping, read_only, cases, leases, unseen }))
    }

    fn cases(&self) -> MutexGuard<'_, HashMap<u32, Case>> {
        self.cases.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What was done about a process, in words.
    pub(super) fn done(&self, one: &GpuProcess) -> Option<String> {
        one.stray.as_ref()?;
        Some(match self.stage(one.process.pid?)? {
            Stage::Left(why) => format!("left: {why}"),
            Stage::Warned => "the log warns of it".to_owned(),
            Stage::Asked { kill_at, .. } => {
                // Rounded up to whole seconds: the process never has less time than the text says.
                let left = kill_at.saturating_duration_since(Instant::now()) + Duration::from_millis(999);
                format!("asked to end (SIGTERM), killed in {} s", left.as_secs())
            }
            Stage::Killed => "killed".to_owned(),
        })
    }

    /// What was done about the process that has this pid now.
    pub(super) fn stage(&self, pid: u32) -> Option<Stage> {
        let start = proc::start(pid);
        self.cases().get(&pid).filter(|case| Some(case.start) == start).map(|case| case.stage.clone())
    }

    /// Notes what was done; whether it is something else than before.
    pub(super) fn note(&self, pid: u32, start: u64, stage: Stage) -> bool {
        let before = self.cases().insert(pid, Case { start, stage: stage.clone() });
        match (before.filter(|case| case.start == start).map(|case| case.stage), stage) {
            (Some(Stage::Left(before)), Stage::Left(now)) => before != now,
            (Some(Stage::Warned), Stage::Warned) | (Some(Stage::Killed), Stage::Killed) => false,
            _ => true,
        }
    }

    /// Forgets what was done about a process.
    pub(super) fn forget(&self, pid: u32) {
        self.cases().remove(&pid);
    }

    /// Forgets all but these.
    pub(super) fn keep(&self, pids: &[u32]) {
        self.cases().retain(|pid, _| pids.contains(pid));
        self.leases.forget_ended();
    }

    /// When the next one is to be killed.
    pub(super) fn next(&self) -> Option<Instant> {
        let cases = self.cases();
        let times = cases.values().filter_map(|case| match &case.stage {
            Stage::Asked { kill_at, .. } => Some(*kill_at),
            Stage::Warned | Stage::Left(_) | Stage::Killed => None,
        });
        times.min()
    }

    /// Files that the config allows and gpushd can't see.
    pub(super) fn unseen(&self) -> Vec<ApiError> {
        self.unseen.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Notes them, and warns of those that are new.
    pub(super) fn tell_unseen(&self, unseen: Vec<ApiError>) {
        let mut known = self.unseen.lock().unwrap_or_else(PoisonError::into_inner);
        for error in unseen.iter().filter(|error| !known.contains(error)) {
            tracing::warn!("{error}");
        }
        *known = unseen;
    }
}
