//! Types of the supervisor: events, states, effects and policy. The transitions are in the parent
//! module.

use std::{fmt, time::Duration};

/// Time since a fixed moment. The state machine never reads a clock.
pub type Instant = Duration;

/// Settings that administrators can change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SupervisorPolicy {
    /// Maximum time until a new daemon answers for the first time.
    pub start: Duration,
    /// Pause before the restart after the second failure. Each further failure doubles the pause.
    /// After the first failure there is no pause, because a daemon that has served before will
    /// probably serve again.
    pub pause: Duration,
    /// Longest pause.
    pub longest_pause: Duration,
    /// Number of failures within `within` after which the supervisor gives up.
    pub failures: usize,
    /// Period in which `failures` are counted.
    pub within: Duration,
    /// Maximum time for a daemon to end on request. After that time, the supervisor kills the
    /// daemon.
    pub stop: Duration,
    /// Whether to restart a hung daemon that has clients. The restart ends the clients.
    pub restart_hung_with_clients: bool,
}

impl Default for SupervisorPolicy {
    fn default() -> Self {
        let seconds = Duration::from_secs;
        Self {
            start: seconds(10),
            pause: seconds(1),
            longest_pause: seconds(60),
            failures: 5,
            within: seconds(600),
            stop: seconds(10),
            restart_hung_with_clients: false,
        }
    }
}

/// The state of a daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SupervisorState {
    /// No daemon is running, and none is desired.
    Stopped,
    /// The daemon was started, and has not answered yet.
    Starting {
        /// Deadline for the first answer.
        until: Instant,
    },
    /// The daemon was found running, and has not been probed yet.
    Found {
        /// Pid of the daemon.
        pid: i32,
    },
    /// The daemon serves clients.
    Ready {
        /// Pid of the daemon.
        pid: i32,
        /// Number of consecutive probes without an answer.
        silences: u32,
    },
    /// The daemon is running but does not answer.
    Hung {
        /// Pid of the daemon.
        pid: i32,
        /// Number of consecutive probes without an answer; 0 while another process holds the
        /// control connection.
        silences: u32,
    },
    /// The daemon answers, but its server accepts no clients.
    Fault {
        /// Pid of the daemon.
        pid: i32,
    },
    /// The daemon ended, and the next start is scheduled.
    BackingOff {
        /// Time of the next start.
        until: Instant,
    },
    /// The daemon failed too often, so it is not started again.
    GivenUp,
    /// The daemon is no longer desired, but it has clients, or users hold leases.
    Draining {
        /// Pid of the daemon.
        pid: i32,
        /// Deadline for the clients; `None` for no deadline.
        until: Option<Instant>,
        /// Whether the daemon served before it drained.
        served: bool,
    },
    /// The supervisor has requested the end of the daemon.
    Stopping {
        /// Deadline after which the daemon is killed.
        until: Instant,
        /// Whether the daemon has been killed.
        killed: bool,
        /// Whether the daemon failed. A failed daemon is restarted after a pause.
        failed: bool,
    },
}

impl SupervisorState {
    /// Returns whether no daemon is running, starting or ending.
    #[must_use]
    pub fn is_down(&self) -> bool {
        match self {
            Self::Stopped | Self::BackingOff { .. } | Self::GivenUp => true,
            Self::Starting { .. }
            | Self::Found { .. }
            | Self::Ready { .. }
            | Self::Fault { .. }
            | Self::Hung { .. }
            | Self::Draining { .. }
            | Self::Stopping { .. } => false,
        }
    }
}

/// An event of a daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SupervisorEvent {
    /// The caller reports whether the daemon is desired.
    Wanted(bool),
    /// The daemon must be started, even if the supervisor has given up or has scheduled the start
    /// for later.
    ForceStart,
    /// The daemon is no longer desired. Its clients may run for this time; `None` for no limit. A
    /// limit of zero ends the clients at once. A later event of this kind replaces an earlier
    /// event.
    Leave(Option<Duration>),
    /// The daemon must be replaced by a new daemon, even if it has clients.
    Restart,
    /// A running daemon was found in its directory. The machine takes no action until the caller
    /// reports whether the daemon is desired.
    Found {
        /// Pid of the daemon.
        pid: i32,
    },
    /// The daemon answers, its identity is verified, and it has the desired settings.
    Answers {
        /// Pid of the daemon.
        pid: i32,
    },
    /// The daemon answers, but a client caused a fatal fault in its server, or the server ends
    /// whenever it is started.
    Fault,
    /// A probe got no answer in time.
    Silent,
    /// The daemon accepts a connection, but another process holds its control connection.
    Busy,
    /// The daemon cannot be started yet, because processes of the previous daemon still run. This
    /// is not a failure.
    Occupied,
    /// The daemon ended.
    Ended,
    /// The number of clients; `None` if it is unknown.
    Clients(Option<usize>),
    /// Whether users hold leases on the daemon's target. Their programs may connect at any time.
    Leased(bool),
    /// A timer fired.
    Tick,
}

/// Why gpushd kills a daemon, or what a previous daemon left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KillReason {
    /// The daemon was started, but did not answer in time.
    NotStarted,
    /// The daemon hangs.
    Hung,
    /// The daemon was asked to end, but did not end in time.
    NotStopped,
    /// A previous daemon left servers without clients, or the time of their clients is over.
    Leftovers,
    /// An administrator or an operation stops or restarts the daemon, and a previous daemon left servers.
    Requested,
}

impl fmt::Display for KillReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotStarted => "it did not answer in time after its start",
            Self::Hung => "it hangs: it did not answer several probes",
            Self::NotStopped => "it did not end in time after gpushd asked it to end",
            Self::Leftovers => "it has ended, but servers of it remain without clients, or after their deadline",
            Self::Requested => "it has ended, but servers of it remain, and it was stopped or restarted on request",
        })
    }
}

/// An action that the caller must execute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SupervisorEffect {
    /// Start a daemon.
    Start,
    /// Ask the daemon to end.
    Quit,
    /// Kill the daemon and all processes that it started.
    Kill(KillReason),
    /// Report that the supervisor has given up.
    ReportGivenUp,
    /// Report that the daemon hangs and is left running because of its clients.
    ReportHung,
}
