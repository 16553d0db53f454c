//! How a daemon is: who it is, its servers and what each says of itself, their clients, and what its log
//! alone tells.

use std::{path::Path, time::Duration};

use crate::protocol::{
    control::{Control, ControlError},
    session::SessionError,
};
use gpush_api::MpsServerState;
use gpush_host::proc;
use tokio::time::Instant;

use super::{
    log::LogParser,
    pending::{self, Pending},
    settings::ServerSettings,
    target_dir::{Spec, TargetDir},
};

/// What was seen at one look.
#[derive(Debug, Clone, Default)]
pub(super) struct Health {
    /// Servers, and what each says of itself.
    pub(super) servers: Vec<(i32, Option<MpsServerState>)>,
    /// Clients, each with its server.
    pub(super) clients: Vec<(i32, i32)>,
    /// What each server has that could be asked.
    pub(super) has: Vec<ServerSettings>,
    /// Servers that could not: they start, or leave.
    busy: Vec<i32>,
    /// Servers that never said that they serve, since when, and that it is too long.
    starting: Vec<(i32, Instant, bool)>,
    /// Whether it knows the question for a server's state: from version 550 on.
    tells_states: Option<bool>,
    /// Whether the driver does not tell either who the clients of a server are that can't be asked.
    untold: bool,
    log: LogParser,
    pending: Pending,
    /// The server that was gone last, though it had clients: when that was seen, and how many.
    fallen: Option<(Instant, i32, usize)>,
}

/// How long it is told that a server fell.
const TOLD: Duration = Duration::from_secs(600);

/// Asks the daemon of a pid.
pub(super) async fn ask(
    control: &Control,
    pid: i32,
    logs: &Path,
    before: &Health,
    late: Duration,
    deadline: Duration,
) -> Result<Health, ControlError> {
    let daemon = control.daemon(deadline).await?;
    if (daemon.pid, daemon.uid) != (pid, nix::unistd::geteuid().as_raw()) {
        let what = format!("process {} of uid {} answers in place of {pid}", daemon.pid, daemon.uid);
        return Err(SessionError::Foreign(what).into());
    }
    let at_first = proc::charged(pid);
    let mut health = Health { tells_states: before.tells_states, log: before.log.clone(), ..Health::default() };
    for server in control.servers(deadline).await? {
        let state = match health.tells_states {
            Some(false) => None,
            Some(true) | None => match control.server_state(server, deadline).await {
                Ok(state) => {
                    health.tells_states = Some(true);
                    Some(state)
                }
                Err(ControlError::Unknown(_)) => {
                    health.tells_states = Some(false);
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
                let known = before.has.iter().find(|has| has.server == server);
                let first_limit = known.map_or(limit, |known| known.first_limit);
                health.has.push(ServerSettings { server, percentage, limit, first_limit });
            }
            // That it has no clients is then no answer.
            Err(ControlError::ServerBusy) => health.is_busy(server, before),
            Err(ControlError::NoServer) => continue,
            Err(error) => return Err(error),
        }
        health.is_starting(server, state, before, late);
        health.servers.push((server, state));
    }
    health.has_fallen(before);
    health.log.look(logs, (at_first, proc::charged(pid)));
    health.log.serves(&health.clients);
    health.look_at_doors(pid, control.directory()).await;
    Ok(health)
}

impl Health {
    /// Looks who waits at the doors of a daemon, which need not answer for that.
    pub(super) async fn look_at_doors(&mut self, daemon: i32, pipe: &Path) {
        let known =
            self.servers.iter().map(|(server, _)| *server).chain(self.clients.iter().map(|(_, client)| *client));
        let named = Some(self.log.waiting()).filter(|_| !self.log.is_mute());
        self.pending = pending::look(daemon, pipe, known.collect(), named).await;
    }

    /// A server can't be asked: its clients are those of before that live.
    fn is_busy(&mut self, server: i32, before: &Self) {
        let those = before.clients.iter().filter(|(of, client)| *of == server && proc::is_alive(*client));
        let new: Vec<_> = those.copied().filter(|one| !self.clients.contains(one)).collect();
        self.clients.extend(new);
        self.busy.push(server);
    }

    /// Notes that a server is gone that had clients when it was looked at before. The log tells of those that ended
    /// with an error, and not of one that was killed.
    fn has_fallen(&mut self, before: &Self) {
        self.fallen = before.fallen.filter(|(at, ..)| at.elapsed() < TOLD);
        for (server, _) in before.servers.iter().filter(|(server, _)| !proc::is_alive(*server)) {
            let clients = before.clients.iter().filter(|(of, _)| of == server).count();
            if clients > 0 && !self.servers.iter().any(|(one, _)| one == server) {
                self.fallen = Some((Instant::now(), *server, clients));
            }
        }
    }

    /// The server that fell since the look before, in words.
    pub(super) fn fell(&self, before: &Self) -> Option<String> {
        let (at, server, clients) = self.fallen.filter(|_| self.fallen != before.fallen)?;
        Some(fall(at, server, clients))
    }

    /// Notes since when a server starts, if it does. One that leaves is busy too, and has served before.
    fn is_starting(&mut self, server: i32, state: Option<MpsServerState>, before: &Self, late: Duration) {
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

    /// Whether it could not be told who its clients are.
    pub(super) fn is_unsure(&self) -> bool {
        !self.busy.is_empty()
    }

    /// Takes in which processes the driver knows as its clients; nothing when it does not tell.
    pub(super) fn witnessed(&mut self, told: Option<&[i32]>) {
        self.untold = told.is_none();
        self.add_clients(told.unwrap_or_default());
    }

    /// Processes that somebody else knows as its clients.
    pub(super) fn add_clients(&mut self, pids: &[i32]) {
        let server = self.busy.first().copied().or_else(|| self.servers.first().map(|(server, _)| *server));
        for pid in pids {
            if !self.clients.iter().any(|(_, client)| client == pid) {
                self.clients.push((server.unwrap_or_default(), *pid));
            }
        }
    }

    /// What of its log and its doors is worth a word to whoever looks.
    pub(super) fn told(&self) -> Vec<String> {
        let fallen = self.fallen.map(|(at, server, clients)| fall(at, server, clients));
        // One of them is enough: it may be the same that both tell of.
        let death = self.log.death().filter(|_| self.fault().is_none() && fallen.is_none());
        let untold = (self.untold && self.is_unsure()).then(|| {
            "a server of it starts or ends and is not asked, and the driver does not tell of its clients: who they are is \
             not known"
                .to_owned()
        });
        let others = self.pending.others.then(|| {
            "somebody is connected to it who can't be seen from here, as of another namespace: whether that is a client \
             is not known"
                .to_owned()
        });
        self.log.mute().into_iter().chain(fallen).chain(death).chain(untold).chain(others).collect()
    }

    /// Processes that wait for a server: they are inside, though no server knows them.
    pub(super) fn waiting(&self) -> Vec<i32> {
        let is_client = |pid: &i32| self.clients.iter().any(|(_, client)| client == pid);
        self.pending.waiting.iter().copied().filter(|pid| proc::is_alive(*pid) && !is_client(pid)).collect()
    }

    /// Those who were seen to wait.
    pub(super) fn waits(&self) -> impl Iterator<Item = i32> {
        self.pending.waiting.iter().copied()
    }

    /// How many are inside; `None` when nobody can tell.
    pub(super) fn inside(&self) -> Option<usize> {
        (!self.untold && !self.pending.others).then(|| self.clients.len() + self.waiting().len())
    }

    /// Why nobody can be let in, though the daemon answers.
    pub(super) fn fault(&self) -> Option<String> {
        let faulty = self.servers.iter().find(|(_, state)| *state == Some(MpsServerState::Fault));
        if let Some((server, _)) = faulty {
            return Some(format!(
                "server {server} met a fatal fault of a client: it takes nobody until those concerned have ended"
            ));
        }
        if let Some((server, since, _)) = self.starting.iter().find(|(.., late)| *late) {
            return Some(format!(
                "server {server} is not ready after {} s, and those who wait for it hang",
                since.elapsed().as_secs()
            ));
        }
        self.log.deaths()
    }
}

/// That a server ended, and whom that cost.
fn fall(at: Instant, server: i32, clients: usize) -> String {
    let had = if clients == 1 { "1 client".to_owned() } else { format!("{clients} clients") };
    let ago = at.elapsed().as_secs();
    format!("server {server} of it, seen to be gone {ago} s ago, had {had} when it was last asked: they went with it")
}

/// Why a daemon did not answer, in words.
pub(super) fn silence(error: &ControlError, place: &TargetDir, spec: Option<&Spec>) -> String {
    let pipe = spec.map(|spec| place.pipe(spec.tenure));
    match (error, pipe) {
        (ControlError::Session(SessionError::Absent { .. }), Some(pipe)) if !pipe.exists() => {
            format!(
                "its pipe directory {} was deleted: it serves whom it has, and nobody else can reach it",
                pipe.display()
            )
        }
        (error, _) => {
            let mut words = error.to_string();
            let mut source = std::error::Error::source(error);
            while let Some(cause) = source {
                let cause_words = cause.to_string();
                if !words.contains(&cause_words) {
                    words = format!("{words}: {cause_words}");
                }
                source = cause.source();
            }
            words
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_servers_fault_is_told_with_its_pid() {
        let servers = vec![(1, Some(MpsServerState::Active)), (7, Some(MpsServerState::Fault))];
        assert!(Health { servers, ..Health::default() }.fault().unwrap().starts_with("server 7 met"));
    }
}
