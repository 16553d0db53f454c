//! States, events and effects of a lease. The rules are in the parent module.

use std::time::Duration;

use gpush_api::{EndReason, LeaseState};

/// Time since a fixed moment. The machine never reads a clock.
pub type Instant = Duration;

/// State of a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum State {
    /// The lease has no capacity yet.
    Queued {
        /// Whether the database has a record of it.
        recorded: bool,
    },
    /// Its capacity is reserved in memory.
    Granting(Granting),
    /// The grant is recorded and the holder is admitted.
    Active,
    /// Admission is closed; the capacity is still reserved.
    Releasing(Releasing),
    /// The capacity is free. Final.
    Ended(EndReason),
}

/// A grant in progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Granting {
    /// What grants it.
    pub by: GrantBy,
    /// Whether the database had a record of the lease before.
    pub recorded: bool,
    /// Why the lease ends as soon as the outcome of the grant is known.
    pub abort: Option<EndReason>,
}

/// What grants a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GrantBy {
    /// A single commit, used when all targets exist.
    Commit,
    /// An operation that creates the MIG devices. The lease is recorded as `granting` with the begin of the
    /// operation, and as `active` with its end.
    Operation,
}

/// The end of a lease in progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Releasing {
    /// Why it ends. The first reason stays.
    pub reason: EndReason,
    /// What it waits for.
    pub step: ReleaseStep,
    /// What is known about its processes.
    pub remaining: Remaining,
    /// How far gpushd is with ending its processes.
    pub ending: ProcessEnding,
}

/// Steps of a release.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ReleaseStep {
    /// Processes of the lease may still run.
    Processes,
    /// No process is left; the end is being recorded.
    Recording,
    /// No process is left; the end could not be recorded and is tried again at the next [`Event::Tick`].
    Retry,
}

/// Processes of a lease that are left, by source; `None` where the source does not answer.
///
/// A process is missing from each source at some time: from the driver's and the daemon's list between its start
/// and `cuInit`, from the cgroup when it was moved out. So the lease ends only when all three are empty.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Remaining {
    /// Processes in the cgroup of the lease, or the process that it is bound to.
    pub bound: Option<u32>,
    /// Processes of the holder on the lease's targets, by the driver.
    pub driver: Option<u32>,
    /// Clients of the lease, by the MPS daemon.
    pub daemon: Option<u32>,
}

impl Remaining {
    /// All sources answered, and none reports a process.
    pub const NONE: Self = Self { bound: Some(0), driver: Some(0), daemon: Some(0) };

    /// Whether all sources answered and none lists a process.
    #[must_use]
    pub fn is_none(self) -> bool {
        self == Self::NONE
    }
}

/// How gpushd ends the processes of a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct EndProcesses {
    /// Time until SIGTERM.
    pub notice: Duration,
    /// Time from SIGTERM to SIGKILL.
    pub grace: Duration,
}

/// How far gpushd is with ending the processes of a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum ProcessEnding {
    /// Processes may run to their end.
    #[default]
    No,
    /// The holder was notified; SIGTERM follows.
    Notice {
        /// When SIGTERM is sent.
        until: Instant,
        /// Time from SIGTERM to SIGKILL.
        grace: Duration,
    },
    /// SIGTERM was sent.
    Terminated {
        /// When SIGKILL is sent.
        until: Instant,
    },
    /// SIGKILL was sent.
    Killed,
}

/// What happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// The database has a record of the queued lease.
    QueueRecorded,
    /// Capacity was reserved in memory.
    Reserved(GrantBy),
    /// The grant is durable.
    Committed,
    /// The grant is not in the database, and never will be.
    CommitFailed,
    /// The operation failed or was rolled back. Its last commit recorded the end of the lease.
    OperationFailed,
    /// The holder released or cancelled the lease, or its waiting client disconnected.
    Released,
    /// The process, scope or job that the lease is bound to ended.
    BindingEnded,
    /// It waited as long as the request allows.
    WaitTimedOut,
    /// Its end time was reached.
    Expired(Option<EndProcesses>),
    /// An administrator revoked it.
    Revoked(Option<EndProcesses>),
    /// One of its GPUs was lost.
    GpuLost,
    /// The lease was granted on an earlier boot.
    Rebooted,
    /// A probe of its processes finished.
    Probed(Remaining),
    /// The end is durable.
    EndRecorded,
    /// The end could not be recorded.
    EndNotRecorded,
    /// Time passed: [`State::due`] was reached, or a retry is due.
    Tick,
}

/// What the caller does next, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Effect {
    /// Record the lease as active, with its members, in one commit.
    CommitGrant,
    /// Begin the operation and record the lease as granting, in one commit.
    BeginOperation,
    /// Cancel the operation.
    CancelOperation,
    /// Admit the holder to the targets.
    OpenAdmission,
    /// Admit no new process of the holder.
    CloseAdmission,
    /// Record that the lease is releasing, and why.
    RecordReleasing(EndReason),
    /// Probe the processes of the lease, now and at each change, and report them as [`Event::Probed`].
    WatchProcesses,
    /// Notify the holder when the processes of the lease end.
    Notify(Instant),
    /// Send SIGTERM to the processes of the lease.
    Terminate,
    /// Send SIGKILL to the processes of the lease.
    Kill,
    /// Record that the lease ended, and why.
    RecordEnd(EndReason),
    /// Make the reserved capacity available to others.
    FreeCapacity,
    /// Report the grant to the holder and to watchers.
    ReportGrant,
    /// Report the end to the holder and to watchers.
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

    /// Whether processes of the holder may start to use the targets.
    #[must_use]
    pub fn admits(&self) -> bool {
        matches!(self, Self::Active)
    }

    /// Why it ends or ended.
    #[must_use]
    pub fn reason(&self) -> Option<EndReason> {
        match self {
            Self::Releasing(releasing) => Some(releasing.reason),
            Self::Ended(reason) => Some(*reason),
            Self::Granting(granting) => granting.abort,
            Self::Queued { .. } | Self::Active => None,
        }
    }

    /// Returns when the caller must send [`Event::Tick`]; `None` if the state has no deadline.
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

    /// The state in which an agent that starts takes over a recorded lease.
    ///
    /// A queued lease has lost its waiting client and is cancelled. A granting lease waits until gpushd has recovered
    /// its operation. Of a releasing one nothing is known before it is probed.
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
