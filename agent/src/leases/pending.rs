//! A client that waits for its lease.

use gpush_api::{ApiError, LeaseGrant};
use tokio::sync::oneshot;

use super::actor::{Inbox, LeaseCommand};

/// A client that waits for its lease. If this value is dropped before the answer, the request
/// leaves the queue, or the lease ends.
#[derive(Debug)]
pub(crate) struct PendingGrant {
    inbox: Inbox,
    answer: Option<oneshot::Receiver<Result<LeaseGrant, ApiError>>>,
}

impl PendingGrant {
    pub(super) fn new(inbox: &Inbox, answer: oneshot::Receiver<Result<LeaseGrant, ApiError>>) -> Self {
        Self { inbox: inbox.clone(), answer: Some(answer) }
    }

    /// Waits for the grant.
    ///
    /// # Errors
    /// If the request ends without a grant.
    pub(crate) async fn granted(mut self) -> Result<LeaseGrant, ApiError> {
        let Some(answer) = &mut self.answer else { return Err(stopping()) };
        let answer = answer.await;
        self.answer = None;
        answer.unwrap_or_else(|_| Err(stopping()))
    }
}

impl Drop for PendingGrant {
    fn drop(&mut self) {
        // If there was an answer, the client has got it.
        if self.answer.is_some() {
            let _the_lease_may_have_ended = self.inbox.send(LeaseCommand::ClientGone);
        }
    }
}

fn stopping() -> ApiError {
    ApiError::stopping("gpushd is stopping; if the request has an idempotency key, it keeps its place in the queue")
}
