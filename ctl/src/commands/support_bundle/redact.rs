//! Removes personal data and secrets from the files of a bundle.
//!
//! - A user name becomes `uid:1000`. Names come from the JSON documents, the config and
//!   `/etc/passwd`. Names of system users are kept, because they are not personal.
//! - A command line becomes `(command)`. In JSON, a command line is the value of a field. In
//!   messages, this module recognizes a command line by its form, because the process may have ended
//!   long ago. When in doubt, this module removes more of the line.
//! - A value that looks like a password or token becomes `(secret)`, even with `--with-names`.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::RangeInclusive,
};

use serde_json::Value;

/// Text that replaces a command line.
const COMMAND: &str = "(command)";

/// Text that replaces the name of a user whose uid is not known.
const USER: &str = "(user)";

/// Text that replaces a secret.
const SECRET: &str = "(secret)";

/// The value after one of these words and `=` or `:` is a secret.
const SECRET_NAMES: [&str; 9] =
    ["token", "password", "passwd", "secret", "apikey", "api_key", "api-key", "credential", "bearer"];

/// Uids of system users, such as `slurm`, `nobody` and dynamic users of systemd.
const OF_SYSTEM_USERS: [RangeInclusive<u64>; 2] = [0..=999, 60_000..=65_535];

/// A text counts as the beginning of a known command line if at least this many bytes are equal.
const SHORTEST_BEGINNING: usize = 12;

/// The names and command lines to remove.
#[derive(Debug)]
pub(super) struct Redactor {
    with_names: bool,
    /// For each user name, the text that replaces it.
    users: BTreeMap<String, String>,
    /// Known command lines.
    commands: BTreeSet<String>,
}

impl Redactor {
    /// Creates a redactor. With `with_names`, it keeps user names and command lines.
    pub(super) fn new(with_names: bool) -> Self {
        Self { with_names, users: BTreeMap::new(), commands: BTreeSet::new() }
    }

    /// Adds the users in a file to the names to remove. The file has the form of `/etc/passwd`.
    pub(super) fn learn_passwd(&mut self, passwd: &str) {
        for line in passwd.lines() {
            let mut fields = line.split(':');
            if let (Some(name), Some(uid)) = (fields.next(), fields.nth(1).and_then(|uid| uid.parse().ok())) {
                self.learn_user(name, Some(uid));
            }
        }
    }

    /// Adds a user name to the names to remove, unless it belongs to a system user. If `uid` is `None`, `(user)`
    /// replaces the name.
    pub(super) fn learn_user(&mut self, name: &str, uid: Option<u64>) {
        let is_person = uid.is_none_or(|uid| !OF_SYSTEM_USERS.iter().any(|uids| uids.contains(&uid)));
        if is_person && !name.is_empty() {
            let replacement = uid.map_or_else(|| USER.to_owned(), |uid| format!("uid:{uid}"));
            self.users.insert(name.to_owned(), replacement);
        }
    }

    /// Adds the users and command lines of a document to the names and command lines to remove.
    pub(super) fn learn(&mut self, document: &Value) {
        match document {
            Value::Object(fields) => {
                if let Some(Value::String(name)) = fields.get("user") {
                    self.learn_user(name, fields.get("uid").and_then(Value::as_u64));
                }
                // Ignore a short program name without arguments. It is not personal, and may be a part of any text.
                if let Some(Value::String(command)) = fields.get("command")
                    && (command.trim().contains(' ') || command.len() >= SHORTEST_BEGINNING)
                {
                    self.commands.insert(command.clone());
                }
                fields.values().for_each(|value| self.learn(value));
            }
            Value::Array(values) => values.iter().for_each(|value| self.learn(value)),
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
        }
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
                fields.values_mut().for_each(|value| self.document(value));
            }
            Value::Array(values) => values.iter_mut().for_each(|value| self.document(value)),
            Value::String(text) => *text = self.text(text),
            Value::Null | Value::Bool(_) | Value::Number(_) => {}
        }
    }

    /// Removes personal data and secrets from each line of a text.
    pub(super) fn text(&self, text: &str) -> String {
        text.split_inclusive('\n').map(|line| self.line(line)).collect()
    }

    fn line(&self, line: &str) -> String {
        let (line, end) = line.strip_suffix('\n').map_or((line, ""), |line| (line, "\n"));
        let mut line = line.to_owned();
        if !self.with_names {
            line = without_forms(&line);
            for command in &self.commands {
                line = without_command(&line, command);
            }
            for (name, replacement) in self.users.iter().rev() {
                line = without_word(&line, name, replacement);
            }
        }
        without_secrets(&line) + end
    }
}

/// Removes command lines in the forms in which gpushd's messages contain them, even unknown ones:
///
/// ```text
/// python train.py (pid 4711, alice)            the text before the pid
/// pid 4711 (alice, python train.py)            the text in the parentheses, up to the last parenthesis
/// process 4711 (python train.py) has no lease
/// pid 4711 of alice: python train.py           the text after the colon
/// command="python"                             the rest of the line
/// ```
fn without_forms(line: &str) -> String {
    let mut line = line.to_owned();
    if let Some(at) = line.rfind("(pid ")
        && let Some(rest) = after_number(&line[at + 5..]).and_then(|rest| rest.strip_prefix(", "))
    {
        let user = line.len() - rest.len();
        if !rest.starts_with("uid ") {
            line.replace_range(user..rest.find(')').map_or(line.len(), |end| user + end), USER);
        }
        // Keep time, host and program at the beginning of a journal line.
        let kept = line[..at].find("]: ").map_or(0, |end| end + 3);
        if kept < at {
            line.replace_range(kept..at, &format!("{COMMAND} "));
        }
    }
    for word in ["pid ", "process "] {
        let mut from = 0;
        while let Some(found) = line[from..].find(word) {
            let number = from + found + word.len();
            from = number;
            let Some(rest) = after_number(&line[number..]) else { continue };
            let rest_at = line.len() - rest.len();
            if rest.starts_with(" (") {
                let end = line.rfind(')').filter(|end| *end > rest_at).map_or(line.len(), |end| end + 1);
                line.replace_range(rest_at + 1..end, COMMAND);
            } else if rest.starts_with(" of ") && rest.contains(": ") {
                line.replace_range(rest_at.., &format!(" of {USER}: {COMMAND}"));
            }
        }
    }
    if let Some(at) = line.find("command=") {
        line.replace_range(at + "command=".len().., COMMAND);
    }
    line
}

/// Returns the text after the number with which the text begins.
fn after_number(text: &str) -> Option<&str> {
    let rest = text.trim_start_matches(|c: char| c.is_ascii_digit());
    (rest.len() < text.len()).then_some(rest)
}

/// Removes each occurrence of a known command line. If the line contains only the beginning of the command line,
/// removes this beginning.
fn without_command(line: &str, command: &str) -> String {
    let beginning = command.get(..SHORTEST_BEGINNING.min(command.len())).unwrap_or(command);
    let (mut kept, mut rest) = (String::new(), line);
    while let Some(at) = rest.find(beginning) {
        let equal = rest[at..].chars().zip(command.chars()).take_while(|(one, other)| one == other);
        let length: usize = equal.map(|(one, _)| one.len_utf8()).sum();
        kept += &rest[..at];
        kept += COMMAND;
        rest = &rest[at + length..];
    }
    kept + rest
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

/// Removes values that look like secrets: `--token=x`, `--token x`, `API_KEY=x`, `Bearer x`.
fn without_secrets(line: &str) -> String {
    let mut is_next_secret = false;
    let words = line.split_inclusive(char::is_whitespace).map(|word| {
        let bare = word.trim_end();
        let space = &word[bare.len()..];
        if bare.is_empty() {
            return word.to_owned();
        }
        if std::mem::take(&mut is_next_secret) {
            return format!("{SECRET}{space}");
        }
        let lower = bare.to_ascii_lowercase();
        let Some(name) = SECRET_NAMES.iter().filter_map(|name| lower.find(name).map(|at| at + name.len())).max() else {
            return word.to_owned();
        };
        match lower[name..].find(['=', ':']).map(|at| name + at + 1) {
            Some(value) if value < bare.len() => format!("{}{SECRET}{space}", &bare[..value]),
            Some(_) => {
                is_next_secret = true;
                word.to_owned()
            }
            None => {
                is_next_secret = bare.starts_with('-') || lower.ends_with("bearer");
                word.to_owned()
            }
        }
    });
    words.collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn redactor() -> Redactor {
        let mut redactor = Redactor::new(false);
        redactor.learn_passwd("root:x:0:0::/root:/bin/sh\nalice:x:1000:1000::/home/alice:/bin/sh\nal:x:1001:1:::\nslurm:x:64030:64030:::\n");
        redactor
    }

    #[test]
    fn fields_of_documents_lose_names_and_command_lines() {
        let mut document = json!({"processes": [{"pid": 7, "uid": 1002, "user": "bob", "command": "python x --key=1"}],
            "by": {"uid": 0, "user": "root"}, "reason": "bob asked, see python x --key=1", "command": null});
        let mut redactor = redactor();
        redactor.learn(&document);
        redactor.document(&mut document);
        assert_eq!(
            document,
            json!({"processes": [{"pid": 7, "uid": 1002, "user": "uid:1002", "command": "(command)"}],
                "by": {"uid": 0, "user": "uid:0"}, "reason": "uid:1002 asked, see (command)", "command": null})
        );
    }

    #[test]
    fn messages_about_ended_processes_lose_command_lines() {
        for (line, redacted) in [
            ("in use by pid 7 (alice, sh -c 'f(1)' k) now", "in use by pid 7 (command) now"),
            ("pid 7 (alice, a) and pid 8 (bob, b)", "pid 7 (command)"),
            ("pid 7 (alice, cut in the mid", "pid 7 (command)"),
            (
                "2026 n1 gpushd[9]: process 7 (x --pw 1) has no lease",
                "2026 n1 gpushd[9]: process 7 (command) has no lease",
            ),
            ("python: x (pid 7, ldap) holds it", "(command) (pid 7, (user)) holds it"),
            ("2026 n1 gpushd[9]: python x (pid 7, uid 5)", "2026 n1 gpushd[9]: (command) (pid 7, uid 5)"),
            ("pid 7 of ldap: python x", "pid 7 of (user): (command)"),
            ("a client waits command=\"x y\" more", "a client waits command=(command)"),
            ("another gpushd (pid 7) has the socket", "another gpushd (pid 7) has the socket"),
            ("GPU 0 (A100) process list", "GPU 0 (A100) process list"),
        ] {
            assert_eq!(redactor().text(line), redacted, "{line}");
        }
    }

    #[test]
    fn names_are_replaced_as_whole_words_only() {
        let text = "alice's /home/alice/x, al, alt, alice2, root, slurm.conf\nal\n";
        let redacted = "uid:1000's /home/uid:1000/x, uid:1001, alt, alice2, root, slurm.conf\nuid:1001\n";
        assert_eq!(redactor().text(text), redacted);
    }

    #[test]
    fn name_of_a_program_is_not_removed_from_messages() {
        let mut redactor = redactor();
        redactor.learn(&json!([{"command": "active"}, {"command": "sh"}]));
        assert_eq!(redactor.text("shared, active"), "shared, active");
    }

    #[test]
    fn known_command_line_that_is_cut_is_removed() {
        let mut redactor = redactor();
        redactor.learn(&json!({"command": "python train.py --run secretive"}));
        assert_eq!(redactor.text("ended python train.py --run sec…"), "ended (command)…");
    }

    #[test]
    fn secrets_are_removed_even_with_names() {
        let redactor = Redactor::new(true);
        for (line, redacted) in [
            ("alice python --token=abc x", "alice python --token=(secret) x"),
            ("run --api-key abc x", "run --api-key (secret) x"),
            ("WANDB_API_KEY=abc DB_PASSWORD:abc", "WANDB_API_KEY=(secret) DB_PASSWORD:(secret)"),
            ("Authorization: Bearer abc", "Authorization: Bearer (secret)"),
            ("password: abc\n", "password: (secret)\n"),
            ("pid 7 (alice, python)", "pid 7 (alice, python)"),
            ("a token is granted", "a token is granted"),
        ] {
            assert_eq!(redactor.text(line), redacted);
        }
    }
}
