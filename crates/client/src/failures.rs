//! Failures of a connection as errors, for the client on a runtime and for the blocking client.

use std::{io, time::Duration};

use gpush_api::{ApiError, Code};
use jiff::{
    SignedDuration,
    fmt::friendly::{Spacing, SpanPrinter},
};

use crate::{
    error::{Error, Kind},
    explain,
    question::Question,
    socket::Socket,
};

/// Returns the error for a connection that could not be opened.
pub(crate) fn no_connection(socket: &Socket, cause: &io::Error) -> Error {
    Error::new(Kind::Connect, explain::explain(cause, &explain::gather_facts(socket)))
}

/// Returns the error for a connection that ended before the answer.
pub(crate) fn lost(socket: &Socket, question: &Question<'_>) -> Error {
    Error::new(Kind::Lost, explain::explain_lost(question, &explain::gather_facts(socket)))
}

/// Returns the error for an answer that did not come in time.
pub(crate) fn silent(socket: &Socket, question: &Question<'_>, deadline: Duration) -> Error {
    let at = socket.path.display();
    let text = format!("gpushd at {at} did not answer {question} in {}", rounded(deadline));
    let error = ApiError::new(Code::TimedOut, text);
    let error = error.hint(if question.key.is_some() {
        format!("gpushd may still carry out the request: check with {}", question.commands_showing_outcome())
    } else {
        let look = "`systemctl status gpushd` and `journalctl -u gpushd`";
        format!("set a longer --request-timeout, or find the cause with {look}")
    });
    Error::new(Kind::TimedOut, error.retryable())
}

/// Returns the error for an answer that is larger than `most` bytes.
pub(crate) fn too_long(socket: &Socket, question: &Question<'_>, most: usize) -> Error {
    let text = format!("the answer to {question} is larger than {} MiB", most >> 20);
    Error::new(Kind::Foreign, ApiError::new(Code::Unreachable, text).hint(who_listens(socket)))
}

/// Returns the error for a program that does not answer with HTTP, or not as gpushd does.
pub(crate) fn not_http(socket: &Socket) -> Error {
    let at = socket.path.display();
    Error::new(
        Kind::Foreign,
        ApiError::new(Code::Unreachable, format!("the program that answers at {at} is not gpushd"))
            .hint(who_listens(socket)),
    )
}

fn who_listens(socket: &Socket) -> String {
    format!(
        "run `ss -xlp src {}` to see which program listens there; use --socket to name gpushd's socket",
        socket.path.display()
    )
}

/// Formats a time limit in the notation of durations: `1m30s`. Rounds up to whole seconds, or to
/// hundredths of a second if the limit is less than a second.
fn rounded(limit: Duration) -> String {
    let hundredths = limit.as_millis().div_ceil(10);
    if hundredths < 100 {
        return format!("0.{}s", format!("{hundredths:02}").trim_end_matches('0'));
    }
    let seconds = i64::try_from(hundredths.div_ceil(100)).unwrap_or(i64::MAX);
    SpanPrinter::new().spacing(Spacing::None).duration_to_string(&SignedDuration::from_secs(seconds))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fault: an error named the time `in 19.999200465s`.
    #[test]
    fn time_limit_is_written_as_users_write_durations() {
        for (millis, text) in [(50, "0.05s"), (500, "0.5s"), (999, "1s"), (19_999, "20s"), (90_000, "1m30s")] {
            assert_eq!(rounded(Duration::from_millis(millis)), text);
        }
    }
}
