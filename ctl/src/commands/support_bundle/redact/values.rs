//! Finds the value that belongs to a name in a text: in TOML, JSON, YAML, command lines and messages.

use std::ops::Range;

/// Maximum number of bytes of a secret that has several lines.
pub(super) const LONGEST: usize = 16 << 10;

/// Returns the start of the value that follows a name, and the separator between them. `end` is the end of the name.
pub(super) fn start_of_value(text: &str, name: &str, end: usize) -> Option<(usize, char)> {
    let rest = &text[end..];
    let bare = rest.trim_start_matches('\\');
    let unquoted = bare.strip_prefix(is_quote).map_or(rest, |rest| rest.strip_prefix(']').unwrap_or(rest));
    let separated = unquoted.trim_start_matches(is_blank);
    let is_option = name.starts_with('-');
    let (value, separator) = if let Some(value) = separated.strip_prefix('=') {
        (value.trim_start_matches(['=', '>']), '=')
    } else if let Some(value) = separated.strip_prefix(':').filter(|value| !value.starts_with(':')) {
        (value.strip_prefix('=').unwrap_or(value), ':')
    } else if let Some(value) = separated.strip_prefix(',').filter(|_| is_option && unquoted.len() < rest.len()) {
        // `["--password", "a"]`
        (value, ',')
    } else if (is_option || name.eq_ignore_ascii_case("bearer"))
        && unquoted.starts_with(is_blank)
        && !separated.starts_with("--")
    {
        (separated, ' ')
    } else {
        return None;
    };
    let value = value.trim_start_matches(is_blank);
    let start = text.len() - value.len();
    (start < end_of_line(text, start)).then_some((start, separator))
}

/// Returns the text between the quotes if a quoted value begins at `start`. The quotes can be escaped, as in a JSON
/// string that contains JSON. One character can precede the first quote, as in `b'x'`.
pub(super) fn quoted(text: &str, start: usize) -> Option<Range<usize>> {
    let rest = &text[start..];
    let prefix = rest.strip_prefix(|c: char| c.is_ascii_alphabetic() || c == '$').unwrap_or(rest);
    let rest = if prefix.starts_with(is_quote) { prefix } else { rest };
    let bare = rest.trim_start_matches('\\');
    let escapes = rest.len() - bare.len();
    let quote = bare.chars().next().filter(|c| is_quote(*c))?;
    let start = text.len() - bare.len() + 1;
    let three = quote.to_string().repeat(3);
    if bare.starts_with(&three) {
        let start = start + 2;
        let block = &text[start..text.floor_char_boundary(start + LONGEST)];
        return Some(start..block.find(&three).map_or_else(|| end_of_line(text, start), |length| start + length));
    }
    let line_end = end_of_line(text, start);
    let mut backslashes = 0;
    for (length, c) in text[start..line_end].char_indices() {
        match c {
            '\\' => backslashes += 1,
            c if c == quote && (backslashes <= escapes || (escapes == 0 && backslashes % 2 == 0)) => {
                let end = start + length;
                // In a shell, `'a'b` is one word.
                let continues = text[end + 1..].starts_with(char::is_alphanumeric);
                return Some(if continues {
                    start - 1 - escapes..word(text, end).end
                } else {
                    start..end - backslashes.min(escapes)
                });
            }
            _ => backslashes = 0,
        }
    }
    Some(start..line_end)
}

/// Returns the text from an opening bracket at `start` to its closing bracket. If this bracket is missing, returns the
/// rest of the line.
pub(super) fn bracketed(text: &str, start: usize) -> Option<Range<usize>> {
    if !text[start..].starts_with(['[', '{']) {
        return None;
    }
    let block = &text[start..text.floor_char_boundary(start + LONGEST)];
    let mut depth = 0;
    for (length, c) in block.char_indices() {
        match c {
            '[' | '{' => depth += 1,
            ']' | '}' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return Some(start..start + length + 1);
        }
    }
    Some(start..end_of_line(text, start))
}

/// Returns the word at `start`, without quotes and punctuation at its end. A backslash escapes a blank.
pub(super) fn word(text: &str, start: usize) -> Range<usize> {
    let mut is_escaped = false;
    let rest = &text[start..];
    let length = rest.find(|c: char| {
        let ends = c.is_whitespace() && !(is_escaped && is_blank(c));
        is_escaped = c == '\\' && !is_escaped;
        ends
    });
    let word = &rest[..length.unwrap_or(rest.len())];
    let is_open = word.contains('(');
    let is_closing = |c| matches!(c, '"' | '\'' | '`' | '\\' | ',' | ';' | ']' | '}' | '>') || (c == ')' && !is_open);
    start..start + word.trim_end_matches(is_closing).len()
}

/// Returns the end of the line that contains `at`, without the line break.
pub(super) fn end_of_line(text: &str, at: usize) -> usize {
    text[at..].find(['\n', '\r']).map_or(text.len(), |length| at + length)
}

pub(super) fn is_blank(c: char) -> bool {
    matches!(c, ' ' | '\t')
}

pub(super) fn is_quote(c: char) -> bool {
    matches!(c, '"' | '\'')
}
