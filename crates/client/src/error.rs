//! Failures between a client and the agent, in the API's error format.

use gpush_api::{ApiError, Code};

/// The stage that failed. The [`ApiError`] with it has the message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// No connection: nothing was sent.
    Connect,
    /// The connection ended before the answer: the request may have been executed.
    Lost,
    /// No answer within the deadline: the request may still be executed.
    TimedOut,
    /// The server is not gpushd, or speaks another API.
    Foreign,
    /// gpushd answered with an error.
    Answer,
}

/// A failed request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Error {
    /// The stage that failed.
    pub kind: Kind,
    /// The message for the user.
    pub error: Box<ApiError>,
}

impl Error {
    pub(crate) fn new(kind: Kind, error: ApiError) -> Self {
        Self { kind, error: Box::new(error) }
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
