//! Text from users in messages: in backticks, on one line, and with a maximum length.
//!
//! Almost every error repeats text that the user typed. Characters that control or deceive a
//! terminal ([`gpush_api::text`]) must not reach a terminal or a log. Long pasted text must not
//! hide the message.

use std::fmt;

use gpush_api::text::is_plain;

/// Maximum length of the text in characters.
const MOST: usize = 80;

/// A text in backticks. Special characters are escaped, and only the first 80 characters are shown.
#[derive(Debug, Clone, Copy)]
pub struct Quoted<'a>(pub &'a str);

impl fmt::Display for Quoted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("`")?;
        for (n, c) in self.0.chars().enumerate() {
            if n == MOST {
                f.write_str("…")?;
                break;
            }
            if is_plain(c) { write!(f, "{c}")? } else { write!(f, "{}", c.escape_unicode())? }
        }
        f.write_str("`")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn terminal_controls_are_escaped() {
        assert_eq!(Quoted("a\u{1b}[31m\n").to_string(), "`a\\u{1b}[31m\\u{a}`");
        assert_eq!(Quoted("a\u{202e}b").to_string(), "`a\\u{202e}b`");
        assert!(Quoted(&"x".repeat(5000)).to_string().chars().count() < 100);
    }
}
