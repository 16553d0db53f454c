//! Exit statuses, and errors that end a command (docs/exit-codes.md).

use std::process::ExitCode;

use gpush_api::{ApiError, Code};

use crate::output::Output;

/// The actual state differs from the requested one (`mig assert`), or there are findings such as unleased processes
/// (`process list --unleased`).
pub(crate) const DIFFERS: u8 = 3;

/// `run`: there is no lease, so the command did not run.
pub(crate) const NO_COMMAND: u8 = 125;

/// `run`: the command exists but cannot be run.
pub(crate) const NOT_RUN: u8 = 126;

/// `run`: the command does not exist.
pub(crate) const NOT_FOUND: u8 = 127;

/// Interrupted by Ctrl-C: 128 + SIGINT, as in a shell.
pub(crate) const INTERRUPTED: u8 = 130;

/// The reason why a command ends early.
#[derive(Debug)]
pub(crate) enum Failure {
    /// An error to print.
    Error(Box<ApiError>),
    /// The reader of stdout has closed it, as in `gpushctl status | head -1`. gpushctl prints
    /// nothing more.
    BrokenPipe,
}

/// The end of a command. The exit status is returned after all output was printed.
pub(crate) type Outcome = Result<u8, Failure>;

impl From<ApiError> for Failure {
    fn from(error: ApiError) -> Self {
        Self::Error(Box::new(error))
    }
}

impl From<gpush_client::Error> for Failure {
    fn from(error: gpush_client::Error) -> Self {
        Self::Error(error.error)
    }
}

/// Converts a system error. `what` names the failed action and its object.
pub(crate) fn io(what: impl Into<String>, cause: &std::io::Error) -> ApiError {
    let code = match cause.kind() {
        std::io::ErrorKind::NotFound => Code::NotFound,
        std::io::ErrorKind::IsADirectory | std::io::ErrorKind::NotADirectory => Code::BadRequest,
        std::io::ErrorKind::PermissionDenied => Code::Denied,
        _ => Code::Internal,
    };
    ApiError::new(code, what).cause(cause.to_string())
}

/// Prints the error, if any, and returns the exit status of the process.
pub(crate) fn finish(outcome: Outcome, out: &Output) -> ExitCode {
    match outcome {
        Ok(status) => ExitCode::from(status),
        Err(Failure::BrokenPipe) => ExitCode::SUCCESS,
        Err(Failure::Error(error)) => {
            out.error(&error);
            ExitCode::from(error.code.exit_status())
        }
    }
}
