//! Why an MPS target serves no clients.

use gpush_api::ApiError;

/// Why a target serves no clients. Each variant contains the error for users.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NotServing {
    /// The daemon may serve clients later without further action: for example, it is starting, or has clients of another
    /// user.
    ForNow(Box<ApiError>),
    /// The target serves no clients until an administrator changes something.
    Lasting(Box<ApiError>),
}

impl NotServing {
    /// Creates a refusal that may end without further action.
    #[must_use]
    pub fn for_now(error: ApiError) -> Self {
        Self::ForNow(Box::new(error))
    }

    /// Creates a refusal that an administrator must end.
    #[must_use]
    pub fn lasting(error: ApiError) -> Self {
        Self::Lasting(Box::new(error))
    }

    /// Returns the error for users.
    #[must_use]
    pub fn error(&self) -> &ApiError {
        match self {
            Self::ForNow(error) | Self::Lasting(error) => error,
        }
    }
}

impl From<NotServing> for ApiError {
    fn from(why: NotServing) -> Self {
        match why {
            NotServing::ForNow(error) => (*error).retryable(),
            NotServing::Lasting(error) => *error,
        }
    }
}
