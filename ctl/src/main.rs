//! `gpushctl`: the command line for administrators, users, scripts and Slurm hooks.
//!
//! gpushctl sends requests to gpushd over its socket and shows the results. Where gpushd is not
//! needed (`--offline`, `config check`), it uses `gpush-core` instead. gpushctl never loads NVML,
//! and makes no decision about a GPU.

mod args;
mod commands;
mod complete;
mod exit;
mod offline;
mod output;
mod program;
mod render;
mod socket;
mod tips;
mod usage;

use std::{ffi::OsString, path::PathBuf, process::ExitCode, time::Duration};

use clap::Parser as _;
use gpush_api::{ApiError, Code};

fn main() -> ExitCode {
    let words = args::of_script(std::env::args_os().collect());
    match complete::complete(&words) {
        Ok(true) => return ExitCode::SUCCESS,
        Ok(false) => {}
        Err(error) => error.exit(),
    }
    if let Some(hook) = args::Cli::of_hook(&words) {
        let out = output::Output::new(&hook.global);
        return out.finish(commands::run(hook, &out));
    }
    if let Some(error) = args::habits::error(&words) {
        return refused(&error, &words);
    }
    let words = args::default_verb::insert(words);
    let cli = match args::Cli::try_parse_from(&words) {
        Ok(cli) => cli,
        Err(error) => return unusable(error, &words),
    };
    let waiting = args::waitable::hint(&cli.command, &words);
    let out = output::Output::new(&cli.global).with_waiting_hint(waiting);
    out.finish(commands::run(cli, &out))
}

/// Prints the error for a command line that clap refuses, or the help that the user requested.
fn unusable(error: clap::Error, words: &[OsString]) -> ExitCode {
    if !error.use_stderr() {
        if error.kind() == clap::error::ErrorKind::DisplayHelp {
            args::help::print(&named(words));
        } else {
            let _ = error.print();
        }
        return ExitCode::SUCCESS;
    }
    let is_group = error.kind() == clap::error::ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand;
    if is_group && !wants_json(words) {
        args::help::print_to_stderr(&named(words));
        return ExitCode::from(status(words));
    }
    let offers = || commands::offers(&global(words));
    refused(&usage::error(error, words, &named(words), offers), words)
}

/// Prints the error for a command line that cannot be used.
fn refused(error: &ApiError, words: &[OsString]) -> ExitCode {
    output::Output::new(&global(words)).error(error);
    if !wants_json(words) && evaluated(words) {
        println!("false");
    }
    ExitCode::from(status(words))
}

/// Returns the global options of a command line that cannot be parsed: the socket, and whether errors are JSON.
fn global(words: &[OsString]) -> args::Global {
    let typed = words.iter().take_while(|word| *word != "--").filter_map(|word| word.to_str());
    let typed: Vec<&str> = typed.collect();
    let after = typed.windows(2).find(|two| two[0] == "--socket").map(|two| two[1]);
    let socket = after.or_else(|| typed.iter().find_map(|word| word.strip_prefix("--socket="))).map(PathBuf::from);
    args::Global {
        socket,
        output: None,
        json: wants_json(words),
        no_headers: false,
        color: args::Color::Auto,
        ascii: false,
        request_timeout: Duration::from_secs(1),
    }
}

/// Returns whether errors must be printed as JSON.
fn wants_json(words: &[OsString]) -> bool {
    let words: Vec<&OsString> = words.iter().take_while(|arg| *arg != "--").collect();
    let is_json = |two: &[&OsString]| (two[0] == "-o" || two[0] == "--output") && two[1] == "json";
    words.iter().any(|arg| *arg == "--json" || *arg == "-ojson" || *arg == "--output=json" || *arg == "-o=json")
        || words.windows(2).any(is_json)
}

/// Returns whether a shell will evaluate the output, as in `eval "$(gpushctl lease env ...)"`. Includes `mps env`,
/// which does not exist but which users type.
fn evaluated(words: &[OsString]) -> bool {
    matches!(named(words).as_slice(), ["lease" | "leases" | "mps", "env", ..])
}

/// Returns the exit status for an invalid command line.
fn status(words: &[OsString]) -> u8 {
    let is_run = named(words).first() == Some(&"run");
    // For `run`, every other exit status may be that of the command that `run` starts.
    if is_run { exit::NO_COMMAND } else { Code::BadRequest.exit_status() }
}

/// Options that may come before the command and whose value is the next word.
const WITH_VALUE: [&str; 5] = ["--socket", "-o", "--output", "--color", "--request-timeout"];

/// Returns the words of a command line that are not options: command, subcommand and arguments.
fn named(words: &[OsString]) -> Vec<&str> {
    let mut found = Vec::new();
    let mut words = words.iter().skip(1).map_while(|word| word.to_str()).take_while(|word| *word != "--");
    while let Some(word) = words.next() {
        if WITH_VALUE.contains(&word) {
            words.next();
        } else if !word.starts_with('-') {
            found.push(word);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usage_error_of_run_and_lease_env_is_recognized() {
        let words = |text: &str| text.split(' ').map(OsString::from).collect::<Vec<_>>();
        for (line, code, is_evaluated) in [
            ("gpushctl run --mps 0 -- true", 125, false),
            ("gpushctl --socket run run --mps 0 -- true", 125, false),
            ("gpushctl -o json lease env L0", 2, true),
            ("gpushctl leases env --bogus", 2, true),
            ("gpushctl mps env 9", 2, true),
            ("gpushctl mps list env", 2, false),
            ("gpushctl --socket lease env", 2, false),
            ("gpushctl status --brief run", 2, false),
            ("gpushctl", 2, false),
        ] {
            let words = words(line);
            assert_eq!((status(&words), evaluated(&words)), (code, is_evaluated), "{line}");
        }
    }
}
