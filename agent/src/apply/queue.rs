//! The operations that cannot begin yet. `queue_rounds` serves them.

use std::{
    collections::BTreeMap,
    sync::{Arc, MutexGuard},
    time::Duration,
};

use gpush_api::{ApiError, Code};
use gpush_locked::Locked;
use gpush_store::OperationId;
use jiff::Timestamp;
use tokio::{sync::watch, time::Instant};

use super::order::Order;
use crate::{
    lanes::{Lanes, Need, Needs, QueuePlace, Reserve, Waiter},
    operation::OperationHandle,
};

/// Interval between readings of GPUs whose instances are in use. gpushd must poll, because the driver does not report
/// when an instance becomes idle.
pub(super) const READ: Duration = Duration::from_secs(1);

/// Maximum number of waiting operations.
const MOST: usize = 256;

#[derive(Debug)]
pub(crate) struct OperationQueue {
    waiting: Locked<BTreeMap<OperationId, QueuedOperation>>,
    /// Notified when an operation is added or cancelled. Each notification wakes the task that serves the queue.
    pub(super) changes: watch::Sender<()>,
}

impl Default for OperationQueue {
    fn default() -> Self {
        Self { waiting: Locked::default(), changes: watch::Sender::new(()) }
    }
}

#[derive(Debug, Clone)]
pub(super) struct QueuedOperation {
    pub(super) ongoing: Arc<OperationHandle>,
    pub(super) order: Order,
    pub(super) place: Arc<QueuePlace>,
    pub(super) until: Instant,
    /// Earliest time of the next attempt. Without this delay, the operation would wake itself: a failed attempt
    /// releases its claim, and each release wakes all waiting operations.
    pub(super) again: Instant,
    /// Why the last attempt failed.
    pub(super) last: Option<ApiError>,
    /// Whether a task is reading the GPUs that the operation has claimed.
    pub(super) is_reading: bool,
}

impl OperationQueue {
    pub(super) fn waiting(&self) -> MutexGuard<'_, BTreeMap<OperationId, QueuedOperation>> {
        self.waiting.lock()
    }

    /// Returns one sentence for each operation that waits for a GPU.
    pub(crate) fn for_gpu(&self, uuid: &str) -> Vec<String> {
        let waiting = self.waiting();
        let sentence = |one: &QueuedOperation| {
            let operation = one.ongoing.snapshot();
            let plan = operation.plans.iter().find(|plan| plan.uuid == uuid)?;
            Some(format!("operation {} waits in the queue (desired: {})", operation.id, plan.end_state()))
        };
        waiting.values().filter_map(sentence).collect()
    }

    /// Returns whether the queue is empty.
    pub(crate) fn is_empty(&self) -> bool {
        self.waiting().is_empty()
    }

    /// Checks that one more operation may wait.
    ///
    /// # Errors
    /// If the queue is full.
    pub(super) fn has_room(&self) -> Result<(), ApiError> {
        let waiting = self.waiting().len();
        if waiting < MOST {
            return Ok(());
        }
        Err(ApiError::new(Code::Unavailable, format!("the queue is full: {waiting} operations wait"))
            .hint(
                "`gpushctl operation list` shows them; cancel one with `gpushctl operation cancel op-N` \
                (administrator)",
            )
            .retryable())
    }

    /// Adds an operation that is recorded as queued or waiting. `since` is the time of its request.
    pub(super) fn enqueue(
        &self,
        lanes: &Lanes,
        ongoing: &Arc<OperationHandle>,
        order: Order,
        since: Timestamp,
        needs: Needs,
    ) {
        let place = lanes.queue(Waiter::Operation(ongoing.id()), needs);
        self.insert(ongoing, order, since, Arc::new(place), Instant::now());
    }

    /// Adds an operation that was queued when the previous gpushd ended. Reserves all GPUs of the operation until the
    /// operation is planned again.
    pub(crate) fn enqueue_recovered(
        &self,
        lanes: &Lanes,
        ongoing: &Arc<OperationHandle>,
        order: Order,
        since: Timestamp,
    ) {
        let plans = ongoing.snapshot().plans;
        let needs = plans.into_iter().map(|plan| (plan.uuid, Need::Lane(Reserve::Gpu))).collect();
        self.enqueue(lanes, ongoing, order, since, needs);
    }

    pub(super) fn insert(
        &self,
        ongoing: &Arc<OperationHandle>,
        order: Order,
        since: Timestamp,
        place: Arc<QueuePlace>,
        again: Instant,
    ) {
        let spent = Duration::try_from(Timestamp::now().duration_since(since)).unwrap_or_default();
        let until = Instant::now() + order.wait.unwrap_or_default().saturating_sub(spent);
        let waiting =
            QueuedOperation { ongoing: Arc::clone(ongoing), order, place, until, again, last: None, is_reading: false };
        self.waiting().insert(ongoing.number(), waiting);
        self.wake();
    }

    /// Marks that a task is reading the claimed GPUs of an operation.
    pub(super) fn mark_reading(&self, id: OperationId) {
        if let Some(waiting) = self.waiting().get_mut(&id) {
            waiting.is_reading = true;
        }
    }

    /// Marks that an operation could not begin after its GPUs were read. The next attempt follows after at least
    /// [`READ`].
    pub(super) fn attempt_failed(&self, id: OperationId) {
        if let Some(waiting) = self.waiting().get_mut(&id) {
            waiting.is_reading = false;
            waiting.again = Instant::now() + READ;
        }
    }

    /// Wakes the task that serves the queue.
    pub(crate) fn wake(&self) {
        self.changes.send_replace(());
    }
}
