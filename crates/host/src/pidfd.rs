//! A process identified by its pidfd. A signal reaches only this process, and never a later process
//! with the same pid.

use std::{
    io,
    ops::Deref,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd},
};

use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::signal::Signal,
};
use rustix::process::{Pid, PidfdFlags, pidfd_open, pidfd_send_signal};
use tokio::io::{Interest, unix::AsyncFd};

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
    /// `ESRCH` if the process has ended, `EPERM` if gpushd may not signal it.
    pub fn signal(&self, signal: Signal) -> io::Result<()> {
        let named = rustix::process::Signal::from_named_raw(signal as i32)
            .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
        Ok(pidfd_send_signal(&self.fd, named)?)
    }

    /// Kills the process. Returns `Ok` if it has already ended.
    ///
    /// # Errors
    /// `EPERM` if gpushd may not signal it.
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
        // A pidfd stays readable after the process has ended. `readable` does not return an error
        // while the process is alive.
        let _ = self.0.readable().await;
    }
}

impl Deref for AsyncPidFd {
    type Target = PidFd;

    fn deref(&self) -> &PidFd {
        self.0.get_ref()
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
    async fn end_of_a_process_wakes_the_task_that_waits() {
        let mut child = sleeper();
        let process = AsyncPidFd::open(child.id()).unwrap().unwrap();
        process.signal(Signal::SIGTERM).unwrap();
        process.wait_until_ended().await;
        assert!(process.has_ended());
        child.wait().unwrap();
    }
}
