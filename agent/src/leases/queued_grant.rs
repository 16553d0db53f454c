//! Commits the grants of waiting requests.
//!
//! ```text
//! capacity reserved, request removed from the waiting ones ─► commit ─┬─ granted ────────► answered
//!                                                                     ├─ failed ─────────► ended: failed
//!                                                                     └─ failed for now ─► waits again, after a pause
//! ```
//!
//! When a commit fails for now, gpushd frees the reserved capacity. At the same moment, the request counts as waiting
//! again. So no later request can get the capacity first.

use gpush_api::{EndReason, LeaseId, LeaseState};
use gpush_core::lease::placement::PlacementRequest;
use gpush_store::LeaseSource;
use tokio::time::Instant;

use super::{
    Leases, grant, lease_end,
    queue::{PAUSE, Waiting, end_queued},
    reserved::Reserved,
};
use crate::{
    lanes::Ticket,
    state::{LeaseTable, ReservationId},
};

/// A request whose grant gpushd is committing.
#[derive(Debug)]
pub(super) struct GrantInCommit {
    id: LeaseId,
    reservation: ReservationId,
    wanted: PlacementRequest,
}

impl GrantInCommit {
    /// If the commit has failed and the request waits again, returns what it needs.
    pub(super) fn failed(&self, table: &LeaseTable) -> Option<&PlacementRequest> {
        let is_queued = table.get(self.id).is_some_and(|lease| lease.state.name() == LeaseState::Queued);
        (is_queued && !table.reserved.contains_key(&self.reservation)).then_some(&self.wanted)
    }
}

/// Removes a request from the waiting ones, because gpushd commits its grant next. The caller must hold the placement
/// lock.
pub(super) fn begin(leases: &Leases, ticket: Ticket, reserved: &Reserved) -> Option<Waiting> {
    let waiting = leases.waiting().remove(&ticket)?;
    let wanted = waiting.resolved.wanted.clone();
    let grant = GrantInCommit { id: waiting.id, reservation: reserved.id, wanted };
    leases.grants_in_commit().insert(ticket, grant);
    Some(waiting)
}

/// Commits the grant of a waiting request, and answers its client.
pub(super) async fn commit(leases: &Leases, waiting: Waiting, reserved: Reserved) {
    let ticket = waiting.place.ticket();
    commit_or_wait_again(leases, waiting, reserved).await;
    leases.grants_in_commit().remove(&ticket);
}

async fn commit_or_wait_again(leases: &Leases, mut waiting: Waiting, reserved: Reserved) {
    let (id, viewer, key) = (waiting.id, waiting.viewer, waiting.key.clone());
    let request = waiting.resolved.new.request.clone();
    let bound = waiting.resolved.bound.clone();
    let granted = grant::commit(leases, viewer, LeaseSource::Queued(id), &request, &bound, reserved, key).await;
    let is_queued =
        leases.handles.state.leases().open.get(&id).is_some_and(|lease| lease.state.name() == LeaseState::Queued);
    if let Err(error) = &granted
        && error.retryable
        && is_queued
    {
        // The GPU has changed since the placement, or gpushd cannot read it at the moment.
        tracing::info!(lease = %id, "lease {id} is queued again: {error}");
        // Add the request to the queue again. If its client has disconnected, the next pass removes it.
        waiting.not_before = Some(Instant::now() + PAUSE);
        let ticket = waiting.place.ticket();
        leases.waiting().insert(ticket, waiting);
        leases.queue_changed.send_replace(());
        if leases.handles.stopping.is_cancelled() {
            // The task that serves the queue may have ended already. The request stays recorded as queued, and the next
            // gpushd takes it over.
            leases.waiting().remove(&ticket);
        }
        return;
    }
    let Waiting { place, reply, lock: _lock, .. } = waiting;
    drop(place);
    match granted {
        Ok(granted) => {
            if reply.send(Ok(granted)).is_err() {
                // The client has disconnected, so no process will use the lease.
                lease_end::end_unused(leases, id).await;
            }
        }
        Err(error) => {
            end_queued(leases, id, EndReason::Failed).await;
            let _the_client_may_be_gone = reply.send(Err(error));
        }
    }
}

#[cfg(test)]
mod tests {
    use gpush_api::LeaseState;
    use gpush_core::lease::placement::RequestedShare;

    use super::*;
    use crate::state::{Reservation, leases::tests::record};

    /// Fault: after a commit had failed, later requests got the capacity before the request whose grant had failed.
    #[test]
    fn request_waits_again_as_soon_as_its_capacity_is_free() {
        let mut table = LeaseTable::default();
        let mut queued = record(1, 1000, "GPU-0");
        queued.state = LeaseState::Queued;
        table.insert(queued);
        let reservation = table.reserve(Reservation { holder: 1000, members: Vec::new() });
        let wanted =
            PlacementRequest { share: RequestedShare::Whole, count: 1, holder: 1000, gpus: None, targets: None };
        let grant = GrantInCommit { id: LeaseId(1), reservation, wanted: wanted.clone() };
        assert_eq!(grant.failed(&table), None, "the capacity is reserved");
        table.reserved.remove(&reservation);
        assert_eq!(grant.failed(&table), Some(&wanted));
        table.insert(record(1, 1000, "GPU-0"));
        assert_eq!(grant.failed(&table), None, "the lease is active");
    }
}
