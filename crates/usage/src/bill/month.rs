//! Calendar months in UTC.

use std::{fmt, str::FromStr};

use jiff::{ToSpan, civil::Date, tz::TimeZone};

/// A calendar month.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Month {
    first: Date,
}

/// Error: the text is not a month.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BadMonth;

impl fmt::Display for BadMonth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("write the month as in 2026-11")
    }
}

impl std::error::Error for BadMonth {}

impl FromStr for Month {
    type Err = BadMonth;

    fn from_str(text: &str) -> Result<Self, BadMonth> {
        let (year, month) = text.split_once('-').ok_or(BadMonth)?;
        let is_number = |part: &str, digits| part.len() == digits && part.bytes().all(|byte| byte.is_ascii_digit());
        if !is_number(year, 4) || !is_number(month, 2) {
            return Err(BadMonth);
        }
        let (year, month) = (year.parse().map_err(|_| BadMonth)?, month.parse().map_err(|_| BadMonth)?);
        Ok(Self { first: Date::new(year, month, 1).map_err(|_| BadMonth)? })
    }
}

impl fmt::Display for Month {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04}-{:02}", self.first.year(), self.first.month())
    }
}

impl Month {
    /// Returns the start, in ms since 1970.
    #[must_use]
    pub fn start_ms(self) -> i64 {
        start_ms(self.first)
    }

    /// Returns the start of the next month, in ms since 1970.
    #[must_use]
    pub fn end_ms(self) -> i64 {
        self.first.checked_add(1.month()).map_or(i64::MAX, start_ms)
    }

    /// Returns whether a time lies in the month.
    #[must_use]
    pub fn contains(self, ms: i64) -> bool {
        (self.start_ms()..self.end_ms()).contains(&ms)
    }

    /// Returns whether the month has ended, so that its bill does not change any more. `settled_ms` is the time up to which
    /// all rows are written.
    #[must_use]
    pub fn is_closed(self, settled_ms: i64) -> bool {
        settled_ms >= self.end_ms()
    }
}

fn start_ms(date: Date) -> i64 {
    date.to_zoned(TimeZone::UTC).map_or(i64::MAX, |zoned| zoned.timestamp().as_millisecond())
}
