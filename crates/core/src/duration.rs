//! Durations and points in time, in the notation that users type.
//!
//! | typed | meaning |
//! |---|---|
//! | `90s`, `15m`, `1h30m`, `2d`, `1w`, `12 hours`, `1 day` | a duration |
//! | `2026-12-01T08:00:00Z`, `2026-12-01T08:00+01:00` | a point in time (RFC 3339) |
//! | `2026-12-01 08:00`, `2026-12-01` | a point in time in the time zone of the host |
//! | `09:00` | the last, or the next, 9 o'clock |
//! | `yesterday`, `today`, `tomorrow` | the start of that day |
//!
//! Every command and every request uses this notation. The crate jiff parses the units; a day has
//! 24 hours. A number needs a unit, because some tools count in minutes and others in seconds. Only
//! `0` needs none.

use std::{fmt, time::Duration};

use jiff::{
    SignedDuration, Span, SpanRelativeTo, Timestamp, ToSpan, Zoned,
    civil::{Date, DateTime, Time},
    tz::TimeZone,
};

/// The longest duration: 52 weeks. A longer duration is probably a typing error.
pub const LONGEST: Duration = Duration::from_secs(52 * 7 * 86_400);

/// The longest duration before now that a start time can be: 10 years.
pub const LONGEST_AGO: Duration = Duration::from_secs(3_650 * 86_400);

/// Examples for error messages.
const EXAMPLES: &str = "write 90s, 15m, 1h30m or 2d";

/// Why a text is not a duration or point in time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DurationError {
    /// The text is not a duration. Where a point in time is also allowed, the text is
    /// not a point in time either.
    Malformed,
    /// The text is only a number.
    NoUnit(String),
    /// The duration is zero, but must be positive.
    Zero,
    /// The duration is longer than [`LONGEST`].
    TooLong,
    /// A start time is longer ago than [`LONGEST_AGO`].
    TooLongAgo,
    /// A point in time is in the past, but must be in the future.
    Past(Zoned),
    /// A point in time is in the future, but must be in the past.
    Future(Zoned),
}

impl fmt::Display for DurationError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Malformed => f.write_str(EXAMPLES),
            Self::NoUnit(number) => write!(f, "the unit of time is missing: write {number}s, {number}m or {number}h"),
            Self::Zero => f.write_str("the duration must be longer than 0"),
            Self::TooLong => f.write_str("the duration must be 52w or less"),
            Self::TooLongAgo => f.write_str("the start must be 3650d or less ago"),
            Self::Past(at) => write!(f, "{} has passed", at.strftime("%F %T %Z")),
            Self::Future(at) => write!(f, "{} is in the future", at.strftime("%F %T %Z")),
        }
    }
}

impl std::error::Error for DurationError {}

/// Parses a duration. Zero is allowed.
///
/// # Errors
/// The text is not a duration, or the duration is longer than [`LONGEST`].
pub fn parse(text: &str) -> Result<Duration, DurationError> {
    let duration = parse_unlimited(text)?;
    if duration > LONGEST { Err(DurationError::TooLong) } else { Ok(duration) }
}

fn parse_unlimited(text: &str) -> Result<Duration, DurationError> {
    let text = text.trim();
    if !text.starts_with(|c: char| c.is_ascii_digit()) {
        return Err(DurationError::Malformed);
    }
    match (is_number(text), text) {
        (true, "0") => Ok(Duration::ZERO),
        // The message repeats the number, so a long one is only called too long.
        (true, _) if text.len() > 12 => Err(DurationError::TooLong),
        (true, _) => Err(DurationError::NoUnit(text.to_owned())),
        (false, _) => with_units(text),
    }
}

/// Parses a duration longer than zero.
///
/// # Errors
/// The same as for [`parse`]. Zero is also an error.
pub fn parse_positive(text: &str) -> Result<Duration, DurationError> {
    let duration = parse(text)?;
    if duration.is_zero() { Err(DurationError::Zero) } else { Ok(duration) }
}

/// Returns whether a text has the form of a duration, even if it is too long or its unit is missing.
#[must_use]
pub fn is_duration(text: &str) -> bool {
    matches!(parse(text), Ok(_) | Err(DurationError::TooLong | DurationError::NoUnit(_)))
}

/// Returns whether a text is a number without a unit: digits with an optional fraction.
fn is_number(text: &str) -> bool {
    text.bytes().all(|b| b.is_ascii_digit() || b == b'.') && text.parse::<f64>().is_ok()
}

/// Parses numbers with units. jiff also accepts other notations; this function refuses them.
fn with_units(text: &str) -> Result<Duration, DurationError> {
    if !text.bytes().all(|b| b.is_ascii_digit() || b.is_ascii_lowercase() || b == b'.' || b == b' ') {
        return Err(DurationError::Malformed);
    }
    // jiff has no separate error for a number that is out of range. So a number with more than 9
    // digits counts as too long.
    let digits = text.split(|c: char| !c.is_ascii_digit()).map(str::len).max().unwrap_or(0);
    let error = if digits > 9 { DurationError::TooLong } else { DurationError::Malformed };
    let span: Span = text.parse().map_err(|_| error.clone())?;
    let duration: SignedDuration =
        span.to_duration(SpanRelativeTo::days_are_24_hours()).map_err(|_| DurationError::Malformed)?;
    Duration::try_from(duration).map_err(|_| error)
}

/// Parses an end time: a duration from `now`, or a point in time in the future. A time without a zone is in the zone of
/// `now`.
///
/// # Errors
/// The text is neither a duration nor a point in time, or the point in time has passed.
pub fn parse_end(text: &str, now: &Zoned) -> Result<Timestamp, DurationError> {
    match parse_moment(text, now)? {
        Moment::At(at) if at <= now.timestamp() => Err(DurationError::Past(at.to_zoned(now.time_zone().clone()))),
        Moment::At(at) => Ok(at),
        Moment::Clock { today, .. } if today > now.timestamp() => Ok(today),
        Moment::Clock { tomorrow, .. } => Ok(tomorrow),
        Moment::Span(span) if span.is_zero() => Err(DurationError::Zero),
        Moment::Span(span) if span > LONGEST => Err(DurationError::TooLong),
        Moment::Span(span) => now.timestamp().checked_add(span).map_err(|_| DurationError::TooLong),
    }
}

/// Parses a start time: a duration before `now`, or a point in time in the past. A time without a zone is in the zone of
/// `now`.
///
/// # Errors
/// The text is neither a duration nor a point in time, or the point in time is in the future.
pub fn parse_start(text: &str, now: &Zoned) -> Result<Timestamp, DurationError> {
    let moment = parse_moment(text, now).map_err(|error| match error {
        DurationError::TooLong => DurationError::TooLongAgo,
        other => other,
    });
    match moment? {
        Moment::At(at) if at > now.timestamp() => Err(DurationError::Future(at.to_zoned(now.time_zone().clone()))),
        Moment::At(at) => Ok(at),
        Moment::Clock { today, .. } if today <= now.timestamp() => Ok(today),
        Moment::Clock { yesterday, .. } => Ok(yesterday),
        Moment::Span(span) if span > LONGEST_AGO => Err(DurationError::TooLongAgo),
        Moment::Span(span) => now.timestamp().checked_sub(span).map_err(|_| DurationError::TooLongAgo),
    }
}

enum Moment {
    At(Timestamp),
    /// A time of day without a date, on three days.
    Clock {
        yesterday: Timestamp,
        today: Timestamp,
        tomorrow: Timestamp,
    },
    Span(Duration),
}

fn parse_moment(text: &str, now: &Zoned) -> Result<Moment, DurationError> {
    let text = text.trim();
    let on = |date: Date, time: Time| {
        let at = date.to_datetime(time).to_zoned(now.time_zone().clone());
        at.map(|at| at.timestamp()).map_err(|_| DurationError::Malformed)
    };
    let day = |days: i64| now.date().checked_add(days.days()).map_err(|_| DurationError::Malformed);
    match text {
        "yesterday" => return on(day(-1)?, Time::midnight()).map(Moment::At),
        "today" => return on(now.date(), Time::midnight()).map(Moment::At),
        "tomorrow" => return on(day(1)?, Time::midnight()).map(Moment::At),
        _ => {}
    }
    if let Ok(at) = text.parse::<Timestamp>() {
        return Ok(Moment::At(at));
    }
    // jiff ignores an offset or a zone after a civil time, so refuse both here.
    let is_plain = |more: &[u8]| text.bytes().all(|b| b.is_ascii_digit() || more.contains(&b));
    if text.contains('-')
        && is_plain(b"-:.Tt ")
        && has_no_offset(text)
        && let Ok(at) = text.parse::<DateTime>()
    {
        return on(at.date(), at.time()).map(Moment::At);
    }
    if text.contains(':')
        && is_plain(b":.")
        && let Ok(time) = text.parse::<Time>()
    {
        let (yesterday, today, tomorrow) = (on(day(-1)?, time)?, on(now.date(), time)?, on(day(1)?, time)?);
        return Ok(Moment::Clock { yesterday, today, tomorrow });
    }
    parse_unlimited(text).map(Moment::Span)
}

/// Returns whether a date and time has no offset such as `-05:00`: a date has two hyphens.
fn has_no_offset(text: &str) -> bool {
    text.bytes().filter(|b| *b == b'-').count() == 2
}

/// Returns the present time in the time zone of the host.
#[must_use]
pub fn now() -> Zoned {
    Timestamp::now().to_zoned(TimeZone::system())
}

/// Formats a duration in the notation that [`parse`] reads: `1h30m`, and `0s` for zero.
#[must_use]
pub fn format(duration: Duration) -> String {
    let seconds = duration.as_secs();
    let units = [(86_400, "d"), (3600, "h"), (60, "m")];
    let mut rest = seconds;
    let mut out = String::new();
    for (size, unit) in units {
        if rest >= size {
            out += &format!("{}{unit}", rest / size);
            rest %= size;
        }
    }
    let millis = duration.subsec_millis();
    if millis > 0 {
        let fraction = format!("{millis:03}");
        out += &format!("{rest}.{}s", fraction.trim_end_matches('0'));
    } else if rest > 0 || out.is_empty() {
        out += &format!("{rest}s");
    }
    out
}

/// Formats whole seconds as a duration of at most two units, such as `6d23h`, `1h29m` or `40s`. Rounds to the
/// nearest minute from 1 hour on, and to the nearest hour from 1 day on. So a lease that was just granted for 2 hours
/// ends in `2h`, not in `1h59m`.
#[must_use]
pub fn rough(seconds: u64) -> String {
    let rounded = |unit: u64| seconds.saturating_add(unit / 2) / unit * unit;
    let seconds = match rounded(60) {
        0..3600 => seconds,
        minutes @ 3600..86_400 => minutes,
        _ => rounded(3600),
    };
    format(Duration::from_secs(seconds))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn at(text: &str) -> Timestamp {
        text.parse().unwrap()
    }

    #[test]
    fn numbers_with_units_and_zero_are_accepted() {
        for (text, seconds) in [
            ("90s", 90.0),
            ("15m", 900.0),
            ("1h30m", 5400.0),
            ("2d", 172_800.0),
            ("1w", 604_800.0),
            ("1d2h3m4s", 93_784.0),
            ("0", 0.0),
            ("0.5s", 0.5),
            (" 30s ", 30.0),
            ("52w", LONGEST.as_secs_f64()),
            ("12 hours", 43_200.0),
            ("1 day", 86_400.0),
            ("2 h", 7200.0),
            ("1h 30m", 5400.0),
        ] {
            assert_eq!(parse(text), Ok(Duration::from_secs_f64(seconds)), "{text}");
        }
    }

    #[test]
    fn other_notations_are_refused_with_examples() {
        for text in
            ["", "h", "-2h", "+2h", "2y", "3mo", "PT2H", "1e9", "NaN", "inf", "30m1h", "ü", "1.2.3", "1 day ago", "1 2"]
        {
            assert_eq!(parse(text), Err(DurationError::Malformed), "{text}");
        }
        for number in ["90", "0.5", "60"] {
            let error = parse(number).unwrap_err();
            assert_eq!(
                error.to_string(),
                format!("the unit of time is missing: write {number}s, {number}m or {number}h")
            );
        }
        for text in ["53w", "99999999999999w", "99999999999999999999999"] {
            assert_eq!(parse(text), Err(DurationError::TooLong), "{text}");
        }
        assert_eq!(parse_positive("0h"), Err(DurationError::Zero));
    }

    /// Fault: the text had only one unit, such as `6d` for 6 days and 23 hours.
    #[test]
    fn rough_durations_have_two_rounded_units() {
        let (hour, day) = (3600, 86_400);
        for (seconds, text) in [
            (0, "0s"),
            (59, "59s"),
            (119, "1m59s"),
            (59 * 60 + 29, "59m29s"),
            (59 * 60 + 30, "1h"),
            (89 * 60 + 10, "1h29m"),
            (2 * hour - 1, "2h"),
            (day - 1, "1d"),
            (6 * day + 23 * hour + 5, "6d23h"),
            (7 * day - 1, "7d"),
            (400 * day, "400d"),
        ] {
            assert_eq!(rough(seconds), text);
        }
        assert!(rough(u64::MAX).ends_with('h'));
    }

    #[test]
    fn ends_are_in_the_future_and_starts_in_the_past() {
        let now = &at("2026-01-31T12:00:00Z").to_zoned(TimeZone::UTC);
        assert_eq!(parse_end("1h30m", now), Ok(at("2026-01-31T13:30:00Z")));
        assert_eq!(parse_end("2026-12-01T08:00+01:00", now), Ok(at("2026-12-01T07:00:00Z")));
        let past = parse_end("2001-12-01T08:00Z", now).unwrap_err();
        assert_eq!(past.to_string(), "2001-12-01 08:00:00 UTC has passed");
        assert_eq!(parse_end("0", now), Err(DurationError::Zero));
        assert_eq!(parse_start("7d", now), Ok(at("2026-01-24T12:00:00Z")));
        assert_eq!(parse_start("2026-01-30T00:00:01Z", now), Ok(at("2026-01-30T00:00:01Z")));
        assert_eq!(parse_start("400d", now), Ok(at("2024-12-27T12:00:00Z")));
        assert_eq!(parse_start("3651d", now), Err(DurationError::TooLongAgo));
        assert_eq!(parse_start("9999999999d", now), Err(DurationError::TooLongAgo));
        assert_eq!(parse_end("400d", now), Err(DurationError::TooLong));
        let future = parse_start("2026-02-01T00:00:00Z", now).unwrap_err();
        assert_eq!(future.to_string(), "2026-02-01 00:00:00 UTC is in the future");
    }

    #[test]
    fn time_without_a_zone_is_in_the_zone_of_the_host() {
        let zone = TimeZone::fixed(jiff::tz::offset(2));
        // 14:00 in this zone.
        let now = &at("2026-01-31T12:00:00Z").to_zoned(zone);
        for (text, start) in [
            ("09:00", "2026-01-31T07:00:00Z"),
            ("15:30", "2026-01-30T13:30:00Z"),
            ("today", "2026-01-30T22:00:00Z"),
            ("yesterday", "2026-01-29T22:00:00Z"),
            ("2026-01-30", "2026-01-29T22:00:00Z"),
            ("2026-01-30 08:00", "2026-01-30T06:00:00Z"),
        ] {
            assert_eq!(parse_start(text, now), Ok(at(start)), "{text}");
        }
        for (text, end) in [
            ("09:00", "2026-02-01T07:00:00Z"),
            ("15:30", "2026-01-31T13:30:00Z"),
            ("tomorrow", "2026-01-31T22:00:00Z"),
            ("2126-12-01T08:00", "2126-12-01T06:00:00Z"),
        ] {
            assert_eq!(parse_end(text, now), Ok(at(end)), "{text}");
        }
        assert!(parse_start("tomorrow", now).is_err() && parse_end("today", now).is_err());
        for wrong in ["25:00", "09:00+05:00", "2026-01-30T08:00[America/New_York]", "2026-01-30 08:00-05:00 x"] {
            assert_eq!(parse_start(wrong, now), Err(DurationError::Malformed), "{wrong}");
        }
        assert_eq!(parse_start("2026-01-30T08:00-05:00", now), Ok(at("2026-01-30T13:00:00Z")));
    }

    proptest! {
        #[test]
        fn formatted_durations_parse_back(millis in 0..=LONGEST.as_millis()) {
            let duration = Duration::from_millis(u64::try_from(millis).unwrap());
            let text = format(duration);
            let parsed = parse(&text).unwrap();
            let difference = parsed.abs_diff(duration);
            prop_assert!(difference < Duration::from_micros(1), "{} became {:?}", text, parsed);
        }

        #[test]
        fn any_text_parses_without_a_panic(text in "\\PC{0,24}") {
            let now = Timestamp::UNIX_EPOCH.to_zoned(TimeZone::UTC);
            let _ = (parse(&text), parse_end(&text, &now), parse_start(&text, &now));
        }
    }
}
