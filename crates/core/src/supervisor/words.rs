//! Types of the supervisor: events, states, effects and policy. This file contains no rules.

use std::time::Duration;

/// Time since a fixed moment. The machine never reads a clock.
pub type Instant = Duration;

/// Settings that administrators can change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policy {
    /// Time limit for a new daemon's first answer.
    pub start: Duration,
    /// Pause after the second failure. Each further failure doubles it. After the first failure there is no pause,
    /// because a daemon that has served before will probably serve again.
    pub pause: Duration,
    /// Longest pause.
    pub longest_pause: Duration,
    /// Number of failures within `within` after which the supervisor gives up.
    pub failures: usize,
    /// See `failures`.
    pub within: Duration,
    /// Time limit for a requested stop. After it the daemon is killed.
    pub stop: Duration,
    /// Whether to restart a hung daemon that has clients. This ends the clients.
    pub restart_hung_with_clients: bool,
}

impl Default for Policy {
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
pub enum State {
    /// There is no daemon, and none is desired.
    Stopped,
    /// It was started and has not answered yet.
    Starting {
        /// Deadline for the first answer.
        until: Instant,
    },
    /// It was found running, and not probed yet.
    Found {
        /// Pid of the daemon.
        pid: i32,
    },
    /// It serves.
    Ready {
        /// Pid of the daemon.
        pid: i32,
        /// Number of consecutive probes without an answer.
        silences: u32,
    },
    /// It runs but does not answer.
    Hung {
        /// Pid of the daemon.
        pid: i32,
        /// Number of consecutive probes without an answer; 0 while another process holds the control connection.
        silences: u32,
    },
    /// It answers, but its server accepts no clients.
    Fault {
        /// Pid of the daemon.
        pid: i32,
    },
    /// It ended, and the next start is scheduled.
    BackingOff {
        /// Time of the next start.
        until: Instant,
    },
    /// It failed too often, so it is not started again.
    GivenUp,
    /// No longer desired, but it has clients, or users hold leases.
    Draining {
        /// Pid of the daemon.
        pid: i32,
        /// Deadline for the clients; `None` without one.
        until: Option<Instant>,
        /// Whether it served before.
        served: bool,
    },
    /// gpushd has requested its end.
    Stopping {
        /// Deadline. After it the daemon is killed.
        until: Instant,
        /// Whether it has been killed.
        killed: bool,
        /// Whether it failed. Then it is restarted after a pause.
        failed: bool,
    },
}

impl State {
    /// Returns whether no daemon runs, starts or ends.
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

/// An event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// Whether the daemon is desired.
    Wanted(bool),
    /// Start it, even if it was given up or its start is scheduled for later.
    StartAnyway,
    /// It is no longer desired. Its clients may finish within this time, or without a limit. A later event replaces an
    /// earlier one. A limit of zero ends them at once.
    Leave(Option<Duration>),
    /// Replace it by a new daemon, even if it has clients.
    Restart,
    /// A running daemon was found in its directory. No action follows until the caller reports whether it is desired.
    Found {
        /// Pid of the daemon.
        pid: i32,
    },
    /// It answers, its identity is verified, and it has the desired settings.
    Answers {
        /// Pid of the daemon.
        pid: i32,
    },
    /// It answers, but its server has a fatal fault of a client, or ends whenever it is started.
    Fault,
    /// A probe got no answer in time.
    Silent,
    /// It accepts a connection, but another process holds the control connection.
    Busy,
    /// It cannot be started yet because leftovers of the previous daemon run. This is not a failure.
    Occupied,
    /// It ended.
    Ended,
    /// Its number of clients; `None` if unknown.
    Clients(Option<usize>),
    /// Whether users hold leases on its target. Their programs may connect at any time.
    Leased(bool),
    /// A timer fired.
    Tick,
}

/// An action for the caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// Start a daemon.
    Start,
    /// Tell it to end.
    Quit,
    /// Kill it and all processes that it started.
    Kill,
    /// Report that it was given up.
    TellGivenUp,
    /// Report that it hangs, and that it is left running because of its clients.
    TellHung,
}
