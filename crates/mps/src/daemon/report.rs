//! What the rest of the agent is shown of a daemon's life: after each turn as it is then, and as an event when it is
//! another.

use std::{mem::discriminant, time::Duration};

use crate::protocol::control::Protocol;
use gpush_core::supervisor::State;
use jiff::Timestamp;
use tokio::{sync::watch, time::Instant};

use super::{Report, protocol_in_use, settings, task::SupervisorTask};

impl SupervisorTask {
    /// AppliedSettings into words again only when it is another: for that its program is read.
    pub(super) fn note_protocol(&mut self, pid: i32) {
        let Some(control) = &self.control else { return };
        let driver = self.wanted.as_ref().and_then(|wanted| wanted.driver.clone());
        let now = (control.protocol(), driver);
        if self.protocol.as_ref().is_none_or(|(of, _)| *of != now) {
            let words = protocol_in_use::words(control, pid, now.1.as_deref());
            if now.0 != Protocol::Direct {
                tracing::warn!(mps = self.target, "it is spoken to {words}");
            }
            self.protocol = Some((now, words));
        }
    }

    /// Until when its clients may finish, where it drains: or as long as they want.
    pub(super) fn given(&self) -> Option<Option<Instant>> {
        if let State::Draining { until, .. } = self.machine.state() {
            Some(until.map(|until| self.born + until))
        } else {
            None
        }
    }

    pub(super) fn seen(&self) -> Report {
        let at = |due: Duration| {
            let left = due.saturating_sub(self.now());
            Timestamp::now() + jiff::SignedDuration::try_from(left).unwrap_or_default()
        };
        let pipe = self.spec.as_ref().map(|spec| self.place.pipe(spec.tenure));
        Report {
            state: self.machine.state().clone(),
            since: self.since,
            wanted: self.machine.wanted(),
            policy: self.wanted.as_ref().map(|wanted| wanted.policy.clone()),
            pid: self.process.as_ref().map(|process| process.pid),
            in_force: self.in_force.clone(),
            servers: self.health.servers.clone(),
            clients: self.health.clients.clone(),
            clients_known: self.machine.clients().is_some(),
            waiting: self.health.waiting(),
            behind: self.behind.is_some(),
            until: self.given().or(self.behind.map(|behind| behind.until)).flatten().map(|until| at(until - self.born)),
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
            news: None,
            ear: self.ear.clone(),
            protocol: self.protocol.as_ref().map(|(_, words)| words.clone()),
            findings: self.findings(),
            pipe,
            logs: self.spec.as_ref().map(|spec| spec.logs.clone()),
            user: self.spec.as_ref().and_then(|spec| spec.user),
            answered: self.answered,
        }
    }

    /// What one should know of it although it may serve.
    fn findings(&self) -> Vec<String> {
        let drift = self.drift.iter().cloned();
        let own = self.in_force.iter().flat_map(|now| settings::own_limits(&self.health.has, now));
        drift.chain(own).chain(self.keeper.told()).chain(self.health.told()).collect()
    }

    pub(super) fn tell(&mut self, publish: &watch::Sender<Report>, changed: &impl Fn(&Report)) {
        self.keep_logs();
        // Another daemon in the same state is a change too: it was handed over to another user.
        let now = (discriminant(self.machine.state()), self.machine.pid(), self.behind.is_some());
        let other = self.last != now;
        let has_news = self.news.is_some();
        if other {
            self.since = Timestamp::now();
            self.last = now;
        }
        let mut seen = self.seen();
        // The change is stored before its event is sent.
        publish.send_replace(seen.clone());
        if other || has_news {
            seen.news = self.news.take();
            changed(&seen);
        }
    }
}
