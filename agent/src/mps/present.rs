//! Which daemons exist now, and who uses them, for plans and operations.

use std::{collections::BTreeSet, time::Duration};

use futures_util::future::join_all;
use gpush_api::Gpu;
use gpush_core::supervisor::SupervisorState;

use super::{Entry, Mps, daemon_state};

impl Mps {
    /// Returns the pids of processes that do no work for a user: the MPS daemons and servers on targets without clients
    /// and leases.
    pub(crate) fn idle(&self) -> BTreeSet<u32> {
        let entries = self.entries().clone();
        let idle = entries.iter().filter(|(uuid, entry)| users(self, uuid, entry).is_empty());
        let pids = idle.flat_map(|(_, entry)| {
            let seen = entry.daemon.last_report();
            seen.servers.iter().map(|(server, _)| *server).chain(seen.pid).collect::<Vec<_>>()
        });
        pids.filter_map(|pid| u32::try_from(pid).ok()).collect()
    }
}

/// Returns whether a daemon is desired or runs.
pub(super) fn is_present(entry: &Entry) -> bool {
    let seen = entry.daemon.last_report();
    seen.wanted || seen.state != SupervisorState::Stopped
}

/// Adds to each GPU its MPS daemons, so that plans keep the MIG devices with a daemon if possible.
pub(crate) fn add_daemons_to(mps: &Mps, gpus: &mut [Gpu]) {
    for gpu in gpus {
        gpu.mps_daemons = daemons_on(mps, &gpu.uuid);
    }
}

/// Returns the UUIDs of the targets on a GPU that have an MPS daemon.
pub(crate) fn daemons_on(mps: &Mps, gpu: &str) -> BTreeSet<String> {
    let entries = mps.entries();
    let own = entries.iter().filter(|(_, entry)| entry.gpu_uuid == gpu && is_present(entry));
    own.map(|(uuid, _)| uuid.clone()).collect()
}

/// Returns one sentence for each use of a target; empty if it is not in use.
pub(super) fn users(mps: &Mps, uuid: &str, entry: &Entry) -> Vec<String> {
    let (seen, label) = (entry.daemon.last_report(), daemon_state::label(entry, uuid));
    if !seen.clients_known {
        return vec![format!("it is not known whether {label} has clients")];
    }
    let mut users: Vec<String> =
        mps.leases_on(uuid).iter().map(|lease| format!("{label} has {}", lease.describe())).collect();
    if users.is_empty() && mps.is_leased(uuid) {
        users.push(format!("a lease on {label} is being granted"));
    }
    match seen.clients.len() + seen.waiting.len() {
        0 => {}
        1 => users.push(format!("{label} has 1 client")),
        clients => users.push(format!("{label} has {clients} clients")),
    }
    users
}

/// Polls the daemons of the GPUs in `asked`, so that clients that have exited do not block a plan. Does not poll other
/// daemons, because they may hang.
pub(crate) async fn poll(mps: &Mps, asked: &BTreeSet<String>) {
    let entries: Vec<Entry> = mps.entries().values().filter(|entry| asked.contains(&entry.gpu_uuid)).cloned().collect();
    let _as_it_was = join_all(entries.iter().map(|entry| entry.daemon.fresh(Duration::ZERO))).await;
}
