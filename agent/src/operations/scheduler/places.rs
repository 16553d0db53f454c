//! A place in the queue, for the lease or operation that owns it.

use std::sync::Arc;

use gpush_api::LeaseId;
use gpush_core::schedule::{Ahead, Needs, Ticket};
use tokio::{sync::watch, time::Instant};

use super::{Scheduler, answer::LeaseInbox, demand::LeaseDemand, entries::PAUSE};
use crate::requests::caller::Viewer;

/// The place of a lease in the queue. Dropping this value removes the entry.
#[derive(Debug)]
pub(crate) struct LeasePlace {
    scheduler: Scheduler,
    ticket: Ticket,
}

/// The place of an operation in the queue. Dropping this value removes the entry.
#[derive(Debug)]
pub(crate) struct OperationPlace {
    scheduler: Scheduler,
    ticket: Ticket,
    ahead: watch::Receiver<Option<Ahead>>,
}

impl Scheduler {
    /// Adds a lease at the end of the queue. `demand` is what it asks for, and the viewer of the reasons for the wait. The
    /// lease reserves nothing until its demand is known.
    pub(crate) fn enter_lease(
        &self,
        id: LeaseId,
        demand: Option<(Arc<LeaseDemand>, Viewer)>,
        inbox: Arc<dyn LeaseInbox>,
    ) -> LeasePlace {
        let ticket = self.change_entries(|entries| entries.push_lease(id, demand, inbox));
        self.wake();
        LeasePlace { scheduler: self.clone(), ticket }
    }

    /// Adds an operation with these needs at the end of the queue.
    pub(crate) fn enter_operation(&self, id: String, needs: Needs) -> OperationPlace {
        let (ticket, ahead) = self.change_entries(|entries| entries.push_operation(id, needs));
        self.wake();
        OperationPlace { scheduler: self.clone(), ticket, ahead }
    }

    /// Adds a request of an earlier gpushd at the end of the queue. `overtaken` later requests got a lease before it.
    pub(crate) fn restore_lease(&self, id: LeaseId, overtaken: u32, inbox: Arc<dyn LeaseInbox>) -> LeasePlace {
        let place = self.enter_lease(id, None, inbox);
        self.entries().set_overtaken(place.ticket, overtaken);
        place
    }

    fn leave(&self, ticket: Ticket) {
        // Drop the entry without the lock.
        let removed = self.change_entries(|entries| entries.remove(ticket));
        drop(removed);
        self.wake();
    }
}

impl LeasePlace {
    /// Sets what the request asks for, or replaces it after the client has reconnected. `viewer` determines what the
    /// reasons for the wait show.
    pub(crate) fn set_demand(&self, demand: &Arc<LeaseDemand>, viewer: Viewer) {
        self.scheduler.change_entries(|entries| entries.set_demand(self.ticket, Arc::clone(demand), viewer));
        self.scheduler.wake();
    }

    /// Removes what the request asks for, so that it reserves nothing until [`Self::set_demand`].
    pub(crate) fn clear_demand(&self) {
        self.scheduler.change_entries(|entries| entries.clear_demand(self.ticket));
    }

    /// Postpones the next attempt to grant the request. Call this before the capacity of the failed attempt is free.
    /// Otherwise the scheduler tries again at once.
    pub(crate) fn pause(&self) {
        self.scheduler.entries().pause(self.ticket, Instant::now() + PAUSE);
        self.scheduler.wake();
    }
}

impl Drop for LeasePlace {
    fn drop(&mut self) {
        self.scheduler.leave(self.ticket);
    }
}

impl OperationPlace {
    /// Replaces the needs. The place in the queue stays the same.
    pub(crate) fn set_needs(&self, needs: Needs) {
        if self.scheduler.change_entries(|entries| entries.set_needs(self.ticket, needs)) {
            self.scheduler.wake();
        }
    }

    /// Returns the earlier entry that the operation waits for; `None` if the operation is first. Marks the answer as seen.
    pub(crate) fn ahead(&mut self) -> Option<Ahead> {
        self.ahead.borrow_and_update().clone()
    }

    /// Returns whether the operation is first now.
    pub(crate) fn is_first(&self) -> bool {
        self.ahead.borrow().is_none()
    }

    /// Waits until the answer has changed since [`OperationPlace::ahead`].
    pub(crate) async fn changed(&mut self) {
        // Cannot fail: the entry keeps the sender until this value is dropped.
        let _changed = self.ahead.changed().await.is_ok();
    }
}

impl Drop for OperationPlace {
    fn drop(&mut self) {
        self.scheduler.leave(self.ticket);
    }
}
