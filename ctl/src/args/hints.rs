//! Parses every command that a message names with the definitions of the command line.
//!
//! The tests read the source of all crates that ship. A message cannot name a command that does not exist.

use std::path::{Path, PathBuf};

use clap::Parser;

use super::Cli;

/// Folders with messages, relative to the root of the workspace.
const SOURCES: [&str; 8] = [
    "agent/src",
    "ctl/src",
    "crates/core/src",
    "crates/client/src",
    "crates/nvml/src",
    "crates/store/src",
    "crates/mps/src",
    "crates/host/src",
];

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    let Ok(entries) = std::fs::read_dir(folder) else { return };
    for entry in entries.map(|entry| entry.unwrap().path()) {
        if entry.file_name().is_some_and(|name| name == "pages.rs" || name == "hints.rs") {
            continue;
        }
        if entry.is_dir() {
            if entry.file_name().is_some_and(|name| name != "tests") {
                sources(&entry, found);
            }
        } else if entry.extension().is_some_and(|extension| extension == "rs") {
            found.push(entry);
        }
    }
}

/// Returns the text of a file without comments and unit tests. Joins the lines of one string literal.
fn messages(file: &Path) -> String {
    let text = std::fs::read_to_string(file).unwrap();
    let shipped = text.split("#[cfg(test)]").next().unwrap_or_default();
    let lines = shipped.lines().map(str::trim).filter(|line| !line.starts_with("//"));
    lines.map(|line| line.strip_suffix('\\').map_or_else(|| format!("{line}\n"), str::to_owned)).collect()
}

/// Returns the commands between quotes that begin with `gpushctl `.
fn commands(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    for quote in ['`', '\''] {
        let start = format!("{quote}gpushctl ");
        let mut rest = text;
        while let Some(at) = rest.find(&start) {
            rest = &rest[at + 1..];
            let Some(end) = rest.find([quote, '\n', '"']) else { break };
            found.push(rest[..end].to_owned());
        }
    }
    found
}

/// Returns the words of a command. Replaces each `{…}` by a value.
fn words(command: &str) -> Vec<String> {
    let mut plain = String::new();
    let mut depth = 0;
    for c in command.chars() {
        match c {
            '{' => {
                depth += 1;
                plain.push('0');
            }
            '}' => depth -= 1,
            '\\' => {}
            c if depth == 0 => plain.push(c),
            _ => {}
        }
    }
    // The rest is for the shell: redirections and other commands.
    let plain = plain.split([';', '>', '|', '&']).next().unwrap_or_default();
    plain.split_whitespace().map(|word| word.trim_matches('\'').to_owned()).collect()
}

#[test]
fn every_command_in_a_message_parses() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut files = Vec::new();
    SOURCES.iter().for_each(|folder| sources(&root.join(folder), &mut files));
    let (mut seen, mut wrong) = (0, Vec::new());
    for file in files {
        for command in commands(&messages(&file)) {
            seen += 1;
            let mut words = words(&command);
            // `{verb}` is a subcommand, not a value.
            if let [_, noun, verb, ..] = words.as_mut_slice()
                && verb == "0"
                && noun == "mps"
            {
                *verb = "stop".to_owned();
            }
            // `{id}` and `LEASE` stand for a lease id, such as `L17`.
            if words.iter().any(|word| word == "lease" || word == "--lease") {
                words
                    .iter_mut()
                    .filter(|word| *word == "0" || *word == "LEASE")
                    .for_each(|word| *word = "L17".to_owned());
            }
            if let Err(error) = Cli::try_parse_from(&words)
                && error.use_stderr()
                && error.kind() != clap::error::ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand
            {
                let first = error.to_string().lines().next().unwrap_or_default().to_owned();
                wrong.push(format!("{}: `{command}`: {first}", file.display()));
            }
        }
    }
    assert!(seen > 100, "only {seen} commands were found");
    assert!(wrong.is_empty(), "{} of {seen}:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn no_message_tells_a_user_to_run_sudo() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut files = Vec::new();
    SOURCES.iter().for_each(|folder| sources(&root.join(folder), &mut files));
    let told: Vec<_> = files.iter().filter(|file| messages(file).contains("sudo ")).collect();
    assert!(told.is_empty(), "{told:?}");
}
