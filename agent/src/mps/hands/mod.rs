//! What can be done to a daemon's process: start it, know that it ended and how, kill it with all that it
//! started. The life of a daemon ([`gpush_core::supervisor`]) does not care how.
//!
//! ```text
//!                     Child                              Unit, where systemd is the service manager
//! clear   may start   nobody has its lock                and its unit is inactive
//! start               gpushd mps-daemon DIR, detached    StartUnit gpushd-mps@DIR, then its main process
//! ended               pidfd of the daemon                pidfd of the daemon
//! how     it ended    waited for                         Result of the unit, and that is forgotten
//! kill                all that have its lock             KillUnit: its cgroup
//! ```
//!
//! A daemon that is found alive is had by a pidfd like one that was just started: nothing but its pid,
//! which its lock tells, is needed to go on with it, once it is known for ours ([`ours`]). So the end of a unit's daemon is known without
//! systemd, whose word is only asked for afterwards; and a bus that can't be reached keeps daemons from
//! being started, and from nothing else.

mod child;
mod ours;
mod rebuilt;
mod unit;

use std::{collections::BTreeSet, io, path::Path, process::ExitStatus};

use gpush_host::{pidfd::AsyncPidFd, systemd};
use nix::sys::signal::Signal;
use tokio::task::JoinHandle;

use self::unit::Units;
pub(super) use self::{
    ours::{Found, Part, find, kill, parts},
    rebuilt::spec as rebuilt,
};
use super::place::Place;
use crate::options::MPS_DIRECTORY;

/// Why a daemon was not started.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum NotStarted {
    /// Not yet, for no fault of its own: something of one before is there still, or systemd can't be asked.
    #[error("{0}")]
    Later(String),
    /// The system refused, or it ended before it was a daemon.
    #[error("{0}")]
    Failed(String),
}

impl NotStarted {
    fn taken() -> Self {
        Self::Later("what the daemon before started is still there".to_owned())
    }
}

/// Who starts daemons here.
#[derive(Debug, Clone)]
pub(super) enum Hands {
    /// We ourselves: they are children that outlive us.
    Child,
    /// systemd: each is a unit.
    Unit(Units),
}

impl Hands {
    /// Those for daemons below `base`: units know their directories by name, so only for the system's.
    pub(super) fn of(base: &Path) -> Self {
        let ours = base == Path::new(MPS_DIRECTORY) && nix::unistd::geteuid().is_root();
        if ours && systemd::is_the_service_manager() { Self::Unit(Units::default()) } else { Self::Child }
    }

    /// Whether nothing of a daemon is there: then the place may be laid, and a daemon started.
    pub(super) async fn clear(&self, place: &Place) -> Result<(), NotStarted> {
        if place.is_taken() {
            return Err(NotStarted::taken());
        }
        match self {
            Self::Child => Ok(()),
            Self::Unit(units) => units.clear(place).await,
        }
    }

    /// Starts the daemon that the place's spec describes.
    pub(super) async fn start(&self, place: &Place) -> Result<Process, NotStarted> {
        if place.is_taken() {
            return Err(NotStarted::taken());
        }
        match self {
            Self::Child => child::start(place).await,
            Self::Unit(units) => units.start(place).await,
        }
    }

    /// How a process ended, in words, once it has. Nothing is left of it then that keeps the next from
    /// being started.
    pub(super) async fn how(&self, place: &Place, process: Process) -> String {
        match self {
            Self::Child => child::how(process).await,
            Self::Unit(units) => units.how(place, process.pid).await,
        }
    }

    /// Kills a daemon, where it lives still, with all that it started.
    pub(super) async fn kill(&self, place: &Place, daemon: Option<&Process>) {
        match self {
            Self::Child => kill_all(place, daemon),
            Self::Unit(units) => units.kill(place, daemon).await,
        }
    }

    /// Whether a daemon without a directory is known all the same: then no other is started in its place, and
    /// it is ended once nobody can be using it.
    pub(super) fn knows_strays(&self) -> bool {
        matches!(self, Self::Unit(_))
    }

    /// Ends daemons that nobody knows any more, whose directories were deleted, once nobody can be using
    /// them. Returns when none is left.
    pub(super) async fn end_strays(&self, known: BTreeSet<String>) {
        match self {
            // They are found when somebody wants their targets.
            Self::Child => {}
            Self::Unit(units) => units.end_strays(known).await,
        }
    }
}

/// The process of a daemon, whether or not it is a child of gpushd.
#[derive(Debug)]
pub(super) struct Process {
    /// Its pid.
    pub(super) pid: i32,
    handle: AsyncPidFd,
    /// The exit status, where the process is a child of this gpushd.
    status: Option<JoinHandle<io::Result<ExitStatus>>>,
}

impl Process {
    /// Opens the process of a pid; `None` when there is none.
    pub(super) fn of(pid: i32) -> io::Result<Option<Self>> {
        Ok(AsyncPidFd::open(pid)?.map(|handle| Self { pid, handle, status: None }))
    }

    /// Waits until the process has ended.
    pub(super) async fn ended(&self) {
        self.handle.ended().await;
    }

    /// Sends SIGTERM to the process.
    fn terminate(&self) -> io::Result<()> {
        self.handle.signal(Signal::SIGTERM)
    }

    /// Kills the process. A process that has ended is not an error.
    fn kill(&self) -> io::Result<()> {
        self.handle.kill()
    }

    /// Returns whether the process has ended.
    pub(super) fn has_ended(&self) -> bool {
        self.handle.has_ended()
    }
}

/// Kills all that have the lock of a place, and the daemon's where that is another by now.
fn kill_all(place: &Place, daemon: Option<&Process>) {
    let locks = place.lock_file().into_iter().chain(daemon.and_then(|daemon| ours::lock_of(place, daemon)));
    let locks: BTreeSet<_> = locks.collect();
    // It first, so that it starts nobody any more; it may have no lock yet.
    if let Some(daemon) = daemon
        && let Err(error) = daemon.kill()
    {
        tracing::error!("the MPS daemon {} can't be killed: {error}", daemon.pid);
    }
    ours::kill(&locks);
}

/// The end of a process in words.
fn exited(status: i32) -> String {
    format!("ended with status {status}")
}

/// The end of a process in words.
fn signalled(signal: i32) -> String {
    format!("was ended by signal {signal}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_the_kernel_does_not_name_is_no_process() {
        assert!(Process::of(-1).unwrap().is_none() && Process::of(0).unwrap().is_none());
        let me = Process::of(std::process::id().cast_signed()).unwrap().unwrap();
        assert!(!me.has_ended());
    }
}
