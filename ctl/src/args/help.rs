//! The help pages: what a page shows first, and the groups of commands on the first page.
//!
//! The definitions hold the text after the options (`after_help`), which man pages need in this form. A help page on the
//! terminal has another order:
//!
//! ```text
//! about · usage · examples · arguments and options · notes · one line about global options
//! ```
//!
//! Only help needs this order, so a command line without `--help` does not pay for it.

use std::{
    fmt::Write as _,
    io::{IsTerminal as _, Write as _},
};

use clap::{Arg, Command, CommandFactory as _};

use super::{Cli, default_verb};

/// Headings of the first page, each with its commands. A test checks that each command has one heading.
const SECTIONS: [(&str, &[&str]); 3] = [
    ("Use", &["status", "top", "run", "lease", "ps", "quota", "usage"]),
    (
        "Administer",
        &["apply", "mig", "mps", "gpu", "config", "maintenance", "operation", "events", "audit", "doctor", "advise"],
    ),
    ("Integrate and explain", &["slurm", "metrics", "explain", "support-bundle", "version"]),
];

/// The last line of each page except the first.
const GLOBAL: &str = "Global options such as -o json, --no-headers and --socket: `gpushctl --help`";

/// Ids of arguments that are required unless an option replaces them. clap would show them as optional.
const REQUIRED: [&str; 2] = ["some_gpus", "target_or_gpu"];

/// Prints the help page of the command that these words name.
pub(crate) fn print(words: &[&str]) {
    let mut page = page_of(words);
    let help = page.render_help();
    let is_colored = std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    let text = if is_colored { help.ansi().to_string() } else { help.to_string() };
    // The reader may have closed the pipe, as in `gpushctl --help | head -1`.
    let _ = std::io::stdout().write_all(text.as_bytes());
}

/// Returns the command that these words name, as far as they name one. `help lease` means `lease --help`.
fn page_of(words: &[&str]) -> Command {
    let mut command = arranged(Cli::command());
    for word in words.iter().skip_while(|word| **word == "help") {
        match command.find_subcommand(word) {
            Some(found) => command = found.clone(),
            None => break,
        }
    }
    command
}

/// Returns the command that these words name, without its arguments: `gpushctl lease end`.
pub(crate) fn path(words: &[&str]) -> String {
    let root = Cli::command();
    let (mut command, mut path) = (&root, "gpushctl".to_owned());
    for word in words {
        let Some(found) = command.find_subcommand(word) else { break };
        let _ = write!(path, " {}", found.get_name());
        command = found;
    }
    path
}

/// Arranges all help pages of a command line.
pub(super) fn arranged(mut root: Command) -> Command {
    root.build();
    let template = first_page(&root);
    root.help_template(template).mut_subcommands(page)
}

fn page(command: Command) -> Command {
    let required: Vec<_> =
        command.get_arguments().map(Arg::get_id).filter(|id| REQUIRED.contains(&id.as_str())).cloned().collect();
    let global: Vec<_> =
        command.get_arguments().filter(|arg| arg.is_global_set()).map(|arg| arg.get_id().clone()).collect();
    let after = command.get_after_help().map(ToString::to_string).unwrap_or_default();
    let default = default_verb::of_group(command.get_name()).filter(|_| command.has_subcommands());
    let (examples, notes) = split(&after);
    let mut command = command;
    for id in required {
        command = command.mut_arg(id, |arg| arg.required(true));
    }
    for id in global {
        command = command.mut_arg(id, |arg| arg.hide(true));
    }
    let mut template = "{about-with-newline}\n{usage-heading} {usage}\n\n".to_owned();
    if let Some(examples) = examples {
        let _ = write!(template, "Examples:\n{examples}\n\n");
    }
    template += "{all-args}\n";
    if let Some(verb) = default {
        let _ = write!(template, "\nWithout a command: `{verb}`.\n");
    }
    if !notes.is_empty() {
        let _ = write!(template, "\n{notes}\n");
    }
    let _ = write!(template, "\n{GLOBAL}");
    command.help_template(template).mut_subcommands(page)
}

/// Splits the text after the options into the examples, without their heading, and the rest.
fn split(after: &str) -> (Option<String>, String) {
    let mut examples = None;
    let mut notes = Vec::new();
    for block in after.split("\n\n") {
        match block.strip_prefix("Examples:\n") {
            Some(lines) => examples = Some(lines.to_owned()),
            None => notes.push(block),
        }
    }
    (examples, notes.join("\n\n"))
}

/// Returns the template of the first page.
fn first_page(root: &Command) -> String {
    let mut out = "{about-with-newline}\n{usage-heading} {usage}\n".to_owned();
    for (heading, commands) in SECTIONS {
        let _ = write!(out, "\n{heading}:\n");
        for name in commands {
            let about = root.find_subcommand(name).and_then(Command::get_about).map(ToString::to_string);
            let _ = writeln!(out, "  {name:<14} {}", about.unwrap_or_default());
        }
    }
    out + "\n{options}{after-help}"
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn each_command_has_one_heading() {
        let root = Cli::command();
        let listed: Vec<&str> = SECTIONS.iter().flat_map(|(_, commands)| *commands).copied().collect();
        let distinct: BTreeSet<&str> = listed.iter().copied().collect();
        assert_eq!(listed.len(), distinct.len());
        let shown = root.get_subcommands().filter(|command| !command.is_hide_set()).map(Command::get_name);
        assert_eq!(distinct, shown.collect());
    }

    #[test]
    fn each_command_has_examples() {
        fn check(command: &Command, path: &str) {
            let path = format!("{path} {}", command.get_name());
            let after = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            assert!(command.has_subcommands() || split(&after).0.is_some(), "{path} has no examples");
            command.get_subcommands().filter(|one| !one.is_hide_set()).for_each(|one| check(one, &path));
        }
        check(&Cli::command(), "");
    }

    #[test]
    fn page_is_that_of_the_named_command() {
        for (words, about) in [
            (&["lease"][..], "Request, list, show"),
            (&["help", "lease", "end"], "End leases"),
            (&["mig", "apply", "3g.40gb"], "Apply a layout"),
            (&["leases", "ls"], "List leases"),
            (&[], "Share and observe"),
        ] {
            let text = page_of(words).render_help().to_string();
            assert!(text.starts_with(about), "{words:?}: {text}");
        }
    }

    #[test]
    fn path_has_the_command_without_arguments() {
        let cases =
            [(&["leases", "end", "L17"][..], "gpushctl lease end"), (&["bogus"], "gpushctl"), (&[], "gpushctl")];
        for (words, named) in cases {
            assert_eq!(path(words), named, "{words:?}");
        }
    }

    #[test]
    fn examples_are_separated_from_notes() {
        assert_eq!(split("a\n\nExamples:\n  x\n  y\n\nb"), (Some("  x\n  y".into()), "a\n\nb".into()));
        assert_eq!(split("a"), (None, "a".into()));
    }
}
