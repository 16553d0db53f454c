//! States, events and effects of a lease. The transitions are in the parent module.

use std::time::Duration;

use gpush_api::{EndReason, LeaseState};

/// Time since a fixed moment. The state machine never reads a clock.
pub type Instant = Duration;

/// State of a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum State {
    /// The lease has no capacity yet.
    Queued {
        /// Whether the database contains the lease.
        recorded: bool,
    },
    /// The capacity is reserved in memory.
    Granting(Granting),
    /// The grant is recorded, and the holder has access.
    Active,
    /// Admission is closed, and the capacity is still reserved.
    Releasing(Releasing),
    /// The capacity is free. Final state.
    Ended(EndReason),
}

/// A grant in progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Granting {
    /// Whether a commit or an operation grants the lease.
    pub by: GrantBy,
    /// Whether the database contained the lease before the grant.
    pub recorded: bool,
    /// If set, the lease ends for this reason as soon as the outcome of the grant is known.
    pub abort: Option<EndReason>,
}

/// What grants a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GrantBy {
    /// A single commit. All targets exist already.
    Commit,
    /// An operation that creates the MIG devices. The commit that begins the operation records the
    /// lease as `granting`, and the commit that ends the operation records the lease as `active`.
    Operation,
}

/// A release in progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Releasing {
    /// Why the lease ends. Later reasons do not replace the first reason.
    pub reason: EndReason,
    /// The current step.
    pub step: ReleaseStep,
    /// Number of processes of the lease that are still known.
    pub remaining: Remaining,
    /// How gpushd ends the processes of the lease.
    pub ending: ProcessEnding,
}

/// Steps of a release.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ReleaseStep {
    /// Processes of the lease may still run.
    Processes,
    /// No process is left, and the end is being recorded.
    Recording,
    /// No process is left, but recording the end failed. The next [`Event::Tick`] starts another
    /// attempt.
    Retry,
}

/// Number of remaining processes of a lease, by source; `None` if the source does not answer.
///
/// Each source misses processes at some time. Between its start and `cuInit`, a process is not in
/// the lists of the driver and of the daemon. A process that was moved to another cgroup is no
/// longer in the cgroup of the lease. So the lease ends only when all three sources report no
/// process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Remaining {
    /// Processes in the cgroup of the lease. If the lease is bound to a process, only that process
    /// counts.
    pub bound: Option<u32>,
    /// Processes of the holder on the lease's targets, as the driver lists them.
    pub driver: Option<u32>,
    /// MPS clients of the lease, as the MPS daemon lists them.
    pub daemon: Option<u32>,
}

impl Remaining {
    /// All sources answered, and none reported a process.
    pub const NONE: Self = Self { bound: Some(0), driver: Some(0), daemon: Some(0) };

    /// Returns whether all sources answered and none reported a process.
    #[must_use]
    pub fn is_none(self) -> bool {
        self == Self::NONE
    }
}

/// Times for ending the processes of a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct EndProcesses {
    /// Time until SIGTERM.
    pub notice: Duration,
    /// Time from SIGTERM to SIGKILL.
    pub grace: Duration,
}

/// Progress of ending the processes of a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum ProcessEnding {
    /// Processes may run as long as they like.
    #[default]
    No,
    /// The holder was notified, and SIGTERM follows.
    Notice {
        /// Time at which SIGTERM is sent.
        until: Instant,
        /// Time from SIGTERM to SIGKILL.
        grace: Duration,
    },
    /// SIGTERM was sent.
    Terminated {
        /// Time at which SIGKILL is sent.
        until: Instant,
    },
    /// SIGKILL was sent.
    Killed,
}

/// An event of a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// The queued lease was recorded in the database.
    QueueRecorded,
    /// Capacity was reserved in memory.
    Reserved(GrantBy),
    /// The grant is durable.
    Committed,
    /// The grant is not in the database, and cannot be recorded later.
    CommitFailed,
    /// The operation failed or was rolled back. The last commit of the operation recorded the end
    /// of the lease.
    OperationFailed,
    /// The holder released or cancelled the lease, or its waiting client disconnected.
    Released,
    /// The process, scope or job to which the lease is bound has ended.
    BindingEnded,
    /// The maximum waiting time of the request has passed.
    WaitTimedOut,
    /// The lease reached its end time.
    Expired(Option<EndProcesses>),
    /// An administrator revoked the lease.
    Revoked(Option<EndProcesses>),
    /// A GPU of the lease was lost.
    GpuLost,
    /// The host was rebooted since the lease was granted.
    Rebooted,
    /// A probe for the processes of the lease has finished.
    Probed(Remaining),
    /// The end is durable.
    EndRecorded,
    /// The end could not be recorded.
    EndNotRecorded,
    /// The time that [`State::due`] returned has been reached, or a retry is due.
    Tick,
}

/// An action that the caller must execute. The caller executes actions in the given order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Effect {
    /// Record the lease as active, with its members, in one commit.
    CommitGrant,
    /// Begin the operation and record the lease as granting, in one commit.
    BeginOperation,
    /// Cancel the operation.
    CancelOperation,
    /// Grant the holder access to the targets.
    OpenAdmission,
    /// Prevent new processes of the holder from using the targets.
    CloseAdmission,
    /// Record that the lease is releasing, and the reason.
    RecordReleasing(EndReason),
    /// Probe the processes of the lease now and after each change. Report the results as
    /// [`Event::Probed`].
    WatchProcesses,
    /// Tell the holder when the processes of the lease will be ended.
    Notify(Instant),
    /// Send SIGTERM to the processes of the lease.
    Terminate,
    /// Send SIGKILL to the processes of the lease.
    Kill,
    /// Record that the lease ended, and the reason.
    RecordEnd(EndReason),
    /// Make the reserved capacity available to other leases.
    FreeCapacity,
    /// Report the grant to the holder and to listening clients.
    ReportGrant,
    /// Report the end to the holder and to listening clients.
    ReportEnd(EndReason),
}

impl State {
    /// Returns the name of the state in the API and the database.
    #[must_use]
    pub fn name(&self) -> LeaseState {
        match self {
            Self::Queued { .. } => LeaseState::Queued,
            Self::Granting(_) => LeaseState::Granting,
            Self::Active => LeaseState::Active,
            Self::Releasing(_) => LeaseState::Releasing,
            Self::Ended(_) => LeaseState::Ended,
        }
    }

    /// Returns whether new processes of the holder may use the targets.
    #[must_use]
    pub fn admits(&self) -> bool {
        matches!(self, Self::Active)
    }

    /// Returns why the lease ends or ended.
    #[must_use]
    pub fn reason(&self) -> Option<EndReason> {
        match self {
            Self::Releasing(releasing) => Some(releasing.reason),
            Self::Ended(reason) => Some(*reason),
            Self::Granting(granting) => granting.abort,
            Self::Queued { .. } | Self::Active => None,
        }
    }

    /// Returns the time at which the caller must send [`Event::Tick`]; `None` if the state has no
    /// deadline.
    #[must_use]
    pub fn due(&self) -> Option<Instant> {
        match self {
            Self::Releasing(releasing) => match releasing.ending {
                ProcessEnding::Notice { until, .. } | ProcessEnding::Terminated { until } => Some(until),
                ProcessEnding::No | ProcessEnding::Killed => None,
            },
            Self::Queued { .. } | Self::Granting(_) | Self::Active | Self::Ended(_) => None,
        }
    }

    /// Returns the state that a starting gpushd gives to a recorded lease.
    ///
    /// After a restart of gpushd, the client of a queued lease is no longer connected, so the
    /// caller cancels the lease. A granting lease waits until gpushd has recovered its operation.
    /// For a releasing lease, the number of remaining processes is unknown until the first probe.
    #[must_use]
    pub fn restored(recorded: LeaseState, reason: Option<EndReason>) -> Self {
        match recorded {
            LeaseState::Queued => Self::Queued { recorded: true },
            LeaseState::Granting => Self::Granting(Granting { by: GrantBy::Operation, recorded: true, abort: reason }),
            LeaseState::Active => Self::Active,
            LeaseState::Releasing => Self::Releasing(Releasing {
                reason: reason.unwrap_or(EndReason::Released),
                step: ReleaseStep::Processes,
                remaining: Remaining::default(),
                ending: ProcessEnding::No,
            }),
            LeaseState::Ended => Self::Ended(reason.unwrap_or(EndReason::Released)),
        }
    }
}
