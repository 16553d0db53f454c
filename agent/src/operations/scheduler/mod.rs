//! The scheduler: everything that waits for GPUs, in one order of arrival. [`gpush_core::schedule`] makes the decisions.
//!
//! ```text
//!                        lease: a request ─┐         ┌─► granted: capacity is reserved, the task of the lease records it
//! enters the queue ──►                     ├─► pass ─┼─► waits: the task of the lease shows why
//!                   operation: its needs ──┘         └─► never: the task of the lease ends the request
//!                                │
//!                                └─► after each change of the queue: first, or behind an earlier entry
//! ```
//!
//! One task makes the passes. It makes a pass when something has changed that can change a decision: an entry came or left,
//! an operation or a lease has ended, an MPS daemon admits clients, the state of the host has changed, or the pause after a
//! failed grant is over. The driver does not report the end of a process. So while requests wait for processes or for a
//! reading, the task reads the GPUs each second. Otherwise it makes a pass at least every 30 s.
//!
//! A search for a placement runs without a lock, on a blocking thread. The state of the host then reserves the capacity of
//! the grant, if no other grant has got capacity meanwhile.
//!
//! | file | subject |
//! |---|---|
//! | `demand` | what a request for a lease asks for |
//! | `ends` | when leases end, as far as gpushd knows it |
//! | `entries` | the entries of the queue, with the channels for their answers |
//! | `places` | a place in the queue, for its owner |
//! | `answer` | the answers to leases |
//! | `run` | the task: when it makes a pass |
//! | `pass` | decides about the waiting requests |
//! | `reserve` | placing and reserving |
//! | `restriction` | requests that wait only for their own account |
//! | `capacity` | capacity that is reserved for a grant |
//! | `offers` | what the GPUs offer now, and the members of an assignment |
//! | `searches` | where searches for placements run |
//! | `placement_snapshot` | what a placement depends on, and the results of searches |
//! | `held` | the leases of each account, for quotas |
//! | `limits` | whether a quota allows a request |
//! | `explain` | why a request has no assignment |
//! | `short_lease` | hints: a shorter lease may use reserved capacity |

mod answer;
mod capacity;
mod demand;
mod ends;
mod entries;
mod explain;
mod held;
mod limits;
mod offers;
mod pass;
mod placement_snapshot;
mod places;
mod reserve;
mod restriction;
mod run;
mod searches;
mod short_lease;

use std::{
    ops::Deref,
    sync::{Arc, MutexGuard},
};

use gpush_core::{
    lease::placement::PlacementPolicy,
    schedule::{Ahead, Needs, Queue},
};
use gpush_locked::Locked;
use tokio::sync::watch;

use crate::{modes::mps::Mps, state::context::HostContext};

pub(crate) use self::{
    answer::{LeaseAnswer, LeaseInbox},
    capacity::{DevicesToCreate, Reserved},
    demand::LeaseDemand,
    explain::{RetryHint, Unplaced, explain, retry_hint},
    held::HeldLeases,
    limits::{check_quotas, denied, may_wait},
    offers::{host as offered_host, slurm_gpus},
    placement_snapshot::PlacementSnapshot,
    places::{LeasePlace, OperationPlace},
    reserve::{NotReserved, ReadHost, reserve, reserve_at_once},
    run::resolve_all,
};
use self::{entries::Entries, searches::Searches};

/// The parts of gpushd that the scheduler uses.
#[derive(Debug)]
pub(crate) struct SchedulerHandles {
    pub(crate) context: Arc<HostContext>,
    /// What the MPS targets offer.
    pub(crate) mps: Mps,
}

/// The scheduler of this host. A handle; clones are cheap and share the state.
#[derive(Debug, Clone)]
pub(crate) struct Scheduler(Arc<SchedulerParts>);

/// The state behind [`Scheduler`].
#[derive(Debug)]
pub(crate) struct SchedulerParts {
    handles: SchedulerHandles,
    entries: Locked<Entries>,
    /// Wakes the task of the scheduler after the queue has changed.
    changed: watch::Sender<()>,
    searches: Searches,
    /// Held while an assignment is reserved. After [`reserve::MOST_OVERTAKEN`] attempts, also held during the search, so that
    /// no other grant can make its result outdated.
    turn: Locked<()>,
}

impl Deref for Scheduler {
    type Target = SchedulerParts;

    fn deref(&self) -> &SchedulerParts {
        &self.0
    }
}

impl Scheduler {
    /// Creates the handle. The queue is empty.
    pub(crate) fn new(handles: SchedulerHandles) -> Self {
        let (entries, changed) = (Locked::default(), watch::Sender::new(()));
        Self(Arc::new(SchedulerParts { handles, entries, changed, searches: Searches::new(), turn: Locked::default() }))
    }

    /// Starts the task, which makes passes until gpushd stops.
    pub(crate) fn spawn(&self) -> tokio::task::JoinHandle<()> {
        let scheduler = self.clone();
        self.handles.context.tasks.spawn(crate::system::tasks::TaskName::Scheduler, move || run::run(scheduler.clone()))
    }

    /// Returns the entry that a new entry with these needs would wait for; `None` if the new entry would be first.
    pub(crate) fn would_wait_for(&self, needs: &Needs) -> Option<Ahead> {
        self.with_queue(|queue| queue.would_wait_for(needs))
    }

    /// Reads the queue. `read` must not take other locks.
    pub(crate) fn with_queue<T>(&self, read: impl FnOnce(&Queue) -> T) -> T {
        read(self.entries().queue())
    }

    /// Returns where searches for placements run.
    pub(crate) fn searches(&self) -> &Searches {
        &self.searches
    }

    /// Wakes waiting requests and operations after capacity became free.
    pub(crate) fn capacity_freed(&self) {
        // The task of the scheduler gets this notification too.
        self.handles.context.lanes.make_room();
    }

    fn entries(&self) -> MutexGuard<'_, Entries> {
        self.entries.lock()
    }

    /// Changes the queue. Then tells the operations what they wait for, if this has changed.
    fn change_entries<T>(&self, change: impl FnOnce(&mut Entries) -> T) -> T {
        let mut entries = self.entries();
        let result = change(&mut entries);
        entries.answer_operations();
        result
    }

    /// Wakes the task of the scheduler.
    fn wake(&self) {
        self.changed.send_replace(());
    }

    /// Returns the placement policy: which place a request gets if several are possible.
    fn policy(&self) -> PlacementPolicy {
        self.handles.context.state.config().leases.placement
    }
}
