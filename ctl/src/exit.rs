//! Exit statuses, and errors that end a command (docs/exit-codes.md).

use gpush_api::{ApiError, Code};

/// Exit status if something is not as requested: a GPU does not have its layout (`mig apply --check`), or there are unleased
/// processes (`ps --unleased`).
pub(crate) const DIFFERS: u8 = 3;

/// Exit status of `gpushctl run` if it got no lease and so did not run the command.
pub(crate) const NO_COMMAND: u8 = 125;

/// Exit status of `gpushctl run` if the command exists but cannot be run.
pub(crate) const NOT_RUN: u8 = 126;

/// Exit status of `gpushctl run` if the command does not exist.
pub(crate) const NOT_FOUND: u8 = 127;

/// Exit status after Ctrl-C: 128 + SIGINT, as in a shell.
pub(crate) const INTERRUPTED: u8 = 130;

/// The reason why a command ends early.
#[derive(Debug)]
pub(crate) enum Failure {
    /// An error to print.
    Error(Box<ApiError>),
    /// The program that reads stdout has closed it, as in `gpushctl status | head -1`. gpushctl must print nothing
    /// more.
    BrokenPipe,
}

/// The exit status of a command that has printed its output, or why it has ended early.
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

/// Creates an error from a system error. `what` says what failed, on which object.
pub(crate) fn io(what: impl Into<String>, cause: &std::io::Error) -> ApiError {
    let code = match cause.kind() {
        std::io::ErrorKind::NotFound => Code::NotFound,
        std::io::ErrorKind::IsADirectory | std::io::ErrorKind::NotADirectory => Code::BadRequest,
        std::io::ErrorKind::PermissionDenied => Code::Denied,
        _ => Code::Internal,
    };
    ApiError::new(code, what).cause(cause.to_string())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// Returns the numbers in the first column of the rows of a Markdown table.
    fn statuses(page: &str, column: usize) -> BTreeSet<u8> {
        let rows = page.lines().filter_map(|line| line.strip_prefix("| "));
        let cells = rows.filter_map(|row| row.split('|').nth(column));
        cells.flat_map(|cell| cell.split(',')).filter_map(|number| number.trim().parse().ok()).collect()
    }

    #[test]
    fn page_of_exit_codes_has_each_status() {
        // A test of `gpush-api` compares this page with the code.
        let mut known = statuses(include_str!("../../docs/error-codes.md"), 2);
        known.extend([0, DIFFERS, NO_COMMAND, NOT_RUN, NOT_FOUND, INTERRUPTED]);
        assert!(known.len() > 10, "{known:?}");
        assert_eq!(statuses(include_str!("../../docs/exit-codes.md"), 0), known);
        // The help has two statuses on each line.
        let help = crate::args::help::FIRST_PAGE_NOTES;
        for status in known {
            assert!(help.contains(&format!(" {status} ")), "`gpushctl --help` lacks {status}");
        }
    }
}
