//! Processes that are known only by their ids: their names, and the sleepers of a host.

use std::path::Path;

use nix::sys::signal::{Signal, kill};
use silicon::machine::Pid;

/// Describes a process by pid and name.
pub(crate) fn describe(pid: u32) -> String {
    match std::fs::read_to_string(format!("/proc/{pid}/comm")) {
        Ok(name) => format!("{} (pid {pid})", name.trim()),
        Err(_) => format!("pid {pid}"),
    }
}

/// Returns the sleepers of a host that may still run. A sleeper is a process of `process add
/// --spawn`.
pub(crate) fn sleepers(dir: &Path) -> Vec<Pid> {
    let text = std::fs::read_to_string(dir.join("sleepers")).unwrap_or_default();
    let read = |line: &str| {
        let (pid, start) = line.split_once(' ')?;
        Some(Pid { pid: pid.parse().ok()?, start: start.parse().ok()? })
    };
    text.lines().filter_map(read).filter(|pid| pid.is_alive()).collect()
}

/// Ends a sleeper.
pub(crate) fn end(sleeper: Pid) {
    if sleeper.is_alive() {
        let _gone = kill(nix::unistd::Pid::from_raw(sleeper.pid.cast_signed()), Signal::SIGKILL);
    }
}
