//! What the output may look like: width, characters, colours, and how text is fitted into it.

use anstyle::{AnsiColor, Style};
use gpush_api::text::{REPLACEMENT, plain_char};
use jiff::Timestamp;
use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

/// Characters that may be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Charset {
    /// The locale is UTF-8.
    Utf8,
    /// It is not, or `--ascii`.
    Ascii,
}

/// How to draw.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Look {
    /// Columns.
    pub(crate) width: usize,
    /// Whether tables may wrap, and text may be cut, to the width: the reader of a pipe wants complete lines, one for
    /// each row.
    pub(crate) wraps: bool,
    /// Whether tables have headings.
    pub(crate) headings: bool,
    /// Characters.
    pub(crate) charset: Charset,
    /// The time from which ages are computed.
    pub(crate) now: Timestamp,
}

pub(crate) const PLAIN: Style = Style::new();
pub(crate) const STRONG: Style = Style::new().bold();
pub(crate) const QUIET: Style = Style::new().dimmed();
pub(crate) const USED: Style = AnsiColor::Green.on_default();
pub(crate) const IDLE: Style = AnsiColor::Cyan.on_default();
pub(crate) const NOTE: Style = AnsiColor::Yellow.on_default();
pub(crate) const BAD: Style = AnsiColor::Red.on_default().bold();
pub(crate) const NEW: Style = AnsiColor::Green.on_default();
pub(crate) const GONE: Style = AnsiColor::Red.on_default();

/// Text in a style; plain text stays without escape codes.
pub(crate) fn paint(style: Style, text: &str) -> String {
    if style.is_plain() || text.is_empty() { text.to_owned() } else { format!("{style}{text}{style:#}") }
}

/// Columns that plain text takes.
pub(crate) fn width(text: &str) -> usize {
    UnicodeWidthStr::width(text)
}

/// Text filled up with blanks on the right.
pub(crate) fn pad(text: &str, columns: usize) -> String {
    format!("{text}{}", " ".repeat(columns.saturating_sub(width(text))))
}

impl Look {
    /// The one of two texts that the character set allows.
    pub(crate) fn pick(&self, utf8: &'static str, ascii: &'static str) -> &'static str {
        match self.charset {
            Charset::Utf8 => utf8,
            Charset::Ascii => ascii,
        }
    }

    /// Cleans text from outside (a command line, a user name) by the agent's rule, which an older agent may not apply.
    /// Also replaces characters that the character set lacks.
    pub(crate) fn clean(&self, text: &str) -> String {
        let shown = |c: char| match self.charset {
            Charset::Ascii if !c.is_ascii() => REPLACEMENT,
            Charset::Ascii | Charset::Utf8 => plain_char(c),
        };
        text.chars().map(shown).collect()
    }

    /// Text cut to a width, with an ellipsis if something is missing. In a pipe nothing is cut: the reader needs the
    /// whole text.
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

    /// Text broken at blanks into lines that fit, the first after `first`, the others after as many
    /// blanks. A word longer than a line stays whole, and so does a command in backquotes that fits
    /// into one: they are there to be copied.
    pub(crate) fn wrap(&self, first: &str, text: &str) -> Vec<String> {
        let indent = width(first);
        let lines = broken(text, self.width.saturating_sub(indent).max(20)).into_iter().enumerate();
        lines.map(|(i, l)| if i == 0 { format!("{first}{l}") } else { format!("{}{l}", " ".repeat(indent)) }).collect()
    }

    /// Date and time of day where the reader is, to the second.
    pub(crate) fn clock(&self, then: Timestamp) -> String {
        then.to_zoned(jiff::tz::TimeZone::system()).strftime("%F %T").to_string()
    }

    /// How long ago, coarsely: `40 s ago`.
    pub(crate) fn ago(&self, then: Timestamp) -> String {
        let seconds = self.now.as_second().saturating_sub(then.as_second()).max(0);
        match seconds {
            0..120 => format!("{seconds} s ago"),
            120..7200 => format!("{} min ago", seconds / 60),
            7200..172_800 => format!("{} h ago", seconds / 3600),
            _ => format!("{} days ago", seconds / 86_400),
        }
    }

    /// In how long, coarsely: `in 40 s`.
    pub(crate) fn ahead(&self, then: Timestamp) -> String {
        let seconds = then.as_second().saturating_sub(self.now.as_second()).max(0);
        match seconds {
            0 => "now".to_owned(),
            1..120 => format!("in {seconds} s"),
            120..7200 => format!("in {} min", seconds / 60),
            7200..172_800 => format!("in {} h", seconds / 3600),
            _ => format!("in {} days", seconds / 86_400),
        }
    }
}

/// Text broken at blanks into lines of `room` columns; never none, and no word is broken.
pub(crate) fn broken(text: &str, room: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in words(text, room) {
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

/// Words of a text; those between two backquotes are one, when it is not longer than `room`.
fn words(text: &str, room: usize) -> Vec<String> {
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

/// MiB as GiB with one decimal: `39.5`.
pub(crate) fn gib(mib: u64) -> String {
    // Tenths of a GiB, rounded; integers so that no figure depends on float formatting.
    let tenths = (mib * 10 + 512) / 1024;
    format!("{}.{}", tenths / 10, tenths % 10)
}

/// `1 GPU`, `2 GPUs`.
pub(crate) fn count(n: usize, one: &str) -> String {
    if n == 1 { format!("1 {one}") } else { format!("{n} {one}s") }
}

/// Product name without the maker's, which all share.
pub(crate) fn product(name: &str) -> &str {
    name.strip_prefix("NVIDIA ").unwrap_or(name)
}

/// PCI address without the domain when it is the usual one.
pub(crate) fn pci(address: &str) -> &str {
    address.strip_prefix("0000:").unwrap_or(address)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn look(charset: Charset) -> Look {
        Look { width: 40, wraps: true, headings: true, charset, now: Timestamp::UNIX_EPOCH }
    }

    #[test]
    fn text_is_cut_by_columns_not_bytes() {
        let utf8 = look(Charset::Utf8);
        assert_eq!(utf8.fit("abcdef", 6), "abcdef");
        assert_eq!(utf8.fit("abcdefg", 6), "abcde…");
        assert_eq!(utf8.fit("訓練訓練", 5), "訓練…");
        assert_eq!(utf8.fit("ab defg", 4), "ab…");
        assert_eq!(Look { wraps: false, ..utf8 }.fit("abcdefg", 6), "abcdefg", "a pipe has no edge");
        assert_eq!(look(Charset::Ascii).fit("abcdefg", 6), "abc...");
        assert_eq!(look(Charset::Ascii).fit("abcdefg", 2), "..");
    }

    #[test]
    fn a_command_line_cannot_drive_the_terminal() {
        assert_eq!(look(Charset::Utf8).clean("a\x1b[2Jb\u{9b}c\nd\u{200b}e\u{202e}"), "a?[2Jb?c d?e?");
        assert_eq!(look(Charset::Utf8).clean("Jürgen"), "Jürgen");
        assert_eq!(look(Charset::Ascii).clean("Jürgen"), "J?rgen");
    }

    #[test]
    fn figures_round() {
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
    fn ages_are_coarse() {
        let look = Look { now: Timestamp::from_second(200_000).unwrap(), ..look(Charset::Utf8) };
        let ago = |s: i64| look.ago(Timestamp::from_second(200_000 - s).unwrap());
        assert_eq!(
            [ago(0), ago(119), ago(120), ago(7200), ago(199_999)],
            ["0 s ago", "119 s ago", "2 min ago", "2 h ago", "2 days ago"]
        );
        assert_eq!(ago(-5), "0 s ago");
    }
}
