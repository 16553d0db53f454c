//! Values of options: spans, times, numbers, and what is said of those that can't be.

use gpush_api::EventKind;
use jiff::Timestamp;

/// Records of the audit trail that are shown when nothing is said.
pub(crate) const AUDIT_USUALLY: usize = 50;

/// Seconds that stand for no end of waiting: the most that the agent takes.
pub(super) const LONGEST_WAIT: &str = "2592000";

/// How long an operation may wait.
pub(super) fn wait_seconds(text: &str) -> Result<u64, String> {
    match text.parse() {
        Ok(s) if s <= 30 * 86_400 => Ok(s),
        Ok(_) | Err(_) => Err("whole seconds from 0 to 2592000 (30 days) are meant".to_owned()),
    }
}

/// A time to wait, which may be none at all.
pub(super) fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(s) if s.is_finite() && (0.0..=86_400.0).contains(&s) => Ok(s),
        Ok(_) | Err(_) => Err("seconds from 0 to 86400 are meant".to_owned()),
    }
}

/// A time in which an answer can come.
pub(super) fn some_seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(s) if s > 0.0 && s <= 86_400.0 => Ok(s),
        Ok(_) | Err(_) => Err("seconds above 0, up to 86400, are meant".to_owned()),
    }
}

pub(super) fn some_number(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(number) if number > 0 => Ok(number),
        Ok(_) | Err(_) => Err("a number above 0 is meant".to_owned()),
    }
}

pub(super) fn some_records(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(number) if (1..=1000).contains(&number) => Ok(number),
        Ok(_) | Err(_) => Err("a number from 1 to 1000 is meant; --since shows all since then".to_owned()),
    }
}

/// Most lines of a log that are asked for.
pub(crate) const MOST_LINES: usize = 1000;

pub(super) fn some_lines(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(number) if (1..=MOST_LINES).contains(&number) => Ok(number),
        Ok(_) | Err(_) => Err(format!("a number from 1 to {MOST_LINES} is meant")),
    }
}

/// A process id.
pub(super) fn pid(text: &str) -> Result<u32, String> {
    match text.parse() {
        Ok(pid) if pid > 1 && i32::try_from(pid).is_ok() => Ok(pid),
        Ok(_) | Err(_) => Err("the id of a process other than 1 is meant".to_owned()),
    }
}

/// How long, in seconds: `90s`, `30m`, `1h30m`.
pub(super) fn span_seconds(text: &str) -> Result<u64, String> {
    let span = crate::expiry::span(text.trim()).and_then(|span| u64::try_from(span.as_secs()).ok());
    match span {
        Some(seconds) if (1..=LONGEST_SPAN).contains(&seconds) => Ok(seconds),
        Some(0) => Err("that is no time at all".to_owned()),
        Some(_) => Err("at most 52w are meant".to_owned()),
        None => Err("a span such as 90s, 30m, 2h or 7d is meant".to_owned()),
    }
}

/// Longest span that anything lasts.
const LONGEST_SPAN: u64 = 52 * 604_800;

pub(super) fn kind(text: &str) -> Result<EventKind, String> {
    let named = EventKind::ALL.into_iter().find(|kind| kind.name() == text);
    named.ok_or_else(|| {
        let names: Vec<&str> = EventKind::ALL.iter().map(|kind| kind.name()).collect();
        format!("one of {} is meant", names.join(", "))
    })
}

/// A point in time, as it is typed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Since {
    /// Then.
    At(Timestamp),
    /// So many seconds ago.
    Ago(i64),
}

impl Since {
    /// The time, told at `now`.
    pub(crate) fn before(self, now: Timestamp) -> Timestamp {
        match self {
            Self::At(then) => then,
            Self::Ago(seconds) => now.checked_sub(jiff::SignedDuration::from_secs(seconds)).unwrap_or(Timestamp::MIN),
        }
    }
}

pub(super) fn since(text: &str) -> Result<Since, String> {
    if let Ok(then) = text.parse::<Timestamp>() {
        return Ok(Since::At(then));
    }
    if let Ok(local) = text.parse::<jiff::civil::DateTime>() {
        let zoned = local.to_zoned(jiff::tz::TimeZone::system()).map_err(|error| error.to_string())?;
        return Ok(Since::At(zoned.timestamp()));
    }
    let ago = text.char_indices().next_back().and_then(|(last, unit)| {
        let seconds = match unit {
            's' => 1,
            'm' => 60,
            'h' => 3600,
            'd' => 86_400,
            _ => return None,
        };
        Some(Since::Ago(i64::from(text[..last].parse::<u32>().ok()?) * seconds))
    });
    ago.ok_or_else(|| "a time such as 2026-01-31T08:00 or a span such as 30m, 12h, 7d is meant".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_have_units() {
        assert_eq!((span_seconds("90s"), span_seconds("1h30m")), (Ok(90), Ok(5400)));
        for wrong in ["", "0s", "90", "-1m", "1.5h", "53w", "soon"] {
            assert!(span_seconds(wrong).is_err(), "{wrong}");
        }
        assert!(pid("4123").is_ok());
        for wrong in ["0", "1", "-7", "4294967295", "x"] {
            assert!(pid(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_time_is_typed_as_one_or_as_a_span() {
        let now: Timestamp = "2026-01-31T12:00:00Z".parse().unwrap();
        let at = |text: &str| since(text).map(|since| since.before(now).to_string());
        assert_eq!(at("30m").as_deref(), Ok("2026-01-31T11:30:00Z"));
        assert_eq!(at("7d").as_deref(), Ok("2026-01-24T12:00:00Z"));
        assert_eq!(at("2026-01-30T00:00:01Z").as_deref(), Ok("2026-01-30T00:00:01Z"));
        assert!(since("2026-01-30").is_ok() && since("2026-01-30T08:00").is_ok());
        for wrong in ["", "d", "7", "-7d", "7w", "ü", "yesterday"] {
            assert!(since(wrong).is_err(), "{wrong}");
        }
    }
}
