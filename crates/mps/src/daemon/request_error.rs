//! Why the supervisor task of a daemon did not execute a request.

use gpush_api::ApiError;
use gpush_core::mps::NotServing;

/// The refusal or failure of a request to a supervisor task. Each variant contains the error for users.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RequestError {
    /// A client is connected, or gpushd does not know whether a client is connected. The daemon is unchanged.
    InUse(ApiError),
    /// The same request may succeed later: clients of another user are connected, or the daemon did not start.
    NotYet(ApiError),
    /// The request failed.
    Failed(ApiError),
}

impl From<RequestError> for ApiError {
    fn from(error: RequestError) -> Self {
        match error {
            RequestError::InUse(error) | RequestError::NotYet(error) | RequestError::Failed(error) => error,
        }
    }
}

impl From<RequestError> for NotServing {
    fn from(error: RequestError) -> Self {
        match error {
            RequestError::InUse(error) | RequestError::NotYet(error) => Self::for_now(error),
            RequestError::Failed(error) => Self::lasting(error),
        }
    }
}

impl std::fmt::Display for RequestError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::InUse(error) | Self::NotYet(error) | Self::Failed(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for RequestError {}
