//! One request to gpushd, before it is sent.

use std::time::Duration;

use gpush_api::{ApiError, Code};
use http_body_util::Full;
use hyper::{Request, body::Bytes, header};

use crate::error::{Error, Kind};

/// How long the client repeats an unanswered change. A restart of gpushd takes less time.
pub(crate) const RETRY_FOR: Duration = Duration::from_secs(5);

/// How long the client repeats a request that may wait in a queue. The next gpushd keeps the
/// request's place in the queue for this long.
pub(crate) const RETRY_QUEUED_FOR: Duration = Duration::from_secs(30);

/// Content type of requests, and of most answers.
pub(crate) const JSON: &str = "application/json";

#[derive(Debug, Clone)]
pub(crate) struct Question<'a> {
    /// `GET`, `POST` or `DELETE`.
    pub(crate) method: &'static str,
    /// Path and parameters.
    pub(crate) path: &'a str,
    /// Accepted content types.
    pub(crate) accept: &'a str,
    /// JSON; empty for a request without a body.
    pub(crate) body: Bytes,
    /// The idempotency key of a change. If a request with a key gets no answer, its outcome is
    /// uncertain.
    pub(crate) key: Option<String>,
    /// How long the client repeats a change while no gpushd answers.
    pub(crate) away: Duration,
    /// Whether the caller did not request a wait, so that a slow answer is unexpected.
    pub(crate) reports_slow: bool,
}

impl<'a> Question<'a> {
    pub(crate) fn get(path: &'a str) -> Self {
        Self { method: "GET", path, accept: JSON, body: Bytes::new(), key: None, away: RETRY_FOR, reports_slow: true }
    }

    /// Requests this content type instead of JSON.
    pub(crate) fn accepting(self, accept: &'a str) -> Self {
        Self { accept, ..self }
    }

    /// Returns the commands that show whether an unanswered change was executed.
    pub(crate) fn commands_showing_outcome(&self) -> &'static str {
        if self.path.starts_with("/v1/mps/") {
            "`gpushctl mps list` and `gpushctl mps show TARGET`"
        } else if self.path.starts_with("/v1/leases") {
            "`gpushctl lease list`"
        } else {
            "`gpushctl operation list` and `gpushctl status`"
        }
    }

    /// Returns the request as HTTP.
    ///
    /// # Errors
    /// If the path or a header cannot be written as HTTP.
    pub(crate) fn request(&self) -> Result<Request<Full<Bytes>>, Error> {
        let mut request = Request::builder()
            .method(self.method)
            .uri(self.path)
            .header(header::HOST, "localhost")
            .header(header::ACCEPT, self.accept)
            .header(header::CONTENT_TYPE, JSON);
        if let Some(key) = &self.key {
            request = request.header("idempotency-key", key);
        }
        request.body(Full::new(self.body.clone())).map_err(|e| {
            let error = ApiError::new(Code::Internal, "cannot write the request as HTTP");
            Error::new(Kind::Connect, error.cause(e.to_string()))
        })
    }
}

impl std::fmt::Display for Question<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}", self.method, self.path)
    }
}
