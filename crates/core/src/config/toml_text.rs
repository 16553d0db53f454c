//! Values in the notation of TOML.

use std::time::Duration;

use crate::duration;

/// Returns a string in quotes.
pub(super) fn text(value: &str) -> String {
    toml::Value::String(value.to_owned()).to_string()
}

/// Returns a duration as a string.
pub(super) fn span(duration: Duration) -> String {
    text(&duration::format(duration))
}

/// Returns a list of strings.
pub(super) fn list(values: &[String]) -> String {
    let items: Vec<String> = values.iter().map(|value| text(value)).collect();
    format!("[{}]", items.join(", "))
}
