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
        &[
            "apply",
            "mig",
            "mps",
            "gpu",
            "config",
            "maintenance",
            "enforce",
            "operation",
            "events",
            "audit",
            "doctor",
            "bill",
            "advise",
        ],
    ),
    ("Integrate and explain", &["slurm", "metrics", "explain", "support-bundle", "version"]),
];

/// The end of the first page: examples, exit statuses and other facts about all commands.
pub(crate) const FIRST_PAGE_NOTES: &str = "\
Examples:
  gpushctl status                             # users of GPUs, free shares
  gpushctl run --mig 1g.10gb -- python x.py   # run a program on a share
  gpushctl lease list --mine                  # your leases
  gpushctl apply --dry-run                    # what would change on GPUs

GPUs are named by index, range 0-3, (start of) UUID, PCI address, or model.
Durations are 90s, 15m, 1h30m, 2d, or a number of seconds.

Exit status:
  0 done                   5 denied
  1 other error            6 gpushd unreachable
  2 wrong usage            7 unsupported
  3 differs or drift       8 timed out
  4 blocked or busy      130 interrupted
  only `run`: 125 no lease, 126 command not runnable, 127 not found

Environment:
  GPUSH_SOCKET  socket of gpushd [default: /run/gpush/gpushd.sock, or
                $XDG_RUNTIME_DIR/gpush/gpushd.sock if it does not exist]
  GPUSH_CONFIG  config file for `config check` and offline plans
  NO_COLOR      no colours; otherwise, a terminal has colours
  LANG          if it is not UTF-8, drawings use ASCII only";

/// Examples for the pages of groups.
const OF_GROUPS: [(&str, &str); 12] = [
    ("lease", "gpushctl lease request --mig 1g.10gb --for 2h\ngpushctl lease list --mine\ngpushctl lease end L17"),
    ("mig", "gpushctl mig list --free\ngpushctl mig apply '1g.10gb*7' -g 0 --dry-run\ngpushctl mig profiles 0"),
    ("mps", "gpushctl mps list\ngpushctl mps clients\ngpushctl mps restart 0"),
    ("gpu", "gpushctl gpu show 0\ngpushctl gpu drain 3 --reason 'new fan'\ngpushctl gpu uncordon 3"),
    ("config", "gpushctl config check\ngpushctl config diff\ngpushctl config init --site lab"),
    ("overrides", "gpushctl config overrides list\ngpushctl config overrides clear 0"),
    ("maintenance", "gpushctl maintenance enter --reason 'driver 570'\ngpushctl maintenance leave"),
    ("enforce", "gpushctl enforce plan\ngpushctl enforce on\ngpushctl enforce shell -- nvidia-smi"),
    ("operation", "gpushctl operation list\ngpushctl operation wait op-17"),
    ("advise", "gpushctl advise --tenants 4 --isolation hard --workload inference\ngpushctl advise queue --tenants 7"),
    ("slurm", "gpushctl slurm gres-conf\ngpushctl slurm reconcile\ngpushctl slurm usage 812"),
    ("metrics", "gpushctl metrics show\ngpushctl metrics serve --listen 127.0.0.1:9945"),
];

/// The last line of each page except the first.
const GLOBAL: &str = "Global options such as -o json, --no-headers and --socket: `gpushctl --help`";

/// Number of columns of a page that is not printed on a terminal.
const WIDTH: usize = 80;

/// Ids of arguments that are required unless an option replaces them. clap would show them as optional.
const REQUIRED: [&str; 2] = ["some_gpus", "target_or_gpu"];

/// Prints the help page of the command that these words name.
pub(crate) fn print(words: &[&str]) {
    let is_terminal = std::io::stdout().is_terminal();
    // The reader may have closed the pipe, as in `gpushctl --help | head -1`.
    let _ = std::io::stdout().write_all(text(words, is_terminal).as_bytes());
}

/// Prints the help page of a group that was typed without a command.
pub(crate) fn print_to_stderr(words: &[&str]) {
    let is_terminal = std::io::stderr().is_terminal();
    let _ = std::io::stderr().write_all(text(words, is_terminal).as_bytes());
}

fn text(words: &[&str], is_terminal: bool) -> String {
    let has_width = is_terminal || std::env::var_os("COLUMNS").is_some();
    let root = if has_width { Cli::command() } else { Cli::command().term_width(WIDTH) };
    let help = page_of(root, words).render_help();
    let is_colored = is_terminal && std::env::var_os("NO_COLOR").is_none();
    if is_colored { help.ansi().to_string() } else { help.to_string() }
}

/// Returns the command that these words name, as far as they name one. `help lease` means `lease --help`.
fn page_of(root: Command, words: &[&str]) -> Command {
    let mut command = arranged(root);
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
    let examples = examples.or_else(|| of_group(&command));
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

/// Returns the examples of a group.
fn of_group(command: &Command) -> Option<String> {
    let (_, lines) = OF_GROUPS.iter().find(|(name, _)| command.has_subcommands() && *name == command.get_name())?;
    Some(format!("  {}", lines.replace('\n', "\n  ")))
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
    let (examples, notes) = split(FIRST_PAGE_NOTES);
    let mut out = "{about-with-newline}\n{usage-heading} {usage}\n\n".to_owned();
    let _ = writeln!(out, "Examples:\n{}", examples.unwrap_or_default());
    for (heading, commands) in SECTIONS {
        let _ = write!(out, "\n{heading}:\n");
        for name in commands {
            let about = root.find_subcommand(name).and_then(Command::get_about).map(ToString::to_string);
            let _ = writeln!(out, "  {name:<14} {}", about.unwrap_or_default());
        }
    }
    out += "\nGlobal options:\n";
    for arg in root.get_arguments() {
        let short = arg.get_short().map_or_else(|| "    ".to_owned(), |short| format!("-{short}, "));
        let takes = arg.get_action().takes_values();
        let value = arg.get_value_names().filter(|_| takes).and_then(|names| names.first());
        let value = value.map_or_else(String::new, |name| format!(" {name}"));
        let option = format!("{short}--{}{value}", arg.get_long().unwrap_or_default());
        let _ = writeln!(out, "  {option:<30}  {}", arg.get_help().map(ToString::to_string).unwrap_or_default());
    }
    format!("{out}\n{notes}")
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
            assert!(split(&after).0.or_else(|| of_group(command)).is_some(), "{path} has no examples");
            command.get_subcommands().filter(|one| !one.is_hide_set()).for_each(|one| check(one, &path));
        }
        check(&Cli::command(), "");
    }

    #[test]
    fn examples_of_groups_can_be_parsed() {
        for line in OF_GROUPS.iter().flat_map(|(_, lines)| lines.lines()) {
            // Every second part of the line is in quotes.
            let parts = line.split('\'').enumerate().flat_map(|(at, part)| match at % 2 {
                0 => part.split_whitespace().map(str::to_owned).collect(),
                _ => vec![part.to_owned()],
            });
            let words: Vec<String> = parts.skip(1).collect();
            assert!(super::super::words::can_be_parsed(&words), "{line}");
        }
    }

    /// Fault: a group without a command printed another page than with `--help`, and lines of 100 columns.
    #[test]
    fn page_without_a_terminal_has_80_columns() {
        for words in [&[][..], &["maintenance"], &["mig", "apply"]] {
            let text = text(words, false);
            assert!(text.lines().all(|line| line.chars().count() <= WIDTH), "{words:?}: {text}");
        }
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
            let text = page_of(Cli::command(), words).render_help().to_string();
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
