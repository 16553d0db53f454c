//! Leftovers of a daemon that has ended: servers, which still serve their clients, and orphans. An orphan's directory
//! was deleted, so no client can reach the orphan. gpushd does not start a daemon while leftovers run, and ends
//! leftovers without clients.

use std::{collections::BTreeSet, time::Duration};

use gpush_core::supervisor::{KillReason, SupervisorState};
use gpush_host::proc;
use tokio::time::{Instant, sleep};

use super::{
    launcher::{self, DaemonProcess, OwnedProcess},
    task::{Leftovers, SupervisorTask},
};

/// How long killed processes may take to end, and the interval between two checks.
const GONE: (Duration, Duration) = (Duration::from_millis(500), Duration::from_millis(2));

/// Interval between checks of leftovers on a target for which no daemon is desired.
const CHECK: Duration = Duration::from_secs(1);

impl SupervisorTask {
    /// Returns whether a start must wait for leftovers. Kills leftovers without clients.
    pub(super) async fn check_leftovers(&mut self) -> bool {
        let mut left = launcher::processes(&self.dir, &self.uuid);
        // Omit the orphans that the systemd launcher tracks: the launcher itself reports their
        // running unit.
        left.retain(|part| !(part.is_orphan && self.launcher.tracks_orphans()));
        if left.is_empty() && !self.dir.is_locked() {
            return false;
        }
        // If the process with a client's pid started after the daemon's last reply, the client has
        // ended, and another process got its pid.
        let ago = self.last_reply.map(|at| at.elapsed()).unwrap_or_default();
        self.health.clients.retain(|(_, client)| proc::is_alive_since(*client, ago));
        let mut listed = (self.sources.driver_clients)().await;
        // A zombie does not use the GPU, so it does not count as a client.
        listed.iter_mut().for_each(|clients| clients.retain(|client| proc::is_alive(*client)));
        if let Some(clients) = &listed {
            let servers = left.iter().filter(|part| !part.is_daemon);
            self.health.servers = servers.map(|server| (server.pid, None)).collect();
            self.health.add_clients(clients);
        }
        let what = describe(&left);
        let clients = self.health.clients.len();
        if clients == 0 && listed.is_some() {
            tracing::warn!(mps = self.target, "{what}: no clients, so gpushd ends these processes");
            if self.kill_leftovers(KillReason::Leftovers).await {
                return false;
            }
        }
        let serves = match (clients, listed) {
            (0, Some(_)) => "was killed but has not ended".to_owned(),
            (0, None) => "may have clients: the driver does not list them".to_owned(),
            (1, _) => "still serves 1 client".to_owned(),
            (more, _) => format!("still serves {more} clients"),
        };
        self.problems = vec![format!("{what}, {serves}")];
        true
    }

    /// Checks leftovers where no daemon is desired.
    pub(super) async fn clear_leftovers(&mut self) {
        let before = self.leftovers.take();
        if *self.supervisor.state() != SupervisorState::Stopped || self.process.is_some() {
            return;
        }
        let (until, now) = (before.and_then(|behind| behind.until), Instant::now());
        let is_over = until.is_some_and(|until| until <= now);
        if is_over {
            tracing::warn!(
                mps = self.target,
                "the processes that the previous daemon left did not end by the deadline: gpushd ends them"
            );
            self.kill_leftovers(KillReason::Leftovers).await;
        }
        if self.check_leftovers().await {
            self.leftovers = Some(Leftovers { until });
            self.next_probe = Some(until.filter(|_| !is_over).map_or(now + CHECK, |until| until.min(now + CHECK)));
        } else {
            self.problems.clear();
            self.health.servers.clear();
            self.health.clients.clear();
        }
    }

    /// Drains leftovers. At the deadline, gpushd kills the leftovers with their clients.
    pub(super) async fn drain_leftovers(&mut self, until: Option<Instant>) {
        self.leftovers = Some(Leftovers { until });
        self.clear_leftovers().await;
    }

    /// Kills leftovers with their clients. Returns whether all have ended.
    pub(super) async fn kill_leftovers(&mut self, why: KillReason) -> bool {
        if self.process.is_some() {
            return false;
        }
        let locks: BTreeSet<_> = launcher::processes(&self.dir, &self.uuid).iter().map(|part| part.lock).collect();
        let killed = launcher::kill(&locks);
        if !killed.is_empty() {
            let pids: Vec<String> = killed.iter().map(|process| process.pid.to_string()).collect();
            tracing::warn!(
                mps = self.target,
                "gpushd killed processes of the MPS daemon (pid {}): {why}",
                pids.join(", ")
            );
            self.new_kill = Some(why);
        }
        let until = Instant::now() + GONE.0;
        while Instant::now() < until {
            if killed.iter().all(DaemonProcess::has_ended) && !self.dir.is_locked() {
                return true;
            }
            sleep(GONE.1).await;
        }
        false
    }
}

/// Describes leftovers and why they are still running. Every user may read the description, so it does not contain pids
/// of servers, which run as other users.
fn describe(left: &[OwnedProcess]) -> String {
    let daemons: Vec<String> = left.iter().filter(|part| part.is_daemon).map(|part| part.pid.to_string()).collect();
    let servers = match left.len() - daemons.len() {
        0 | 1 => "a server".to_owned(),
        count => format!("{count} servers"),
    };
    let who = match (daemons.is_empty(), daemons.len() == left.len()) {
        (true, _) => servers,
        (false, true) => format!("daemon {}", daemons.join(", ")),
        (false, false) => format!("daemon {} with {servers}", daemons.join(", ")),
    };
    let why = match (left.iter().any(|part| part.is_orphan), daemons.is_empty()) {
        (true, _) => "whose directory was deleted",
        (false, true) => "which the previous daemon left",
        (false, false) => "which may not be the one that spec.json describes",
    };
    format!("{who}, {why}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leftovers_are_described_by_kind() {
        let scratch = tempfile::NamedTempFile::new().unwrap();
        let lock = gpush_host::proc::FileId::of(&scratch.as_file().metadata().unwrap());
        let part = |pid, is_daemon, is_orphan| OwnedProcess { pid, lock, is_daemon, is_orphan };
        assert_eq!(describe(&[]), "a server, which the previous daemon left");
        assert_eq!(describe(&[part(7, false, false)]), "a server, which the previous daemon left");
        assert_eq!(
            describe(&[part(7, false, true), part(3, true, true)]),
            "daemon 3 with a server, whose directory was deleted"
        );
        assert_eq!(describe(&[part(3, true, false)]), "daemon 3, which may not be the one that spec.json describes");
    }
}
