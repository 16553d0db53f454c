//! A process identified by its pidfd. A signal reaches only this process, and never a later process
//! with the same pid.

use std::{
    io,
    ops::Deref,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd},
    sync::LazyLock,
};

use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        resource::{Resource, getrlimit},
        signal::Signal,
    },
};
use rustix::process::{Pid, PidfdFlags, pidfd_open, pidfd_send_signal};
use tokio::{
    io::{Interest, unix::AsyncFd},
    sync::{Semaphore, SemaphorePermit},
};

use crate::proc::AnyPid;

/// A process and its pidfd.
///
/// The process had this pid when the pidfd was opened. While [`PidFd::has_ended`] is false, no other process has that
/// pid.
#[derive(Debug)]
pub struct PidFd {
    pid: i32,
    fd: OwnedFd,
}

impl PidFd {
    /// Opens the process that has this pid now; `None` if there is none.
    ///
    /// # Errors
    /// The kernel refuses for another reason, such as too many open files.
    pub fn open(pid: impl AnyPid) -> io::Result<Option<Self>> {
        // The kernel reports 0 or -1 for a process whose pid is not valid in gpushd's pid
        // namespace.
        let Some(pid) = pid.try_into().ok().filter(|pid| *pid > 0) else { return Ok(None) };
        let Some(named) = Pid::from_raw(pid) else { return Ok(None) };
        match pidfd_open(named, PidfdFlags::empty()) {
            Ok(fd) => Ok(Some(Self { pid, fd })),
            Err(rustix::io::Errno::SRCH) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Wraps a pidfd that the kernel returned for the process with this pid.
    pub(crate) fn of(pid: i32, fd: OwnedFd) -> Self {
        Self { pid, fd }
    }

    /// Returns the pid that was used to open the process.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Returns whether the process has ended. A zombie has ended.
    pub fn has_ended(&self) -> bool {
        // A pidfd becomes readable when its process ends.
        !matches!(poll(&mut [PollFd::new(self.fd.as_fd(), PollFlags::POLLIN)], PollTimeout::ZERO), Ok(0))
    }

    /// Sends a signal to the process.
    ///
    /// # Errors
    /// `ESRCH` if the process has ended, `EPERM` if gpushd is not permitted to signal it.
    pub fn signal(&self, signal: Signal) -> io::Result<()> {
        let named = rustix::process::Signal::from_named_raw(signal as i32)
            .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
        Ok(pidfd_send_signal(&self.fd, named)?)
    }

    /// Kills the process. Returns `Ok` if it has already ended.
    ///
    /// # Errors
    /// `EPERM` if gpushd is not permitted to signal it.
    pub fn kill(&self) -> io::Result<()> {
        match self.signal(Signal::SIGKILL) {
            Err(error) if error.raw_os_error() == Some(Errno::ESRCH as i32) => Ok(()),
            other => other,
        }
    }
}

impl AsFd for PidFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl AsRawFd for PidFd {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

/// A [`PidFd`] with which a task can wait for the end of the process. The process need not be a
/// child of gpushd.
#[derive(Debug)]
pub struct AsyncPidFd(AsyncFd<PidFd>);

impl AsyncPidFd {
    /// Opens the process that has this pid now; `None` if there is none. Needs a tokio runtime.
    ///
    /// # Errors
    /// The kernel refuses for another reason, such as too many open files.
    pub fn open(pid: impl AnyPid) -> io::Result<Option<Self>> {
        let Some(process) = PidFd::open(pid)? else { return Ok(None) };
        #[expect(deprecated, reason = "its successor needs a promise that the descriptor stays the same")]
        let process = AsyncFd::with_interest(process, Interest::READABLE)?;
        Ok(Some(Self(process)))
    }

    /// Waits until the process has ended.
    pub async fn wait_until_ended(&self) {
        // Ignore the result: a pidfd stays readable after the process has ended, and `readable` does not return an
        // error while the process is alive.
        let _ = self.0.readable().await;
    }
}

impl Deref for AsyncPidFd {
    type Target = PidFd;

    fn deref(&self) -> &PidFd {
        self.0.get_ref()
    }
}

/// Maximum number of processes that gpushd awaits with [`Awaited`] at a time.
const MOST_AWAITED: usize = 4096;

/// [`Awaited`] processes use at most 1/`PART` of the descriptors that gpushd may have (RLIMIT_NOFILE).
const PART: u64 = 4;

/// Limits the number of [`Awaited`] processes: each process has a permit.
static AWAITED: LazyLock<Semaphore> = LazyLock::new(|| {
    let (descriptors, _) = getrlimit(Resource::RLIMIT_NOFILE).unwrap_or((1024, 1024));
    let part = usize::try_from(descriptors / PART).unwrap_or(MOST_AWAITED);
    Semaphore::new(part.min(MOST_AWAITED))
});

/// A user's process. A task awaits the end of this process. All of gpushd awaits at most [`MOST_AWAITED`] such
/// processes at a time, so users with many processes cannot take all descriptors of gpushd.
#[derive(Debug)]
pub struct Awaited {
    process: AsyncPidFd,
    _place: SemaphorePermit<'static>,
}

impl Awaited {
    /// Opens the process that has this pid now; `None` if there is none. Needs a tokio runtime.
    ///
    /// # Errors
    /// gpushd already awaits the maximum number of processes, or the kernel refuses, for example because of too many
    /// open files. The caller must then check the process at intervals.
    pub fn open(pid: impl AnyPid) -> io::Result<Option<Self>> {
        Self::open_within(pid, &AWAITED)
    }

    fn open_within(pid: impl AnyPid, places: &'static Semaphore) -> io::Result<Option<Self>> {
        let place = places.try_acquire().map_err(|_| io::Error::other("gpushd awaits too many processes"))?;
        Ok(AsyncPidFd::open(pid)?.map(|process| Self { process, _place: place }))
    }
}

impl Deref for Awaited {
    type Target = AsyncPidFd;

    fn deref(&self) -> &AsyncPidFd {
        &self.process
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};

    use super::*;

    fn sleeper() -> Child {
        Command::new("sleep").arg("600").spawn().unwrap()
    }

    #[test]
    fn pid_without_process_gives_none() {
        for pid in [i64::from(i32::MAX), 0, -1, i64::MAX] {
            assert!(PidFd::open(pid).unwrap().is_none(), "{pid}");
        }
    }

    #[test]
    fn killed_process_has_ended_before_it_is_reaped() {
        let mut child = sleeper();
        let process = PidFd::open(child.id()).unwrap().unwrap();
        assert_eq!((process.pid(), process.has_ended()), (child.id().cast_signed(), false));
        process.kill().unwrap();
        poll(&mut [PollFd::new(process.as_fd(), PollFlags::POLLIN)], PollTimeout::NONE).unwrap();
        assert!(process.has_ended());
        child.wait().unwrap();
        process.kill().unwrap();
        let error = process.signal(Signal::SIGTERM).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(Errno::ESRCH as i32));
    }

    #[tokio::test]
    async fn number_of_awaited_processes_is_limited() {
        static PLACES: Semaphore = Semaphore::const_new(2);
        let me = std::process::id();
        let open = || Awaited::open_within(me, &PLACES);
        let (first, second) = (open().unwrap(), open().unwrap());
        assert!(first.is_some() && second.is_some());
        assert_eq!(open().unwrap_err().to_string(), "gpushd awaits too many processes");
        assert!(Awaited::open_within(i32::MAX, &PLACES).is_err());
        drop(first);
        assert!(Awaited::open_within(i32::MAX, &PLACES).unwrap().is_none());
        assert!(open().unwrap().is_some(), "a missing process takes no place");
    }

    #[tokio::test]
    async fn end_of_a_process_wakes_the_task_that_waits() {
        let mut child = sleeper();
        let process = AsyncPidFd::open(child.id()).unwrap().unwrap();
        process.signal(Signal::SIGTERM).unwrap();
        process.wait_until_ended().await;
        assert!(process.has_ended());
        child.wait().unwrap();
    }
}
