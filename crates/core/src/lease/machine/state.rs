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
    /// The capacity is reserved in memory, and the grant is being recorded.
    Committing {
        /// Whether the database contained the lease before the grant.
        recorded: bool,
        /// If set, the lease ends for this reason as soon as the outcome of the commit is known.
        abort: Option<EndReason>,
    },
    /// An operation creates the MIG devices of the lease. The commit that ends the operation records the lease as
    /// `active`, or as `ended`.
    Creating {
        /// If set, the lease ends for this reason as soon as the operation has ended.
        abort: Option<EndReason>,
    },
    /// The grant is recorded, and the holder has access.
    Active,
    /// Admission is closed, and the capacity is still reserved.
    Releasing(Releasing),
    /// The lease was never granted, and its end is being recorded. It has no capacity.
    Leaving {
        /// Why the lease ends.
        reason: EndReason,
        /// Whether the last attempt to record the end failed. The next [`Event::Tick`] starts another attempt.
        retry: bool,
    },
    /// The capacity is free. Final state.
    Ended(EndReason),
}

/// A release in progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Releasing {
    /// Why the lease ends. Later reasons do not replace the first reason.
    pub reason: EndReason,
    /// Whether the database says that the lease is releasing.
    pub recorded: bool,
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

    /// Returns whether all sources answered.
    #[must_use]
    pub fn is_known(self) -> bool {
        self.bound.is_some() && self.driver.is_some() && self.daemon.is_some()
    }

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
    /// Capacity was reserved in memory.
    Reserved,
    /// The grant is durable.
    Committed,
    /// The commit has begun an operation that creates the MIG devices of the lease.
    OperationBegun,
    /// The grant is not in the database, and cannot be recorded later.
    CommitFailed,
    /// The grant is not in the database, for example because a GPU has changed. A later grant may succeed.
    CommitPostponed,
    /// The operation failed or was rolled back. The last commit of the operation recorded the end
    /// of the lease.
    OperationFailed,
    /// The request can never be granted.
    Refused,
    /// The holder released or cancelled the lease, or its waiting client disconnected.
    Released,
    /// The process, scope or job to which the lease is bound has ended.
    BindingEnded,
    /// The maximum waiting time of the request has passed.
    WaitTimedOut,
    /// The lease reached its end time.
    Expired,
    /// An administrator revoked the lease.
    Revoked,
    /// A GPU of the lease was lost.
    GpuLost,
    /// The remaining processes of the releasing lease must end.
    EndProcesses(EndProcesses),
    /// The database says that the lease is releasing.
    ReleaseRecorded,
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
    /// Record the grant with its members, in one commit: the lease is active; or it is granting, and an operation begins
    /// that creates its MIG devices.
    CommitGrant,
    /// Cancel the operation.
    CancelOperation,
    /// Put the request back into the queue.
    WaitAgain,
    /// Grant the holder access to the targets.
    OpenAdmission,
    /// Prevent new processes of the holder from using the targets.
    CloseAdmission,
    /// Record that the lease is releasing, and the reason. If the record fails, the next probe causes another attempt.
    RecordReleasing(EndReason),
    /// Probe the processes of the lease now and after each change. Report the results as
    /// [`Event::Probed`].
    WatchProcesses,
    /// Tell the holder that the lease ends, and why.
    TellEnd(EndReason),
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
    /// Returns the name of the state in the API and the database. Until a commit has succeeded or failed, the state keeps
    /// the name that it had before.
    #[must_use]
    pub fn name(&self) -> LeaseState {
        match self {
            Self::Queued { .. } | Self::Committing { .. } | Self::Leaving { .. } => LeaseState::Queued,
            Self::Creating { .. } => LeaseState::Granting,
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

    /// Returns whether capacity is reserved for the lease.
    #[must_use]
    pub fn reserves(&self) -> bool {
        match self {
            Self::Committing { .. } | Self::Creating { .. } | Self::Active | Self::Releasing(_) => true,
            Self::Queued { .. } | Self::Leaving { .. } | Self::Ended(_) => false,
        }
    }

    /// Returns why the lease ends or ended.
    #[must_use]
    pub fn reason(&self) -> Option<EndReason> {
        match self {
            Self::Releasing(releasing) => Some(releasing.reason),
            Self::Leaving { reason, .. } | Self::Ended(reason) => Some(*reason),
            Self::Committing { abort, .. } | Self::Creating { abort } => *abort,
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
            Self::Queued { .. }
            | Self::Committing { .. }
            | Self::Creating { .. }
            | Self::Active
            | Self::Leaving { .. }
            | Self::Ended(_) => None,
        }
    }

    /// Returns whether the end of the lease could not be recorded. A later [`Event::Tick`] starts another attempt.
    #[must_use]
    pub fn needs_retry(&self) -> bool {
        match self {
            Self::Releasing(releasing) => releasing.step == ReleaseStep::Retry,
            Self::Leaving { retry, .. } => *retry,
            Self::Queued { .. } | Self::Committing { .. } | Self::Creating { .. } | Self::Active | Self::Ended(_) => {
                false
            }
        }
    }

    /// Returns the state that a starting gpushd gives to a recorded lease.
    ///
    /// A queued lease keeps its place in the queue. A granting lease waits until gpushd has recovered its operation.
    /// For a releasing lease, the number of remaining processes is unknown until the first probe.
    #[must_use]
    pub fn restored(recorded: LeaseState, reason: Option<EndReason>) -> Self {
        match recorded {
            LeaseState::Queued => Self::Queued { recorded: true },
            LeaseState::Granting => Self::Creating { abort: reason },
            LeaseState::Active => Self::Active,
            LeaseState::Releasing => Self::Releasing(Releasing {
                reason: reason.unwrap_or(EndReason::Released),
                recorded: true,
                step: ReleaseStep::Processes,
                remaining: Remaining::default(),
                ending: ProcessEnding::No,
            }),
            LeaseState::Ended => Self::Ended(reason.unwrap_or(EndReason::Released)),
        }
    }
}
