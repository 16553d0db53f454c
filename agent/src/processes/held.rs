//! A process that is held by its pidfd, with what the kernel says of it: so that nothing is done to another one
//! that has got its pid.
//!
//! ```text
//! pidfd opened ─► who it is, what it runs, when it began: read through /proc ─► it still lives ─► all of it is its own
//! ```

use std::{io, path::PathBuf};

use gpush_host::{
    pidfd::PidFd,
    proc::{self, FileId},
};
use nix::sys::signal::Signal;

/// What the kernel says of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Facts {
    /// When it began, in clock ticks since the boot.
    pub(super) start: u64,
    /// Its real, effective, saved and file system uid.
    pub(super) uids: [u32; 4],
    /// The file that it runs.
    pub(super) file: FileId,
    /// The path of that, as it is seen from where the process is; ends with ` (deleted)` when it is not there
    /// any more.
    pub(super) path: PathBuf,
}

impl Facts {
    /// Those of a process; `None` when there is none, or they can't be read.
    fn of(pid: u32) -> Option<Self> {
        let start = proc::start(pid)?;
        let uids = proc::uids(pid)?;
        Some(Self { start, uids, file: proc::executable_id(pid)?, path: proc::executable(pid)? })
    }

    /// Who the kernel lets it be.
    pub(super) fn uid(&self) -> u32 {
        self.uids[1]
    }

    /// Whether it is root's in any way: a program that root's user id was only lent to is.
    pub(super) fn is_roots(&self) -> bool {
        self.uids.contains(&0)
    }
}

/// A process that is held.
#[derive(Debug)]
pub(super) struct Held {
    pub(super) pid: u32,
    process: PidFd,
    pub(super) facts: Facts,
}

impl Held {
    /// The process that has this pid now; `None` when there is none, or too little of it can be seen.
    pub(super) fn take(pid: u32) -> Option<Self> {
        let process = PidFd::open(pid).ok()??;
        let held = Self { pid, process, facts: Facts::of(pid)? };
        // The pid is not reused while the process is alive, so the facts are those of this process.
        held.lives().then_some(held)
    }

    /// Whether it lives, and is what it was when it was taken.
    pub(super) fn is_unchanged(&self) -> bool {
        Facts::of(self.pid).as_ref() == Some(&self.facts) && self.lives()
    }

    fn lives(&self) -> bool {
        !self.process.has_ended()
    }

    /// Sends it a signal.
    pub(super) fn signal(&self, signal: Signal) -> io::Result<()> {
        self.process.signal(signal)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_itself_until_it_ends() {
        let mut child = std::process::Command::new("/bin/sleep").arg("60").spawn().unwrap();
        let held = Held::take(child.id()).unwrap();
        assert_eq!(held.facts.uid(), nix::unistd::geteuid().as_raw());
        assert!(held.lives());
        held.signal(Signal::SIGKILL).unwrap();
        child.wait().unwrap();
        assert!(!held.is_unchanged() && Held::take(child.id()).is_none());
    }
}
