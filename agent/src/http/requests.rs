//! Taking requests that change a state, and carrying them out whether or not their caller is still there.

use std::sync::Arc;

use gpush_api::{ApiError, Code, WhyRequest};

use crate::{
    agent::Shared,
    caller::Caller,
    idempotency::{Header, Key},
    request::{Request, reason},
};

impl Request {
    /// Takes a request to `path`, by a caller who wants to do `what`.
    ///
    /// # Errors
    /// When the caller may not, the reason is too long, or nothing can be recorded.
    pub(super) async fn of(
        agent: &Shared,
        caller: &Caller,
        what: &str,
        header: Header,
        path: &str,
        why: WhyRequest,
    ) -> Result<Self, ApiError> {
        let key = header.of(caller.peer.uid, path, &why);
        Self::with(agent, caller, what, key, why.reason.as_deref()).await
    }

    /// Takes a request with another body, whose key is known.
    ///
    /// # Errors
    /// As [`Request::of`].
    pub(super) async fn with(
        agent: &Shared,
        caller: &Caller,
        what: &str,
        key: Option<Key>,
        why: Option<&str>,
    ) -> Result<Self, ApiError> {
        let user = agent.users.user(caller.peer.uid).await;
        if !caller.viewer.is_admin() {
            return Err(caller.denied(what, user.as_deref(), &agent.settings.config().access));
        }
        if let Some(why) = &agent.read_only {
            return Err(why.clone());
        }
        let reason = why.map(reason).transpose()?.filter(|reason| !reason.is_empty());
        Ok(Self { by: caller.actor(user), reason, key })
    }

    /// Carries it out to its end, unless that was done under its key before: `None` then. Requests with the same key run
    /// one at a time, so that one that is sent again meanwhile waits for the first.
    ///
    /// # Errors
    /// When the key was used for another request; those of `work`.
    pub(super) async fn once<T, F>(
        self,
        agent: &Shared,
        work: impl FnOnce(Shared, Self) -> F + Send + 'static,
    ) -> Result<Option<T>, ApiError>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, ApiError>> + Send,
    {
        let shared = Arc::clone(agent);
        let once = async move {
            let Some(key) = self.key.clone() else { return work(shared, self).await.map(Some) };
            let _lock = shared.idempotency.lock(&key).await;
            if shared.idempotency.is_done(&key).await? {
                return Ok(None);
            }
            work(shared, self).await.map(Some)
        };
        whole(agent, once).await
    }
}

/// Carries work out to its end, whether or not the caller still waits for it.
///
/// # Errors
/// Its own.
pub(super) async fn whole<T: Send + 'static>(
    agent: &Shared,
    work: impl Future<Output = Result<T, ApiError>> + Send + 'static,
) -> Result<T, ApiError> {
    agent.operations.not_stopping(&agent.stopping)?;
    to_the_end(agent, work).await
}

/// The same, also while gpushd is stopping.
///
/// # Errors
/// Its own.
pub(super) async fn to_the_end<T: Send + 'static>(
    agent: &Shared,
    work: impl Future<Output = Result<T, ApiError>> + Send + 'static,
) -> Result<T, ApiError> {
    agent.tasks.spawn(work).await.unwrap_or_else(|error| {
        Err(ApiError::new(Code::Internal, "it broke off by a fault of gpushd")
            .cause(error.to_string())
            .hint("see the log of gpushd: `journalctl -u gpushd`"))
    })
}
