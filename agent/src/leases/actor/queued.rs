//! Records a request that must wait, and adds it to the queue.

use std::{sync::Arc, time::Duration};

use gpush_api::{ApiError, LeaseWait};
use gpush_core::lease::{machine::State, request::spec};
use gpush_store::AuditEvent;
use tokio::{sync::OwnedMutexGuard, time::Instant};

use super::Actor;
use crate::{
    leases::{Leases, pending::PendingGrant, request::Resolved},
    operations::scheduler,
    requests::{caller::Caller, idempotency::Key},
    state::{OpenLease, ReservationId},
};

/// A request that gpushd is recording as queued. Until this value is dropped, the request counts for the quota of its
/// holder.
struct EnteringRequest<'a> {
    leases: &'a Leases,
    number: ReservationId,
}

impl<'a> EnteringRequest<'a> {
    /// # Errors
    /// If the quota does not allow one more waiting request.
    fn new(leases: &'a Leases, resolved: &Resolved) -> Result<Self, ApiError> {
        let number = leases.handles.context.state.change_leases(|table| {
            scheduler::may_wait(&leases.handles.scheduler, &resolved.demand, table)?;
            Ok::<_, ApiError>(table.begin_to_queue(resolved.demand.wanted.holder))
        })?;
        Ok(Self { leases, number })
    }
}

impl Drop for EnteringRequest<'_> {
    fn drop(&mut self) {
        self.leases.handles.context.state.change_leases(|table| table.entering.remove(&self.number));
    }
}

/// Records a request as queued, and adds it to the queue.
///
/// # Errors
/// If a quota denies the request, or if the request cannot be recorded.
pub(in crate::leases) async fn enter_queue(
    leases: &Leases,
    caller: &Caller,
    resolved: Resolved,
    wait: LeaseWait,
    key: Option<Key>,
    lock: Option<OwnedMutexGuard<()>>,
) -> Result<PendingGrant, ApiError> {
    let entering = EnteringRequest::new(leases, &resolved)?;
    let new = resolved.demand.new.clone();
    let (text, recorded) = (spec(&new.request), key.clone());
    let written = leases.handles.context.store.write(move |tx| {
        let record = tx.queue_lease(new.clone())?;
        // The client can reconnect with the key.
        if let Some(key) = &recorded {
            key.record_number(tx, record.id.0)?;
        }
        let event = AuditEvent::LeaseQueue { request_spec: text.clone(), holder: record.holder.clone() };
        tx.audit(event.record(Some(record.asked_by.clone()), record.id.to_string(), "queued"))?;
        Ok(record)
    });
    let record = written.await?;
    let id = record.id;
    let (mut actor, answer) = Actor::of_request(leases, resolved.clone(), caller.viewer, key, lock);
    (actor.state, actor.lease) = (State::Queued { recorded: true }, Some(OpenLease::new(record)));
    actor.wait_until = match wait {
        LeaseWait::Seconds(seconds) => Instant::now().checked_add(Duration::from_secs(seconds)),
        LeaseWait::No | LeaseWait::Unlimited => None,
    };
    actor.publish();
    drop(entering);
    let pending = PendingGrant::new(leases, &actor.inbox, answer);
    let (demand, inbox) = (Some((resolved.demand, caller.viewer)), Arc::new(actor.inbox.clone()));
    actor.place = Some(leases.handles.scheduler.enter_lease(id, demand, inbox));
    actor.spawn();
    Ok(pending)
}
