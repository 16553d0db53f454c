//! Requests that wait for capacity. They share one queue with waiting operations, in the order of arrival.
//!
//! ```text
//! recorded as queued ─► each pass: ─┬─ room ─────────────► reserved: the task of the lease records the grant
//!                                   ├─ no room ──────────► reserves what it waits for
//!                                   └─ can never be met ─► refused
//! ```
//!
//! [`crate::lanes`] keeps the order. In each pass, [`gpush_core::lease::queue`] decides about all entries. The pass
//! notes in the lanes what each entry reserves, so that a later operation does not take that capacity.

use std::{collections::BTreeMap, time::Duration};

use gpush_api::LeaseId;
use gpush_core::lease::{
    machine::State,
    placement::Host,
    queue::{self as order, ClaimedTargets},
};
use tokio::time::Instant;

use super::{Leases, actor::Inbox, held::HeldLeases, limits, request::Resolved};
use crate::{
    caller::Viewer,
    lanes::{Need, QueuePlace, Reserve, Ticket},
    state::{LeaseTable, OpenLease, ReservationId},
};

/// Maximum time between two decisions about the waiting requests.
pub(super) const PAUSE: Duration = Duration::from_secs(1);

/// A waiting request.
#[derive(Debug)]
pub(super) struct Waiting {
    pub(super) id: LeaseId,
    pub(super) resolved: Resolved,
    pub(super) viewer: Viewer,
    /// After a grant has failed: time until which gpushd does not try again. Meanwhile, the request reserves what it needs.
    pub(super) not_before: Option<Instant>,
    /// Whether the last pass found that the request exceeds a quota. It then reserves nothing.
    pub(super) exceeds_quota: bool,
    /// The capacity with which the grant of the request is being recorded.
    pub(super) taken: Option<ReservationId>,
    pub(super) place: QueuePlace,
    pub(super) inbox: Inbox,
}

impl Waiting {
    /// Returns the time until which gpushd does not grant the request, if that time is after `now`.
    pub(super) fn paused_until(&self, now: Instant) -> Option<Instant> {
        self.not_before.filter(|until| *until > now)
    }

    /// Returns whether the request needs capacity: see [`needs_capacity`].
    pub(super) fn needs_capacity(&self, table: &LeaseTable) -> bool {
        needs_capacity(self.id, self.taken, table)
    }
}

/// Returns whether a request needs capacity. While its grant is being recorded, it needs none: the reservation `taken` has
/// it. When the grant has failed, the request needs capacity again at the moment when the reservation is gone, so that no
/// later request can get this capacity first.
fn needs_capacity(id: LeaseId, taken: Option<ReservationId>, table: &LeaseTable) -> bool {
    let waits = |lease: &OpenLease| matches!(lease.state, State::Queued { .. } | State::Committing { .. });
    let is_queued = table.get(id).is_some_and(waits);
    is_queued && taken.is_none_or(|taken| !table.reserved.contains_key(&taken))
}

impl Leases {
    /// Adds a request to the queue. Returns its ticket.
    pub(super) fn add_waiting(
        &self,
        id: LeaseId,
        resolved: Resolved,
        viewer: Viewer,
        place: QueuePlace,
        inbox: Inbox,
    ) -> Ticket {
        let ticket = place.ticket();
        let (not_before, exceeds_quota, taken) = (None, false, None);
        let waiting = Waiting { id, resolved, viewer, not_before, exceeds_quota, taken, place, inbox };
        self.waiting().insert(ticket, waiting);
        self.queue_changed.send_replace(());
        ticket
    }

    /// Replaces what a waiting request asks for, after its client has reconnected.
    pub(super) fn replace_waiting(&self, ticket: Ticket, resolved: &Resolved, viewer: Viewer) {
        if let Some(waiting) = self.waiting().get_mut(&ticket) {
            (waiting.resolved, waiting.viewer) = (resolved.clone(), viewer);
        }
        self.queue_changed.send_replace(());
    }

    /// Lets a request pause before its next grant. Call this before the capacity of the failed grant is free, so that the
    /// queue does not grant the request at once.
    pub(super) fn pause_waiting(&self, ticket: Ticket) {
        if let Some(waiting) = self.waiting().get_mut(&ticket) {
            waiting.not_before = Some(Instant::now() + PAUSE);
        }
    }

    /// Removes a request from the queue.
    pub(super) fn remove_ticket(&self, ticket: Option<Ticket>) {
        // Drop the place without the lock, because it wakes others.
        let removed = ticket.and_then(|ticket| self.waiting().remove(&ticket));
        drop(removed);
    }

    /// Removes the request of a lease from the queue. Returns the reservation with which its grant was being recorded.
    pub(super) fn remove_waiting(&self, id: LeaseId) -> Option<ReservationId> {
        let removed = self.waiting().extract_if(.., |_, waiting| waiting.id == id).next();
        removed.and_then(|(_, waiting)| waiting.taken)
    }
}

/// Returns the waiting operations and leases, in order of arrival and in the form that [`gpush_core::lease::queue`]
/// needs. The caller must hold the placement lock.
pub(super) fn as_queue(leases: &Leases, host: &Host, table: &LeaseTable) -> order::Queue {
    let waiting = leases.waiting();
    let held = HeldLeases::of(leases.handles.users.accounts(), table);
    let mut queue = order::Queue::default();
    let index = |uuid: &str| host.gpus.iter().find(|gpu| gpu.uuid == uuid).map(|gpu| gpu.index);
    for (ticket, entry) in leases.handles.lanes.entries() {
        let waiting = waiting.get(&ticket).filter(|waiting| waiting.needs_capacity(table));
        // A request that exceeds a quota reserves nothing, because its holder must first release a lease.
        if waiting.is_some_and(|waiting| limits::within_quota(&held, &waiting.resolved).is_err()) {
            continue;
        }
        let wanted = waiting.map(|waiting| &waiting.resolved.wanted);
        let entry = match wanted {
            Some(wanted) => order::QueuedEntry::Lease(wanted.clone()),
            None => {
                let takes = |(uuid, need): (&String, &Need)| match need {
                    Need::Lane(Reserve::Gpu) => Some((index(uuid)?, ClaimedTargets::Gpu)),
                    Need::Lane(Reserve::Targets(targets)) => {
                        Some((index(uuid)?, ClaimedTargets::Targets(targets.clone())))
                    }
                    Need::Parts(_) => None,
                };
                let takes: BTreeMap<u32, ClaimedTargets> = entry.needs.iter().filter_map(takes).collect();
                if takes.is_empty() {
                    continue;
                }
                order::QueuedEntry::Operation(takes)
            }
        };
        queue.push(order::Ticket(ticket.0), entry);
    }
    queue
}

/// Returns the waiting requests that reserve nothing, because they exceed a quota.
pub(super) fn beyond_quota(leases: &Leases) -> Vec<Ticket> {
    leases.waiting().iter().filter(|(_, waiting)| waiting.exceeds_quota).map(|(ticket, _)| *ticket).collect()
}

#[cfg(test)]
mod tests {
    use gpush_api::LeaseState;

    use super::*;
    use crate::state::{Reservation, leases::tests::record};

    /// Fault: after a commit had failed, later requests got the capacity before the request whose grant had failed.
    #[test]
    fn request_waits_again_as_soon_as_its_capacity_is_free() {
        let mut table = LeaseTable::default();
        let mut queued = record(1, 1000, "GPU-0");
        queued.state = LeaseState::Queued;
        table.insert(queued);
        let needs = |taken, table: &LeaseTable| needs_capacity(LeaseId(1), taken, table);
        assert!(needs(None, &table));
        let reservation = table.reserve(Reservation { holder: 1000, members: Vec::new() });
        assert!(!needs(Some(reservation), &table), "the capacity is reserved");
        table.reserved.remove(&reservation);
        assert!(needs(Some(reservation), &table));
        // Fault: a request whose grant had failed got capacity again while its end was being recorded.
        table.get_mut(LeaseId(1)).unwrap().state = State::Leaving { reason: gpush_api::EndReason::Failed, retry: true };
        assert!(!needs(None, &table), "the request leaves the queue");
        table.insert(record(1, 1000, "GPU-0"));
        assert!(!needs(Some(reservation), &table), "the lease is active");
    }
}
