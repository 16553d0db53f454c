//! `gpush-sim run`: creates a host that exists while one program runs.
//!
//! gpush-sim forwards signals to the program. It does not forward signals from the terminal,
//! because the terminal sends them to the program too. The exit code of gpush-sim is the exit code
//! of the program, or 128 + n after signal n. If child processes of the program still run,
//! gpush-sim keeps the host for them and prints a message.

use std::ffi::OsString;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitCode, ExitStatus};

use anyhow::Context;
use mps_sim::errln;
use nix::sys::signal::{Signal, kill};
use signal_hook::consts::{SIGCHLD, SIGCONT, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGWINCH};
use signal_hook::iterator::SignalsInfo;
use signal_hook::iterator::exfiltrator::WithOrigin;
use signal_hook::low_level::siginfo::Cause;
use silicon::Description;

use crate::directory;

/// Signals that gpush-sim forwards.
const FORWARDED: [i32; 8] = [SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGCONT, SIGWINCH];

/// Returns whether gpush-sim was started with this signal ignored, as nohup does with SIGHUP.
/// gpush-sim and its program then ignore the signal too.
fn ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    mask >> (signal - 1) & 1 == 1
}

pub(crate) fn run(description: &Description, trace: bool, command: &[OsString]) -> anyhow::Result<ExitCode> {
    // Install the handlers before the program starts, so that an early signal is not lost. Do not
    // block the signals instead, because the program would inherit the signal mask.
    let caught = FORWARDED.into_iter().filter(|&signal| !ignored(signal)).chain([SIGCHLD]);
    let mut signals = SignalsInfo::<WithOrigin>::new(caught).context("cannot wait for signals")?;

    let template = std::env::temp_dir().join("gpush-sim.XXXXXX");
    let dir = nix::unistd::mkdtemp(&template).with_context(|| format!("cannot make {}", template.display()))?;
    let ended = directory::lay(&dir, description, trace).and_then(|host| {
        let status = supervise(start(host.dir(), command)?, &mut signals)?;
        Ok((status, directory::clients(&host)?))
    });
    match ended {
        Ok((status, left)) if left.is_empty() => {
            directory::remove_files(&dir)?;
            Ok(exit_code(status))
        }
        Ok((status, left)) => {
            let dir = dir.display();
            errln!(
                "gpush-sim: {} still run on the simulated host; end it with `gpush-sim down {dir}`",
                left.join(", ")
            );
            Ok(exit_code(status))
        }
        Err(error) => {
            directory::remove_files(&dir)?;
            Err(error)
        }
    }
}

fn start(dir: &std::path::Path, command: &[OsString]) -> anyhow::Result<Child> {
    let (program, arguments) = command.split_first().context("no program is given")?;
    let mut child = Command::new(program);
    child.args(arguments);
    directory::Environment::of(dir).extend(&mut child)?;
    child.spawn().with_context(|| format!("cannot run {}", program.display()))
}

fn supervise(mut child: Child, signals: &mut SignalsInfo<WithOrigin>) -> anyhow::Result<ExitStatus> {
    loop {
        if let Some(status) = child.try_wait().context("cannot wait for the program")? {
            return Ok(status);
        }
        for origin in signals.wait() {
            // A signal that the kernel sends comes from the terminal, and the program gets it, too. So only pass on
            // signals that a process has sent.
            let meant_for_us = matches!(origin.cause, Cause::Sent(_));
            if let Ok(signal) = Signal::try_from(origin.signal)
                && signal != Signal::SIGCHLD
                && meant_for_us
            {
                // Ignore an error: if the program has ended already, SIGCHLD arrives next.
                let _gone = kill(nix::unistd::Pid::from_raw(child.id().cast_signed()), signal);
            }
        }
    }
}

fn exit_code(status: ExitStatus) -> ExitCode {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal)).unwrap_or(1);
    ExitCode::from(u8::try_from(code).unwrap_or(1))
}
