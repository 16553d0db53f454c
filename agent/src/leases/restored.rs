//! Queued requests of an earlier gpushd. The requests keep their places, and the clients reconnect
//! with the keys of the requests.
//!
//! ```text
//! recorded as queued ─► a place in the order of arrival, before any request is served
//!                         │ resolved once the GPUs are known: it waits like any other request
//!                         ▼
//!                       away ─┬─ client reconnects ─► the client gets the result, or waits for it
//!                             └─ not within `RECONNECT_TIME`, or the request has no key ─► cancelled
//! ```
//!
//! Until the client reconnects, its request is resolved with the rights of an ordinary user. gpushd
//! cannot yet resolve a request of root that exceeds the limits of users, or a request whose
//! process gets a scope. Such a request keeps its place without a reservation until the client
//! reconnects.

use std::{collections::BTreeMap, time::Duration};

use gpush_api::{ApiError, Code, EndReason, LeaseBinding, LeaseId, LeaseRequest, LeaseState, LeaseWait};
use gpush_host::{peer::Peer, proc};
use gpush_store::LeaseRecord;
use jiff::Timestamp;
use tokio::{
    sync::{OwnedMutexGuard, oneshot},
    time::Instant,
};

use super::{
    Leases,
    job::JobTerms,
    lease_end, offers,
    pending::PendingGrant,
    queue::{self, Waiting},
    request::{Resolved, resolve},
};
use crate::{
    caller::{Caller, Viewer},
    idempotency::Key,
    lanes::{self, Needs, QueuePlace},
    state::{LeaseTable, Observed},
};

/// Time within which clients must reconnect after the start of gpushd.
const RECONNECT_TIME: Duration = Duration::from_secs(30);

/// Requests whose clients have not reconnected.
#[derive(Debug, Default)]
pub(super) struct Restored {
    /// Places in the queue of the requests that are not resolved yet.
    places: BTreeMap<LeaseId, QueuePlace>,
    /// Resolved requests, which wait in the queue or were granted meanwhile.
    away: BTreeMap<LeaseId, PendingGrant>,
}

/// Restores the places of queued requests that arrived before the time `before`. With `None`,
/// restores the places of all queued requests. Before any request is served, the caller also queues
/// the operations, so that leases and operations share one order of arrival.
pub(crate) fn restore_places(leases: &Leases, before: Option<Timestamp>) {
    let table = leases.handles.state.leases();
    let queued = table.open.values().filter(|lease| lease.state.name() == LeaseState::Queued);
    let mut restored = leases.restored_requests();
    for lease in queued.filter(|lease| before.is_none_or(|before| lease.record.created_at <= before)) {
        restored
            .places
            .entry(lease.id())
            .or_insert_with(|| leases.handles.lanes.queue(lanes::Waiter::Lease(lease.id().to_string()), Needs::new()));
    }
}

/// Returns whether a restored request is not resolved yet.
pub(super) fn is_pending(leases: &Leases) -> bool {
    !leases.restored_requests().places.is_empty()
}

/// Resolves the restored requests that are not resolved yet, as far as possible. Call this before
/// any placement.
pub(super) async fn resolve_all(leases: &Leases, seen: &Observed) {
    // A request and the task that serves the queue may call this concurrently.
    let _resolving = leases.resolving.lock().await;
    let ids: Vec<LeaseId> = leases.restored_requests().places.keys().copied().collect();
    for id in ids {
        let Some(record) = leases.handles.state.leases().open.get(&id).map(|lease| lease.record.clone()) else {
            leases.restored_requests().places.remove(&id);
            continue;
        };
        if !is_resolved_without_its_client(&record) {
            continue;
        }
        let caller = as_user(leases, &record).await;
        let Ok(resolved) = resolved(leases, &caller, &record.request, seen, None).await else { continue };
        let place = leases.restored_requests().places.remove(&id);
        let Some(place) = place else { continue };
        let waiter = add_waiting(leases, &record, resolved, caller.viewer, place, None);
        leases.restored_requests().away.insert(id, waiter);
    }
}

/// Returns whether a request can be resolved without the process that sent it. A new scope needs
/// that process, and only Slurm's hooks send the parameters of a job.
fn is_resolved_without_its_client(record: &LeaseRecord) -> bool {
    match record.binding {
        LeaseBinding::Process { .. } | LeaseBinding::Time | LeaseBinding::None => true,
        LeaseBinding::Scope { .. } | LeaseBinding::Cgroup { .. } | LeaseBinding::Job { .. } => false,
    }
}

/// Returns the caller of a recorded request, with the rights of an ordinary user.
async fn as_user(leases: &Leases, record: &LeaseRecord) -> Caller {
    let uid = record.asked_by.uid;
    let groups = leases.handles.users.groups_of(uid).await.unwrap_or_default();
    let (pid, start) = (record.asked_by.pid, record.asked_by.pid.and_then(proc::start));
    let peer = Peer { uid, pid, start, groups, is_on_this_host: true };
    Caller { peer, viewer: Viewer::User(uid) }
}

async fn resolved(
    leases: &Leases,
    caller: &Caller,
    request: &LeaseRequest,
    seen: &Observed,
    job: Option<&JobTerms>,
) -> Result<Resolved, ApiError> {
    let gpus = seen.gpus(Viewer::Log);
    let empty = offers::host(leases, &seen.host, &gpus, &LeaseTable::default());
    resolve(leases, caller, request.clone(), &seen.host, &gpus, &empty, job).await
}

/// Adds a resolved request to the waiting requests.
fn add_waiting(
    leases: &Leases,
    record: &LeaseRecord,
    resolved: Resolved,
    viewer: Viewer,
    place: QueuePlace,
    lock: Option<OwnedMutexGuard<()>>,
) -> PendingGrant {
    let until = match record.request.wait {
        LeaseWait::Seconds(seconds) => {
            let spent = Duration::try_from(Timestamp::now().duration_since(record.created_at)).unwrap_or_default();
            Instant::now().checked_add(Duration::from_secs(seconds).saturating_sub(spent))
        }
        LeaseWait::No | LeaseWait::Unlimited => None,
    };
    let (ticket, (reply, result)) = (place.ticket(), oneshot::channel());
    // The key is already recorded.
    let waiting = Waiting { id: record.id, resolved, viewer, key: None, until, place, reply, lock };
    leases.waiting().insert(ticket, waiting);
    leases.queue_changed.notify_one();
    PendingGrant::new(leases, ticket, result)
}

/// Reconnects a client with its queued request. Returns `None` if no such request waits for its client.
///
/// # Errors
/// If the request cannot be met any more, or the GPUs are not known yet.
pub(super) async fn rejoin(
    leases: &Leases,
    caller: &Caller,
    id: LeaseId,
    job: Option<&JobTerms>,
    lock: &mut Option<OwnedMutexGuard<()>>,
) -> Result<Option<PendingGrant>, ApiError> {
    let known = {
        let restored = leases.restored_requests();
        restored.places.contains_key(&id) || restored.away.contains_key(&id)
    };
    let record = leases.handles.state.leases().open.get(&id).map(|lease| lease.record.clone());
    let Some(record) = record.filter(|_| known) else { return Ok(None) };
    let seen = leases.handles.readings.host().await?;
    let resolved = resolved(leases, caller, &record.request, &seen, job).await;
    let _resolving = leases.resolving.lock().await;
    let away = leases.restored_requests().away.remove(&id);
    if let Some(waiter) = away {
        if let (Ok(resolved), Some(waiting)) = (resolved, leases.waiting().get_mut(&waiter.ticket())) {
            (waiting.resolved, waiting.viewer, waiting.lock) = (resolved, caller.viewer, lock.take());
        }
        leases.queue_changed.notify_one();
        return Ok(Some(waiter));
    }
    // The request may be resolvable now, because the client and its rights are known.
    if let Err(error) = &resolved
        && error.retryable
    {
        return Err(error.clone());
    }
    let Some(place) = leases.restored_requests().places.remove(&id) else { return Ok(None) };
    match resolved {
        Ok(resolved) => Ok(Some(add_waiting(leases, &record, resolved, caller.viewer, place, lock.take()))),
        Err(error) => {
            drop(place);
            queue::end_queued(leases, id, EndReason::Failed).await;
            Err(error)
        }
    }
}

/// Cancels requests whose clients cannot reconnect. After [`RECONNECT_TIME`], also cancels requests whose
/// clients have not reconnected.
pub(super) async fn expire(leases: Leases) {
    let ids: Vec<LeaseId> = leases.restored_requests().places.keys().copied().collect();
    for id in ids {
        let record = leases.handles.state.leases().open.get(&id).map(|lease| lease.record.clone());
        if let Some(record) = record
            && (has_ended(&record) || !has_key(&leases, &record).await)
        {
            cancel(&leases, id).await;
        }
    }
    let is_empty = |restored: &Restored| restored.places.is_empty() && restored.away.is_empty();
    if is_empty(&leases.restored_requests()) {
        return;
    }
    tokio::select! {
        () = leases.handles.stopping.cancelled() => return,
        () = tokio::time::sleep(RECONNECT_TIME) => {}
    }
    let ids: Vec<LeaseId> = {
        let restored = leases.restored_requests();
        restored.places.keys().chain(restored.away.keys()).copied().collect()
    };
    for id in ids {
        tracing::info!("lease {id} is cancelled: its client has not reconnected");
        cancel(&leases, id).await;
    }
}

async fn cancel(leases: &Leases, id: LeaseId) {
    let waiter = leases.restored_requests().away.remove(&id);
    // Dropping the `PendingGrant` ends its request, or its grant.
    drop(waiter);
    cancel_place(leases, id, EndReason::Cancelled).await;
}

/// Ends a restored request that is not resolved yet. Returns whether there was such a request.
pub(super) async fn cancel_place(leases: &Leases, id: LeaseId, reason: EndReason) -> bool {
    let place = leases.restored_requests().places.remove(&id);
    let had_place = place.is_some();
    drop(place);
    if had_place {
        lease_end::record_end(leases, id, reason).await;
    }
    had_place
}

/// Returns whether the process that a lease is bound to has ended.
fn has_ended(record: &LeaseRecord) -> bool {
    match record.binding {
        LeaseBinding::Process { pid: Some(pid), start } => proc::start(pid) != start,
        LeaseBinding::Process { pid: None, .. }
        | LeaseBinding::Scope { .. }
        | LeaseBinding::Cgroup { .. }
        | LeaseBinding::Job { .. }
        | LeaseBinding::Time
        | LeaseBinding::None => false,
    }
}

/// Returns whether the client has a key with which it can reconnect. Returns `true` if the keys cannot be read.
async fn has_key(leases: &Leases, record: &LeaseRecord) -> bool {
    let (uid, number) = (record.asked_by.uid, record.id.0);
    leases.handles.store.read(move |view| view.has_answer_with(uid, number)).await.unwrap_or(true)
}

/// Returns the error for a repeated request whose lease is still queued, but no longer waits for
/// its client. The lease is about to end.
pub(super) fn ending_error(id: LeaseId) -> ApiError {
    ApiError::new(Code::Unavailable, format!("lease {id} of this request is about to end"))
        .hint("send the request again")
        .retryable()
}

/// Returns whether a repeated request is executed again, because its lease left the queue without a grant.
pub(super) fn may_be_repeated(record: &LeaseRecord) -> bool {
    record.state == LeaseState::Ended && record.granted_at.is_none() && record.operation.is_none()
}

/// Records the lease of a queued request under its key, so that the client can reconnect to it.
pub(super) fn record_key(
    key: Option<&Key>,
    tx: &mut gpush_store::Tx<'_>,
    id: LeaseId,
) -> Result<(), gpush_store::StoreError> {
    key.map_or(Ok(()), |key| key.record_number(tx, id.0))
}
