//! Requests that were queued when an earlier gpushd ended. They keep their places in the queue. Their clients reconnect
//! with the idempotency keys of the requests.
//!
//! ```text
//! recorded as queued ─► a place in the order of arrival, before any request is served
//!                         │ resolved once the GPUs are known: it waits like any other request
//!                         ▼
//!                       away ─┬─ client reconnects ─► the client gets the result, or waits for it
//!                             └─ not within `RECONNECT_TIME`, or the request has no key ─► cancelled
//! ```
//!
//! Until the client reconnects, gpushd resolves its request with the rights of an ordinary user. In three cases gpushd
//! must wait for the client: a request of root exceeds the limits of users, the lease is bound to a scope or cgroup, or
//! the lease is for a Slurm job. Meanwhile the request keeps its place, but reserves nothing.

use std::{collections::BTreeMap, time::Duration};

use gpush_api::{ApiError, Code, EndReason, LeaseBinding, LeaseId, LeaseState, LeaseWait};
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
    lease_end,
    pending::PendingGrant,
    queue::{self, Waiting},
    request::{Resolved, resolve},
};
use crate::{
    caller::{Caller, Viewer},
    idempotency::Key,
    lanes::{self, Needs, QueuePlace},
    state::Observed,
};

/// Time within which clients must reconnect after the start of gpushd.
const RECONNECT_TIME: Duration = Duration::from_secs(30);

/// Requests of an earlier gpushd whose clients have not reconnected yet.
#[derive(Debug, Default)]
pub(super) struct Restored {
    /// Requests that gpushd cannot resolve yet, with their places in the queue.
    places: BTreeMap<LeaseId, QueuePlace>,
    /// Resolved requests. They wait in the queue, or gpushd has granted them since.
    away: BTreeMap<LeaseId, PendingGrant>,
}

/// Puts queued requests back into the queue: those that arrived before the time `before`, or all of them if `before` is
/// `None`. Call this function before each restored operation is queued, so that leases and operations keep one order of
/// arrival. Also call it before gpushd serves any request.
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

/// Returns whether gpushd has not resolved all restored requests yet.
pub(super) fn is_pending(leases: &Leases) -> bool {
    !leases.restored_requests().places.is_empty()
}

/// Resolves as many restored requests as possible. Call this before any placement.
pub(super) async fn resolve_all(leases: &Leases, seen: &Observed) {
    // A new request and the task that serves the queue may both call this function, so allow only one at a time.
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
        let Ok(resolved) = resolved(leases, &caller, &record, seen, None).await else { continue };
        let place = leases.restored_requests().places.remove(&id);
        let Some(place) = place else { continue };
        let waiter = add_waiting(leases, &record, resolved, caller.viewer, place, None);
        leases.restored_requests().away.insert(id, waiter);
    }
}

/// Returns whether gpushd can resolve a request without its client. A binding to a scope or cgroup needs the client's
/// process, and only Slurm's hooks know the data of a job.
fn is_resolved_without_its_client(record: &LeaseRecord) -> bool {
    match record.binding {
        LeaseBinding::Process { .. } | LeaseBinding::Time | LeaseBinding::None => true,
        LeaseBinding::Scope { .. } | LeaseBinding::Cgroup { .. } | LeaseBinding::Job { .. } => false,
    }
}

/// Returns the caller of a recorded request. The caller gets the rights of an ordinary user.
async fn as_user(leases: &Leases, record: &LeaseRecord) -> Caller {
    let uid = record.asked_by.uid;
    let groups = leases.handles.users.names().groups_of(uid).await.ok().flatten().unwrap_or_default();
    let pid = record.asked_by.pid;
    let start = match record.binding {
        // If another process has the pid now, its start time differs.
        LeaseBinding::Process { pid: bound, start } if bound == pid => start,
        _ => pid.and_then(proc::start),
    };
    // The record does not say whether root was in a container. If the recorded process does not show it, gpushd assumes
    // that root was.
    let is_recorded = matches!(record.binding, LeaseBinding::Process { pid: bound, start: Some(_) } if bound == pid);
    let is_on_this_host =
        uid != 0 || is_recorded && pid.is_some_and(|pid| proc::start(pid) == start && proc::is_on_this_host(pid));
    let peer = Peer { uid, pid, start, groups, is_on_this_host };
    Caller::with_viewer(peer, Viewer::User(uid), leases.handles.users.accounts().last(uid))
}

/// Resolves a recorded request again.
///
/// # Errors
/// If the request cannot be met any more, or the recorded process has ended.
async fn resolved(
    leases: &Leases,
    caller: &Caller,
    record: &LeaseRecord,
    seen: &Observed,
    job: Option<&JobTerms>,
) -> Result<Resolved, ApiError> {
    let gpus = seen.gpus(Viewer::Log);
    let resolved = resolve(leases, caller, record.request.clone(), &seen.host, &gpus, job).await?;
    check_process(&record.binding, &resolved.new.binding)?;
    Ok(resolved)
}

/// Checks that another process does not have the pid of the recorded binding.
///
/// # Errors
/// If it has.
fn check_process(recorded: &LeaseBinding, resolved: &LeaseBinding) -> Result<(), ApiError> {
    match (recorded, resolved) {
        (LeaseBinding::Process { pid: Some(pid), start }, LeaseBinding::Process { pid: Some(now), start: since })
            if pid == now && start != since =>
        {
            let message = format!("the lease cannot be bound to process {pid}: that process has ended");
            Err(ApiError::new(Code::Conflict, message).hint("request a lease for a process that runs"))
        }
        _ => Ok(()),
    }
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
    // `key` is `None` because the key is already recorded.
    let (id, key, not_before, exceeds_quota) = (record.id, None, None, false);
    let waiting = Waiting { id, resolved, viewer, key, until, not_before, exceeds_quota, place, reply, lock };
    leases.waiting().insert(ticket, waiting);
    leases.queue_changed.send_replace(());
    PendingGrant::new(leases, ticket, result)
}

/// Reconnects a client to the request that an earlier gpushd had queued for it. Returns `None` if no request with
/// this id still waits for its client.
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
    let resolved = resolved(leases, caller, &record, &seen, job).await;
    let _resolving = leases.resolving.lock().await;
    let away = leases.restored_requests().away.remove(&id);
    if let Some(waiter) = away {
        if let (Ok(resolved), Some(waiting)) = (resolved, leases.waiting().get_mut(&waiter.ticket())) {
            (waiting.resolved, waiting.viewer, waiting.lock) = (resolved, caller.viewer, lock.take());
        }
        leases.queue_changed.send_replace(());
        return Ok(Some(waiter));
    }
    // The client and its rights are known now, so gpushd may be able to resolve the request. Only a temporary error
    // keeps the request in the queue.
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

/// Cancels requests whose clients can no longer reconnect. After [`RECONNECT_TIME`], also cancels requests whose
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
    // Dropping the `PendingGrant` cancels the request, or ends the lease if it is already granted.
    drop(waiter);
    cancel_place(leases, id, EndReason::Cancelled).await;
}

/// Ends a restored request that gpushd has not resolved yet. Returns `false` if there is no such request.
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

/// Returns whether the request has an idempotency key, with which its client can reconnect. Returns `true` if the keys
/// cannot be read.
async fn has_key(leases: &Leases, record: &LeaseRecord) -> bool {
    let (uid, number) = (record.asked_by.uid, record.id.0);
    leases.handles.store.read(move |view| view.has_answer_with(uid, number)).await.unwrap_or(true)
}

/// Returns the error for a repeated request whose lease is still queued but already about to end.
pub(super) fn ending_error(id: LeaseId) -> ApiError {
    ApiError::new(Code::Unavailable, format!("lease {id} of this request is about to end"))
        .hint("send the request again")
        .retryable()
}

/// Returns whether a repeated request is executed again, because its lease ended in the queue without a grant.
pub(super) fn may_be_repeated(record: &LeaseRecord) -> bool {
    record.state == LeaseState::Ended && record.granted_at.is_none() && record.operation.is_none()
}

/// Records the id of a queued lease under the idempotency key of its request, so that the client can reconnect.
pub(super) fn record_key(
    key: Option<&Key>,
    tx: &mut gpush_store::Tx<'_>,
    id: LeaseId,
) -> Result<(), gpush_store::StoreError> {
    key.map_or(Ok(()), |key| key.record_number(tx, id.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fault: gpushd restarted, and meanwhile another process of the user got the pid of the process of a queued request.
    /// gpushd bound the lease to that process.
    #[test]
    fn restored_request_is_not_bound_to_another_process_with_the_same_pid() {
        let process = |pid, start| LeaseBinding::Process { pid: Some(pid), start: Some(start) };
        check_process(&process(7, 1), &process(7, 1)).unwrap();
        // The client has reconnected from another process, or gets another binding now.
        check_process(&process(7, 1), &process(8, 2)).unwrap();
        check_process(&process(7, 1), &LeaseBinding::Scope { unit: None, cgroup: None }).unwrap();
        check_process(&LeaseBinding::Time, &process(7, 2)).unwrap();
        let error = check_process(&process(7, 1), &process(7, 2)).unwrap_err();
        assert_eq!((error.code, error.retryable), (Code::Conflict, false));
    }
}
