//! The one error shape of the API, its codes, and the exit status of each.

use serde::{Deserialize, Serialize};

/// What went wrong, for programs. Stable: codes are added, never renamed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum Code {
    /// The request itself is malformed.
    BadRequest,
    /// No GPU, operation, layout or path of that name.
    NotFound,
    /// The caller's uid may not do this.
    Denied,
    /// The profile does not exist on this GPU.
    UnknownProfile,
    /// The layout can't be on this GPU, however it is placed.
    LayoutImpossible,
    /// Processes, leases or instances that must stay are in the way.
    Blocked,
    /// Another operation has the GPU, or a rule of the config gives it to another mode.
    Conflict,
    /// A GPU is being reset. Until that is over, no GPU can be read or changed.
    Resetting,
    /// Somebody wanted it taken back.
    Cancelled,
    /// The part, its mode or its driver can't do this.
    Unsupported,
    /// The driver is not there, not loaded or of another version than its library.
    DriverUnavailable,
    /// A driver call failed.
    DriverError,
    /// A driver call did not return in time; it may still land.
    DriverTimeout,
    /// The GPU fell off the bus.
    GpuLost,
    /// The config file is wrong.
    ConfigInvalid,
    /// The agent is shutting down or not ready.
    Unavailable,
    /// Said by clients, never by the agent: nobody answers on the socket, or something that does
    /// not speak this API.
    Unreachable,
    /// Said by clients, never by the agent: no answer in time; what was asked for may still happen.
    TimedOut,
    /// A fault of ours.
    Internal,
}

impl Code {
    /// Process exit status of `gpushctl` for this code, as documented in `docs/exit-codes.md`.
    #[must_use]
    pub fn exit_status(self) -> u8 {
        match self {
            Self::BadRequest | Self::UnknownProfile | Self::LayoutImpossible | Self::ConfigInvalid => 2,
            Self::Blocked | Self::Conflict | Self::Resetting => 4,
            Self::Denied => 5,
            Self::Unavailable | Self::Unreachable => 6,
            Self::Unsupported => 7,
            Self::DriverTimeout | Self::TimedOut => 8,
            Self::NotFound => 2,
            Self::Cancelled | Self::DriverUnavailable | Self::DriverError | Self::GpuLost | Self::Internal => 1,
        }
    }

    /// HTTP status that carries it.
    #[must_use]
    pub fn http_status(self) -> u16 {
        match self {
            Self::BadRequest => 400,
            Self::Denied => 403,
            Self::NotFound => 404,
            Self::Blocked | Self::Conflict | Self::Resetting | Self::Cancelled => 409,
            Self::UnknownProfile | Self::LayoutImpossible | Self::Unsupported | Self::ConfigInvalid => 422,
            Self::Internal | Self::DriverError | Self::GpuLost => 500,
            Self::DriverUnavailable | Self::Unavailable | Self::Unreachable => 503,
            Self::DriverTimeout | Self::TimedOut => 504,
        }
    }
}

/// Every error of the API: what, why, and what to type next.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ApiError {
    /// For programs.
    pub code: Code,
    /// One sentence that names the object, without its causes.
    pub message: String,
    /// Causes, outermost first, none repeating the one before.
    #[serde(default)]
    pub causes: Vec<String>,
    /// Where several GPUs have each an error of their own: those, whole. The message says how many.
    #[serde(default, skip_serializing_if = "<[ApiError]>::is_empty")]
    #[cfg_attr(feature = "openapi", schema(value_type = Vec<ApiError>, no_recursion))]
    pub errors: Box<[ApiError]>,
    /// What stands for all that, where it is worth a word: that nothing was changed, or that it was
    /// put back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outcome: Option<String>,
    /// What to do next, often a command.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
    /// Whether the same request may succeed later without anybody's doing.
    #[serde(default)]
    pub retryable: bool,
}

/// How the refusals of an agent begin that is about to end. What it refused once it does not begin any
/// more: a client that asks the same one again need not doubt that.
pub const STOPPING: &str = "gpushd is stopping";

impl ApiError {
    /// An error without causes or hint.
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        let (causes, errors) = (Vec::new(), Box::default());
        Self { code, message: message.into(), causes, errors, outcome: None, hint: None, retryable: false }
    }

    /// Several errors as one. It is worth trying again only if each of them is, and its code is that of
    /// the first that is not.
    pub fn several(message: impl Into<String>, errors: Vec<Self>) -> Self {
        let lasting = errors.iter().find(|error| !error.retryable);
        let code = lasting.or(errors.first()).map_or(Code::Internal, |error| error.code);
        let retryable = lasting.is_none() && !errors.is_empty();
        Self { errors: errors.into(), retryable, ..Self::new(code, message) }
    }

    /// What went wrong and why, where there is room for sentences only: each error's causes behind its own
    /// message.
    #[must_use]
    pub fn sentences(&self) -> Vec<&str> {
        let own = std::iter::once(&self.message).chain(&self.causes).map(String::as_str);
        own.chain(self.errors.iter().flat_map(Self::sentences)).collect()
    }

    /// Adds what to do next.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Adds a cause.
    #[must_use]
    pub fn cause(mut self, cause: impl Into<String>) -> Self {
        self.causes.push(cause.into());
        self
    }

    /// Says what stands for all that.
    #[must_use]
    pub fn outcome(mut self, outcome: impl Into<String>) -> Self {
        self.outcome = Some(outcome.into());
        self
    }

    /// Marks it as worth trying again.
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
        // The message of serde lists every code that it accepts.
        let known = serde_json::from_str::<Code>("\"x\"").unwrap_err().to_string();
        assert_eq!(rows, known.matches('`').count() / 2 - 1, "{known}");
    }
}
