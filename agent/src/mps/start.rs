//! How a target comes by its daemon: it goes on with the one that is there, else it waits for what is left
//! of the one before, lays its place, and starts one.
//!
//! ```text
//! agent begins ─► adopt ─► the lock's holder, which the spec describes ─► gone on with, with its pid
//! machine: Start ─► is there? ── no ─► left? ── no ─► clear? ── yes ─► lay ─► started
//!                     └ gone on with     └─────────────┴ Occupied: later     └ can't: Ended, it failed
//! ```

use std::sync::Arc;

use gpush_api::{ApiError, Code};
use gpush_core::supervisor::Event;
use gpush_mps::control::Control;
use tokio::time::Instant;

use super::{
    hands::{self, NotStarted, Process},
    health::Health,
    life::{LOOK, Life},
    place::Spec,
};
use crate::beside::Beside;

impl Life {
    /// Goes on with the daemon that an agent before left running.
    pub(super) async fn adopt(&mut self) {
        let Some(spec) = self.spec.clone() else { return };
        match hands::find(&self.place, spec.tenure) {
            Ok(Some(process)) => {
                let pid = process.pid;
                self.go_on_with(process, spec.clone());
                self.users = self.place.admitted(spec.tenure).unwrap_or_default();
                self.step(Event::Found { pid }).await;
                self.look = Some(Instant::now());
            }
            Ok(None) => {}
            Err(error) => self.trouble = vec![format!("who has its directory can't be told: {error}")],
        }
    }

    /// Starts one, or goes on with the one that is there; else what that is to its machine.
    pub(super) async fn start(&mut self) -> Result<(), Event> {
        (self.in_force, self.pause, self.look, self.drift) = (None, LOOK.0, None, None);
        self.answered = None;
        if self.is_there() {
            return Ok(());
        }
        if self.left().await {
            return Err(Event::Occupied);
        }
        if let Err(error) = self.hands.clear(&self.place).await {
            return Err(self.not_started(error));
        }
        self.health = Health::default();
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
                self.control = Some(self.speak(&spec));
                (self.process, self.spec, self.next_user) = (Some(process), Some(spec), None);
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
        self.go_on_with(process, spec);
        true
    }

    fn go_on_with(&mut self, process: Process, spec: Spec) {
        tracing::info!(mps = self.target, "the MPS daemon {} is there: gone on with", process.pid);
        self.control = Some(self.speak(&spec));
        (self.process, self.spec) = (Some(process), Some(spec));
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
        let (tenure, user) = match (&self.spec, self.next_user) {
            (None, user) => (1, user),
            (Some(before), None) => (before.tenure, before.user),
            // Whoever kept the one before open, or left something in it, finds no successor there.
            (Some(before), Some(user)) => (before.tenure + 1, Some(user)),
        };
        let spec = Spec {
            target: self.target.clone(),
            uuid: self.uuid.clone(),
            gpu_uuid: wanted.gpu_uuid.clone(),
            tenure,
            user,
            control,
            name: wanted.control.clone(),
            servers: wanted.server.parent().map(Into::into).unwrap_or_default(),
            logs: wanted.logs.clone(),
            settings: wanted.policy.settings.clone(),
        };
        // Whoever finds stale sockets runs without MPS: nothing of a dead daemon is left to be found.
        self.place.lay(&spec).map_err(|error| internal("its directory can't be made", &error))?;
        Ok(spec)
    }

    /// How the daemon of a spec is spoken to.
    fn speak(&self, spec: &Spec) -> Arc<Control> {
        Arc::new(Control::of(&self.place.pipe(spec.tenure)).with_front(&spec.name))
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
}
