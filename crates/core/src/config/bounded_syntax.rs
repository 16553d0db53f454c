//! Limits how much of an invalid file the TOML parser reads.
//!
//! After an error, the parser of `toml` continues, so that it can report several errors. Its limit of nested values is not
//! effective then: with an error in each of some thousand lines, the parser overflows the stack. So gpush first finds the
//! first error, with a parser that enters no value after an error.

use std::cell::Cell;

use toml_parser::{ErrorSink, ParseError, Source, Span, parser::EventReceiver};

/// Maximum depth of nested values. The parser of `toml` has the same limit.
const DEEPEST: u32 = 80;

/// Number of bytes after the first error in which other errors are reported.
const AFTER_ERROR: usize = 4 << 10;

/// Returns the beginning of a text that the parser of `toml` can read: the whole text if it has no syntax error.
pub(super) fn readable(text: &str) -> &str {
    let Some(error) = first_error(text) else { return text };
    let mut end = error + AFTER_ERROR;
    if end >= text.len() {
        return text;
    }
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    // An incomplete last line would be one more error.
    match text[..end].rfind('\n') {
        Some(newline) if newline > error => &text[..=newline],
        _ => &text[..end],
    }
}

/// Returns the position of the first syntax error.
fn first_error(text: &str) -> Option<usize> {
    let first = Cell::new(None);
    let mut report = |error: ParseError| {
        let at = error.unexpected().or_else(|| error.context()).map_or(text.len(), |span| span.start());
        first.set(Some(first.get().unwrap_or(at)));
    };
    let tokens = Source::new(text).lex().into_vec();
    toml_parser::parser::parse_document(&tokens, &mut Receiver { depth: 0, first_error: &first }, &mut report);
    first.get()
}

/// Permits to enter a value only before the first error. Until then, each value that was entered is also left.
struct Receiver<'a> {
    depth: u32,
    first_error: &'a Cell<Option<usize>>,
}

impl Receiver<'_> {
    fn enter(&mut self, span: Span, error: &mut dyn ErrorSink) -> bool {
        self.depth += 1;
        if self.depth > DEEPEST {
            error.report_error(ParseError::new("values are nested too deeply").with_unexpected(span));
        }
        self.first_error.get().is_none()
    }
}

impl EventReceiver for Receiver<'_> {
    fn inline_table_open(&mut self, span: Span, error: &mut dyn ErrorSink) -> bool {
        self.enter(span, error)
    }

    fn inline_table_close(&mut self, _: Span, _: &mut dyn ErrorSink) {
        self.depth = self.depth.saturating_sub(1);
    }

    fn array_open(&mut self, span: Span, error: &mut dyn ErrorSink) -> bool {
        self.enter(span, error)
    }

    fn array_close(&mut self, _: Span, _: &mut dyn ErrorSink) {
        self.depth = self.depth.saturating_sub(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    /// Fault: this file overflowed the stack, which ended gpushd on a reload.
    #[test]
    fn error_in_each_of_4000_lines_does_not_overflow_the_stack() {
        for line in ["[[gpu]]\nmps = { percentage = 25\"]\n", "a = { b = [ {\n", "a = [{ b = \"]\n", "é = {[{[=\n"] {
            let text = line.repeat(1 << 12);
            let errors = Config::parse(&text, "a.toml").unwrap_err();
            assert!(errors.to_string().starts_with("a.toml:"), "{errors}");
        }
        assert!(Config::parse(&"{[=é".repeat(1 << 14), "a.toml").is_err());
    }

    #[test]
    fn valid_text_is_read_to_its_end() {
        let text = "a = [{ b = [1, 2] }, { c = {} }]\n\n[d.e]\nf = \"\"\"\n[[\n\"\"\"\n".to_owned();
        assert_eq!(readable(&text), text);
        let text = text + &"# a comment\n".repeat(4096);
        assert_eq!(readable(&text), text);
        let invalid = "x\n".to_owned() + &text;
        assert!(readable(&invalid).len() < 2 * AFTER_ERROR);
        assert!(invalid.starts_with(readable(&invalid)));
    }
}
