//! Checks whether processes are alive.
//!
//! Every driver call checks which processes are alive, because a process that ends releases its GPU
//! at once. The calling process has a pidfd open for each process that it watches, and one `poll`
//! checks all of them. With `/proc`, the check would read one file for each process.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};

use gpush_locked::Locked;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rustix::process::{PidfdFlags, pidfd_open};

use crate::machine::Pid;

/// The pidfds of the processes that this process watches.
#[derive(Debug, Default)]
pub(super) struct Living {
    watched: Locked<HashMap<Pid, OwnedFd>>,
}

impl Living {
    /// Returns whether all these processes are alive. Stops watching every process that is not in
    /// the list.
    pub(super) fn are_all(&self, pids: impl Iterator<Item = Pid>) -> bool {
        let mut watched = self.watched.lock();
        let mut asked = HashMap::with_capacity(watched.len());
        for pid in pids {
            if asked.contains_key(&pid) {
                continue;
            }
            match watched.remove(&pid).or_else(|| watch(pid)) {
                Some(process) => {
                    asked.insert(pid, process);
                }
                // If the limit of open files prevents a new pidfd, check the process without a
                // pidfd.
                None if pid.is_alive() => {}
                None => return false,
            }
        }
        *watched = asked;
        let mut states: Vec<_> = watched.values().map(|held| PollFd::new(held.as_fd(), PollFlags::POLLIN)).collect();
        match poll(&mut states, PollTimeout::ZERO) {
            Ok(ended) => ended == 0,
            Err(_) => watched.keys().all(|pid| pid.is_alive()),
        }
    }
}

/// Opens a pidfd of a live process. First opens the pidfd and then checks the process, so the pidfd cannot refer to a
/// later process with the same pid.
fn watch(pid: Pid) -> Option<OwnedFd> {
    let process = rustix::process::Pid::from_raw(i32::try_from(pid.pid).ok()?)?;
    let held = pidfd_open(process, PidfdFlags::empty()).ok()?;
    pid.is_alive().then_some(held)
}

/// Returns the start time of a live process in clock ticks since boot, from `/proc/<pid>/stat`. A
/// zombie is not alive, because it uses no GPU. If only its first thread has ended, the process is alive.
fn start_of(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The process name is in parentheses, and may contain any character. The fields after the last
    // closing parenthesis contain no parenthesis.
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
    let state = fields.next()?;
    // The state is field 3, the number of threads is field 20, and the start time is field 22.
    let threads: u64 = fields.nth(16)?.parse().ok()?;
    let start = fields.nth(1)?.parse().ok()?;
    (threads > 1 || !matches!(state, "Z" | "X" | "x")).then_some(start)
}

impl Pid {
    /// Returns the live process with this pid, or `None`.
    #[must_use]
    pub fn find(pid: u32) -> Option<Self> {
        start_of(pid).map(|start| Self { pid, start })
    }

    /// Returns this process.
    #[must_use]
    pub fn own() -> Self {
        let pid = std::process::id();
        Self { pid, start: start_of(pid).unwrap_or(0) }
    }

    /// Returns whether the process is alive.
    #[must_use]
    pub fn is_alive(self) -> bool {
        start_of(self.pid) == Some(self.start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn process_is_identified_by_start_time() {
        let own = Pid::own();
        assert!(own.is_alive());
        assert!(!Pid { start: own.start + 1, ..own }.is_alive());
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let found = Pid::find(child.id()).unwrap();
        assert!(found.is_alive());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!found.is_alive());
    }

    #[test]
    fn watched_process_is_gone_before_it_is_reaped() {
        let living = Living::default();
        let mut children: Vec<_> =
            (0..3).map(|_| std::process::Command::new("sleep").arg("60").spawn().unwrap()).collect();
        let pids: Vec<_> = children.iter().map(|child| Pid::find(child.id()).unwrap()).collect();
        assert!(living.are_all(pids.iter().copied()));
        assert!(living.are_all(pids[1..].iter().copied()));
        assert_eq!(living.watched.lock().len(), 2, "a process that is not queried is no longer watched");
        let later = Pid { start: pids[0].start + 1, ..pids[0] };
        assert!(!living.are_all([later].into_iter()), "another process with the same id");
        assert!(living.are_all(pids.iter().copied()));
        children[2].kill().unwrap();
        // The parent has not reaped the child yet, so the child is a zombie. A zombie must not
        // count as alive.
        while pids[2].is_alive() {
            std::thread::yield_now();
        }
        assert!(!living.are_all(pids.iter().copied()));
        assert!(living.are_all(pids[..2].iter().copied()));
        for mut child in children {
            child.kill().unwrap();
            child.wait().unwrap();
        }
        assert!(!living.are_all(pids[..1].iter().copied()));
    }
}
