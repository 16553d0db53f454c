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

use super::{admission::OnRecord, clients::Witness, hands::Hands, life::Life, place::Place};

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
pub(crate) struct Wanted {
    /// By its rule, and what was set above it.
    pub(crate) policy: MpsPolicy,
    /// The GPU that the target is, or is of.
    pub(crate) gpu_uuid: String,
    /// How its life goes.
    pub(crate) supervision: Policy,
    /// Between two looks at its health.
    pub(crate) health: Duration,
    /// `nvidia-cuda-mps-control`.
    pub(crate) control: PathBuf,
    /// `nvidia-cuda-mps-server`.
    pub(crate) server: PathBuf,
    /// Version of the driver, as far as it was seen.
    pub(crate) driver: Option<String>,
    /// Directory of its logs.
    pub(crate) logs: PathBuf,
    /// Size at which one is rotated, bytes.
    pub(crate) log_bytes: u64,
}

/// What is to be done with a daemon.
#[derive(Debug)]
pub(super) enum Do {
    /// It is wanted so; or not any more.
    Want(Option<Box<Wanted>>),
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
pub(super) struct Ask {
    pub(super) what: Do,
    pub(super) done: Done,
}

/// Hears what came of it.
pub(super) type Done = oneshot::Sender<Result<(), ApiError>>;

/// What is known of a daemon.
#[derive(Debug, Clone)]
pub(crate) struct Seen {
    /// Where it is in its life.
    pub(crate) state: State,
    /// Since when.
    pub(crate) since: Timestamp,
    /// Whether it is wanted.
    pub(crate) wanted: bool,
    /// What it is wanted to be.
    pub(crate) policy: Option<MpsPolicy>,
    /// Pid of the control daemon.
    pub(crate) pid: Option<i32>,
    /// What it has, read back.
    pub(crate) in_force: Option<MpsSettings>,
    /// Its servers, and what each says of itself.
    pub(crate) servers: Vec<(i32, Option<MpsServerState>)>,
    /// Its clients, each with its server.
    pub(crate) clients: Vec<(i32, i32)>,
    /// Whether there are no others than these and those that wait.
    pub(crate) clients_known: bool,
    /// Processes that came to it and have no server yet.
    pub(crate) waiting: Vec<i32>,
    /// Whether what it started is there still, though it is stopped.
    pub(crate) behind: bool,
    /// When clients that are still there are ended.
    pub(crate) until: Option<Timestamp>,
    /// Failures that count.
    pub(crate) failures: usize,
    /// When it is started again.
    pub(crate) next_start: Option<Timestamp>,
    /// What is wrong, in words.
    pub(crate) trouble: Vec<String>,
    /// Pids of those who have its ear, while it does not answer.
    pub(crate) ear: BTreeSet<i32>,
    /// How it is spoken to, in words, once it has answered.
    pub(crate) protocol: Option<String>,
    /// What happened to its servers since it was told last: whoever listens is to hear it.
    pub(crate) news: Option<String>,
    /// What was done past gpushd, or may be: one sentence each.
    pub(crate) findings: Vec<String>,
    /// Its pipe directory.
    pub(crate) pipe: Option<PathBuf>,
    /// Directory of its logs.
    pub(crate) logs: Option<PathBuf>,
    /// The user whose clients it has served, and nobody else's.
    pub(crate) user: Option<u32>,
    /// When it last answered.
    pub(crate) answered: Option<Instant>,
}

/// What the task of a daemon hears from the rest of the agent, whenever it matters.
#[derive(Clone)]
pub(super) struct Sources {
    /// Who computes there by the driver's word.
    pub(super) witness: Witness,
    /// Who may be let in.
    pub(super) on_record: OnRecord,
    /// Why nothing is to be started now, if so.
    pub(super) hands_off: Arc<dyn Fn() -> Option<String> + Send + Sync>,
}

/// A daemon, from outside of its task.
#[derive(Debug, Clone)]
pub(crate) struct Daemon {
    ask: mpsc::Sender<Ask>,
    seen: watch::Receiver<Seen>,
}

impl Daemon {
    /// Lives for the daemon of a target from now on: for the one that is there, if one is.
    pub(super) fn of(
        target: &str,
        uuid: &str,
        place: Place,
        hands: Hands,
        sources: Sources,
        changed: impl Fn(&Seen) + Send + Sync + 'static,
    ) -> Self {
        let (ask, mut asks) = mpsc::channel(WAITING);
        let (target, uuid) = (target.to_owned(), uuid.to_owned());
        let born = move || Life::new(&target, &uuid, place.clone(), hands.clone(), sources.clone());
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
    pub(crate) fn seen(&self) -> Seen {
        self.seen.borrow().clone()
    }

    /// Follows what is known of it.
    pub(super) fn follow(&self) -> watch::Receiver<Seen> {
        self.seen.clone()
    }

    /// Has something done, and waits until it is, or was refused.
    pub(super) async fn have(&self, what: Do) -> Result<(), ApiError> {
        let (done, answer) = oneshot::channel();
        let gone = || ApiError::new(Code::Internal, "nobody looks after this MPS daemon any more");
        self.ask.send(Ask { what, done }).await.map_err(|_| gone())?;
        answer.await.map_err(|_| gone())?
    }

    /// Has it looked at, and does not wait for one that hangs: that is known of it by then, or soon.
    pub(super) async fn look(&self) -> Result<(), ApiError> {
        tokio::time::timeout(SOON, self.have(Do::Look)).await.unwrap_or(Ok(()))
    }

    /// What is known of it, no older than this where that can be had soon.
    pub(super) async fn fresh(&self, older: Duration) -> Seen {
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
        let place = Place::of(scratch.path(), "g1");
        std::fs::create_dir(place.dir()).unwrap();
        // Something is left, so the witness is asked.
        let _lock = place.lock().unwrap().unwrap();
        let panics = Arc::new(AtomicBool::new(true));
        let once = Arc::clone(&panics);
        let witness: Witness = Arc::new(move || {
            assert!(!once.swap(false, Ordering::SeqCst), "on purpose");
            Box::pin(async { None })
        });
        let hands = Hands::of(Path::new("/nowhere"));
        let sources = Sources { witness, on_record: Arc::new(BTreeSet::new), hands_off: Arc::new(|| None) };
        let daemon = Daemon::of("g1", "GPU-1", place, hands, sources, |_| {});
        daemon.have(Do::Want(None)).await.unwrap();
        let error = daemon.have(Do::Want(None)).await.unwrap_err();
        assert!(!panics.load(Ordering::SeqCst) && error.message.contains("any more"), "{error:?}");
        // The next one is asked as if nothing had been.
        daemon.have(Do::Want(None)).await.unwrap();
        daemon.have(Do::Want(None)).await.unwrap();
        assert!(daemon.seen().trouble[0].contains("may have clients"), "{:?}", daemon.seen());
    }
}
