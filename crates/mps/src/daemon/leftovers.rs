//! What a daemon that died left behind: servers, which compute on for the clients that they have; and
//! daemons that have no door any more, since their directory was deleted. While one is there no daemon is
//! started beside it; what nobody uses is ended.

use std::{collections::BTreeSet, time::Duration};

use gpush_core::supervisor::State;
use gpush_host::proc;
use tokio::time::{Instant, sleep};

use super::{
    launcher::{self, DaemonProcess, OwnedProcess},
    task::SupervisorTask,
};

/// How long what was killed may take to be gone, and between two looks.
const GONE: (Duration, Duration) = (Duration::from_millis(500), Duration::from_millis(2));

/// Between two looks at what is left where no daemon is wanted.
const LOOK: Duration = Duration::from_secs(1);

/// What a daemon left behind that is wanted no more. It serves whom it has, and nobody comes to them: so they are
/// drained as the clients of a daemon are.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Leftovers {
    /// When it is ended, whomever it serves.
    pub(super) until: Option<Instant>,
}

impl SupervisorTask {
    /// Whether something is left that a start has to wait for. What has no clients is ended.
    pub(super) async fn left(&mut self) -> bool {
        let mut left = launcher::processes(&self.place, &self.uuid);
        // A unit that runs says so itself, and how it is ended.
        left.retain(|part| !(part.is_stray && self.launcher.tracks_orphans()));
        if left.is_empty() && !self.place.is_taken() {
            return false;
        }
        // Who has begun since it last named its clients is none of them, whatever pid it has.
        let ago = self.answered.map(|at| at.elapsed()).unwrap_or_default();
        self.health.clients.retain(|(_, client)| proc::is_alive_since(*client, ago));
        let mut told = (self.sources.witness)().await;
        // Of what has ended nothing computes, also while its parent has not waited for it.
        told.iter_mut().for_each(|clients| clients.retain(|client| proc::is_alive(*client)));
        if let Some(clients) = &told {
            let servers = left.iter().filter(|part| !part.is_daemon);
            self.health.servers = servers.map(|server| (server.pid, None)).collect();
            self.health.add_clients(clients);
        }
        let what = in_words(&left);
        let clients = self.health.clients.len();
        if clients == 0 && told.is_some() {
            tracing::warn!(mps = self.target, "{what}, has no clients: ended");
            if self.end_left().await {
                return false;
            }
        }
        let serves = match (clients, told) {
            (0, Some(_)) => "was killed and does not end".to_owned(),
            (0, None) => "may have clients: the driver does not tell".to_owned(),
            (1, _) => "still serves 1 client".to_owned(),
            (more, _) => format!("still serves {more} clients"),
        };
        let then = if self.machine.wanted() { ": another daemon is started once it is gone" } else { "" };
        self.trouble = vec![format!("{what}, {serves}{then}")];
        true
    }

    /// Looks after what is left where no daemon is wanted either.
    pub(super) async fn clear_left(&mut self) {
        let before = self.behind.take();
        if *self.machine.state() != State::Stopped || self.process.is_some() {
            return;
        }
        let (until, now) = (before.and_then(|behind| behind.until), Instant::now());
        let is_over = until.is_some_and(|until| until <= now);
        if is_over {
            tracing::warn!(mps = self.target, "what its daemon left behind has had the time that it was given: ended");
            self.end_left().await;
        }
        if self.left().await {
            self.behind = Some(Leftovers { until });
            self.look = Some(until.filter(|_| !is_over).map_or(now + LOOK, |until| until.min(now + LOOK)));
        } else {
            self.trouble.clear();
            self.health.servers.clear();
            self.health.clients.clear();
        }
    }

    /// What is left is ended then, whomever it serves.
    pub(super) async fn leave_left(&mut self, until: Option<Instant>) {
        self.behind = Some(Leftovers { until });
        self.clear_left().await;
    }

    /// Ends what is left, whomever it serves; whether nothing is left then.
    pub(super) async fn end_left(&self) -> bool {
        if self.process.is_some() {
            return false;
        }
        let locks: BTreeSet<_> = launcher::processes(&self.place, &self.uuid).iter().map(|part| part.lock).collect();
        let killed = launcher::kill(&locks);
        let until = Instant::now() + GONE.0;
        while Instant::now() < until {
            if killed.iter().all(DaemonProcess::has_ended) && !self.place.is_taken() {
                return true;
            }
            sleep(GONE.1).await;
        }
        false
    }
}

/// What is left, and why it is.
fn in_words(left: &[OwnedProcess]) -> String {
    let pids = |is_daemon: bool| {
        let those = left.iter().filter(|part| part.is_daemon == is_daemon);
        those.map(|part| part.pid.to_string()).collect::<Vec<_>>().join(", ")
    };
    let (daemons, servers) = (pids(true), pids(false));
    let who = match (daemons.is_empty(), servers.is_empty()) {
        (true, true) => "a server".to_owned(),
        (true, false) => format!("server {servers}"),
        (false, true) => format!("daemon {daemons}"),
        (false, false) => format!("daemon {daemons} with server {servers}"),
    };
    let why = match (left.iter().any(|part| part.is_stray), daemons.is_empty()) {
        (true, _) => "whose directory was deleted",
        (false, true) => "which the daemon before left behind",
        (false, false) => "which is not known to be what its spec.json says",
    };
    format!("{who}, {why}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_is_told_for_what_it_is() {
        let scratch = tempfile::NamedTempFile::new().unwrap();
        let lock = gpush_host::proc::FileId::of(&scratch.as_file().metadata().unwrap());
        let part = |pid, is_daemon, is_stray| OwnedProcess { pid, lock, is_daemon, is_stray };
        assert_eq!(in_words(&[]), "a server, which the daemon before left behind");
        assert_eq!(in_words(&[part(7, false, false)]), "server 7, which the daemon before left behind");
        assert_eq!(
            in_words(&[part(7, false, true), part(3, true, true)]),
            "daemon 3 with server 7, whose directory was deleted"
        );
        assert_eq!(in_words(&[part(3, true, false)]), "daemon 3, which is not known to be what its spec.json says");
    }
}
