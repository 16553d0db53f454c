//! Requests that wait for capacity. They share one queue with waiting operations, in the order of arrival.
//!
//! ```text
//! enter ─► recorded as queued ─► each pass: ─┬─ room ─────────────► reserved, committed ─► answered
//!                                            ├─ no room ──────────► reserves what it waits for
//!                                            ├─ can never be met ─► ended: failed
//!                                            └─ waited too long ──► ended: timed out
//! client disconnected ─► ended: cancelled
//! ```
//!
//! [`crate::lanes`] keeps the order. In each pass, [`gpush_core::lease::queue`] decides about all entries. The pass
//! notes in the lanes what each entry reserves, so that a later operation does not take that capacity.

use std::{collections::BTreeMap, time::Duration};

use gpush_api::{ApiError, Code, EndReason, LeaseId, LeaseWait};
use gpush_core::lease::{
    placement::Host,
    queue::{self as order, ClaimedTargets},
    quota,
};
use gpush_host::accounts::Account;
use tokio::{
    sync::{OwnedMutexGuard, oneshot},
    time::Instant,
};

use super::{
    Leases,
    grant::{self, Reply},
    held::HeldLeases,
    pending::PendingGrant,
    queue_pass,
    request::Resolved,
    reserved, restored,
};
use crate::{
    caller::{Caller, Viewer},
    idempotency::Key,
    lanes::{self, Need, Needs, QueuePlace, Reserve, Ticket},
    state::LeaseTable,
    tasks::TaskName,
};

/// Maximum time between two decisions about the waiting requests.
pub(super) const PAUSE: Duration = Duration::from_secs(1);

/// A waiting request.
#[derive(Debug)]
pub(super) struct Waiting {
    pub(super) id: LeaseId,
    pub(super) resolved: Resolved,
    pub(super) viewer: Viewer,
    /// The idempotency key that gpushd records with the grant.
    pub(super) key: Option<Key>,
    /// Time at which the request times out; `None` if it waits without a limit.
    pub(super) until: Option<Instant>,
    /// After a grant has failed: time until which gpushd does not try again. Meanwhile, the request reserves what it needs.
    pub(super) not_before: Option<Instant>,
    /// Whether the last pass found that the request exceeds a quota. It then reserves nothing.
    pub(super) exceeds_quota: bool,
    pub(super) place: QueuePlace,
    pub(super) reply: Reply,
    /// The lock of the request's idempotency key. A repeated request waits for this lock, so that one key gets only one
    /// lease.
    pub(super) lock: Option<OwnedMutexGuard<()>>,
}

impl Waiting {
    /// Returns the time until which gpushd does not grant the request, if that time is after `now`.
    pub(super) fn paused_until(&self, now: Instant) -> Option<Instant> {
        self.not_before.filter(|until| *until > now)
    }
}

/// Counts a request for the quota of its holder while gpushd records the request as queued.
struct UnrecordedRequest<'a> {
    leases: &'a Leases,
    account: Account,
}

impl<'a> UnrecordedRequest<'a> {
    fn new(leases: &'a Leases, resolved: &Resolved) -> Result<Self, ApiError> {
        let account = resolved.account;
        let mut entering = leases.unrecorded_requests();
        check_queue(leases, resolved, &entering)?;
        *entering.entry(account).or_default() += 1;
        Ok(Self { leases, account })
    }
}

impl Drop for UnrecordedRequest<'_> {
    fn drop(&mut self) {
        let mut entering = self.leases.unrecorded_requests();
        if let Some(count) = entering.get_mut(&self.account) {
            *count -= 1;
            if *count == 0 {
                entering.remove(&self.account);
            }
        }
    }
}

/// Checks that the quota of the holder allows one more waiting request.
pub(super) fn may_wait(leases: &Leases, resolved: &Resolved) -> Result<(), ApiError> {
    check_queue(leases, resolved, &leases.unrecorded_requests())
}

fn check_queue(leases: &Leases, resolved: &Resolved, entering: &BTreeMap<Account, usize>) -> Result<(), ApiError> {
    let account = resolved.account;
    let mut held =
        HeldLeases::of(leases.handles.users.accounts(), &leases.handles.state.leases()).of_requester(resolved);
    let unrecorded = quota::HeldLease { id: LeaseId(0), queued: true, size: quota::Size::default(), releasable: false };
    held.extend(std::iter::repeat_n(unrecorded, entering.get(&account).copied().unwrap_or_default()));
    quota::check_queue(&resolved.quota, &held).map_err(|denial| ApiError::from(&denial))
}

/// Records a request as queued, and adds it to the queue.
///
/// # Errors
/// If a quota denies the request, or if the request cannot be recorded.
pub(super) async fn enter(
    leases: &Leases,
    caller: &Caller,
    resolved: Resolved,
    wait: LeaseWait,
    key: Option<Key>,
    lock: Option<OwnedMutexGuard<()>>,
) -> Result<PendingGrant, ApiError> {
    let _entering = UnrecordedRequest::new(leases, &resolved)?;
    let until = match wait {
        LeaseWait::Seconds(seconds) => Instant::now().checked_add(Duration::from_secs(seconds)),
        LeaseWait::No | LeaseWait::Unlimited => None,
    };
    let new = resolved.new.clone();
    let text = gpush_core::lease::request::spec(&new.request);
    let recorded = key.clone();
    let written = leases.handles.store.write(move |tx| {
        let record = tx.queue_lease(new.clone())?;
        restored::record_key(recorded.as_ref(), tx, record.id)?;
        let holder = &record.holder;
        let detail = serde_json::json!({ "request_spec": text, "uid": holder.uid, "user": holder.user });
        tx.audit(grant::audit_record(&record, "lease.queue", "queued", detail))?;
        Ok(record)
    });
    let record = written.await?;
    let (id, viewer) = (record.id, caller.viewer);
    leases.handles.state.change_leases(|table| table.insert(record));
    let place = leases.handles.lanes.queue(lanes::Waiter::Lease(id.to_string()), Needs::new());
    let (ticket, (reply, result)) = (place.ticket(), oneshot::channel());
    let (not_before, exceeds_quota) = (None, false);
    let waiting = Waiting { id, resolved, viewer, key, until, not_before, exceeds_quota, place, reply, lock };
    leases.waiting().insert(ticket, waiting);
    leases.queue_changed.send_replace(());
    Ok(PendingGrant::new(leases, ticket, result))
}

/// Returns the waiting operations and leases, in order of arrival and in the form that [`gpush_core::lease::queue`]
/// needs. The caller must hold the placement lock.
pub(super) fn as_queue(leases: &Leases, host: &Host, table: &LeaseTable) -> order::Queue {
    let (waiting, committing) = (leases.waiting(), leases.grants_in_commit());
    let held = HeldLeases::of(leases.handles.users.accounts(), table);
    let mut queue = order::Queue::default();
    let index = |uuid: &str| host.gpus.iter().find(|gpu| gpu.uuid == uuid).map(|gpu| gpu.index);
    for (ticket, entry) in leases.handles.lanes.entries() {
        let failed = || committing.get(&ticket).and_then(|grant| grant.failed(table));
        let waiting = waiting.get(&ticket);
        // A request that exceeds a quota reserves nothing, because its holder must first release a lease.
        if waiting.is_some_and(|waiting| reserved::within_quota(&held, &waiting.resolved).is_err()) {
            continue;
        }
        let wanted = waiting.map(|waiting| &waiting.resolved.wanted).or_else(failed);
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

/// Serves the queue until gpushd stops.
pub(super) async fn run(leases: Leases) {
    let mut changes = leases.queue_changed.subscribe();
    let mut room = leases.handles.lanes.room();
    let mut snapshots = leases.handles.state.watch();
    loop {
        let has_restored = restored::is_pending(&leases);
        let is_empty = leases.waiting().is_empty() && !has_restored;
        if !is_empty {
            room.mark_unchanged();
            snapshots.mark_unchanged();
            let stopping = leases.handles.stopping.clone();
            if stopping.run_until_cancelled(queue_pass::pass(&leases)).await.is_none() {
                break;
            }
        }
        let now = Instant::now();
        let times = |waiting: &Waiting| [waiting.until, waiting.paused_until(now)];
        let next = leases.waiting().values().flat_map(times).flatten().min();
        let pause = now + PAUSE;
        let due = next.map_or(pause, |next| next.min(pause));
        tokio::select! {
            () = leases.handles.stopping.cancelled() => break,
            _ = changes.changed() => {}
            changed = room.changed(), if !is_empty => if changed.is_err() { break },
            changed = snapshots.changed(), if !is_empty => if changed.is_err() { break },
            () = tokio::time::sleep_until(due), if !is_empty => {}
        }
    }
    // Dropping the waiting requests answers their clients with an error. The requests stay recorded as queued, and the
    // next gpushd takes them over.
    leases.waiting().clear();
}

/// Ends a waiting request in a separate task, because the record of the end may take long to write.
pub(super) fn spawn_end_waiting(leases: &Leases, waiting: Waiting, reason: EndReason, error: Option<ApiError>) {
    let leases = leases.clone();
    let (tasks, leaving) = (leases.handles.tasks.clone(), TaskName::LeaseQueueExit);
    tasks.once_before_exit(leaving, async move { end_waiting(&leases, waiting, reason, error).await });
}

/// Ends a waiting request.
pub(super) async fn end_waiting(leases: &Leases, waiting: Waiting, reason: EndReason, error: Option<ApiError>) {
    let Waiting { id, place, reply, .. } = waiting;
    drop(place);
    let queue = leases.handles.state.leases().open.get(&id).and_then(|lease| lease.queue.clone());
    end_queued(leases, id, reason).await;
    let error = error.unwrap_or_else(|| match reason {
        EndReason::TimedOut => {
            let mut error = ApiError::new(Code::TimedOut, format!("lease {id} was not granted in time")).retryable();
            error.causes = queue.map(|queue| queue.reasons).unwrap_or_default();
            error.hint("request it again with a longer `--wait`")
        }
        EndReason::Revoked => ApiError::new(Code::Cancelled, format!("an administrator revoked lease {id}")),
        _ => ApiError::new(Code::Cancelled, format!("lease {id} was cancelled before it was granted")),
    });
    let _the_client_may_be_gone = reply.send(Err(error));
    leases.capacity_freed();
}

/// Removes a queued lease because a user releases it or an administrator revokes it. Returns `false` if the lease was
/// not waiting.
pub(super) async fn cancel(leases: &Leases, id: LeaseId, reason: EndReason) -> bool {
    let removed = {
        let mut waiting = leases.waiting();
        let ticket = waiting.iter().find(|(_, waiting)| waiting.id == id).map(|(ticket, _)| *ticket);
        ticket.and_then(|ticket| waiting.remove(&ticket))
    };
    match removed {
        Some(waiting) => {
            end_waiting(leases, waiting, reason, None).await;
            true
        }
        None => restored::cancel_place(leases, id, reason).await,
    }
}

/// Records the end of a lease that was not granted.
pub(super) async fn end_queued(leases: &Leases, id: LeaseId, reason: EndReason) {
    super::lease_end::record_end(leases, id, reason).await;
}
