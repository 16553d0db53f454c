//! `gpush-slurm-hook prolog|epilog|task-prolog`: Slurm's hooks. Slurm runs scripts whose first line names this program.

use std::{
    io::{self, Write as _},
    process::ExitCode,
};

use gpush_slurm_hook::{Command, FAILS, Options, epilog, print_error, prolog, task_prolog};

/// Exit status for an invalid command line.
const USAGE: u8 = 2;

fn main() -> ExitCode {
    let (command, options) = match Options::parse(std::env::args_os().skip(1)) {
        Ok(parsed) => parsed,
        Err(why) => {
            print_error(&format!("gpush-slurm-hook: {why}"));
            return USAGE.into();
        }
    };
    match command {
        Command::Prolog => prolog(&options).into(),
        Command::Epilog => epilog(&options).into(),
        Command::TaskProlog => {
            let answer = task_prolog(&options);
            // Write nothing to stderr, because Slurm also parses stderr.
            let written = io::stdout().write_all(answer.text.as_bytes()).and_then(|()| io::stdout().flush());
            if answer.fails || written.is_err() { FAILS.into() } else { ExitCode::SUCCESS }
        }
    }
}
