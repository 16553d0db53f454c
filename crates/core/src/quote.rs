//! Text of others within messages of ours: in backticks, on one line, of bounded length.
//!
//! What people typed is echoed in almost every error. A control character in it must not reach a
//! terminal or a log, and a pasted page must not bury the message.

use std::fmt;

/// Longest echo in characters.
const MOST: usize = 80;

/// Shows a text in backticks, control characters escaped, cut at 80 characters.
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
            if c.is_control() { write!(f, "{}", c.escape_unicode())? } else { write!(f, "{c}")? }
        }
        f.write_str("`")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_of_a_terminal_gets_through() {
        assert_eq!(Quoted("a\u{1b}[31m\n").to_string(), "`a\\u{1b}[31m\\u{a}`");
        assert!(Quoted(&"x".repeat(5000)).to_string().chars().count() < 100);
    }
}
