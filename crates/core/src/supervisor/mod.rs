//! Supervisor of one MPS control daemon, as a pure state machine: events in, effects out. The
//! caller executes the effects, through a systemd unit or a child process.
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
//! A lease keeps a daemon in use, as a client does. A program of the lease may connect later.
//! Without the daemon, that program would run without MPS, and no message would report this. So a
//! daemon drains until its leases have ended, and the lease holders keep their access.
//!
//! New users are admitted only in `Ready`. In `Found`, users who were admitted before the restart
//! keep their access.
//!
//! The supervisor does not end three kinds of daemons on its own:
//!
//! - A hung daemon with clients, unless the policy has `restart_hung_with_clients`: the clients
//!   still compute, and a restart would end them.
//! - A daemon whose server had a fault. Such a daemon recovers when the affected clients have
//!   ended.
//! - A daemon whose control connection is held by another process, such as an administrator's
//!   front-end.
//!
//! A daemon that is running when gpushd starts is adopted with its pid, and no second daemon is
//! started. The machine then takes no action until the caller reports whether the daemon is
//! desired.

mod queries;
mod types;

use std::{collections::VecDeque, time::Duration};

pub use self::types::{Instant, KillReason, SupervisorEffect, SupervisorEvent, SupervisorPolicy, SupervisorState};

/// The state machine of one daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Supervisor {
    policy: SupervisorPolicy,
    state: SupervisorState,
    /// Whether the daemon is desired; `None` until the caller has reported this.
    wanted: Option<bool>,
    /// Number of clients; `None` if the daemon was found or does not answer, and the driver does
    /// not list the clients.
    clients: Option<usize>,
    /// Whether users hold leases on the daemon's target.
    leased: bool,
    /// Times of the failures within the period of the policy.
    failed: VecDeque<Instant>,
}

/// Number of consecutive probes without an answer after which a daemon is considered hung. An open
/// front-end may cause a single probe without an answer.
const SILENCES: u32 = 2;

impl Supervisor {
    /// Creates the state machine of a daemon whose state is not known yet.
    #[must_use]
    pub fn new(policy: SupervisorPolicy) -> Self {
        Self {
            policy,
            state: SupervisorState::Stopped,
            wanted: None,
            clients: Some(0),
            leased: false,
            failed: VecDeque::new(),
        }
    }

    /// Replaces the policy.
    pub fn set_policy(&mut self, policy: SupervisorPolicy) {
        self.policy = policy;
    }

    /// Processes an event. Returns the effects, in order. After the call, [`Self::admits`] says
    /// whether new users may be admitted.
    pub fn step(&mut self, event: &SupervisorEvent, now: Instant) -> Vec<SupervisorEffect> {
        match event {
            SupervisorEvent::Wanted(wanted) => {
                self.wanted = Some(*wanted);
                self.advance(now)
            }
            SupervisorEvent::ForceStart => {
                self.wanted = Some(true);
                match self.state {
                    SupervisorState::GivenUp | SupervisorState::BackingOff { .. } => {
                        self.failed.clear();
                        self.state = SupervisorState::Stopped;
                    }
                    SupervisorState::Stopped
                    | SupervisorState::Starting { .. }
                    | SupervisorState::Found { .. }
                    | SupervisorState::Ready { .. }
                    | SupervisorState::Hung { .. }
                    | SupervisorState::Fault { .. }
                    | SupervisorState::Draining { .. }
                    | SupervisorState::Stopping { .. } => {}
                }
                self.advance(now)
            }
            SupervisorEvent::Leave(within) => {
                self.wanted = Some(false);
                let served = matches!(
                    self.state,
                    SupervisorState::Ready { .. } | SupervisorState::Draining { served: true, .. }
                );
                match self.pid() {
                    Some(pid) if !self.is_unused() && *within != Some(Duration::ZERO) => {
                        self.state =
                            SupervisorState::Draining { pid, until: within.map(|within| now + within), served };
                        Vec::new()
                    }
                    Some(_) => self.stop(now),
                    None => self.advance(now),
                }
            }
            SupervisorEvent::Restart => {
                self.wanted = Some(true);
                if self.pid().is_some() { self.stop(now) } else { self.advance(now) }
            }
            SupervisorEvent::Found { pid } => {
                match self.state {
                    // The next probe shows whether the daemon serves. The caller reports whether
                    // the daemon is desired.
                    SupervisorState::Stopped | SupervisorState::BackingOff { .. } | SupervisorState::GivenUp => {
                        (self.state, self.clients) = (SupervisorState::Found { pid: *pid }, None);
                    }
                    SupervisorState::Starting { .. }
                    | SupervisorState::Found { .. }
                    | SupervisorState::Ready { .. }
                    | SupervisorState::Hung { .. }
                    | SupervisorState::Fault { .. }
                    | SupervisorState::Draining { .. }
                    | SupervisorState::Stopping { .. } => {}
                }
                Vec::new()
            }
            SupervisorEvent::Occupied => {
                if let SupervisorState::Starting { .. } = self.state {
                    self.state = SupervisorState::BackingOff { until: now + self.policy.pause };
                }
                self.advance(now)
            }
            SupervisorEvent::Answers { pid } => {
                match self.state {
                    SupervisorState::Starting { .. }
                    | SupervisorState::Found { .. }
                    | SupervisorState::Ready { .. }
                    | SupervisorState::Hung { .. }
                    | SupervisorState::Fault { .. } => {
                        self.state = SupervisorState::Ready { pid: *pid, silences: 0 };
                    }
                    SupervisorState::Stopped
                    | SupervisorState::BackingOff { .. }
                    | SupervisorState::GivenUp
                    | SupervisorState::Draining { .. }
                    | SupervisorState::Stopping { .. } => {}
                }
                self.advance(now)
            }
            SupervisorEvent::Fault => {
                match self.state {
                    SupervisorState::Found { pid }
                    | SupervisorState::Ready { pid, .. }
                    | SupervisorState::Hung { pid, .. } => {
                        self.state = SupervisorState::Fault { pid };
                    }
                    SupervisorState::Draining { pid, until, .. } => {
                        self.state = SupervisorState::Draining { pid, until, served: false };
                    }
                    SupervisorState::Stopped
                    | SupervisorState::Starting { .. }
                    | SupervisorState::Fault { .. }
                    | SupervisorState::BackingOff { .. }
                    | SupervisorState::GivenUp
                    | SupervisorState::Stopping { .. } => {}
                }
                self.advance(now)
            }
            SupervisorEvent::Silent => self.silent(now),
            SupervisorEvent::Busy => self.busy(),
            SupervisorEvent::Ended => self.ended(now),
            SupervisorEvent::Clients(clients) => {
                self.clients = *clients;
                match self.state {
                    SupervisorState::Draining { .. } if self.is_unused() => self.stop(now),
                    SupervisorState::Hung { .. } => self.hung(now),
                    SupervisorState::Stopped
                    | SupervisorState::Starting { .. }
                    | SupervisorState::Found { .. }
                    | SupervisorState::Ready { .. }
                    | SupervisorState::Fault { .. }
                    | SupervisorState::BackingOff { .. }
                    | SupervisorState::GivenUp
                    | SupervisorState::Draining { .. }
                    | SupervisorState::Stopping { .. } => Vec::new(),
                }
            }
            SupervisorEvent::Leased(leased) => {
                self.leased = *leased;
                match self.state {
                    SupervisorState::Draining { .. } if self.is_unused() => self.stop(now),
                    SupervisorState::Stopped
                    | SupervisorState::Starting { .. }
                    | SupervisorState::Found { .. }
                    | SupervisorState::Ready { .. }
                    | SupervisorState::Hung { .. }
                    | SupervisorState::Fault { .. }
                    | SupervisorState::BackingOff { .. }
                    | SupervisorState::GivenUp
                    | SupervisorState::Draining { .. }
                    | SupervisorState::Stopping { .. } => Vec::new(),
                }
            }
            SupervisorEvent::Tick => self.tick(now),
        }
    }

    /// Returns the effects that lead towards the desired state.
    fn advance(&mut self, now: Instant) -> Vec<SupervisorEffect> {
        let Some(wanted) = self.wanted else { return Vec::new() };
        match (wanted, &self.state) {
            (true, SupervisorState::Stopped) => self.start(now),
            (false, SupervisorState::Starting { .. }) => self.stop(now),
            (false, SupervisorState::BackingOff { .. } | SupervisorState::GivenUp) => {
                self.state = SupervisorState::Stopped;
                Vec::new()
            }
            (false, SupervisorState::Ready { pid, .. } | SupervisorState::Hung { pid, .. } | SupervisorState::Fault { pid }) => {
                if self.is_unused() {
                    return self.stop(now);
                }
                let served = matches!(self.state, SupervisorState::Ready { .. });
                self.state = SupervisorState::Draining { pid: *pid, until: None, served };
                Vec::new()
            }
            // The daemon was not stopped yet and still serves, so it needs no probe.
            (true, SupervisorState::Draining { pid, served: true, .. }) => {
                self.state = SupervisorState::Ready { pid: *pid, silences: 0 };
                Vec::new()
            }
            (true, SupervisorState::Draining { pid, served: false, .. }) => {
                self.state = SupervisorState::Hung { pid: *pid, silences: 0 };
                Vec::new()
            }
            (
                true,
                SupervisorState::Starting { .. }
                | SupervisorState::Found { .. }
                | SupervisorState::Ready { .. }
                | SupervisorState::Hung { .. }
                | SupervisorState::Fault { .. }
                | SupervisorState::BackingOff { .. }
                | SupervisorState::GivenUp
                | SupervisorState::Stopping { .. },
            )
            // A found daemon does not stop yet, because it is first probed for clients.
            | (false, SupervisorState::Stopped | SupervisorState::Found { .. } | SupervisorState::Draining { .. } | SupervisorState::Stopping { .. }) => {
                Vec::new()
            }
        }
    }

    fn start(&mut self, now: Instant) -> Vec<SupervisorEffect> {
        self.clients = Some(0);
        self.state = SupervisorState::Starting { until: now + self.policy.start };
        vec![SupervisorEffect::Start]
    }

    fn stop(&mut self, now: Instant) -> Vec<SupervisorEffect> {
        self.state = SupervisorState::Stopping { until: now + self.policy.stop, killed: false, failed: false };
        vec![SupervisorEffect::Quit]
    }

    fn silent(&mut self, now: Instant) -> Vec<SupervisorEffect> {
        match self.state {
            SupervisorState::Ready { pid, silences } if silences + 1 < SILENCES => {
                self.state = SupervisorState::Ready { pid, silences: silences + 1 };
                Vec::new()
            }
            SupervisorState::Ready { pid, .. } => {
                self.state = SupervisorState::Hung { pid, silences: SILENCES };
                let mut effects = self.hung(now);
                if effects.is_empty() {
                    effects.push(SupervisorEffect::ReportHung);
                }
                effects
            }
            SupervisorState::Found { pid } | SupervisorState::Fault { pid } => {
                self.state = SupervisorState::Hung { pid, silences: SILENCES };
                self.hung(now)
            }
            SupervisorState::Hung { pid, silences } => {
                self.state = SupervisorState::Hung { pid, silences: silences.saturating_add(1) };
                self.hung(now)
            }
            SupervisorState::Stopped
            | SupervisorState::Starting { .. }
            | SupervisorState::BackingOff { .. }
            | SupervisorState::GivenUp
            | SupervisorState::Draining { .. }
            | SupervisorState::Stopping { .. } => Vec::new(),
        }
    }

    /// Handles a probe that fails because another process holds the control connection. That
    /// process also blocks new clients, so admission is closed. The daemon itself works.
    fn busy(&mut self) -> Vec<SupervisorEffect> {
        match self.state {
            SupervisorState::Ready { pid, silences } if silences + 1 < SILENCES => {
                self.state = SupervisorState::Ready { pid, silences: silences + 1 };
            }
            SupervisorState::Found { pid }
            | SupervisorState::Ready { pid, .. }
            | SupervisorState::Hung { pid, .. }
            | SupervisorState::Fault { pid } => {
                self.state = SupervisorState::Hung { pid, silences: 0 };
            }
            SupervisorState::Stopped
            | SupervisorState::Starting { .. }
            | SupervisorState::BackingOff { .. }
            | SupervisorState::GivenUp
            | SupervisorState::Draining { .. }
            | SupervisorState::Stopping { .. } => {}
        }
        Vec::new()
    }

    /// Kills a hung daemon if it has no clients, or if the policy allows killing it with clients.
    /// Waits until the caller has reported whether the daemon is desired.
    fn hung(&mut self, now: Instant) -> Vec<SupervisorEffect> {
        let is_silent = matches!(self.state, SupervisorState::Hung { silences, .. } if silences >= SILENCES);
        let is_spared = !self.is_idle() && !self.policy.restart_hung_with_clients;
        if !is_silent || is_spared || self.wanted.is_none() {
            return Vec::new();
        }
        self.kill_failed(KillReason::Hung, now)
    }

    fn kill_failed(&mut self, why: KillReason, now: Instant) -> Vec<SupervisorEffect> {
        self.state = SupervisorState::Stopping { until: now + self.policy.stop, killed: true, failed: true };
        vec![SupervisorEffect::Kill(why)]
    }

    fn ended(&mut self, now: Instant) -> Vec<SupervisorEffect> {
        self.clients = Some(0);
        match self.state {
            SupervisorState::Starting { .. }
            | SupervisorState::Found { .. }
            | SupervisorState::Ready { .. }
            | SupervisorState::Hung { .. }
            | SupervisorState::Fault { .. }
            | SupervisorState::Stopping { failed: true, .. } => self.failed(now),
            SupervisorState::Draining { .. } | SupervisorState::Stopping { failed: false, .. } => {
                self.state = SupervisorState::Stopped;
                self.advance(now)
            }
            SupervisorState::Stopped | SupervisorState::BackingOff { .. } | SupervisorState::GivenUp => Vec::new(),
        }
    }

    fn failed(&mut self, now: Instant) -> Vec<SupervisorEffect> {
        if !self.is_desired() {
            self.state = SupervisorState::Stopped;
            return Vec::new();
        }
        while self.failed.front().is_some_and(|at| *at + self.policy.within <= now) {
            self.failed.pop_front();
        }
        self.failed.push_back(now);
        let count = self.failed.len();
        if count >= self.policy.failures {
            self.state = SupervisorState::GivenUp;
            return vec![SupervisorEffect::ReportGivenUp];
        }
        let doubled = |times: usize| u32::try_from(times).map_or(u32::MAX, |times| 2_u32.saturating_pow(times));
        let pause = match count {
            0 | 1 => Duration::ZERO,
            more => self.policy.pause.saturating_mul(doubled(more - 2)).min(self.policy.longest_pause),
        };
        self.state = SupervisorState::BackingOff { until: now + pause };
        Vec::new()
    }

    fn tick(&mut self, now: Instant) -> Vec<SupervisorEffect> {
        match self.state {
            // The daemon did not answer in time. It is started again only after its process has
            // ended.
            SupervisorState::Starting { until } if until <= now => self.kill_failed(KillReason::NotStarted, now),
            SupervisorState::BackingOff { until } if until <= now => self.start(now),
            SupervisorState::Draining { until: Some(until), .. } if until <= now => self.stop(now),
            SupervisorState::Stopping { until, killed: false, failed } if until <= now => {
                self.state = SupervisorState::Stopping { until, killed: true, failed };
                vec![SupervisorEffect::Kill(KillReason::NotStopped)]
            }
            SupervisorState::Stopped
            | SupervisorState::Starting { .. }
            | SupervisorState::Found { .. }
            | SupervisorState::Ready { .. }
            | SupervisorState::Hung { .. }
            | SupervisorState::Fault { .. }
            | SupervisorState::BackingOff { .. }
            | SupervisorState::GivenUp
            | SupervisorState::Draining { .. }
            | SupervisorState::Stopping { .. } => Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests;
