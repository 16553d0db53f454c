//! `--expires`: how long something stands, or until when.

use jiff::{SignedDuration, Timestamp};

const FORMS: &str = "30m, 2h, 7d, 1h30m or a time such as 2026-12-01T08:00Z is meant";

/// When that is. A time is given with its zone, because a host's is easily mistaken.
pub(crate) fn parse(text: &str) -> Result<Timestamp, String> {
    let text = text.trim();
    let now = Timestamp::now();
    if let Some(span) = span(text) {
        if span.is_zero() {
            return Err("it would expire at once".to_owned());
        }
        return now.checked_add(span).map_err(|_| "that is further away than clocks reach".to_owned());
    }
    match text.parse::<Timestamp>() {
        Ok(at) if at <= now => Err(format!("{at} has passed")),
        Ok(at) => Ok(at),
        Err(_) if text.parse::<jiff::civil::DateTime>().is_ok() => {
            Err(format!("its zone is missing: {text}Z for UTC, or {text}+01:00"))
        }
        Err(_) => Err(FORMS.to_owned()),
    }
}

/// `1h30m`: numbers, each with its unit.
pub(crate) fn span(text: &str) -> Option<SignedDuration> {
    let mut rest = text;
    let mut sum = SignedDuration::ZERO;
    if rest.is_empty() {
        return None;
    }
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit())?;
        let number: i64 = rest[..digits].parse().ok()?;
        let unit = match rest.as_bytes()[digits] {
            b's' => 1,
            b'm' => 60,
            b'h' => 3600,
            b'd' => 86_400,
            b'w' => 604_800,
            _ => return None,
        };
        sum = sum.checked_add(SignedDuration::from_secs(number.checked_mul(unit)?))?;
        rest = &rest[digits + 1..];
    }
    Some(sum)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_and_times_are_told_apart() {
        for (text, seconds) in
            [("90s", 90), ("30m", 1800), ("2h", 7200), ("7d", 604_800), ("1h30m", 5400), ("1w", 604_800)]
        {
            assert_eq!(span(text), Some(SignedDuration::from_secs(seconds)), "{text}");
            assert!(parse(text).unwrap() > Timestamp::now());
        }
        assert_eq!(parse("2126-12-01T08:00Z").unwrap().to_string(), "2126-12-01T08:00:00Z");
        assert_eq!(parse("2126-12-01T08:00:00+01:00").unwrap().to_string(), "2126-12-01T07:00:00Z");
        for (text, says) in [
            ("", FORMS),
            ("2", FORMS),
            ("h", FORMS),
            ("2y", FORMS),
            ("-2h", FORMS),
            ("2 h", FORMS),
            ("0h", "it would expire at once"),
            ("99999999999999w", FORMS),
            ("9999999999w", "that is further away than clocks reach"),
            ("2126-12-01T08:00", "its zone is missing: 2126-12-01T08:00Z for UTC, or 2126-12-01T08:00+01:00"),
            ("2001-12-01T08:00Z", "2001-12-01T08:00:00Z has passed"),
        ] {
            assert_eq!(parse(text).unwrap_err(), says, "{text}");
        }
    }
}
