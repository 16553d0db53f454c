//! How a target gets its daemon. gpushd adopts a running daemon. If there is none, gpushd waits for
//! leftovers of the previous daemon, prepares the directory and starts a new daemon.
//!
//! ```text
//! gpushd starts ─► adopt ─► the process that holds the lock, if everything identifies it as the daemon
//! effect Start  ─► runs? ── no ─► leftovers? ── no ─► free? ── yes ─► prepare the directory ─► start
//!                    └ adopt        └──────────────────┴ Occupied: later     └ fails: Ended, a failure
//! ```
//!
//! A process that waited for `control_lock` gets this lock when the daemon ends. Such a process does not prevent a
//! start: before the start, gpushd recreates the file while users have no access to the directory. gpushd reports such
//! a process.

use std::sync::Arc;

use crate::protocol::control::Control;
use gpush_api::{ApiError, Code, MpsUsers};
use gpush_core::supervisor::SupervisorEvent;
use gpush_host::{helper::Helpers, proc};
use tokio::time::Instant;

use super::{
    health::Health,
    launcher::{DaemonProcess, LockOwner, StartError},
    target_dir::Spec,
    task::{START_INTERVAL, SupervisorTask},
};

/// The message to all callers; only gpushd's log names the process.
const FOREIGN: &str = "a process that is not the MPS daemon holds `control_lock` in the pipe directory: gpushd does \
not adopt this process";

impl SupervisorTask {
    /// Adopts the daemon that a previous gpushd left running.
    pub(super) async fn adopt(&mut self) {
        let Some(spec) = self.spec.clone() else { return };
        match self.launcher.find(&self.dir, &spec) {
            Ok(LockOwner::Daemon(process)) => {
                let pid = process.pid;
                self.rewrite_spec(&spec, pid);
                self.take_over(process, spec.clone());
                self.users = self.dir.users_with_access(spec.tenure).unwrap_or_default();
                // If exactly the recorded users have access, keep their access until gpushd knows
                // the desired state. If the driver is slow, this takes long, and new programs
                // without access would run without MPS.
                self.keeps_found_access = self.users == (self.sources.recorded_users)();
                self.step(SupervisorEvent::Found { pid }).await;
                self.next_probe = Some(Instant::now());
            }
            Ok(LockOwner::Free) => {}
            Ok(LockOwner::Foreign(foreign)) => self.report_foreign(foreign),
            Err(error) => {
                self.problems = vec![format!("it is not known which process uses the pipe directory: {error}")];
            }
        }
    }

    /// Starts a daemon, or adopts a running one. An error is returned as the event for the supervisor.
    pub(super) async fn start(&mut self) -> Result<(), SupervisorEvent> {
        (self.effective, self.start_interval, self.next_probe, self.drift) = (None, START_INTERVAL.0, None, None);
        self.leftovers = None;
        if self.adopt_running() {
            self.last_reply = None;
            return Ok(());
        }
        if let Some(why) = (self.sources.start_blocked)() {
            return Err(self.record_start_error(StartError::Later(why)));
        }
        let foreign = self.problems.iter().any(|reported| reported == FOREIGN);
        // The check identifies the previous daemon's clients by `last_reply`, so reset that field
        // only after the check.
        if self.check_leftovers().await {
            self.problems.extend(foreign.then(|| FOREIGN.to_owned()));
            return Err(SupervisorEvent::Occupied);
        }
        self.last_reply = None;
        if let Err(error) = self.launcher.check_free(&self.dir).await {
            return Err(self.record_start_error(error));
        }
        self.health = Health::default();
        let spec = match self.prepare_dir() {
            Ok(spec) => spec,
            Err(error) => {
                tracing::error!(mps = self.target, "the MPS daemon can't be started: {error}");
                self.problems = error.sentences().into_iter().map(str::to_owned).collect();
                return Err(SupervisorEvent::Ended);
            }
        };
        match self.launcher.start(&self.dir).await {
            Ok(process) => {
                tracing::info!(mps = self.target, "started the MPS daemon (pid {})", process.pid);
                self.control = Some(self.control_of(&spec, process.pid));
                (self.process, self.spec, self.next_user) = (Some(process), Some(spec), None);
                Ok(())
            }
            Err(error) => Err(self.record_start_error(error)),
        }
    }

    /// Adopts a daemon that another process started, or a daemon whose start took longer than the deadline.
    fn adopt_running(&mut self) -> bool {
        let tenure = self.spec.as_ref().map(|spec| spec.tenure);
        let Some(spec) = self.dir.known_spec().filter(|spec| spec.uuid == self.uuid && Some(spec.tenure) == tenure)
        else {
            return false;
        };
        match self.launcher.find(&self.dir, &spec) {
            Ok(LockOwner::Daemon(process)) => {
                self.rewrite_spec(&spec, process.pid);
                self.take_over(process, spec);
                true
            }
            Ok(LockOwner::Foreign(foreign)) => {
                self.report_foreign(foreign);
                false
            }
            Ok(LockOwner::Free) | Err(_) => false,
        }
    }

    /// Writes `spec.json` again if it could not be read and the spec was recovered from the daemon.
    fn rewrite_spec(&self, spec: &Spec, pid: i32) {
        if self.dir.spec().is_some() {
            return;
        }
        tracing::warn!(
            mps = self.target,
            "cannot read spec.json: gpushd wrote the file again from the settings of the running MPS daemon (pid {pid})"
        );
        if let Err(error) = self.dir.write_spec(spec) {
            tracing::error!(mps = self.target, "cannot write spec.json: {error}");
        }
    }

    /// Reports once that another process holds the daemon's lock.
    fn report_foreign(&mut self, pid: Option<i32>) {
        if self.problems.iter().any(|reported| reported == FOREIGN) {
            return;
        }
        self.problems.push(FOREIGN.to_owned());
        let (uid, command) = (pid.and_then(proc::owner), pid.map(proc::name));
        tracing::warn!(mps = self.target, pid, uid, command, "{FOREIGN}");
    }

    fn take_over(&mut self, process: DaemonProcess, spec: Spec) {
        tracing::info!(mps = self.target, "adopted the MPS daemon (pid {})", process.pid);
        self.control = Some(self.control_of(&spec, process.pid));
        (self.process, self.spec) = (Some(process), Some(spec));
    }

    /// Prepares the directory for a start.
    fn prepare_dir(&self) -> Result<Spec, ApiError> {
        let Some(wanted) = &self.desired else {
            return Err(ApiError::new(Code::Internal, "the desired settings of the MPS daemon are not known"));
        };
        let internal =
            |what: &str, error: &dyn std::fmt::Display| ApiError::new(Code::Internal, what).cause(error.to_string());
        self.dir.check_path_length()?;
        let control = Helpers::may_run(&wanted.control.to_string_lossy())?;
        Helpers::may_run(&wanted.server.to_string_lossy())?;
        // The previous spec may name no user, because a user may get a lease before the directory exists. In this case,
        // use the first of the users with a lease.
        let multi_user = wanted.policy.users == MpsUsers::Many;
        let first = self.users.first().copied().filter(|_| !multi_user);
        let (tenure, user) = match (&self.spec, self.next_user.filter(|_| !multi_user)) {
            (None, user) => (1, user.or(first)),
            // The previous directory and the new one differ: one is for several users, and the other is for one user.
            (Some(before), user) if before.multi_user != multi_user => (before.tenure + 1, user.or(first)),
            (Some(before), None) => (before.tenure, before.user.or(first)),
            // Use a new directory: a process of the old user may still have the old directory open,
            // or may have left files in it.
            (Some(before), Some(user)) => (before.tenure + 1, Some(user)),
        };
        let spec = Spec {
            target: self.target.clone(),
            uuid: self.uuid.clone(),
            gpu_uuid: wanted.gpu_uuid.clone(),
            tenure,
            user,
            multi_user,
            control,
            name: wanted.control.clone(),
            servers: wanted.server.parent().map(Into::into).unwrap_or_default(),
            logs: wanted.logs.clone(),
            settings: wanted.policy.settings.clone(),
        };
        // `create` removes stale sockets, because a client that finds a stale socket runs without
        // MPS.
        self.dir.create(&spec).map_err(|error| internal("cannot create the directory of the MPS daemon", &error))?;
        Ok(spec)
    }

    /// Returns a control connection to the daemon with this spec.
    fn control_of(&self, spec: &Spec, pid: i32) -> Arc<Control> {
        let control = Control::of(&self.dir.pipe(spec.tenure)).with_expected_pid(pid).with_front(&spec.name);
        #[cfg(any(test, feature = "scripted"))]
        let control = control.with_script(self.launcher.script());
        Arc::new(control)
    }

    fn record_start_error(&mut self, error: StartError) -> SupervisorEvent {
        let (why, event) = match error {
            StartError::Later(why) => (why, SupervisorEvent::Occupied),
            StartError::Failed(why) => (format!("the MPS daemon can't be started: {why}"), SupervisorEvent::Ended),
        };
        // gpushd retries, but logs each reason only once.
        if self.problems.first() != Some(&why) {
            if event == SupervisorEvent::Occupied {
                tracing::info!(mps = self.target, "{why}");
            } else {
                tracing::error!(mps = self.target, "{why}");
            }
        }
        self.problems = vec![why];
        event
    }
}
