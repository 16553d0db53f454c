//! The life of one MPS control daemon, as a machine without hands: what happened goes in, what is to be
//! done comes out. Who does it, a systemd unit or a child of ours, makes no difference here.
//!
//! ```text
//!              wanted              it answers, and has our settings
//!  Stopped ────────────► Starting ─────────────────────────────────► Ready ◄──────────┐ answers again
//!     ▲                   ▲  │ ended, or no answer in time            │ silent twice   │
//!     │                   │  │                                       ├──────────────► Hung
//!     │        pause over │  ▼                                       │ server fault   │
//!     │ gone            BackingOff ◄── ended ── Ready, Hung, Fault    ├──────────────► Fault
//!     │                      │ too often in a while
//!     │                      ▼
//!     │                   GivenUp ── started by hand ──► Starting
//!     │
//!  Stopping ◄── no client left, or in time no more ── Draining ◄── not wanted any more (Ready, Hung, Fault)
//!     └─────── restart: wanted again as soon as it is gone ──► Starting
//! ```
//!
//! A daemon that is merely not wanted any more waits for its clients for ever; only who asks for its end
//! sets them a time. Fail closed: somebody is admitted in `Ready` alone. A hung daemon that has clients is left alone unless
//! the policy says otherwise: they compute on, and a restart would end them. So is one whose server met a
//! fault: it recovers when the clients concerned have ended. One that the agent finds alive when it starts
//! is adopted with its pid (`Found` until it was asked), and never started beside.

use std::{collections::VecDeque, time::Duration};

/// Time since some fixed moment. The machine never looks at a clock.
pub type Instant = Duration;

/// What an administrator may set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policy {
    /// How long a daemon may take until it answers.
    pub start: Duration,
    /// Pause after the first failure; each further one doubles it.
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

/// What happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// It shall run, or shall not.
    Wanted(bool),
    /// Somebody wants it started though it was given up, or backs off.
    StartAnyway,
    /// It shall not run any more, and its clients may take so long to go: nothing, and they are ended.
    Leave(Duration),
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
    /// It can't be started yet: something of the one before is still there. That is no failure.
    Occupied,
    /// It ended.
    Ended,
    /// So many clients it has.
    Clients(usize),
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
    /// Let people in.
    Admit,
    /// Let nobody in.
    Refuse,
    /// Say that it was given up.
    TellGivenUp,
    /// Say that it hangs, and that nothing is done about it for its clients' sake.
    TellHung,
}

/// One daemon's machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Supervisor {
    policy: Policy,
    state: State,
    /// Nobody has said yet: then nothing is done about what is found.
    wanted: Option<bool>,
    /// Unknown of one that was found and has not answered.
    clients: Option<usize>,
    /// When it failed, within the time that counts.
    failed: VecDeque<Instant>,
}

/// Unanswered questions in a row that make a daemon hung: one may be an administrator at a prompt.
const SILENCES: u32 = 2;

impl Supervisor {
    /// Of a daemon of which nothing is known yet.
    #[must_use]
    pub fn new(policy: Policy) -> Self {
        Self { policy, state: State::Stopped, wanted: None, clients: Some(0), failed: VecDeque::new() }
    }

    /// Where it is.
    #[must_use]
    pub fn state(&self) -> &State {
        &self.state
    }

    /// Whether somebody may be let in.
    #[must_use]
    pub fn admits(&self) -> bool {
        matches!(self.state, State::Ready { .. }) && self.wanted()
    }

    /// When [`Event::Tick`] is due next, if time matters.
    #[must_use]
    pub fn due(&self) -> Option<Instant> {
        match self.state {
            State::Draining { until, .. } => until,
            State::Starting { until } | State::BackingOff { until } | State::Stopping { until, killed: false, .. } => {
                Some(until)
            }
            State::Stopped
            | State::Found { .. }
            | State::Ready { .. }
            | State::Hung { .. }
            | State::Fault { .. }
            | State::GivenUp
            | State::Stopping { killed: true, .. } => None,
        }
    }

    /// Its pid, while it is known to be there.
    #[must_use]
    pub fn pid(&self) -> Option<i32> {
        match self.state {
            State::Found { pid }
            | State::Ready { pid, .. }
            | State::Hung { pid }
            | State::Fault { pid }
            | State::Draining { pid, .. } => Some(pid),
            State::Stopped
            | State::Starting { .. }
            | State::BackingOff { .. }
            | State::GivenUp
            | State::Stopping { .. } => None,
        }
    }

    /// Whether it is wanted.
    #[must_use]
    pub fn wanted(&self) -> bool {
        self.wanted == Some(true)
    }

    /// Whether it is known to have no client.
    fn is_idle(&self) -> bool {
        self.clients == Some(0)
    }

    /// Failures that count.
    #[must_use]
    pub fn failures(&self) -> usize {
        self.failed.len()
    }

    /// Another policy, from now on.
    pub fn set_policy(&mut self, policy: Policy) {
        self.policy = policy;
    }

    /// Takes in what happened; what is to be done, in order.
    pub fn step(&mut self, event: &Event, now: Instant) -> Vec<Effect> {
        let admitted = self.admits();
        let mut effects = self.react(event, now);
        match (admitted, self.admits()) {
            (false, true) => effects.push(Effect::Admit),
            // Nobody is let in from the moment on at which it is known.
            (true, false) => effects.insert(0, Effect::Refuse),
            (true, true) | (false, false) => {}
        }
        effects
    }

    fn react(&mut self, event: &Event, now: Instant) -> Vec<Effect> {
        match event {
            Event::Wanted(wanted) => {
                self.wanted = Some(*wanted);
                self.pursue(now)
            }
            Event::StartAnyway => {
                self.wanted = Some(true);
                match self.state {
                    State::GivenUp | State::BackingOff { .. } => {
                        self.failed.clear();
                        self.state = State::Stopped;
                    }
                    State::Stopped
                    | State::Starting { .. }
                    | State::Found { .. }
                    | State::Ready { .. }
                    | State::Hung { .. }
                    | State::Fault { .. }
                    | State::Draining { .. }
                    | State::Stopping { .. } => {}
                }
                self.pursue(now)
            }
            Event::Leave(within) => {
                self.wanted = Some(false);
                let served = matches!(self.state, State::Ready { .. } | State::Draining { served: true, .. });
                match self.pid() {
                    Some(pid) if !self.is_idle() && *within > Duration::ZERO => {
                        self.state = State::Draining { pid, until: Some(now + *within), served };
                        Vec::new()
                    }
                    Some(_) => self.stop(now),
                    None => self.pursue(now),
                }
            }
            Event::Restart => {
                self.wanted = Some(true);
                if self.pid().is_some() { self.stop(now) } else { self.pursue(now) }
            }
            Event::Found { pid } => {
                match self.state {
                    // Whether it serves is for its answer to say, and whether it is wanted for somebody else.
                    State::Stopped | State::BackingOff { .. } | State::GivenUp => {
                        (self.state, self.clients) = (State::Found { pid: *pid }, None);
                    }
                    State::Starting { .. }
                    | State::Found { .. }
                    | State::Ready { .. }
                    | State::Hung { .. }
                    | State::Fault { .. }
                    | State::Draining { .. }
                    | State::Stopping { .. } => {}
                }
                Vec::new()
            }
            Event::Occupied => {
                if let State::Starting { .. } = self.state {
                    self.state = State::BackingOff { until: now + self.policy.pause };
                }
                self.pursue(now)
            }
            Event::Answers { pid } => {
                match self.state {
                    State::Starting { .. }
                    | State::Found { .. }
                    | State::Ready { .. }
                    | State::Hung { .. }
                    | State::Fault { .. } => {
                        self.state = State::Ready { pid: *pid, silences: 0 };
                    }
                    State::Stopped
                    | State::BackingOff { .. }
                    | State::GivenUp
                    | State::Draining { .. }
                    | State::Stopping { .. } => {}
                }
                self.pursue(now)
            }
            Event::Fault => {
                match self.state {
                    State::Found { pid } | State::Ready { pid, .. } | State::Hung { pid } => {
                        self.state = State::Fault { pid };
                    }
                    State::Draining { pid, until, .. } => {
                        self.state = State::Draining { pid, until, served: false };
                    }
                    State::Stopped
                    | State::Starting { .. }
                    | State::Fault { .. }
                    | State::BackingOff { .. }
                    | State::GivenUp
                    | State::Stopping { .. } => {}
                }
                self.pursue(now)
            }
            Event::Silent => self.silent(now),
            Event::Ended => self.ended(now),
            Event::Clients(clients) => {
                self.clients = Some(*clients);
                match self.state {
                    State::Draining { .. } if self.is_idle() => self.stop(now),
                    State::Hung { .. } => self.hung(now),
                    State::Stopped
                    | State::Starting { .. }
                    | State::Found { .. }
                    | State::Ready { .. }
                    | State::Fault { .. }
                    | State::BackingOff { .. }
                    | State::GivenUp
                    | State::Draining { .. }
                    | State::Stopping { .. } => Vec::new(),
                }
            }
            Event::Tick => self.tick(now),
        }
    }

    /// Goes on towards what is wanted.
    fn pursue(&mut self, now: Instant) -> Vec<Effect> {
        let Some(wanted) = self.wanted else { return Vec::new() };
        match (wanted, &self.state) {
            (true, State::Stopped) => self.start(now),
            (false, State::Starting { .. }) => self.stop(now),
            (false, State::BackingOff { .. } | State::GivenUp) => {
                self.state = State::Stopped;
                Vec::new()
            }
            (false, State::Ready { pid, .. } | State::Hung { pid } | State::Fault { pid }) => {
                if self.is_idle() {
                    return self.stop(now);
                }
                let served = matches!(self.state, State::Ready { .. });
                self.state = State::Draining { pid: *pid, until: None, served };
                Vec::new()
            }
            // Wanted again before it was stopped: it never left.
            (true, State::Draining { pid, served: true, .. }) => {
                self.state = State::Ready { pid: *pid, silences: 0 };
                Vec::new()
            }
            (true, State::Draining { pid, served: false, .. }) => {
                self.state = State::Hung { pid: *pid };
                Vec::new()
            }
            (
                true,
                State::Starting { .. }
                | State::Found { .. }
                | State::Ready { .. }
                | State::Hung { .. }
                | State::Fault { .. }
                | State::BackingOff { .. }
                | State::GivenUp
                | State::Stopping { .. },
            )
            // One that was found is asked for its clients before anything is done about it.
            | (false, State::Stopped | State::Found { .. } | State::Draining { .. } | State::Stopping { .. }) => {
                Vec::new()
            }
        }
    }

    fn start(&mut self, now: Instant) -> Vec<Effect> {
        self.clients = Some(0);
        self.state = State::Starting { until: now + self.policy.start };
        vec![Effect::Start]
    }

    fn stop(&mut self, now: Instant) -> Vec<Effect> {
        self.state = State::Stopping { until: now + self.policy.stop, killed: false, failed: false };
        vec![Effect::Quit]
    }

    fn silent(&mut self, now: Instant) -> Vec<Effect> {
        match self.state {
            State::Ready { pid, silences } if silences + 1 >= SILENCES => {
                self.state = State::Hung { pid };
                let mut effects = self.hung(now);
                if effects.is_empty() {
                    effects.push(Effect::TellHung);
                }
                effects
            }
            State::Ready { pid, silences } => {
                self.state = State::Ready { pid, silences: silences + 1 };
                Vec::new()
            }
            State::Found { pid } | State::Fault { pid } => {
                self.state = State::Hung { pid };
                self.hung(now)
            }
            State::Stopped
            | State::Starting { .. }
            | State::Hung { .. }
            | State::BackingOff { .. }
            | State::GivenUp
            | State::Draining { .. }
            | State::Stopping { .. } => Vec::new(),
        }
    }

    /// A hung daemon is killed when nobody loses by it, or the policy says so.
    fn hung(&mut self, now: Instant) -> Vec<Effect> {
        if !self.is_idle() && !self.policy.restart_hung_with_clients {
            return Vec::new();
        }
        self.kill_failed(now)
    }

    fn kill_failed(&mut self, now: Instant) -> Vec<Effect> {
        self.state = State::Stopping { until: now + self.policy.stop, killed: true, failed: true };
        vec![Effect::Kill]
    }

    fn ended(&mut self, now: Instant) -> Vec<Effect> {
        self.clients = Some(0);
        match self.state {
            State::Starting { .. }
            | State::Found { .. }
            | State::Ready { .. }
            | State::Hung { .. }
            | State::Fault { .. }
            | State::Stopping { failed: true, .. } => self.failed(now),
            State::Draining { .. } | State::Stopping { failed: false, .. } => {
                self.state = State::Stopped;
                self.pursue(now)
            }
            State::Stopped | State::BackingOff { .. } | State::GivenUp => Vec::new(),
        }
    }

    fn failed(&mut self, now: Instant) -> Vec<Effect> {
        if !self.wanted() {
            self.state = State::Stopped;
            return Vec::new();
        }
        while self.failed.front().is_some_and(|at| *at + self.policy.within <= now) {
            self.failed.pop_front();
        }
        self.failed.push_back(now);
        let count = self.failed.len();
        if count >= self.policy.failures {
            self.state = State::GivenUp;
            return vec![Effect::TellGivenUp];
        }
        let doubled = u32::try_from(count - 1).map_or(u32::MAX, |times| 2_u32.saturating_pow(times));
        let pause = self.policy.pause.saturating_mul(doubled).min(self.policy.longest_pause);
        self.state = State::BackingOff { until: now + pause };
        Vec::new()
    }

    fn tick(&mut self, now: Instant) -> Vec<Effect> {
        match self.state {
            // Late. It is started again only once it is seen gone.
            State::Starting { until } if until <= now => self.kill_failed(now),
            State::BackingOff { until } if until <= now => self.start(now),
            State::Draining { until: Some(until), .. } if until <= now => self.stop(now),
            State::Stopping { until, killed: false, failed } if until <= now => {
                self.state = State::Stopping { until, killed: true, failed };
                vec![Effect::Kill]
            }
            State::Stopped
            | State::Starting { .. }
            | State::Found { .. }
            | State::Ready { .. }
            | State::Hung { .. }
            | State::Fault { .. }
            | State::BackingOff { .. }
            | State::GivenUp
            | State::Draining { .. }
            | State::Stopping { .. } => Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests;
