//! One daemon from outside of its task: what may be wanted of it, what is known of it. Its task is in
//! `life`; what is known is published there after each turn, for whoever looks.
//!
//! ```text
//! asks ─► life ─► seen          a life that panics is replaced: what it knew is in the directory, and what is
//!           └ panics ─► life    asked meanwhile waits for the next one
//! ```

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

/// How long somebody who only wants to see a daemon waits for it to be asked.
const SOON: Duration = Duration::from_millis(250);

/// How old what is known of one that drains may be.
const DRAINED: Duration = Duration::from_secs(5);

/// Before another life takes the place of one that panicked.
const PAUSE: Duration = Duration::from_secs(1);

/// Questions that may wait for their turn.
const WAITING: usize = 64;

/// What is wanted of a daemon.
#[derive(Debug, Clone, PartialEq)]
pub struct Desired {
    /// By its rule, and what was set above it.
    pub policy: MpsPolicy,
    /// The GPU that the target is, or is of.
    pub gpu_uuid: String,
    /// How its life goes.
    pub supervision: Policy,
    /// Between two looks at its health.
    pub health: Duration,
    /// `nvidia-cuda-mps-control`.
    pub control: PathBuf,
    /// `nvidia-cuda-mps-server`.
    pub server: PathBuf,
    /// Version of the driver, as far as it was seen.
    pub driver: Option<String>,
    /// Directory of its logs.
    pub logs: PathBuf,
    /// Size at which one is rotated, bytes.
    pub log_bytes: u64,
}

/// What is to be done with a daemon.
#[derive(Debug)]
pub enum Request {
    /// It is wanted so; or not any more.
    Want(Option<Box<Desired>>),
    /// Started, though it was given up.
    Start,
    /// Shut: nobody gets in until it is ended or opened. Refused, and open as before, where somebody is inside,
    /// or nobody can tell.
    Shut,
    /// Open again, as far as its state lets anybody in.
    Open,
    /// Ended, under whatever clients it has; or refused, and open as before, as [`Self::Shut`] is.
    Stop {
        /// Whether it is refused where somebody is inside.
        unless_used: bool,
    },
    /// Ended once its clients have, or so much later, as was said last.
    Drain(Option<Duration>),
    /// Ended, under whatever clients it has, or refused as a stop is, and started again.
    Restart {
        /// Whether it is refused where somebody is inside.
        unless_used: bool,
    },
    /// These users, and no others, may have clients.
    Users(BTreeSet<u32>),
    /// Told that this client shall end its work.
    Terminate(i32),
    /// Looked at now.
    Look,
}

/// The same, and who waits for it.
#[derive(Debug)]
struct QueuedRequest {
    pub what: Request,
    pub done: Reply,
}

/// Hears what came of it.
type Reply = oneshot::Sender<Result<(), ApiError>>;

/// What is known of a daemon.
#[derive(Debug, Clone)]
pub struct Report {
    /// Where it is in its life.
    pub state: State,
    /// Since when.
    pub since: Timestamp,
    /// Whether it is wanted.
    pub wanted: bool,
    /// What it is wanted to be.
    pub policy: Option<MpsPolicy>,
    /// Pid of the control daemon.
    pub pid: Option<i32>,
    /// What it has, read back.
    pub in_force: Option<MpsSettings>,
    /// Its servers, and what each says of itself.
    pub servers: Vec<(i32, Option<MpsServerState>)>,
    /// Its clients, each with its server.
    pub clients: Vec<(i32, i32)>,
    /// Whether there are no others than these and those that wait.
    pub clients_known: bool,
    /// Processes that came to it and have no server yet.
    pub waiting: Vec<i32>,
    /// Whether what it started is there still, though it is stopped.
    pub behind: bool,
    /// When clients that are still there are ended.
    pub until: Option<Timestamp>,
    /// Failures that count.
    pub failures: usize,
    /// When it is started again.
    pub next_start: Option<Timestamp>,
    /// What is wrong, in words.
    pub trouble: Vec<String>,
    /// Pids of those who have its ear, while it does not answer.
    pub ear: BTreeSet<i32>,
    /// How it is spoken to, in words, once it has answered.
    pub protocol: Option<String>,
    /// What happened to its servers since it was told last: whoever listens is to hear it.
    pub news: Option<String>,
    /// What was done past gpushd, or may be: one sentence each.
    pub findings: Vec<String>,
    /// Its pipe directory.
    pub pipe: Option<PathBuf>,
    /// Directory of its logs.
    pub logs: Option<PathBuf>,
    /// The user whose clients it has served, and nobody else's.
    pub user: Option<u32>,
    /// When it last answered.
    pub answered: Option<Instant>,
}

impl Report {
    /// Returns the clients that hang until all clients of the user whom the daemon serves have ended.
    #[must_use]
    pub fn blocked(&self) -> Vec<i32> {
        pending::blocked(&self.servers, &self.waiting)
    }
}

/// What the task of a daemon hears from the rest of the agent, whenever it matters.
#[derive(Clone)]
pub struct Sources {
    /// Who computes there by the driver's word.
    pub witness: DriverClients,
    /// Who may be let in.
    pub on_record: RecordedUsers,
    /// Why nothing is to be started now, if so.
    pub hands_off: Arc<dyn Fn() -> Option<String> + Send + Sync>,
}

/// A daemon, from outside of its task.
#[derive(Debug, Clone)]
pub struct Daemon {
    ask: mpsc::Sender<QueuedRequest>,
    seen: watch::Receiver<Report>,
}

impl Daemon {
    /// Lives for the daemon of a target from now on: for the one that is there, if one is.
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
        let born = move || SupervisorTask::new(&target, &uuid, place.clone(), launcher.clone(), sources.clone());
        let mut life = born();
        let (publish, seen) = watch::channel(life.seen());
        tokio::spawn(async move {
            while !is_over(life.live(&mut asks, &publish, &changed)).await {
                sleep(PAUSE).await;
                life = born();
                // Whoever says what is wanted of it is to say so again.
                changed(&life.seen());
            }
        });
        Self { ask, seen }
    }

    /// What is known of it.
    pub fn seen(&self) -> Report {
        self.seen.borrow().clone()
    }

    /// Follows what is known of it.
    #[must_use]
    pub fn follow(&self) -> watch::Receiver<Report> {
        self.seen.clone()
    }

    /// Has something done, and waits until it is, or was refused.
    ///
    /// # Errors
    /// When it was refused.
    pub async fn have(&self, what: Request) -> Result<(), ApiError> {
        let (done, answer) = oneshot::channel();
        let gone = || ApiError::new(Code::Internal, "nobody looks after this MPS daemon any more");
        self.ask.send(QueuedRequest { what, done }).await.map_err(|_| gone())?;
        answer.await.map_err(|_| gone())?
    }

    /// Has it looked at, and does not wait for one that hangs: that is known of it by then, or soon.
    pub async fn look(&self) -> Result<(), ApiError> {
        tokio::time::timeout(SOON, self.have(Request::Look)).await.unwrap_or(Ok(()))
    }

    /// What is known of it, no older than this where that can be had soon.
    pub async fn fresh(&self, older: Duration) -> Report {
        let seen = self.seen();
        // While it drains it is known as soon as one of its clients has ended, and each question goes into its log.
        let older = if matches!(seen.state, State::Draining { .. }) { older.max(DRAINED) } else { older };
        if seen.pid.is_none() || seen.answered.is_some_and(|answered| answered.elapsed() < older) {
            return seen;
        }
        // One that hangs is shown as it was.
        let _as_it_was = self.look().await;
        self.seen()
    }
}

/// Whether a life came to its end; it did not if it panicked.
async fn is_over(life: impl Future<Output = ()>) -> bool {
    let mut life = pin!(life);
    poll_fn(|context| match catch_unwind(AssertUnwindSafe(|| life.as_mut().poll(context))) {
        Ok(lives) => lives.map(|()| true),
        Err(panic) => {
            let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
            let text = text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
            tracing::error!("who looks after an MPS daemon panicked, and is replaced: {text}");
            Poll::Ready(false)
        }
    })
    .await
}

#[cfg(test)]
mod tests {
    use std::{
        path::Path,
        sync::{
            Arc,
            atomic::{AtomicBool, Ordering},
        },
    };

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_life_that_panics_is_replaced() {
        let scratch = tempfile::tempdir().unwrap();
        let place = TargetDir::of(scratch.path(), "g1");
        std::fs::create_dir(place.dir()).unwrap();
        // Something is left, so the witness is asked.
        let _lock = place.lock().unwrap().unwrap();
        let panics = Arc::new(AtomicBool::new(true));
        let once = Arc::clone(&panics);
        let witness: DriverClients = Arc::new(move || {
            assert!(!once.swap(false, Ordering::SeqCst), "on purpose");
            Box::pin(async { None })
        });
        let launcher = Launcher::of(Path::new("/nowhere"));
        let sources = Sources { witness, on_record: Arc::new(BTreeSet::new), hands_off: Arc::new(|| None) };
        let daemon = Daemon::of("g1", "GPU-1", place, launcher, sources, |_| {});
        daemon.have(Request::Want(None)).await.unwrap();
        let error = daemon.have(Request::Want(None)).await.unwrap_err();
        assert!(!panics.load(Ordering::SeqCst) && error.message.contains("any more"), "{error:?}");
        // The next one is asked as if nothing had been.
        daemon.have(Request::Want(None)).await.unwrap();
        daemon.have(Request::Want(None)).await.unwrap();
        assert!(daemon.seen().trouble[0].contains("may have clients"), "{:?}", daemon.seen());
    }
}
