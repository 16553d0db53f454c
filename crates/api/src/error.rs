//! The error type of the API, its codes, and the exit status and HTTP status of each code.

use serde::{Deserialize, Serialize};

/// The kind of an error, for programs. Codes may be added, but are never renamed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum Code {
    /// The request is invalid.
    BadRequest,
    /// There is no GPU, operation, layout, file or path with that name.
    NotFound,
    /// The user does not have permission.
    Denied,
    /// The GPU has no profile with that name.
    UnknownProfile,
    /// The layout does not fit on this GPU with any placement.
    LayoutImpossible,
    /// The state of the GPU, or something that is in use, blocks the request.
    Blocked,
    /// Another operation uses the GPU, the GPU's rule has another mode, or another request changed
    /// the desired state.
    Conflict,
    /// A GPU is being reset. Until the reset ends, no GPU can be read or changed.
    Resetting,
    /// A user cancelled the operation.
    Cancelled,
    /// The GPU model, the GPU's mode or the driver does not support the request.
    Unsupported,
    /// The driver is missing, is not loaded, or has another version than its library.
    DriverUnavailable,
    /// A driver call failed.
    DriverError,
    /// A driver call did not return in time, and may still take effect.
    DriverTimeout,
    /// The GPU fell off the bus.
    GpuLost,
    /// The config file is invalid.
    ConfigInvalid,
    /// gpushd is starting, has reached a limit, or cannot record changes.
    Unavailable,
    /// gpushd is stopping. The request had no effect, so it can be repeated.
    Stopping,
    /// Reported only by clients: no program answers on the socket, or the program does not speak
    /// this API.
    Unreachable,
    /// An operation did not begin, or a lease was not granted, in the given time. If a client
    /// reports this code, gpushd did not answer in time, and the request may still take effect.
    TimedOut,
    /// A bug of gpush.
    Internal,
}

impl Code {
    /// Returns the exit status of `gpushctl` for this code, as documented in `docs/exit-codes.md`.
    #[must_use]
    pub fn exit_status(self) -> u8 {
        match self {
            Self::BadRequest | Self::UnknownProfile | Self::LayoutImpossible | Self::ConfigInvalid => 2,
            Self::Blocked | Self::Conflict | Self::Resetting => 4,
            Self::Denied => 5,
            Self::Unavailable | Self::Stopping | Self::Unreachable => 6,
            Self::Unsupported => 7,
            Self::DriverTimeout | Self::TimedOut => 8,
            Self::NotFound => 2,
            Self::Cancelled | Self::DriverUnavailable | Self::DriverError | Self::GpuLost | Self::Internal => 1,
        }
    }

    /// Returns the HTTP status for this code.
    #[must_use]
    pub fn http_status(self) -> u16 {
        match self {
            Self::BadRequest => 400,
            Self::Denied => 403,
            Self::NotFound => 404,
            Self::Blocked | Self::Conflict | Self::Resetting | Self::Cancelled => 409,
            Self::UnknownProfile | Self::LayoutImpossible | Self::Unsupported | Self::ConfigInvalid => 422,
            Self::Internal | Self::DriverError | Self::GpuLost => 500,
            Self::DriverUnavailable | Self::Unavailable | Self::Stopping | Self::Unreachable => 503,
            Self::DriverTimeout | Self::TimedOut => 504,
        }
    }
}

/// An error of the API: what failed, why, and what to do next.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ApiError {
    /// Kind of the error, for programs.
    pub code: Code,
    /// One sentence that names the object of the error, without the causes.
    pub message: String,
    /// Causes, outermost first. Each cause adds facts to the previous one.
    #[serde(default)]
    pub causes: Vec<String>,
    /// Complete errors, one for each GPU, if several GPUs of one request fail.
    #[serde(default, skip_serializing_if = "<[ApiError]>::is_empty")]
    #[cfg_attr(feature = "openapi", schema(value_type = Vec<ApiError>, no_recursion))]
    pub errors: Box<[ApiError]>,
    /// State after the error, if it matters: nothing was changed, or the change was rolled back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outcome: Option<String>,
    /// What to do next, often a command.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
    /// Kind of advice in the hint. Not sent: only the process that created the error knows it.
    #[serde(skip)]
    pub remedy: Option<Remedy>,
    /// Whether the same request may succeed later without further action.
    #[serde(default)]
    pub retryable: bool,
}

/// Kind of advice in a hint. When `gpushctl` plans without gpushd, it replaces hints that work only
/// with gpushd.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Remedy {
    /// Choose among the GPUs of the host.
    ChooseGpus,
    /// Choose among the GPUs that support MIG.
    ChooseMigGpus,
    /// Correct `devices` in a mig-parted file.
    CorrectDevices,
}

impl ApiError {
    /// Creates an error without causes or hint.
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        let (causes, errors) = (Vec::new(), Box::default());
        Self {
            code,
            message: message.into(),
            causes,
            errors,
            outcome: None,
            hint: None,
            remedy: None,
            retryable: false,
        }
    }

    /// Creates an error for a bug of gpushd.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(Code::Internal, message).hint("see the log of gpushd: `journalctl -u gpushd`")
    }

    /// Combines several errors. The result is retryable only if every error is retryable. Its code
    /// is the code of the first error that is not retryable; if there is none, the code of the
    /// first error.
    pub fn several(message: impl Into<String>, errors: Vec<Self>) -> Self {
        let lasting = errors.iter().find(|error| !error.retryable);
        let code = lasting.or(errors.first()).map_or(Code::Internal, |error| error.code);
        let retryable = lasting.is_none() && !errors.is_empty();
        Self { errors: errors.into(), retryable, ..Self::new(code, message) }
    }

    /// Returns all sentences: each message, followed by its causes.
    #[must_use]
    pub fn sentences(&self) -> Vec<&str> {
        let own = std::iter::once(&self.message).chain(&self.causes).map(String::as_str);
        own.chain(self.errors.iter().flat_map(Self::sentences)).collect()
    }

    /// Creates the error for a request that gpushd did not execute because it is stopping.
    pub fn stopping(message: impl Into<String>) -> Self {
        Self::new(Code::Stopping, message).retryable()
    }

    /// Adds a hint.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        (self.hint, self.remedy) = (Some(hint.into()), None);
        self
    }

    /// Adds a hint and its kind of advice.
    #[must_use]
    pub fn remedy(mut self, remedy: Remedy, hint: impl Into<String>) -> Self {
        (self.hint, self.remedy) = (Some(hint.into()), Some(remedy));
        self
    }

    /// Adds a cause.
    #[must_use]
    pub fn cause(mut self, cause: impl Into<String>) -> Self {
        self.causes.push(cause.into());
        self
    }

    /// Replaces the message. The previous message becomes the first cause.
    #[must_use]
    pub fn context(mut self, message: impl Into<String>) -> Self {
        self.causes.insert(0, std::mem::replace(&mut self.message, message.into()));
        self
    }

    /// Sets the state after the error.
    #[must_use]
    pub fn outcome(mut self, outcome: impl Into<String>) -> Self {
        self.outcome = Some(outcome.into());
        self
    }

    /// Returns whether the cause of a refusal may disappear, for example when an operation ends or
    /// an instance becomes idle. A request that is allowed to wait is queued after such an error.
    #[must_use]
    pub fn is_temporary(&self) -> bool {
        self.retryable && matches!(self.code, Code::Blocked | Code::Conflict | Code::Resetting)
    }

    /// Marks the error as retryable.
    #[must_use]
    pub fn retryable(mut self) -> Self {
        self.retryable = true;
        self
    }
}

impl std::fmt::Display for ApiError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for ApiError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_errors_are_as_lasting_as_the_most_lasting_of_them() {
        let blocked = ApiError::new(Code::Blocked, "GPU 0 is in use").cause("by pid 7").retryable();
        let conflict = ApiError::new(Code::Conflict, "GPU 1 is another's").retryable();
        let never = ApiError::new(Code::UnknownProfile, "GPU 2 has no such profile");
        let two = ApiError::several("2 refuse", vec![blocked.clone(), conflict.clone()]);
        assert_eq!((two.code, two.retryable), (Code::Blocked, true));
        assert_eq!(two.sentences(), ["2 refuse", "GPU 0 is in use", "by pid 7", "GPU 1 is another's"]);
        let three = ApiError::several("3 refuse", vec![blocked, conflict, never]);
        assert_eq!((three.code, three.retryable), (Code::UnknownProfile, false));
    }

    #[test]
    fn context_keeps_the_message_as_the_first_cause() {
        let error = ApiError::new(Code::Blocked, "in use").cause("by pid 7").hint("wait").retryable();
        let outer = error.clone().context("GPU 0 cannot be reset");
        assert_eq!(outer.sentences(), ["GPU 0 cannot be reset", "in use", "by pid 7"]);
        assert_eq!((outer.code, outer.hint, outer.retryable), (error.code, error.hint, true));
    }

    #[test]
    fn the_page_of_error_codes_has_each_with_its_statuses() {
        let page = include_str!("../../../docs/error-codes.md");
        let mut rows = 0;
        for row in page.lines().filter_map(|line| line.strip_prefix("| `")) {
            let cells: Vec<&str> = row.split('|').map(str::trim).collect();
            let [code, http, exit, _, way_out, ..] = cells[..] else { continue };
            let name = code.trim_end_matches('`');
            let code: Code = serde_json::from_value(name.into()).unwrap_or_else(|_| panic!("{name} is no code"));
            assert_eq!((http, exit), (&*code.http_status().to_string(), &*code.exit_status().to_string()), "{name}");
            assert!(!way_out.is_empty(), "{name}");
            rows += 1;
        }
        // The error message of serde lists every accepted code.
        let known = serde_json::from_str::<Code>("\"x\"").unwrap_err().to_string();
        assert_eq!(rows, known.matches('`').count() / 2 - 1, "{known}");
    }
}
