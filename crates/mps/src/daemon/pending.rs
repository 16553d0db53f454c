//! Who has come to a daemon and has no server yet. The daemon tells of nobody whom no server has, but it keeps each
//! of them connected until there is one, and nobody else for long: the kernel tells who that is.
//!
//! ```text
//! connected, of no server, no client ─► waits
//! from another network namespace ─────► waits whom the log names, of the user whom it names, if he is in another
//!                                       one; are there more than those, nobody can tell
//! of another pid namespace ───────────► nobody can tell
//! ```
//!
//! Where the kernel does not tell, the log does, as far as it is not mute.

use std::{path::Path, pin::Pin, sync::Arc};

use gpush_api::MpsServerState;
use gpush_host::proc;

use super::health::Health;
use crate::protocol::holder::{self, Guests};

/// Asks the driver for the pids of the MPS clients of a target. `None` when the driver cannot tell.
pub type DriverClients = Arc<dyn Fn() -> Pin<Box<dyn Future<Output = Option<Vec<i32>>> + Send>> + Send + Sync>;

/// Who waits at a daemon's doors.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Pending {
    /// Those who wait.
    pub(super) waiting: Vec<i32>,
    /// Whether others may.
    pub(super) others: bool,
}

/// Looks at the doors of a daemon with these servers and clients. `named`: who waits by the word of its log, with
/// their users; nothing where it is mute.
pub(super) async fn look(daemon: i32, pipe: &Path, known: Vec<i32>, named: Option<&[(i32, u32)]>) -> Pending {
    let (pipe, inside) = (pipe.to_owned(), known.clone());
    let found = tokio::task::spawn_blocking(move || holder::guests(daemon, &pipe, &inside)).await;
    let named_ones = named.unwrap_or_default().iter().filter(|(pid, uid)| proc::owner(*pid) == Some(*uid));
    let named_ones: Vec<i32> = named_ones.map(|(pid, _)| *pid).filter(|pid| !known.contains(pid)).collect();
    match found.map_err(std::io::Error::other).and_then(|found| found) {
        Ok(guests) => at(guests, named_ones.into_iter().filter(|pid| is_elsewhere(*pid))),
        Err(error) => {
            tracing::debug!(daemon, "who waits at its doors can't be told: {error}");
            Pending { waiting: named_ones, others: named.is_none() }
        }
    }
}

fn at(guests: Guests, named: impl Iterator<Item = i32>) -> Pending {
    let elsewhere: Vec<i32> = if guests.elsewhere > 0 { named.collect() } else { Vec::new() };
    let others = guests.unseen || guests.elsewhere > elsewhere.len();
    Pending { waiting: guests.pids.into_iter().chain(elsewhere).collect(), others }
}

/// Whether a process is in another network namespace than we.
fn is_elsewhere(pid: i32) -> bool {
    proc::is_in_our_network(pid) == Some(false)
}

/// Returns the clients that hang until all clients of the user whom the daemon serves have ended: those of other users,
/// and all that came after them.
pub(super) fn blocked(servers: &[(i32, Option<MpsServerState>)], waiting: &[i32]) -> Vec<i32> {
    let users: Vec<u32> = servers.iter().filter_map(|(server, _)| proc::owner(*server)).collect();
    let is_other = |pid: &i32| proc::owner(*pid).is_some_and(|uid| !users.contains(&uid));
    if users.is_empty() || !waiting.iter().any(is_other) { Vec::new() } else { waiting.to_vec() }
}

/// Logs each client that has begun to wait for another user's clients.
pub(super) fn log_blocked(target: &str, before: &Health, now: &Health) {
    let known = blocked(&before.servers, &before.waiting());
    for pid in blocked(&now.servers, &now.waiting()).iter().filter(|pid| !known.contains(pid)) {
        tracing::warn!(
            mps = target,
            pid,
            uid = proc::owner(*pid),
            command = proc::name(*pid),
            "a client waits, for its daemon serves another user"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_can_not_be_seen_may_be_anybody() {
        let guests = |unseen, elsewhere| Guests { pids: [5].into(), unseen, elsewhere };
        let door = |waiting: &[i32], others| Pending { waiting: waiting.to_vec(), others };
        assert_eq!(at(guests(false, 0), [7].into_iter()), door(&[5], false), "nobody came from elsewhere");
        assert_eq!(at(guests(true, 0), [].into_iter()), door(&[5], true));
        assert_eq!(at(guests(false, 1), [].into_iter()), door(&[5], true));
        assert_eq!(at(guests(false, 1), [7].into_iter()), door(&[5, 7], false));
    }

    #[test]
    fn we_are_where_we_are() {
        assert!(!is_elsewhere(std::process::id().cast_signed()) && !is_elsewhere(i32::MAX));
    }
}
