//! Reads a description from a TOML text. An error names the line, the column and the correction.

use std::fmt;

use super::Description;
use crate::spelling;

/// The reason why a description cannot be simulated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DescriptionError {
    /// The problem.
    pub message: String,
    /// The fix.
    pub hint: String,
    /// Line and column, counted from 1.
    pub at: Option<(usize, usize)>,
    subject: Option<Subject>,
}

/// The value in the text that an error concerns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Subject {
    /// Position of the `[[gpu]]` entry with the value. `None` means that the value belongs to the
    /// host.
    entry: Option<usize>,
    key: &'static str,
}

impl DescriptionError {
    /// Creates an error without a position in the text.
    pub fn new(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { message: message.into(), hint: hint.into(), at: None, subject: None }
    }

    /// Adds the wrong key and its `[[gpu]]` entry to the error. `None` means a key of the host.
    pub(super) fn about(self, entry: Option<usize>, key: &'static str) -> Self {
        Self { subject: Some(Subject { entry, key }), ..self }
    }
}

impl fmt::Display for DescriptionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some((line, column)) = self.at {
            write!(f, "line {line}, column {column}: ")?;
        }
        write!(f, "{}", self.message)?;
        if self.hint.is_empty() { Ok(()) } else { write!(f, "; {}", self.hint) }
    }
}

impl std::error::Error for DescriptionError {}

/// Returns the line and the column, counted from 1, of a byte in a text.
pub(crate) fn place(text: &str, byte: usize) -> (usize, usize) {
    let before = text.get(..byte).unwrap_or(text);
    let line = before.matches('\n').count() + 1;
    let column = before.rsplit('\n').next().unwrap_or("").chars().count() + 1;
    (line, column)
}

/// Returns the message, the hint and the position of a TOML error. For an unknown name, the hint
/// suggests similar names.
pub(crate) fn explain(text: &str, error: &toml::de::Error) -> (String, String, Option<(usize, usize)>) {
    let at = error.span().map(|span| place(text, span.start));
    let message = error.message().trim().lines().collect::<Vec<_>>().join(" ");
    let unknown = message.strip_prefix("unknown field `").or_else(|| message.strip_prefix("unknown variant `"));
    if let Some(rest) = unknown {
        let mut quoted = rest.split('`');
        let name = quoted.next().unwrap_or_default();
        // In the message of the TOML parser, separators and known names alternate after the unknown
        // name.
        let known: Vec<&str> = quoted.skip(1).step_by(2).collect();
        if !known.is_empty() {
            let kind = if message.starts_with("unknown field") { "key" } else { "value" };
            return (format!("unknown {kind} `{name}`"), spelling::suggest(name, known.iter().copied()), at);
        }
    }
    (message, String::new(), at)
}

impl Description {
    /// Parses and checks a description.
    ///
    /// # Errors
    /// If the text is invalid. The error names the line, the column and the fix.
    pub fn parse(text: &str) -> Result<Self, DescriptionError> {
        let read: Self = toml::from_str(text).map_err(|error| {
            let (message, hint, at) = explain(text, &error);
            DescriptionError { at, ..DescriptionError::new(message, hint) }
        })?;
        // A host without GPUs is usually a mistake. So a description without GPUs must name the
        // driver.
        if read.gpus.is_empty() && read.driver.is_none() {
            return Err(DescriptionError {
                at: Some(place(text, text.len())),
                ..DescriptionError::new("no GPU is described", "add `[[gpu]]` with `model = \"a100-80\"`")
            });
        }
        read.hardware().map_err(|error| {
            let at = error.subject.and_then(|subject| locate(text, subject));
            DescriptionError { at, ..error }
        })?;
        Ok(read)
    }
}

/// Returns the position of the value that an error concerns.
fn locate(text: &str, subject: Subject) -> Option<(usize, usize)> {
    let document = toml::de::DeTable::parse(text).ok()?;
    let table = match subject.entry {
        None => document.get_ref(),
        Some(entry) => document.get_ref().get("gpu")?.get_ref().as_array()?.get(entry)?.get_ref().as_table()?,
    };
    // If the key is absent, its default value is the problem. So return the position of the
    // entry's model.
    let value = table.get(subject.key).or_else(|| table.get("model"))?;
    Some(place(text, value.span().start))
}
