//! `gpushd mps-daemon DIR`: becomes the control daemon of a target.
//!
//! The systemd unit and the process launcher both run this command, so a daemon always has the same
//! environment, descriptors and signals. The command takes the target's lock on an empty file, and
//! passes the file to the daemon as standard input. The daemon's servers inherit this file. So all
//! processes of the daemon hold the lock, and no second daemon starts while any of them runs.
//! Standard output goes to a file, because a daemon that writes to a pipe blocks if no process
//! reads from the pipe.

use std::{
    fs::{File, OpenOptions},
    io,
    os::unix::{fs::OpenOptionsExt, process::CommandExt},
    path::Path,
    process::{Command, ExitCode},
    sync::{Arc, atomic::AtomicBool},
};

use nix::sys::stat::{Mode, umask};

use super::{Spec, TargetDir, log::CONTROL_LOG, multi_user};

/// Exit status if a process of a daemon of this target is already running: `EX_TEMPFAIL` of sysexits.h.
const TAKEN: u8 = 75;

/// Replaces this process by the daemon that `spec.json` in `dir` describes.
#[must_use]
pub fn main(dir: &Path) -> ExitCode {
    // Ignore an error: this call fails if systemd has already created a session.
    let _ = nix::unistd::setsid();
    let place = TargetDir::at(dir);
    match ready(&place) {
        Ok(Some((spec, lock, log))) => {
            let error = daemon(&place, &spec, lock, log);
            eprintln!("{} can't be run: {error}", spec.control.display());
            ExitCode::FAILURE
        }
        Ok(None) => {
            eprintln!("an MPS daemon of {}, or a server of a previous MPS daemon, is already running", dir.display());
            ExitCode::from(TAKEN)
        }
        Err(error) => {
            eprintln!("the MPS daemon of {} can't be run: {error}", dir.display());
            ExitCode::FAILURE
        }
    }
}

fn ready(place: &TargetDir) -> io::Result<Option<(Spec, File, File)>> {
    let spec = place.spec().ok_or_else(|| io::Error::other("the directory has no spec.json"))?;
    let Some(lock) = place.lock_with_retry()? else { return Ok(None) };
    let log = OpenOptions::new().append(true).create(true).mode(0o640).open(spec.logs.join(CONTROL_LOG))?;
    // This process may ignore SIGINT. Servers would inherit the ignored signal and could not be
    // interrupted. So set a handler here: `exec` resets a signal with a handler to its default
    // action.
    signal_hook::flag::register(signal_hook::consts::SIGINT, Arc::new(AtomicBool::new(false)))?;
    umask(Mode::from_bits_truncate(0o022));
    Ok(Some((spec, lock, log)))
}

/// Replaces this process by the daemon. Returns only if that fails.
fn daemon(place: &TargetDir, spec: &Spec, lock: File, log: File) -> io::Error {
    let both = match log.try_clone() {
        Ok(both) => both,
        Err(error) => return error,
    };
    // The daemon uses PATH only to find its server. It runs no other program.
    let search = match std::env::join_paths([spec.servers.as_path()]) {
        Ok(search) => search,
        Err(error) => return io::Error::other(error),
    };
    Command::new(&spec.control)
        .arg0(&spec.name)
        .arg("-f")
        .args(spec.multi_user.then_some(multi_user::OPTION))
        .env_clear()
        .env("PATH", search)
        .env("LANG", "C.UTF-8")
        .env("CUDA_VISIBLE_DEVICES", spec.uuid.as_str())
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
