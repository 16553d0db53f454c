//! Daemons as instances of `gpushd-mps@.service`: on a host whose service manager is systemd.
//!
//! ```text
//!              ResetFailed                 StartUnit              pidfd: ended
//! failed ──────────────────► inactive ───────────────► active ───────────────────► inactive, failed
//!                                                                 │ servers live          ▲
//!                                                                 └► deactivating ────────┘ systemd kills them
//! ```
//!
//! Each has a cgroup of its own, is not gpushd's to lose when that is restarted or replaced, and ends
//! whole: systemd kills what is left of it. It is never started by systemd itself. `systemctl stop` is seen
//! from the end that it makes. A unit that ended without an error systemd may have forgotten by then.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use gpush_host::systemd::{Error, Manager, State};
use tokio::time::sleep;

use super::{DaemonProcess, StartError};
use crate::daemon::target_dir::TargetDir;

/// How long systemd may take to see an end that was seen here, and to clean up after it.
const TOLD: Duration = Duration::from_secs(2);

/// Between two looks at a daemon that nobody knows.
const STRAY: Duration = Duration::from_secs(30);

/// What `systemctl stop` sends, `SIGTERM`.
const STOP: i32 = 15;

/// `CLD_EXITED` of `waitid(2)`: the status is the program's own, else a signal's number.
const EXITED: i32 = 1;

/// Instances of the template unit.
#[derive(Debug, Clone, Default)]
pub(super) struct Units(Arc<Manager>);

impl Units {
    /// Whether the unit is inactive, after what it was told to forget.
    pub(super) async fn check_free(&self, place: &TargetDir) -> Result<(), StartError> {
        let unit = name(place);
        let state = self.0.state(&unit).await.map_err(|error| not_started(&error))?;
        match state.active.as_str() {
            "inactive" => Ok(()),
            "failed" => self.0.reset_failed(&unit).await.map_err(|error| not_started(&error)),
            "deactivating" => Err(StartError::locked()),
            // Something before the daemon takes its time, or whoever asked for it has only just gone.
            "activating" => Err(StartError::Later(format!("systemd has not started {unit} yet"))),
            active => Err(StartError::Later(format!(
                "its unit {unit} is {active}, and no daemon has its directory: `systemctl stop {unit}` ends what runs there"
            ))),
        }
    }

    /// Starts the unit; its main process is, or is about to become, the daemon.
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

    /// How the unit's process ended, in words. The unit is inactive then, unless something of it can't be
    /// killed.
    pub(super) async fn exit_reason(&self, place: &TargetDir, pid: i32) -> String {
        let unit = name(place);
        let has_ended = |state: &State| {
            let ours = state.main_pid.and_then(|main| i32::try_from(main).ok()) == Some(pid);
            !ours && state.active != "deactivating"
        };
        match self.0.wait_until(&unit, TOLD, has_ended).await {
            Err(error) => format!("ended; systemd can't say how: {}", error.in_full()),
            Ok(state) => {
                if state.active == "failed"
                    && let Err(error) = self.0.reset_failed(&unit).await
                {
                    tracing::warn!("{}", error.in_full());
                }
                words(&state, &unit)
            }
        }
    }

    /// Kills all of the unit.
    pub(super) async fn kill(&self, place: &TargetDir, daemon: Option<&DaemonProcess>) {
        if let Err(error) = self.0.kill(&name(place)).await {
            tracing::warn!("{}; its MPS daemon is killed without it", error.in_full());
            super::kill_all(place, daemon);
        }
    }

    /// Ends instances other than these, each as soon as it is seen to have no server.
    pub(super) async fn end_orphans(&self, known: BTreeSet<String>) {
        let mut strays = match self.0.running("gpushd-mps@*.service").await {
            Ok(units) => units,
            Err(error) => {
                tracing::warn!("MPS daemons that nobody knows are not looked for: {}", error.in_full());
                return;
            }
        };
        strays.retain(|unit| !known.iter().any(|target| *unit == of(target)));
        for unit in &strays {
            tracing::warn!(
                "{unit} runs, and its directory is gone: it is ended once it has no server; `systemctl stop {unit}` ends it now"
            );
        }
        loop {
            let mut left = Vec::new();
            for unit in strays {
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
            strays = left;
            sleep(STRAY).await;
        }
    }

    /// Ends a unit that consists of its control daemon alone; whether nothing more is to be done.
    async fn end_unused(&self, unit: &str) -> Result<bool, Error> {
        let main = self.0.state(unit).await?.main_pid;
        let Some(pid) = main.and_then(|pid| i32::try_from(pid).ok()) else { return Ok(true) };
        let Ok(Some(process)) = DaemonProcess::of(pid) else { return Ok(true) };
        if self.0.processes(unit).await? > 1 {
            return Ok(false);
        }
        // By its pidfd: whatever the unit becomes meanwhile, nobody else is ended.
        match process.terminate() {
            Ok(()) => tracing::info!("{unit}: its MPS daemon {pid}, which nobody can reach, was told to end"),
            Err(error) => tracing::warn!("{unit}: its MPS daemon {pid} can't be told to end: {error}"),
        }
        Ok(true)
    }
}

/// The unit of a place.
fn name(place: &TargetDir) -> String {
    of(&place.dir().file_name().unwrap_or_default().to_string_lossy())
}

fn of(target: &str) -> String {
    format!("gpushd-mps@{target}.service")
}

fn not_started(error: &Error) -> StartError {
    match error {
        // What was asked for may still happen; then the daemon is found.
        Error::Bus(_) | Error::Deadline { .. } => StartError::Later(error.in_full()),
        Error::Refused { .. } | Error::Job { .. } => StartError::Failed(error.in_full()),
    }
}

/// How a unit ended.
fn words(state: &State, unit: &str) -> String {
    let status = state.exec_main_status;
    let own = match (state.exec_main_code, state.result.as_str()) {
        (0, "success") => "ended without an error, as after `systemctl stop`".to_owned(),
        (0, _) => "ended".to_owned(),
        (EXITED, "success") => super::exited(status),
        // What was said before it was the daemon, or by something that is run before it.
        (EXITED, _) => format!("{}: `journalctl -u {unit}` has what it said", super::exited(status)),
        (_, "success") if status == STOP => format!("{}, as by `systemctl stop`", super::signalled(status)),
        (_, _) => super::signalled(status),
    };
    match state.result.as_str() {
        "success" | "exit-code" | "signal" | "core-dump" => own,
        "oom-kill" => format!("{own}, since memory ran out"),
        other => format!("{own} ({other})"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_is_told_as_systemd_knows_it() {
        let told = |result: &str, code, status| {
            let state = State {
                active: "failed".to_owned(),
                result: result.to_owned(),
                main_pid: None,
                exec_main_code: code,
                exec_main_status: status,
            };
            words(&state, "gpushd-mps@g1.service")
        };
        assert_eq!(told("signal", 2, 9), "was ended by signal 9");
        assert_eq!(told("core-dump", 3, 11), "was ended by signal 11");
        assert_eq!(told("success", 1, 0), "ended with status 0");
        assert_eq!(
            told("exit-code", 1, 1),
            "ended with status 1: `journalctl -u gpushd-mps@g1.service` has what it said"
        );
        assert_eq!(told("oom-kill", 2, 9), "was ended by signal 9, since memory ran out");
        assert_eq!(told("timeout", 2, 9), "was ended by signal 9 (timeout)");
        assert_eq!(told("success", 2, 15), "was ended by signal 15, as by `systemctl stop`");
        assert_eq!(told("success", 0, 0), "ended without an error, as after `systemctl stop`");
    }
}
