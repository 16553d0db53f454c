//! `gpush-sim run`: a host for the life of one program.
//!
//! Signals sent to gpush-sim go to the program; those that the terminal sends reach it anyway,
//! since it is in the same process group. The exit code is the program's, 128 + n after signal n.
//! Programs that it left behind may go on: then the host is kept for them, and that is said.

use std::ffi::OsString;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitCode, ExitStatus};

use anyhow::Context;
use nix::sys::signal::{SigSet, Signal, kill};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use silicon::Description;

use crate::directory;

/// Signals that are passed on.
const FORWARDED: [Signal; 8] = [
    Signal::SIGHUP,
    Signal::SIGINT,
    Signal::SIGQUIT,
    Signal::SIGTERM,
    Signal::SIGUSR1,
    Signal::SIGUSR2,
    Signal::SIGCONT,
    Signal::SIGWINCH,
];

/// `si_code` of a signal that the kernel sent, as it does for a terminal.
const SI_KERNEL: i32 = 0x80;

pub(crate) fn run(description: &Description, trace: bool, command: &[OsString]) -> anyhow::Result<ExitCode> {
    // Blocked before the program starts: a signal that comes early waits in the descriptor. The
    // program itself starts with none blocked.
    let mut signals = SigSet::empty();
    signals.extend(FORWARDED.into_iter().chain([Signal::SIGCHLD]));
    signals.thread_block().context("cannot block signals")?;
    let queue = SignalFd::with_flags(&signals, SfdFlags::SFD_CLOEXEC).context("cannot wait for signals")?;

    let template = std::env::temp_dir().join("gpush-sim.XXXXXX");
    let dir = nix::unistd::mkdtemp(&template).with_context(|| format!("cannot make {}", template.display()))?;
    let ended = directory::lay(&dir, description, trace).and_then(|host| {
        let status = supervise(start(host.dir(), command)?, &queue)?;
        Ok((status, directory::clients(&host)?))
    });
    match ended {
        Ok((status, left)) if left.is_empty() => {
            directory::remove_files(&dir)?;
            Ok(exit_code(status))
        }
        Ok((status, left)) => {
            let dir = dir.display();
            eprintln!(
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
    let directory::Environment { set, prepended } = directory::Environment::of(dir);
    let mut child = Command::new(program);
    child.args(arguments).envs(set);
    for (name, first) in prepended {
        let old = std::env::var_os(name).filter(|old| !old.is_empty());
        let paths = std::iter::once(first).chain(old.iter().flat_map(std::env::split_paths));
        child.env(name, std::env::join_paths(paths).with_context(|| format!("cannot extend ${name}"))?);
    }
    child.spawn().with_context(|| format!("cannot run {}", program.display()))
}

fn supervise(mut child: Child, queue: &SignalFd) -> anyhow::Result<ExitStatus> {
    loop {
        if let Some(status) = child.try_wait().context("cannot wait for the program")? {
            return Ok(status);
        }
        let Some(told) = queue.read_signal().context("cannot read signals")? else { continue };
        let Ok(signal) = Signal::try_from(told.ssi_signo.cast_signed()) else { continue };
        if signal != Signal::SIGCHLD && told.ssi_code != SI_KERNEL {
            // Gone already: then SIGCHLD is next.
            let _gone = kill(nix::unistd::Pid::from_raw(child.id().cast_signed()), signal);
        }
    }
}

fn exit_code(status: ExitStatus) -> ExitCode {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal)).unwrap_or(1);
    ExitCode::from(u8::try_from(code).unwrap_or(1))
}
