//! Removes command lines of processes from texts.
//!
//! It finds command lines that also occur in the bundle's JSON documents, and command lines in gpushd's messages about
//! processes. It keeps the program paths that the config contains.

use std::collections::BTreeSet;

use super::USER;

/// Text that replaces a command line.
pub(super) const COMMAND: &str = "(command)";

/// Minimum number of bytes of a known command line with arguments, and of one without arguments. A shorter one may be
/// a part of any text.
const SHORTEST: (usize, usize) = (8, 12);

/// A text counts as the beginning of a known command line if at least this many bytes are equal.
const SHORTEST_BEGINNING: usize = 12;

/// Known command lines.
#[derive(Debug, Default)]
pub(super) struct CommandLines {
    known: BTreeSet<String>,
    /// Paths and file names of the programs that the config names.
    programs: BTreeSet<String>,
}

impl CommandLines {
    /// Registers a command line for removal, unless it is too short.
    pub(super) fn learn(&mut self, command: &str) {
        let command = command.trim();
        let shortest = if command.contains(' ') { SHORTEST.0 } else { SHORTEST.1 };
        if command.len() >= shortest {
            self.known.insert(command.to_owned());
        }
    }

    /// Keeps the programs that a config names by their absolute paths in quotes.
    pub(super) fn keep_programs(&mut self, config: &str) {
        for path in
            config.split(['"', '\'']).filter(|path| path.starts_with('/') && !path.contains(char::is_whitespace))
        {
            self.programs.insert(path.to_owned());
            self.programs.extend(path.rsplit('/').next().map(str::to_owned));
        }
    }

    /// Removes command lines from a line of text.
    pub(super) fn without(&self, line: &str) -> String {
        // Use the reverse order: a command line must come before a shorter one that is a prefix of it.
        let removed = self.known.iter().rev().filter(|command| !self.programs.contains(*command));
        removed.fold(without_forms(line), |line, command| without_command(&line, command))
    }
}

/// Removes known and unknown command lines where gpushd's messages have one of these forms:
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

/// Removes each occurrence of a known command line, unless it is only a part of a longer word. Also removes a truncated
/// command line, which ends with `…`.
fn without_command(line: &str, command: &str) -> String {
    let beginning = command.get(..SHORTEST_BEGINNING.min(command.len())).unwrap_or(command);
    let has_arguments = command.contains(' ');
    // `train.py` is not the command line in `/opt/train.py`, but `python train.py` is the one in `/bin/python train.py`.
    let is_in_word = |c: char| c.is_alphanumeric() || c == '_' || (!has_arguments && matches!(c, '/' | '-' | '.'));
    let (mut kept, mut rest) = (String::new(), line);
    while let Some(at) = rest.find(beginning) {
        let equal = rest[at..].chars().zip(command.chars()).take_while(|(one, other)| one == other);
        let length: usize = equal.map(|(one, _)| one.len_utf8()).sum();
        let before = rest[..at].chars().next_back().or_else(|| kept.chars().next_back());
        let after = &rest[at + length..];
        let ends = if length == command.len() { ends_word(after) } else { after.starts_with('…') };
        kept += &rest[..at];
        if ends && !before.is_some_and(is_in_word) {
            kept += COMMAND;
            rest = after;
        } else {
            kept += beginning;
            rest = &rest[at + beginning.len()..];
        }
    }
    kept + rest
}

/// Whether a word ends before this text. A full stop ends a word only at the end of a sentence.
fn ends_word(after: &str) -> bool {
    let after = after.strip_prefix('.').unwrap_or(after);
    !after.starts_with(|c: char| c.is_alphanumeric() || matches!(c, '_' | '-' | '/'))
}
