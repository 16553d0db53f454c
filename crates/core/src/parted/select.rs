//! Selects a label of a file.

use gpush_api::{ApiError, Code};

use super::{File, Label};
use crate::{nearest::nearest_few, quote::Quoted};

/// Maximum number of labels that an error lists.
const MOST_LISTED: usize = 40;

impl File {
    /// Returns the label with this name. Without a name, returns the only label.
    ///
    /// # Errors
    /// No label has this name, or the file has several labels and no name was given. The error
    /// lists the labels.
    pub fn select(&self, name: Option<&str>) -> Result<&Label, ApiError> {
        match (name, self.labels.as_slice()) {
            (None, [only]) => Ok(only),
            (None, _) => {
                let message = format!("{} has {} labels, and none is selected", self.path, self.labels.len());
                Err(ApiError::new(Code::BadRequest, message).cause(self.there_are(&[])).hint("select one: -c LABEL"))
            }
            (Some(name), labels) => labels.iter().find(|label| label.name == name).ok_or_else(|| self.missing(name)),
        }
    }

    fn missing(&self, name: &str) -> ApiError {
        let names = self.labels.iter().map(|label| label.name.as_str());
        let near = nearest_few(name, names, 3);
        let error = ApiError::new(Code::NotFound, format!("{} has no label {}", self.path, Quoted(name)))
            .cause(self.there_are(&near));
        match near.first() {
            Some(meant) => error.hint(format!("did you mean `{meant}`?")),
            None => error.hint("select one of these: -c LABEL"),
        }
    }

    /// Lists the labels in one sentence. The labels in `first` come first.
    fn there_are(&self, first: &[&str]) -> String {
        let rest = self.labels.iter().map(|label| label.name.as_str()).filter(|name| !first.contains(name));
        let names: Vec<String> = first.iter().copied().chain(rest).take(MOST_LISTED).map(shown).collect();
        let more = match self.labels.len().saturating_sub(names.len()) {
            0 => String::new(),
            n => format!(" and {n} more"),
        };
        format!("the labels are: {}{more}", names.join(", "))
    }
}

/// Returns a name unchanged if printing it is safe; otherwise returns it quoted.
fn shown(name: &str) -> String {
    if name.chars().any(|c| c.is_control() || c.is_whitespace()) || name.len() > 80 {
        Quoted(name).to_string()
    } else {
        name.to_owned()
    }
}
