//! The cancellation of an operation. It is recorded before the answer, so that even after a crash the next gpushd rolls
//! the operation back.

use gpush_api::{Actor, ApiError, Change, Code, EventPayload, Operation, OperationState};
use gpush_store::{AuditEvent, OperationId, StoreError};

use super::{Operations, wire};
use crate::{requests::idempotency::Key, state::words};

/// Why an operation was not cancelled.
#[derive(Debug)]
pub(crate) enum CancelError {
    /// There is no such operation, or its record cannot be read.
    Unknown(ApiError),
    /// The operation has ended.
    AlreadyEnded {
        /// The operation, as the caller named it.
        id: String,
        /// Its last state.
        state: OperationState,
    },
    /// The cancellation cannot be recorded.
    Unrecorded(StoreError),
}

impl From<StoreError> for CancelError {
    fn from(error: StoreError) -> Self {
        Self::Unrecorded(error)
    }
}

impl From<CancelError> for ApiError {
    fn from(error: CancelError) -> Self {
        match error {
            CancelError::Unknown(error) => error,
            CancelError::AlreadyEnded { id, state } => {
                let state = state.name().replace('_', " ");
                let message = format!("cannot cancel operation {id}: it has already ended with the state `{state}`");
                Self::new(Code::Conflict, message).hint(format!("see its result with `gpushctl operation show {id}`"))
            }
            CancelError::Unrecorded(error) => error.into(),
        }
    }
}

impl Operations {
    /// Records a cancellation and the response for its idempotency key. The task of the operation then ends the
    /// operation.
    ///
    /// # Errors
    /// See [`CancelError`].
    pub(crate) async fn cancel(&self, id: &str, by: Actor, key: Option<Key>) -> Result<Operation, CancelError> {
        let live = wire::id(id).and_then(|number| self.active().get(&number).cloned().map(|live| (number, live)));
        let Some((number, live)) = live.filter(|(_, live)| !live.watch.borrow().state.is_final()) else {
            let ended = self.get(id).await.map_err(CancelError::Unknown)?;
            return Err(CancelError::AlreadyEnded { id: id.to_owned(), state: ended.state });
        };
        let audit = AuditEvent::OperationCancel {}.record(Some(by.clone()), id, "accepted");
        let change = Change {
            action: audit.action.clone(),
            object: audit.object.clone(),
            by: Some(by.clone()),
            reason: None,
            gpu_uuids: live.watch.borrow().plans.iter().map(|plan| plan.gpu_uuid.clone()).collect(),
        };
        let author = by.clone();
        // Record the cancellation before the answer, so that even after a crash the next gpushd rolls the operation
        // back.
        let recorded = self.store().write_ending(move |tx| {
            if let Some(key) = &key {
                key.record_operation(tx, number)?;
            }
            tx.audit(audit.clone())?;
            // If the operation has not begun, `tx.cancel` also records its end, with this error.
            tx.cancel(number, cancelled(number, Some(&author)).outcome("nothing was changed"))
        });
        let stage = recorded.await?.stage;
        self.0.events.publish(EventPayload::Change(change));
        // If several callers cancel the operation, keep the first caller.
        let _ = live.cancelled_by.set(by);
        live.watch.send_if_modified(|operation| {
            let goes_back = stage == OperationState::Cancelling && !operation.state.is_final();
            if goes_back && operation.state != stage {
                operation.state = stage;
                operation.revision += 1;
                self.0.events.publish(wire::event(operation, None));
            }
            goes_back
        });
        live.cancelled.cancel();
        Ok(live.watch.borrow().clone())
    }
}

/// Returns the error of an operation that was cancelled.
pub(super) fn cancelled(id: OperationId, by: Option<&Actor>) -> ApiError {
    let by = by.map_or_else(String::new, |by| format!(" by {}", words::actor(by)));
    ApiError::new(Code::Cancelled, format!("operation {id} was cancelled{by}"))
}
