//! The process launcher: daemons are detached children of gpushd. gpushd uses this launcher in
//! containers, and where gpushd is not the system service.
//!
//! The daemons continue to run when gpushd ends, unless gpushd is the first process of a container.

use std::{io, os::unix::process::ExitStatusExt, process::Stdio, time::Duration};

use tokio::{io::AsyncReadExt, process::Command};

use super::{DaemonProcess, StartError};
use crate::daemon::target_dir::TargetDir;

/// How long `gpushd mps-daemon` may take to become the daemon.
const BECOME: Duration = Duration::from_secs(10);

/// How long gpushd waits for the exit status of a child that no longer runs.
const REAPED: Duration = Duration::from_millis(200);

/// Starts the daemon that the spec describes. The daemon holds the lock when this function returns.
pub(super) async fn start(place: &TargetDir) -> Result<DaemonProcess, StartError> {
    let mut command = Command::new("/proc/self/exe");
    command.arg("mps-daemon").arg(place.dir()).env_clear().current_dir("/").stdin(Stdio::null());
    run(command).await
}

/// Runs a program, and waits until it has become the daemon.
#[expect(clippy::disallowed_methods, reason = "the task only waits for a process")]
pub(super) async fn run(mut command: Command) -> Result<DaemonProcess, StartError> {
    let failed = |error: io::Error| StartError::Failed(error.to_string());
    let mut child = command
        .stdout(Stdio::null())
        // Until the process becomes the daemon, this pipe carries its errors. Then the pipe
        // closes, because the daemon writes to its log.
        .stderr(Stdio::piped())
        .spawn()
        .map_err(failed)?;
    let pid = child.id().and_then(|pid| i32::try_from(pid).ok()).unwrap_or_default();
    let mut message = String::new();
    if let Some(mut trouble) = child.stderr.take() {
        let read = tokio::time::timeout(BECOME, trouble.read_to_string(&mut message)).await;
        if read.is_err() {
            message = "the process did not become the MPS daemon in time".to_owned();
        }
    }
    let process = DaemonProcess::of(pid).map_err(failed)?;
    // Wait for the child, because it would otherwise remain a zombie after its end.
    let status = tokio::spawn(async move { child.wait().await });
    match (message.trim(), process) {
        ("", Some(process)) => Ok(DaemonProcess { status: Some(status), ..process }),
        ("", None) => Err(StartError::Failed("the process ended as soon as it was started".to_owned())),
        (message, _) => Err(StartError::Failed(gpush_api::text::plain(message))),
    }
}

/// Describes how a process ended. gpushd knows the exit status only of its own children.
pub(super) async fn exit_reason(process: DaemonProcess) -> String {
    let Some(status) = process.status else { return "ended".to_owned() };
    match tokio::time::timeout(REAPED, status).await {
        Ok(Ok(Ok(status))) => match (status.code(), status.signal()) {
            (Some(code), _) => super::exited(code),
            (None, Some(signal)) => super::signalled(signal),
            (None, None) => "ended".to_owned(),
        },
        Ok(_) | Err(_) => "ended".to_owned(),
    }
}
