//! The record of a daemon's servers: which processes were children of the daemon while it ran.
//!
//! When a daemon has ended, nothing else proves that a process was its server: a user can copy the lock from a server
//! of this user, and can start any program. So gpushd records each server while its parent is known. The record is in
//! the directory of the target, so the next gpushd finds it.

use std::{
    collections::BTreeSet,
    fs::{self, OpenOptions},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use gpush_host::{boot, proc::ProcessId};
use serde::{Deserialize, Serialize};

/// Name of the file in the directory of a target.
const FILE: &str = "servers.json";

/// File with the boot id.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// Contents of the file.
#[derive(Debug, Serialize, Deserialize)]
struct Contents {
    /// The boot of these processes: start times count from the boot.
    boot_id: String,
    /// Pid and start time of each server.
    servers: Vec<(i32, u64)>,
}

/// The recorded servers of a target that are alive.
#[derive(Debug)]
pub(super) struct ServerRecord {
    file: PathBuf,
    servers: BTreeSet<ProcessId>,
}

impl ServerRecord {
    /// Reads the record in the directory of a target. Without a readable record, no server is known.
    pub(super) fn read(dir: &Path) -> Self {
        let file = dir.join(FILE);
        let contents = fs::read(&file).ok().and_then(|bytes| serde_json::from_slice::<Contents>(&bytes).ok());
        let of_this_boot = contents.filter(|contents| Some(&contents.boot_id) == boot_id().as_ref());
        let servers = of_this_boot.into_iter().flat_map(|contents| contents.servers);
        let servers = servers.map(|(pid, start)| ProcessId { pid, start }).filter(|server| server.is_alive());
        Self { servers: servers.collect(), file }
    }

    /// Returns the recorded servers.
    pub(super) fn servers(&self) -> &BTreeSet<ProcessId> {
        &self.servers
    }

    /// Adds those of the processes that are children of `daemon`, and removes the servers that have ended.
    ///
    /// # Errors
    /// The file cannot be written. This gpushd knows the servers, but the next gpushd does not.
    pub(super) fn update(&mut self, daemon: ProcessId, processes: impl Iterator<Item = i32>) -> io::Result<()> {
        let is_child = |pid: i32| (ProcessId::parent_of(pid) == Some(daemon)).then(|| ProcessId::of(pid)).flatten();
        let mut now: BTreeSet<ProcessId> = processes.filter_map(is_child).collect();
        now.extend(self.servers.iter().copied().filter(|server| server.is_alive()));
        if now == self.servers {
            return Ok(());
        }
        self.servers = now;
        self.write()
    }

    fn write(&self) -> io::Result<()> {
        let servers = self.servers.iter().map(|server| (server.pid, server.start)).collect();
        let contents = Contents { boot_id: boot_id().unwrap_or_default(), servers };
        let new = self.file.with_extension("json.new");
        let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
        file.write_all(&serde_json::to_vec(&contents)?)?;
        fs::rename(&new, &self.file)
    }
}

fn boot_id() -> Option<String> {
    boot::id(Path::new(BOOT_ID)).ok()
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn only_children_of_the_daemon_are_recorded_and_outlive_gpushd() {
        let scratch = tempfile::tempdir().unwrap();
        let daemon = ProcessId::of(std::process::id()).unwrap();
        let mut server = Command::new("sleep").arg("600").spawn().unwrap();
        let pid = server.id().cast_signed();
        let mut record = ServerRecord::read(scratch.path());
        record.update(ProcessId { start: daemon.start + 1, ..daemon }, [pid].into_iter()).unwrap();
        assert_eq!(record.servers(), &BTreeSet::new(), "its parent is another process");
        record.update(daemon, [pid, 1, daemon.pid].into_iter()).unwrap();
        let expected = BTreeSet::from([ProcessId::of(pid).unwrap()]);
        assert_eq!(record.servers(), &expected);
        assert_eq!(ServerRecord::read(scratch.path()).servers(), &expected);
        // A record of another boot names other processes.
        let text = fs::read_to_string(scratch.path().join(FILE)).unwrap();
        fs::write(scratch.path().join(FILE), text.replace("\"boot_id\":\"", "\"boot_id\":\"x")).unwrap();
        assert_eq!(ServerRecord::read(scratch.path()).servers(), &BTreeSet::new());
        server.kill().and_then(|()| server.wait()).unwrap();
        record.update(daemon, std::iter::empty()).unwrap();
        assert_eq!(record.servers(), &BTreeSet::new(), "it has ended");
    }
}
