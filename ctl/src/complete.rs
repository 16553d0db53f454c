//! Completion: the words that the shell offers after TAB.
//!
//! ```text
//! shell ── COMPLETE=bash gpushctl -- WORDS ─► `complete` ─► clap's engine ─► commands, options, values of enums
//!                                                                     └────► `candidates` ─► gpushd: GPUs, leases, …
//! ```
//!
//! clap's engine offers hidden names if no other names match, and the engine does not know hidden aliases in the typed
//! words. So this module gives the engine a command line without aliases, and commands without hidden names.

mod bash;
mod candidates;

use std::ffi::{OsStr, OsString};

use clap::{Arg, Command, CommandFactory};
use clap_complete::{
    CompleteEnv,
    engine::{ArgValueCandidates, CompletionCandidate},
    env::{Elvish, Fish, Powershell, Shells, Zsh},
};

use crate::args::Cli;

/// Environment variable with which a shell requests completions.
const VARIABLE: &str = "COMPLETE";

const SHELLS: Shells<'static> = Shells(&[&bash::Bash, &Elvish, &Fish, &Powershell, &Zsh]);

/// If a shell requests completions, prints the completions and returns true.
pub(crate) fn complete(words: &[OsString]) -> Result<bool, clap::Error> {
    if std::env::var_os(VARIABLE).is_none_or(|shell| shell.is_empty()) {
        return Ok(false);
    }
    let here = std::env::current_dir().ok();
    CompleteEnv::with_factory(visible).shells(SHELLS).try_complete(without_aliases(words), here.as_deref())
}

/// Returns the script with which a shell calls `gpushctl` for completions.
pub(crate) fn script(shell: &str) -> std::io::Result<Vec<u8>> {
    let mut script = Vec::new();
    let Some(completer) = SHELLS.completer(shell) else { return Ok(script) };
    completer.write_registration(VARIABLE, "gpushctl", "gpushctl", "gpushctl", &mut script)?;
    if shell == "zsh" {
        // On the first TAB, zsh loads this script and calls it as a function, so the script must call the completer.
        script.extend(b"[[ $funcstack[1] == _gpushctl ]] && _clap_dynamic_completer_gpushctl \"$@\"\n");
    }
    Ok(script)
}

/// Returns the command line to complete. Leaves out the words with which the shell calls gpushctl, up to `--`.
fn typed() -> Vec<OsString> {
    std::env::args_os().skip_while(|word| word != "--").skip(1).collect()
}

/// Replaces aliases of commands and options by their names. Does not change the word that the user is typing.
fn without_aliases(words: &[OsString]) -> Vec<OsString> {
    let mut words = words.to_vec();
    let Some(first) = words.iter().position(|word| word == "--").map(|at| at + 2) else { return words };
    let index = std::env::var("_CLAP_COMPLETE_INDEX").ok().and_then(|index| index.parse::<usize>().ok());
    let current = index.map_or(words.len().saturating_sub(1), |index| first - 1 + index).min(words.len());
    let mut root = Cli::command();
    root.build();
    let mut command = &root;
    for word in words.iter_mut().take(current).skip(first) {
        if word == "--" {
            break;
        }
        if let Some(named) = command.find_subcommand(&*word) {
            command = named;
            *word = command.get_name().into();
        } else if let Some(option) = word.to_str().and_then(|word| option_name(command, word)) {
            *word = option.into();
        }
    }
    words
}

/// Returns the name of the option to which a hidden alias belongs.
fn option_name(command: &Command, word: &str) -> Option<String> {
    let has = |aliases: Option<Vec<&str>>, name: &str| aliases.is_some_and(|aliases| aliases.contains(&name));
    if let Some(name) = word.strip_prefix("--") {
        let arg = command.get_arguments().find(|arg| has(arg.get_aliases(), name))?;
        return Some(format!("--{}", arg.get_long()?));
    }
    let mut letters = word.strip_prefix('-')?.chars();
    let (letter, None) = (letters.next()?, letters.next()) else { return None };
    let mut arguments = command.get_arguments();
    let arg = arguments.find(|arg| arg.get_all_short_aliases().is_some_and(|all| all.contains(&letter)))?;
    Some(format!("-{}", arg.get_short()?))
}

/// Returns the definition of the command line without hidden names, and with candidates for values.
fn visible() -> Command {
    without_hidden(Cli::command())
}

fn without_hidden(command: Command) -> Command {
    let aliases: Vec<String> = command.get_visible_aliases().map(str::to_owned).collect();
    let command = command.alias(None).visible_aliases(aliases);
    // clap cannot remove a command. So give each hidden command a name that a user cannot type.
    let mut untypable = ["\u{1}", "\u{2}", "\u{3}", "\u{4}", "\u{5}", "\u{6}", "\u{7}"].into_iter();
    command.mut_args(argument).mut_subcommands(|one| match one.is_hide_set() {
        true => one.name(untypable.next().unwrap_or("\u{8}")),
        false => without_hidden(one),
    })
}

/// Removes the hidden names and values of an argument, and adds the candidates for its values.
fn argument(arg: Arg) -> Arg {
    let aliases: Vec<String> = arg.get_visible_aliases().unwrap_or_default().into_iter().map(str::to_owned).collect();
    let arg = arg.alias(None).visible_aliases(aliases);
    if let Some(completer) = candidates::of(&arg) {
        return arg.add(completer);
    }
    let values: Vec<_> = arg.get_possible_values();
    if values.iter().all(|value| !value.is_hide_set()) {
        return arg;
    }
    let values: Vec<String> =
        values.iter().filter(|value| !value.is_hide_set()).map(|value| value.get_name().to_owned()).collect();
    arg.add(ArgValueCandidates::new(move || values.iter().map(CompletionCandidate::new).collect()))
}

/// Returns whether a typed word is one of `names`.
fn is_one_of(word: &OsStr, names: &[&str]) -> bool {
    word.to_str().is_some_and(|word| names.contains(&word))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Names of values for which a user types free text, so there are no candidates.
    const FREE: [&str; 15] = [
        "ADDRESS", "DURATION", "GROUP", "JOB", "LABEL", "MEMORY", "MONTH", "NAME", "NUMBER", "PERCENT", "PID", "SPEC",
        "TEXT", "TIME", "USER",
    ];

    /// Each value of an argument must have candidates, have fixed possible values, or be listed as free text.
    #[test]
    fn every_value_name_is_known() {
        fn check(command: &Command) {
            for arg in command.get_arguments().filter(|arg| arg.get_action().takes_values()) {
                let names: Vec<&str> = arg.get_value_names().unwrap_or_default().iter().map(|name| &**name).collect();
                let is_free = names.iter().any(|name| FREE.contains(name));
                let is_known = is_free || candidates::of(arg).is_some() || !arg.get_possible_values().is_empty();
                assert!(is_known, "{} {}: no candidates for {names:?}", command.get_name(), arg.get_id());
            }
            command.get_subcommands().for_each(check);
        }
        check(&Cli::command());
    }

    #[test]
    fn hidden_names_are_removed() {
        fn check(command: &Command) {
            assert_eq!(command.get_aliases().count(), 0, "{}", command.get_name());
            for arg in command.get_arguments() {
                assert!(arg.get_aliases().is_none_or(|aliases| aliases.is_empty()), "{}", arg.get_id());
                assert!(!arg.is_hide_set(), "{}", arg.get_id());
            }
            for one in command.get_subcommands() {
                if one.is_hide_set() {
                    assert!(one.get_name().chars().all(char::is_control), "{}", one.get_name());
                } else {
                    check(one);
                }
            }
        }
        check(&visible());
    }

    #[test]
    fn aliases_are_replaced_before_the_completed_word() {
        let words = |line: &str| line.split(' ').map(OsString::from).collect::<Vec<_>>();
        for (line, expected) in [
            ("gpushctl -- gpushctl gpus ls -i ", "gpushctl -- gpushctl gpu list -g "),
            ("gpushctl -- gpushctl mps log --lines 5 0", "gpushctl -- gpushctl mps logs --number 5 0"),
            ("gpushctl -- gpushctl gpus", "gpushctl -- gpushctl gpus"),
            ("gpushctl status", "gpushctl status"),
        ] {
            assert_eq!(without_aliases(&words(line)), words(expected), "{line}");
        }
    }

    #[test]
    fn script_of_each_shell_calls_gpushctl() {
        for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
            let script = String::from_utf8(script(shell).unwrap()).unwrap();
            assert!(script.contains("COMPLETE") && script.contains("gpushctl"), "{shell}: {script}");
        }
    }
}
