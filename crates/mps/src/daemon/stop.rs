//! How a daemon ends. gpushd ends the GPU work of the daemon's clients, then sends `quit`. This module also handles the
//! case that the process ends without a request from gpushd.

use std::time::Duration;

use gpush_core::supervisor::{SupervisorEvent, SupervisorState};
use gpush_host::proc;
use tokio::time::sleep;
use tokio_util::task::AbortOnDropHandle;

use super::{
    health::Health,
    task::{DEADLINE, SupervisorTask},
};
use crate::protocol::{
    command::Command,
    control::{Control, ControlError},
};

/// Pause before gpushd sends `quit` again to a daemon that it could not reach.
const RETRY: Duration = Duration::from_millis(20);

/// Pause before gpushd sends `quit` again to a daemon that accepted `quit` but still runs. A daemon
/// that has just begun to listen may lose a command.
const REPEAT: Duration = Duration::from_secs(5);

/// Number of seconds after `quit` until the daemon interrupts servers that have not ended.
const INTERRUPT: u32 = 1;

impl SupervisorTask {
    /// Starts a task that sends `terminate_client` for each client and then `quit`. The task
    /// repeats `quit` until the daemon's process has ended.
    #[expect(clippy::disallowed_methods, reason = "the panic continues in the supervisor task")]
    pub(super) fn begin_stop(&mut self) {
        // The daemon accepts only one connection at a time, so end the probe.
        self.abort_probe();
        let Some(control) = self.control.clone() else { return };
        let (target, clients) = (self.target.clone(), self.health.clients.clone());
        // When the daemon has ended, this handle is dropped. This aborts the task, so that the next daemon receives no
        // `quit`.
        self.stop_task = Some(AbortOnDropHandle::new(tokio::spawn(async move {
            for (server, client) in clients {
                if !terminate(&target, &control, server, client).await {
                    break;
                }
            }
            let (mut is_logged, mut pause) = (false, RETRY);
            // Repeat `quit`: the daemon may not listen yet, or another process may hold the connection for a moment.
            loop {
                match control.quit(Some(INTERRUPT), DEADLINE).await {
                    Ok(_) => pause = REPEAT,
                    Err(error) if !is_logged && pause == RETRY => {
                        tracing::warn!(mps = target, "cannot ask the MPS daemon to end: {error}");
                        is_logged = true;
                    }
                    Err(_) => {}
                }
                sleep(pause).await;
            }
        })));
    }

    /// Tells the daemon to end the GPU work of a client.
    pub(super) async fn terminate_client(&self, client: i32) {
        let server = self.health.clients.iter().find(|(_, one)| *one == client).map(|(server, _)| *server);
        if let (Some(control), Some(server)) = (&self.control, server) {
            terminate(&self.target, control, server, client).await;
        }
    }

    /// Handles the end of the daemon's process.
    pub(super) async fn handle_exit(&mut self) {
        let Some(process) = self.process.take() else { return };
        self.stop_task = None;
        // systemd may take long to report why the process ended, so keep access revoked meanwhile.
        // Afterwards, access stays revoked only if a caller closed admission to end this daemon.
        let was_closed = std::mem::replace(&mut self.admission_closed, true);
        self.update_access();
        let reason = self.launcher.exit_reason(&self.dir, process).await;
        let reason = match self.kill_reason.take() {
            Some(why) => format!("{reason}: gpushd killed it, because {why}"),
            None => reason,
        };
        if matches!(self.supervisor.state(), SupervisorState::Stopping { .. }) {
            tracing::info!(mps = self.target, "the MPS daemon {reason}");
            self.problems.clear();
            self.health = Health::default();
            // The remaining servers have no clients, but still use the GPU and hold the lock.
            if self.dir.is_locked() {
                self.launcher.kill(&self.dir, None).await;
            }
        } else {
            tracing::error!(mps = self.target, "the MPS daemon {reason}");
            self.problems = vec![format!("the daemon {reason}")];
        }
        (self.control, self.effective, self.protocol) = (None, None, None);
        self.connection_holders.clear();
        self.admission_closed = was_closed;
        self.step(SupervisorEvent::Ended).await;
        if self.process.is_none() {
            self.health.servers.retain(|(server, _)| proc::is_alive(*server));
            self.health.clients.retain(|(server, _)| proc::is_alive(*server));
        }
    }
}

/// Tells the daemon to end the GPU work of a client. Returns whether the daemon received the
/// command.
async fn terminate(target: &str, control: &Control, server: i32, client: i32) -> bool {
    match control.send(&Command::TerminateClient { server, client }, DEADLINE).await {
        Ok(_) => true,
        Err(error) => {
            tracing::warn!(mps = target, "cannot ask the MPS daemon to end the work of client {client}: {error}");
            !matches!(error, ControlError::Busy | ControlError::Session(_))
        }
    }
}
