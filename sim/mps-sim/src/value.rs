//! Values of commands. This module parses and prints them as the real daemon does, including the
//! peculiarities of the real daemon.

/// Parses an active thread percentage, above 0 and at most 100. Text after the number is ignored.
pub(crate) fn percentage(text: &str) -> Option<f64> {
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.' && c != '-').unwrap_or(text.len());
    let value: f64 = text[..end].parse().ok()?;
    (value > 0.0 && value <= 100.0).then_some(value)
}

/// Formats a percentage with one decimal: 0.01 becomes 0.0.
pub(crate) fn shown_percentage(value: f64) -> String {
    format!("{value:.1}")
}

/// Parses a limit of pinned memory. Returns bytes; 0 removes the limit. If a `G` directly follows
/// the number, the unit is GiB, otherwise MiB. A negative number wraps around. A text without a
/// number is 0.
pub(crate) fn memory(text: &str) -> u64 {
    let (negative, digits) = text.strip_prefix('-').map_or((false, text), |rest| (true, rest));
    let end = digits.find(|c: char| !c.is_ascii_digit()).unwrap_or(digits.len());
    let number: u64 = digits[..end].parse().unwrap_or(0);
    let number = if negative { number.wrapping_neg() } else { number };
    match digits[end..].chars().next() {
        Some('G' | 'g') => number.wrapping_shl(30),
        Some(_) | None => number.wrapping_shl(20),
    }
}

/// Formats a limit of memory: in whole GiB if it is at least 1 GiB, otherwise in whole MiB. Returns
/// `None` for 0 (no limit).
pub(crate) fn shown_memory(bytes: u64) -> Option<String> {
    match bytes {
        0 => None,
        bytes if bytes >> 30 > 0 => Some(format!("{}G", bytes >> 30)),
        bytes => Some(format!("{}M", bytes >> 20)),
    }
}

/// Parses a number as C does: text without a number is 0.
pub(crate) fn number(text: Option<&str>) -> i64 {
    let text = text.unwrap_or_default();
    let end = text.char_indices().find(|&(at, c)| !(c.is_ascii_digit() || at == 0 && c == '-'));
    text[..end.map_or(text.len(), |(at, _)| at)].parse().unwrap_or(0)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
mod tests {
    use super::*;

    #[test]
    fn percentages_read_back_as_recorded() {
        for (text, shown) in [("33.37", "33.4"), ("0.01", "0.0"), ("50%", "50.0"), ("100", "100.0")] {
            assert_eq!(shown_percentage(percentage(text).unwrap()), shown, "{text}");
        }
        for text in ["0", "-5", "101", "abc", ""] {
            assert_eq!(percentage(text), None, "{text}");
        }
    }

    #[test]
    fn memory_reads_back_as_recorded() {
        let cases = [("1536M", "1G"), ("1.5G", "1M"), ("1", "1M"), ("1T", "1M"), ("512", "512M"), ("512K", "512M")];
        for (text, shown) in cases {
            assert_eq!(shown_memory(memory(text)).as_deref(), Some(shown), "{text}");
        }
        assert_eq!((memory("0"), memory("abc"), shown_memory(0)), (0, 0, None));
        assert_eq!(shown_memory(memory("-1G")).as_deref(), Some("17179869183G"));
    }

    #[test]
    fn numbers_are_read_as_in_c() {
        for (text, value) in [("12", 12), ("12x", 12), ("-1", -1), ("GPU-1", 0), ("", 0)] {
            assert_eq!(number(Some(text)), value, "{text}");
        }
        assert_eq!(number(None), 0);
    }
}
