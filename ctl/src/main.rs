//! `gpushctl`: what admins, users, scripts and Slurm hooks type.
//!
//! It asks the agent over its socket, or `gpush-core` where no agent is needed (`--offline`,
//! `config check`), and draws the answer. It never loads NVML, and it never decides anything about
//! a GPU itself.

mod args;
mod commands;
mod exit;
mod expiry;
mod offline;
mod output;
mod render;

use std::{ffi::OsString, process::ExitCode};

use clap::Parser;
use gpush_api::{ApiError, Code};

fn main() -> ExitCode {
    let cli = match args::Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return usage(&error),
    };
    let out = output::Output::new(&cli.global);
    exit::finish(commands::run(cli, &out), &out)
}

/// A command line that makes no sense, or one that asks for help. Who asked for JSON gets JSON.
fn usage(error: &clap::Error) -> ExitCode {
    let json = std::env::args_os().take_while(|arg| arg != "--").any(|arg| arg == "--json");
    if error.use_stderr() && json {
        let text = error.render().to_string();
        let first = text.lines().take_while(|line| !line.is_empty()).map(str::trim).collect::<Vec<_>>().join(" ");
        let message = match error.kind() {
            // What it would print is the help.
            clap::error::ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => "a command is missing",
            _ => first.trim_start_matches("error: "),
        };
        let hint = "gpushctl --help, or --help after any command";
        let error = ApiError::new(Code::BadRequest, message).hint(hint);
        output::error_document(&error);
    } else {
        let _ = error.print();
    }
    let wrong = if is_run(std::env::args_os()) { exit::NO_COMMAND } else { Code::BadRequest.exit_status() };
    ExitCode::from(if error.use_stderr() { wrong } else { 0 })
}

/// Whether `mps run` was meant, whose other exit statuses are the command's.
fn is_run(args: impl Iterator<Item = OsString>) -> bool {
    let words: Vec<OsString> = args.take_while(|arg| arg != "--").collect();
    words.windows(2).any(|two| two[0] == "mps" && two[1] == "run")
}
