//! Removes personal data and secrets from the files of a bundle.
//!
//! - A user name becomes `uid:1000`. Names come from the JSON documents, the config and
//!   `/etc/passwd`. Names of system users are kept, because they are not personal.
//! - A command line becomes `(command)`. In JSON, a command line is the value of a field. In
//!   messages, the module `command_lines` recognizes a command line by its form, because the process
//!   may have ended long ago. When in doubt, this module removes more of the line.
//! - A password, token or key becomes `(secret)`, even with `--with-names`, if the module `secrets`
//!   recognizes its pattern.

mod command_lines;
mod secrets;
#[cfg(test)]
mod tests;
mod values;

use std::{collections::BTreeMap, ops::RangeInclusive};

use serde_json::Value;

use self::{
    command_lines::{COMMAND, CommandLines},
    secrets::{SECRET, is_secret_name, without_secrets},
};

/// Text that replaces the name of a user whose uid is not known.
const USER: &str = "(user)";

/// Uids of system users, such as `slurm`, `nobody` and dynamic users of systemd.
const OF_SYSTEM_USERS: [RangeInclusive<u64>; 2] = [0..=999, 60_000..=65_535];

/// The names and command lines to remove.
#[derive(Debug)]
pub(super) struct Redactor {
    with_names: bool,
    /// For each user name, the text that replaces it.
    users: BTreeMap<String, String>,
    commands: CommandLines,
}

impl Redactor {
    /// Creates a redactor. With `with_names`, it keeps user names and command lines.
    pub(super) fn new(with_names: bool) -> Self {
        Self { with_names, users: BTreeMap::new(), commands: CommandLines::default() }
    }

    /// Registers the users of a file for removal. The file has the form of `/etc/passwd`.
    pub(super) fn learn_passwd(&mut self, passwd: &str) {
        for line in passwd.lines() {
            let mut fields = line.split(':');
            if let (Some(name), Some(uid)) = (fields.next(), fields.nth(1).and_then(|uid| uid.parse().ok())) {
                self.learn_user(name, Some(uid));
            }
        }
    }

    /// Registers a user name for removal, unless it belongs to a system user. If `uid` is `None`, `(user)`
    /// replaces the name.
    pub(super) fn learn_user(&mut self, name: &str, uid: Option<u64>) {
        let is_person = uid.is_none_or(|uid| !OF_SYSTEM_USERS.iter().any(|uids| uids.contains(&uid)));
        if is_person && !name.is_empty() {
            let replacement = uid.map_or_else(|| USER.to_owned(), |uid| format!("uid:{uid}"));
            self.users.insert(name.to_owned(), replacement);
        }
    }

    /// Registers the users and command lines of a document for removal.
    pub(super) fn learn(&mut self, document: &Value) {
        match document {
            Value::Object(fields) => {
                if let Some(Value::String(name)) = fields.get("user") {
                    self.learn_user(name, fields.get("uid").and_then(Value::as_u64));
                }
                // A holder without a pid is a lease.
                if let Some(Value::String(command)) = fields.get("command")
                    && fields.get("pid").is_some_and(Value::is_u64)
                {
                    self.commands.learn(command);
                }
                fields.values().for_each(|value| self.learn(value));
            }
            Value::Array(values) => values.iter().for_each(|value| self.learn(value)),
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
        }
    }

    /// Keeps the programs that a config names. They are not command lines of users.
    pub(super) fn keep_programs(&mut self, config: &str) {
        self.commands.keep_programs(config);
    }

    /// Removes personal data and secrets from a document.
    pub(super) fn document(&self, document: &mut Value) {
        match document {
            Value::Object(fields) => {
                if !self.with_names && fields.get("command").is_some_and(Value::is_string) {
                    fields.insert("command".to_owned(), COMMAND.into());
                }
                if !self.with_names && fields.get("user").is_some_and(Value::is_string) {
                    let uid = fields.get("uid").and_then(Value::as_u64);
                    let name = uid.map_or_else(|| USER.to_owned(), |uid| format!("uid:{uid}"));
                    fields.insert("user".to_owned(), name.into());
                }
                for (name, value) in fields.iter_mut() {
                    match value {
                        Value::Null | Value::Bool(_) => {}
                        value if is_secret_name(name) => *value = SECRET.into(),
                        value => self.document(value),
                    }
                }
            }
            Value::Array(values) => values.iter_mut().for_each(|value| self.document(value)),
            Value::String(text) => *text = self.text(text),
            Value::Null | Value::Bool(_) | Value::Number(_) => {}
        }
    }

    /// Removes personal data and secrets from a text.
    pub(super) fn text(&self, text: &str) -> String {
        if self.with_names {
            return without_secrets(text);
        }
        let lines = text.split_inclusive('\n').map(|line| {
            let (line, end) = line.strip_suffix('\n').map_or((line, ""), |line| (line, "\n"));
            self.commands.without(line) + end
        });
        // Remove secrets before user names: `uid:1000` contains a colon, like `USER:PASSWORD`.
        let text = without_secrets(&lines.collect::<String>());
        self.users.iter().rev().fold(text, |text, (name, replacement)| without_word(&text, name, replacement))
    }
}

/// Replaces a name by `replacement`, unless the name is only a part of a longer word.
fn without_word(line: &str, name: &str, replacement: &str) -> String {
    let is_in_word = |c: char| c.is_alphanumeric() || c == '_';
    let (mut kept, mut rest) = (String::new(), line);
    while let Some(at) = rest.find(name) {
        let before = rest[..at].chars().next_back().or_else(|| kept.chars().next_back());
        let after = rest[at + name.len()..].chars().next();
        let is_word = !before.is_some_and(is_in_word) && !after.is_some_and(is_in_word);
        kept += &rest[..at];
        kept += if is_word { replacement } else { name };
        rest = &rest[at + name.len()..];
    }
    kept + rest
}
