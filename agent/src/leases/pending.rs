//! A client that waits for its lease.

use gpush_api::{ApiError, EndReason, LeaseGrant};
use tokio::sync::oneshot;

use super::{Leases, lease_end, queue};
use crate::{lanes::Ticket, tasks::TaskName};

/// A client that waits for its lease. If this value is dropped before the answer, the request
/// leaves the queue.
#[derive(Debug)]
pub(crate) struct PendingGrant {
    leases: Leases,
    ticket: Ticket,
    result: Option<oneshot::Receiver<Result<LeaseGrant, ApiError>>>,
}

impl PendingGrant {
    pub(super) fn new(
        leases: &Leases,
        ticket: Ticket,
        result: oneshot::Receiver<Result<LeaseGrant, ApiError>>,
    ) -> Self {
        Self { leases: leases.clone(), ticket, result: Some(result) }
    }

    /// Returns the position of the request in the order of arrival.
    pub(super) fn ticket(&self) -> Ticket {
        self.ticket
    }

    /// Waits for the grant.
    ///
    /// # Errors
    /// If the request ends without a grant.
    pub(crate) async fn granted(mut self) -> Result<LeaseGrant, ApiError> {
        let Some(result) = &mut self.result else { return Err(stopping()) };
        let result = result.await;
        self.result = None;
        result.unwrap_or_else(|_| Err(stopping()))
    }
}

impl Drop for PendingGrant {
    fn drop(&mut self) {
        let Some(mut result) = self.result.take() else { return };
        result.close();
        // `Some` if gpushd has already granted the lease, but the client disconnected before it got
        // the answer.
        let granted = result.try_recv().ok().and_then(Result::ok).map(|granted| granted.lease.id);
        let (leases, ticket) = (self.leases.clone(), self.ticket);
        self.leases.handles.tasks.once_before_exit(TaskName::LeaseGrant, async move {
            if let Some(id) = granted {
                lease_end::end_unused(&leases, id).await;
            }
            let waiting = leases.waiting().remove(&ticket);
            if let Some(waiting) = waiting {
                queue::end_waiting(&leases, waiting, EndReason::Cancelled, None).await;
            }
        });
    }
}

fn stopping() -> ApiError {
    ApiError::stopping("gpushd is stopping; if the request has an idempotency key, it keeps its place in the queue")
}
