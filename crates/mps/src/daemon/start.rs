//! How a target comes by its daemon: it goes on with the one that is there, else it waits for what is left
//! of the one before, lays its place, and starts one.
//!
//! ```text
//! agent begins ─► adopt ─► the lock's holder, if it is ours by all that tells it ─► gone on with, with its pid
//! machine: Start ─► is there? ── no ─► left? ── no ─► clear? ── yes ─► lay ─► started
//!                     └ gone on with     └─────────────┴ Occupied: later     └ can't: Ended, it failed
//! ```
//!
//! Somebody else who holds `control_lock` is in nobody's way: the file is made anew before a start, in a
//! directory that is shut then. He is told all the same, as he waited for the daemon to die.

use std::sync::Arc;

use crate::protocol::control::Control;
use gpush_api::{ApiError, Code, MpsUsers};
use gpush_core::supervisor::Event;
use gpush_host::{helper::Helpers, proc};
use tokio::time::Instant;

use super::{
    health::Health,
    launcher::{self, DaemonProcess, LockOwner, StartError},
    target_dir::Spec,
    task::{LOOK, SupervisorTask},
};

/// LogParser to everybody; the log says who it is.
const FOREIGN: &str =
    "a process that is not its daemon holds control_lock in its directory, as if it were: it is not taken for one";

impl SupervisorTask {
    /// Goes on with the daemon that an agent before left running.
    pub(super) async fn adopt(&mut self) {
        let Some(spec) = self.spec.clone() else { return };
        match launcher::find(&self.place, &spec) {
            Ok(LockOwner::Daemon(process)) => {
                let pid = process.pid;
                self.mend(&spec, pid);
                self.go_on_with(process, spec.clone());
                self.users = self.place.admitted(spec.tenure).unwrap_or_default();
                // The driver may take long to tell what is wanted: programs that are started meanwhile would run past
                // a daemon that serves.
                self.as_found = self.users == (self.sources.on_record)();
                self.step(Event::Found { pid }).await;
                self.look = Some(Instant::now());
            }
            Ok(LockOwner::Nobody) => {}
            Ok(LockOwner::Foreign(foreign)) => self.tell_foreign(foreign),
            Err(error) => self.trouble = vec![format!("who has its directory can't be told: {error}")],
        }
    }

    /// Starts one, or goes on with the one that is there; else what that is to its machine.
    pub(super) async fn start(&mut self) -> Result<(), Event> {
        (self.in_force, self.pause, self.look, self.drift) = (None, LOOK.0, None, None);
        self.behind = None;
        if self.is_there() {
            self.answered = None;
            return Ok(());
        }
        if let Some(why) = (self.sources.hands_off)() {
            return Err(self.not_started(StartError::Later(why)));
        }
        let foreign = self.trouble.iter().any(|told| told == FOREIGN);
        // What the one before said last, and when, tells of those whom it left behind.
        if self.left().await {
            self.trouble.extend(foreign.then(|| FOREIGN.to_owned()));
            return Err(Event::Occupied);
        }
        self.answered = None;
        if let Err(error) = self.launcher.check_free(&self.place).await {
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
        match self.launcher.start(&self.place).await {
            Ok(process) => {
                tracing::info!(mps = self.target, "the MPS daemon {} was started", process.pid);
                self.control = Some(self.speak(&spec, process.pid));
                (self.process, self.spec, self.next_user) = (Some(process), Some(spec), None);
                Ok(())
            }
            Err(error) => Err(self.not_started(error)),
        }
    }

    /// Goes on with a daemon that came up unasked, or after nobody waited for it any more.
    fn is_there(&mut self) -> bool {
        let tenure = self.spec.as_ref().map(|spec| spec.tenure);
        let Some(spec) = self.place.known().filter(|spec| spec.uuid == self.uuid && Some(spec.tenure) == tenure) else {
            return false;
        };
        match launcher::find(&self.place, &spec) {
            Ok(LockOwner::Daemon(process)) => {
                self.mend(&spec, process.pid);
                self.go_on_with(process, spec);
                true
            }
            Ok(LockOwner::Foreign(foreign)) => {
                self.tell_foreign(foreign);
                false
            }
            Ok(LockOwner::Nobody) | Err(_) => false,
        }
    }

    /// Writes down again what was had from the daemon itself.
    fn mend(&self, spec: &Spec, pid: i32) {
        if self.place.spec().is_some() {
            return;
        }
        tracing::warn!(mps = self.target, "its spec.json can't be read: made anew by what its daemon {pid} has");
        if let Err(error) = self.place.note(spec) {
            tracing::error!(mps = self.target, "its spec.json can't be written: {error}");
        }
    }

    /// Tells, once, that somebody has the daemon's lock.
    fn tell_foreign(&mut self, pid: Option<i32>) {
        if self.trouble.iter().any(|told| told == FOREIGN) {
            return;
        }
        self.trouble.push(FOREIGN.to_owned());
        let (uid, command) = (pid.and_then(proc::owner), pid.map(proc::name));
        tracing::warn!(mps = self.target, pid, uid, command, "{FOREIGN}");
    }

    fn go_on_with(&mut self, process: DaemonProcess, spec: Spec) {
        tracing::info!(mps = self.target, "the MPS daemon {} is there: gone on with", process.pid);
        self.control = Some(self.speak(&spec, process.pid));
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
        let control = Helpers::may_run(&wanted.control.to_string_lossy())?;
        Helpers::may_run(&wanted.server.to_string_lossy())?;
        // Who was to be let in before there was a directory has not been noted as its user.
        let many = wanted.policy.users == MpsUsers::Many;
        let first = self.users.first().copied().filter(|_| !many);
        let (tenure, user) = match (&self.spec, self.next_user) {
            (None, user) => (1, user.or(first)),
            (Some(before), None) => (before.tenure, before.user.or(first)),
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
    fn speak(&self, spec: &Spec, pid: i32) -> Arc<Control> {
        Arc::new(Control::of(&self.place.pipe(spec.tenure)).only(pid).with_front(&spec.name))
    }

    fn not_started(&mut self, error: StartError) -> Event {
        let (why, event) = match error {
            StartError::Later(why) => (why, Event::Occupied),
            StartError::Failed(why) => (format!("it can't be started: {why}"), Event::Ended),
        };
        // The same is tried again and again, and told once.
        if self.trouble.first() != Some(&why) {
            if event == Event::Occupied {
                tracing::info!(mps = self.target, "{why}");
            } else {
                tracing::error!(mps = self.target, "{why}");
            }
        }
        self.trouble = vec![why];
        event
    }
}
