//! The process that sent a request, and that may be moved into the scope of its lease.

use gpush_api::{ApiError, Code};
use gpush_host::{cgroup::CgroupKind, pidfd::PidFd, proc};

use crate::requests::caller::Caller;

/// The process that sent a request.
#[derive(Debug)]
pub(super) struct CallingProcess {
    pub(super) pid: u32,
    uid: u32,
    pub(super) process: PidFd,
    /// The cgroup of the process when gpushd opened the pidfd.
    pub(super) cgroup: CgroupKind,
}

impl CallingProcess {
    /// Opens a pidfd of the caller.
    ///
    /// # Errors
    /// If the caller has ended or has changed its user, or if another process has the caller's pid now.
    pub(super) fn of(caller: &Caller) -> Result<Self, ApiError> {
        let pid = caller.peer.pid.ok_or_else(caller_ended_error)?;
        let process = PidFd::open(pid).ok().flatten().ok_or_else(caller_ended_error)?;
        // The pidfd was opened before this comparison. So if the pidfd refers to a later process with the same pid, the
        // start times differ.
        if caller.peer.start.is_none() || proc::start(pid) != caller.peer.start {
            return Err(caller_ended_error());
        }
        let held = Self { pid, uid: caller.uid(), process, cgroup: CgroupKind::of(pid) };
        held.check()?;
        Ok(held)
    }

    /// Checks that the process is alive and still runs as the user that connected.
    pub(super) fn check(&self) -> Result<(), ApiError> {
        let uids = proc::uids(self.pid);
        // Check this after reading `uids`: if the process is still alive now, `uids` belongs to it, and not to a later
        // process with the same pid.
        if self.process.has_ended() {
            return Err(caller_ended_error());
        }
        if uids != Some([self.uid; 4]) {
            return Err(ApiError::new(Code::Denied, "the calling process has changed its user since it connected")
                .hint("send the request from a process that does not change its user"));
        }
        Ok(())
    }

    /// Does the checks of [`Self::check`], and checks that the process is still in the cgroup in which it was when
    /// gpushd opened the pidfd. If the process was moved to a cgroup with limits meanwhile, a new scope would remove
    /// these limits.
    pub(super) fn check_unmoved(&self) -> Result<(), ApiError> {
        let cgroup = CgroupKind::of(self.pid);
        self.check()?;
        if cgroup != self.cgroup {
            return Err(ApiError::new(
                Code::Conflict,
                "the calling process was moved to another cgroup while it waited",
            )
            .cause("the lease would be bound to a cgroup in which its process no longer is")
            .hint("request the lease again"));
        }
        Ok(())
    }
}

fn caller_ended_error() -> ApiError {
    ApiError::new(Code::Conflict, "the process that sent the request has ended, so no lease can be bound to it")
        .hint("send the request from the process that will use the lease")
}
