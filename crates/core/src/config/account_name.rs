//! The form of user and group names in the config.

use super::reader::{Reader, Text};
use crate::{diagnostic::Problem, quote::Quoted};

/// Checks the form of a user or group name, but not whether the host has this user or group. `all` says how to name all
/// users.
pub(super) fn account(reader: &mut Reader<'_>, text: Text, key: &str, all: &str) -> Option<String> {
    if text.value.chars().any(|c| c.is_whitespace() || matches!(c, ':' | ',' | '/' | '*')) {
        let what = if key == "users" { "user" } else { "group" };
        let hint = format!("write the name of one {what} in each string; for all users, {all}");
        reader.report(Problem::new(text.span, format!("{} is not the name of a {what}", Quoted(&text.value)), hint));
        return None;
    }
    Some(text.value)
}
