//! One supervised MPS control daemon per target: the handle of its supervisor task.
//!
//! The state machine in [`gpush_core::supervisor`] makes the decisions:
//!
//! ```text
//!            desired                 replies, settings applied
//!  Stopped ──────────► Starting ───────────────────────────────► Ready ◄────► Hung (silent twice, or busy)
//!   ▲  ▲                ▲   │ ended, or late                       │   ◄────► Fault (a server's fatal fault)
//!   │  │     pause over │   ▼                                      │ not desired
//!   │  └──────────── BackingOff ── too many failures ─► GivenUp    ▼
//!   └── ended ── Stopping ◄──────── no client left, or deadline ── Draining
//! ```
//!
//! ```text
//! requests ─► supervisor task ─► reports   the caller runs the task. If the task panics, the caller runs it again: it
//!                 └ panics ─► task         recovers its state from the directory, and pending requests wait for it
//! ```
//!
//! | file | subject |
//! |---|---|
//! | `task` | the supervisor task: events in, effects executed |
//! | `start`, `stop` | how a target gets its daemon; how a daemon ends |
//! | `probe`, `health`, `settings` | probes: the daemon's state, its servers and clients, its settings |
//! | `probe_task` | the task of one probe |
//! | `report` | the reports that the task publishes |
//! | `admission` | users with access to the pipe directory; another user gets another daemon |
//! | `leftovers` | processes of a daemon that has ended |
//! | `pending` | clients that wait for a server |
//! | `launcher` | starts, watches and kills the process: a systemd unit, or a child of gpushd |
//! | `exec` | `gpushd mps-daemon`, which becomes the daemon |
//! | `target_dir`, `base_lock` | the directory of a target; the lock of the directory of all targets |
//! | `log` | the daemon's logs: parser, filter, tail, rotation |
//! | `control_connection`, `protocol_in_use` | processes that prevent a daemon from answering; the protocol in use |
//! | `multi_user` | whether a control program can serve several users |
//! | `server_processes` | which processes are MPS servers |
//! | `server_record` | the servers that gpushd has seen as children of a daemon |

use std::{collections::BTreeSet, fmt, path::PathBuf, sync::Arc, time::Duration};

use gpush_api::{ApiError, Code, GpuUuid, MpsPolicy, TargetUuid};
use gpush_core::{
    mps::DaemonReport,
    supervisor::{KillReason, SupervisorPolicy, SupervisorState},
};
use gpush_host::proc::ProcessId;
use gpush_locked::Locked;
use tokio::{
    sync::{mpsc, oneshot, watch},
    time::Instant,
};

mod admission;
pub mod base_lock;
mod control_connection;
pub mod exec;
mod health;
mod launcher;
mod leftovers;
pub mod log;
pub mod multi_user;
mod pending;
mod probe;
mod probe_task;
mod protocol_in_use;
mod report;
mod request_error;
pub mod server_processes;
mod server_record;
mod settings;
mod start;
mod stop;
mod target_dir;
mod task;

use self::task::SupervisorTask;
pub use self::{
    admission::RecordedUsers,
    launcher::Launcher,
    pending::{DriverClients, blocked},
    request_error::RequestError,
    target_dir::{SPEC, Spec, TargetDir, sweep_removed},
};

/// How long a caller that only reads a report waits for a probe.
const PROBE_WAIT: Duration = Duration::from_millis(250);

/// Maximum age of the report of a draining daemon. This age is greater than for other daemons,
/// because each probe adds lines to the daemon's log.
const DRAINING_REPORT_AGE: Duration = Duration::from_secs(5);

/// Maximum number of queued requests.
const WAITING: usize = 64;

/// The desired state of a daemon.
#[derive(Debug, Clone, PartialEq)]
pub struct Desired {
    /// The policy of the rule, with overrides.
    pub policy: MpsPolicy,
    /// UUID of the GPU that is the target or contains it.
    pub gpu_uuid: GpuUuid,
    /// Timeouts and limits of the supervisor.
    pub supervision: SupervisorPolicy,
    /// Interval between two probes.
    pub health: Duration,
    /// Path of `nvidia-cuda-mps-control`.
    pub control: PathBuf,
    /// Path of `nvidia-cuda-mps-server`.
    pub server: PathBuf,
    /// Version of the driver, if known.
    pub driver: Option<String>,
    /// Directory of the daemon's logs.
    pub logs: PathBuf,
    /// Size in bytes at which a log is rotated.
    pub log_bytes: u64,
}

/// A request to a supervisor task.
#[derive(Debug)]
pub enum DaemonRequest {
    /// Sets the desired state; `None` means no daemon.
    SetDesired(Option<Box<Desired>>),
    /// Starts the daemon, even after too many failures.
    Start,
    /// Closes admission until the daemon ends or [`Self::OpenAdmission`] follows. Refused if a client
    /// is or may be connected.
    CloseAdmission,
    /// Reopens admission.
    OpenAdmission,
    /// Ends the daemon with its clients.
    Stop {
        /// Whether to refuse the request if a client is or may be connected.
        unless_used: bool,
    },
    /// Ends the daemon when its clients have ended, or after this time. A later `Drain` replaces an
    /// earlier `Drain`.
    Drain(Option<Duration>),
    /// Ends the daemon with its clients, and restarts it.
    Restart {
        /// Whether to refuse the request if a client is or may be connected.
        unless_used: bool,
    },
    /// Sets the users with access.
    Users(BTreeSet<u32>),
    /// Ends the GPU work of the client with this pid.
    Terminate(i32),
    /// Probes the daemon now.
    Probe,
}

#[derive(Debug)]
struct QueuedRequest {
    pub what: DaemonRequest,
    pub done: Reply,
}

/// Receives the result of a request.
type Reply = oneshot::Sender<Result<(), RequestError>>;

/// A report of a supervisor task.
#[derive(Debug, Clone)]
pub struct Report {
    /// What gpushd knows about the daemon.
    pub daemon: DaemonReport,
    /// The control daemon, with its start time. gpushd watches this process with a pidfd.
    pub process: Option<ProcessId>,
    /// Processes that are alive and were children of a daemon of this target while that daemon ran.
    pub recorded_servers: BTreeSet<ProcessId>,
    /// Time of the last reply.
    answered: Option<Instant>,
}

/// What changed since the previous report, if the change must be published. The state or the pid has changed, or one of these fields is set.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ReportChange {
    /// A change of the servers.
    pub servers: Option<String>,
    /// Why gpushd has just killed the daemon, or what a previous daemon left.
    pub killed: Option<KillReason>,
    /// Whether the supervisor task has panicked and runs again. It does not know the desired state any more.
    pub is_restarted: bool,
}

/// Receives each report of a supervisor task, with the reason if the report is news.
type ReceiveReport = Box<dyn Fn(&Report, Option<ReportChange>) + Send + Sync>;

/// Functions that a supervisor task calls to get facts from outside. Tests inject other functions.
#[derive(Clone)]
pub struct Sources {
    /// Asks the driver for the MPS clients of the target.
    pub driver_clients: DriverClients,
    /// Returns the users that the store records for the target.
    pub recorded_users: RecordedUsers,
    /// Returns why no daemon may be started now; `None` if a daemon may be started.
    pub start_blocked: Arc<dyn Fn() -> Option<String> + Send + Sync>,
}

/// A handle of a supervisor task; cloning it is cheap.
#[derive(Debug, Clone)]
pub struct Daemon {
    ask: mpsc::Sender<QueuedRequest>,
    seen: watch::Receiver<Report>,
}

/// The supervisor task of a daemon.
pub struct DaemonTask {
    create: Box<dyn Fn() -> SupervisorTask + Send + Sync>,
    /// The state of the task at its first run.
    first: Locked<Option<SupervisorTask>>,
    /// Locked while the task runs.
    asks: tokio::sync::Mutex<mpsc::Receiver<QueuedRequest>>,
    publish: watch::Sender<Report>,
    receive: ReceiveReport,
}

impl fmt::Debug for DaemonTask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DaemonTask").finish_non_exhaustive()
    }
}

impl DaemonTask {
    /// Runs the task until all handles of the daemon are dropped. If it panics, call this function again: the task then
    /// recovers its state from the directory of the target.
    pub async fn run(self: Arc<Self>) {
        let mut asks = self.asks.lock().await;
        let first = self.first.lock().take();
        let task = first.unwrap_or_else(|| {
            // The owner of the callback reacts to this call by sending the desired state to the new task. Until the new
            // task has adopted the daemon, the last report remains.
            let last = self.publish.borrow().clone();
            (self.receive)(&last, Some(ReportChange { is_restarted: true, ..ReportChange::default() }));
            (self.create)()
        });
        task.run(&mut asks, &self.publish, &self.receive).await;
    }
}

impl Daemon {
    /// Creates the handle and the supervisor task of a target. The caller must run the task. The task adopts a running
    /// daemon. The task calls `receive` with each report, before it answers the request that has caused the report.
    pub fn with_task(
        target: &str,
        uuid: &TargetUuid,
        place: TargetDir,
        launcher: Launcher,
        sources: Sources,
        receive: impl Fn(&Report, Option<ReportChange>) + Send + Sync + 'static,
    ) -> (Self, DaemonTask) {
        let (ask, asks) = mpsc::channel(WAITING);
        let (target, uuid) = (target.to_owned(), uuid.clone());
        let create = move || SupervisorTask::new(&target, &uuid, place.clone(), launcher.clone(), sources.clone());
        let first = create();
        let (publish, seen) = watch::channel(first.report());
        let task = DaemonTask {
            create: Box::new(create),
            first: Locked::new(Some(first)),
            asks: tokio::sync::Mutex::new(asks),
            publish,
            receive: Box::new(receive),
        };
        (Self { ask, seen }, task)
    }

    /// Returns the last report.
    pub fn last_report(&self) -> Report {
        self.seen.borrow().clone()
    }

    /// Sends a request and waits for its result.
    ///
    /// # Errors
    /// If the task did not execute the request, or has panicked.
    pub async fn send(&self, what: DaemonRequest) -> Result<(), RequestError> {
        let (done, answer) = oneshot::channel();
        let panicked = "the task of gpushd that manages this MPS daemon has panicked";
        let gone = || RequestError::Failed(ApiError::new(Code::Internal, panicked));
        self.ask.send(QueuedRequest { what, done }).await.map_err(|_| gone())?;
        answer.await.map_err(|_| gone())?
    }

    /// Probes the daemon. Does not wait for a hung daemon.
    ///
    /// # Errors
    /// As [`Self::send`].
    pub async fn probe(&self) -> Result<(), RequestError> {
        tokio::time::timeout(PROBE_WAIT, self.send(DaemonRequest::Probe)).await.unwrap_or(Ok(()))
    }

    /// Probes the daemon if its last reply is older than `older`. Does not wait for a hung daemon.
    pub async fn refresh(&self, older: Duration) {
        let Report { daemon: seen, answered, .. } = self.last_report();
        // Even without a probe, gpushd notices when the process of a client ends. So an older
        // report is sufficient for a draining daemon.
        let older =
            if matches!(seen.state, SupervisorState::Draining { .. }) { older.max(DRAINING_REPORT_AGE) } else { older };
        if seen.pid.is_none() || answered.is_some_and(|answered| answered.elapsed() < older) {
            return;
        }
        // Ignore an error: if the daemon is hung, the report does not change.
        let _as_it_was = self.probe().await;
    }
}

#[cfg(test)]
mod tests;
