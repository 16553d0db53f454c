//! Clients that are connected to a daemon but have no server yet. NVIDIA's log calls them pending.
//!
//! No command lists pending clients. But the daemon keeps a pending client connected, while all
//! other processes are connected only briefly. So gpushd finds pending clients through the kernel:
//!
//! ```text
//! connected, neither server nor client ──► pending
//! from another network namespace ────────► pending if the log names it with its user. If there are more such
//!                                          connections than the log names: not known
//! from another pid namespace ────────────► not known
//! ```
//!
//! If the kernel cannot identify a process, gpushd uses the log, unless the log has stopped growing.

use std::{path::Path, pin::Pin, sync::Arc};

use gpush_api::MpsServerState;
use gpush_core::mps::DaemonReport;
use gpush_host::{proc, subtask};

use crate::protocol::holder::{self, UnlistedClients};

/// Asks the driver for the pids of the MPS clients of a target. Returns `None` if the driver cannot list them.
pub type DriverClients = Arc<dyn Fn() -> Pin<Box<dyn Future<Output = Option<Vec<i32>>> + Send>> + Send + Sync>;

/// The pending clients of a daemon.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Pending {
    /// Pids of the clients.
    pub(super) waiting: Vec<i32>,
    /// Whether there may be more pending clients that gpushd cannot identify.
    pub(super) others: bool,
}

/// Finds the pending clients of a daemon. `known` contains the daemon's servers and clients.
/// `named` contains the pending clients that the daemon's log names, with their users; `None` if
/// the log has stopped growing.
pub(super) async fn find(daemon: i32, pipe: &Path, known: Vec<i32>, named: Option<&[(i32, u32)]>) -> Pending {
    let (pipe, inside) = (pipe.to_owned(), known.clone());
    let found = subtask::blocking(move || holder::unlisted_clients(daemon, &pipe, &inside)).await;
    let named_ones = named.unwrap_or_default().iter().filter(|(pid, uid)| proc::owner(*pid) == Some(*uid));
    let named_ones: Vec<i32> = named_ones.map(|(pid, _)| *pid).filter(|pid| !known.contains(pid)).collect();
    match found.unwrap_or_else(|| Err(std::io::Error::other("gpushd is stopping"))) {
        Ok(unlisted) => pending(unlisted, named_ones.into_iter().filter(|pid| is_elsewhere(*pid))),
        Err(error) => {
            tracing::debug!(daemon, "cannot find the pending clients of the MPS daemon: {error}");
            Pending { waiting: named_ones, others: named.is_none() }
        }
    }
}

fn pending(unlisted: UnlistedClients, named: impl Iterator<Item = i32>) -> Pending {
    let elsewhere: Vec<i32> = if unlisted.elsewhere > 0 { named.collect() } else { Vec::new() };
    let others = unlisted.unseen || unlisted.elsewhere > elsewhere.len();
    Pending { waiting: unlisted.pids.into_iter().chain(elsewhere).collect(), others }
}

/// Returns whether the network namespace of a process differs from gpushd's.
fn is_elsewhere(pid: i32) -> bool {
    proc::is_in_our_network(pid) == Some(false)
}

/// Returns the clients that hang until the last client of the daemon's current user has ended.
#[must_use]
pub fn blocked(report: &DaemonReport) -> Vec<i32> {
    if report.multi_user { Vec::new() } else { waiting_for_another_user(&report.servers, &report.waiting) }
}

/// Returns the clients of a daemon for one user that wait for the end of this user's clients. If one waiting client
/// belongs to another user, all waiting clients hang.
pub(super) fn waiting_for_another_user(servers: &[(i32, Option<MpsServerState>)], waiting: &[i32]) -> Vec<i32> {
    let users: Vec<u32> = servers.iter().filter_map(|(server, _)| proc::owner(*server)).collect();
    let is_other = |pid: &i32| proc::owner(*pid).is_some_and(|uid| !users.contains(&uid));
    if users.is_empty() || !waiting.iter().any(is_other) { Vec::new() } else { waiting.to_vec() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unidentified_connection_may_be_a_client() {
        let unlisted = |unseen, elsewhere| UnlistedClients { pids: [5].into(), unseen, elsewhere };
        let expected = |waiting: &[i32], others| Pending { waiting: waiting.to_vec(), others };
        assert_eq!(
            pending(unlisted(false, 0), [7].into_iter()),
            expected(&[5], false),
            "no guest is from another namespace"
        );
        assert_eq!(pending(unlisted(true, 0), [].into_iter()), expected(&[5], true));
        assert_eq!(pending(unlisted(false, 1), [].into_iter()), expected(&[5], true));
        assert_eq!(pending(unlisted(false, 1), [7].into_iter()), expected(&[5, 7], false));
    }

    #[test]
    fn own_process_is_in_the_own_network_namespace() {
        assert!(!is_elsewhere(std::process::id().cast_signed()) && !is_elsewhere(i32::MAX));
    }
}
