//! The systemd launcher: daemons are instances of `gpushd-mps@.service`.
//!
//! ```text
//!              ResetFailed                 StartUnit              pidfd: ended
//! failed ──────────────────► inactive ───────────────► active ───────────────────► inactive, failed
//!                                                                 │ servers live          ▲
//!                                                                 └► deactivating ────────┘ systemd kills them
//! ```
//!
//! Each daemon has its own cgroup, and survives restarts and upgrades of gpushd. When a daemon
//! ends, systemd kills its remaining processes. systemd starts a daemon only on request. gpushd
//! notices a `systemctl stop` because the process ends. If the daemon ended without an error,
//! systemd may already have unloaded the unit, so the exit status may be unknown.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use gpush_host::systemd::{Error, Manager, State};
use tokio::time::sleep;

use super::{DaemonProcess, StartError};
use crate::daemon::target_dir::TargetDir;

/// How long systemd may take to notice the end of a process, and to clean up.
const CLEANUP: Duration = Duration::from_secs(2);

/// Interval between two checks of an orphan.
const ORPHAN_CHECK: Duration = Duration::from_secs(30);

/// The signal that `systemctl stop` sends: `SIGTERM`.
const STOP: i32 = 15;

/// `CLD_EXITED` of `waitid(2)`. With this code, the status is an exit status. With other codes, it is a signal number.
const EXITED: i32 = 1;

/// Instances of the template unit.
#[derive(Debug, Clone, Default)]
pub(super) struct Units(Arc<Manager>);

impl Units {
    /// Checks that the unit is inactive. Resets a failed unit.
    pub(super) async fn check_free(&self, place: &TargetDir) -> Result<(), StartError> {
        let unit = name(place);
        let state = self.0.state(&unit).await.map_err(|error| not_started(&error))?;
        match state.active.as_str() {
            "inactive" => Ok(()),
            "failed" => self.0.reset_failed(&unit).await.map_err(|error| not_started(&error)),
            "deactivating" => Err(StartError::locked()),
            // The unit is still starting. A previous gpushd may have requested the start just
            // before that gpushd ended.
            "activating" => Err(StartError::Later(format!("systemd has not started {unit} yet"))),
            active => Err(StartError::Later(format!(
                "the unit {unit} is {active}, but no daemon uses its directory; to end the processes of the unit: \
                `systemctl stop {unit}`"
            ))),
        }
    }

    /// Starts the unit. The main process of the unit is the daemon, or becomes the daemon.
    pub(super) async fn start(&self, place: &TargetDir) -> Result<DaemonProcess, StartError> {
        let unit = name(place);
        match self.0.start(&unit).await {
            Ok(pid) => {
                let pid = i32::try_from(pid).unwrap_or_default();
                match DaemonProcess::of(pid) {
                    Ok(Some(process)) => Ok(process),
                    Ok(None) => Err(StartError::Failed(format!("it {}", self.exit_reason(place, pid).await))),
                    Err(error) => Err(StartError::Failed(error.to_string())),
                }
            }
            Err(error @ Error::Job { .. }) => {
                let how = self.exit_reason(place, 0).await;
                Err(StartError::Failed(format!("it {how} ({})", error.in_full())))
            }
            Err(error) => Err(not_started(&error)),
        }
    }

    /// Describes how the unit's process ended. Afterwards the unit is inactive, unless one of its processes cannot be
    /// killed.
    pub(super) async fn exit_reason(&self, place: &TargetDir, pid: i32) -> String {
        let unit = name(place);
        let has_ended = |state: &State| {
            let ours = state.main_pid.and_then(|main| i32::try_from(main).ok()) == Some(pid);
            !ours && state.active != "deactivating"
        };
        match self.0.wait_until(&unit, CLEANUP, has_ended).await {
            Err(error) => format!("ended; cannot read the exit status from systemd: {}", error.in_full()),
            Ok(state) => {
                if state.active == "failed"
                    && let Err(error) = self.0.reset_failed(&unit).await
                {
                    tracing::warn!("{}", error.in_full());
                }
                describe(&state, &unit)
            }
        }
    }

    /// Kills all processes of the unit.
    pub(super) async fn kill(&self, place: &TargetDir, daemon: Option<&DaemonProcess>) {
        if let Err(error) = self.0.kill(&name(place)).await {
            tracing::warn!("{}; killing the MPS daemon without systemd", error.in_full());
            super::kill_all(place, daemon);
        }
    }

    /// Ends the units of targets that are not in `known`, each as soon as it has no server.
    pub(super) async fn end_orphans(&self, known: BTreeSet<String>) {
        let mut orphans = match self.0.running("gpushd-mps@*.service").await {
            Ok(units) => units,
            Err(error) => {
                tracing::warn!("cannot look for unknown MPS daemons: {}", error.in_full());
                return;
            }
        };
        orphans.retain(|unit| !known.iter().any(|target| *unit == of(target)));
        for unit in &orphans {
            tracing::warn!(
                "{unit} runs, but its directory is missing: gpushd ends the unit when no MPS server runs in it; to \
                end the unit now: `systemctl stop {unit}`"
            );
        }
        loop {
            let mut left = Vec::new();
            for unit in orphans {
                match self.end_unused(&unit).await {
                    Ok(true) => {}
                    Ok(false) => left.push(unit),
                    Err(error) => {
                        tracing::warn!("{}", error.in_full());
                        left.push(unit);
                    }
                }
            }
            if left.is_empty() {
                return;
            }
            orphans = left;
            sleep(ORPHAN_CHECK).await;
        }
    }

    /// Ends a unit that has no server. Returns `false` if the unit has a server, so that the caller tries again later.
    async fn end_unused(&self, unit: &str) -> Result<bool, Error> {
        let main = self.0.state(unit).await?.main_pid;
        let Some(pid) = main.and_then(|pid| i32::try_from(pid).ok()) else { return Ok(true) };
        let Ok(Some(process)) = DaemonProcess::of(pid) else { return Ok(true) };
        if self.0.processes(unit).await? > 1 {
            return Ok(false);
        }
        // The signal goes through the pidfd, so it cannot reach a later process with the same pid.
        match process.terminate() {
            Ok(()) => tracing::info!("{unit}: ending its MPS daemon {pid}, which no program can reach"),
            Err(error) => tracing::warn!("{unit}: cannot end its MPS daemon {pid}: {error}"),
        }
        Ok(true)
    }
}

/// Returns the unit of a target directory.
fn name(place: &TargetDir) -> String {
    of(&place.dir().file_name().unwrap_or_default().to_string_lossy())
}

pub(super) fn of(target: &str) -> String {
    format!("gpushd-mps@{target}.service")
}

fn not_started(error: &Error) -> StartError {
    match error {
        // systemd may still start the daemon. In that case, gpushd adopts the daemon.
        Error::Bus(_) | Error::Deadline { .. } => StartError::Later(error.in_full()),
        // Only a scope can be misplaced, and a daemon runs in a service.
        Error::NotCalled { .. } | Error::Refused { .. } | Error::Job { .. } | Error::Misplaced { .. } => {
            StartError::Failed(error.in_full())
        }
    }
}

/// Describes how a unit ended.
fn describe(state: &State, unit: &str) -> String {
    let status = state.exec_main_status;
    let own = match (state.exec_main_code, state.result.as_str()) {
        (0, "success") => "ended without an error, as after `systemctl stop`".to_owned(),
        (0, _) => "ended".to_owned(),
        (EXITED, "success") => super::exited(status),
        // The process failed before it became the daemon. Its messages are in the journal.
        (EXITED, _) => format!("{}: see `journalctl -u {unit}`", super::exited(status)),
        (_, "success") if status == STOP => format!("{}, as by `systemctl stop`", super::signalled(status)),
        (_, _) => super::signalled(status),
    };
    match state.result.as_str() {
        "success" | "exit-code" | "signal" | "core-dump" => own,
        "oom-kill" => format!("{own}, because memory ran out"),
        other => format!("{own} ({other})"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unit_end_is_described_by_result_and_status() {
        let end = |result: &str, code, status| {
            let state = State {
                active: "failed".to_owned(),
                result: result.to_owned(),
                user: String::new(),
                main_pid: None,
                exec_main_code: code,
                exec_main_status: status,
            };
            describe(&state, "gpushd-mps@g1.service")
        };
        assert_eq!(end("signal", 2, 9), "was ended by signal 9");
        assert_eq!(end("core-dump", 3, 11), "was ended by signal 11");
        assert_eq!(end("success", 1, 0), "ended with status 0");
        assert_eq!(end("exit-code", 1, 1), "ended with status 1: see `journalctl -u gpushd-mps@g1.service`");
        assert_eq!(end("oom-kill", 2, 9), "was ended by signal 9, because memory ran out");
        assert_eq!(end("timeout", 2, 9), "was ended by signal 9 (timeout)");
        assert_eq!(end("success", 2, 15), "was ended by signal 15, as by `systemctl stop`");
        assert_eq!(end("success", 0, 0), "ended without an error, as after `systemctl stop`");
    }
}
