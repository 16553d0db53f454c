//! What gpushd knows about an MPS daemon.

use std::{collections::BTreeSet, path::PathBuf};

use gpush_api::{MpsPolicy, MpsServerState, MpsSettings, MpsState};
use jiff::{SignedDuration, Timestamp};

use crate::supervisor::SupervisorState;

/// Two reports about the same deadline compute times that differ by less than this.
const SAME_TIME: SignedDuration = SignedDuration::from_secs(1);

/// What gpushd knows about a daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DaemonReport {
    /// State of the supervisor.
    pub state: SupervisorState,
    /// Since when the supervisor is in that state.
    pub since: Timestamp,
    /// Whether the daemon is desired.
    pub wanted: bool,
    /// Whether the daemon serves clients of all users with one server that runs as root.
    pub multi_user: bool,
    /// The desired policy, with the users that the daemon serves now.
    pub policy: Option<MpsPolicy>,
    /// Pid of the control daemon.
    pub pid: Option<i32>,
    /// The effective settings, as read back from the daemon.
    pub in_force: Option<MpsSettings>,
    /// Pid and state of each server.
    pub servers: Vec<(i32, Option<MpsServerState>)>,
    /// For each client, the pid of its server and the pid of the client, in this order.
    pub clients: Vec<(i32, i32)>,
    /// Whether all clients are known, including clients that wait for a server.
    pub clients_known: bool,
    /// Clients that wait for a server.
    pub waiting: Vec<i32>,
    /// Whether the daemon drains until the leases on its target have ended.
    pub serves_leases: bool,
    /// Whether leftovers run although the daemon is stopped.
    pub behind: bool,
    /// Time at which gpushd ends the remaining clients.
    pub until: Option<Timestamp>,
    /// Number of recent failures, as the supervisor counts them.
    pub failures: usize,
    /// Time at which gpushd restarts the daemon.
    pub next_start: Option<Timestamp>,
    /// Problems, one sentence each.
    pub trouble: Vec<String>,
    /// Pids of the processes that hold the control connection; empty if the daemon answers.
    pub ear: BTreeSet<i32>,
    /// A description of the protocol in use; `None` before the first reply.
    pub protocol: Option<String>,
    /// Warnings for users, one sentence each. The daemon may still serve clients.
    pub findings: Vec<String>,
    /// Pipe directory.
    pub pipe: Option<PathBuf>,
    /// Directory of the logs.
    pub logs: Option<PathBuf>,
    /// The user whose clients the daemon serves; `None` if there is none yet, or several.
    pub user: Option<u32>,
}

impl DaemonReport {
    /// Returns the state of the daemon for the API.
    #[must_use]
    pub fn shown_state(&self) -> MpsState {
        match &self.state {
            // The daemon has exited, but some of its clients still run and may finish.
            SupervisorState::Stopped if self.behind => MpsState::Draining,
            SupervisorState::Stopped => MpsState::Stopped,
            // If gpushd has just found the daemon, show it as starting, because gpushd polls it at once.
            SupervisorState::Starting { .. } | SupervisorState::Found { .. } => MpsState::Starting,
            SupervisorState::Ready { .. } => MpsState::Ready,
            SupervisorState::Hung { .. } => MpsState::Hung,
            SupervisorState::Fault { .. } => MpsState::Fault,
            SupervisorState::BackingOff { .. } => MpsState::BackingOff,
            SupervisorState::GivenUp => MpsState::GivenUp,
            SupervisorState::Draining { .. } => MpsState::Draining,
            SupervisorState::Stopping { .. } => MpsState::Stopping,
        }
    }

    /// Returns whether the daemon admits new clients.
    #[must_use]
    pub fn admits(&self) -> bool {
        self.wanted && matches!(self.state, SupervisorState::Ready { .. })
    }

    /// Returns whether the daemon is desired or runs.
    #[must_use]
    pub fn is_present(&self) -> bool {
        self.wanted || self.state != SupervisorState::Stopped
    }

    /// Returns whether the daemon is stopped and has left no processes.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.state == SupervisorState::Stopped && !self.behind
    }

    /// Returns whether the daemon waits for its clients without a deadline.
    #[must_use]
    pub fn drains_without_deadline(&self) -> bool {
        self.until.is_none() && (self.behind || matches!(self.state, SupervisorState::Draining { .. }))
    }

    /// Returns the number of connected clients, including those that wait for a server.
    #[must_use]
    pub fn client_count(&self) -> usize {
        self.clients.len() + self.waiting.len()
    }

    /// Returns the pids of the connected clients, including those that wait for a server.
    pub fn client_pids(&self) -> impl Iterator<Item = u32> {
        let pids = self.clients.iter().map(|(_, client)| *client).chain(self.waiting.iter().copied());
        pids.filter_map(|pid| u32::try_from(pid).ok())
    }

    /// Returns the pids of the servers and of the daemon.
    pub fn daemon_pids(&self) -> impl Iterator<Item = u32> {
        let pids = self.servers.iter().map(|(server, _)| *server).chain(self.pid);
        pids.filter_map(|pid| u32::try_from(pid).ok())
    }

    /// Returns this report with the times of the earlier report for the same deadlines. Each report computes its times
    /// again from the monotonic clock, so without this function two reports about the same facts would differ.
    #[must_use]
    pub fn with_times_of(mut self, earlier: &Self) -> Self {
        let same = |now: Option<Timestamp>, before: Option<Timestamp>| match (now, before) {
            (Some(now), Some(before)) if now.duration_since(before).abs() < SAME_TIME => Some(before),
            (now, _) => now,
        };
        self.until = same(self.until, earlier.until);
        self.next_start = same(self.next_start, earlier.next_start);
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mps::scene::{READY, report};

    #[test]
    fn daemon_with_leftovers_is_shown_as_draining() {
        assert_eq!(report(SupervisorState::Stopped).shown_state(), MpsState::Stopped);
        let behind = DaemonReport { behind: true, ..report(SupervisorState::Stopped) };
        assert_eq!(behind.shown_state(), MpsState::Draining);
        assert!(!behind.has_ended() && behind.drains_without_deadline());
    }

    #[test]
    fn daemon_admits_clients_only_if_ready_and_desired() {
        assert!(report(READY).admits());
        assert!(!DaemonReport { wanted: false, ..report(READY) }.admits());
        assert!(!report(SupervisorState::GivenUp).admits());
    }

    #[test]
    fn times_of_the_same_deadline_stay_the_same() {
        let at = |ms| Some(Timestamp::UNIX_EPOCH + SignedDuration::from_millis(ms));
        let with = |until, next_start| DaemonReport { until, next_start, ..report(READY) };
        let before = with(at(10_000), at(20_000));
        assert_eq!(with(at(10_003), at(19_998)).with_times_of(&before), before);
        assert_eq!(with(at(11_000), None).with_times_of(&before), with(at(11_000), None));
        assert_eq!(with(None, at(5)).with_times_of(&with(at(5), None)), with(None, at(5)));
    }
}
