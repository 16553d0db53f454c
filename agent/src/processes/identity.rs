//! A process that gpushd has opened with a pidfd, and its identity. With both, gpushd never sends a signal to another
//! process that got the same pid.
//!
//! ```text
//! open the pidfd ─► read start, users and executed file from /proc ─► still alive ─► all of it is about this process
//! ```

use std::{io, path::PathBuf};

use gpush_host::{
    pidfd::PidFd,
    proc::{self, FileId},
};
use nix::sys::signal::Signal;

/// What the kernel reports about a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Identity {
    /// Start time of the process, in clock ticks since boot.
    pub(super) start: u64,
    /// Real, effective, saved and file system uid.
    pub(super) uids: [u32; 4],
    /// Executed file.
    pub(super) file: FileId,
    /// Path of that file, as the process sees it. Ends with ` (deleted)` if the file no longer exists.
    pub(super) path: PathBuf,
}

impl Identity {
    /// Reads the identity of a process; `None` if there is no such process, or gpushd may not read it.
    fn of(pid: u32) -> Option<Self> {
        let start = proc::start(pid)?;
        let uids = proc::uids(pid)?;
        Some(Self { start, uids, file: proc::executable_id(pid)?, path: proc::executable(pid)? })
    }

    /// Returns the effective uid.
    pub(super) fn uid(&self) -> u32 {
        self.uids[1]
    }

    /// Returns whether one of the uids is 0, as in a setuid program of root.
    pub(super) fn is_root(&self) -> bool {
        self.uids.contains(&0)
    }
}

/// A process that gpushd has opened with a pidfd.
#[derive(Debug)]
pub(super) struct OpenedProcess {
    pub(super) pid: u32,
    pidfd: PidFd,
    pub(super) identity: Identity,
}

impl OpenedProcess {
    /// Opens a process; `None` if there is no such process, or gpushd may not read its identity.
    pub(super) fn open(pid: u32) -> Option<Self> {
        let pidfd = PidFd::open(pid).ok()??;
        let process = Self { pid, pidfd, identity: Identity::of(pid)? };
        // If the process is still alive, its pid was not reused meanwhile, so the identity belongs to this process.
        process.is_alive().then_some(process)
    }

    /// Returns whether the process is alive and has the same identity.
    pub(super) fn is_unchanged(&self) -> bool {
        Identity::of(self.pid).as_ref() == Some(&self.identity) && self.is_alive()
    }

    fn is_alive(&self) -> bool {
        !self.pidfd.has_ended()
    }

    /// Sends a signal to the process.
    pub(super) fn signal(&self, signal: Signal) -> io::Result<()> {
        self.pidfd.signal(signal)
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::{BufRead, BufReader},
        process::{Command, Stdio},
    };

    use super::*;

    /// Fault: if the first thread of a process had ended, gpushd could not identify the process, and did not end it.
    #[test]
    fn process_without_its_first_thread_is_identified_and_ended() {
        const SCRIPT: &str = "import ctypes, threading, time\n\
            def stay():\n    print('up', flush=True)\n    time.sleep(600)\n\
            threading.Thread(target=stay).start()\n\
            ctypes.CDLL(None).pthread_exit(None)";
        let child = Command::new("python3").args(["-c", SCRIPT]).stdout(Stdio::piped()).spawn();
        let Ok(mut child) = child else { return eprintln!("SKIPPED: no python3") };
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut String::new()).unwrap();
        let whole = OpenedProcess::open(child.id());
        let state = format!("/proc/{}/stat", child.id());
        while !std::fs::read_to_string(&state).unwrap().contains(") Z ") {
            std::thread::yield_now();
        }
        let process = OpenedProcess::open(child.id()).unwrap();
        assert!(process.is_alive() && process.is_unchanged());
        assert!(whole.is_none_or(|whole| whole.identity == process.identity));
        process.signal(Signal::SIGTERM).unwrap();
        child.wait().unwrap();
        assert!(!process.is_unchanged());
    }

    #[test]
    fn process_is_unchanged_until_it_ends() {
        let mut child = std::process::Command::new("/bin/sleep").arg("60").spawn().unwrap();
        let process = OpenedProcess::open(child.id()).unwrap();
        assert_eq!(process.identity.uid(), nix::unistd::geteuid().as_raw());
        assert!(process.is_alive());
        process.signal(Signal::SIGKILL).unwrap();
        child.wait().unwrap();
        assert!(!process.is_unchanged() && OpenedProcess::open(child.id()).is_none());
    }
}
