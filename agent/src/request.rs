//! What somebody asks that is done at once, and how it is recorded: who, why, and under which key.

use std::sync::Arc;

use gpush_api::{Actor, ApiError, Code, STOPPING, WhyRequest};
use gpush_store::{NewAudit, StoreError, Tx};

use crate::{
    agent::{Agent, Shared},
    caller::Caller,
    idempotency::{Header, Key},
};

/// Longest reason, in characters.
const LONGEST_REASON: usize = 500;

/// A request that changes a state.
#[derive(Debug, Clone)]
pub(crate) struct Request {
    /// Who.
    pub(crate) by: Actor,
    /// Why.
    pub(crate) reason: Option<String>,
    /// Under which its answer is kept.
    pub(crate) key: Option<Key>,
}

impl Request {
    /// Of a request to `path`, by an caller who wants to do `what`.
    ///
    /// # Errors
    /// When they may not, the reason is too long, or nothing can be recorded.
    pub(crate) async fn of(
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

    /// Of a request with another body, whose key is known.
    ///
    /// # Errors
    /// As [`Request::of`].
    pub(crate) async fn with(
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

    /// Carries it out to its end, unless it was under its key before: `None` then. Of those with the same
    /// key one at a time, so that who sends it again meanwhile waits for the first.
    ///
    /// # Errors
    /// When the key was used for another request; those of `work`.
    pub(crate) async fn once<T, F>(
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

    /// What is recorded beside the change: the answer under its key, and the audit trail.
    pub(crate) fn recorded(
        self,
        action: &'static str,
        object: String,
    ) -> impl FnMut(&mut Tx<'_>) -> Result<(), StoreError> + Send + 'static {
        self.recorded_with(action, object, serde_json::Map::new())
    }

    /// The same, with what was asked for.
    pub(crate) fn recorded_with(
        self,
        action: &'static str,
        object: String,
        mut what: serde_json::Map<String, serde_json::Value>,
    ) -> impl FnMut(&mut Tx<'_>) -> Result<(), StoreError> + Send + 'static {
        let Self { by, reason, key } = self;
        what.insert("reason".to_owned(), reason.into());
        let detail = serde_json::Value::Object(what);
        move |tx| {
            if let Some(key) = &key {
                key.keep_done(tx)?;
            }
            let audit = NewAudit {
                by: Some(by.clone()),
                action: action.to_owned(),
                object: object.clone(),
                result: "done".to_owned(),
                detail: detail.clone(),
            };
            tx.audit(audit).map(|_| ())
        }
    }
}

/// Refuses what would begin or change something while the agent is about to end.
///
/// # Errors
/// [`Code::Unavailable`] then.
pub(crate) fn not_stopping(agent: &Agent) -> Result<(), ApiError> {
    if !agent.stopping.is_cancelled() {
        return Ok(());
    }
    let still = agent.operations.unfinished();
    let mut error =
        ApiError::new(Code::Unavailable, format!("{STOPPING}: it begins nothing, and changes nothing else"));
    if still > 0 {
        error = error.cause(format!("it finishes {still} operations first: `gpushctl operation list`"));
    }
    Err(error.hint("ask again when it has started: `systemctl status gpushd`").retryable())
}

/// Carries something out to its end, whether or not whoever asked still waits for it.
///
/// # Errors
/// Its own.
pub(crate) async fn whole<T: Send + 'static>(
    agent: &Shared,
    work: impl Future<Output = Result<T, ApiError>> + Send + 'static,
) -> Result<T, ApiError> {
    not_stopping(agent)?;
    to_the_end(agent, work).await
}

/// The same, also while the agent is stopping.
///
/// # Errors
/// Its own.
pub(crate) async fn to_the_end<T: Send + 'static>(
    agent: &Shared,
    work: impl Future<Output = Result<T, ApiError>> + Send + 'static,
) -> Result<T, ApiError> {
    agent.tasks.spawn(work).await.unwrap_or_else(|error| {
        Err(ApiError::new(Code::Internal, "it broke off by a fault of gpushd")
            .cause(error.to_string())
            .hint("see the log of gpushd: `journalctl -u gpushd`"))
    })
}

/// A reason as it is recorded and shown.
///
/// # Errors
/// When it is too long.
pub(crate) fn reason(text: &str) -> Result<String, ApiError> {
    let shown = gpush_api::text::plain(text.trim());
    if shown.chars().count() > LONGEST_REASON {
        let message = format!("the reason is longer than {LONGEST_REASON} characters");
        return Err(ApiError::new(Code::BadRequest, message).hint("say it shorter"));
    }
    Ok(shown)
}
