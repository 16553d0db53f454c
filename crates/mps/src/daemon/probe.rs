//! Probe how a daemon is, beside its task: one look at a time, which may take as long as a daemon that
//! hangs lets it.
//!
//! ```text
//! due, or asked for ─► a look ─► answered ─► its settings put right, its clients known ─► Answers, Fault
//!                        │    ─► somebody else has its ear ─────────────────────────────► Busy
//!                        │    ─► anything else ─────────────────────────────────────────► Silent
//!                        └ its process ended, or it is told to end: given up
//! ```
//!
//! A daemon that is not asked has the clients that were seen last, as far as they live, and those that the
//! driver shows: what nobody can tell of is not taken for nobody.

use std::sync::Arc;

use crate::protocol::control::ControlError;
use gpush_core::supervisor::{Event, State};
use gpush_host::proc;
use tokio::{task::JoinHandle, time::Instant};

use super::{
    Reply, control_connection,
    health::{self, Health},
    protocol_in_use,
    settings::{self, AppliedSettings},
    task::{DEADLINE, LOOK, SupervisorTask},
};

/// A look that goes on.
#[derive(Debug)]
pub(super) struct Probe {
    answer: JoinHandle<Result<ProbeResult, ControlError>>,
    /// Who waits for it.
    waited: Vec<Reply>,
}

impl Probe {
    /// Who has waited for it.
    pub(super) fn waited(mut self) -> Vec<Reply> {
        std::mem::take(&mut self.waited)
    }
}

/// What a look found.
#[derive(Debug)]
pub(super) struct ProbeResult {
    health: Health,
    put: AppliedSettings,
}

impl Drop for Probe {
    fn drop(&mut self) {
        self.answer.abort();
    }
}

/// What the look that goes on finds.
pub(super) async fn found_by(looking: Option<&mut Probe>) -> Result<ProbeResult, ControlError> {
    match looking {
        Some(looking) => (&mut looking.answer).await.unwrap_or(Err(ControlError::Busy)),
        None => std::future::pending().await,
    }
}

impl SupervisorTask {
    /// Begins a look, or has one follow on that which goes on: it may have seen what is no more.
    pub(super) fn look_for(&mut self, done: Option<Reply>) {
        self.waiting.extend(done);
        if self.looking.is_some() {
            return;
        }
        self.look = None;
        let waited = std::mem::take(&mut self.waiting);
        let (Some(process), Some(control), Some(spec)) = (&self.process, self.control.clone(), &self.spec) else {
            waited.into_iter().for_each(|done| drop(done.send(Ok(()))));
            return;
        };
        let (pid, logs, before) = (process.pid, spec.logs.clone(), self.health.clone());
        let late = self.wanted.as_ref().map_or(DEADLINE, |wanted| wanted.supervision.start);
        let wanted = self.wanted.as_ref().map(|wanted| wanted.policy.settings.clone());
        let witness = Arc::clone(&self.sources.witness);
        let answer = tokio::spawn(async move {
            let mut health = health::ask(&control, pid, &logs, &before, late, DEADLINE).await?;
            if health.is_unsure() {
                health.witnessed(witness().await.as_deref());
            }
            let put = match &wanted {
                Some(wanted) => settings::put(&control, &mut health.has, wanted, DEADLINE).await?,
                // What was set when it was started may have been changed since.
                None => AppliedSettings { in_force: settings::read(&control, DEADLINE).await?, differed: Vec::new() },
            };
            Ok(ProbeResult { health, put })
        });
        self.looking = Some(Probe { answer, waited });
    }

    /// The look that goes on is worth nothing any more.
    pub(super) fn give_up_look(&mut self) {
        self.waiting.extend(self.looking.take().map(Probe::waited).unwrap_or_default());
    }

    /// No look is to be had any more; who has waited for one.
    pub(super) fn no_look(&mut self) -> Vec<Reply> {
        self.give_up_look();
        std::mem::take(&mut self.waiting)
    }

    /// Takes in what a look found.
    pub(super) async fn looked(&mut self, found: Result<ProbeResult, ControlError>) {
        let Some(pid) = self.process.as_ref().map(|process| process.pid) else { return };
        let starting = matches!(self.machine.state(), State::Starting { .. });
        match found {
            Ok(ProbeResult { health, put }) => {
                self.tell_drift(&put, starting);
                let fault = health.fault();
                let inside = health.inside();
                super::pending::log_blocked(&self.target, &self.health, &health);
                if let Some(fell) = health.fell(&self.health) {
                    tracing::warn!(mps = self.target, "{fell}");
                    self.news = Some(fell);
                }
                (self.in_force, self.health) = (Some(put.in_force), health);
                self.answered = Some(Instant::now());
                self.trouble = fault.clone().into_iter().collect();
                self.ear.clear();
                self.note_protocol(pid);
                self.step(Event::Clients(inside)).await;
                self.step(if fault.is_some() { Event::Fault } else { Event::Answers { pid } }).await;
            }
            // It has not come so far yet.
            Err(_) if starting => {
                self.look = Some(Instant::now() + self.pause);
                self.pause = (self.pause * 2).min(LOOK.1);
            }
            Err(error) => {
                self.trouble = vec![health::silence(&error, &self.place, self.spec.as_ref())];
                self.trouble.extend(protocol_in_use::unsupported(pid));
                if proc::is_suspended(pid) {
                    self.trouble.push(format!("it is suspended: `kill -CONT {pid}` has it go on"));
                }
                if let Some(spec) = &self.spec {
                    self.ear = control_connection::holders(
                        &error,
                        pid,
                        &self.place.pipe(spec.tenure),
                        &self.target,
                        &self.ear,
                    )
                    .await;
                }
                // A daemon that is busy says so itself.
                if !self.ear.is_empty() && !matches!(error, ControlError::Busy) {
                    self.trouble.push(control_connection::SOMEBODY.to_owned());
                }
                self.health.clients.retain(|(_, client)| proc::is_alive(*client));
                if let Some(control) = self.control.clone() {
                    self.health.look_at_doors(pid, control.directory()).await;
                }
                let told = (self.sources.witness)().await;
                // Those of the last look are some of them: others may have come since, and the driver alone tells.
                self.health.witnessed(told.as_deref());
                let inside = self.health.inside();
                self.step(Event::Clients(inside)).await;
                self.step(if matches!(error, ControlError::Busy) { Event::Busy } else { Event::Silent }).await;
                self.look = self.look.map(|at| at.min(Instant::now() + self.between_looks().min(DEADLINE)));
            }
        }
    }

    /// Notes settings that somebody else changed: any user who is let in may, before version 550.
    fn tell_drift(&mut self, put: &AppliedSettings, starting: bool) {
        let ours = self.in_force.as_ref() == Some(&put.in_force);
        if put.differed.is_empty() || starting {
            return;
        }
        let differed = put.differed.join(", ");
        if ours {
            tracing::warn!(mps = self.target, "somebody changed it past gpushd: it had {differed}; set back");
            let at = jiff::Timestamp::now().round(jiff::Unit::Second).unwrap_or_default();
            self.drift = Some(format!("somebody changed it past gpushd: it had {differed}; set back at {at}"));
        } else {
            tracing::info!(mps = self.target, "it had {differed}: set");
        }
    }
}
