//! `gpushctl`: the command for administrators, users, scripts and Slurm hooks.
//!
//! It asks the agent over its socket, or `gpush-core` where no agent is needed (`--offline`,
//! `config check`), and draws the answer. It never loads NVML, and it makes no decision about a GPU.

mod args;
mod commands;
mod exit;
mod offline;
mod output;
mod render;
mod tips;

use std::{ffi::OsString, process::ExitCode};

use clap::Parser as _;
use gpush_api::{ApiError, Code};

fn main() -> ExitCode {
    let words: Vec<OsString> = std::env::args_os().collect();
    if let Some(error) = args::habits::error(&words) {
        return refused(&error, &words);
    }
    let cli = match args::Cli::try_parse_from(&words) {
        Ok(cli) => cli,
        Err(error) => return usage(error, &words),
    };
    let out = output::Output::new(&cli.global);
    exit::finish(commands::run(cli, &out), &out)
}

/// Reports a command line that clap refuses, or prints the help that it asks for.
fn usage(error: clap::Error, words: &[OsString]) -> ExitCode {
    if !error.use_stderr() {
        let _ = error.print();
        return ExitCode::SUCCESS;
    }
    let fallthrough = evaluated(words);
    if wants_json(words) {
        let text = error.render().to_string();
        let first = text.lines().take_while(|line| !line.is_empty()).map(str::trim).collect::<Vec<_>>().join(" ");
        let message = match error.kind() {
            // Its text is the help.
            clap::error::ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => "a command is missing",
            _ => first.trim_start_matches("error: "),
        };
        output::error_document(&ApiError::new(Code::BadRequest, message).hint("see `gpushctl --help`"));
    } else {
        let _ = tips::without_guesses(error).print();
        if fallthrough {
            println!("false");
        }
    }
    ExitCode::from(status(words))
}

/// Reports a command line of another tool.
fn refused(error: &ApiError, words: &[OsString]) -> ExitCode {
    if wants_json(words) {
        output::error_document(error);
    } else {
        eprintln!("error: {}", error.message);
        if let Some(hint) = &error.hint {
            eprintln!("  hint: {hint}");
        }
        if evaluated(words) {
            println!("false");
        }
    }
    ExitCode::from(status(words))
}

/// Whether the errors are JSON too.
fn wants_json(words: &[OsString]) -> bool {
    let words: Vec<&OsString> = words.iter().take_while(|arg| *arg != "--").collect();
    let is_json = |two: &[&OsString]| (two[0] == "-o" || two[0] == "--output") && two[1] == "json";
    words.iter().any(|arg| *arg == "--json" || *arg == "-ojson" || *arg == "--output=json" || *arg == "-o=json")
        || words.windows(2).any(is_json)
}

/// Whether a shell evaluates the output: `eval "$(gpushctl mps env ...)"`.
fn evaluated(words: &[OsString]) -> bool {
    words.windows(2).any(|two| two[0] == "mps" && two[1] == "env")
}

/// The status of a usage error.
fn status(words: &[OsString]) -> u8 {
    if is_run(words.iter().cloned()) { exit::NO_COMMAND } else { Code::BadRequest.exit_status() }
}

/// Whether the command is `mps run`, whose other exit statuses are those of its command.
fn is_run(args: impl Iterator<Item = OsString>) -> bool {
    let words: Vec<OsString> = args.take_while(|arg| arg != "--").collect();
    words.windows(2).any(|two| two[0] == "mps" && two[1] == "run")
}
