//! The health of a daemon: its identity, its servers with their states and clients, and facts that only its log
//! contains.

use std::{path::Path, time::Duration};

use crate::protocol::{
    control::{Control, ControlError},
    session::SessionError,
};
use gpush_api::MpsServerState;
use gpush_host::{error_chain, proc};
use tokio::time::Instant;

use super::{
    log::LogParser,
    pending::{self, Pending},
    settings::ServerSettings,
    target_dir::{Spec, TargetDir},
};

/// The result of one probe.
#[derive(Debug, Clone, Default)]
pub(super) struct Health {
    /// Pid and state of each server.
    pub(super) servers: Vec<(i32, Option<MpsServerState>)>,
    /// For each client, the pid of its server and the pid of the client, in this order.
    pub(super) clients: Vec<(i32, i32)>,
    /// Settings of each server that answered.
    pub(super) settings: Vec<ServerSettings>,
    /// Servers that did not answer because they are starting or ending.
    busy: Vec<i32>,
    /// Servers that have never been active: pid, time when gpushd first saw the start, and whether
    /// the start takes too long.
    starting: Vec<(i32, Instant, bool)>,
    /// Whether the daemon supports `get_server_status`, as versions from 550 on do. `None`: not known yet.
    reports_states: Option<bool>,
    /// Whether the daemon may have clients that gpushd does not know: the daemon does not list the clients of a busy
    /// server, and the driver cannot list them either.
    clients_unknown: bool,
    log: LogParser,
    waiting: Pending,
    /// The last server that ended while it had clients: the time when gpushd noticed the end, the
    /// server's pid, and the number of clients.
    lost_server: Option<(Instant, i32, usize)>,
}

/// How long gpushd reports a lost server.
const REPORTED: Duration = Duration::from_secs(600);

/// Probes the daemon with this pid. `late` is the time that a server may take to become active.
pub(super) async fn probe(
    control: &Control,
    pid: i32,
    logs: &Path,
    before: &Health,
    late: Duration,
    deadline: Duration,
) -> Result<Health, ControlError> {
    let daemon = control.daemon(deadline).await?;
    if (daemon.pid, daemon.uid) != (pid, nix::unistd::geteuid().as_raw()) {
        let what =
            format!("process {} of uid {} answers in place of the MPS daemon (pid {pid})", daemon.pid, daemon.uid);
        return Err(SessionError::Foreign(what).into());
    }
    let at_first = proc::child_resource_use(pid);
    let mut health = Health { reports_states: before.reports_states, log: before.log.clone(), ..Health::default() };
    for server in control.servers(deadline).await? {
        let state = match health.reports_states {
            Some(false) => None,
            Some(true) | None => match control.server_state(server, deadline).await {
                Ok(state) => {
                    health.reports_states = Some(true);
                    Some(state)
                }
                Err(ControlError::Unknown(_)) => {
                    health.reports_states = Some(false);
                    None
                }
                Err(ControlError::NoServer) => continue,
                Err(error) => return Err(error),
            },
        };
        match control.clients(server, deadline).await {
            Ok(clients) => health.clients.extend(clients.into_iter().map(|client| (server, client))),
            Err(ControlError::NoServer) => continue,
            Err(error) => return Err(error),
        }
        match control.percentage(server, deadline).await {
            Ok(percentage) => {
                let limit = control.memory_limit(server, deadline).await?;
                let known = before.settings.iter().find(|has| has.server == server);
                let first_limit = known.map_or(limit, |known| known.first_limit);
                health.settings.push(ServerSettings { server, percentage, limit, first_limit });
            }
            // The server is busy, so an empty client list does not mean that the server has no clients.
            Err(ControlError::ServerBusy) => health.add_busy_server(server, before),
            Err(ControlError::NoServer) => continue,
            Err(error) => return Err(error),
        }
        health.note_start(server, state, before, late);
        health.servers.push((server, state));
    }
    health.note_lost_server(before);
    health.log.read(logs, (at_first, proc::child_resource_use(pid)));
    health.log.serves(&health.clients);
    health.find_pending(pid, control.directory()).await;
    Ok(health)
}

impl Health {
    /// Finds the clients that wait for a server. Also works if the daemon does not answer.
    pub(super) async fn find_pending(&mut self, daemon: i32, pipe: &Path) {
        let known =
            self.servers.iter().map(|(server, _)| *server).chain(self.clients.iter().map(|(_, client)| *client));
        let named = Some(self.log.waiting()).filter(|_| !self.log.is_mute());
        self.waiting = pending::find(daemon, pipe, known.collect(), named).await;
    }

    /// Adds a server that did not answer. Keeps the server's clients from the last probe that are still alive.
    fn add_busy_server(&mut self, server: i32, before: &Self) {
        let those = before.clients.iter().filter(|(of, client)| *of == server && proc::is_alive(*client));
        let new: Vec<_> = those.copied().filter(|one| !self.clients.contains(one)).collect();
        self.clients.extend(new);
        self.busy.push(server);
    }

    /// Records a server that has ended although it had clients at the last probe. The control daemon's log shows the
    /// ends of servers that exited with an error, but not of servers that were killed.
    fn note_lost_server(&mut self, before: &Self) {
        self.lost_server = before.lost_server.filter(|(at, ..)| at.elapsed() < REPORTED);
        for (server, _) in before.servers.iter().filter(|(server, _)| !proc::is_alive(*server)) {
            let clients = before.clients.iter().filter(|(of, _)| of == server).count();
            if clients > 0 && !self.servers.iter().any(|(one, _)| one == server) {
                self.lost_server = Some((Instant::now(), *server, clients));
            }
        }
    }

    /// Describes a server that ended since the last probe, although it had clients.
    pub(super) fn newly_lost_server(&self, before: &Self) -> Option<String> {
        let (at, _, clients) = self.lost_server.filter(|_| self.lost_server != before.lost_server)?;
        Some(describe_lost_server(at, clients))
    }

    /// If a server is starting, records the server and the time since which it has been starting. A busy server that
    /// was already active at the last probe is ending, so it is not recorded.
    fn note_start(&mut self, server: i32, state: Option<MpsServerState>, before: &Self, late: Duration) {
        let served = before.servers.iter().any(|(one, _)| *one == server)
            && !before.starting.iter().any(|(one, ..)| *one == server);
        let starts = match state {
            Some(MpsServerState::Initializing) => true,
            Some(MpsServerState::Active | MpsServerState::Fault) => false,
            None => self.busy.contains(&server),
        };
        if starts && !served {
            let known = before.starting.iter().find(|(one, ..)| *one == server).map(|(_, since, _)| *since);
            let since = known.unwrap_or_else(Instant::now);
            self.starting.push((server, since, since.elapsed() >= late));
        }
    }

    /// Returns whether any server did not answer. The clients of such a server are not known.
    pub(super) fn has_busy_server(&self) -> bool {
        !self.busy.is_empty()
    }

    /// Adds the clients that the driver lists. `None` means that the driver cannot list them.
    pub(super) fn add_driver_clients(&mut self, clients: Option<&[i32]>) {
        self.clients_unknown = clients.is_none();
        self.add_clients(clients.unwrap_or_default());
    }

    /// Adds clients that the daemon does not list.
    pub(super) fn add_clients(&mut self, pids: &[i32]) {
        let server = self.busy.first().copied().or_else(|| self.servers.first().map(|(server, _)| *server));
        for pid in pids {
            if !self.clients.iter().any(|(_, client)| client == pid) {
                self.clients.push((server.unwrap_or_default(), *pid));
            }
        }
    }

    /// Returns findings from the log and from the connected processes.
    pub(super) fn findings(&self) -> Vec<String> {
        let lost = self.lost_server.map(|(at, _, clients)| describe_lost_server(at, clients));
        // The log may report the death of a server. If there is a fault or a lost server, omit this
        // death, because it may be the death of the same server.
        let death = self.log.death().filter(|_| self.fault().is_none() && lost.is_none());
        let unknown = (self.clients_unknown && self.has_busy_server()).then(|| {
            "the clients of the MPS daemon are not known: one of its servers is starting or ending, and the driver \
            does not list the clients"
                .to_owned()
        });
        let others = self.waiting.others.then(|| {
            "a process that gpushd cannot see, such as a process in another namespace, is connected to the MPS \
            daemon; this process may be a client"
                .to_owned()
        });
        self.log.mute().into_iter().chain(lost).chain(death).chain(unknown).chain(others).collect()
    }

    /// Returns the live clients that wait for a server. No server lists these clients.
    pub(super) fn waiting(&self) -> Vec<i32> {
        let is_client = |pid: &i32| self.clients.iter().any(|(_, client)| client == pid);
        self.waiting.waiting.iter().copied().filter(|pid| proc::is_alive(*pid) && !is_client(pid)).collect()
    }

    /// Returns the clients that were waiting for a server at the probe.
    pub(super) fn pending(&self) -> impl Iterator<Item = i32> {
        self.waiting.waiting.iter().copied()
    }

    /// Returns the number of clients, including clients that wait for a server. Returns `None` if
    /// the number is not known.
    pub(super) fn client_count(&self) -> Option<usize> {
        (!self.clients_unknown && !self.waiting.others).then(|| self.clients.len() + self.waiting().len())
    }

    /// Returns why the daemon cannot serve clients although it answers.
    pub(super) fn fault(&self) -> Option<String> {
        // Every user may read the reason, so it does not contain the server's pid.
        if self.servers.iter().any(|(_, state)| *state == Some(MpsServerState::Fault)) {
            return Some(
                "a client caused a fatal fault in its server, which accepts no client until the faulty clients have ended"
                    .to_owned(),
            );
        }
        if let Some((_, since, _)) = self.starting.iter().find(|(.., late)| *late) {
            return Some(format!(
                "an MPS server is not ready after {}s, and the clients that wait for this server hang",
                since.elapsed().as_secs()
            ));
        }
        self.log.deaths()
    }
}

/// Describes a server that ended with clients.
fn describe_lost_server(at: Instant, clients: usize) -> String {
    let had = if clients == 1 { "1 client".to_owned() } else { format!("{clients} clients") };
    let ago = at.elapsed().as_secs();
    format!("an MPS server ended at least {ago}s ago; {had} ended with it")
}

/// Describes why a daemon did not answer.
pub(super) fn describe_no_reply(error: &ControlError, place: &TargetDir, spec: Option<&Spec>) -> String {
    let pipe = spec.map(|spec| place.pipe(spec.tenure));
    match (error, pipe) {
        (ControlError::Session(SessionError::Absent { .. }), Some(pipe)) if !pipe.exists() => {
            format!(
                "the pipe directory {} was deleted: the MPS daemon still serves its clients, but no other program can \
                reach the daemon",
                pipe.display()
            )
        }
        (error, _) => error_chain::in_full(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn server_fault_is_reported_without_its_pid() {
        let servers = vec![(1, Some(MpsServerState::Active)), (77, Some(MpsServerState::Fault))];
        let fault = Health { servers, ..Health::default() }.fault().unwrap();
        assert!(fault.contains("fatal fault") && !fault.contains("77"), "{fault}");
    }
}
