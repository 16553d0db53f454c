//! How a daemon is: who it is, its servers and what each says of itself, their clients, and whether its
//! servers end as soon as they are started.

use std::{
    collections::VecDeque,
    fs::File,
    io::{Read, Seek, SeekFrom},
    path::Path,
    time::Duration,
};

use gpush_api::MpsServerState;
use gpush_mps::{
    control::{Control, ControlError},
    session::SessionError,
};
use tokio::time::Instant;

use super::{
    exec::CONTROL_LOG,
    hands,
    place::{Place, Spec},
    settings::Has,
};

/// Servers that end with an error so often …
const DEATHS: usize = 3;

/// … within this time are no accident.
const WITHIN: Duration = Duration::from_secs(60);

/// Most of the log that is read at a look, bytes.
const MOST: u64 = 64 << 10;

/// What was seen at one look.
#[derive(Debug, Clone, Default)]
pub(super) struct Health {
    /// Servers, and what each says of itself.
    pub(super) servers: Vec<(i32, Option<MpsServerState>)>,
    /// Clients, each with its server.
    pub(super) clients: Vec<(i32, i32)>,
    /// What each server has that could be asked.
    pub(super) has: Vec<Has>,
    /// Servers that could not: they start, or leave.
    busy: Vec<i32>,
    /// Servers that never said that they serve, since when, and that it is too long.
    starting: Vec<(i32, Instant, bool)>,
    /// Whether it knows the question for a server's state: from version 550 on.
    tells_states: Option<bool>,
    deaths: Deaths,
}

/// Ends of servers that the log tells of.
#[derive(Debug, Clone, Default)]
struct Deaths {
    /// How far the log was read; nothing of it before the first look.
    read: Option<u64>,
    /// When, and with which status.
    recent: VecDeque<(Instant, i32)>,
    /// Whether it says nothing of being asked.
    mute: bool,
}

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
    let mut health = Health { tells_states: before.tells_states, deaths: before.deaths.clone(), ..Health::default() };
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
                health.has.push(Has { server, percentage, limit, first_limit });
            }
            // That it has no clients is then no answer.
            Err(ControlError::ServerBusy) => health.is_busy(server, before),
            Err(ControlError::NoServer) => continue,
            Err(error) => return Err(error),
        }
        health.is_starting(server, state, before, late);
        health.servers.push((server, state));
    }
    health.deaths.look(logs);
    Ok(health)
}

impl Health {
    /// A server can't be asked: its clients are those of before that live.
    fn is_busy(&mut self, server: i32, before: &Self) {
        let those = before.clients.iter().filter(|(of, client)| *of == server && hands::is_alive(*client));
        let new: Vec<_> = those.copied().filter(|one| !self.clients.contains(one)).collect();
        self.clients.extend(new);
        self.busy.push(server);
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

    /// Processes that somebody else knows as its clients.
    pub(super) fn add_clients(&mut self, pids: &[i32]) {
        let server = self.busy.first().copied().or_else(|| self.servers.first().map(|(server, _)| *server));
        for pid in pids {
            if !self.clients.iter().any(|(_, client)| client == pid) {
                self.clients.push((server.unwrap_or_default(), *pid));
            }
        }
    }

    /// That its log does not grow, though it was spoken to.
    pub(super) fn mute(&self) -> Option<String> {
        self.deaths.mute.then(|| {
            "its log does not grow any more: the disk is full, or somebody wrote into `log` in its pipe directory, \
             which will hang it"
                .to_owned()
        })
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
        let (_, status) = self.deaths.recent.back().filter(|_| self.deaths.recent.len() >= DEATHS)?;
        Some(format!(
            "its servers end as soon as they are started: {} within {} s, the last with status {status}",
            self.deaths.recent.len(),
            WITHIN.as_secs()
        ))
    }
}

impl Deaths {
    /// Takes in what the log says since the last look.
    fn look(&mut self, logs: &Path) {
        let now = Instant::now();
        while self.recent.front().is_some_and(|(at, _)| *at + WITHIN <= now) {
            self.recent.pop_front();
        }
        let Ok(mut log) = File::open(logs.join(CONTROL_LOG)) else { return };
        let length = log.metadata().map_or(0, |meta| meta.len());
        let Some(read) = self.read.replace(length) else { return };
        // Each question is a line there, and there was one just now.
        self.mute = read == length;
        // It was rotated: all of it is new.
        let from = if read <= length { read } else { 0 }.max(length.saturating_sub(MOST));
        let mut said = Vec::new();
        if log.seek(SeekFrom::Start(from)).and_then(|_| log.take(MOST).read_to_end(&mut said)).is_err() {
            return;
        }
        let said = String::from_utf8_lossy(&said);
        self.recent.extend(said.lines().filter_map(status_of_a_server).filter(|status| *status != 0).map(|s| (now, s)));
    }
}

/// `… Server 4711 exited with status 1`
fn status_of_a_server(line: &str) -> Option<i32> {
    let (_, rest) = line.split_once("Server ")?;
    let (pid, status) = rest.split_once(" exited with status ")?;
    pid.trim().parse::<u32>().ok()?;
    status.trim().parse().ok()
}

/// Why a daemon did not answer, in words.
pub(super) fn silence(error: &ControlError, place: &Place, spec: Option<&Spec>) -> String {
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
    fn servers_that_end_again_and_again_are_a_fault_and_one_that_ends_is_none() {
        let logs = tempfile::tempdir().unwrap();
        let path = logs.path().join(CONTROL_LOG);
        let line = "[2026-11-22 04:00:00.000 Control   812] Server 4711 exited with status";
        std::fs::write(&path, format!("{line} 1\n").repeat(9)).unwrap();
        let mut health = Health::default();
        health.deaths.look(logs.path());
        assert_eq!(health.fault(), None, "what was before is of a daemon before");
        let say = |status: &str, times: usize| {
            let said = std::fs::read_to_string(&path).unwrap() + &format!("{line} {status}\n").repeat(times);
            std::fs::write(&path, said).unwrap();
        };
        say("0", 9);
        say("1", 2);
        health.deaths.look(logs.path());
        assert_eq!(health.fault(), None);
        say("127", 1);
        health.deaths.look(logs.path());
        assert!(health.fault().unwrap().ends_with("3 within 60 s, the last with status 127"), "{:?}", health.fault());
        // Rotated: what is there now is all new.
        std::fs::write(&path, format!("{line} 2\n")).unwrap();
        health.deaths.look(logs.path());
        assert!(health.fault().unwrap().contains("4 within"), "{:?}", health.fault());
    }

    #[test]
    fn a_servers_fault_is_told_with_its_pid() {
        let servers = vec![(1, Some(MpsServerState::Active)), (7, Some(MpsServerState::Fault))];
        assert!(Health { servers, ..Health::default() }.fault().unwrap().starts_with("server 7 met"));
    }
}
