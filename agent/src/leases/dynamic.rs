//! Dynamic grants: an operation creates the MIG devices of a lease.
//!
//! ```text
//! placed, lanes claimed ─► operation begins: lease `granting` ─► operation ends: lease `active`, or `ended` (failed)
//!                             │ one commit                            │ one commit
//!                             └ refused: nothing is recorded          └ also after a crash: recovery ends the operation
//! ```
//!
//! If the client disconnects, the operation continues. After the operation, gpushd ends the lease by the same rules as
//! any other lease whose client disconnects before it gets the answer.

use std::sync::{Arc, Mutex, PoisonError};

use gpush_api::{Actor, ApiError, Code, LeaseGrant, LeaseId, LeaseMember, LeaseRequest, LeaseState};
use gpush_core::lease::{placement::Assignment, request::spec};
use gpush_store::{LeaseRecord, LeaseSource, OperationId};

use super::{
    Leases,
    bind::{self, ResolvedBinding},
    grant::{answer, audit_record},
    lease_end, log,
    scope::ScopeCreation,
    show,
};
use crate::{
    apply::Creation,
    caller::{Caller, Viewer},
    idempotency::Key,
    lanes::Claim,
    operation::BeginWrites,
    state::{OpenLease, ReservationId},
};

/// The MIG devices that an operation creates for a lease, and the operation's claim on their GPUs.
#[derive(Debug)]
pub(super) struct DevicesToCreate {
    pub(super) assignment: Assignment,
    pub(super) claim: Claim,
}

/// Records an operation that creates the MIG devices of a lease. Returns the lease, in the state `granting`.
///
/// # Errors
/// If the instances can no longer be created, or if the operation and the lease cannot be recorded. After an error, no
/// operation exists.
pub(super) async fn begin(
    leases: &Leases,
    source: LeaseSource,
    request: &LeaseRequest,
    bound: &ResolvedBinding,
    members: Vec<LeaseMember>,
    missing: DevicesToCreate,
    key: Option<Key>,
) -> Result<GrantingLease, ApiError> {
    let by = match &source {
        LeaseSource::New(new) => new.asked_by.clone(),
        LeaseSource::Queued(id) => asked_by(leases, *id)?,
    };
    let recorded: Arc<Mutex<Option<LeaseRecord>>> = Arc::default();
    let (slot, text) = (Arc::clone(&recorded), spec(request));
    let (epoch, binding) = (leases.handles.store.epoch().to_owned(), bound.binding.clone());
    let also: BeginWrites = Box::new(move |tx, operation| {
        let record = tx.begin_lease(source.clone(), members.clone(), operation.id)?;
        let record = bind::record(tx, &epoch, record, &binding)?;
        if let Some(key) = &key {
            key.record_number(tx, record.id.0)?;
        }
        let holder = &record.holder;
        let detail = serde_json::json!({
            "request_spec": text, "operation_id": operation.id.to_string(), "uid": holder.uid, "user": holder.user,
        });
        tx.audit(audit_record(&record, "lease.create", "accepted", detail))?;
        *slot.lock().unwrap_or_else(PoisonError::into_inner) = Some(record);
        Ok(())
    });
    let DevicesToCreate { assignment, claim } = missing;
    let creation = Creation::begin(&leases.handles.engine, claim, &assignment, by, also).await?;
    let record = recorded.lock().unwrap_or_else(PoisonError::into_inner).take();
    record.map(|record| GrantingLease { record, creation }).ok_or_else(|| {
        ApiError::new(Code::Internal, "the lease was not recorded with its operation")
            .hint("see the log of gpushd: `journalctl -u gpushd`")
    })
}

fn asked_by(leases: &Leases, id: LeaseId) -> Result<Actor, ApiError> {
    let table = leases.handles.state.leases();
    table.open.get(&id).map(|lease| lease.record.asked_by.clone()).ok_or_else(|| show::unknown(id))
}

/// A lease in the state `granting`, and its operation, which gpushd has not executed yet.
pub(super) struct GrantingLease {
    pub(super) record: LeaseRecord,
    creation: Creation,
}

impl GrantingLease {
    /// In the table, replaces the reservation by the lease.
    pub(super) fn insert(&self, leases: &Leases, reservation: ReservationId) {
        leases.handles.state.change_leases(|table| {
            table.reserved.remove(&reservation);
            table.insert(self.record.clone());
        });
    }

    /// Executes the operation, and waits for its end. The lease must be in the table.
    ///
    /// # Errors
    /// If the operation did not create the devices, or the caller was not moved into the scope of the lease.
    pub(super) async fn finish(
        self,
        leases: &Leases,
        viewer: Viewer,
        bound: &ResolvedBinding,
    ) -> Result<LeaseGrant, ApiError> {
        let (id, operation) = (self.record.id, self.record.operation);
        let moving = ScopeCreation::begin(leases, &self.record, bound);
        lease_end::watch(leases, id);
        self.creation.execute(&leases.handles.engine);
        wait_until_decided(leases, id).await;
        let is_active = |lease: &&OpenLease| lease.state.name() == LeaseState::Active;
        if let Some(lease) = leases.handles.state.leases().get(id).filter(is_active) {
            log::granted(&leases.handles.state, &lease.record, spec(&lease.record.request));
            return answer(leases, id, viewer, bound, moving).await;
        }
        drop(moving);
        Err(not_created(leases, id, operation).await)
    }
}

/// Waits until the operation that creates the devices of a lease has ended, whether it succeeded or not.
pub(super) async fn wait_until_decided(leases: &Leases, id: LeaseId) {
    let mut snapshots = leases.handles.state.watch();
    let is_granting = |lease: &OpenLease| lease.state.name() == LeaseState::Granting;
    // `wait_for` cannot fail: the state keeps the sender alive.
    let _decided = snapshots.wait_for(|host| !host.leases.get(id).is_some_and(is_granting)).await.is_ok();
}

async fn not_created(leases: &Leases, id: LeaseId, operation: Option<OperationId>) -> ApiError {
    let operations = &leases.handles.engine.operations;
    let found = match operation {
        Some(operation) => operations.get(&operation.to_string()).await.ok(),
        None => None,
    };
    match found.and_then(|operation| operation.error) {
        Some(error) => ApiError { message: format!("lease {id} was not granted: {}", error.message), ..error },
        None => ApiError::new(Code::Cancelled, format!("lease {id} ended before it was granted")),
    }
}

/// Cancels the operation of a lease in the state `granting`. Returns an error if the cancellation cannot be recorded.
pub(super) async fn cancel(leases: &Leases, caller: &Caller, record: &LeaseRecord) -> Result<(), ApiError> {
    let Some(operation) = record.operation else { return Ok(()) };
    let by = caller.actor(leases.handles.users.user(caller.uid()).await);
    match leases.handles.engine.operations.cancel(&operation.to_string(), by, None).await {
        Ok(_) => Ok(()),
        // The operation has already ended, so the lease is active or has ended.
        Err(error) if error.code == Code::Conflict => Ok(()),
        Err(error) => Err(error),
    }
}
