//! Checks that gpushctl accepts each command that a message names.
//!
//! The tests read the sources of all shipped crates. So a message cannot name a command that does
//! not exist.

use std::path::{Path, PathBuf};

use clap::Parser;

use super::{ApplyArgs, Cli, Command};

/// Directories whose sources contain messages, relative to the root of the workspace.
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
            if entry.file_name().is_some_and(|name| name != "tests" && name != "pictures") {
                sources(&entry, found);
            }
        } else if entry.extension().is_some_and(|extension| extension == "rs") {
            found.push(entry);
        }
    }
}

/// Returns the source text of a file without comments and unit tests. Joins a string literal that
/// spans several lines.
fn messages(file: &Path) -> String {
    let text = std::fs::read_to_string(file).unwrap();
    let shipped = text.split("#[cfg(test)]").next().unwrap_or_default();
    let lines = shipped.lines().map(str::trim).filter(|line| !line.starts_with("//"));
    lines.map(|line| line.strip_suffix('\\').map_or_else(|| format!("{line}\n"), str::to_owned)).collect()
}

/// Returns the commands in a text that are between quotes and begin with `gpushctl `.
fn commands(text: &str) -> Vec<String> {
    // A string literal may be a single command without quotes, because other code adds the quotes.
    let mut found: Vec<String> =
        text.starts_with("gpushctl ").then(|| text.lines().next().unwrap_or_default().to_owned()).into_iter().collect();
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

/// Returns the string literals of a text, without their quotes.
fn literals(text: &str) -> Vec<&str> {
    let mut found = Vec::new();
    let mut rest = text;
    while let Some(start) = rest.find('"') {
        let inner = &rest[start + 1..];
        let mut escaped = false;
        let end = inner.find(|c| {
            let ends = c == '"' && !escaped;
            escaped = c == '\\' && !escaped;
            ends
        });
        let Some(end) = end else { break };
        found.push(&inner[..end]);
        rest = &inner[end + 1..];
    }
    found
}

/// Returns the words of a command in a message. Replaces each placeholder `{…}` by a value.
fn command_words(command: &str) -> Vec<String> {
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
    // The text after these characters is for the shell, such as a redirection.
    let plain = plain.split([';', '>', '|', '&']).next().unwrap_or_default();
    plain.split_whitespace().map(|word| word.trim_matches('\'').to_owned()).collect()
}

/// Parses a command from a message, with a value for each placeholder `{…}`. An error has only the
/// first line of the parser's message.
fn parsed(command: &str) -> Result<Option<Command>, String> {
    let mut words = command_words(command);
    // In `mps {verb}` and `mig {verb}`, the placeholder is for a subcommand, not for a value.
    if let [_, noun, verb, ..] = words.as_mut_slice()
        && verb == "0"
    {
        match noun.as_str() {
            "mps" => *verb = "stop".to_owned(),
            "mig" => *verb = "apply".to_owned(),
            _ => {}
        }
    }
    // In `run {flags}{gpus}`, the placeholders are for options.
    if words.get(1).is_some_and(|command| command == "run") {
        words.retain(|word| word != "00");
        if words.get(2).is_some_and(|word| word == "0") {
            words.remove(2);
        }
    }
    // In `--for {time}`, the placeholder is for a duration.
    for at in 1..words.len() {
        if words[at - 1] == "--for" && words[at] == "0" {
            words[at] = "1h".to_owned();
        }
    }
    // Replace placeholders for the id of a lease by `L17`.
    if words.iter().any(|word| word == "lease" || word == "--lease") {
        words.iter_mut().filter(|word| *word == "0" || *word == "LEASE").for_each(|word| *word = "L17".to_owned());
    }
    // In `explain {uuid}`, the placeholder is for the UUID of a MIG device.
    if let [_, noun, uuid] = words.as_mut_slice()
        && noun == "explain"
        && uuid == "0"
    {
        *uuid = "MIG-5d1b03a2".to_owned();
    }
    match Cli::try_parse_from(&words) {
        Ok(cli) => Ok(Some(cli.command)),
        Err(error)
            if !error.use_stderr()
                || error.kind() == clap::error::ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand =>
        {
            Ok(None)
        }
        Err(error) => Err(error.to_string().lines().next().unwrap_or_default().to_owned()),
    }
}

fn all_sources() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut files = Vec::new();
    SOURCES.iter().for_each(|folder| sources(&root.join(folder), &mut files));
    // These files are tests, and do not ship.
    files.retain(|file| !file.components().any(|part| part.as_os_str() == "in_process"));
    files
}

#[test]
fn every_command_in_a_message_parses() {
    let (mut seen, mut wrong) = (0, Vec::new());
    for file in all_sources() {
        for command in commands(&messages(&file)) {
            seen += 1;
            if let Err(error) = parsed(&command) {
                wrong.push(format!("{}: `{command}`: {error}", file.display()));
            }
        }
    }
    assert!(seen > 100, "only {seen} commands were found");
    assert!(wrong.is_empty(), "{} of {seen}:\n{}", wrong.len(), wrong.join("\n"));
}

/// Returns whether only administrators may run a command.
fn is_for_administrators(command: &Command) -> bool {
    match command {
        Command::Audit(_) | Command::Recover(_) => true,
        Command::Status(_)
        | Command::Top(_)
        | Command::Run(_)
        | Command::Ps(_)
        | Command::Events(_)
        | Command::Metrics(_)
        | Command::Ready { .. }
        | Command::Doctor { .. }
        | Command::Advise(_)
        | Command::SupportBundle(_)
        | Command::Explain { .. }
        | Command::Version
        | Command::Completions { .. }
        | Command::Man { .. } => false,
        Command::Apply(ApplyArgs { execution, .. }) => !execution.dry_run,
        Command::Lease(lease) => lease.is_for_administrators(),
        Command::Quota(quota) => quota.is_for_administrators(),
        Command::Usage(usage) => usage.is_for_administrators(),
        Command::Bill(bill) => bill.is_for_administrators(),
        Command::Gpu(gpu) => gpu.is_for_administrators(),
        Command::Mig(mig) => mig.is_for_administrators(),
        Command::Mps(mps) => mps.is_for_administrators(),
        Command::Operation(operation) => operation.is_for_administrators(),
        Command::Config(config) => config.is_for_administrators(),
        Command::Maintenance(maintenance) => maintenance.is_for_administrators(),
        Command::Enforce(enforce) => enforce.is_for_administrators(),
        Command::Slurm(slurm) => slurm.is_for_administrators(),
    }
}

/// Files and directories whose messages may name commands for administrators without saying so. The
/// second text is the reason: only administrators read these messages.
const FOR_ADMINISTRATORS: [(&str, &str); 15] = [
    ("ctl/src/args/", "help and usage errors of the command itself"),
    ("agent/src/serve/http/slurm.rs", "errors of `slurm prolog` and `slurm epilog`"),
    ("ctl/src/commands/slurm/reconcile.rs", "errors of `slurm reconcile`"),
    ("ctl/src/commands/mig/room.rs", "errors of `mig add`"),
    ("ctl/src/commands/mig/numbers.rs", "errors of `mig add`, `mig apply --dry-run`, `mig apply`"),
    ("ctl/src/commands/apply.rs", "output of `apply`"),
    ("ctl/src/render/overrides.rs", "output of `config overrides clear`"),
    ("ctl/src/commands/reset.rs", "output of `gpu reset`"),
    ("ctl/src/commands/drain.rs", "output of `gpu drain`"),
    ("ctl/src/render/mps/change.rs", "output of `mps stop`"),
    ("agent/src/modes/mps/act.rs", "errors of `mps stop`, `restart`, `drain`"),
    ("agent/src/reconcile/reload.rs", "errors of `config reload`"),
    ("agent/src/requests/caller.rs", "a sentence that begins with `ask an administrator to`"),
    ("agent/src/operations/apply/interrupted.rs", "a list of commands that is marked at its end"),
    ("crates/core/src/lease/usage.rs", "a command that is marked in the texts that contain it"),
];

/// If a hint names a command that only administrators may run, the hint must say so. Otherwise
/// users try the command and are refused.
#[test]
fn commands_for_administrators_are_marked() {
    let (mut seen, mut wrong, mut used) = (0, Vec::new(), [false; FOR_ADMINISTRATORS.len()]);
    for file in all_sources() {
        let text = messages(&file);
        for literal in literals(&text) {
            let is_admin =
                |command: &String| parsed(command).ok().flatten().is_some_and(|one| is_for_administrators(&one));
            let Some(command) = commands(literal).into_iter().find(is_admin) else { continue };
            seen += 1;
            if literal.contains("administrator") {
                continue;
            }
            let path = file.display().to_string();
            match FOR_ADMINISTRATORS.iter().position(|(known, _)| path.contains(known)) {
                Some(at) => used[at] = true,
                None => wrong.push(format!("{path}: `{command}`: {literal}")),
            }
        }
    }
    assert!(seen > 30, "only {seen} commands were found");
    assert!(wrong.is_empty(), "{} of {seen}:\n{}", wrong.len(), wrong.join("\n"));
    let unused: Vec<_> =
        FOR_ADMINISTRATORS.iter().zip(used).filter(|(_, used)| !used).map(|((path, _), _)| path).collect();
    assert!(unused.is_empty(), "needless exceptions: {unused:?}");
}

#[test]
fn no_message_tells_a_user_to_run_sudo() {
    let files = all_sources();
    let wrong: Vec<_> = files.iter().filter(|file| messages(file).contains("sudo ")).collect();
    assert!(wrong.is_empty(), "{wrong:?}");
}
