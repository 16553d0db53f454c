//! Requests for leases: resolves a request, and reserves its capacity. The module `reserve` places the request. Then the
//! task of the lease records the grant (module `actor`).
//!
//! ```text
//! resolve ─► quotas ─► place and reserve ─► grant recorded ─► answer
//!                       │ no room             └ failed: capacity freed
//!                       ▼
//!                     refused, or queued
//! ```
//!
//! If there is no room, gpushd refuses a request without `wait`. But if capacity may become free within seconds, gpushd
//! first waits for this capacity. Examples: an operation is about to end, a lease without processes is about to end, or
//! an MPS daemon is starting.

use std::{sync::Arc, time::Duration};

use gpush_api::{ApiError, Code, Gpu, LeaseGrant, LeaseId, LeaseRequest, LeaseState, LeaseWait};
use gpush_core::{lease::placement::NoAssignment, slurm::decide};
use tokio::time::{Instant, timeout_at};

use super::{
    Leases, about_to_end,
    actor::{self, Inbox, LeaseCommand},
    job_terms::JobTerms,
    pending::PendingGrant,
    request::resolve,
    show,
};
use crate::{
    modes::mps,
    operations::scheduler::{
        self, HeldLeases, LeaseDemand, NotReserved, PlacementSnapshot, ReadHost, RetryHint, Unplaced, check_quotas,
        explain, reserve, reserve_at_once, retry_hint,
    },
    requests::{
        caller::{Caller, Viewer},
        idempotency::Key,
    },
    state::{HostState, request_counts::RequestResult, words},
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
    granted: Box<LeaseGrant>,
    /// The inbox that gets `ClientGone` when this value is dropped; `None` if the lease must then continue.
    inbox: Option<Inbox>,
}

impl Delivery {
    fn new(granted: LeaseGrant, inbox: Option<Inbox>) -> Self {
        Self { granted: Box::new(granted), inbox }
    }

    /// Returns the grant.
    pub(crate) fn grant(&self) -> &LeaseGrant {
        &self.granted
    }

    /// Marks the grant as delivered, and returns it.
    pub(crate) fn into_delivered(mut self) -> LeaseGrant {
        self.inbox = None;
        (*self.granted).clone()
    }
}

impl Drop for Delivery {
    fn drop(&mut self) {
        if let Some(inbox) = &self.inbox {
            let _the_lease_may_have_ended = inbox.send(LeaseCommand::ClientGone);
        }
    }
}

/// Requests a lease. If an earlier request with the same key got a lease, returns that lease.
///
/// # Errors
/// If the request is denied, if it cannot be met, or if it cannot be recorded.
pub(crate) async fn request_lease(
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
/// As [`request_lease`].
pub(super) async fn request_with(
    leases: &Leases,
    caller: &Caller,
    request: LeaseRequest,
    key: Option<Key>,
    job: Option<&JobTerms>,
) -> Result<Outcome, ApiError> {
    let share = request.share.clone();
    let holder = request.holder.unwrap_or(caller.uid());
    let outcome = place(leases, caller, request, key, job).await;
    let result = match &outcome {
        Ok(Outcome::Granted(_)) => RequestResult::Granted,
        Ok(Outcome::Queued(_)) => RequestResult::Queued,
        Err(refused) if refused.is_not_ready => RequestResult::NotReady,
        Err(refused) => RequestResult::of_error(&refused.error),
    };
    let host = leases.handles.context.state.now();
    let waits = job.is_some_and(|job| job.waits) && matches!(&outcome, Err(refused) if decide::is_busy(&refused.error));
    if !waits {
        leases.handles.context.requests.note(&share, result, |profile| has_profile(&host, profile));
        if outcome.is_err() {
            leases.handles.context.refused.note(holder, share.kind());
        }
    }
    outcome.map_err(|refused| refused.error)
}

/// Why a request is refused.
struct RefusedRequest {
    error: ApiError,
    /// Whether the GPUs that could meet the request are not ready.
    is_not_ready: bool,
}

impl From<ApiError> for RefusedRequest {
    fn from(error: ApiError) -> Self {
        Self { error, is_not_ready: false }
    }
}

/// Returns whether a GPU of the host has a MIG profile.
fn has_profile(host: &HostState, profile: &str) -> bool {
    let profiles = host.gpus.iter().filter_map(|gpu| gpu.gpu.mig.as_ref()).flat_map(|mig| mig.profiles.iter());
    profiles.into_iter().any(|one| one.name == profile || one.compute.iter().any(|part| part.name == profile))
}

async fn place(
    leases: &Leases,
    caller: &Caller,
    request: LeaseRequest,
    key: Option<Key>,
    job: Option<&JobTerms>,
) -> Result<Outcome, RefusedRequest> {
    // Lock the idempotency key, so that two requests with one key get only one lease.
    let mut lock = match &key {
        Some(key) => Some(leases.handles.idempotency.lock(key).await?),
        None => None,
    };
    if let Some(key) = &key
        && let Some(number) = leases.handles.idempotency.number(key).await?
    {
        let id = LeaseId(number);
        if let Some(waiter) = actor::rejoin(leases, caller, id, job, &mut lock).await? {
            return Ok(Outcome::Queued(waiter));
        }
        let read = leases.handles.context.store.read(move |view| view.lease(id)).await;
        match read.map_err(ApiError::from)? {
            Some(record) if record.state == LeaseState::Queued => return Err(actor::ending_error(id).into()),
            Some(record) if actor::may_be_repeated(&record) => {}
            Some(_) | None => return Ok(lease_of_key(leases, caller, id).await?),
        }
    }
    if let Some(maintenance) = leases.handles.context.state.maintenance() {
        return Err(words::refusal(&maintenance).into());
    }
    let until = Instant::now() + OPERATION;
    let wait = request.wait;
    let mut room = leases.handles.context.lanes.room();
    loop {
        // Mark changes as seen before the placement, so that a change during the placement ends the wait below.
        room.mark_unchanged();
        let seen = match leases.handles.context.readings.host().await {
            Ok(seen) => seen,
            // If the driver is still starting, return an error that says that the client may try again.
            Err(error) => {
                return Err(mps::gpus_known(&leases.handles.context.state.now()).err().unwrap_or(error).into());
            }
        };
        scheduler::resolve_all(&leases.handles.scheduler, &seen).await;
        let gpus = seen.gpus(Viewer::Log);
        let resolved = resolve(leases, caller, request.clone(), &seen.host, &gpus, job).await?;
        if let Err(error) = check_quotas(&leases.handles.scheduler, &resolved.demand, wait) {
            if about_to_end::one_ends(leases, &resolved.demand, until).await {
                continue;
            }
            return Err(error.into());
        }
        // `resolve` may have taken seconds to look up users and groups. So place the request with a new snapshot.
        let changes = leases.handles.context.lanes.changes();
        let now = leases.handles.context.readings.host().await?;
        if !Arc::ptr_eq(&now.host.config, &seen.host.config) {
            continue;
        }
        let gpus = if now.is_same(&seen) { gpus } else { now.gpus(Viewer::Log) };
        let (searching, read) = (leases.handles.scheduler.clone(), ReadHost { host: now.host, gpus, changes });
        let (reserved, resolved, gpus) = match reserve_at_once(&searching, &read, &resolved.demand) {
            Some(reserved) => (reserved, resolved, read.gpus),
            None => {
                let search = move || {
                    let reserved = reserve(&searching, &read, &resolved.demand);
                    (reserved, resolved, read.gpus)
                };
                leases.handles.scheduler.searches().run(caller, search).await?
            }
        };
        let (not_placed, snapshot) = match reserved {
            Ok(reserved) => {
                let has_key = key.is_some();
                let (granted, inbox) = actor::grant(leases, resolved, caller.viewer, key, lock, reserved).await?;
                return Ok(Outcome::Granted(Delivery::new(granted, (!has_key).then_some(inbox))));
            }
            Err(NotReserved::Refused(error)) => {
                if about_to_end::one_ends(leases, &resolved.demand, until).await {
                    continue;
                }
                return Err(error.into());
            }
            Err(NotReserved::Outdated) => continue,
            Err(NotReserved::NoRoom { why, snapshot }) => (why, snapshot),
        };
        let is_not_ready = not_placed.is_not_ready();
        match wait {
            LeaseWait::No => {
                let prospect = retry_hint(&leases.handles.scheduler, &not_placed, &resolved.demand, &gpus).await;
                if prospect != RetryHint::No && timeout_at(until, room.changed()).await.is_ok() {
                    continue;
                }
                let why = explain_on_a_thread(leases, caller, not_placed, resolved.demand, snapshot, gpus).await?;
                // If an MPS daemon is starting, it will soon serve clients. So mark the error as retryable.
                let starting = |why| ApiError { code: Code::Unavailable, ..why }.retryable();
                let error = if prospect == RetryHint::Starting { starting(why) } else { why };
                return Err(RefusedRequest { error, is_not_ready });
            }
            LeaseWait::Seconds(_) | LeaseWait::Unlimited => {
                if !matches!(not_placed, NoAssignment::Busy { .. }) {
                    let error =
                        explain_on_a_thread(leases, caller, not_placed, resolved.demand, snapshot, gpus).await?;
                    return Err(RefusedRequest { error, is_not_ready });
                }
                let waiter = actor::enter_queue(leases, caller, resolved, wait, key, lock).await?;
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
    demand: Arc<LeaseDemand>,
    snapshot: Arc<PlacementSnapshot>,
    gpus: Vec<Gpu>,
) -> Result<ApiError, ApiError> {
    let (searching, viewer) = (leases.handles.scheduler.clone(), caller.viewer);
    let context = &leases.handles.context;
    let (accounts, table) = (context.users.accounts().clone(), context.state.leases());
    let search = move || {
        let (demand, snapshot, gpus) = (&*demand, &*snapshot, gpus.as_slice());
        let held = &HeldLeases::of(&accounts, &table);
        explain(&searching, &why, Unplaced { demand, viewer, snapshot, held, gpus, queued: None })
    };
    leases.handles.scheduler.searches().run(caller, search).await
}

/// Returns the lease that gpushd granted to an earlier request with this idempotency key.
async fn lease_of_key(leases: &Leases, caller: &Caller, id: LeaseId) -> Result<Outcome, ApiError> {
    // After a crash of gpushd, the operation that creates the devices of the lease may still run, so wait for its end.
    actor::wait_until_decided(leases, id).await;
    let table = leases.handles.context.state.leases();
    if table.open.get(&id).is_none_or(|lease| lease.state.name() != LeaseState::Active) {
        let message = format!("lease {id}, which gpushd granted to this request earlier, has ended");
        return Err(ApiError::new(Code::Conflict, message).hint("send the request with another idempotency key"));
    }
    let granted = show::environment(leases, caller, &id.to_string()).await?;
    Ok(Outcome::Granted(Delivery::new(granted, None)))
}
