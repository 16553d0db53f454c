//! One daemon, lived for: what happens to it is told to its machine ([`gpush_core::supervisor`]), and what
//! that wants done is done here. One task a target does all of it, in turn.
//!
//! ```text
//! asked ─────────┐                    ┌─► Start   place laid, program started, its pidfd had
//! process ended ─┼─► machine ─ effects┼─► Quit    clients told to end, then the daemon
//! time went by ──┤             │      └─► Kill    the daemon and all that it started
//! looked at ─────┘             └─ state ─► door   open to its users while it serves, shut otherwise
//!   answer, silence, servers, clients
//! ```
//!
//! The directory is what admission is made of: while a daemon does not serve, nobody reaches its
//! sockets, but of one that was found whoever did before. A daemon that hangs holds up nothing here: it is
//! looked at, and told to end, beside the task.

use std::{
    collections::BTreeSet,
    mem::{Discriminant, discriminant},
    sync::Arc,
    time::Duration,
};

use crate::protocol::control::{Control, ControlError, Protocol};
use gpush_api::{ApiError, Code, MpsSettings};
use gpush_core::supervisor::{Effect, Event, Policy, State, Supervisor};
use gpush_host::proc;
use jiff::Timestamp;
use tokio::{
    sync::{mpsc, watch},
    time::{Instant, sleep_until},
};
use tokio_util::task::AbortOnDropHandle;

use super::{
    Desired, QueuedRequest, Reply, Report, Request, Sources,
    health::Health,
    launcher::{DaemonProcess, Launcher},
    leftovers::Leftovers,
    log::LogRotation,
    probe::{Probe, ProbeResult, found_by},
    stop::terminate,
    target_dir::{Spec, TargetDir},
};

/// How long one question to a daemon may take.
pub(super) const DEADLINE: Duration = Duration::from_secs(2);

/// Between two looks at a daemon that starts: at first, doubled each time, and at most.
pub(super) const LOOK: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(10));

/// Between two looks at the clients of one that drains.
const DRAINING: Duration = Duration::from_millis(250);

/// How long one that drains is not asked while those who were inside live: they may have left it all the same.
const LET: Duration = Duration::from_secs(15);

/// The life of one, from inside of its task.
pub(super) struct SupervisorTask {
    pub(super) target: String,
    pub(super) uuid: String,
    pub(super) place: TargetDir,
    pub(super) launcher: Launcher,
    pub(super) machine: Supervisor,
    /// What the machine's time counts from.
    pub(super) born: Instant,
    pub(super) wanted: Option<Box<Desired>>,
    pub(super) spec: Option<Spec>,
    pub(super) process: Option<DaemonProcess>,
    pub(super) control: Option<Arc<Control>>,
    /// What the rest of the agent knows of it.
    pub(super) sources: Sources,
    /// Who may have clients.
    pub(super) users: BTreeSet<u32>,
    /// Whose the next pipe directory is, where that is another's than this one.
    pub(super) next_user: Option<u32>,
    pub(super) in_force: Option<MpsSettings>,
    pub(super) health: Health,
    /// The look that goes on.
    pub(super) looking: Option<Probe>,
    /// Who waits for one that has not begun.
    pub(super) waiting: Vec<Reply>,
    /// Whom the directory is open to, of which tenure; not known before it was seen to.
    pub(super) door: Option<(u32, BTreeSet<u32>)>,
    /// Whether it was found open to those who have it on record.
    pub(super) as_found: bool,
    /// Whether nobody gets in although it serves: it is about to be ended.
    pub(super) shut: bool,
    /// When it is looked at next.
    pub(super) look: Option<Instant>,
    /// Between two looks while it starts.
    pub(super) pause: Duration,
    /// What is wrong.
    pub(super) trouble: Vec<String>,
    /// When it last answered.
    pub(super) answered: Option<Instant>,
    /// Who has its ear, while it does not answer.
    pub(super) ear: BTreeSet<i32>,
    /// How it is spoken to, once it has answered: what that comes of, and in words.
    pub(super) protocol: Option<((Protocol, Option<String>), String)>,
    /// What was changed past gpushd last.
    pub(super) drift: Option<String>,
    /// Who keeps its logs small.
    pub(super) keeper: LogRotation,
    /// What a daemon left behind that is wanted no more.
    pub(super) behind: Option<Leftovers>,
    /// What is to be told of its servers.
    pub(super) news: Option<String>,
    /// Telling it to end, for as long as it lives.
    pub(super) quitting: Option<AbortOnDropHandle<()>>,
    pub(super) since: Timestamp,
    /// As it was last published: the state, whose, and whether something is left behind.
    pub(super) last: (Discriminant<State>, Option<i32>, bool),
}

/// What a turn is about.
enum Happened {
    Ended,
    Looked(Box<Result<ProbeResult, ControlError>>),
    Due,
    LookDue,
}

impl SupervisorTask {
    pub(super) fn new(target: &str, uuid: &str, place: TargetDir, launcher: Launcher, sources: Sources) -> Self {
        let machine = Supervisor::new(Policy::default());
        Self {
            target: target.to_owned(),
            uuid: uuid.to_owned(),
            spec: place.known().filter(|spec| spec.uuid == uuid),
            place,
            launcher,
            last: (discriminant(machine.state()), None, false),
            machine,
            born: Instant::now(),
            wanted: None,
            process: None,
            control: None,
            sources,
            users: BTreeSet::new(),
            next_user: None,
            in_force: None,
            health: Health::default(),
            looking: None,
            waiting: Vec::new(),
            door: None,
            as_found: false,
            shut: false,
            look: None,
            pause: LOOK.0,
            trouble: Vec::new(),
            answered: None,
            ear: BTreeSet::new(),
            protocol: None,
            drift: None,
            keeper: LogRotation::default(),
            behind: None,
            news: None,
            quitting: None,
            since: Timestamp::now(),
        }
    }

    pub(super) async fn live(
        mut self,
        asks: &mut mpsc::Receiver<QueuedRequest>,
        publish: &watch::Sender<Report>,
        changed: &impl Fn(&Report),
    ) {
        self.adopt().await;
        self.see_to_the_door();
        self.tell(publish, changed);
        loop {
            let mut answered = None;
            tokio::select! {
                biased;
                happened = self.happens() => answered = self.turn(happened).await.map(|those| (those, Ok(()))),
                ask = asks.recv() => match ask {
                    Some(QueuedRequest { what: Request::Look, done }) => self.look_for(Some(done)),
                    Some(QueuedRequest { what: Request::Want(wanted), done }) => {
                        if self.want(wanted).await {
                            self.look_for(Some(done));
                        } else {
                            answered = Some((vec![done], Ok(())));
                        }
                    }
                    Some(ask) => answered = Some((vec![ask.done], self.asked(ask.what).await)),
                    // Nobody has a handle any more: the agent ends, and the daemon goes on.
                    None => return,
                },
            }
            self.tell(publish, changed);
            // They find what they asked for published.
            let Some((those, answer)) = answered else { continue };
            for done in those {
                let _nobody_waits = done.send(answer.clone());
            }
        }
    }

    /// Waits for the next thing to happen; what is given up while waiting happens later.
    async fn happens(&mut self) -> Happened {
        let due = self.machine.due().map(|at| self.born + at);
        let look = self.look.filter(|_| self.looking.is_none());
        tokio::select! {
            biased;
            () = ended(self.process.as_ref()) => Happened::Ended,
            found = found_by(self.looking.as_mut()) => Happened::Looked(Box::new(found)),
            () = at(due) => Happened::Due,
            () = at(look) => Happened::LookDue,
        }
    }

    /// Deals with it; who has waited for it.
    async fn turn(&mut self, happened: Happened) -> Option<Vec<Reply>> {
        match happened {
            Happened::Ended => {
                let given = self.given();
                self.gone().await;
                // Its clients may have more time than it had itself.
                if let Some(until) = given {
                    self.leave_left(until).await;
                }
                Some(self.no_look())
            }
            Happened::Looked(found) => {
                let waited = self.looking.take().map(Probe::waited).unwrap_or_default();
                self.looked(*found).await;
                if !self.waiting.is_empty() {
                    self.look_for(None);
                }
                Some(waited)
            }
            Happened::Due => {
                self.step(Event::Tick).await;
                None
            }
            Happened::LookDue => {
                if self.behind.is_some() {
                    self.look = None;
                    self.clear_left().await;
                } else if self.waits_for_the_living() {
                    self.look = Some(Instant::now() + DRAINING);
                } else {
                    self.look_for(None);
                }
                None
            }
        }
    }

    /// Whether it drains, and asking it would tell no more than the kernel does: those who were inside live. Each
    /// question goes into its log.
    fn waits_for_the_living(&self) -> bool {
        let mut inside = self.health.clients.iter().map(|(_, client)| *client).chain(self.health.waits()).peekable();
        matches!(self.machine.state(), State::Draining { .. })
            && self.answered.is_some_and(|answered| answered.elapsed() < self.between_looks().min(LET))
            && inside.peek().is_some()
            && inside.all(proc::is_alive)
    }

    /// What goes on is dealt with until `is_over` says so; whether it did in time.
    pub(super) async fn until(&mut self, until: Instant, is_over: impl Fn(&Self) -> bool) -> bool {
        while !is_over(self) {
            let happened = tokio::select! {
                happened = self.happens() => happened,
                () = sleep_until(until) => return false,
            };
            for done in self.turn(happened).await.unwrap_or_default() {
                let _nobody_waits = done.send(Ok(()));
            }
        }
        true
    }

    /// It is wanted so, or not any more; whether that is done only once it was looked at.
    async fn want(&mut self, wanted: Option<Box<Desired>>) -> bool {
        if let Some(wanted) = &wanted {
            self.machine.set_policy(wanted.supervision.clone());
        }
        let is_wanted = wanted.is_some();
        let other = is_wanted && self.wanted != wanted;
        if is_wanted {
            self.wanted = wanted;
        }
        let told = self.machine.is_told();
        if is_wanted == self.machine.wanted() && told {
            if !is_wanted {
                self.clear_left().await;
            }
            return other && self.machine.pid().is_some();
        }
        // Whoever came since the last look, or was there before us, may finish.
        if !is_wanted && self.machine.pid().is_some() {
            self.is_empty().await;
        }
        self.step(Event::Wanted(is_wanted)).await;
        self.reopen();
        self.machine.pid().is_some()
    }

    async fn asked(&mut self, what: Request) -> Result<(), ApiError> {
        match what {
            Request::Start => {
                self.step(Event::StartAnyway).await;
                self.started()?;
            }
            Request::Shut => self.shut_unless_used().await?,
            Request::Open => self.reopen(),
            Request::Stop { unless_used } => {
                if unless_used {
                    self.shut_unless_used().await?;
                }
                self.end_left().await;
                self.step(Event::Leave(Some(Duration::ZERO))).await;
                self.clear_left().await;
                self.reopen();
            }
            Request::Drain(within) => {
                self.is_empty().await;
                self.step(Event::Leave(within)).await;
                self.leave_left(within.map(|within| Instant::now() + within)).await;
                self.reopen();
            }
            Request::Restart { unless_used } => {
                if unless_used {
                    self.shut_unless_used().await?;
                }
                self.end_left().await;
                self.step(Event::Restart).await;
                self.reopen();
            }
            Request::Users(users) => return self.have_users(users).await,
            Request::Terminate(client) => {
                let server = self.health.clients.iter().find(|(_, one)| *one == client).map(|(server, _)| *server);
                if let (Some(control), Some(server)) = (self.control.clone(), server) {
                    terminate(&self.target, &control, server, client).await;
                }
            }
            // Both are dealt with where they are taken in.
            Request::Look | Request::Want(_) => {}
        }
        Ok(())
    }

    /// What can be said at once of a start: that it failed.
    fn started(&mut self) -> Result<(), ApiError> {
        if !self.machine.state().is_down() {
            return Ok(());
        }
        let mut error = ApiError::new(Code::Unavailable, format!("the MPS daemon of {} can't be started", self.target));
        error.causes.clone_from(&self.trouble);
        Err(error.hint(format!("`gpushctl mps logs {}` shows what it said", self.target)).retryable())
    }

    pub(super) fn now(&self) -> Duration {
        self.born.elapsed()
    }

    /// Tells the machine, and does what it wants done; that may be another event.
    pub(super) async fn step(&mut self, event: Event) {
        let mut next = Some(event);
        while let Some(event) = next.take() {
            let effects = self.machine.step(&event, self.now());
            // Nobody is let in from the moment on at which it is known.
            self.see_to_the_door();
            for effect in effects {
                match effect {
                    Effect::Start => next = self.start().await.err(),
                    Effect::Quit => self.quit(),
                    Effect::Kill => match &self.process {
                        Some(process) => self.launcher.kill(&self.place, Some(process)).await,
                        None => next = Some(Event::Ended),
                    },
                    Effect::TellGivenUp => {
                        tracing::error!(mps = self.target, "given up: it failed {} times", self.machine.failures());
                    }
                    Effect::TellHung => tracing::error!(
                        mps = self.target,
                        "hangs with {} and is left alone for their sake",
                        match self.machine.clients() {
                            Some(clients) => format!("{clients} clients"),
                            None => "clients that nobody can tell".to_owned(),
                        }
                    ),
                }
            }
        }
        self.look = match self.machine.state() {
            State::Starting { .. } | State::Found { .. } => self.look.or_else(|| Some(Instant::now())),
            State::Ready { .. } | State::Hung { .. } | State::Fault { .. } => {
                self.look.or_else(|| Some(Instant::now() + self.between_looks()))
            }
            State::Draining { .. } => Some(Instant::now() + DRAINING),
            State::Stopped if self.behind.is_some() => self.look,
            State::Stopped | State::BackingOff { .. } | State::GivenUp | State::Stopping { .. } => None,
        };
    }

    pub(super) fn between_looks(&self) -> Duration {
        self.wanted.as_ref().map_or(Duration::from_secs(15), |wanted| wanted.health)
    }
}

async fn ended(process: Option<&DaemonProcess>) {
    match process {
        Some(process) => process.ended().await,
        None => std::future::pending().await,
    }
}

async fn at(when: Option<Instant>) {
    match when {
        Some(when) => sleep_until(when).await,
        None => std::future::pending().await,
    }
}
