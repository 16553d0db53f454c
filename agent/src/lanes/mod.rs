//! One lane and one queue per GPU.
//!
//! A lane has one owner at a time: a reconciler or an operation. An operation takes all its lanes
//! at once: the lanes of its own GPUs, and of the GPUs that are reset together with its own GPUs.
//! The operation executes its MPS and time-slice steps itself. An operation waits only for the
//! reconcilers and grants that were running before its claim.
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
//! | operation | gets it | gets it, begins once the reconciler has finished | the same | refused | refused |
//! | grant | gets it | gets it | gets it | refused | refused |
//!
//! Operations that wait and requests for leases share one queue, in the order of their arrival: see [`queue`]. An
//! operation without `--wait` never queues: it begins at once or is refused.
//!
//! All state here is in memory. After a restart, the operations that have begun according to the journal claim their
//! GPUs again before any request is served.
//!
//! | file | subject |
//! |---|---|
//! | `queue` | the order of arrival |
//! | `claim` | operations: all their lanes at once |
//! | `lane_lock` | reconcilers: one lane |
//! | `grant` | leases that are being recorded |
//! | `place` | a place in the queue |

mod claim;
mod grant;
mod lane_lock;
mod place;
mod queue;

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use gpush_api::ApiError;
use tokio::sync::watch;

use crate::state::{self, Holder, words};

use self::queue::Queue;
pub(crate) use self::{
    claim::Claim,
    grant::Grant,
    place::QueuePlace,
    queue::{Ahead, Need, Needs, Reserve, Ticket, Waiter},
};

/// The lanes of all GPUs. A handle, cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Lanes(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    /// Shows which operation changes a GPU.
    host: state::State,
    known: Mutex<LaneStates>,
    /// Incremented when an operation ends or begins, or an entry leaves the queue, so that a waiting entry may begin.
    room: watch::Sender<u64>,
    /// Incremented when a reconciler or a grant has finished.
    finished: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct LaneStates {
    /// The operation that has claimed each GPU, by UUID.
    claimed: BTreeMap<String, Holder>,
    /// Running reconcilers and grants, by UUID of the GPU.
    at_work: BTreeMap<String, LaneActivity>,
    /// Why operations get no lane. `None` while the lanes are open.
    closed: Option<ApiError>,
    queue: Queue,
}

/// The running reconciler and grants of a GPU.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct LaneActivity {
    reconciler: bool,
    grants: usize,
}

impl Lanes {
    /// Creates the lanes. All of them are free.
    pub(crate) fn new(host: state::State) -> Self {
        let (room, finished) = (watch::Sender::new(0), watch::Sender::new(0));
        Self(Arc::new(Inner { host, known: Mutex::default(), room, finished }))
    }

    fn states(&self) -> MutexGuard<'_, LaneStates> {
        self.0.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Subscribes to changes after which a waiting entry or a reconciler may begin.
    pub(crate) fn room(&self) -> watch::Receiver<u64> {
        self.0.room.subscribe()
    }

    /// Notifies the subscribers of [`Lanes::room`]. The caller must not hold the lock of [`LaneStates`].
    fn make_room(&self) {
        self.0.room.send_modify(|times| *times += 1);
    }

    /// Reports that a lease has ended. An operation that waited for the lease may begin.
    pub(crate) fn lease_ended(&self) {
        self.make_room();
    }

    /// Reports that a reconciler or a grant has finished. The caller must not hold the lock of [`LaneStates`].
    fn finish(&self) {
        self.0.finished.send_modify(|times| *times += 1);
    }

    /// Closes the lanes: operations get the error `why` instead of a lane. The queue is unchanged.
    ///
    /// # Errors
    /// If an operation has claimed a GPU. Returns the UUID of the GPU, and the operation.
    pub(crate) fn close(&self, why: ApiError) -> Result<(), (String, Holder)> {
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

    /// Returns why operations get no lane. `None` while the lanes are open.
    pub(crate) fn closed(&self) -> Option<ApiError> {
        self.states().closed.clone()
    }

    /// Checks that no operation is changing a GPU. A reading of a GPU that is being changed would
    /// soon be out of date. A GPU whose operation is only being planned may be read.
    ///
    /// # Errors
    /// If an operation is changing the GPU. The error names the operation.
    pub(crate) fn check_not_changing(&self, index: u32, uuid: &str) -> Result<(), ApiError> {
        match self.states().claimed.get(uuid) {
            Some(holder) if holder.has_begun() => Err(words::changed_by(index, uuid, holder)),
            Some(_) | None => Ok(()),
        }
    }
}

impl LaneStates {
    fn is_idle(&self, uuid: &str) -> bool {
        self.at_work.get(uuid).is_none_or(|at_work| *at_work == LaneActivity::default())
    }

    /// Changes the record of what is running on a GPU.
    fn update_activity(&mut self, uuid: &str, change: impl FnOnce(&mut LaneActivity)) {
        let at_work = self.at_work.entry(uuid.to_owned()).or_default();
        change(at_work);
        if *at_work == LaneActivity::default() {
            self.at_work.remove(uuid);
        }
    }
}

#[cfg(test)]
mod tests;
