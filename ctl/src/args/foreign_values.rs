//! Values of options in the notation of Slurm and other tools, in the notation of gpush.

use std::time::Duration;

use gpush_core::duration;
use jiff::Zoned;

use super::words::is_number;

/// Returns the percentage that a part of a GPU means: `25` for `1/4`, `0.25` and `quarter`.
pub(super) fn fraction(word: &str) -> Option<String> {
    let part = match word {
        "half" => 0.5,
        "quarter" => 0.25,
        _ => match word.split_once('/') {
            Some((part, whole)) => {
                part.parse::<f64>().ok()? / whole.parse::<f64>().ok().filter(|whole| *whole > 0.0)?
            }
            None => word.strip_prefix("0.").and_then(|_| word.parse::<f64>().ok())?,
        },
    };
    (part > 0.0 && part < 1.0).then(|| format!("{:.0}", (part * 100.0).clamp(1.0, 99.0)))
}

/// Returns the letter of a unit of memory: `G` for `GB` and `GiB`.
pub(super) fn unit_of_memory(word: &str) -> Option<char> {
    match word.to_ascii_lowercase().as_str() {
        "g" | "gb" | "gib" => Some('G'),
        "m" | "mb" | "mib" => Some('M'),
        _ => None,
    }
}

/// Returns an amount of memory without a unit with the unit that the user probably meant: GiB for the memory of a device,
/// MiB for a large number.
pub(super) fn memory_with_unit(word: &str) -> Option<String> {
    const LARGEST_GIB: u64 = 999;
    let number: u64 = word.parse().ok().filter(|_| is_number(word))?;
    (number > 0).then(|| if number > LARGEST_GIB { format!("{number}M") } else { format!("{number}G") })
}

/// Returns the priority of MPS for a priority of another tool. No priority is higher than `normal`.
pub(super) fn priority(word: &str) -> Option<&'static str> {
    Some(match word.to_ascii_lowercase().as_str() {
        "normal" | "high" | "higher" | "highest" | "above-normal" | "urgent" | "max" | "default" | "medium" | "0" => {
            "normal"
        }
        "below-normal" | "below_normal" | "belownormal" | "low" | "lower" | "lowest" | "idle" | "background"
        | "min" | "batch" | "1" => "below-normal",
        _ => return None,
    })
}

/// Returns whether a word is an amount of memory, such as 10G or 8GiB.
pub(super) fn is_memory(word: &str) -> bool {
    let unit = word.trim_start_matches(|c: char| c.is_ascii_digit());
    unit.len() < word.len() && unit_of_memory(unit).is_some_and(|letter| letter == 'G' || unit.len() > 1)
}

/// Returns the time from now to an end such as `18:00`, in whole minutes.
pub(super) fn time_until(end: &str, now: &Zoned) -> Option<String> {
    let seconds = duration::parse_end(end, now).ok()?.as_second() - now.timestamp().as_second();
    let minutes = u64::try_from(seconds).ok()?.div_ceil(60);
    let text = duration::format(Duration::from_secs(minutes * 60));
    // A lease has a maximum duration.
    duration::parse_positive(&text).is_ok().then_some(text)
}

/// Returns whether a word is a number, perhaps with a percent sign.
pub(super) fn is_percentage(word: &str) -> bool {
    is_number(word.strip_suffix('%').unwrap_or(word))
}

/// Returns a duration in the notation of gpush. Slurm writes minutes, `minutes:seconds`, `hours:minutes:seconds` or
/// `days-hours:minutes:seconds`.
pub(super) fn duration_of(option: &str, value: &str) -> Option<String> {
    let is_of_slurm = matches!(option, "-t" | "--time");
    if duration::is_duration(value) {
        return Some(if is_of_slurm && is_number(value) { format!("{value}m") } else { value.to_owned() });
    }
    let (days, time) = value.split_once('-').unwrap_or(("0", value));
    let parts: Vec<u64> = time.split(':').map(str::parse).collect::<Result<_, _>>().ok().filter(|_| is_of_slurm)?;
    let days: u64 = days.parse().ok()?;
    let (hours, minutes, seconds) = match (parts.as_slice(), value.contains('-')) {
        ([hours], true) => (*hours, 0, 0),
        ([hours, minutes], true) => (*hours, *minutes, 0),
        ([minutes, seconds], false) => (0, *minutes, *seconds),
        ([hours, minutes, seconds], _) => (*hours, *minutes, *seconds),
        _ => return None,
    };
    let parts = [(days, 'd'), (hours, 'h'), (minutes, 'm'), (seconds, 's')];
    let text: String =
        parts.iter().filter(|(number, _)| *number > 0).map(|(number, unit)| format!("{number}{unit}")).collect();
    (!text.is_empty()).then_some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn part_of_a_gpu_becomes_a_percentage_below_100() {
        for (part, expected) in
            [("1/4", Some("25")), ("half", Some("50")), ("0.001", Some("1")), ("199/200", Some("99")), ("1/1", None)]
        {
            assert_eq!(fraction(part).as_deref(), expected, "{part}");
        }
    }

    #[test]
    fn values_without_a_meaning_in_gpush_get_the_nearest_one() {
        for (number, expected) in [("10", Some("10G")), ("8192", Some("8192M")), ("0", None), ("10G", None), ("", None)]
        {
            assert_eq!(memory_with_unit(number).as_deref(), expected, "{number}");
        }
        assert_eq!([priority("high"), priority("LOW"), priority("x")], [Some("normal"), Some("below-normal"), None]);
    }

    #[test]
    fn amount_of_memory_has_a_unit_that_is_no_duration() {
        for (word, expected) in [
            ("10G", true),
            ("8gib", true),
            ("512MB", true),
            ("5m", false),
            ("10", false),
            ("1g.10gb", false),
            ("G", false),
        ] {
            assert_eq!(is_memory(word), expected, "{word}");
        }
    }

    #[test]
    fn end_becomes_the_time_until_it() {
        let now: Zoned = "2026-11-30T15:30:20[Europe/Berlin]".parse().unwrap();
        for (end, expected) in [
            ("18:00", Some("2h30m")),
            ("15:31", Some("1m")),
            ("15:00", Some("23h30m")),
            ("2099-01-01", None),
            ("x", None),
        ] {
            assert_eq!(time_until(end, &now).as_deref(), expected, "{end}");
        }
    }
}
