//! Months as arguments, such as `2026-11`.

use jiff::{Timestamp, ToSpan as _, civil::Date, tz::TimeZone};

/// A calendar month in UTC.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MonthName {
    /// The month as gpushd reads it.
    pub(crate) text: String,
    /// Start of the month.
    pub(crate) from: Timestamp,
    /// End of the month.
    pub(crate) until: Timestamp,
}

/// Parses a month.
pub(super) fn month(text: &str) -> Result<MonthName, String> {
    parsed(text).ok_or_else(|| "write the month as in 2026-11".to_owned())
}

fn parsed(text: &str) -> Option<MonthName> {
    let (year, month) = text.split_once('-')?;
    let is_number = |part: &str, digits: usize| part.len() == digits && part.bytes().all(|byte| byte.is_ascii_digit());
    if !is_number(year, 4) || !is_number(month, 2) {
        return None;
    }
    let first = Date::new(year.parse().ok()?, month.parse().ok()?, 1).ok()?;
    let start = |date: Date| Some(date.to_zoned(TimeZone::UTC).ok()?.timestamp());
    let until = start(first.checked_add(1.month()).ok()?)?;
    Some(MonthName { text: text.to_owned(), from: start(first)?, until })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn month_is_a_period_in_utc() {
        let december = month("2026-12").unwrap();
        let period = (december.from.to_string(), december.until.to_string());
        assert_eq!(period, ("2026-12-01T00:00:00Z".to_owned(), "2027-01-01T00:00:00Z".to_owned()));
        for wrong in ["2026", "2026-13", "2026-1", "26-11", "2026-11-01", "11-2026", "november", ""] {
            assert_eq!(month(wrong), Err("write the month as in 2026-11".to_owned()), "{wrong}");
        }
    }
}
