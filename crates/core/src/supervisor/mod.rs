//! Supervisor of one MPS control daemon, as a pure state machine: events in, effects out. The caller executes the
//! effects, through a systemd unit or a child process.
//!
//! ```text
//!   found running at start ──► Found ── probed, and desired ─► Ready │ not desired ─► Draining
//!
//!              desired             it answers, with the desired settings
//!  Stopped ────────────► Starting ─────────────────────────────────► Ready ◄──────────┐ answers again
//!     ▲                   ▲  │ ended, or no answer in time            │ silent twice   │
//!     │                   │  │                                       ├──────────────► Hung
//!     │        pause over │  ▼                                       │ server fault   │
//!     │ ended           BackingOff ◄── ended ── Ready, Hung, Fault    ├──────────────► Fault
//!     │                      │ ▲ leftovers of the previous daemon run: retried, not a failure
//!     │                      │ too many failures
//!     │                      ▼
//!     │                   GivenUp ── start requested ──► Starting
//!     │
//!  Stopping ◄── not in use, or deadline ─────── Draining ◄── no longer desired (Ready, Hung, Fault)
//!     │                                            └─ desired again ─► Ready, or Hung if it is silent
//!     └─────── restart: started again as soon as the daemon has ended ──► Starting
//! ```
//!
//! When a rule no longer wants a daemon, the daemon drains: clients may run as long as they like.
//! Only an explicit request sets a deadline.
//!
//! A lease keeps a daemon in use, as a client does. Its program may connect later, and without the
//! daemon the program would run without MPS and without a message. So a daemon drains until its
//! leases have ended, and the lease holders keep their access.
//!
//! New users are admitted only in `Ready`. In `Found`, users who were admitted before the restart
//! keep their access.
//!
//! Three kinds of daemons are left running:
//!
//! - A hung daemon with clients, unless the policy says otherwise: its clients still compute, and a
//!   restart would end them.
//! - A daemon whose server had a fault. It recovers when the affected clients have ended.
//! - A daemon whose control connection is held by another process, such as an administrator's
//!   front-end.
//!
//! A daemon that is running when gpushd starts is adopted with its pid, and no second daemon is
//! started. The machine then takes no action until the caller reports whether the daemon is
//! desired.

mod words;

use std::{collections::VecDeque, time::Duration};

pub use self::words::{Effect, Event, Instant, Policy, State};

/// The state machine of one daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Supervisor {
    policy: Policy,
    state: State,
    /// Whether the daemon is desired; `None` until the caller reports whether it is.
    wanted: Option<bool>,
    /// Number of clients; `None` while it is unknown. It is unknown if the daemon was found or does
    /// not answer, and the driver does not list the clients.
    clients: Option<usize>,
    /// Whether users hold leases on the daemon's target.
    leased: bool,
    /// Times of the failures within the period of the policy.
    failed: VecDeque<Instant>,
}

/// Number of consecutive probes without an answer after which a daemon is considered hung. An open
/// front-end may cause a single one.
const SILENCES: u32 = 2;

impl Supervisor {
    /// Creates the state machine of a daemon whose state is not known yet.
    #[must_use]
    pub fn new(policy: Policy) -> Self {
        Self { policy, state: State::Stopped, wanted: None, clients: Some(0), leased: false, failed: VecDeque::new() }
    }

    /// Returns the state of the daemon.
    #[must_use]
    pub fn state(&self) -> &State {
        &self.state
    }

    /// Returns whether new users may be admitted.
    #[must_use]
    pub fn admits(&self) -> bool {
        matches!(self.state, State::Ready { .. }) && self.wanted()
    }

    /// Returns whether only lease holders keep their access, because the daemon drains.
    #[must_use]
    pub fn serves_leases(&self) -> bool {
        matches!(self.state, State::Draining { .. }) && self.leased
    }

    /// Returns whether users of a found daemon keep their access until its state is known.
    #[must_use]
    pub fn may_go_on(&self) -> bool {
        matches!(self.state, State::Found { .. } | State::Ready { .. }) && self.wanted != Some(false)
    }

    /// Returns the time at which the caller must send [`Event::Tick`]; `None` if no timer runs.
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

    /// Returns the pid of the daemon while it is running.
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

    /// Returns whether the daemon is desired.
    #[must_use]
    pub fn wanted(&self) -> bool {
        self.wanted == Some(true)
    }

    /// Returns whether the caller has reported if the daemon is desired.
    #[must_use]
    pub fn is_told(&self) -> bool {
        self.wanted.is_some()
    }

    /// Returns the number of clients, if known.
    #[must_use]
    pub fn clients(&self) -> Option<usize> {
        self.clients
    }

    /// Returns whether the daemon is known to have no clients.
    fn is_idle(&self) -> bool {
        self.clients == Some(0)
    }

    /// Returns whether the daemon may end: no client is connected, and no user holds a lease.
    fn is_unused(&self) -> bool {
        self.is_idle() && !self.leased
    }

    /// Returns the number of failures within the period of the policy.
    #[must_use]
    pub fn failures(&self) -> usize {
        self.failed.len()
    }

    /// Replaces the policy.
    pub fn set_policy(&mut self, policy: Policy) {
        self.policy = policy;
    }

    /// Processes an event. Returns the effects, in order. After the call, [`Self::admits`] says
    /// whether new users may be admitted.
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
                    Some(pid) if !self.is_unused() && *within != Some(Duration::ZERO) => {
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
                    // The next probe shows whether the daemon serves. The caller reports whether it
                    // is desired.
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
                    State::Draining { .. } if self.is_unused() => self.stop(now),
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
            Event::Leased(leased) => {
                self.leased = *leased;
                match self.state {
                    State::Draining { .. } if self.is_unused() => self.stop(now),
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
            Event::Tick => self.tick(now),
        }
    }

    /// Returns the effects that lead towards the desired state.
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
                if self.is_unused() {
                    return self.stop(now);
                }
                let served = matches!(self.state, State::Ready { .. });
                self.state = State::Draining { pid: *pid, until: None, served };
                Vec::new()
            }
            // The daemon was not stopped yet, so it has served continuously.
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
            // A found daemon is probed for clients before it is stopped.
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

    /// Handles a probe that fails because another process holds the control connection. That
    /// process also blocks new clients, so admission is closed. The daemon itself works.
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

    /// Kills a hung daemon if it has no clients, or if the policy allows killing it with clients.
    /// Waits until the caller has reported whether the daemon is desired.
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
            // The daemon did not answer in time. It is started again only after its process has
            // ended.
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
