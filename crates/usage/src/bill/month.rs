//! Calendar months in UTC.

use std::{fmt, str::FromStr};

use jiff::{Timestamp, ToSpan, civil::Date, tz::TimeZone};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};

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
    /// Returns the month of a time in ms since 1970. A time that no calendar has counts as the nearest month.
    #[must_use]
    pub fn of(ms: i64) -> Self {
        let nearest = if ms < 0 { Timestamp::MIN } else { Timestamp::MAX };
        let date = Timestamp::from_millisecond(ms).unwrap_or(nearest).to_zoned(TimeZone::UTC).date();
        Self { first: date.first_of_month() }
    }

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
}

impl Serialize for Month {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Month {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}

fn start_ms(date: Date) -> i64 {
    date.to_zoned(TimeZone::UTC).map_or(i64::MAX, |zoned| zoned.timestamp().as_millisecond())
}
