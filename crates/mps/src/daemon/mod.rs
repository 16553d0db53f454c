//! One supervised MPS control daemon per target: the handle of its supervisor task.
//!
//! The decisions are those of the state machine in [`gpush_core::supervisor`]:
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
//! requests ─► supervisor task ─► reports       a task that panics is replaced: what it knew is in the directory, and
//!                 └ panics ─► task             pending requests wait for the next task
//! ```
//!
//! | file | subject |
//! |---|---|
//! | `task` | the supervisor task: events in, effects executed |
//! | `start`, `stop` | how a target gets its daemon; how a daemon ends |
//! | `probe`, `health`, `settings` | probes: the daemon's state, its servers and clients, its settings |
//! | `report` | what the task publishes |
//! | `admission` | users with access to the pipe directory; another user gets another daemon |
//! | `leftovers` | processes that a daemon left behind |
//! | `pending` | clients that wait for a server |
//! | `launcher` | starts, watches and kills the process: a systemd unit, or a child of gpushd |
//! | `exec` | `gpushd mps-daemon`, which becomes the daemon |
//! | `target_dir`, `base_lock` | the directory of a target; the lock of the directory of all targets |
//! | `log` | the daemon's logs: parser, filter, tail, rotation |
//! | `control_connection`, `protocol_in_use` | processes that keep a daemon from answering; the protocol in use |
//! | `multi_user` | whether a control program serves several users |
//! | `server_processes` | which processes are MPS servers |

use std::{
    collections::BTreeSet,
    future::poll_fn,
    panic::{AssertUnwindSafe, catch_unwind},
    path::PathBuf,
    pin::pin,
    sync::Arc,
    task::Poll,
    time::Duration,
};

use gpush_api::{ApiError, Code, MpsPolicy, MpsServerState, MpsSettings};
use gpush_core::supervisor::{Policy, State};
use jiff::Timestamp;
use tokio::{
    sync::{mpsc, oneshot, watch},
    time::{Instant, sleep},
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
mod protocol_in_use;
mod report;
pub mod server_processes;
mod settings;
mod start;
mod stop;
mod target_dir;
mod task;

use self::task::SupervisorTask;
pub use self::{
    admission::RecordedUsers,
    launcher::Launcher,
    pending::DriverClients,
    target_dir::{Spec, TargetDir, sweep_removed},
};

/// How long a caller that only reads waits for a probe.
const SOON: Duration = Duration::from_millis(250);

/// How old the report of a draining daemon may be: its probes write lines into its log.
const DRAINED: Duration = Duration::from_secs(5);

/// Pause before a task that panicked is replaced.
const PAUSE: Duration = Duration::from_secs(1);

/// Requests that may be queued.
const WAITING: usize = 64;

/// The desired state of a daemon.
#[derive(Debug, Clone, PartialEq)]
pub struct Desired {
    /// From its rule, with overrides.
    pub policy: MpsPolicy,
    /// UUID of the GPU that is the target or contains it.
    pub gpu_uuid: String,
    /// Timeouts and limits of the supervisor.
    pub supervision: Policy,
    /// Pause between two probes.
    pub health: Duration,
    /// `nvidia-cuda-mps-control`.
    pub control: PathBuf,
    /// `nvidia-cuda-mps-server`.
    pub server: PathBuf,
    /// Version of the driver, if known.
    pub driver: Option<String>,
    /// Directory of its logs.
    pub logs: PathBuf,
    /// Size at which one is rotated, bytes.
    pub log_bytes: u64,
}

/// A request to a supervisor task.
#[derive(Debug)]
pub enum Request {
    /// The desired state; `None`: no daemon.
    Want(Option<Box<Desired>>),
    /// Starts the daemon, also after too many failures.
    Start,
    /// Closes admission until the daemon ends or `Open`. Refused if a client is connected, or that is not known.
    Shut,
    /// Reopens admission.
    Open,
    /// Ends the daemon with its clients.
    Stop {
        /// Refuse it as [`Self::Shut`] does.
        unless_used: bool,
    },
    /// Ends the daemon when its clients have ended, or after this time. The last request counts.
    Drain(Option<Duration>),
    /// Ends the daemon with its clients, and starts it again.
    Restart {
        /// Refuse it as [`Self::Shut`] does.
        unless_used: bool,
    },
    /// Sets the users with access.
    Users(BTreeSet<u32>),
    /// Ends the work of the client with this pid.
    Terminate(i32),
    /// Probes the daemon now.
    Look,
}

/// A request and its caller.
#[derive(Debug)]
struct QueuedRequest {
    pub what: Request,
    pub done: Reply,
}

/// Receives the result of a request.
type Reply = oneshot::Sender<Result<(), ApiError>>;

/// What gpushd knows about a daemon.
#[derive(Debug, Clone)]
pub struct Report {
    /// State of the supervisor.
    pub state: State,
    /// Since when it is in that state.
    pub since: Timestamp,
    /// Whether the daemon is desired.
    pub wanted: bool,
    /// Whether one server of root takes the clients of all users.
    pub multi_user: bool,
    /// The desired policy, with the users that the daemon serves now.
    pub policy: Option<MpsPolicy>,
    /// Pid of the control daemon.
    pub pid: Option<i32>,
    /// The effective settings, read back.
    pub in_force: Option<MpsSettings>,
    /// Its servers with their states.
    pub servers: Vec<(i32, Option<MpsServerState>)>,
    /// Its clients, each with its server.
    pub clients: Vec<(i32, i32)>,
    /// Whether all clients are known, with those that wait.
    pub clients_known: bool,
    /// Clients that wait for a server.
    pub waiting: Vec<i32>,
    /// Whether it drains until the leases on its target have ended.
    pub serves_leases: bool,
    /// Whether leftovers run although the daemon is stopped.
    pub behind: bool,
    /// When remaining clients are ended.
    pub until: Option<Timestamp>,
    /// Failures within the time that counts.
    pub failures: usize,
    /// When the daemon is started again.
    pub next_start: Option<Timestamp>,
    /// What is wrong, one sentence each.
    pub trouble: Vec<String>,
    /// Pids that hold the control connection, while the daemon does not answer.
    pub ear: BTreeSet<i32>,
    /// The protocol in use, described, after the first reply.
    pub protocol: Option<String>,
    /// What happened to its servers since the last report to the callback.
    pub news: Option<String>,
    /// What users should know although the daemon may serve: one sentence each.
    pub findings: Vec<String>,
    /// Its pipe directory.
    pub pipe: Option<PathBuf>,
    /// Directory of its logs.
    pub logs: Option<PathBuf>,
    /// The user whose clients the daemon serves; `None` for none yet, or several.
    pub user: Option<u32>,
    /// Time of the last reply.
    pub answered: Option<Instant>,
}

impl Report {
    /// Returns the clients that hang until all clients of the user that the daemon serves have ended.
    #[must_use]
    pub fn blocked(&self) -> Vec<i32> {
        if self.multi_user { Vec::new() } else { pending::blocked(&self.servers, &self.waiting) }
    }
}

/// What a supervisor task asks its creator. Tests inject their own.
#[derive(Clone)]
pub struct Sources {
    /// Asks the driver for the MPS clients of the target.
    pub driver_clients: DriverClients,
    /// Returns the users that the store records for the target.
    pub recorded_users: RecordedUsers,
    /// Returns why no daemon may be started now.
    pub start_blocked: Arc<dyn Fn() -> Option<String> + Send + Sync>,
}

/// A handle of a supervisor task, cheap to clone.
#[derive(Debug, Clone)]
pub struct Daemon {
    ask: mpsc::Sender<QueuedRequest>,
    seen: watch::Receiver<Report>,
}

impl Daemon {
    /// Starts the supervisor task of a target. It adopts a daemon that runs. `changed` is called with each report whose
    /// state, pid or news differ.
    pub fn of(
        target: &str,
        uuid: &str,
        place: TargetDir,
        launcher: Launcher,
        sources: Sources,
        changed: impl Fn(&Report) + Send + Sync + 'static,
    ) -> Self {
        let (ask, mut asks) = mpsc::channel(WAITING);
        let (target, uuid) = (target.to_owned(), uuid.to_owned());
        let create = move || SupervisorTask::new(&target, &uuid, place.clone(), launcher.clone(), sources.clone());
        let mut task = create();
        let (publish, seen) = watch::channel(task.report());
        tokio::spawn(async move {
            while !has_ended(task.run(&mut asks, &publish, &changed)).await {
                sleep(PAUSE).await;
                task = create();
                // The callback makes the creator send the desired state again.
                changed(&task.report());
            }
        });
        Self { ask, seen }
    }

    /// Returns the last report.
    pub fn seen(&self) -> Report {
        self.seen.borrow().clone()
    }

    /// Subscribes to the observed state of the daemon.
    #[must_use]
    pub fn follow(&self) -> watch::Receiver<Report> {
        self.seen.clone()
    }

    /// Sends a request and waits for its result.
    ///
    /// # Errors
    /// The refusal, or [`Code::Internal`] if the task has panicked.
    pub async fn have(&self, what: Request) -> Result<(), ApiError> {
        let (done, answer) = oneshot::channel();
        let gone = || ApiError::new(Code::Internal, "the task of this MPS daemon has panicked");
        self.ask.send(QueuedRequest { what, done }).await.map_err(|_| gone())?;
        answer.await.map_err(|_| gone())?
    }

    /// Probes the daemon. Does not wait for a hung one.
    ///
    /// # Errors
    /// As [`Self::have`].
    pub async fn look(&self) -> Result<(), ApiError> {
        tokio::time::timeout(SOON, self.have(Request::Look)).await.unwrap_or(Ok(()))
    }

    /// Returns a report that is not older than `older`, if the daemon answers soon; else the last one.
    pub async fn fresh(&self, older: Duration) -> Report {
        let seen = self.seen();
        // The kernel reports the end of each client at once.
        let older = if matches!(seen.state, State::Draining { .. }) { older.max(DRAINED) } else { older };
        if seen.pid.is_none() || seen.answered.is_some_and(|answered| answered.elapsed() < older) {
            return seen;
        }
        // A hung daemon is shown as it was.
        let _as_it_was = self.look().await;
        self.seen()
    }
}

/// Polls a task to its end. Returns false if it panicked.
async fn has_ended(task: impl Future<Output = ()>) -> bool {
    let mut task = pin!(task);
    poll_fn(|context| match catch_unwind(AssertUnwindSafe(|| task.as_mut().poll(context))) {
        Ok(lives) => lives.map(|()| true),
        Err(panic) => {
            let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
            let text = text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
            tracing::error!("the task of an MPS daemon panicked and is replaced: {text}");
            Poll::Ready(false)
        }
    })
    .await
}

#[cfg(test)]
mod tests;
