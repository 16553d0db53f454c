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

use gpush_api::{ApiError, Code, EndReason, Gpu, LeaseId, LeaseQueuePosition, LeaseWait};
use gpush_core::lease::{
    placement::{Assignment, Host, Member, NoAssignment},
    queue::{self as order, ClaimedTargets, Outcome},
    quota,
};
use gpush_host::accounts::Account;
use tokio::{
    sync::{OwnedMutexGuard, oneshot},
    time::Instant,
};

use super::{
    Leases,
    explain::{Unplaced, explain},
    grant::{self, NotReserved, Reply, Reserved},
    held::HeldLeases,
    pending::PendingGrant,
    placement_snapshot::PlacementSnapshot,
    queued_grant,
    request::Resolved,
    restored,
};
use crate::{
    caller::{Caller, Viewer},
    idempotency::Key,
    lanes::{self, Need, Needs, QueuePlace, Reserve, Ticket},
    state::{HostState, LeaseTable},
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
    pub(super) place: QueuePlace,
    pub(super) reply: Reply,
    /// The lock of the request's idempotency key. A repeated request waits for this lock, so that one key gets only one
    /// lease.
    pub(super) lock: Option<OwnedMutexGuard<()>>,
}

impl Waiting {
    /// Returns the time until which gpushd does not grant the request, if that time is after `now`.
    fn paused_until(&self, now: Instant) -> Option<Instant> {
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
    let mut held = HeldLeases::of(leases.handles.users.accounts(), &leases.handles.state.leases()).by(account);
    let unrecorded = quota::HeldLease { id: LeaseId(0), queued: true, size: quota::Size::default() };
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
    let waiting = Waiting { id, resolved, viewer, key, until, not_before: None, place, reply, lock };
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
        if waiting.is_some_and(|waiting| grant::within_quota(&held, &waiting.resolved).is_err()) {
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
            if stopping.run_until_cancelled(pass(&leases)).await.is_none() {
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

/// Decides about all waiting requests.
async fn pass(leases: &Leases) {
    let now = Instant::now();
    let is_over = |waiting: &Waiting| waiting.reply.is_closed() || waiting.until.is_some_and(|until| until <= now);
    let over: Vec<Waiting> =
        leases.waiting().extract_if(.., |_, waiting| is_over(waiting)).map(|(_, waiting)| waiting).collect();
    for waiting in over {
        let reason = if waiting.reply.is_closed() { EndReason::Cancelled } else { EndReason::TimedOut };
        spawn_end_waiting(leases, waiting, reason, None);
    }
    // Without a driver gpushd cannot grant anything, so the requests continue to wait.
    let Ok(seen) = leases.handles.readings.host().await else { return };
    if restored::is_pending(leases) {
        restored::resolve_all(leases, &seen).await;
    }
    let (deciding, gpus) = (leases.clone(), seen.gpus(Viewer::Log));
    // The searches run on a blocking thread. They are completed even if gpushd stops, because they may reserve capacity.
    let decided = leases.handles.tasks.spawn_blocking(move || decide(&deciding, &seen.host, &gpus));
    if let Err(error) = decided.await {
        tracing::error!("an internal error of gpushd ended a decision about the waiting requests: {error}");
    }
}

/// Reserves capacity for each request that can be granted, and removes the request from the queue. Then commits these
/// grants in separate tasks. Records what the other requests wait for. Searches without the placement lock.
fn decide(leases: &Leases, seen: &HostState, gpus: &[Gpu]) {
    // Requests that exceed a quota. They reserve nothing, because their holders must first release a lease.
    let mut denied: BTreeMap<Ticket, String> = BTreeMap::new();
    let snapshot = loop {
        let placing = leases.lock_placement();
        let table = leases.handles.state.leases();
        let held = HeldLeases::of(leases.handles.users.accounts(), &table);
        for (ticket, waiting) in leases.waiting().iter() {
            if let Err(error) = grant::within_quota(&held, &waiting.resolved) {
                denied.insert(*ticket, error.message);
            }
        }
        // Also leave out requests that a quota has denied only for their assignment.
        let snapshot = PlacementSnapshot::current(leases, seen, gpus, table, denied.keys());
        let Some(schedule) = snapshot.known_schedule() else {
            // Search, and then decide again: the snapshot may have changed meanwhile.
            drop(placing);
            snapshot.schedule();
            continue;
        };
        // After a grant, decide again about the other requests, because the grant has taken capacity.
        let grants = schedule.outcomes.iter().filter_map(|(ticket, outcome)| match outcome {
            Outcome::Grant(assignment) => Some((Ticket(ticket.0), assignment)),
            Outcome::Ready | Outcome::Waits { .. } | Outcome::Never(_) => None,
        });
        let is_granted = grants.into_iter().any(|(ticket, assignment)| {
            if is_paused(leases, ticket) {
                // The other requests of this pass do not get this capacity. Operations must not get it either.
                if let Some(waiting) = leases.waiting().get(&ticket) {
                    waiting.place.set_needs(needs(&schedule.host, Some(assignment)));
                }
                return false;
            }
            match try_take(leases, seen, gpus, &snapshot.host, ticket, assignment) {
                Some(Ok(reserved)) => {
                    spawn_commit(leases, queued_grant::begin(leases, ticket, &reserved), reserved);
                    true
                }
                Some(Err(error)) => {
                    denied.insert(ticket, error.message);
                    true
                }
                // An operation has claimed the GPU meanwhile. When the operation ends, it wakes the queue.
                None => false,
            }
        });
        if !is_granted {
            drop(placing);
            break snapshot;
        }
    };
    for (ticket, outcome) in &snapshot.schedule().outcomes {
        let ticket = Ticket(ticket.0);
        match outcome {
            Outcome::Never(why) => {
                let Some(waiting) = leases.waiting().remove(&ticket) else { continue };
                let (resolved, viewer, queued) = (&waiting.resolved, waiting.viewer, Some((ticket, None)));
                let error = explain(leases, why, Unplaced { resolved, viewer, snapshot: &snapshot, gpus, queued });
                spawn_end_waiting(leases, waiting, EndReason::Failed, Some(error));
            }
            Outcome::Waits { reserves, behind, why } => {
                note(leases, &snapshot, ticket, reserves.as_ref(), behind, why.as_ref(), gpus);
            }
            Outcome::Grant(_) | Outcome::Ready => {}
        }
    }
    for (ticket, message) in denied {
        if let Some(waiting) = leases.waiting().get(&ticket) {
            waiting.place.set_needs(Needs::new());
        }
        let position = position(leases, ticket);
        show_position(leases, ticket, LeaseQueuePosition { position, behind: Vec::new(), reasons: vec![message] });
    }
}

/// Commits a grant in a separate task. `waiting` is `None` if its client has cancelled the request meanwhile.
fn spawn_commit(leases: &Leases, waiting: Option<Waiting>, reserved: Reserved) {
    let leases = leases.clone();
    leases.handles.tasks.clone().spawn(async move {
        match waiting {
            Some(waiting) => queued_grant::commit(&leases, waiting, reserved).await,
            None => grant::abandon(&leases, reserved).await,
        }
    });
}

/// Returns whether gpushd must not grant a request yet, because a grant of the request has just failed.
fn is_paused(leases: &Leases, ticket: Ticket) -> bool {
    leases.waiting().get(&ticket).is_some_and(|waiting| waiting.paused_until(Instant::now()).is_some())
}

fn try_take(
    leases: &Leases,
    seen: &HostState,
    gpus: &[Gpu],
    host: &Host,
    ticket: Ticket,
    assignment: &Assignment,
) -> Option<Result<Reserved, ApiError>> {
    let resolved = leases.waiting().get(&ticket).map(|waiting| waiting.resolved.clone())?;
    let held = HeldLeases::of(leases.handles.users.accounts(), &leases.handles.state.leases());
    match grant::reserve_assignment(leases, seen, gpus, host, &held, &resolved, assignment) {
        Ok(reserved) => reserved.map(Ok),
        Err(NotReserved::Refused(error)) => Some(Err(error)),
        // The change that made the placement outdated wakes the queue.
        Err(NotReserved::NoRoom { .. } | NotReserved::Outdated) => None,
    }
}

/// Notes what a request reserves, and why it waits.
fn note(
    leases: &Leases,
    snapshot: &PlacementSnapshot,
    ticket: Ticket,
    reserves: Option<&Assignment>,
    behind: &[order::Ticket],
    why: Option<&NoAssignment>,
    gpus: &[Gpu],
) {
    let entries = leases.handles.lanes.entries();
    let name = |ticket: &order::Ticket| {
        let entry = entries.iter().find(|(one, _)| one.0 == ticket.0);
        entry.map(|(_, entry)| entry.waiter.name().to_owned())
    };
    let behind: Vec<String> = behind.iter().filter_map(name).collect();
    let found = leases.waiting().get(&ticket).map(|waiting| {
        waiting.place.set_needs(needs(&snapshot.host, reserves));
        (waiting.resolved.clone(), waiting.viewer)
    });
    let Some((resolved, viewer)) = found else { return };
    // Search without the lock of the waiting requests.
    let unplaced = Unplaced { resolved: &resolved, viewer, snapshot, gpus, queued: Some((ticket, reserves)) };
    let reasons = why.map_or_else(Vec::new, |why| explain(leases, why, unplaced).causes);
    let position = position(leases, ticket);
    show_position(leases, ticket, LeaseQueuePosition { position, behind, reasons });
}

/// Returns the position of a request among the waiting requests and operations. The first position is 1.
fn position(leases: &Leases, ticket: Ticket) -> u32 {
    let entries = leases.handles.lanes.entries();
    let before = entries.iter().filter(|(one, _)| *one <= ticket).count();
    u32::try_from(before).unwrap_or(u32::MAX)
}

fn show_position(leases: &Leases, ticket: Ticket, position: LeaseQueuePosition) {
    let Some(id) = leases.waiting().get(&ticket).map(|waiting| waiting.id) else { return };
    let state = &leases.handles.state;
    if state.leases().open.get(&id).is_some_and(|lease| lease.queue.as_ref() != Some(&position)) {
        state.change_leases(|table| {
            if let Some(lease) = table.get_mut(id) {
                lease.queue = Some(position);
            }
        });
    }
}

/// Returns the reserved capacity in the form of a queue entry's needs. Later operations must not take this capacity.
fn needs(host: &Host, reserves: Option<&Assignment>) -> Needs {
    let mut needs = Needs::new();
    let Some(assignment) = reserves else { return needs };
    for member in &assignment.members {
        let Some(gpu) = host.gpus.iter().find(|gpu| gpu.index == member.gpu()) else { continue };
        let target = match member {
            Member::Device { uuid, .. } => uuid,
            Member::Mps { target, .. } => target,
            Member::Create { .. } | Member::Timeslice { .. } | Member::Whole { .. } => &gpu.uuid,
        };
        match needs.entry(gpu.uuid.clone()).or_insert_with(|| Need::Parts(Default::default())) {
            Need::Parts(parts) => drop(parts.insert(target.clone())),
            Need::Lane(_) => {}
        }
    }
    needs
}

/// Ends a waiting request in a separate task, because the record of the end may take long to write.
fn spawn_end_waiting(leases: &Leases, waiting: Waiting, reason: EndReason, error: Option<ApiError>) {
    let leases = leases.clone();
    leases.handles.tasks.clone().spawn(async move { end_waiting(&leases, waiting, reason, error).await });
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
