//! Problems in a file: position, cause and fix. Problems of the config and of mig-parted files have
//! the same form.
//!
//! ```text
//! /etc/gpush/config.toml:3:1: unknown key `libary` in [driver]
//!   |
//! 3 | libary = "libnvidia-ml.so.1"
//!   | ^^^^^^
//!   = did you mean `library`?
//! ```

use std::{
    fmt::{self, Write as _},
    ops::Range,
};

use gpush_api::{ApiError, Code};

/// One problem.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// Position in the file, in bytes.
    pub span: Range<usize>,
    /// The problem, without a full stop.
    pub message: String,
    /// What the author of the file should do.
    pub hint: String,
    /// A related position, with its description.
    pub also: Option<(Range<usize>, String)>,
}

impl Problem {
    pub(crate) fn new(span: Range<usize>, message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { span, message: message.into(), hint: hint.into(), also: None }
    }

    pub(crate) fn also(mut self, span: Range<usize>, what: impl Into<String>) -> Self {
        self.also = Some((span, what.into()));
        self
    }
}

/// Returns the text of a file. If the file is not UTF-8, the error contains the text with
/// replacement characters, and the span of the problem refers to that text.
#[expect(clippy::result_large_err, reason = "once a file, and mostly not")]
pub(crate) fn text(bytes: &[u8]) -> Result<&str, (String, Problem)> {
    let utf16 = bytes.starts_with(&[0xff, 0xfe]) || bytes.starts_with(&[0xfe, 0xff]);
    let hint = |at: usize| {
        if utf16 {
            "the file is UTF-16: save it as UTF-8 without a byte order mark"
        } else if bytes[..at].contains(&0) {
            "the file is not a text file: check that this is the right file"
        } else {
            "save the file as UTF-8: `iconv -f latin1 -t utf8` converts a file in Latin-1"
        }
    };
    let (at, what) = match std::str::from_utf8(bytes) {
        Ok(text) => match bytes.iter().position(|byte| *byte == 0) {
            None => return Ok(text),
            Some(at) => {
                let what = format!("byte {at} of the file is NUL: this is not a text file");
                let hint =
                    "check that this is the right file; if it is UTF-16 without a byte order mark, save it as UTF-8";
                return Err((text.to_owned(), Problem::new(at..at + 1, what, hint)));
            }
        },
        Err(error) => {
            let at = error.valid_up_to();
            let byte = bytes.get(at).copied().unwrap_or_default();
            (at, format!("the file is not UTF-8: byte {at} is {byte:#04x}"))
        }
    };
    let lossy = String::from_utf8_lossy(bytes).into_owned();
    Err((lossy, Problem::new(at..at + '\u{fffd}'.len_utf8(), what, hint(at))))
}

/// The kind of file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Document {
    /// The config of gpushd.
    Config,
    /// A mig-parted file.
    MigParted,
    /// A web config of the metrics relay.
    WebConfig,
}

/// Maximum number of problems of a file that are reported. A file of another format has a problem in each line.
pub(crate) const MOST_PROBLEMS: usize = 50;

/// The problems of one file, at least one and at most [`MOST_PROBLEMS`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileErrors {
    document: Document,
    path: String,
    text: String,
    problems: Vec<Problem>,
    /// Whether the file has more problems.
    has_more: bool,
}

/// A problem with its line and column. Lines and columns start at 1, and columns count characters.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Located {
    /// Path of the file.
    pub path: String,
    /// Line.
    pub line: usize,
    /// Column.
    pub column: usize,
    /// The problem.
    pub message: String,
    /// What the author of the file should do.
    pub hint: String,
}

impl FileErrors {
    pub(crate) fn new(document: Document, path: &str, text: &str, mut problems: Vec<Problem>) -> Self {
        problems.sort_by_key(|problem| (problem.span.start, problem.span.end));
        problems.dedup();
        let has_more = problems.len() > MOST_PROBLEMS;
        problems.truncate(MOST_PROBLEMS);
        Self { document, path: path.to_owned(), text: text.to_owned(), problems, has_more }
    }

    /// Returns the problems in the order of the file.
    #[must_use]
    pub fn problems(&self) -> &[Problem] {
        &self.problems
    }

    /// Returns the problems with their lines and columns.
    #[must_use]
    pub fn located(&self) -> Vec<Located> {
        self.problems
            .iter()
            .map(|problem| {
                let place = SourcePosition::of(&self.text, &problem.span);
                Located {
                    path: self.path.clone(),
                    line: place.line,
                    column: place.column,
                    message: problem.message.clone(),
                    hint: problem.hint.clone(),
                }
            })
            .collect()
    }
}

/// Maximum length of a shown source line, in characters.
const WIDEST: usize = 110;

/// The position of a span, in lines and columns.
struct SourcePosition<'a> {
    line: usize,
    column: usize,
    /// The whole line, without its line ending.
    content: &'a str,
    /// Number of characters of the span on this line; at least 1.
    width: usize,
}

impl<'a> SourcePosition<'a> {
    fn of(text: &'a str, span: &Range<usize>) -> Self {
        let mut at = span.start.min(text.len());
        while !text.is_char_boundary(at) {
            at -= 1;
        }
        let start = text[..at].rfind('\n').map_or(0, |newline| newline + 1);
        let end = text[at..].find('\n').map_or(text.len(), |newline| at + newline);
        let content = text[start..end].trim_end_matches('\r');
        let mut to = span.end.clamp(at, start + content.len().max(at - start));
        while !text.is_char_boundary(to) {
            to -= 1;
        }
        Self {
            line: text[..at].matches('\n').count() + 1,
            column: text[start..at].chars().count() + 1,
            content,
            width: text[at..to.max(at)].chars().count().max(1),
        }
    }

    /// Returns the shown part of the line, and the column of the span in that part. Columns start
    /// at 0.
    fn window(&self) -> (String, usize) {
        let plain = |c: char| if c.is_control() { ' ' } else { c };
        let before = self.column - 1;
        let from = if before + self.width.min(20) > WIDEST { before.saturating_sub(20) } else { 0 };
        let mut shown: String = self.content.chars().skip(from).take(WIDEST).map(plain).collect();
        if self.content.chars().count() > from + WIDEST {
            shown.push('…');
        }
        if from > 0 {
            shown.insert(0, '…');
        }
        (shown, before - from + usize::from(from > 0))
    }
}

impl fmt::Display for FileErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (n, problem) in self.problems.iter().enumerate() {
            if n > 0 {
                f.write_char('\n')?;
            }
            let place = SourcePosition::of(&self.text, &problem.span);
            let gutter = " ".repeat(place.line.to_string().len());
            writeln!(f, "{}:{}:{}: {}", self.path, place.line, place.column, problem.message)?;
            let (shown, column) = place.window();
            let width = place.width.min(shown.chars().count().saturating_sub(column)).max(1);
            if !place.content.trim().is_empty() {
                writeln!(f, "{gutter} |")?;
                writeln!(f, "{} | {}", place.line, shown.trim_end())?;
                writeln!(f, "{gutter} | {}{}", " ".repeat(column), "^".repeat(width))?;
            }
            if let Some((span, what)) = &problem.also {
                let other = SourcePosition::of(&self.text, span);
                writeln!(f, "{gutter} = {what} at {}:{}:{}", self.path, other.line, other.column)?;
            }
            writeln!(f, "{gutter} = {}", problem.hint)?;
        }
        if self.has_more {
            writeln!(f, "\n{}: only the first {MOST_PROBLEMS} errors are shown", self.path)?;
        }
        Ok(())
    }
}

impl std::error::Error for FileErrors {}

impl From<&FileErrors> for ApiError {
    fn from(errors: &FileErrors) -> Self {
        let what = match errors.problems.len() {
            1 => "an error".to_owned(),
            n if errors.has_more => format!("more than {n} errors"),
            n => format!("{n} errors"),
        };
        let (code, called) = match errors.document {
            Document::Config => (Code::ConfigInvalid, "the config"),
            Document::MigParted => (Code::BadRequest, "the mig-parted file"),
            Document::WebConfig => (Code::BadRequest, "the web config"),
        };
        let mut answer = Self::new(code, format!("{called} {} has {what}", errors.path));
        for located in errors.located() {
            let Located { path, line, column, message, hint } = located;
            answer = answer.cause(format!("{path}:{line}:{column}: {message} ({hint})"));
        }
        match errors.document {
            Document::Config => {
                answer.hint(format!("correct the file, then run `gpushctl config check {}`", errors.path))
            }
            Document::MigParted | Document::WebConfig => answer.hint("correct the file, then try again"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fault: a config with an error in each of its lines gave an answer 25 times as long as the config.
    #[test]
    fn only_the_first_problems_of_a_file_are_reported() {
        let text = "x\n".repeat(3000);
        let problems =
            |count: usize| (0..count).map(|n| Problem::new(2 * n..2 * n + 1, format!("{n}"), "fix")).collect();
        let errors = |count| FileErrors::new(Document::Config, "a.toml", &text, problems(count));
        assert_eq!(errors(3000).problems().len(), MOST_PROBLEMS);
        assert!(errors(3000).to_string().ends_with("\na.toml: only the first 50 errors are shown\n"));
        assert_eq!(ApiError::from(&errors(3000)).message, "the config a.toml has more than 50 errors");
        assert!(!errors(50).to_string().contains("only the first"));
        assert_eq!(ApiError::from(&errors(50)).message, "the config a.toml has 50 errors");
    }
}
