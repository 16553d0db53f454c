//! `gpushctl mps run`: a share for as long as a command runs.
//!
//! The share is bound to this process, so that it ends with it however it ends. While the command runs
//! no connection is open: it may run for days, and each user has only so many.
//!
//! Signals are passed on, but for those that the terminal has sent to the command as well, as it does
//! to all of its foreground, and those that were ignored before (`nohup`): they stay ignored.

use std::{
    ffi::OsString, io::ErrorKind, os::unix::process::ExitStatusExt, path::Path, process::ExitStatus, time::Duration,
};

use gpush_api::{ApiError, Code, MpsShareRequest, MpsShareTaken};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use tokio::{
    process::Command,
    signal::unix::{SignalKind, signal},
    sync::mpsc,
};

use super::share;
use crate::{
    args::{Ceilings, Global},
    exit::{self, Failure, NO_COMMAND, NOT_FOUND, NOT_RUN, Outcome},
    output::Output,
};

/// How long giving the share back may take; what is not given back by then ends with this process.
const GIVING_BACK: Duration = Duration::from_secs(2);

/// What is passed on to the command.
const PASSED_ON: [Signal; 6] =
    [Signal::SIGHUP, Signal::SIGINT, Signal::SIGQUIT, Signal::SIGTERM, Signal::SIGUSR1, Signal::SIGUSR2];

pub(super) fn run(global: &Global, target: &str, ceilings: Ceilings, command: &[OsString], out: &Output) -> Outcome {
    let wanted = MpsShareRequest { with_pid: Some(std::process::id()), ..share::request(ceilings) };
    let taken = super::super::with_agent(global, async |client| Ok(client.mps_take_share(target, &wanted).await?));
    let taken = match taken {
        Ok(taken) => taken,
        Err(failure) => return own(failure, NO_COMMAND, out),
    };
    let ended = carried_out(&taken, command);
    give_back(global, &taken);
    match ended {
        Ok(status) => Ok(passed_through(status)),
        Err((failure, status)) => own(failure, status, out),
    }
}

/// Tells an error of our own and ends with the status that stands for it.
fn own(failure: Failure, status: u8, out: &Output) -> Outcome {
    match failure {
        Failure::Error(error) => out.error(&error),
        Failure::BrokenPipe => {}
    }
    Ok(status)
}

fn carried_out(taken: &MpsShareTaken, command: &[OsString]) -> Result<ExitStatus, (Failure, u8)> {
    let Some((program, arguments)) = command.split_first() else {
        return Err((ApiError::new(Code::BadRequest, "a command is missing").into(), NO_COMMAND));
    };
    let mut child = Command::new(program);
    child.args(arguments);
    for name in share::left_over(&taken.environment) {
        child.env_remove(name);
    }
    child.envs(taken.environment.iter().map(|(name, value)| (name, value)));
    let internal = |what: &str, cause: &std::io::Error| (exit::io(what, cause).into(), NO_COMMAND);
    let runtime = super::super::runtime().map_err(|error| (error.into(), NO_COMMAND))?;
    runtime.block_on(async {
        // Listened for before there is a command: none is lost.
        let mut signals = signals().map_err(|e| internal("signals can't be passed on", &e))?;
        let mut child = child.spawn().map_err(|cause| {
            let status = if cause.kind() == ErrorKind::NotFound { NOT_FOUND } else { NOT_RUN };
            (exit::io(format!("can't run {}", Path::new(program).display()), &cause).into(), status)
        })?;
        loop {
            tokio::select! {
                ended = child.wait() => return ended.map_err(|e| internal("the command can't be waited for", &e)),
                Some(signal) = signals.recv() => {
                    // Without an id it has ended, and is told to have in a moment.
                    if let Some(pid) = child.id().and_then(|pid| i32::try_from(pid).ok())
                        && !has_it_already(signal)
                    {
                        let _ = kill(Pid::from_raw(pid), signal);
                    }
                }
            }
        }
    })
}

/// The signals that come from now on, but for those that are ignored.
fn signals() -> std::io::Result<mpsc::UnboundedReceiver<Signal>> {
    let (sender, receiver) = mpsc::unbounded_channel();
    let ignored = ignored(&std::fs::read_to_string("/proc/self/status").unwrap_or_default());
    for one in PASSED_ON.into_iter().filter(|one| ignored & (1 << (*one as u32 - 1)) == 0) {
        let mut coming = signal(SignalKind::from_raw(one as i32))?;
        let sender = sender.clone();
        tokio::spawn(async move { while coming.recv().await.is_some() && sender.send(one).is_ok() {} });
    }
    Ok(receiver)
}

/// Signals that this process was started to ignore, a bit each from the lowest, as the kernel tells them.
fn ignored(status: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    line.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

/// Whether the command has got a signal of the keyboard from the terminal, whose foreground both are.
fn has_it_already(signal: Signal) -> bool {
    let keyboard = matches!(signal, Signal::SIGINT | Signal::SIGQUIT);
    keyboard && is_in_foreground(&std::fs::read_to_string("/proc/self/stat").unwrap_or_default())
}

/// Whether a process's group is the one in the foreground of its terminal, as the kernel tells it.
fn is_in_foreground(stat: &str) -> bool {
    // The name, which comes first, may hold blanks and brackets.
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    // State, parent, group, session, terminal, its foreground's group.
    matches!(fields[..], [_, _, group, _, terminal, foreground, ..] if terminal != "0" && group == foreground)
}

/// The command's status as a shell tells it.
fn passed_through(status: ExitStatus) -> u8 {
    let signal = status.signal().map(|signal| 128 + signal);
    status.code().or(signal).and_then(|code| u8::try_from(code).ok()).unwrap_or(NO_COMMAND)
}

/// Gives the share back. That it can't be is no news: it ends with this process.
fn give_back(global: &Global, taken: &MpsShareTaken) {
    let _ = super::super::with_agent(global, async |client| {
        let _ = tokio::time::timeout(GIVING_BACK, client.mps_release(&taken.share.id)).await;
        Ok(())
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ignored_signals_are_read_from_the_kernels_mask() {
        let status = "Name:\tx\nSigIgn:\t0000000000001001\nSigCgt:\t0\n";
        assert_eq!(ignored(status), 1 << 12 | 1, "SIGPIPE and SIGHUP");
        assert_eq!(ignored(""), 0);
    }

    #[test]
    fn the_foreground_is_known_by_its_group() {
        assert!(is_in_foreground("7 (a) b) S 1 40 30 34816 40 4194304 0"));
        assert!(!is_in_foreground("7 (a) S 1 40 30 34816 41 4194304 0"), "in the background");
        assert!(!is_in_foreground("7 (a) S 1 40 30 0 -1 4194304 0"), "without a terminal");
        assert!(!is_in_foreground(""));
    }

    #[test]
    fn a_status_is_passed_through_as_a_shell_has_it() {
        let of = |raw: i32| passed_through(ExitStatus::from_raw(raw));
        assert_eq!((of(0), of(7 << 8), of(255 << 8), of(9)), (0, 7, 255, 137));
    }
}
