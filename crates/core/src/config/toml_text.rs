//! Values in the notation of TOML.

/// Returns a string in quotes.
pub(super) fn text(value: &str) -> String {
    toml::Value::String(value.to_owned()).to_string()
}

/// Returns a list of strings.
pub(super) fn list(values: &[String]) -> String {
    let items: Vec<String> = values.iter().map(|value| text(value)).collect();
    format!("[{}]", items.join(", "))
}
