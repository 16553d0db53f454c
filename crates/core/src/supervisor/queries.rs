//! What the state of a supervisor says about its daemon. Nothing here changes the state.

use super::{Instant, Supervisor, SupervisorState};

impl Supervisor {
    /// Returns the state of the daemon.
    #[must_use]
    pub fn state(&self) -> &SupervisorState {
        &self.state
    }

    /// Returns whether new users may be admitted.
    #[must_use]
    pub fn admits(&self) -> bool {
        matches!(self.state, SupervisorState::Ready { .. }) && self.is_desired()
    }

    /// Returns whether the daemon drains, so that only lease holders keep their access.
    #[must_use]
    pub fn serves_leases(&self) -> bool {
        matches!(self.state, SupervisorState::Draining { .. }) && self.leased
    }

    /// Returns whether users of a found daemon keep their access until the daemon's state is known.
    #[must_use]
    pub fn keeps_access(&self) -> bool {
        matches!(self.state, SupervisorState::Found { .. } | SupervisorState::Ready { .. })
            && self.wanted != Some(false)
    }

    /// Returns the time at which the caller must send [`Tick`](super::SupervisorEvent::Tick); `None` if no timer runs.
    #[must_use]
    pub fn due(&self) -> Option<Instant> {
        match self.state {
            SupervisorState::Draining { until, .. } => until,
            SupervisorState::Starting { until }
            | SupervisorState::BackingOff { until }
            | SupervisorState::Stopping { until, killed: false, .. } => Some(until),
            SupervisorState::Stopped
            | SupervisorState::Found { .. }
            | SupervisorState::Ready { .. }
            | SupervisorState::Hung { .. }
            | SupervisorState::Fault { .. }
            | SupervisorState::GivenUp
            | SupervisorState::Stopping { killed: true, .. } => None,
        }
    }

    /// Returns the pid of the daemon while it is running.
    #[must_use]
    pub fn pid(&self) -> Option<i32> {
        match self.state {
            SupervisorState::Found { pid }
            | SupervisorState::Ready { pid, .. }
            | SupervisorState::Hung { pid, .. }
            | SupervisorState::Fault { pid }
            | SupervisorState::Draining { pid, .. } => Some(pid),
            SupervisorState::Stopped
            | SupervisorState::Starting { .. }
            | SupervisorState::BackingOff { .. }
            | SupervisorState::GivenUp
            | SupervisorState::Stopping { .. } => None,
        }
    }

    /// Returns whether the daemon is desired.
    #[must_use]
    pub fn is_desired(&self) -> bool {
        self.wanted == Some(true)
    }

    /// Returns false until an event has said whether the daemon is desired.
    #[must_use]
    pub fn is_desired_known(&self) -> bool {
        self.wanted.is_some()
    }

    /// Returns the number of clients, if known.
    #[must_use]
    pub fn clients(&self) -> Option<usize> {
        self.clients
    }

    /// Returns whether the daemon is known to have no clients.
    pub(super) fn is_idle(&self) -> bool {
        self.clients == Some(0)
    }

    /// Returns whether the daemon may end: no client is connected, and no user holds a lease.
    pub(super) fn is_unused(&self) -> bool {
        self.is_idle() && !self.leased
    }

    /// Returns the number of failures within the period of the policy.
    #[must_use]
    pub fn failures(&self) -> usize {
        self.failed.len()
    }
}
