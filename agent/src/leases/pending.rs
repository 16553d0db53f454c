//! A client that waits for its lease.

use gpush_api::{ApiError, LeaseGrant};
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use super::{
    Leases,
    actor::{Inbox, LeaseCommand},
};

/// A client that waits for its lease. If this value is dropped before the answer, the request
/// leaves the queue, or the lease ends.
#[derive(Debug)]
pub(crate) struct PendingGrant {
    inbox: Inbox,
    answer: Option<oneshot::Receiver<Result<LeaseGrant, ApiError>>>,
    /// Cancelled when gpushd stops.
    stopping: CancellationToken,
}

impl PendingGrant {
    pub(super) fn new(leases: &Leases, inbox: &Inbox, answer: oneshot::Receiver<Result<LeaseGrant, ApiError>>) -> Self {
        Self { inbox: inbox.clone(), answer: Some(answer), stopping: leases.handles.context.stopping.clone() }
    }

    /// Waits for the grant.
    ///
    /// # Errors
    /// If the request ends without a grant.
    pub(crate) async fn granted(mut self) -> Result<LeaseGrant, ApiError> {
        let Some(answer) = &mut self.answer else { return Err(unanswered(&self.stopping)) };
        let answer = answer.await;
        self.answer = None;
        answer.unwrap_or_else(|_| Err(unanswered(&self.stopping)))
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

/// Returns the error for a request whose task has ended without an answer.
pub(super) fn unanswered(stopping: &CancellationToken) -> ApiError {
    if stopping.is_cancelled() {
        return ApiError::stopping(
            "gpushd is stopping; if the request has an idempotency key, it keeps its place in the queue",
        );
    }
    ApiError::internal(
        "the task of the lease has failed; gpushd ends the lease, unless the request has an idempotency key",
    )
}

#[cfg(test)]
mod tests {
    use tokio::sync::mpsc::UnboundedReceiver;

    use super::*;

    type Answer = oneshot::Sender<Result<LeaseGrant, ApiError>>;

    fn pending() -> (PendingGrant, Answer, UnboundedReceiver<LeaseCommand>, CancellationToken) {
        let ((inbox, commands), (answer, receiver)) = (Inbox::new(), oneshot::channel());
        let stopping = CancellationToken::new();
        (PendingGrant { inbox, answer: Some(receiver), stopping: stopping.clone() }, answer, commands, stopping)
    }

    #[test]
    fn lease_learns_that_its_client_is_gone() {
        let (waiting, answer, mut commands, _) = pending();
        assert!(commands.try_recv().is_err());
        drop(waiting);
        assert!(matches!(commands.try_recv(), Ok(LeaseCommand::ClientGone)) && answer.is_closed());
    }

    #[tokio::test]
    async fn answered_client_is_not_reported_as_gone() {
        let (waiting, answer, mut commands, _) = pending();
        let refused = ApiError::new(gpush_api::Code::TimedOut, "too late");
        answer.send(Err(refused.clone())).unwrap();
        assert_eq!(waiting.granted().await.unwrap_err(), refused);
        assert!(commands.try_recv().is_err());
    }

    /// Fault: if the task of a lease failed, gpushd answered the client that it was stopping.
    #[tokio::test]
    async fn missing_answer_means_stopping_only_if_gpushd_stops() {
        for (stops, code) in [(false, gpush_api::Code::Internal), (true, gpush_api::Code::Stopping)] {
            let (waiting, answer, _commands, stopping) = pending();
            if stops {
                stopping.cancel();
            }
            drop(answer);
            assert_eq!(waiting.granted().await.unwrap_err().code, code);
        }
    }
}
