//! Records the grant of reserved capacity, and answers the client.
//!
//! ```text
//! reserved ─► binding checked ─┬─ devices exist ─► MPS daemons admit the holder ─► one commit ─► active
//!                              └─ else ─► one commit: an operation begins, the lease is granting ─► active, or ended
//! active ─► the caller is moved into the scope ─► answered
//! ```
//!
//! A disconnected client does not stop an operation. If the client has disconnected meanwhile, the lease ends after the
//! operation, except if the request has an idempotency key: then the client can repeat it.

use std::sync::{Arc, atomic::Ordering};

use gpush_api::{ApiError, Code, LeaseGrant, LeaseId, LeaseState};
use gpush_core::{
    lease::{
        machine::{Event, State},
        request::spec,
    },
    mps::NotServing,
};
use gpush_locked::Locked;
use gpush_store::{AuditEvent, AuditedDevices, LeaseRecord, LeaseSource, LeaseTerms, StoreError};
use jiff::{SignedDuration, Timestamp};
use tokio::sync::OwnedMutexGuard;

use super::{Actor, ChangeError, Inbox, LeaseClient};
use crate::{
    leases::{
        Leases, bind, log,
        pending::unanswered,
        request::Resolved,
        scope::{self, NotMoved},
        show,
    },
    modes::mps,
    operations::{
        apply::Creation,
        operation::{BeginWrites, CancelError},
        scheduler::{DevicesToCreate, Reserved},
    },
    requests::{caller::Viewer, idempotency::Key},
    state::OpenLease,
};

/// Why a grant was not recorded. Each variant contains the error for users.
#[derive(Debug)]
enum NotGranted {
    /// The same grant may succeed later without further action.
    ForNow(ApiError),
    /// The request can be granted only after something has changed.
    Lasting(ApiError),
}

impl NotGranted {
    /// Classifies the refusal of the operation that would create the devices of the lease. Like every refusal of an
    /// operation, the error says whether the same request may succeed later.
    fn of_operation(error: ApiError) -> Self {
        if error.retryable { Self::ForNow(error) } else { Self::Lasting(error) }
    }
}

impl From<NotServing> for NotGranted {
    fn from(why: NotServing) -> Self {
        match why {
            NotServing::ForNow(_) => Self::ForNow(why.into()),
            NotServing::Lasting(_) => Self::Lasting(why.into()),
        }
    }
}

impl From<StoreError> for NotGranted {
    fn from(error: StoreError) -> Self {
        if error.is_temporary() { Self::ForNow(error.into()) } else { Self::Lasting(error.into()) }
    }
}

/// Grants a new request that has its capacity. Returns the grant, and the inbox of the lease.
///
/// # Errors
/// If the caller has ended or was moved to another cgroup, an MPS daemon does not admit the holder, or the grant cannot
/// be recorded. After an error, the capacity is free again, unless it is unknown whether the grant is on disk.
pub(in crate::leases) async fn grant(
    leases: &Leases,
    resolved: Resolved,
    viewer: Viewer,
    key: Option<Key>,
    lock: Option<OwnedMutexGuard<()>>,
    reserved: Reserved,
) -> Result<(LeaseGrant, Inbox), ApiError> {
    let (mut actor, answer) = Actor::of_request(leases, resolved, viewer, key, lock);
    let inbox = actor.inbox.clone();
    actor.use_capacity(reserved);
    actor.execute_effects().await;
    actor.spawn();
    let unanswered = |_| Err(unanswered(&leases.handles.context.stopping));
    answer.await.unwrap_or_else(unanswered).map(|granted| (granted, inbox))
}

/// Waits until the operation that creates the devices of a lease has ended, whether it succeeded or not.
pub(in crate::leases) async fn wait_until_decided(leases: &Leases, id: LeaseId) {
    let mut snapshots = leases.handles.context.state.watch();
    let is_granting = |lease: &OpenLease| lease.state.name() == LeaseState::Granting;
    // `wait_for` cannot fail: the state keeps the sender alive.
    let _decided = snapshots.wait_for(|host| !host.leases.get(id).is_some_and(is_granting)).await.is_ok();
}

impl Actor {
    /// Records the grant. Returns `None` if it is unknown whether the grant is on disk: gpushd finds out after a restart;
    /// until then, the store refuses all changes, and the capacity stays reserved.
    pub(super) async fn commit_grant(&mut self) -> Option<Event> {
        let Some(request) = &self.request else { return Some(Event::CommitFailed) };
        // The request may have waited long since its binding was determined, so check the binding again.
        if let Err(error) = request.resolved.bound.check() {
            return Some(self.refuse(NotGranted::Lasting(error)));
        }
        let (source, writes) = (self.source(request), self.grant_writes(request));
        let (duration, by) =
            (request.resolved.demand.new.request.duration_s, request.resolved.demand.new.asked_by.clone());
        let Some(reserved) = &mut self.reserved else { return Some(Event::CommitFailed) };
        if let Some(missing) = reserved.missing.take() {
            return Some(match self.begin_operation(missing, source, writes, by).await {
                Ok(()) => Event::OperationBegun,
                Err(error) => self.refuse(NotGranted::of_operation(error)),
            });
        }
        // Prepare the daemons before the commit: if clients of another user are connected, gpushd must not record the
        // grant.
        if let Err(why) = mps::prepare(&self.leases.handles.mps, &reserved.members).await {
            return Some(self.refuse(why.into()));
        }
        let terms = LeaseTerms { members: reserved.members.clone(), expires_at: expires_at(duration) };
        reserved.set_may_be_recorded(true);
        let written = self.leases.handles.context.store.write(move |tx| {
            let record = tx.grant_lease(source.clone(), terms.clone())?;
            let (devices, request_spec) = (AuditedDevices::of(&record.members), spec(&record.request));
            let event = AuditEvent::LeaseGrant { devices, request_spec, holder: record.holder.clone() };
            writes.write(tx, record, &event, "granted")
        });
        match written.await {
            Ok(record) => {
                self.lease = Some(OpenLease::new(record));
                Some(Event::Committed)
            }
            Err(error @ (StoreError::Uncertain { .. } | StoreError::Gone { .. })) => {
                // The reservation in the table protects the capacity. Operations and the stop of gpushd must not wait.
                reserved.drop_guards();
                self.answer(Err(error.into()));
                None
            }
            Err(error) => Some(self.refuse(error.into())),
        }
    }

    /// Notes why the grant was not recorded.
    fn refuse(&mut self, why: NotGranted) -> Event {
        if let Some(reserved) = &mut self.reserved {
            reserved.set_may_be_recorded(false);
        }
        let (event, error) = match (why, &self.place) {
            // A request in the queue waits again.
            (NotGranted::ForNow(error), Some(place)) => {
                place.pause();
                (Event::CommitPostponed, error)
            }
            (NotGranted::ForNow(error), None) | (NotGranted::Lasting(error), _) => (Event::CommitFailed, error),
        };
        self.refusal = Some(error);
        event
    }

    /// Records an operation that creates the MIG devices of the lease, and the lease as granting.
    ///
    /// # Errors
    /// If the instances can no longer be created, or if the operation and the lease cannot be recorded. After an error, no
    /// operation exists.
    async fn begin_operation(
        &mut self,
        missing: DevicesToCreate,
        source: LeaseSource,
        writes: GrantWrites,
        by: gpush_api::Actor,
    ) -> Result<(), ApiError> {
        let Some(reserved) = &mut self.reserved else { return Err(unrecorded()) };
        let members = reserved.members.clone();
        let recorded: Arc<Locked<Option<LeaseRecord>>> = Arc::default();
        let slot = Arc::clone(&recorded);
        let also: BeginWrites = Box::new(move |tx, operation| {
            let record = tx.begin_lease(source.clone(), members.clone(), operation.id)?;
            let event = AuditEvent::LeaseCreate {
                operation_id: operation.id.to_string(),
                request_spec: spec(&record.request),
                holder: record.holder.clone(),
            };
            let record = writes.write(tx, record, &event, "accepted")?;
            *slot.lock() = Some(record);
            Ok(())
        });
        let DevicesToCreate { assignment, claim } = missing;
        reserved.set_may_be_recorded(true);
        let creation = Creation::begin(&self.leases.handles.engine, claim, &assignment, by, also).await?;
        let record = recorded.lock().take().ok_or_else(unrecorded)?;
        let text = log::short(spec(&record.request));
        tracing::info!(lease = %record.id, uid = record.holder.uid, "lease {} is being granted: {text}", record.id);
        self.lease = Some(OpenLease::new(record));
        self.creation = Some(creation);
        Ok(())
    }

    /// Returns the record that the grant changes.
    fn source(&self, request: &super::PendingRequest) -> LeaseSource {
        match self.id() {
            Some(id) => LeaseSource::Queued(id),
            None => request.resolved.demand.new.clone().into(),
        }
    }

    fn grant_writes(&self, request: &super::PendingRequest) -> GrantWrites {
        GrantWrites {
            epoch: self.leases.handles.context.store.epoch().to_owned(),
            binding: request.resolved.bound.binding.clone(),
            key: request.key.clone(),
        }
    }

    /// Cancels the operation that creates the devices of the lease.
    pub(super) async fn cancel_operation(&mut self) {
        let Some(record) = self.lease.as_ref().map(|lease| &lease.record) else { return };
        let (Some(operation), by) = (record.operation, self.changed_by.take()) else { return };
        let by = by.unwrap_or_else(|| record.asked_by.clone());
        match self.leases.handles.engine.operations.cancel(&operation.to_string(), by, None).await {
            Ok(_) => {}
            // The lease is active or has ended. The store may know the end before the operation shows it.
            Err(CancelError::AlreadyEnded { .. } | CancelError::Unrecorded(StoreError::Transition { .. })) => {}
            Err(error @ (CancelError::Unknown(_) | CancelError::Unrecorded(_))) => {
                self.failure = Some(ChangeError::OperationRuns(error.into()));
            }
        }
    }

    /// Returns why the operation that creates the devices of the lease has failed.
    pub(super) async fn operation_error(&self) -> Option<ApiError> {
        let record = &self.lease.as_ref()?.record;
        let (id, operation) = (record.id, record.operation?);
        let found = self.leases.handles.engine.operations.get(&operation.to_string()).await.ok();
        Some(match found.and_then(|operation| operation.error) {
            Some(error) => ApiError { message: format!("lease {id} was not granted: {}", error.message), ..error },
            None => ApiError::new(Code::Cancelled, format!("lease {id} ended before it was granted")),
        })
    }

    /// Reports the grant. If the lease gets a scope, first moves the caller into it.
    pub(super) async fn report_grant(&mut self) {
        self.place = None;
        let (Some(lease), Some(request)) = (&self.lease, &self.request) else { return };
        self.leases.handles.notices.open(&lease.record);
        log::granted(&self.leases.handles.context.state, &lease.record, spec(&lease.record.request));
        let (leases, record) = (self.leases.clone(), lease.record.clone());
        let Some(process) = request.resolved.bound.mover() else { return self.answer_grant(Ok(())) };
        let unfinished = leases.handles.context.tasks.unfinished();
        // While the scope is being created, an empty scope does not end the lease.
        self.moving.start(async move {
            let moved = scope::move_into_scope(&leases, &record, &process).await;
            drop(unfinished);
            moved
        });
    }

    /// Answers the client after the move into the scope. If the move has failed, ends the lease.
    pub(super) async fn scope_moved(&mut self, result: Result<(), NotMoved>) {
        let result = match result {
            Ok(()) => Ok(()),
            Err(NotMoved { error, may_have_moved_another }) => {
                if may_have_moved_another {
                    self.forget_scope().await;
                }
                Err(error)
            }
        };
        self.answer_grant(result);
        if let State::Releasing(_) = self.state {
            self.probe_soon();
        }
    }

    /// Removes the scope from the record of the lease, because the scope may contain a process that does not belong to
    /// the lease. gpushd then does not signal the processes of the scope when the lease ends, and does not wait for them.
    async fn forget_scope(&mut self) {
        let Some(id) = self.id() else { return };
        tracing::warn!(
            lease = %id, "lease {id}: systemd may have moved another process, so gpushd does not use its scope"
        );
        let none = gpush_api::LeaseBinding::None;
        let binding = none.clone();
        match self.leases.handles.context.store.write_ending(move |tx| tx.bind_lease(id, binding.clone())).await {
            Ok(record) => self.set_record(record),
            Err(error) => {
                tracing::error!(lease = %id, "lease {id}: cannot record that it has no scope: {error}");
                if let Some(lease) = &mut self.lease {
                    lease.record.binding = none;
                }
            }
        }
        self.publish();
    }

    /// Answers the client of a granted lease. If the client cannot use the lease, or is gone, ends the lease.
    pub(super) fn answer_grant(&mut self, prepared: Result<(), ApiError>) {
        if let LeaseClient::Away { .. } = self.client {
            return;
        }
        let granted = prepared.and_then(|()| self.granted());
        let is_granted = granted.is_ok();
        let is_received = self.answer(granted);
        if !is_granted || !is_received {
            self.apply(Event::Released);
        }
    }

    fn granted(&self) -> Result<LeaseGrant, ApiError> {
        let (Some(lease), Some(request)) = (&self.lease, &self.request) else { return Err(unrecorded()) };
        // The lease may have ended while systemd moved the caller.
        if self.state != State::Active {
            let message = format!("lease {} ended before its process could use it", lease.id());
            return Err(ApiError::new(Code::Conflict, message).hint("request the lease again"));
        }
        let mut granted = show::granted(&self.leases, lease, request.viewer)?;
        request.resolved.bound.explain(&mut granted);
        granted.quota_notes.clone_from(&request.resolved.notes);
        Ok(granted)
    }

    /// Sends the answer to the client. Returns whether the client has received it, or can get it by repeating the request.
    fn answer(&mut self, answer: Result<LeaseGrant, ApiError>) -> bool {
        let has_key = self.has_key();
        let is_received = match std::mem::replace(&mut self.client, LeaseClient::None) {
            LeaseClient::Waits { reply, .. } => reply.send(answer).is_ok() || has_key,
            LeaseClient::MayRepeat { .. } => true,
            LeaseClient::None | LeaseClient::Away { .. } => false,
        };
        self.is_unanswered.store(false, Ordering::Relaxed);
        is_received
    }
}

/// What gpushd records with each grant, in addition to the state of the lease.
#[derive(Debug)]
struct GrantWrites {
    epoch: String,
    binding: gpush_api::LeaseBinding,
    key: Option<Key>,
}

impl GrantWrites {
    /// Writes the binding, the idempotency key, and the audit record of `event`.
    fn write(
        &self,
        tx: &mut gpush_store::Tx<'_>,
        record: LeaseRecord,
        event: &AuditEvent,
        result: &str,
    ) -> Result<LeaseRecord, StoreError> {
        let record = bind::record(tx, &self.epoch, record, &self.binding)?;
        if let Some(key) = &self.key {
            key.record_number(tx, record.id.0)?;
        }
        tx.audit(event.record(Some(record.asked_by.clone()), record.id.to_string(), result))?;
        Ok(record)
    }
}

/// Returns the end time of a lease that is granted now.
pub(in crate::leases) fn expires_at(duration_s: Option<u64>) -> Option<Timestamp> {
    let span = SignedDuration::from_secs(i64::try_from(duration_s?).ok()?);
    // A duration is at most 52 weeks, so the sum does not overflow.
    Timestamp::now().checked_add(span).ok()
}

fn unrecorded() -> ApiError {
    ApiError::new(Code::Internal, "the lease was not recorded with its operation")
        .hint("see the log of gpushd: `journalctl -u gpushd`")
}
