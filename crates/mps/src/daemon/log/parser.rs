//! What the control daemon's log tells that no command does: servers that end as soon as they are started,
//! clients that wait in line, and that the log itself has gone silent.
//!
//! Its users can write into the log, also those who were let in once: what it says counts only as far as the
//! kernel bears it out. That servers ended, by what the daemon was charged with for children that have; who
//! waits is told by [`super::super::pending`], which the log only helps to find.

use std::{
    collections::VecDeque,
    fs::File,
    io::{self, Read, Seek, SeekFrom},
    path::Path,
    time::Duration,
};

use gpush_host::proc;
use tokio::time::Instant;

use super::{CONTROL_LOG, rotation::BEFORE};

/// Servers that end with an error so often …
const DEATHS: usize = 3;

/// … within this time are no accident.
const WITHIN: Duration = Duration::from_secs(60);

/// Most of the log that is read at a look, bytes.
const MOST: u64 = 64 << 10;

/// Most clients that are remembered to wait. A daemon takes fewer.
const LONGEST: usize = 256;

/// What was read of a log so far.
#[derive(Debug, Clone, Default)]
pub(in crate::daemon) struct LogParser {
    /// How far it was read; nothing of it before the first look.
    read: Option<u64>,
    /// What the daemon had been charged with when the last look began.
    charged: Option<u64>,
    /// Ends of servers: when, and with which status.
    recent: VecDeque<(Instant, i32)>,
    /// Whether it says nothing of being asked.
    mute: bool,
    /// Clients that came while there was no server for them, with their users, as far as they live. They wait
    /// until there is one, and are told when it can't be.
    waiting: Vec<(i32, u32)>,
}

impl LogParser {
    /// Takes in what the log says since the last look. `charged`: what the daemon has been charged with for
    /// children that ended, when this look began and now.
    pub(in crate::daemon) fn look(&mut self, logs: &Path, charged: (Option<u64>, Option<u64>)) {
        let now = Instant::now();
        while self.recent.front().is_some_and(|(at, _)| *at + WITHIN <= now) {
            self.recent.pop_front();
        }
        self.waiting.retain(|(pid, _)| proc::is_alive(*pid));
        let Ok(mut log) = File::open(logs.join(CONTROL_LOG)) else { return };
        let length = log.metadata().map_or(0, |meta| meta.len());
        let before = self.read.replace(length);
        // Each question is a line there, and there was one just now.
        self.mute = before == Some(length);
        // Each end is charged before it is told.
        let has_ended = matches!((self.charged, charged.1), (Some(before), Some(now)) if before != now);
        self.charged = charged.0;
        // It was rotated: all of it is new, and so is the end of the one before.
        let mut said = Vec::new();
        let rotated = before.filter(|read| *read > length);
        if let Some(read) = rotated
            && let Ok(mut old) = File::open(logs.join(format!("{CONTROL_LOG}{BEFORE}")))
        {
            // One that is gone says nothing.
            let _gone = read_on(&mut old, read, &mut said);
        }
        if read_on(&mut log, before.filter(|_| rotated.is_none()).unwrap_or(0), &mut said).is_err() {
            return;
        }
        for line in String::from_utf8_lossy(&said).lines() {
            if line.contains("Starting control daemon") {
                // What was before is of a daemon before.
                self.waiting.clear();
            } else if let Some(status) = status_of_a_server(line).filter(|_| has_ended) {
                // Those who waited for it were told so.
                self.waiting.clear();
                // Servers that ended before the first look are no news.
                self.recent.extend((status != 0 && before.is_some()).then_some((now, status)));
            } else if let Some(client) = pending_client(line)
                && self.waiting.len() < LONGEST
                && !self.waiting.contains(&client)
                && proc::is_alive(client.0)
            {
                self.waiting.push(client);
            }
        }
    }

    /// Forgets who waited: those who are clients now.
    pub(in crate::daemon) fn serves(&mut self, clients: &[(i32, i32)]) {
        self.waiting.retain(|(pid, _)| !clients.iter().any(|(_, client)| client == pid));
    }

    /// Clients that came while there was no server, by the log's word, with the users that it names.
    pub(in crate::daemon) fn waiting(&self) -> &[(i32, u32)] {
        &self.waiting
    }

    /// Whether it does not grow, though the daemon was spoken to.
    pub(in crate::daemon) fn is_mute(&self) -> bool {
        self.mute
    }

    /// The same, in words.
    pub(in crate::daemon) fn mute(&self) -> Option<String> {
        self.mute.then(|| {
            "its log does not grow any more: the disk is full, or somebody wrote into `log` in its pipe directory, \
             which will hang it"
                .to_owned()
        })
    }

    /// That one of its servers ended badly, with whatever clients it had.
    pub(in crate::daemon) fn death(&self) -> Option<String> {
        let (at, status) = self.recent.back()?;
        let ago = at.elapsed().as_secs();
        Some(format!("a server of it ended with status {status} {ago} s ago, and took its clients along"))
    }

    /// That its servers end as soon as they are started.
    pub(in crate::daemon) fn deaths(&self) -> Option<String> {
        let (_, status) = self.recent.back().filter(|_| self.recent.len() >= DEATHS)?;
        Some(format!(
            "its servers end as soon as they are started: {} within {} s, the last with status {status}",
            self.recent.len(),
            WITHIN.as_secs()
        ))
    }
}

/// Reads on in a log; of one that is long the end.
fn read_on(log: &mut File, from: u64, said: &mut Vec<u8>) -> io::Result<()> {
    let end = log.metadata()?.len().saturating_sub(MOST);
    log.seek(SeekFrom::Start(from.max(end)))?;
    log.take(MOST).read_to_end(said).map(|_| ())
}

/// `… Server 4711 exited with status 1`
fn status_of_a_server(line: &str) -> Option<i32> {
    let (_, rest) = line.split_once("Server ")?;
    let (pid, status) = rest.split_once(" exited with status ")?;
    pid.trim().parse::<u32>().ok()?;
    status.trim().parse().ok()
}

/// `… NEW CLIENT 4711 from user 1000: Server is not ready, push client to pending list`: its pid and user.
fn pending_client(line: &str) -> Option<(i32, u32)> {
    let (_, rest) = line.split_once("NEW CLIENT ")?;
    let (pid, rest) = rest.split_once(" from user ")?;
    let (uid, _) = rest.split_once(": Server is not ready, push client to pending list")?;
    Some((pid.parse().ok()?, uid.parse().ok()?))
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
        let mut seen = LogParser::default();
        let mut charges = 7;
        // A server ended.
        let mut look = |seen: &mut LogParser| {
            charges += 100;
            seen.look(logs.path(), (Some(charges - 50), Some(charges)));
        };
        look(&mut seen);
        assert_eq!(seen.deaths(), None, "what was before is of a daemon before");
        let say = |status: &str, times: usize| {
            let said = std::fs::read_to_string(&path).unwrap() + &format!("{line} {status}\n").repeat(times);
            std::fs::write(&path, said).unwrap();
        };
        say("0", 9);
        say("1", 2);
        look(&mut seen);
        assert_eq!(seen.deaths(), None);
        say("127", 1);
        look(&mut seen);
        assert!(seen.deaths().unwrap().ends_with("3 within 60 s, the last with status 127"), "{:?}", seen.deaths());
        // Rotated: what is there now is all new.
        std::fs::write(&path, format!("{line} 2\n")).unwrap();
        look(&mut seen);
        assert!(seen.deaths().unwrap().contains("4 within"), "{:?}", seen.deaths());
    }

    #[test]
    fn ends_of_servers_that_nobody_was_charged_with_are_made_up() {
        let logs = tempfile::tempdir().unwrap();
        let path = logs.path().join(CONTROL_LOG);
        std::fs::write(&path, "").unwrap();
        let mut seen = LogParser::default();
        seen.look(logs.path(), (Some(7), Some(7)));
        let line = "[2026-11-22 04:00:00.000 Control   812] Server 4711 exited with status 1\n";
        std::fs::write(&path, line.repeat(9)).unwrap();
        seen.look(logs.path(), (Some(7), Some(7)));
        assert_eq!((seen.deaths(), seen.death()), (None, None));
        // One that ended while it was looked at before, and is told now.
        std::fs::write(&path, line.repeat(10)).unwrap();
        seen.look(logs.path(), (Some(7), Some(9)));
        assert!(seen.death().is_some());
    }
    #[test]
    fn clients_that_wait_are_told_as_long_as_they_live() {
        let logs = tempfile::tempdir().unwrap();
        let path = logs.path().join(CONTROL_LOG);
        std::fs::write(&path, "").unwrap();
        let mut seen = LogParser::default();
        seen.look(logs.path(), (Some(7), Some(7)));
        let me = std::process::id();
        let line = |pid: u32, said: &str| format!("[… Control   812] NEW CLIENT {pid} from user 12: {said}\n");
        let pending = "Server is not ready, push client to pending list";
        let said = [line(me, pending), line(me, pending), line(4_194_305, pending), line(1, "Server already exists")];
        std::fs::write(&path, said.concat()).unwrap();
        seen.look(logs.path(), (Some(7), Some(7)));
        assert_eq!(seen.waiting(), [(me.cast_signed(), 12)]);
    }
}
