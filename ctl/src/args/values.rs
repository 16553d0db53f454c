//! Parsers of option values: durations, times, numbers and ids.

use std::{str::FromStr, time::Duration};

use gpush_api::{EventKind, LeaseId};
use gpush_core::duration::{self as core, DurationError};
use jiff::Timestamp;

/// Number of records that `audit` shows if neither `--since` nor `-n` is given.
pub(crate) const AUDIT_USUALLY: usize = 50;

/// The duration that `--wait` means without a value: the maximum that gpushd accepts.
pub(super) const LONGEST_WAIT: &str = "30d";

/// Maximum number of ended leases that one request can return.
const MOST_ENDED: usize = 100_000;

/// Maximum number of lines of each log that one request can return.
pub(crate) const MOST_LINES: usize = 1000;

fn text(error: &DurationError) -> String {
    error.to_string()
}

/// Parses a duration longer than zero.
pub(super) fn duration(text_: &str) -> Result<Duration, String> {
    core::parse_positive(text_).map_err(|error| text(&error))
}

/// Parses a duration; zero is allowed.
pub(super) fn duration_or_zero(text_: &str) -> Result<Duration, String> {
    core::parse(text_).map_err(|error| text(&error))
}

/// Parses a duration of at least one second. Returns whole seconds.
pub(super) fn whole_seconds(text_: &str) -> Result<u64, String> {
    let duration = duration(text_)?;
    if duration.as_secs() == 0 { Err("the duration must be 1s or longer".to_owned()) } else { Ok(duration.as_secs()) }
}

/// Parses a duration; zero is allowed. Returns whole seconds.
pub(super) fn whole_seconds_or_zero(text_: &str) -> Result<u64, String> {
    duration_or_zero(text_).map(|duration| duration.as_secs())
}

/// Parses the maximum time that an operation may wait in the queue. Returns seconds; zero is
/// allowed.
pub(super) fn wait(text_: &str) -> Result<u64, String> {
    let seconds = core::parse(text_).map_err(|error| text(&error))?.as_secs();
    if seconds > 30 * 86_400 { Err("the duration must be 30d or less".to_owned()) } else { Ok(seconds) }
}

/// Parses the time at which an override expires.
pub(super) fn expiry(text_: &str) -> Result<Timestamp, String> {
    core::parse_end(text_, &core::now()).map_err(|error| or_a_time(error, "18:00, tomorrow or 2026-12-01T08:00"))
}

/// Parses the time after which records or events are listed.
pub(super) fn since(text_: &str) -> Result<Timestamp, String> {
    core::parse_start(text_, &core::now()).map_err(|error| or_a_time(error, "09:00, yesterday or 2026-01-31T08:00"))
}

fn or_a_time(error: DurationError, example: &str) -> String {
    match error {
        DurationError::Malformed => format!("write a duration such as 30m, 1h30m or 7d, or a time such as {example}"),
        other => other.to_string(),
    }
}

fn number_from_1(text: &str, most: usize) -> Option<usize> {
    text.parse().ok().filter(|number| (1..=most).contains(number))
}

pub(super) fn some_number(text: &str) -> Result<usize, String> {
    number_from_1(text, usize::MAX).ok_or_else(|| "write a number of 1 or more".to_owned())
}

pub(super) fn some_records(text: &str) -> Result<usize, String> {
    let error = || "write a number from 1 to 1000; to see all records from a time on, use `--since TIME`".to_owned();
    number_from_1(text, 1000).ok_or_else(error)
}

/// Parses a number of ended leases.
pub(super) fn some_ended(text: &str) -> Result<usize, String> {
    number_from_1(text, MOST_ENDED).ok_or_else(|| format!("write a number from 1 to {MOST_ENDED}"))
}

pub(super) fn some_lines(text: &str) -> Result<usize, String> {
    number_from_1(text, MOST_LINES).ok_or_else(|| format!("write a number from 1 to {MOST_LINES}"))
}

/// Parses a process id.
pub(super) fn pid(text: &str) -> Result<u32, String> {
    match u32::from_str(text) {
        Ok(pid) if pid > 1 && i32::try_from(pid).is_ok() => Ok(pid),
        Ok(_) | Err(_) => Err("write the id of a process other than 1".to_owned()),
    }
}

/// Parses a lease id: `L17`, or `17` for short.
pub(super) fn lease(text: &str) -> Result<LeaseId, String> {
    let is_number = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    let id = if is_number { format!("L{text}") } else { text.to_owned() };
    id.parse().map_err(|error: gpush_api::NotALeaseId| error.to_string())
}

/// Parses an operation id: `op-17`, or `17` for short.
#[expect(clippy::unnecessary_wraps, reason = "the signature of a clap parser")]
pub(super) fn operation(text: &str) -> Result<String, String> {
    let is_number = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    Ok(if is_number { format!("op-{text}") } else { text.to_owned() })
}

pub(super) fn kind(text: &str) -> Result<EventKind, String> {
    EventKind::named(text).ok_or_else(|| format!("write one of {}", EventKind::names()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lease_and_operation_need_no_prefix() {
        assert_eq!([lease("17"), lease("L17"), lease("l17")], [Ok(LeaseId(17)), Ok(LeaseId(17)), Ok(LeaseId(17))]);
        assert_eq!(operation("17"), Ok("op-17".to_owned()));
        assert!(lease("0").is_err() && lease("").is_err() && lease("op-17").is_err());
    }

    #[test]
    fn duration_under_one_second_is_refused() {
        assert_eq!((whole_seconds("90s"), whole_seconds("1h30m")), (Ok(90), Ok(5400)));
        for wrong in ["", "0s", "0.5s", "90", "-1m", "53w", "soon"] {
            assert!(whole_seconds(wrong).is_err(), "{wrong}");
        }
        assert_eq!((wait("0"), wait(LONGEST_WAIT)), (Ok(0), Ok(2_592_000)));
        assert!(wait("31d").is_err());
    }

    #[test]
    fn ids_of_processes_and_operations_are_checked() {
        assert!(pid("4123").is_ok());
        for wrong in ["0", "1", "-7", "4294967295", "x"] {
            assert!(pid(wrong).is_err(), "{wrong}");
        }
        assert_eq!((operation("2"), operation("op-2")), (Ok("op-2".to_owned()), Ok("op-2".to_owned())));
        assert_eq!(operation("x2"), Ok("x2".to_owned()));
    }
}
