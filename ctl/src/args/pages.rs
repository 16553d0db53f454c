//! Tests of two texts that are generated from the argument definitions: the help of all commands,
//! and `docs/cli.md`.

use std::fmt::Write as _;

use clap::{Arg, ArgAction, Command, CommandFactory as _};

use super::{Cli, help};

/// If this environment variable is set, the test writes `docs/cli.md` instead of comparing the
/// file.
const WRITE: &str = "GPUSH_WRITE_CLI";

fn command() -> Command {
    help::arranged(Cli::command().disable_help_subcommand(true).term_width(80))
}

/// Collects all commands that are not hidden, each with its path. A command comes before its
/// subcommands.
fn commands(command: &Command, path: &str, found: &mut Vec<(String, Command)>) {
    let path = if path.is_empty() { command.get_name().to_owned() } else { format!("{path} {}", command.get_name()) };
    found.push((path.clone(), command.clone()));
    for child in command.get_subcommands().filter(|child| !child.is_hide_set()) {
        commands(child, &path, found);
    }
}

fn all() -> Vec<(String, Command)> {
    let mut found = Vec::new();
    commands(&command(), "", &mut found);
    found
}

/// Returns the commands that are not hidden and do something, without the name of the program.
pub(crate) fn runnable_commands() -> Vec<String> {
    let does = |(_, command): &(String, Command)| !command.has_subcommands();
    all().into_iter().filter(does).map(|(path, _)| path.trim_start_matches("gpushctl ").to_owned()).collect()
}

fn is_own(arg: &&Arg) -> bool {
    !arg.is_hide_set() && !arg.is_global_set() && arg.get_id() != "help" && arg.get_id() != "version"
}

/// Returns the name of an argument's value. Escapes `|`, which would end a cell of the table.
fn value(arg: &Arg) -> String {
    arg.get_value_names().and_then(|names| names.first()).map_or_else(String::new, |name| name.replace('|', "\\|"))
}

/// Formats a positional argument: `[GPU]...`, `FILE`.
fn positional(arg: &Arg) -> String {
    let many = matches!(arg.get_action(), ArgAction::Append) || arg.get_num_args().is_some_and(|n| n.max_values() > 1);
    let name = value(arg);
    let name = if name.is_empty() { arg.get_id().to_string().to_uppercase() } else { name };
    let name = if arg.is_last_set() { format!("-- {name}") } else { name };
    let name = if many { format!("{name}...") } else { name };
    if arg.is_required_set() { name } else { format!("[{name}]") }
}

/// Formats an option: `-n, --number NUMBER`.
fn option(arg: &Arg) -> String {
    let mut names = Vec::new();
    names.extend(arg.get_short().map(|short| format!("-{short}")));
    names.extend(arg.get_long().map(|long| format!("--{long}")));
    let takes = arg.get_num_args().is_some_and(|n| n.takes_values());
    let text = names.join(", ");
    match (takes, arg.is_require_equals_set()) {
        (false, _) => text,
        (true, true) => format!("{text}[={}]", value(arg)),
        (true, false) => format!("{text} {}", value(arg)),
    }
}

fn page() -> String {
    let mut out = String::from(
        "# Commands of gpushctl\n\nA test generates this page from the argument definitions (`GPUSH_WRITE_CLI=1 cargo \
         test -p gpushctl --bin gpushctl pages`). For the full help and examples of a command, run `gpushctl COMMAND \
         --help`.\n",
    );
    let all = all();
    let (root, rest) = (&all[0].1, &all[1..]);
    let mut noun = "";
    for (path, command) in rest {
        let path = path.trim_start_matches("gpushctl ");
        let depth = path.split(' ').count();
        let first = path.split(' ').next().unwrap_or_default();
        if first != noun {
            noun = first;
            let _ = write!(out, "\n## {noun}\n\n{}.", command.get_about().map(ToString::to_string).unwrap_or_default());
            let aliases: Vec<_> = command.get_all_aliases().map(|alias| format!("`{alias}`")).collect();
            if !aliases.is_empty() {
                let _ = write!(out, " Also: {}.", aliases.join(", "));
            }
            out += "\n\n| command | what it does | options |\n|---|---|---|\n";
        }
        if command.has_subcommands() && (depth == 1 || command.is_subcommand_required_set()) {
            continue;
        }
        let arguments: String =
            command.get_positionals().filter(is_own).map(|arg| format!(" {}", positional(arg))).collect();
        let mut options: Vec<String> =
            command.get_arguments().filter(is_own).filter(|arg| !arg.is_positional()).map(option).collect();
        options.iter_mut().for_each(|option| *option = format!("`{option}`"));
        let aliases: Vec<_> =
            command.get_all_aliases().filter(|_| depth > 1).map(|alias| format!("`{alias}`")).collect();
        let about = command.get_about().map(ToString::to_string).unwrap_or_default();
        let also = if aliases.is_empty() { String::new() } else { format!(" (also {})", aliases.join(", ")) };
        let _ = writeln!(out, "| `{path}{arguments}` | {about}{also} | {} |", options.join(" "));
    }
    out += "\n## Options of every command\n\n| option | what it does |\n|---|---|\n";
    for arg in root.get_arguments().filter(|arg| arg.is_global_set() && !arg.is_hide_set()) {
        let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
        let _ = writeln!(out, "| `{}` | {help} |", option(arg));
    }
    out
}

#[test]
fn page_of_commands_matches_the_definitions() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/cli.md");
    let page = page();
    if std::env::var_os(WRITE).is_some() {
        std::fs::write(path, &page).unwrap();
    }
    let written = std::fs::read_to_string(path).unwrap_or_default();
    assert!(written == page, "docs/cli.md differs from the definitions: run this test with {WRITE}=1");
}

#[test]
fn help_of_every_command_fits_80_columns() {
    let mut out = String::new();
    for (path, mut command) in all() {
        let is_root = path == "gpushctl";
        let help = command.render_help().to_string();
        // All help pages have the same global options, so show them only on the first page.
        let own = match help.split_once("Global options:\n") {
            Some((before, after)) if !is_root => {
                format!("{before}{}", after.split_once("\n\n").map_or("", |(_, rest)| rest))
            }
            Some(_) | None => help,
        };
        for line in own.lines() {
            let columns = line.chars().count();
            assert!(columns <= 80, "{path}: {columns} columns: {line}");
        }
        let _ = write!(out, "$ {path} --help\n{own}\n");
    }
    insta::assert_snapshot!(out);
}

#[test]
fn one_flag_has_one_meaning() {
    let mut meanings: std::collections::BTreeMap<String, (String, String)> = std::collections::BTreeMap::new();
    for (path, command) in all() {
        for arg in command.get_arguments().filter(|arg| !arg.is_positional()) {
            if let Some(short) = arg.get_short() {
                let long = arg.get_long().unwrap_or_default().to_owned();
                let known = meanings.entry(format!("-{short}")).or_insert((long.clone(), path.clone()));
                assert_eq!(known.0, long, "-{short} of {path} and of {}", known.1);
            }
            // The same option must have the same value name in every command.
            if let Some(long) = arg.get_long() {
                let known = meanings.entry(format!("--{long}")).or_insert((value(arg), path.clone()));
                assert!(
                    known.0 == value(arg) || long == "gpu",
                    "--{long} has different value names in {path} and in {}",
                    known.1
                );
            }
        }
    }
}

/// The help of `events --kind` gets its list from the type.
#[test]
fn api_page_has_every_event_kind() {
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/api.md")).unwrap();
    let (_, table) = page.split_once("| kind | when |").expect("the table of kinds");
    let table = table.split("\n\n").next().unwrap_or_default();
    for kind in gpush_api::EventKind::ALL {
        assert!(table.contains(&format!("| `{}` |", kind.name())), "docs/api.md lacks {}: {table}", kind.name());
    }
}
