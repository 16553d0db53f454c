//! Text for users: the rule that makes foreign text safe to show, and the notation of times. gpushd and its clients use
//! the same rules.
//!
//! Users choose the command lines of their processes. Control characters could control another
//! user's terminal. Bidirectional characters could reorder the text next to them. Characters
//! without width could make one name look like another.

use jiff::{Timestamp, tz::TimeZone};
use unicode_width::UnicodeWidthChar;

/// The character that replaces a character that must not be shown.
pub const REPLACEMENT: char = '?';

/// Returns whether a character is shown unchanged. Returns false for control characters, Unicode line breaks, and
/// characters without width. Characters that only change the text direction have no width.
#[must_use]
pub fn is_plain(c: char) -> bool {
    !c.is_control()
        && !matches!(c, '\u{2028}' | '\u{2029}' | '\u{fff9}'..='\u{fffb}')
        && c.width().is_some_and(|w| w > 0)
}

/// Returns the character to show: the character itself, a blank for a line break or a tab, else [`REPLACEMENT`].
#[must_use]
pub fn plain_char(c: char) -> char {
    if is_plain(c) {
        c
    } else if c.is_whitespace() {
        ' '
    } else {
        REPLACEMENT
    }
}

/// Returns the text to show, character by character.
#[must_use]
pub fn plain(text: &str) -> String {
    text.chars().map(plain_char).collect()
}

/// Formats a time for users: in the time zone of the host, with the zone, such as `2026-12-01 08:00:00 CET`.
#[must_use]
pub fn local_time(at: Timestamp) -> String {
    at.to_zoned(TimeZone::system()).strftime("%F %T %Z").to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_deceives_or_drives_a_terminal_is_replaced() {
        let mut tried = 0;
        for c in [
            '\0',
            '\u{7}',
            '\u{1b}',
            '\u{7f}',
            '\u{9b}',
            '\u{ad}',
            '\u{61c}',
            '\u{200b}',
            '\u{200c}',
            '\u{200d}',
            '\u{200e}',
            '\u{200f}',
            '\u{202a}',
            '\u{202e}',
            '\u{2060}',
            '\u{2066}',
            '\u{2069}',
            '\u{feff}',
            '\u{fff9}',
            '\u{e0041}',
            '\u{fe0f}',
            '\u{301}',
        ] {
            assert_eq!(plain(&format!("a{c}b")), "a?b", "{}", c.escape_unicode());
            tried += 1;
        }
        println!("{tried} characters");
        assert_eq!(plain("a\nb\tc\u{2028}d\u{85}e"), "a b c d e");
        assert_eq!(plain("é 漢字 🚀 ✓ \u{a0}x"), "é 漢字 🚀 ✓ \u{a0}x");
    }
}
