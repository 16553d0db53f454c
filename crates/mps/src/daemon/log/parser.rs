//! Parser of the control daemon's log, for facts that no command reports: servers that end as soon as they start,
//! clients that wait for a server, and a log that has stopped growing.
//!
//! Users who have or had access can write into the log. So the parser uses a line only if the
//! kernel confirms the fact. A server has ended only if the resources that the kernel charges to
//! the daemon for its ended children have increased ([`proc::child_resource_use`]).
//! [`pending`](super::super::pending) confirms clients that wait for a server.

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

/// gpushd reports a fault if this number of servers end with an error within [`WITHIN`].
const DEATHS: usize = 3;

/// The period for [`DEATHS`].
const WITHIN: Duration = Duration::from_secs(60);

/// Maximum number of bytes of the log that one probe reads.
const MOST: u64 = 64 << 10;

/// Maximum number of pending clients to remember. A daemon accepts fewer clients.
const MOST_PENDING: usize = 256;

/// The facts from the log so far.
#[derive(Debug, Clone, Default)]
pub(in crate::daemon) struct LogParser {
    /// Offset up to which the log was read; `None` before the first probe.
    read: Option<u64>,
    /// Resources that the daemon's ended children had used when the last probe began: page faults plus clock ticks.
    charged: Option<u64>,
    /// Servers that recently ended with an error: time, exit status.
    recent: VecDeque<(Instant, i32)>,
    /// Whether the log did not grow although the daemon received commands. The daemon should have
    /// logged each of these commands.
    mute: bool,
    /// Live clients that connected while there was no server for them, with their users.
    waiting: Vec<(i32, u32)>,
}

impl LogParser {
    /// Parses the lines since the last probe. `charged` contains two values of
    /// [`proc::child_resource_use`] for the daemon: from the beginning of this probe, and from now.
    pub(in crate::daemon) fn read(&mut self, logs: &Path, charged: (Option<u64>, Option<u64>)) {
        let now = Instant::now();
        while self.recent.front().is_some_and(|(at, _)| *at + WITHIN <= now) {
            self.recent.pop_front();
        }
        self.waiting.retain(|(pid, _)| proc::is_alive(*pid));
        let Ok(mut log) = File::open(logs.join(CONTROL_LOG)) else { return };
        let length = log.metadata().map_or(0, |meta| meta.len());
        let before = self.read.replace(length);
        // The log should have grown: the daemon logs each command, and this probe has just sent
        // some commands.
        self.mute = before == Some(length);
        // The kernel charges the resources of an ended server to the daemon before the daemon writes the line about the
        // end.
        let has_ended = matches!((self.charged, charged.1), (Some(before), Some(now)) if before != now);
        self.charged = charged.0;
        // After a rotation, read the rest of the previous log and all of the new one.
        let mut message = Vec::new();
        let rotated = before.filter(|read| *read > length);
        if let Some(read) = rotated
            && let Ok(mut old) = File::open(logs.join(format!("{CONTROL_LOG}{BEFORE}")))
        {
            // If the rest of the previous log cannot be read, its lines are lost.
            let _gone = read_on(&mut old, read, &mut message);
        }
        if read_on(&mut log, before.filter(|_| rotated.is_none()).unwrap_or(0), &mut message).is_err() {
            return;
        }
        for line in String::from_utf8_lossy(&message).lines() {
            if line.contains("Starting control daemon") {
                // The lines before this one are from a previous daemon, so forget the clients of that daemon.
                self.waiting.clear();
            } else if let Some(status) = status_of_a_server(line).filter(|_| has_ended) {
                // The daemon has refused the clients that waited for this server, so forget them.
                self.waiting.clear();
                // At the first probe, the log contains old ends of servers. Ignore them.
                self.recent.extend((status != 0 && before.is_some()).then_some((now, status)));
            } else if let Some(client) = pending_client(line)
                && self.waiting.len() < MOST_PENDING
                && !self.waiting.contains(&client)
                && proc::is_alive(client.0)
            {
                self.waiting.push(client);
            }
        }
    }

    /// Forgets pending clients that have a server now.
    pub(in crate::daemon) fn serves(&mut self, clients: &[(i32, i32)]) {
        self.waiting.retain(|(pid, _)| !clients.iter().any(|(_, client)| client == pid));
    }

    /// Returns the pending clients that the log names, with their users.
    pub(in crate::daemon) fn waiting(&self) -> &[(i32, u32)] {
        &self.waiting
    }

    /// Returns whether the log did not grow although the daemon received commands.
    pub(in crate::daemon) fn is_mute(&self) -> bool {
        self.mute
    }

    /// Returns a description of the problem if the log has stopped growing.
    pub(in crate::daemon) fn mute(&self) -> Option<String> {
        self.mute.then(|| {
            "the MPS daemon can no longer write its log and will hang: the disk is full, or another program wrote \
            into `log` in the pipe directory"
                .to_owned()
        })
    }

    /// Describes the last server that ended with an error.
    pub(in crate::daemon) fn death(&self) -> Option<String> {
        let (at, status) = self.recent.back()?;
        let ago = at.elapsed().as_secs();
        Some(format!("an MPS server ended {ago}s ago with status {status}, and its clients ended with it"))
    }

    /// Describes servers that end as soon as they start.
    pub(in crate::daemon) fn deaths(&self) -> Option<String> {
        let (_, status) = self.recent.back().filter(|_| self.recent.len() >= DEATHS)?;
        Some(format!(
            "the MPS servers end as soon as they are started: {} servers ended within {}s, the last one with status \
            {status}",
            self.recent.len(),
            WITHIN.as_secs()
        ))
    }
}

/// Reads a log from an offset, but at most its last [`MOST`] bytes.
fn read_on(log: &mut File, from: u64, message: &mut Vec<u8>) -> io::Result<()> {
    let end = log.metadata()?.len().saturating_sub(MOST);
    log.seek(SeekFrom::Start(from.max(end)))?;
    log.take(MOST).read_to_end(message).map(|_| ())
}

/// Parses `… Server 4711 exited with status 1`.
fn status_of_a_server(line: &str) -> Option<i32> {
    let (_, rest) = line.split_once("Server ")?;
    let (pid, status) = rest.split_once(" exited with status ")?;
    pid.trim().parse::<u32>().ok()?;
    status.trim().parse().ok()
}

/// Parses pid and user of `… NEW CLIENT 4711 from user 1000: Server is not ready, push client to pending list`.
fn pending_client(line: &str) -> Option<(i32, u32)> {
    let (_, rest) = line.split_once("NEW CLIENT ")?;
    let (pid, rest) = rest.split_once(" from user ")?;
    let (uid, _) = rest.split_once(": Server is not ready, push client to pending list")?;
    Some((pid.parse().ok()?, uid.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Users can write any line into the log.
        #[test]
        fn any_line_of_a_log_is_parsed_without_a_panic(
            line in "((Server|NEW CLIENT|exited with status| from user |: Server is not ready, push client to pending list|-?[0-9]{1,20}|.{0,4}) ?){0,12}",
        ) {
            let _ = (status_of_a_server(&line), pending_client(&line));
        }
    }

    #[test]
    fn repeated_ends_of_servers_are_a_fault() {
        let logs = tempfile::tempdir().unwrap();
        let path = logs.path().join(CONTROL_LOG);
        let line = "[2026-11-22 04:00:00.000 Control   812] Server 4711 exited with status";
        std::fs::write(&path, format!("{line} 1\n").repeat(9)).unwrap();
        let mut parser = LogParser::default();
        let mut charges = 7;
        // Reads the log as a probe does after a server has ended.
        let mut look = |parser: &mut LogParser| {
            charges += 100;
            parser.read(logs.path(), (Some(charges - 50), Some(charges)));
        };
        look(&mut parser);
        assert_eq!(parser.deaths(), None, "what was before is of a daemon before");
        let say = |status: &str, times: usize| {
            let message = std::fs::read_to_string(&path).unwrap() + &format!("{line} {status}\n").repeat(times);
            std::fs::write(&path, message).unwrap();
        };
        say("0", 9);
        say("1", 2);
        look(&mut parser);
        assert_eq!(parser.deaths(), None);
        say("127", 1);
        look(&mut parser);
        assert!(
            parser.deaths().unwrap().ends_with("3 servers ended within 60s, the last one with status 127"),
            "{:?}",
            parser.deaths()
        );
        // After a rotation, all lines are new.
        std::fs::write(&path, format!("{line} 2\n")).unwrap();
        look(&mut parser);
        assert!(parser.deaths().unwrap().contains("4 servers ended within"), "{:?}", parser.deaths());
    }

    #[test]
    fn server_end_without_a_charge_is_ignored() {
        let logs = tempfile::tempdir().unwrap();
        let path = logs.path().join(CONTROL_LOG);
        std::fs::write(&path, "").unwrap();
        let mut parser = LogParser::default();
        parser.read(logs.path(), (Some(7), Some(7)));
        let line = "[2026-11-22 04:00:00.000 Control   812] Server 4711 exited with status 1\n";
        std::fs::write(&path, line.repeat(9)).unwrap();
        parser.read(logs.path(), (Some(7), Some(7)));
        assert_eq!((parser.deaths(), parser.death()), (None, None));
        // A server ended during the previous probe, and the daemon writes the line about this end only now.
        std::fs::write(&path, line.repeat(10)).unwrap();
        parser.read(logs.path(), (Some(7), Some(9)));
        assert!(parser.death().is_some());
    }
    #[test]
    fn pending_clients_are_kept_while_they_live() {
        let logs = tempfile::tempdir().unwrap();
        let path = logs.path().join(CONTROL_LOG);
        std::fs::write(&path, "").unwrap();
        let mut parser = LogParser::default();
        parser.read(logs.path(), (Some(7), Some(7)));
        let me = std::process::id();
        let line = |pid: u32, message: &str| format!("[… Control   812] NEW CLIENT {pid} from user 12: {message}\n");
        let pending = "Server is not ready, push client to pending list";
        let message =
            [line(me, pending), line(me, pending), line(4_194_305, pending), line(1, "Server already exists")];
        std::fs::write(&path, message.concat()).unwrap();
        parser.read(logs.path(), (Some(7), Some(7)));
        assert_eq!(parser.waiting(), [(me.cast_signed(), 12)]);
    }
}
