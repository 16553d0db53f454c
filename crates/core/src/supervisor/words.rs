//! What the machine is told, where it is, what it wants done, and what an administrator may set of it. No
//! rule is here.

use std::time::Duration;

/// Time since some fixed moment. The machine never looks at a clock.
pub type Instant = Duration;

/// What an administrator may set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policy {
    /// How long a daemon may take until it answers.
    pub start: Duration,
    /// Pause after the second failure; each further one doubles it. After the first there is none: one that
    /// served and ended is most likely to serve again.
    pub pause: Duration,
    /// Longest pause.
    pub longest_pause: Duration,
    /// So many failures …
    pub failures: usize,
    /// … within this time are too many.
    pub within: Duration,
    /// How long a daemon may take to end before it is killed.
    pub stop: Duration,
    /// Whether a hung daemon is restarted although it has clients, who die of it.
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

/// Where a daemon is in its life.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State {
    /// There is none, and none is wanted.
    Stopped,
    /// It was started and has not answered.
    Starting {
        /// When it is late.
        until: Instant,
    },
    /// It was found running, and has not been asked yet.
    Found {
        /// Its pid.
        pid: i32,
    },
    /// It serves.
    Ready {
        /// Its pid.
        pid: i32,
        /// Questions in a row that it left unanswered.
        silences: u32,
    },
    /// It runs, and does not answer.
    Hung {
        /// Its pid.
        pid: i32,
        /// Questions in a row that it left unanswered; none while somebody else has its ear.
        silences: u32,
    },
    /// It answers, and its server takes nobody.
    Fault {
        /// Its pid.
        pid: i32,
    },
    /// It ended; the next start is due.
    BackingOff {
        /// When.
        until: Instant,
    },
    /// It ended too often.
    GivenUp,
    /// It is not wanted any more, and has clients.
    Draining {
        /// Its pid.
        pid: i32,
        /// When it is stopped under them; never, unless somebody said so.
        until: Option<Instant>,
        /// Whether it served until then.
        served: bool,
    },
    /// It was told to end.
    Stopping {
        /// When it is killed.
        until: Instant,
        /// Whether it has been.
        killed: bool,
        /// Whether it is ended because it failed, and so is to be started again after a pause.
        failed: bool,
    },
}

impl State {
    /// Whether there is no daemon, and none is on its way or on its way out.
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

/// What happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// It shall run, or shall not.
    Wanted(bool),
    /// Somebody wants it started though it was given up, or backs off.
    StartAnyway,
    /// It shall not run any more, and its clients may take so long to go, or however long they like: what was
    /// said last holds. No time at all, and they are ended.
    Leave(Option<Duration>),
    /// It shall be another, whatever clients it has.
    Restart,
    /// One was found alive in its directory. Nothing is done about it before it is said whether it is
    /// wanted.
    Found {
        /// Its pid.
        pid: i32,
    },
    /// It answers, who it is was verified, and its settings are ours.
    Answers {
        /// Its pid.
        pid: i32,
    },
    /// It answers, and its server met a client's fatal fault, or ends whenever it is started.
    Fault,
    /// It left a question unanswered in time.
    Silent,
    /// It greets, and somebody else has its ear.
    Busy,
    /// It can't be started yet: something of the one before is still there. That is no failure.
    Occupied,
    /// It ended.
    Ended,
    /// So many clients it has; nobody can tell.
    Clients(Option<usize>),
    /// Time went by.
    Tick,
}

/// What is to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// Start one.
    Start,
    /// Tell it to end.
    Quit,
    /// Kill it with all that it started.
    Kill,
    /// Say that it was given up.
    TellGivenUp,
    /// Say that it hangs, and that nothing is done about it for its clients' sake.
    TellHung,
}
