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
    collections::BTreeMap,
    ops::Deref,
    sync::{
        Arc, MutexGuard,
        atomic::{AtomicBool, Ordering},
    },
};

use gpush_api::{ApiError, GpuUuid};
use gpush_locked::Locked;
use tokio::sync::watch;

use crate::{
    modes::shared_gpus::SharedGpus,
    state::{context::HostContext, words},
};

pub(crate) use self::{
    plan_steps::{apply_and_read_back, gpus_to_release, plan},
    reconciler::run,
    schedule::INTERVAL,
};

/// Keeps the settings of time-sliced GPUs. A handle, cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Timeslice(Arc<TimesliceParts>);

impl Deref for Timeslice {
    type Target = TimesliceParts;

    fn deref(&self) -> &TimesliceParts {
        &self.0
    }
}

#[derive(Debug)]
pub(crate) struct TimesliceParts {
    context: Arc<HostContext>,
    shared_gpus: SharedGpus,
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
    Level(GpuUuid),
    /// The compute mode of a GPU, by UUID.
    ComputeMode(GpuUuid),
}

impl Timeslice {
    /// Creates the handle. gpushd has not read a level yet.
    pub(crate) fn new(context: Arc<HostContext>, shared_gpus: SharedGpus) -> Self {
        Self(Arc::new(TimesliceParts {
            context,
            shared_gpus,
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

    /// Returns an error for each GPU that does not have its desired settings.
    pub(crate) fn health(&self) -> Vec<ApiError> {
        self.all_troubles().values().cloned().collect()
    }

    fn all_troubles(&self) -> MutexGuard<'_, BTreeMap<TroubleSubject, ApiError>> {
        self.troubles.lock()
    }

    /// Removes the problems of GPUs, unless gpushd still keeps their settings or must remove them.
    fn retain_troubles(&self, is_tended: impl Fn(&GpuUuid) -> bool) {
        self.all_troubles().retain(|subject, _| match subject {
            TroubleSubject::Program => true,
            TroubleSubject::Level(uuid) | TroubleSubject::ComputeMode(uuid) => is_tended(uuid),
        });
    }

    /// Removes all problems, because no GPU is time-sliced.
    fn forget_troubles(&self) {
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
