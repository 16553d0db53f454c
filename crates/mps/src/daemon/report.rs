//! The reports of a supervisor task. The task publishes a report after each step.

use std::{mem::discriminant, time::Duration};

use crate::protocol::control::Protocol;
use gpush_api::{MpsPolicy, MpsUsers};
use gpush_core::{mps::DaemonReport, supervisor::SupervisorState};
use jiff::Timestamp;
use tokio::{sync::watch, time::Instant};

use super::{
    ReceiveReport, Report, ReportChange, log::RotationConfig, protocol_in_use, settings, task::SupervisorTask,
};

/// Size limit of a log in bytes, if the config is not known.
const DEFAULT_LOG_BYTES: u64 = 16 << 20;

impl SupervisorTask {
    /// Updates the description of the protocol in use, but only if the protocol or the driver
    /// version has changed, because a new description requires reading the daemon's program.
    pub(super) fn note_protocol(&mut self, pid: i32) {
        let Some(control) = &self.control else { return };
        let driver = self.desired.as_ref().and_then(|desired| desired.driver.clone());
        let now = (control.protocol(), driver);
        if self.protocol.as_ref().is_none_or(|(of, _)| *of != now) {
            let words = protocol_in_use::describe(control, pid, now.1.as_deref());
            if now.0 != Protocol::Direct {
                tracing::warn!(mps = self.target, "connected: {words}");
            }
            self.protocol = Some((now, words));
        }
    }

    /// Returns the deadline of a drain: `Some(None)` for a drain without a deadline, `None` if the
    /// daemon does not drain.
    pub(super) fn drain_deadline(&self) -> Option<Option<Instant>> {
        if let SupervisorState::Draining { until, .. } = self.supervisor.state() {
            Some(until.map(|until| self.started_at + until))
        } else {
            None
        }
    }

    pub(super) fn report(&self) -> Report {
        let at = |due: Duration| {
            let left = due.saturating_sub(self.now());
            Timestamp::now() + jiff::SignedDuration::try_from(left).unwrap_or_default()
        };
        let pipe = self.spec.as_ref().map(|spec| self.dir.pipe(spec.tenure));
        let daemon = DaemonReport {
            state: self.supervisor.state().clone(),
            since: self.since,
            wanted: self.supervisor.is_desired(),
            policy: self.desired.as_ref().map(|desired| {
                let users = self.users_served();
                MpsPolicy { users, ..desired.policy.clone() }
            }),
            multi_user: self.is_multi_user(),
            pid: self.process.as_ref().map(|process| process.pid),
            in_force: self.effective.clone(),
            servers: self.health.servers.clone(),
            clients: self.health.clients.clone(),
            clients_known: self.supervisor.clients().is_some(),
            waiting: self.health.waiting(),
            serves_leases: self.supervisor.serves_leases(),
            behind: self.leftovers.is_some(),
            until: self
                .drain_deadline()
                .or(self.leftovers.map(|leftovers| leftovers.until))
                .flatten()
                .map(|until| at(until - self.started_at)),
            failures: self.supervisor.failures(),
            next_start: match self.supervisor.state() {
                SupervisorState::BackingOff { until } => Some(at(*until)),
                SupervisorState::Stopped
                | SupervisorState::Starting { .. }
                | SupervisorState::Found { .. }
                | SupervisorState::Ready { .. }
                | SupervisorState::Hung { .. }
                | SupervisorState::Fault { .. }
                | SupervisorState::GivenUp
                | SupervisorState::Draining { .. }
                | SupervisorState::Stopping { .. } => None,
            },
            trouble: self.problems.clone(),
            ear: self.connection_holders.clone(),
            protocol: self.protocol.as_ref().map(|(_, words)| words.clone()),
            findings: self.findings(),
            pipe,
            logs: self.spec.as_ref().map(|spec| spec.logs.clone()),
            user: self.spec.as_ref().and_then(|spec| spec.user),
        };
        Report {
            daemon,
            process: self.process.as_ref().and_then(|process| process.id),
            recorded_servers: self.server_record.servers().clone(),
            answered: self.last_reply,
        }
    }

    fn users_served(&self) -> MpsUsers {
        if self.is_multi_user() { MpsUsers::Many } else { MpsUsers::One }
    }

    /// Returns the findings that users should know about although the daemon may serve.
    fn findings(&self) -> Vec<String> {
        let pending = (self.desired.is_some() && self.is_multi_user() != self.desires_multi_user()).then(|| {
            format!(
                "the value of `users` in the rule has changed: the new value takes effect when the MPS daemon has no \
                lease and no client, or after an administrator runs `gpushctl mps restart {}`",
                self.target
            )
        });
        let drift = self.drift.iter().cloned();
        let own = self.effective.iter().flat_map(|now| settings::own_limits(&self.health.settings, now));
        pending
            .into_iter()
            .chain(drift)
            .chain(own)
            .chain(self.log_rotation.finding())
            .chain(self.health.findings())
            .collect()
    }

    pub(super) fn publish(&mut self, reports: &watch::Sender<Report>, receive: &ReceiveReport) {
        self.rotate_logs();
        // A different daemon in the same state is also a change, because it may serve another user.
        let now = (discriminant(self.supervisor.state()), self.supervisor.pid(), self.leftovers.is_some());
        let other = self.last_published != now;
        let has_news = self.news.is_some() || self.new_kill.is_some();
        if other {
            self.since = Timestamp::now();
            self.last_published = now;
        }
        let seen = self.report();
        let news = (other || has_news).then(|| ReportChange {
            servers: self.news.take(),
            killed: self.new_kill.take(),
            is_restarted: false,
        });
        reports.send_replace(seen.clone());
        receive(&seen, news);
    }

    /// Starts rotating the logs of the daemon, or updates the limits.
    fn rotate_logs(&mut self) {
        let Some(spec) = self.spec.as_ref().filter(|_| self.process.is_some()) else { return };
        let most = self.desired.as_ref().map_or(DEFAULT_LOG_BYTES, |wanted| wanted.log_bytes);
        let (target, dir, user) = (self.target.clone(), spec.logs.clone(), spec.user);
        self.log_rotation.keep(RotationConfig { target, dir, most, user });
    }
}
