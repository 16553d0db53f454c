//! The notation of Slurm's files: logical lines that contain `Key=Value` pairs.
//!
//! ```text
//! # a comment ends with the line; `\#` is a `#`
//! NodeName=n1 Name=gpu \
//!     File=/dev/nvidia[0-3]          a backslash at the end continues the line
//! Include /etc/slurm/gpus.conf
//! ```

/// A logical line of a file: without comments, and with its continuation lines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogicalLine {
    /// Number of the line's first physical line in the file; the first line is 1.
    pub number: usize,
    /// The text, which is never empty.
    pub text: String,
}

/// A `Key=Value` pair. Slurm ignores the case of keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyValue {
    /// The key, as written.
    pub key: String,
    /// The value, without quotes.
    pub value: String,
}

impl KeyValue {
    /// Returns whether the pair has this key.
    #[must_use]
    pub fn is(&self, key: &str) -> bool {
        self.key.eq_ignore_ascii_case(key)
    }
}

/// Error: the rest of a line, which is not a `Key=Value` pair.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{} is not a `Key=Value` pair", crate::quote::Quoted(.0))]
pub struct LineError(pub String);

/// Returns the logical lines of a file, without empty lines.
#[must_use]
pub fn lines(text: &str) -> Vec<LogicalLine> {
    let mut found = Vec::new();
    let mut open: Option<LogicalLine> = None;
    for (at, physical) in text.lines().enumerate() {
        let content = without_comment(physical).trim_end();
        let continues = trailing_backslashes(content) % 2 == 1;
        let content = if continues { &content[..content.len() - 1] } else { content };
        let line = open.get_or_insert_with(|| LogicalLine { number: at + 1, text: String::new() });
        line.text.push_str(content);
        if !continues {
            found.extend(open.take().and_then(|line| finished(&line)));
        }
    }
    found.extend(open.and_then(|line| finished(&line)));
    found
}

fn finished(line: &LogicalLine) -> Option<LogicalLine> {
    let text = line.text.trim();
    (!text.is_empty()).then(|| LogicalLine { number: line.number, text: text.replace("\\#", "#") })
}

fn trailing_backslashes(text: &str) -> usize {
    text.bytes().rev().take_while(|byte| *byte == b'\\').count()
}

fn without_comment(line: &str) -> &str {
    let mut backslashes = 0usize;
    for (at, byte) in line.bytes().enumerate() {
        match byte {
            b'\\' => backslashes += 1,
            b'#' if backslashes.is_multiple_of(2) => return &line[..at],
            _ => backslashes = 0,
        }
    }
    line
}

impl LogicalLine {
    /// Returns the file that an `Include` line names; `None` if the line is not an `Include` line.
    #[must_use]
    pub fn include(&self) -> Option<&str> {
        let (word, rest) = self.text.split_once(char::is_whitespace)?;
        word.eq_ignore_ascii_case("include").then(|| rest.trim().trim_matches('"'))
    }

    /// Returns the pairs of the line.
    ///
    /// # Errors
    /// A part of the line is not a pair.
    pub fn pairs(&self) -> Result<Vec<KeyValue>, LineError> {
        let mut pairs = Vec::new();
        let mut rest = self.text.trim_start();
        while !rest.is_empty() {
            let (pair, after) = pair(rest).ok_or_else(|| LineError(rest.to_owned()))?;
            pairs.push(pair);
            rest = after.trim_start();
        }
        Ok(pairs)
    }
}

/// Parses a pair at the beginning of a text without leading spaces. Returns the pair and the
/// remaining text. Slurm allows spaces around `=`, and an operator before `=` (`File+=…`).
fn pair(text: &str) -> Option<(KeyValue, &str)> {
    let end = text.find(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == '.')).unwrap_or(text.len());
    let (key, rest) = text.split_at(end);
    let rest = rest.trim_start();
    let rest = rest.strip_prefix(['+', '-', '*', '/']).unwrap_or(rest);
    let rest = rest.strip_prefix('=')?.trim_start();
    let (value, rest) = match rest.strip_prefix('"') {
        Some(quoted) => quoted.split_once('"')?,
        None => rest.split_at(rest.find(char::is_whitespace).unwrap_or(rest.len())),
    };
    let ends = rest.is_empty() || rest.starts_with(char::is_whitespace);
    (ends && !key.is_empty()).then(|| (KeyValue { key: key.to_owned(), value: value.to_owned() }, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(text: &str) -> Vec<(usize, String)> {
        lines(text).into_iter().map(|line| (line.number, line.text)).collect()
    }

    fn pairs(text: &str) -> Vec<(String, String)> {
        let line = LogicalLine { number: 1, text: text.to_owned() };
        line.pairs().expect("pairs").into_iter().map(|pair| (pair.key, pair.value)).collect()
    }

    #[test]
    fn comments_end_lines_and_backslashes_join_them() {
        assert_eq!(
            texts("a=1 # x\n\n# y \\\nb=1 \\\n  c=2 \nd=\\#3\r\n\\"),
            [(1, "a=1".to_owned()), (4, "b=1   c=2".to_owned()), (6, "d=#3".to_owned())]
        );
    }

    #[test]
    fn pairs_may_have_quotes_spaces_and_operators() {
        let expected = [("Name", "gpu"), ("File", "/dev/nvidia0"), ("Flags", "a b")];
        let expected = expected.map(|(key, value)| (key.to_owned(), value.to_owned()));
        assert_eq!(pairs("Name = gpu File+=/dev/nvidia0 Flags=\"a b\""), expected);
    }

    #[test]
    fn a_word_without_a_value_is_not_a_pair() {
        for text in ["Name", "Name=gpu File", "=gpu", "Name=\"gpu", "Name=\"gpu\"x", "Name=", "é=1"] {
            let line = LogicalLine { number: 1, text: text.to_owned() };
            let accepted = line.pairs().is_ok();
            assert_eq!(accepted, text == "Name=", "{text}");
        }
    }
}
