//! What a daemon that died left behind: servers, which compute on for the clients that they have. While
//! one is there no daemon is started beside it; one that nobody uses is ended.

use std::time::Duration;

use gpush_core::supervisor::State;
use tokio::time::{Instant, sleep};

use super::{hands, life::Life};

/// How long a server that was killed may take to be gone, and between two looks.
const GONE: (Duration, Duration) = (Duration::from_millis(500), Duration::from_millis(2));

impl Life {
    /// Whether something is left that a start has to wait for. What has no clients is ended.
    pub(super) async fn left(&mut self) -> bool {
        if !self.place.is_taken() {
            return false;
        }
        let left = self.place.holders();
        self.health.clients.retain(|(_, client)| hands::is_alive(*client));
        let told = (self.witness)().await;
        if let Some(clients) = &told {
            self.health.servers = left.iter().map(|server| (*server, None)).collect();
            self.health.add_clients(clients);
        }
        let servers = match left.as_slice() {
            [] => "a server".to_owned(),
            pids => format!("server {}", pids.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")),
        };
        let clients = self.health.clients.len();
        if clients == 0 && told.is_some() {
            tracing::warn!(mps = self.target, "{servers}, left behind by the daemon before, has no clients: ended");
            self.end_left();
            let until = Instant::now() + GONE.0;
            while Instant::now() < until {
                if !self.place.is_taken() {
                    return false;
                }
                sleep(GONE.1).await;
            }
        }
        let serves = match (clients, told) {
            (0, Some(_)) => "was killed and does not end".to_owned(),
            (0, None) => "may have clients: the driver does not tell".to_owned(),
            (1, _) => "still serves 1 client".to_owned(),
            (more, _) => format!("still serves {more} clients"),
        };
        self.trouble = vec![format!(
            "{servers}, which the daemon before left behind, {serves}: another daemon is started once it is gone"
        )];
        true
    }

    /// Looks after what is left where no daemon is wanted either.
    pub(super) async fn clear_left(&mut self) {
        if *self.machine.state() == State::Stopped && self.process.is_none() && !self.left().await {
            self.trouble.clear();
            self.health.servers.clear();
        }
    }

    /// Ends what is left, whomever it serves.
    pub(super) fn end_left(&self) {
        if self.process.is_some() {
            return;
        }
        for pid in self.place.holders() {
            let Some(own) = rustix::process::Pid::from_raw(pid) else { continue };
            let Ok(process) = rustix::process::pidfd_open(own, rustix::process::PidfdFlags::empty()) else { continue };
            // The pid may have become another's between the two, the lock not.
            if self.place.is_held_by(pid)
                && let Err(error) = rustix::process::pidfd_send_signal(process, rustix::process::Signal::KILL)
            {
                tracing::error!(mps = self.target, "server {pid} can't be ended: {error}");
            }
        }
    }
}
