//! What can be done to a daemon's process: start it, know that it ended and how, kill it with all that it
//! started. The life of a daemon ([`gpush_core::supervisor`]) does not care how.
//!
//! ```text
//!                     Child                              Unit, where systemd is the service manager
//! clear   may start   nobody has its lock                and its unit is inactive
//! start               gpushd mps-daemon DIR, detached    StartUnit gpushd-mps@DIR, then its main process
//! ended               pidfd of the daemon                pidfd of the daemon
//! how     it ended    waited for                         Result of the unit, and that is forgotten
//! kill                its process group                  KillUnit: its cgroup
//! ```
//!
//! A daemon that is found alive is had by a pidfd like one that was just started: nothing but its pid,
//! which its lock tells, is needed to go on with it. So the end of a unit's daemon is known without
//! systemd, whose word is only asked for afterwards; and a bus that can't be reached keeps daemons from
//! being started, and from nothing else.

mod child;
mod unit;

use std::{collections::BTreeSet, io, os::fd::OwnedFd, path::Path, process::ExitStatus};

use gpush_mps::lock;
use nix::{
    errno::Errno,
    sys::signal::{Signal, killpg},
    unistd::Pid,
};
use tokio::{io::unix::AsyncFd, task::JoinHandle};

use self::unit::Units;
use super::{SYSTEM, place::Place};
use crate::systemd;

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
        let ours = base == Path::new(SYSTEM) && nix::unistd::geteuid().is_root();
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

    /// Kills a daemon with all that it started.
    pub(super) async fn kill(&self, place: &Place, pid: i32) {
        match self {
            Self::Child => kill_group(pid),
            Self::Unit(units) => units.kill(place, pid).await,
        }
    }

    /// Ends daemons that nobody knows any more, whose directories were deleted, once nobody can be using
    /// them. Returns when none is left.
    pub(super) async fn end_strays(&self, known: BTreeSet<String>) {
        match self {
            // Their directory was all that was known of them.
            Self::Child => {}
            Self::Unit(units) => units.end_strays(known).await,
        }
    }
}

/// A process that can be waited for, whoever's child it is.
#[derive(Debug)]
pub(super) struct Process {
    /// Its pid.
    pub(super) pid: i32,
    fd: AsyncFd<OwnedFd>,
    /// How it ended, where it is a child of ours.
    status: Option<JoinHandle<io::Result<ExitStatus>>>,
}

impl Process {
    /// The process of a pid; `None` when there is none.
    pub(super) fn of(pid: i32) -> io::Result<Option<Self>> {
        let Some(own) = rustix::process::Pid::from_raw(pid) else { return Ok(None) };
        match rustix::process::pidfd_open(own, rustix::process::PidfdFlags::empty()) {
            Ok(fd) => {
                #[expect(deprecated, reason = "its successor is not safe where a type may change its descriptor")]
                let fd = AsyncFd::with_interest(fd, tokio::io::Interest::READABLE)?;
                Ok(Some(Self { pid, fd, status: None }))
            }
            Err(rustix::io::Errno::SRCH) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Returns once it has ended.
    pub(super) async fn ended(&self) {
        // A pidfd is readable for ever then; an error can't come from a process that goes on.
        let _ = self.fd.readable().await;
    }

    /// Tells it to end: it, and not another that has its pid by then.
    fn terminate(&self) -> io::Result<()> {
        Ok(rustix::process::pidfd_send_signal(self.fd.get_ref(), rustix::process::Signal::TERM)?)
    }
}

/// The daemon that runs in a place: who holds the lock that only a daemon takes.
pub(super) fn find(place: &Place, tenure: u32) -> io::Result<Option<Process>> {
    let pipe = place.pipe(tenure);
    let Some(pid) = lock::holder(&pipe)? else { return Ok(None) };
    let process = Process::of(pid)?;
    // The pid may have become another's between the two, the lock not.
    Ok(if lock::holder(&pipe)? == Some(pid) { process } else { None })
}

/// Whether a process is there.
pub(super) fn is_alive(pid: i32) -> bool {
    !matches!(nix::sys::signal::kill(Pid::from_raw(pid), None), Err(Errno::ESRCH))
}

fn kill_group(pid: i32) {
    match killpg(Pid::from_raw(pid), Signal::SIGKILL) {
        Ok(()) | Err(Errno::ESRCH) => {}
        Err(errno) => tracing::error!("the MPS daemon {pid} can't be killed: {errno}"),
    }
}

/// The end of a process in words.
fn exited(status: i32) -> String {
    format!("ended with status {status}")
}

/// The end of a process in words.
fn signalled(signal: i32) -> String {
    format!("was ended by signal {signal}")
}
