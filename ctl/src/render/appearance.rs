//! The appearance of the output (width, characters, colors), and functions that fit text to it.

use std::borrow::Cow;

use anstyle::{AnsiColor, Style};
use gpush_api::text::{REPLACEMENT, local_time, plain_char};
use jiff::Timestamp;
use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

/// Which characters the output may contain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Charset {
    /// The locale is UTF-8.
    Utf8,
    /// The locale is not UTF-8, or `--ascii` was given.
    Ascii,
}

/// How to draw the output.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Appearance {
    /// Width in columns.
    pub(crate) width: usize,
    /// Whether tables may wrap, and text may be cut to the width. False for a pipe, because a program that reads the
    /// pipe needs each row complete and on one line.
    pub(crate) wraps: bool,
    /// Whether tables have headings.
    pub(crate) headings: bool,
    /// Whether lists show all columns, even those that are left out by default (`-o wide`).
    pub(crate) wide: bool,
    /// Whether programs read the output (`-o csv`), so that times are points in time and each cell has one value.
    pub(crate) exact: bool,
    /// Permitted characters.
    pub(crate) charset: Charset,
    /// Whether the user is known to be an administrator.
    pub(crate) is_administrator: bool,
    /// The current time, with which ages are computed.
    pub(crate) now: Timestamp,
}

/// The mark after a command that only administrators may run.
const ADMINISTRATOR: &str = " (administrator)";

pub(crate) const PLAIN: Style = Style::new();
pub(crate) const STRONG: Style = Style::new().bold();
pub(crate) const QUIET: Style = Style::new().dimmed();
pub(crate) const USED: Style = AnsiColor::Green.on_default();
pub(crate) const IDLE: Style = AnsiColor::Cyan.on_default();
pub(crate) const NOTE: Style = AnsiColor::Yellow.on_default();
pub(crate) const BAD: Style = AnsiColor::Red.on_default().bold();
pub(crate) const NEW: Style = AnsiColor::Green.on_default();
pub(crate) const GONE: Style = AnsiColor::Red.on_default();

/// Returns text in a style. For plain text, adds no escape codes.
pub(crate) fn paint(style: Style, text: &str) -> String {
    if style.is_plain() || text.is_empty() { text.to_owned() } else { format!("{style}{text}{style:#}") }
}

/// Returns the number of columns of plain text.
pub(crate) fn width(text: &str) -> usize {
    UnicodeWidthStr::width(text)
}

/// Pads text with blanks on the right.
pub(crate) fn pad(text: &str, columns: usize) -> String {
    format!("{text}{}", " ".repeat(columns.saturating_sub(width(text))))
}

impl Appearance {
    /// Returns `utf8` or `ascii`, whichever the character set permits.
    pub(crate) fn pick(&self, utf8: &'static str, ascii: &'static str) -> &'static str {
        match self.charset {
            Charset::Utf8 => utf8,
            Charset::Ascii => ascii,
        }
    }

    /// Replaces control characters in text of other sources, such as a command line or a user name. gpushd does this
    /// too, but an older gpushd might not. Also replaces characters that the character set does not permit.
    pub(crate) fn clean(&self, text: &str) -> String {
        let shown = |c: char| match self.charset {
            Charset::Ascii if !c.is_ascii() => REPLACEMENT,
            Charset::Ascii | Charset::Utf8 => plain_char(c),
        };
        text.chars().map(shown).collect()
    }

    /// Cuts text to a width, and marks the cut with an ellipsis. Does not cut text for a pipe, because a program that
    /// reads the pipe needs the whole text.
    pub(crate) fn fit(&self, text: &str, columns: usize) -> String {
        if !self.wraps || width(text) <= columns {
            return text.to_owned();
        }
        let ellipsis = self.pick("…", "...");
        let Some(mut room) = columns.checked_sub(width(ellipsis)) else { return ".".repeat(columns) };
        let mut out = String::new();
        for c in text.chars() {
            let w = c.width().unwrap_or(0);
            if w > room {
                break;
            }
            room -= w;
            out.push(c);
        }
        out.truncate(out.trim_end().len());
        out + ellipsis
    }

    /// Breaks text at blanks into lines. The first line starts with `first`, and the other lines are indented by the
    /// width of `first`. Never breaks a word. Never breaks a command in backquotes that fits into one line, because
    /// users copy it.
    pub(crate) fn wrap(&self, first: &str, text: &str) -> Vec<String> {
        let indent = width(first);
        let lines = broken(&self.for_reader(text), self.width.saturating_sub(indent).max(20)).into_iter().enumerate();
        lines.map(|(i, l)| if i == 0 { format!("{first}{l}") } else { format!("{}{l}", " ".repeat(indent)) }).collect()
    }

    /// Leaves out the mark of commands for administrators, if the user is an administrator.
    pub(crate) fn for_reader<'t>(&self, text: &'t str) -> Cow<'t, str> {
        if self.is_administrator { text.replace(ADMINISTRATOR, "").into() } else { text.into() }
    }

    /// Returns a time in whole seconds: the local time with its zone, or RFC 3339 in UTC if `exact` is set.
    pub(crate) fn clock(&self, then: Timestamp) -> String {
        if self.exact {
            return rfc3339(then);
        }
        local_time(then)
    }

    /// Describes roughly how long ago the time `then` was: `40s ago`, `1h29m ago`.
    pub(crate) fn ago(&self, then: Timestamp) -> String {
        if self.exact {
            return rfc3339(then);
        }
        format!("{} ago", self.since(then))
    }

    /// Describes roughly how long something has lasted that began at the time `then`: `40s`, `1h29m`.
    pub(crate) fn since(&self, then: Timestamp) -> String {
        rough(self.now.as_second().saturating_sub(then.as_second()))
    }

    /// Describes roughly how long it is until the time `then`: `in 40s`, `in 6d23h`.
    pub(crate) fn ahead(&self, then: Timestamp) -> String {
        if self.exact {
            return rfc3339(then);
        }
        match then.as_second().saturating_sub(self.now.as_second()) {
            ..=0 => "now".to_owned(),
            seconds => format!("in {}", rough(seconds)),
        }
    }
}

/// Formats a time as in JSON: in UTC, with whole seconds.
fn rfc3339(then: Timestamp) -> String {
    gpush_api::whole_second(then).to_string()
}

/// Formats seconds as a duration of two units; a negative number as `0s`.
fn rough(seconds: i64) -> String {
    gpush_core::duration::rough(u64::try_from(seconds).unwrap_or(0))
}

/// Breaks text at blanks into lines of at most `room` columns. Returns at least one line. Never breaks a word.
pub(crate) fn broken(text: &str, room: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in split_words(text, room) {
        let word = word.as_str();
        let line = lines.last_mut().filter(|l| l.is_empty() || width(l) + 1 + width(word) <= room);
        match line {
            Some(line) if line.is_empty() => line.push_str(word),
            Some(line) => {
                line.push(' ');
                line.push_str(word);
            }
            None => lines.push(word.to_owned()),
        }
    }
    lines
}

/// Splits text into words. If a command in backquotes is not longer than `room`, it counts as one word.
fn split_words(text: &str, room: usize) -> Vec<String> {
    let mut words: Vec<String> = Vec::new();
    let mut quoted: Vec<&str> = Vec::new();
    for word in text.split_whitespace() {
        quoted.push(word);
        if quoted.iter().map(|w| w.matches('`').count()).sum::<usize>() % 2 == 0 {
            let command = quoted.join(" ");
            if width(&command) <= room {
                words.push(command);
            } else {
                words.extend(quoted.iter().map(|w| (*w).to_owned()));
            }
            quoted.clear();
        }
    }
    words.extend(quoted.iter().map(|w| (*w).to_owned()));
    words
}

/// Formats MiB as GiB with one decimal: `39.5`.
pub(crate) fn gib(mib: u64) -> String {
    // Round to tenths with integers, so that the result does not depend on how floats are formatted.
    let tenths = (mib * 10 + 512) / 1024;
    format!("{}.{}", tenths / 10, tenths % 10)
}

/// Returns `1 GPU`, `2 GPUs`.
pub(crate) fn count(n: usize, one: &str) -> String {
    if n == 1 { format!("1 {one}") } else { format!("{n} {one}s") }
}

/// Returns the product name without `NVIDIA`.
pub(crate) fn product(name: &str) -> &str {
    name.strip_prefix("NVIDIA ").unwrap_or(name)
}

/// Returns the PCI address. Leaves out the domain if it is the usual one.
pub(crate) fn pci(address: &str) -> &str {
    address.strip_prefix("0000:").unwrap_or(address)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::fixtures;

    fn look(charset: Charset) -> Appearance {
        fixtures::look(40, charset)
    }

    #[test]
    fn administrator_reads_commands_without_the_mark() {
        let text = "to end maintenance: `gpushctl maintenance leave` (administrator)";
        let own = Appearance { is_administrator: true, ..look(Charset::Utf8) };
        assert_eq!(own.for_reader(text), "to end maintenance: `gpushctl maintenance leave`");
        assert!(!own.wrap("hint: ", text).join(" ").contains("administrator"));
        assert_eq!(look(Charset::Utf8).for_reader(text), text);
    }

    #[test]
    fn text_is_cut_by_columns_not_bytes() {
        let utf8 = look(Charset::Utf8);
        assert_eq!(utf8.fit("abcdef", 6), "abcdef");
        assert_eq!(utf8.fit("abcdefg", 6), "abcde…");
        assert_eq!(utf8.fit("訓練訓練", 5), "訓練…");
        assert_eq!(utf8.fit("ab defg", 4), "ab…");
        assert_eq!(Appearance { wraps: false, ..utf8 }.fit("abcdefg", 6), "abcdefg", "a pipe has no edge");
        assert_eq!(look(Charset::Ascii).fit("abcdefg", 6), "abc...");
        assert_eq!(look(Charset::Ascii).fit("abcdefg", 2), "..");
    }

    #[test]
    fn control_characters_in_text_are_replaced() {
        assert_eq!(look(Charset::Utf8).clean("a\x1b[2Jb\u{9b}c\nd\u{200b}e\u{202e}"), "a?[2Jb?c d?e?");
        assert_eq!(look(Charset::Utf8).clean("Jürgen"), "Jürgen");
        assert_eq!(look(Charset::Ascii).clean("Jürgen"), "J?rgen");
    }

    #[test]
    fn numbers_are_rounded() {
        assert_eq!(gib(0), "0.0");
        assert_eq!(gib(40_448), "39.5");
        assert_eq!(gib(81_920), "80.0");
        assert_eq!(gib(81_917), "80.0");
        assert_eq!(count(1, "GPU"), "1 GPU");
        assert_eq!(count(0, "GPU"), "0 GPUs");
    }

    #[test]
    fn wrapped_lines_hang_under_the_first() {
        let lines = look(Charset::Utf8).wrap("  ! ", "one two three four five six seven eight nine ten");
        assert_eq!(lines, ["  ! one two three four five six seven", "    eight nine ten"]);
        assert!(lines.iter().all(|l| width(l) <= 40));
        assert_eq!(look(Charset::Utf8).wrap("- ", ""), ["- "]);
        let lines = look(Charset::Utf8).wrap("", "to see its profiles type `gpushctl mig profiles`, or not");
        assert_eq!(lines, ["to see its profiles type", "`gpushctl mig profiles`, or not"]);
        assert_eq!(look(Charset::Utf8).wrap("", "an `open quote"), ["an `open quote"]);
    }

    #[test]
    fn age_has_two_units() {
        let look = Appearance { now: Timestamp::from_second(200_000).unwrap(), ..look(Charset::Utf8) };
        let ago = |s: i64| look.ago(Timestamp::from_second(200_000 - s).unwrap());
        assert_eq!(
            [ago(0), ago(119), ago(120), ago(7200), ago(199_999)],
            ["0s ago", "1m59s ago", "2m ago", "2h ago", "2d8h ago"]
        );
        assert_eq!(ago(-5), "0s ago");
        let ahead = |s: i64| look.ahead(Timestamp::from_second(200_000 + s).unwrap());
        assert_eq!([ahead(-1), ahead(40), ahead(7199), ahead(93_600)], ["now", "in 40s", "in 2h", "in 1d2h"]);
    }

    #[test]
    fn programs_get_points_in_time() {
        let look = Appearance { exact: true, ..look(Charset::Utf8) };
        let then = Timestamp::from_second(200_000).unwrap();
        assert_eq!([look.ago(then), look.ahead(then), look.clock(then)], ["1970-01-03T07:33:20Z"; 3]);
    }
}
