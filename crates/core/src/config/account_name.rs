//! The form of user and group names in the config.

use super::reader::{Reader, Text};
use crate::{diagnostic::Problem, quote::Quoted};

/// Checks the form of a user or group name, but not whether the host has this user or group. `all` says how to name all
/// users.
pub(super) fn account(reader: &mut Reader<'_>, text: Text, key: &str, all: &str) -> Option<String> {
    // Some programs mark a group with @ or %.
    let bare = text.value.trim_start_matches(['@', '%']);
    if bare.len() < text.value.len() {
        let group = Quoted(bare);
        let hint = if key == "users" {
            format!("for the members of group {group}, write its name in `groups`, without @ or %")
        } else {
            format!("write the name of the group without @ or %: {group}")
        };
        let message = format!("{} is not a name", Quoted(&text.value));
        reader.report(Problem::new(text.span, message, hint));
        return None;
    }
    if text.value.chars().any(|c| c.is_whitespace() || matches!(c, ':' | ',' | '/' | '*')) {
        let what = if key == "users" { "user" } else { "group" };
        let hint = format!("write the name of one {what} in each string; for all users, {all}");
        reader.report(Problem::new(text.span, format!("{} is not the name of a {what}", Quoted(&text.value)), hint));
        return None;
    }
    Some(text.value)
}
