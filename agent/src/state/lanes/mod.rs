//! One lane per GPU.
//!
//! A lane belongs to one reconciler or one operation at a time. An operation takes all its lanes in one step: for its
//! own GPUs, and for GPUs that are reset together with them. The operation executes its MPS and time-slice steps
//! itself. An operation waits only for the reconcilers and grants that were running before its claim.
//!
//! ```text
//!            lock                        claim (all GPUs of an operation at once)
//! free ─────────────► a reconciler ──────────────────┐
//!  │ ▲ ▲ ◄─────────── at work       ended            ▼
//!  │ │ │                                          claimed: being planned ── begin ─► changing: begun
//!  │ │ └──────────────────────────────────────────── dropped ◄──────────────────────────┘
//!  │ └──── dropped ─┐
//!  └─────────────► grants being recorded: they exclude operations, not reconcilers or each other
//!        grant
//! ```
//!
//! | newcomer | free | reconciler | grant | claimed | changing |
//! |---|---|---|---|---|---|
//! | reconciler | gets it | waits | gets it | waits | returns: the operation does its work |
//! | operation | gets it | gets it, begins once the reconciler has finished | the same | waits some seconds, then refused | refused |
//! | grant | gets it | gets it | gets it | refused | refused |
//!
//! The scheduler has the queue of the operations and leases that wait. An operation without `--wait` never enters
//! the queue: it begins at once or is refused.
//!
//! All state of this module is in memory. After a restart of gpushd, the operations that have begun according to the
//! journal claim their GPUs again before gpushd serves any request.
//!
//! | file | subject |
//! |---|---|
//! | `claim` | operations: all their lanes at once |
//! | `lane_lock` | reconcilers: one lane |
//! | `grant` | leases that are being recorded |

mod claim;
mod grant;
mod lane_lock;

use std::{
    collections::BTreeMap,
    sync::{Arc, MutexGuard},
};

use gpush_api::{ApiError, GpuIndex, GpuUuid};
use gpush_locked::Locked;
use tokio::sync::watch;

use crate::state::{self, Holder, words};

pub(crate) use self::{
    claim::Claim,
    grant::{Grant, LaneChanges},
};

/// The lanes of all GPUs. A handle, cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Lanes(Arc<LaneParts>);

#[derive(Debug)]
struct LaneParts {
    /// The state of the host. It shows which operation changes a GPU.
    host: state::State,
    known: Locked<LaneStates>,
    /// A new value wakes the scheduler, all waiting operations and reconcilers. gpushd sends it when an operation has begun
    /// or ended, a lease has ended, or the state of an MPS daemon has changed.
    room: watch::Sender<()>,
    /// A new value tells waiting tasks that a reconciler or a grant has finished.
    finished: watch::Sender<()>,
}

#[derive(Debug, Default)]
struct LaneStates {
    /// For each claimed GPU, by UUID, the operation that has claimed it.
    claimed: BTreeMap<GpuUuid, Holder>,
    /// For each GPU, by UUID, the reconciler and the grants that are running.
    at_work: BTreeMap<GpuUuid, LaneActivity>,
    /// For each GPU, by UUID, how often an operation has begun or ended on it.
    changes: LaneChanges,
    /// The error for operations that try to claim a lane. `None` while the lanes are open.
    closed: Option<ApiError>,
}

/// Whether a reconciler is running on a GPU, and the number of grants being recorded there.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct LaneActivity {
    reconciler: bool,
    grants: usize,
}

impl Lanes {
    /// Creates the lanes. All of them are free.
    pub(crate) fn new(host: state::State) -> Self {
        let (room, finished) = (watch::Sender::new(()), watch::Sender::new(()));
        Self(Arc::new(LaneParts { host, known: Locked::default(), room, finished }))
    }

    fn states(&self) -> MutexGuard<'_, LaneStates> {
        self.0.known.lock()
    }

    /// Subscribes to changes after which a waiting operation, lease or reconciler may be able to begin.
    pub(crate) fn room(&self) -> watch::Receiver<()> {
        self.0.room.subscribe()
    }

    /// Notifies the subscribers of [`Lanes::room`]. The caller must not hold the lock of [`LaneStates`].
    pub(crate) fn make_room(&self) {
        self.0.room.send_replace(());
    }

    /// Wakes the tasks that wait until no reconciler or grant runs. The caller must not hold the lock of
    /// [`LaneStates`].
    fn finish(&self) {
        self.0.finished.send_replace(());
    }

    /// Closes the lanes: an operation that tries to claim a lane gets the error `why`. Queued operations stay queued.
    ///
    /// # Errors
    /// If an operation has claimed a GPU. Returns the UUID of the GPU, and the operation.
    pub(crate) fn close(&self, why: ApiError) -> Result<(), (GpuUuid, Holder)> {
        let mut known = self.states();
        match known.claimed.first_key_value() {
            Some((uuid, holder)) => Err((uuid.clone(), holder.clone())),
            None => {
                known.closed = Some(why);
                Ok(())
            }
        }
    }

    /// Opens the lanes to operations again.
    pub(crate) fn open(&self) {
        self.states().closed = None;
        self.make_room();
    }

    /// Returns the error for operations that try to claim a lane. `None` while the lanes are open.
    pub(crate) fn closed(&self) -> Option<ApiError> {
        self.states().closed.clone()
    }

    /// Checks that no operation is changing a GPU, because a reading during a change would soon be out of date. A GPU
    /// may be read while its operation is still being planned.
    ///
    /// # Errors
    /// If an operation is changing the GPU. The error names the operation.
    pub(crate) fn check_not_changing(&self, index: GpuIndex, uuid: &GpuUuid) -> Result<(), ApiError> {
        match self.states().claimed.get(uuid) {
            Some(holder) if holder.has_begun() => Err(words::changed_by(index, uuid, holder)),
            Some(_) | None => Ok(()),
        }
    }
}

impl LaneStates {
    fn is_idle(&self, uuid: &GpuUuid) -> bool {
        self.at_work.get(uuid).is_none_or(|at_work| *at_work == LaneActivity::default())
    }

    /// Changes what is recorded as running on a GPU.
    fn update_activity(&mut self, uuid: &GpuUuid, change: impl FnOnce(&mut LaneActivity)) {
        let at_work = self.at_work.entry(uuid.clone()).or_default();
        change(at_work);
        if *at_work == LaneActivity::default() {
            self.at_work.remove(uuid);
        }
    }
}

#[cfg(test)]
mod tests;
