//! Grants leases: resolves a request, reserves its capacity, and commits the grant. Module `reserved` places the request.
//! Module `dynamic` handles grants that create MIG devices.
//!
//! ```text
//! resolve ─► place and reserve ─► admission to MPS ─► commit ─► open ─► answer
//!              │ no room            │ refused           │
//!              ▼                    ▼                   ├ failed: capacity freed
//!            refused, or queued  capacity freed         └ not known: stays reserved
//! ```
//!
//! If there is no room, gpushd refuses a request without `wait`. But if capacity may become free within seconds, gpushd
//! first waits for this capacity. Examples: an operation is about to end, a lease without processes is about to end, or
//! an MPS daemon is starting.

use std::{sync::Arc, time::Duration};

use gpush_api::{ApiError, Code, Gpu, LeaseGrant, LeaseId, LeaseRequest, LeaseState, LeaseWait};
use gpush_core::lease::{placement::NoAssignment, request::spec};
use gpush_store::{LeaseRecord, LeaseSource, LeaseTerms, NewAudit, StoreError};
use jiff::{SignedDuration, Timestamp};
use tokio::{
    sync::oneshot,
    time::{Instant, timeout_at},
};

use super::{
    Leases,
    bind::{self, ResolvedBinding},
    dynamic::{self},
    explain::{RetryHint, Unplaced, explain, retry_hint},
    job::JobTerms,
    offers::gpus_of,
    pending::PendingGrant,
    placement_snapshot::PlacementSnapshot,
    queue,
    request::{Resolved, resolve},
    reserved::{NotReserved, ReadHost, Reserved, check_quotas, reserve},
    restored,
    scope::{self, ScopeCreation},
    show,
};
use crate::{
    caller::{Caller, Viewer},
    idempotency::Key,
    mps,
    state::words,
    tasks::TaskName,
};

/// Maximum time that a request without `wait` waits for capacity, for example for the end of an operation. It is shorter
/// than the time after which gpushctl tells the user that gpushd has not answered yet.
const OPERATION: Duration = Duration::from_millis(1500);

/// The result of a request for a lease.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// The lease is granted.
    Granted(Delivery),
    /// The request waits in the queue.
    Queued(PendingGrant),
}

/// A grant that the client has not received yet. If this value is dropped before the delivery, gpushd ends the lease,
/// unless the request has an idempotency key: with a key, the client can repeat the request, and then gets the lease.
#[derive(Debug)]
pub(crate) struct Delivery {
    leases: Leases,
    granted: Box<LeaseGrant>,
    /// Whether the lease continues if this value is dropped.
    stays: bool,
}

impl Delivery {
    fn new(leases: &Leases, granted: LeaseGrant, has_key: bool) -> Self {
        Self { leases: leases.clone(), granted: Box::new(granted), stays: has_key }
    }

    /// Returns the grant.
    pub(crate) fn grant(&self) -> &LeaseGrant {
        &self.granted
    }

    /// Marks the grant as delivered, and returns it.
    pub(crate) fn into_delivered(mut self) -> LeaseGrant {
        self.stays = true;
        (*self.granted).clone()
    }
}

impl Drop for Delivery {
    fn drop(&mut self) {
        if !self.stays {
            let (leases, id) = (self.leases.clone(), self.granted.lease.id);
            let unused = async move { super::lease_end::end_unused(&leases, id).await };
            self.leases.handles.tasks.once_before_exit(TaskName::LeaseGrant, unused);
        }
    }
}

/// Requests a lease. If an earlier request with the same key got a lease, returns that lease.
///
/// # Errors
/// If the request is denied, if it cannot be met, or if it cannot be recorded.
pub(crate) async fn request(
    leases: &Leases,
    caller: &Caller,
    request: LeaseRequest,
    key: Option<Key>,
) -> Result<Outcome, ApiError> {
    request_with(leases, caller, request, key, None).await
}

/// Requests a lease. `job` has the additional data of a request from Slurm's hooks.
///
/// # Errors
/// As [`request`].
pub(super) async fn request_with(
    leases: &Leases,
    caller: &Caller,
    request: LeaseRequest,
    key: Option<Key>,
    job: Option<&JobTerms>,
) -> Result<Outcome, ApiError> {
    // Lock the idempotency key, so that two requests with one key get only one lease.
    let mut lock = match &key {
        Some(key) => Some(leases.handles.idempotency.lock(key).await?),
        None => None,
    };
    if let Some(key) = &key
        && let Some(number) = leases.handles.idempotency.number(key).await?
    {
        let id = LeaseId(number);
        if let Some(waiter) = restored::rejoin(leases, caller, id, job, &mut lock).await? {
            return Ok(Outcome::Queued(waiter));
        }
        match leases.handles.store.read(move |view| view.lease(id)).await? {
            Some(record) if record.state == LeaseState::Queued => return Err(restored::ending_error(id)),
            Some(record) if restored::may_be_repeated(&record) => {}
            Some(_) | None => return lease_of_key(leases, caller, id).await,
        }
    }
    if let Some(maintenance) = leases.handles.state.maintenance() {
        return Err(words::refusal(&maintenance));
    }
    let until = Instant::now() + OPERATION;
    let wait = request.wait;
    let mut room = leases.handles.lanes.room();
    loop {
        // Mark changes as seen before the placement, so that a change during the placement ends the wait below.
        room.mark_unchanged();
        let seen = match leases.handles.readings.host().await {
            Ok(seen) => seen,
            // If the driver is still starting, return an error that says that the client may try again.
            Err(error) => return Err(mps::gpus_known(&leases.handles.state.now()).err().unwrap_or(error)),
        };
        if restored::is_pending(leases) {
            restored::resolve_all(leases, &seen).await;
        }
        let gpus = seen.gpus(Viewer::Log);
        let resolved = resolve(leases, caller, request.clone(), &seen.host, &gpus, job).await?;
        check_quotas(leases, &resolved, wait)?;
        // `resolve` may have taken seconds to look up users and groups. So place the request with a new snapshot.
        let changes = leases.handles.lanes.changes();
        let now = leases.handles.readings.host().await?;
        let gpus = if now.is_same(&seen) { gpus } else { now.gpus(Viewer::Log) };
        let (searching, read) = (leases.clone(), ReadHost { host: now.host, gpus, changes });
        let search = move || {
            let reserved = reserve(&searching, &read, &resolved);
            (reserved, resolved, read.gpus)
        };
        let (reserved, resolved, gpus) = leases.searches.run(caller, search).await?;
        let (not_placed, snapshot) = match reserved {
            Ok(reserved) => {
                let has_key = key.is_some();
                // The normal form of the request is recorded, and not the text that the caller sent.
                let (bound, request) = (resolved.bound, resolved.new.request.clone());
                let granted =
                    commit(leases, caller.viewer, resolved.new.into(), &request, &bound, reserved, key).await?;
                return Ok(Outcome::Granted(Delivery::new(leases, granted, has_key)));
            }
            Err(NotReserved::Refused(error)) => return Err(error),
            Err(NotReserved::Outdated) => continue,
            Err(NotReserved::NoRoom { why, snapshot }) => (why, snapshot),
        };
        match wait {
            LeaseWait::No => {
                let prospect = retry_hint(leases, &not_placed, &resolved, &gpus).await;
                if prospect != RetryHint::No && timeout_at(until, room.changed()).await.is_ok() {
                    continue;
                }
                let why = explain_on_a_thread(leases, caller, not_placed, resolved, snapshot, gpus).await?;
                // If an MPS daemon is starting, it will soon serve clients. So mark the error as retryable.
                let starting = |why| ApiError { code: Code::Unavailable, ..why }.retryable();
                return Err(if prospect == RetryHint::Starting { starting(why) } else { why });
            }
            LeaseWait::Seconds(_) | LeaseWait::Unlimited => {
                if !matches!(not_placed, NoAssignment::Busy { .. }) {
                    return Err(explain_on_a_thread(leases, caller, not_placed, resolved, snapshot, gpus).await?);
                }
                let waiter = queue::enter(leases, caller, resolved, wait, key, lock).await?;
                return Ok(Outcome::Queued(waiter));
            }
        }
    }
}

/// Explains why a request cannot be granted. Runs where the searches of the caller run.
///
/// # Errors
/// If gpushd is stopping.
async fn explain_on_a_thread(
    leases: &Leases,
    caller: &Caller,
    why: NoAssignment,
    resolved: Resolved,
    snapshot: Arc<PlacementSnapshot>,
    gpus: Vec<Gpu>,
) -> Result<ApiError, ApiError> {
    let (searching, viewer) = (leases.clone(), caller.viewer);
    let search = move || {
        let (resolved, snapshot, gpus) = (&resolved, &*snapshot, gpus.as_slice());
        explain(&searching, &why, Unplaced { resolved, viewer, snapshot, gpus, queued: None })
    };
    leases.searches.run(caller, search).await
}

/// Returns the lease that gpushd granted to an earlier request with this idempotency key.
async fn lease_of_key(leases: &Leases, caller: &Caller, id: LeaseId) -> Result<Outcome, ApiError> {
    // After a crash of gpushd, the operation that creates the devices of the lease may still run, so wait for its end.
    dynamic::wait_until_decided(leases, id).await;
    let granted = show::environment(leases, caller, &id.to_string()).await;
    let granted = granted.map_err(|error| match error.code {
        Code::NotFound | Code::Conflict => ApiError::new(
            Code::Conflict,
            format!("lease {id}, which gpushd granted to this request earlier, has ended"),
        )
        .hint("send the request with another idempotency key"),
        _ => error,
    })?;
    Ok(Outcome::Granted(Delivery::new(leases, granted, true)))
}

/// Records the grant of reserved capacity, and admits the holder to the MPS daemons.
///
/// # Errors
/// If the caller has ended or was moved to another cgroup, an MPS daemon does not admit the holder, or the grant cannot
/// be recorded. After an error, the capacity is free again, unless it is unknown whether the grant is on disk.
pub(super) async fn commit(
    leases: &Leases,
    viewer: Viewer,
    source: LeaseSource,
    request: &LeaseRequest,
    bound: &ResolvedBinding,
    reserved: Reserved,
    key: Option<Key>,
) -> Result<LeaseGrant, ApiError> {
    let Reserved { id: reservation, members, missing, _grants } = reserved;
    let free = || async {
        leases.handles.state.change_leases(|table| table.reserved.remove(&reservation));
        mps::admit(&leases.handles.mps, &members).await;
        leases.capacity_freed();
    };
    // The request may have waited long since its binding was determined, so check the binding again.
    if let Err(error) = bound.check() {
        free().await;
        return Err(error);
    }
    if let Some(missing) = missing {
        let begun = match dynamic::begin(leases, source, request, bound, members.clone(), missing, key).await {
            Ok(begun) => begun,
            Err(error) => {
                free().await;
                return Err(error);
            }
        };
        begun.insert(leases, reservation);
        tracing::info!(lease = %begun.record.id, uid = begun.record.holder.uid, "lease {} is being granted: {}", begun.record.id, super::log::short(spec(request)));
        return begun.finish(leases, viewer, bound).await;
    }
    // Prepare the daemons before the commit: if clients of another user are connected, gpushd must not record the
    // grant.
    if let Err(error) = mps::prepare(&leases.handles.mps, &members).await {
        free().await;
        return Err(error);
    }
    let terms = LeaseTerms { members: members.clone(), expires_at: expires_at(request.duration_s) };
    let text = spec(request);
    let targets: Vec<String> = members.iter().map(|member| member.target.clone()).collect();
    let gpus: Vec<_> = gpus_of(&members).into_iter().map(|gpu| serde_json::json!({ "gpu_uuid": gpu })).collect();
    let (epoch, binding) = (leases.handles.store.epoch().to_owned(), bound.binding.clone());
    let written = leases.handles.store.write(move |tx| {
        let record = tx.grant_lease(source.clone(), terms.clone())?;
        let record = bind::record(tx, &epoch, record, &binding)?;
        if let Some(key) = &key {
            key.record_number(tx, record.id.0)?;
        }
        let holder = &record.holder;
        let detail = serde_json::json!({
            "request_spec": text, "targets": targets, "gpus": gpus, "uid": holder.uid, "user": holder.user,
        });
        tx.audit(audit_record(&record, "lease.grant", "granted", detail))?;
        Ok(record)
    });
    match written.await {
        Ok(record) => {
            let moving = ScopeCreation::begin(leases, &record, bound);
            leases.handles.state.change_leases(|table| {
                table.reserved.remove(&reservation);
                table.insert(record.clone());
            });
            super::log::granted(&leases.handles.state, &record, spec(request));
            super::lease_end::watch(leases, record.id);
            leases.ends_changed.send_replace(());
            answer(leases, record.id, viewer, bound, moving).await
        }
        // It is unknown whether the record is on disk. gpushd finds out after a restart; until then, the store refuses
        // all changes.
        Err(error @ StoreError::Uncertain { .. }) => Err(error.into()),
        Err(error) => {
            free().await;
            Err(error.into())
        }
    }
}

/// If gpushd creates a scope for the lease, moves the caller into this scope. Returns the answer to the request.
///
/// # Errors
/// If the caller was not moved into the scope, or the lease or its MPS daemon has ended meanwhile. gpushd then ends the
/// lease, because the holder cannot use it.
pub(super) async fn answer(
    leases: &Leases,
    id: LeaseId,
    viewer: Viewer,
    bound: &ResolvedBinding,
    moving: Option<ScopeCreation>,
) -> Result<LeaseGrant, ApiError> {
    let granted = async {
        let lease = leases.handles.state.leases().open.get(&id).cloned().ok_or_else(|| show::unknown(id))?;
        scope::move_into_scope(leases, &lease.record, bound).await?;
        // The lease may have ended while systemd moved the caller.
        let table = leases.handles.state.leases();
        let active = table.open.get(&id).filter(|lease| lease.state.name() == LeaseState::Active);
        let lease = active.ok_or_else(|| {
            ApiError::new(Code::Conflict, format!("lease {id} ended before its process could use it"))
                .hint("request the lease again")
        })?;
        let mut granted = show::granted(leases, lease, viewer)?;
        bound.explain(&mut granted);
        Ok(granted)
    };
    let granted = granted.await;
    drop(moving);
    if granted.is_err() {
        super::lease_end::end_unused(leases, id).await;
    }
    granted
}

/// Creates an audit record about a lease, in the name of the caller who requested the lease.
pub(super) fn audit_record(record: &LeaseRecord, action: &str, result: &str, detail: serde_json::Value) -> NewAudit {
    NewAudit {
        by: Some(record.asked_by.clone()),
        action: action.to_owned(),
        object: record.id.to_string(),
        result: result.to_owned(),
        detail,
    }
}

/// Returns the end time of a lease that is granted now.
pub(super) fn expires_at(duration_s: Option<u64>) -> Option<Timestamp> {
    let span = SignedDuration::from_secs(i64::try_from(duration_s?).ok()?);
    // A duration is at most 52 weeks, so the sum does not overflow.
    Timestamp::now().checked_add(span).ok()
}

/// The channel through which a waiting request gets its result.
pub(super) type Reply = oneshot::Sender<Result<LeaseGrant, ApiError>>;
