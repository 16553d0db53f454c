//! Failures between a client and gpushd, in the API's error format.

use gpush_api::{ApiError, Code};

/// The kind of failure. The accompanying [`ApiError`] contains the message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// There is no connection. Nothing was sent.
    Connect,
    /// The connection ended before the answer. The request may have been executed.
    Lost,
    /// There was no answer within the deadline. The request may still be executed.
    TimedOut,
    /// The server is not gpushd, or has another API version.
    Foreign,
    /// gpushd answered with an error.
    Answer,
}

/// A failed request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Error {
    /// The kind of failure.
    pub kind: Kind,
    /// The message for the user.
    pub error: Box<ApiError>,
}

impl Error {
    pub(crate) fn new(kind: Kind, error: ApiError) -> Self {
        Self { kind, error: Box::new(error) }
    }

    pub(crate) fn with_cause(mut self, cause: String) -> Self {
        self.error.causes.push(cause);
        self
    }

    /// Returns the code of the error.
    #[must_use]
    pub fn code(&self) -> Code {
        self.error.code
    }
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.error.fmt(f)
    }
}

impl std::error::Error for Error {}

impl From<Error> for ApiError {
    fn from(error: Error) -> Self {
        *error.error
    }
}
