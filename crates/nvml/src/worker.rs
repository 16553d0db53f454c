//! The child's side: `gpushd driver-worker`.

use std::process::ExitCode;

/// Runs the worker on the socket that is its standard input, until the parent closes it.
#[must_use]
pub fn main() -> ExitCode {
    ExitCode::FAILURE
}
