//! What can go wrong between a client and the agent, in the API's own error shape.

use gpush_api::{ApiError, Code};

/// Which leg of the way failed. The [`ApiError`] beside it has the words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// No connection: nothing was asked.
    Connect,
    /// The connection ended before the answer: what was asked may have happened.
    Lost,
    /// No answer within the deadline: what was asked may still happen.
    TimedOut,
    /// What answers is not gpushd, or speaks another API.
    Foreign,
    /// gpushd answered with an error.
    Answer,
}

/// A failed request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Error {
    /// Which leg failed.
    pub kind: Kind,
    /// What to tell the user.
    pub error: Box<ApiError>,
}

impl Error {
    pub(crate) fn new(kind: Kind, error: ApiError) -> Self {
        Self { kind, error: Box::new(error) }
    }

    /// Code of the error.
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
