//! `gpushd mps-daemon DIR`: becomes the control daemon of a target.
//!
//! A systemd unit and a child of the agent's start it alike, so that a daemon has the same environment,
//! descriptors and signals wherever it runs. It takes the target's lock and leaves it to the daemon as
//! its standard input, an empty file, which its servers inherit: whoever has it runs, and while somebody
//! does no second daemon can be started. What the daemon says goes to a file; into a pipe that nobody reads
//! it would block.

use std::{
    fs::{File, OpenOptions},
    io,
    os::unix::{fs::OpenOptionsExt, process::CommandExt},
    path::Path,
    process::{Command, ExitCode},
    sync::{Arc, atomic::AtomicBool},
};

use nix::sys::stat::{Mode, umask};

use super::{Spec, TargetDir, log::CONTROL_LOG};

/// Exit status when something of a daemon of the target runs already, as in sysexits.h.
const TAKEN: u8 = 75;

/// Runs the daemon that the spec in `dir` describes, in place of this process.
#[must_use]
pub fn main(dir: &Path) -> ExitCode {
    // Fails where systemd has made a session already.
    let _ = nix::unistd::setsid();
    let place = TargetDir::at(dir);
    match ready(&place) {
        Ok(Some((spec, lock, log))) => {
            let error = daemon(&place, &spec, lock, log);
            eprintln!("{} can't be run: {error}", spec.control.display());
            ExitCode::FAILURE
        }
        Ok(None) => {
            eprintln!("a daemon of {} runs already, or a server that one left behind", dir.display());
            ExitCode::from(TAKEN)
        }
        Err(error) => {
            eprintln!("the MPS daemon of {} can't be run: {error}", dir.display());
            ExitCode::FAILURE
        }
    }
}

fn ready(place: &TargetDir) -> io::Result<Option<(Spec, File, File)>> {
    let spec = place.spec().ok_or_else(|| io::Error::other("there is no spec.json in it"))?;
    let Some(lock) = place.lock_soon()? else { return Ok(None) };
    let log = OpenOptions::new().append(true).create(true).mode(0o640).open(spec.logs.join(CONTROL_LOG))?;
    // The daemon's own session may have inherited that it ignores it: then servers could not be ended.
    // What is caught here is as by default for the program that follows.
    signal_hook::flag::register(signal_hook::consts::SIGINT, Arc::new(AtomicBool::new(false)))?;
    umask(Mode::from_bits_truncate(0o022));
    Ok(Some((spec, lock, log)))
}

/// Only returns when it can't be run.
fn daemon(place: &TargetDir, spec: &Spec, lock: File, log: File) -> io::Error {
    let both = match log.try_clone() {
        Ok(both) => both,
        Err(error) => return error,
    };
    // The server is looked for there by its name, and nothing else is.
    let search = match std::env::join_paths([spec.servers.as_path()]) {
        Ok(search) => search,
        Err(error) => return io::Error::other(error),
    };
    Command::new(&spec.control)
        .arg0(&spec.name)
        .arg("-f")
        .env_clear()
        .env("PATH", search)
        .env("LANG", "C.UTF-8")
        .env("CUDA_VISIBLE_DEVICES", &spec.uuid)
        .env("CUDA_MPS_PIPE_DIRECTORY", place.pipe(spec.tenure))
        .env("CUDA_MPS_LOG_DIRECTORY", &spec.logs)
        .env("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", spec.settings.percentage.to_string())
        .env("CUDA_MPS_CLIENT_PRIORITY", spec.settings.priority.number().to_string())
        .current_dir("/")
        .stdin(lock)
        .stdout(log)
        .stderr(both)
        .exec()
}
