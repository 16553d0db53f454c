//! How a daemon ends: its clients are told to end their work, then it is told to; and what follows when
//! its process has ended, asked or not.

use std::time::Duration;

use crate::protocol::{
    command::Command,
    control::{Control, ControlError},
};
use gpush_core::supervisor::{Event, State};
use gpush_host::proc;

use tokio::time::sleep;
use tokio_util::task::AbortOnDropHandle;

use super::{
    health::Health,
    task::{DEADLINE, SupervisorTask},
};

/// Wait before `quit` is sent again to a daemon that could not be reached.
const AGAIN: Duration = Duration::from_millis(20);

/// Before a daemon that was told to end and lives on is told again: one that has just begun to listen may lose what it
/// is told.
const REPEAT: Duration = Duration::from_secs(5);

/// Seconds after which a daemon that was told to end interrupts servers that do not.
const INTERRUPT: u32 = 1;

impl SupervisorTask {
    /// ServerSettings the daemon told to end, its clients first. Its process tells whether it does.
    pub(super) fn quit(&mut self) {
        // A daemon has one ear.
        self.give_up_look();
        let Some(control) = self.control.clone() else { return };
        let (target, clients) = (self.target.clone(), self.health.clients.clone());
        // It ends with the daemon: the next one is not to hear of it.
        self.quitting = Some(AbortOnDropHandle::new(tokio::spawn(async move {
            for (server, client) in clients {
                if !terminate(&target, &control, server, client).await {
                    break;
                }
            }
            let (mut is_logged, mut pause) = (false, AGAIN);
            // One that has just begun does not listen yet, and one that somebody keeps busy may be free in a moment.
            // This task is aborted when the daemon has ended.
            loop {
                match control.quit(Some(INTERRUPT), DEADLINE).await {
                    Ok(_) => pause = REPEAT,
                    Err(error) if !is_logged && pause == AGAIN => {
                        tracing::warn!(mps = target, "the daemon can't be told to end: {error}");
                        is_logged = true;
                    }
                    Err(_) => {}
                }
                sleep(pause).await;
            }
        })));
    }

    /// Its process has ended.
    pub(super) async fn gone(&mut self) {
        let Some(process) = self.process.take() else { return };
        self.quitting = None;
        // How it ended is asked of somebody who may take his time. Nobody is let in meanwhile, nor to the next one
        // where somebody has shut the door to end this one.
        let shut = std::mem::replace(&mut self.shut, true);
        self.see_to_the_door();
        let how = self.launcher.exit_reason(&self.place, process).await;
        let asked = matches!(self.machine.state(), State::Stopping { .. });
        if asked {
            tracing::info!(mps = self.target, "the MPS daemon {how}");
            self.trouble.clear();
            self.health = Health::default();
            // Servers that it left behind hold the GPU for nobody any more, and its lock with it.
            if self.place.is_taken() {
                self.launcher.kill(&self.place, None).await;
            }
        } else {
            tracing::error!(mps = self.target, "the MPS daemon {how}");
            self.trouble = vec![format!("the daemon {how}")];
        }
        (self.control, self.in_force, self.protocol) = (None, None, None);
        self.ear.clear();
        self.shut = shut;
        self.step(Event::Ended).await;
        if self.process.is_none() {
            self.health.servers.retain(|(server, _)| proc::is_alive(*server));
            self.health.clients.retain(|(server, _)| proc::is_alive(*server));
        }
    }
}

/// ServerSettings a client end its work on the GPU; whether the daemon heard it.
pub(super) async fn terminate(target: &str, control: &Control, server: i32, client: i32) -> bool {
    match control.say(&Command::TerminateClient { server, client }, DEADLINE).await {
        Ok(_) => true,
        Err(error) => {
            tracing::warn!(mps = target, "client {client} can't be told to end: {error}");
            !matches!(error, ControlError::Busy | ControlError::Session(_))
        }
    }
}
