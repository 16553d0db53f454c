//! One daemon, lived for: what happens to it is told to its machine ([`gpush_core::supervisor`]), and what
//! that wants done is done here. One task a target does all of it, in turn.
//!
//! ```text
//! asked ─────────┐                    ┌─► Start   place laid, program started, its pidfd had
//! process ended ─┤                    ├─► Quit    clients told to end, then the daemon
//! time went by ──┼─► machine ─ effects┼─► Kill    the daemon and all that it started
//! health ────────┘                    ├─► Admit   its users are let into the pipe directory
//!   answer, silence, servers, clients └─► Refuse  nobody is
//! ```
//!
//! The directory is what admission is made of: while a daemon does not serve, nobody reaches its
//! sockets. What is known of it is published after each turn, for whoever looks.

use std::{collections::BTreeSet, path::PathBuf, time::Duration};

use gpush_api::{ApiError, Code, MpsPolicy, MpsServerState, MpsSettings, MpsUsers};
use gpush_core::supervisor::{Effect, Event, Policy, State, Supervisor};
use gpush_mps::{
    command::Command,
    control::{Control, ControlError, Protocol},
};
use jiff::Timestamp;
use tokio::{
    sync::{mpsc, oneshot, watch},
    time::{Instant, sleep_until},
};

use super::{
    ear,
    hands::{self, Hands, NotStarted, Process},
    health::{self, Health},
    place::{Place, Spec},
    protocol, settings,
};
use crate::beside::Beside;

/// How long one question to a daemon may take.
const DEADLINE: Duration = Duration::from_secs(2);

/// Between two looks at a daemon that starts: at first, doubled each time, and at most.
const LOOK: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(10));

/// Between two looks at the clients of one that drains.
const DRAINING: Duration = Duration::from_millis(250);

/// Seconds after which a daemon that was told to end interrupts servers that do not.
const INTERRUPT: u32 = 1;

/// How long somebody who wants to know waits for a daemon.
const WAIT: Duration = Duration::from_millis(100);

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
    /// Ended; its clients may take so long to go.
    Leave(Duration),
    /// Ended under its clients, and started again.
    Restart,
    /// These users, and no others, may have clients.
    Users(BTreeSet<u32>),
    /// Told that this client shall end its work.
    Terminate(i32),
    /// Looked at now.
    Look,
}

struct Ask {
    what: Do,
    done: oneshot::Sender<Result<(), ApiError>>,
}

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
    /// Its pipe directory.
    pub(crate) pipe: Option<PathBuf>,
    /// Directory of its logs.
    pub(crate) logs: Option<PathBuf>,
    /// The user whose clients it has served, and nobody else's.
    pub(crate) user: Option<u32>,
    /// When it last answered.
    pub(crate) looked: Option<Instant>,
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
        changed: impl Fn(&Seen) + Send + 'static,
    ) -> Self {
        let (ask, asks) = mpsc::channel(WAITING);
        let life = Life::new(target, uuid, place, hands);
        let (publish, seen) = watch::channel(life.seen());
        tokio::spawn(life.live(asks, publish, changed));
        Self { ask, seen }
    }

    /// What is known of it.
    pub(crate) fn seen(&self) -> Seen {
        self.seen.borrow().clone()
    }

    /// What is known of it, no older than this where it can be had within [`WAIT`].
    pub(super) async fn fresh(&self, older: Duration) -> Seen {
        let seen = self.seen();
        if seen.pid.is_none() || seen.looked.is_some_and(|looked| looked.elapsed() < older) {
            return seen;
        }
        // One that hangs is shown as it was.
        let _late = tokio::time::timeout(WAIT, self.have(Do::Look)).await;
        self.seen()
    }

    /// Has something done, and waits until it is, or was refused.
    pub(super) async fn have(&self, what: Do) -> Result<(), ApiError> {
        let (done, answer) = oneshot::channel();
        let gone = || ApiError::new(Code::Internal, "nobody looks after this MPS daemon any more");
        self.ask.send(Ask { what, done }).await.map_err(|_| gone())?;
        answer.await.map_err(|_| gone())?
    }
}

/// The life of one, from inside of its task.
struct Life {
    target: String,
    uuid: String,
    place: Place,
    hands: Hands,
    machine: Supervisor,
    /// What the machine's time counts from.
    born: Instant,
    wanted: Option<Box<Wanted>>,
    spec: Option<Spec>,
    process: Option<Process>,
    control: Option<Control>,
    /// Who may have clients.
    users: BTreeSet<u32>,
    in_force: Option<MpsSettings>,
    health: Health,
    /// When it is looked at next.
    look: Option<Instant>,
    /// Between two looks while it starts.
    pause: Duration,
    /// What is wrong.
    trouble: Vec<String>,
    /// When it last answered.
    looked: Option<Instant>,
    /// Who has its ear, while it does not answer.
    ear: BTreeSet<i32>,
    /// How it is spoken to, once it has answered: what that comes of, and in words.
    protocol: Option<((Protocol, Option<String>), String)>,
    since: Timestamp,
    /// As it was last published.
    last: State,
}

impl Life {
    fn new(target: &str, uuid: &str, place: Place, hands: Hands) -> Self {
        let machine = Supervisor::new(Policy::default());
        Self {
            target: target.to_owned(),
            uuid: uuid.to_owned(),
            spec: place.spec().filter(|spec| spec.uuid == uuid),
            place,
            hands,
            last: machine.state().clone(),
            machine,
            born: Instant::now(),
            wanted: None,
            process: None,
            control: None,
            users: BTreeSet::new(),
            in_force: None,
            health: Health::default(),
            look: None,
            pause: LOOK.0,
            trouble: Vec::new(),
            looked: None,
            ear: BTreeSet::new(),
            protocol: None,
            since: Timestamp::now(),
        }
    }

    async fn live(mut self, mut asks: mpsc::Receiver<Ask>, publish: watch::Sender<Seen>, changed: impl Fn(&Seen)) {
        self.adopt().await;
        self.tell(&publish, &changed);
        loop {
            let due = self.machine.due().map(|at| self.born + at);
            tokio::select! {
                biased;
                () = ended(self.process.as_ref()) => self.gone().await,
                ask = asks.recv() => match ask {
                    Some(ask) => {
                        let done = self.asked(ask.what).await;
                        self.tell(&publish, &changed);
                        let _nobody_waits = ask.done.send(done);
                        continue;
                    }
                    // Nobody has a handle any more: the agent ends, and the daemon goes on.
                    None => return,
                },
                () = at(due) => self.step(Event::Tick).await,
                () = at(self.look) => self.look().await,
            }
            self.tell(&publish, &changed);
        }
    }

    /// Goes on with the daemon that is there.
    async fn adopt(&mut self) {
        let Some(spec) = self.spec.clone() else { return };
        match hands::find(&self.place, spec.tenure) {
            Ok(Some(process)) => {
                let pid = process.pid;
                self.process = Some(process);
                self.control = Some(Control::of(&self.place.pipe(spec.tenure)).with_front(&spec.name));
                self.users = self.place.admitted(spec.tenure).unwrap_or_default();
                tracing::info!(mps = self.target, "the MPS daemon {pid} is there: gone on with");
                self.step(Event::Found { pid }).await;
                self.look = Some(Instant::now());
            }
            Ok(None) => {}
            Err(error) => self.trouble = vec![format!("who has its directory can't be told: {error}")],
        }
    }

    async fn asked(&mut self, what: Do) -> Result<(), ApiError> {
        match what {
            Do::Want(wanted) => {
                if let Some(wanted) = &wanted {
                    self.machine.set_policy(wanted.supervision.clone());
                }
                // One that was found is asked for its clients before it may be ended.
                if wanted.is_none() && self.machine.pid().is_some() {
                    self.look().await;
                }
                let is_wanted = wanted.is_some();
                let other = wanted.is_some() && self.wanted != wanted;
                if wanted.is_some() {
                    self.wanted = wanted;
                }
                self.step(Event::Wanted(is_wanted)).await;
                if other && self.machine.pid().is_some() {
                    self.look().await;
                }
            }
            Do::Start => {
                self.step(Event::StartAnyway).await;
                self.started().await?;
            }
            Do::Leave(within) => self.step(Event::Leave(within)).await,
            Do::Restart => self.step(Event::Restart).await,
            Do::Users(users) => return self.have_users(users).await,
            Do::Terminate(client) => self.terminate(client).await,
            Do::Look => self.look().await,
        }
        Ok(())
    }

    /// What can be said at once of a start: that it failed.
    async fn started(&mut self) -> Result<(), ApiError> {
        match self.machine.state() {
            State::BackingOff { .. } | State::GivenUp | State::Stopped => {
                let mut error =
                    ApiError::new(Code::Unavailable, format!("the MPS daemon of {} can't be started", self.target));
                error.causes.clone_from(&self.trouble);
                Err(error.hint(format!("`gpushctl mps logs {}` shows what it said", self.target)).retryable())
            }
            State::Starting { .. }
            | State::Found { .. }
            | State::Ready { .. }
            | State::Fault { .. }
            | State::Hung { .. }
            | State::Draining { .. }
            | State::Stopping { .. } => Ok(()),
        }
    }

    /// Lets these users in. A user that is not the one whom the pipe directory was made for gets another,
    /// and so another daemon.
    async fn have_users(&mut self, users: BTreeSet<u32>) -> Result<(), ApiError> {
        let many = self.wanted.as_ref().is_some_and(|wanted| wanted.policy.users == MpsUsers::Many);
        let newcomer = users.iter().copied().find(|uid| !self.users.contains(uid));
        let served = self.spec.as_ref().and_then(|spec| spec.user);
        if let Some(uid) = newcomer.filter(|_| !many) {
            match served {
                Some(other) if other != uid => self.hand_over(uid).await?,
                Some(_) => {}
                None => self.note_user(uid)?,
            }
        }
        self.users = users;
        if self.machine.admits() { self.admit(true) } else { Ok(()) }
    }

    /// Ends the daemon of a user who has gone and starts one for another.
    async fn hand_over(&mut self, uid: u32) -> Result<(), ApiError> {
        self.look().await;
        let clients = self.health.clients.len();
        if clients > 0 {
            let message = format!("{} still has {clients} clients of another user", self.target);
            return Err(ApiError::new(Code::Conflict, message)
                .hint(format!("`gpushctl mps clients {}` shows them; ask again when they have ended", self.target))
                .retryable());
        }
        if let Some(spec) = &mut self.spec {
            spec.tenure += 1;
            spec.user = Some(uid);
        }
        self.step(Event::Restart).await;
        // Both ends of it are quick: nobody computes there.
        let until = Instant::now() + DEADLINE + DEADLINE;
        while !self.machine.admits() {
            let due = self.machine.due().map(|at| self.born + at);
            tokio::select! {
                biased;
                () = ended(self.process.as_ref()) => self.gone().await,
                () = at(due) => self.step(Event::Tick).await,
                () = at(self.look) => self.look().await,
                () = sleep_until(until) => {
                    return Err(ApiError::new(Code::Unavailable, format!("the MPS daemon of {} does not start anew", self.target))
                        .hint(format!("`gpushctl mps show {}` says how it is", self.target))
                        .retryable());
                }
            }
        }
        Ok(())
    }

    fn note_user(&mut self, uid: u32) -> Result<(), ApiError> {
        let Some(spec) = &mut self.spec else { return Ok(()) };
        spec.user = Some(uid);
        self.place.note(spec).map_err(|error| {
            ApiError::new(Code::Internal, format!("whose {} is can't be noted", self.target)).cause(error.to_string())
        })
    }

    fn admit(&mut self, open: bool) -> Result<(), ApiError> {
        let Some(spec) = &self.spec else { return Ok(()) };
        let users = if open { self.users.clone() } else { BTreeSet::new() };
        self.place.admit(spec.tenure, &users).map_err(|error| {
            let message = format!("the pipe directory of {} can't be opened to its user", self.target);
            tracing::error!(mps = self.target, "{message}: {error}");
            ApiError::new(Code::Internal, message).cause(error.to_string())
        })
    }

    fn now(&self) -> Duration {
        self.born.elapsed()
    }

    /// Tells the machine, and does what it wants done; that may be another event.
    async fn step(&mut self, event: Event) {
        let mut next = Some(event);
        while let Some(event) = next.take() {
            for effect in self.machine.step(&event, self.now()) {
                match effect {
                    Effect::Start => next = self.start().await.err(),
                    Effect::Quit => self.quit().await,
                    Effect::Kill => match &self.process {
                        Some(process) => self.hands.kill(&self.place, process.pid).await,
                        None => next = Some(Event::Ended),
                    },
                    Effect::Admit => {
                        if let Err(error) = self.admit(true) {
                            self.trouble = vec![error.message];
                        }
                    }
                    Effect::Refuse => {
                        let _logged = self.admit(false);
                    }
                    Effect::TellGivenUp => {
                        tracing::error!(mps = self.target, "given up: it failed {} times", self.machine.failures());
                    }
                    Effect::TellHung => tracing::error!(
                        mps = self.target,
                        "hangs with {} clients and is left alone for their sake",
                        self.health.clients.len()
                    ),
                }
            }
        }
        self.look = match self.machine.state() {
            State::Starting { .. } => self.look.or_else(|| Some(Instant::now())),
            State::Found { .. } => self.look.or_else(|| Some(Instant::now())),
            State::Ready { .. } | State::Hung { .. } | State::Fault { .. } => {
                self.look.or_else(|| Some(Instant::now() + self.between_looks()))
            }
            State::Draining { .. } => Some(Instant::now() + DRAINING),
            State::Stopped | State::BackingOff { .. } | State::GivenUp | State::Stopping { .. } => None,
        };
    }

    fn between_looks(&self) -> Duration {
        self.wanted.as_ref().map_or(Duration::from_secs(15), |wanted| wanted.health)
    }

    async fn start(&mut self) -> Result<(), Event> {
        (self.in_force, self.health, self.pause) = (None, Health::default(), LOOK.0);
        self.looked = None;
        self.look = None;
        if self.is_there() {
            return Ok(());
        }
        if let Err(error) = self.hands.clear(&self.place).await {
            return Err(self.not_started(error));
        }
        let spec = match self.lay() {
            Ok(spec) => spec,
            Err(error) => {
                tracing::error!(mps = self.target, "it can't be started: {error}");
                self.trouble = [vec![error.message], error.causes].concat();
                return Err(Event::Ended);
            }
        };
        match self.hands.start(&self.place).await {
            Ok(process) => {
                tracing::info!(mps = self.target, "the MPS daemon {} was started", process.pid);
                self.control = Some(Control::of(&self.place.pipe(spec.tenure)).with_front(&spec.name));
                (self.process, self.spec) = (Some(process), Some(spec));
                Ok(())
            }
            Err(error) => Err(self.not_started(error)),
        }
    }

    /// Goes on with a daemon that came up unasked, or after nobody waited for it any more.
    fn is_there(&mut self) -> bool {
        let tenure = self.spec.as_ref().map(|spec| spec.tenure);
        let Some(spec) = self.place.spec().filter(|spec| spec.uuid == self.uuid && Some(spec.tenure) == tenure) else {
            return false;
        };
        let Ok(Some(process)) = hands::find(&self.place, spec.tenure) else { return false };
        tracing::info!(mps = self.target, "the MPS daemon {} is there: gone on with", process.pid);
        self.control = Some(Control::of(&self.place.pipe(spec.tenure)));
        (self.process, self.spec) = (Some(process), Some(spec));
        true
    }

    fn not_started(&mut self, error: NotStarted) -> Event {
        let (why, event) = match error {
            NotStarted::Later(why) => (why, Event::Occupied),
            NotStarted::Failed(why) => (format!("it can't be started: {why}"), Event::Ended),
        };
        // The same is tried again and again, and told once.
        if self.trouble.first() != Some(&why) {
            tracing::error!(mps = self.target, "{why}");
        }
        self.trouble = vec![why];
        event
    }

    /// Makes the place ready for a start.
    fn lay(&self) -> Result<Spec, ApiError> {
        let Some(wanted) = &self.wanted else {
            return Err(ApiError::new(Code::Internal, "it is not known how it is wanted"));
        };
        let internal =
            |what: &str, error: &dyn std::fmt::Display| ApiError::new(Code::Internal, what).cause(error.to_string());
        self.place.is_short()?;
        let control = Beside::may_run(&wanted.control.to_string_lossy())?;
        Beside::may_run(&wanted.server.to_string_lossy())?;
        let before = self.spec.as_ref();
        let spec = Spec {
            target: self.target.clone(),
            uuid: self.uuid.clone(),
            gpu_uuid: wanted.gpu_uuid.clone(),
            tenure: before.map_or(1, |spec| spec.tenure),
            user: before.and_then(|spec| spec.user),
            control,
            name: wanted.control.clone(),
            servers: wanted.server.parent().map(Into::into).unwrap_or_default(),
            logs: wanted.logs.clone(),
            settings: wanted.policy.settings.clone(),
        };
        // Whoever finds stale sockets runs without MPS: nothing of a dead daemon is left to be found.
        if self.place.is_taken() {
            return Ok(spec);
        }
        self.place.lay(&spec).map_err(|error| internal("its directory can't be made", &error))?;
        Ok(spec)
    }

    /// Has a client end its work on the GPU.
    async fn terminate(&self, client: i32) {
        let Some(control) = &self.control else { return };
        let Some((server, _)) = self.health.clients.iter().find(|(_, one)| *one == client) else { return };
        let command = Command::TerminateClient { server: *server, client };
        if let Err(error) = control.say(&command, DEADLINE).await {
            tracing::warn!(mps = self.target, "client {client} can't be told to end: {error}");
        }
    }

    /// Tells the daemon to end. Its process tells whether it does.
    async fn quit(&mut self) {
        for (_, client) in &self.health.clients {
            self.terminate(*client).await;
        }
        let Some(control) = &self.control else { return };
        if let Err(error) = control.quit(Some(INTERRUPT), DEADLINE).await {
            tracing::warn!(mps = self.target, "the daemon can't be told to end: {error}");
        }
    }

    /// Its process has ended.
    async fn gone(&mut self) {
        let Some(process) = self.process.take() else { return };
        let pid = process.pid;
        let how = self.hands.how(&self.place, process).await;
        let asked = matches!(self.machine.state(), State::Stopping { .. });
        if asked {
            tracing::info!(mps = self.target, "the MPS daemon {how}");
            self.trouble.clear();
            // Servers that it left behind hold the GPU for nobody any more. While they do, so does its lock,
            // and its process group is no other's.
            if self.place.is_taken() {
                self.hands.kill(&self.place, pid).await;
            }
        } else {
            tracing::error!(mps = self.target, "the MPS daemon {how}");
            self.trouble = vec![format!("the daemon {how}")];
        }
        (self.control, self.in_force, self.protocol) = (None, None, None);
        self.ear.clear();
        self.step(Event::Ended).await;
    }

    /// Looks how it is.
    async fn look(&mut self) {
        self.look = None;
        let Some(process) = &self.process else { return };
        let pid = process.pid;
        let starting = matches!(self.machine.state(), State::Starting { .. });
        let found = tokio::select! {
            biased;
            () = process.ended() => return,
            found = self.ask(pid) => found,
        };
        match found {
            Ok((health, put)) => {
                if !put.differed.is_empty() && !starting && self.in_force.is_some() {
                    let differed = put.differed.join(", ");
                    tracing::info!(mps = self.target, "it had {differed}: set");
                }
                let fault = health.fault();
                (self.in_force, self.looked) = (Some(put.in_force), Some(Instant::now()));
                let clients = health.clients.len();
                self.health = health;
                self.trouble = fault.clone().into_iter().collect();
                self.ear.clear();
                self.note_protocol(pid);
                self.step(Event::Clients(clients)).await;
                self.step(if fault.is_some() { Event::Fault } else { Event::Answers { pid } }).await;
                if let Some(wanted) = &self.wanted {
                    super::logs::rotate(&wanted.logs, wanted.log_bytes);
                }
            }
            // It has not come so far yet.
            Err(_) if starting => {
                self.look = Some(Instant::now() + self.pause);
                self.pause = (self.pause * 2).min(LOOK.1);
            }
            Err(error) => {
                self.trouble = vec![super::health::silence(&error, &self.place, self.spec.as_ref())];
                self.trouble.extend(protocol::unsupported(pid));
                if let Some(spec) = &self.spec {
                    self.ear = ear::holders(&error, pid, &self.place.pipe(spec.tenure), &self.target, &self.ear).await;
                }
                // Nobody can be asked for its clients: those that were seen last, as far as they live.
                self.health.clients.retain(|(_, client)| hands::is_alive(*client));
                if self.looked.is_some() {
                    self.step(Event::Clients(self.health.clients.len())).await;
                }
                self.step(Event::Silent).await;
                self.look = Some(Instant::now() + self.between_looks().min(DEADLINE));
            }
        }
    }

    /// Put into words again only when it is another: for that its program is read.
    fn note_protocol(&mut self, pid: i32) {
        let Some(control) = &self.control else { return };
        let driver = self.wanted.as_ref().and_then(|wanted| wanted.driver.clone());
        let now = (control.protocol(), driver);
        if self.protocol.as_ref().is_none_or(|(of, _)| *of != now) {
            let words = protocol::words(control, pid, now.1.as_deref());
            if now.0 != Protocol::Direct {
                tracing::warn!(mps = self.target, "it is spoken to {words}");
            }
            self.protocol = Some((now, words));
        }
    }

    /// Asks the daemon who it is and how it is, and sets what is not as wanted.
    async fn ask(&self, pid: i32) -> Result<(Health, settings::Put), ControlError> {
        let (Some(control), Some(spec)) = (&self.control, &self.spec) else { return Err(ControlError::Busy) };
        let health = health::ask(control, pid, &spec.logs, &self.health, DEADLINE).await?;
        let servers: Vec<i32> = health.servers.iter().map(|(pid, _)| *pid).collect();
        let settings = self.wanted.as_ref().map_or(&spec.settings, |wanted| &wanted.policy.settings);
        let put = settings::put(control, &servers, settings, DEADLINE).await?;
        Ok((health, put))
    }

    fn seen(&self) -> Seen {
        let at = |due: Duration| {
            let left = due.saturating_sub(self.now());
            Timestamp::now() + jiff::SignedDuration::try_from(left).unwrap_or_default()
        };
        let pipe = self.spec.as_ref().map(|spec| self.place.pipe(spec.tenure));
        Seen {
            state: self.machine.state().clone(),
            since: self.since,
            wanted: self.machine.wanted(),
            policy: self.wanted.as_ref().map(|wanted| wanted.policy.clone()),
            pid: self.process.as_ref().map(|process| process.pid),
            in_force: self.in_force.clone(),
            servers: self.health.servers.clone(),
            clients: self.health.clients.clone(),
            failures: self.machine.failures(),
            next_start: match self.machine.state() {
                State::BackingOff { until } => Some(at(*until)),
                State::Stopped
                | State::Starting { .. }
                | State::Found { .. }
                | State::Ready { .. }
                | State::Hung { .. }
                | State::Fault { .. }
                | State::GivenUp
                | State::Draining { .. }
                | State::Stopping { .. } => None,
            },
            trouble: self.trouble.clone(),
            ear: self.ear.clone(),
            protocol: self.protocol.as_ref().map(|(_, words)| words.clone()),
            pipe,
            logs: self.spec.as_ref().map(|spec| spec.logs.clone()),
            user: self.spec.as_ref().and_then(|spec| spec.user),
            looked: self.looked,
        }
    }

    fn tell(&mut self, publish: &watch::Sender<Seen>, changed: &impl Fn(&Seen)) {
        let other = std::mem::discriminant(&self.last) != std::mem::discriminant(self.machine.state());
        if other {
            self.since = Timestamp::now();
            self.last = self.machine.state().clone();
        }
        let seen = self.seen();
        if other {
            changed(&seen);
        }
        publish.send_replace(seen);
    }
}

async fn ended(process: Option<&Process>) {
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
