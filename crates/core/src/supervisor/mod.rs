//! The life of one MPS control daemon, as a machine without hands: what happened goes in, what is to be
//! done comes out. Who does it, a systemd unit or a child of ours, makes no difference here.
//!
//! ```text
//!   found alive when the agent starts ──► Found ── asked, and wanted ─► Ready │ not wanted ─► Draining
//!
//!              wanted              it answers, and has our settings
//!  Stopped ────────────► Starting ─────────────────────────────────► Ready ◄──────────┐ answers again
//!     ▲                   ▲  │ ended, or no answer in time            │ silent twice   │
//!     │                   │  │                                       ├──────────────► Hung
//!     │        pause over │  ▼                                       │ server fault   │
//!     │ gone            BackingOff ◄── ended ── Ready, Hung, Fault    ├──────────────► Fault
//!     │                      │ ▲ something of the one before is there: looked again, no failure
//!     │                      │ too often in a while
//!     │                      ▼
//!     │                   GivenUp ── started by hand ──► Starting
//!     │
//!  Stopping ◄── no client left, or in time no more ── Draining ◄── not wanted any more (Ready, Hung, Fault)
//!     │                                                  └─ wanted again ─► Ready, or Hung when it is silent
//!     └─────── restart: wanted again as soon as it is gone ──► Starting
//! ```
//!
//! A daemon that is merely not wanted any more waits for its clients for ever; only who asks for its end
//! sets them a time. Fail closed: somebody is admitted in `Ready` alone, and in `Found` whoever was before. A
//! hung daemon that has clients is left alone unless the policy says otherwise: they compute on, and a restart
//! would end them. So is one whose server met a fault: it recovers when the clients concerned have ended; and
//! one whose only ear somebody else has: an administrator at a prompt is no reason to kill it. One that the
//! agent finds alive when it starts is adopted with its pid, and never started beside. Nothing is done about it
//! before it was said whether it is wanted.

mod words;

use std::{collections::VecDeque, time::Duration};

pub use self::words::{Effect, Event, Instant, Policy, State};

/// One daemon's machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Supervisor {
    policy: Policy,
    state: State,
    /// `None` before anybody said so.
    wanted: Option<bool>,
    /// Unknown of one that was found, or does not answer, and of which the driver does not tell either.
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

    /// Whether one that was found may go on letting in whom it let in: nothing speaks against it yet.
    #[must_use]
    pub fn may_go_on(&self) -> bool {
        matches!(self.state, State::Found { .. } | State::Ready { .. }) && self.wanted != Some(false)
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
            | State::Hung { pid, .. }
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

    /// Whether somebody said that it is, or is not.
    #[must_use]
    pub fn is_told(&self) -> bool {
        self.wanted.is_some()
    }

    /// How many clients it has, as far as that is known.
    #[must_use]
    pub fn clients(&self) -> Option<usize> {
        self.clients
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

    /// Takes in what happened; what is to be done, in order. Whether anybody is let in is [`Self::admits`]
    /// from then on.
    pub fn step(&mut self, event: &Event, now: Instant) -> Vec<Effect> {
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
                    Some(pid) if !self.is_idle() && *within != Some(Duration::ZERO) => {
                        self.state = State::Draining { pid, until: within.map(|within| now + within), served };
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
                    State::Found { pid } | State::Ready { pid, .. } | State::Hung { pid, .. } => {
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
            Event::Busy => self.busy(),
            Event::Ended => self.ended(now),
            Event::Clients(clients) => {
                self.clients = *clients;
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
            (false, State::Ready { pid, .. } | State::Hung { pid, .. } | State::Fault { pid }) => {
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
                self.state = State::Hung { pid: *pid, silences: 0 };
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
            State::Ready { pid, silences } if silences + 1 < SILENCES => {
                self.state = State::Ready { pid, silences: silences + 1 };
                Vec::new()
            }
            State::Ready { pid, .. } => {
                self.state = State::Hung { pid, silences: SILENCES };
                let mut effects = self.hung(now);
                if effects.is_empty() {
                    effects.push(Effect::TellHung);
                }
                effects
            }
            State::Found { pid } | State::Fault { pid } => {
                self.state = State::Hung { pid, silences: SILENCES };
                self.hung(now)
            }
            State::Hung { pid, silences } => {
                self.state = State::Hung { pid, silences: silences.saturating_add(1) };
                self.hung(now)
            }
            State::Stopped
            | State::Starting { .. }
            | State::BackingOff { .. }
            | State::GivenUp
            | State::Draining { .. }
            | State::Stopping { .. } => Vec::new(),
        }
    }

    /// Whoever has its ear keeps its clients waiting too, so nobody is let in; but it is well.
    fn busy(&mut self) -> Vec<Effect> {
        match self.state {
            State::Ready { pid, silences } if silences + 1 < SILENCES => {
                self.state = State::Ready { pid, silences: silences + 1 };
            }
            State::Found { pid } | State::Ready { pid, .. } | State::Hung { pid, .. } | State::Fault { pid } => {
                self.state = State::Hung { pid, silences: 0 };
            }
            State::Stopped
            | State::Starting { .. }
            | State::BackingOff { .. }
            | State::GivenUp
            | State::Draining { .. }
            | State::Stopping { .. } => {}
        }
        Vec::new()
    }

    /// A hung daemon is killed when it is wanted and nobody loses by it, or the policy says so.
    fn hung(&mut self, now: Instant) -> Vec<Effect> {
        let is_silent = matches!(self.state, State::Hung { silences, .. } if silences >= SILENCES);
        let is_spared = !self.is_idle() && !self.policy.restart_hung_with_clients;
        if !is_silent || is_spared || self.wanted.is_none() {
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
        let doubled = |times: usize| u32::try_from(times).map_or(u32::MAX, |times| 2_u32.saturating_pow(times));
        let pause = match count {
            0 | 1 => Duration::ZERO,
            more => self.policy.pause.saturating_mul(doubled(more - 2)).min(self.policy.longest_pause),
        };
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
