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
    /// Executed file; `None` if gpushd cannot read it, for example on a FUSE file system that only the user who mounted
    /// it may read.
    pub(super) file: Option<FileId>,
    /// Whether the file system of the executed file did not answer, so `file` is unknown for now.
    pub(super) file_hangs: bool,
    /// Path of the executed file, as the process sees it. Ends with ` (deleted)` if the file no longer exists. `None`
    /// if the kernel cannot report the path, for example because it is too long.
    pub(super) path: Option<PathBuf>,
    /// Whether the process is in the pid and user namespaces of the host. In another user namespace, a user can give any
    /// path to any file.
    pub(super) is_on_host: bool,
}

impl Identity {
    /// Reads the identity of a process; `None` if there is no such process, or gpushd may not read it.
    fn of(pid: u32) -> Option<Self> {
        let (start, uids, path) = (proc::start(pid)?, proc::uids(pid)?, proc::executable(pid));
        let (file, is_on_host) = (proc::executable_id_in_time(pid), proc::is_on_this_host(pid));
        Some(Self { start, uids, path, file_hangs: file.is_err(), file: file.ok().flatten(), is_on_host })
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
    /// Opens a process; `None` if there is no such process, or gpushd is not permitted to read its identity. May block,
    /// because the file system of the program may not answer.
    pub(super) fn open(pid: u32) -> Option<Self> {
        let pidfd = PidFd::open(pid).ok()??;
        let process = Self { pid, pidfd, identity: Identity::of(pid)? };
        // If the process is still alive, its pid was not reused meanwhile, so the identity belongs to this process.
        process.is_alive().then_some(process)
    }

    /// Reads the identity again; `None` if the process has ended. The process may have other uids now, or execute
    /// another program. May block, as [`OpenedProcess::open`].
    pub(super) fn identity_now(&self) -> Option<Identity> {
        Identity::of(self.pid).filter(|now| now.start == self.identity.start && self.is_alive())
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
        assert!(process.is_alive() && process.identity_now().is_some());
        assert!(whole.is_none_or(|whole| whole.identity == process.identity));
        process.signal(Signal::SIGTERM).unwrap();
        child.wait().unwrap();
        assert!(process.identity_now().is_none());
    }

    /// Fault: the kernel does not report the path of a program that is longer than 4,096 bytes. So gpushd could not
    /// identify the process, and did not end it.
    #[test]
    fn process_is_identified_without_its_path() {
        const SCRIPT: &str = "import os, shutil, sys\nos.chdir(sys.argv[1])\n\
            for _ in range(25):\n    os.mkdir('d' * 200); os.chdir('d' * 200)\n\
            shutil.copy('/bin/sleep', 'prog')\nos.execv('./prog', ['prog', '60'])";
        let dir = tempfile::tempdir().unwrap();
        let child = Command::new("python3").args(["-c", SCRIPT]).arg(dir.path()).spawn();
        let Ok(mut child) = child else { return eprintln!("SKIPPED: no python3") };
        let comm = format!("/proc/{}/comm", child.id());
        while std::fs::read_to_string(&comm).unwrap().trim() != "prog" {
            assert!(child.try_wait().unwrap().is_none(), "the script failed");
            std::thread::yield_now();
        }
        let process = OpenedProcess::open(child.id()).unwrap();
        assert!(process.identity.path.is_none() && process.identity.file.is_some() && process.identity_now().is_some());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(Command::new("rm").arg("-rf").arg(dir.path()).status().unwrap().success());
    }

    /// Fault: a process that executed another program, or renamed its program, within the grace period was not killed.
    #[test]
    fn process_stays_the_same_when_it_executes_another_program() {
        let mut child = Command::new("sh").args(["-c", "read x; exec sleep 60"]).stdin(Stdio::piped()).spawn().unwrap();
        let process = OpenedProcess::open(child.id()).unwrap();
        std::io::Write::write_all(child.stdin.as_mut().unwrap(), b"\n").unwrap();
        let before = process.identity.file;
        while process.identity_now().unwrap().file == before {
            std::thread::yield_now();
        }
        assert_eq!(process.identity_now().unwrap().start, process.identity.start);
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(process.identity_now().is_none());
    }

    #[test]
    fn process_is_unchanged_until_it_ends() {
        let mut child = std::process::Command::new("/bin/sleep").arg("60").spawn().unwrap();
        let process = OpenedProcess::open(child.id()).unwrap();
        assert_eq!(process.identity.uid(), nix::unistd::geteuid().as_raw());
        assert!(process.is_alive());
        process.signal(Signal::SIGKILL).unwrap();
        child.wait().unwrap();
        assert!(process.identity_now().is_none() && OpenedProcess::open(child.id()).is_none());
    }
}
