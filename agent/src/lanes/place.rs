//! A place in the queue.

use super::{
    Lanes,
    queue::{Ahead, Needs, QueueEntry, Ticket, Waiter},
};

/// A place in the queue. Dropping this value removes the entry from the queue.
#[derive(Debug)]
pub(crate) struct QueuePlace {
    pub(super) lanes: Lanes,
    pub(super) ticket: Ticket,
}

impl Lanes {
    /// Adds an entry at the end of the queue.
    pub(crate) fn queue(&self, waiter: Waiter, needs: Needs) -> QueuePlace {
        let ticket = self.states().queue.push(QueueEntry { waiter, needs });
        QueuePlace { lanes: self.clone(), ticket }
    }

    /// Returns all entries of the queue, in order.
    pub(crate) fn entries(&self) -> Vec<(Ticket, QueueEntry)> {
        self.states().queue.entries().map(|(ticket, entry)| (ticket, entry.clone())).collect()
    }

    /// Returns the first entry that a new entry with these needs would wait for.
    pub(crate) fn would_wait_for(&self, needs: &Needs) -> Option<Ahead> {
        self.states().queue.would_wait_for(needs)
    }
}

impl QueuePlace {
    /// Returns the position of the entry in the order of arrival.
    pub(crate) fn ticket(&self) -> Ticket {
        self.ticket
    }

    /// Replaces the needs. The place in the queue stays the same.
    pub(crate) fn set_needs(&self, needs: Needs) {
        self.lanes.states().queue.set_needs(self.ticket, needs);
    }

    /// Returns the earlier entry that this entry waits for; `None` if this entry is first.
    pub(crate) fn ahead(&self) -> Option<Ahead> {
        self.lanes.states().queue.ahead_of(self.ticket)
    }
}

impl Drop for QueuePlace {
    fn drop(&mut self) {
        let had_followers = self.lanes.states().queue.remove(self.ticket);
        if had_followers {
            self.lanes.make_room();
        }
    }
}
