//! Corrects misspelled commands and options: `stauts --sumary` means `status --summary`.

use clap::{Arg, Command, CommandFactory as _};
use gpush_core::nearest::nearest;

use super::Cli;

/// Verbs that a misspelled word never means, because a wrong guess changes GPUs.
const NEVER: [&str; 3] = ["on", "off", "leave"];

/// Words that are not misspelled, although a command is similar. `stop` is not `top`.
pub(crate) const NOT_MISSPELLED: [&str; 1] = ["stop"];

/// Returns the command line with its misspelled words corrected; `None` if it has no such word.
pub(super) fn corrected(words: &[&str]) -> Option<Vec<String>> {
    let cli = Cli::command();
    let mut command = &cli;
    let mut found: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
    let end = words.iter().position(|word| *word == "--").unwrap_or(words.len());
    let is_value = |at: usize| at > 0 && crate::WITH_VALUE.contains(&words[at - 1]);
    let mut names = (0..end).filter(|at| !words[*at].starts_with('-') && !is_value(*at));
    while command.has_subcommands()
        && let Some(at) = names.next()
    {
        command = match command.find_subcommand(words[at]) {
            Some(found) => found,
            None if NOT_MISSPELLED.contains(&words[at]) => return None,
            None => {
                let name = nearest(words[at], names_of(command))?;
                found[at] = name.to_owned();
                command.find_subcommand(name)?
            }
        };
    }
    let known: Vec<&str> = command.get_arguments().chain(cli.get_arguments()).flat_map(longs).collect();
    for word in &mut found[..end] {
        let Some(typed) = word.strip_prefix("--").filter(|typed| !typed.is_empty()) else { continue };
        let (name, value) = typed.split_once('=').map_or((typed, None), |(name, value)| (name, Some(value)));
        if known.contains(&name) || matches!(name, "help" | "version") {
            continue;
        }
        let new = nearest(name, known.iter().copied())?;
        *word = value.map_or_else(|| format!("--{new}"), |value| format!("--{new}={value}"));
    }
    found.iter().map(String::as_str).ne(words.iter().copied()).then_some(found)
}

/// Returns the names of the commands that the help shows.
fn names_of(command: &Command) -> impl Iterator<Item = &str> {
    let shown = command.get_subcommands().filter(|command| !command.is_hide_set());
    shown.map(Command::get_name).filter(|name| !NEVER.contains(name))
}

fn longs(arg: &Arg) -> impl Iterator<Item = &str> {
    arg.get_long().into_iter().chain(arg.get_all_aliases().unwrap_or_default())
}
