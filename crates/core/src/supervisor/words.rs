//! Types of the supervisor: its events, states, effects and policy. It contains no rules.

use std::time::Duration;

/// Time since a fixed moment. The machine never reads a clock.
pub type Instant = Duration;

/// Settings for administrators.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policy {
    /// Time limit for a new daemon's first answer.
    pub start: Duration,
    /// Pause after the second failure; each further failure doubles it. After the first one there is no pause:
    /// a daemon that served and then ended will most likely serve again.
    pub pause: Duration,
    /// Longest pause.
    pub longest_pause: Duration,
    /// Number of failures …
    pub failures: usize,
    /// … within this time that makes the supervisor give up.
    pub within: Duration,
    /// Time limit for an end on request; then it is killed.
    pub stop: Duration,
    /// Whether to restart a hung daemon that has clients, which ends them.
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
    /// There is none, and none is desired.
    Stopped,
    /// Started, without an answer so far.
    Starting {
        /// Deadline of the first answer.
        until: Instant,
    },
    /// Found running, not probed yet.
    Found {
        /// Its pid.
        pid: i32,
    },
    /// It serves.
    Ready {
        /// Its pid.
        pid: i32,
        /// Probes in a row without an answer.
        silences: u32,
    },
    /// It runs but does not answer.
    Hung {
        /// Its pid.
        pid: i32,
        /// Probes in a row without an answer; 0 while another process holds the control connection.
        silences: u32,
    },
    /// It answers, but its server accepts no clients.
    Fault {
        /// Its pid.
        pid: i32,
    },
    /// It ended; the next start is scheduled.
    BackingOff {
        /// Time of the next start.
        until: Instant,
    },
    /// It ended too often.
    GivenUp,
    /// No longer desired, but it has clients, or users hold leases.
    Draining {
        /// Its pid.
        pid: i32,
        /// Deadline for its clients; `None` without one.
        until: Option<Instant>,
        /// Whether it served before.
        served: bool,
    },
    /// Asked to end.
    Stopping {
        /// Deadline, when it is killed.
        until: Instant,
        /// Whether it has been killed.
        killed: bool,
        /// Whether it failed, so that it is started again after a pause.
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
    /// Start it although it was given up or its start is scheduled later.
    StartAnyway,
    /// It is no longer desired. Its clients have this time, or no limit; the last call counts. A limit of zero
    /// ends them at once.
    Leave(Option<Duration>),
    /// Replace it by a new daemon, whatever clients it has.
    Restart,
    /// A running daemon was found in its directory. No action follows until the caller tells whether it is
    /// desired.
    Found {
        /// Its pid.
        pid: i32,
    },
    /// It answers, its identity is verified, and it has the desired settings.
    Answers {
        /// Its pid.
        pid: i32,
    },
    /// It answers, but its server met a client's fatal fault, or ends whenever it is started.
    Fault,
    /// A probe got no answer in time.
    Silent,
    /// It greets, but another process holds the control connection.
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
    /// Ask it to end.
    Quit,
    /// Kill it and all processes that it started.
    Kill,
    /// Report that it was given up.
    TellGivenUp,
    /// Report that it hangs, and that it is left running because of its clients.
    TellHung,
}
