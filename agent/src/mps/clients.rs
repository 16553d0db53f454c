//! The clients of a daemon: their processes, users and leases.
//!
//! A client names its lease in an environment variable, which it can set to any value. gpushd accepts the name only if
//! the client's user holds that lease. gpushd shows the name, and uses it in the checks for unleased processes. The
//! name gives no access.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use gpush_api::{MpsClient, ProcessKind};
use gpush_core::mps::DaemonReport;
use gpush_host::subtask;
use gpush_mps::daemon::{DaemonRequest, DriverClients, blocked};

use super::{Mps, leases_on};
use crate::{caller::Caller, state::OpenLease};

/// Maximum time that an MPS daemon may take to end a client's work.
const TERMINATE: Duration = Duration::from_secs(5);

/// Maximum time that the driver may take to list the processes on a GPU.
const DRIVER: Duration = Duration::from_secs(2);

/// Returns a function that asks the driver for the MPS clients of a target. gpushd calls the function if the daemon
/// does not report its clients.
pub(super) fn driver_clients(mps: &Mps, gpu_uuid: &str, uuid: &str) -> DriverClients {
    let (mps, gpu_uuid, uuid) = (mps.clone(), gpu_uuid.to_owned(), uuid.to_owned());
    Arc::new(move || {
        let (mps, gpu_uuid, uuid) = (mps.clone(), gpu_uuid.clone(), uuid.clone());
        Box::pin(async move {
            let reading = tokio::time::timeout(DRIVER, mps.handles.readings.read_now(&gpu_uuid)).await.ok()?.ok()?;
            if !reading.processes_known {
                return None;
            }
            let devices = reading.mig.iter().flat_map(|mig| &mig.instances).flat_map(|one| &one.compute);
            let device = devices.filter(|device| device.uuid.as_ref() == Some(&uuid)).flat_map(|one| &one.processes);
            let whole = reading.processes.iter().filter(|_| gpu_uuid == uuid);
            let clients = device.chain(whole).filter(|process| process.kind == ProcessKind::MpsClient);
            Some(clients.filter_map(|process| i32::try_from(process.pid?).ok()).collect())
        })
    })
}

/// A target that is shared through MPS. Contains the facts that decide whether a process may run on the target.
#[derive(Debug)]
pub(crate) struct SharedTarget {
    /// Whether a daemon is desired. If the daemon is stopped or about to be removed, this is `false`, and no lease is
    /// granted on the target.
    pub(crate) is_given: bool,
    leases: Vec<OpenLease>,
}

impl SharedTarget {
    /// Returns whether a user holds a lease on the target.
    pub(crate) fn is_held_by(&self, uid: u32) -> bool {
        self.leases.iter().any(|lease| lease.record.holder.uid == uid)
    }
}

/// Returns whether `name` is the id of a lease of the user.
fn is_lease_of(leases: &[OpenLease], name: &str, uid: Option<u32>) -> bool {
    leases.iter().any(|lease| Some(lease.record.holder.uid) == uid && lease.id().to_string() == name)
}

/// Returns the target of a GPU or MIG device that is shared through MPS. `None` if it is not shared.
pub(crate) fn sharing(mps: &Mps, uuid: &str) -> Option<SharedTarget> {
    let host = mps.handles.state.now();
    Some(SharedTarget { is_given: host.mps.get(uuid)?.report.wanted, leases: leases_on(&host, uuid) })
}

/// Asks the MPS daemon of a client to end the client's work on the GPU.
pub(crate) async fn terminate(mps: &Mps, pid: u32) {
    let Ok(pid) = i32::try_from(pid) else { return };
    let targets = mps.handles.state.mps();
    for target in targets.all().filter(|target| target.report.clients.iter().any(|(_, client)| *client == pid)) {
        let Some(handle) = mps.daemon(&target.uuid) else { continue };
        match tokio::time::timeout(TERMINATE, handle.daemon.send(DaemonRequest::Terminate(pid))).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!(mps = target.short, "{error}"),
            Err(_) => tracing::warn!(
                mps = target.short,
                "cannot end process {pid}: the MPS daemon {} did not accept the request in time",
                target.short
            ),
        }
    }
}

/// Returns the clients of a daemon with their processes and users.
pub(super) async fn of(mps: &Mps, seen: &DaemonReport, leases: &[OpenLease]) -> Vec<MpsClient> {
    let pids: Vec<u32> = seen.clients.iter().filter_map(|(_, client)| u32::try_from(*client).ok()).collect();
    let people = mps.handles.users.processes(pids).await;
    // Use a blocking thread: the environments of processes may be large and swapped out.
    let (reader, uids): (_, Vec<_>) = (mps.clone(), people.iter().map(|(pid, person)| (*pid, person.uid)).collect());
    let named = subtask::blocking(move || {
        let named = |(pid, uid)| Some((pid, (reader.handles.named_lease)(pid, uid).ok()??));
        uids.into_iter().filter_map(named).collect()
    });
    let named: BTreeMap<u32, String> = named.await.unwrap_or_default();
    let mut clients = Vec::new();
    for (server, client) in &seen.clients {
        let (Ok(server), Ok(pid)) = (u32::try_from(*server), u32::try_from(*client)) else { continue };
        let person = people.get(&pid);
        let uid = person.map(|person| person.uid);
        let lease = named.get(&pid).cloned().filter(|name| is_lease_of(leases, name, uid));
        clients.push(MpsClient {
            pid: Some(pid),
            server: Some(server),
            uid,
            user: person.and_then(|person| person.user.clone()),
            command: person.and_then(|person| person.command.clone()),
            lease,
            unidentified: person.is_none(),
        });
    }
    clients
}

/// Returns one sentence for each problem: the findings in the daemon's report, and problems with the clients, such as
/// clients without a lease.
pub(super) fn findings(seen: &DaemonReport, clients: &[MpsClient], leases: &[OpenLease]) -> Vec<String> {
    let mut findings = seen.findings.clone();
    let without = clients.iter().filter(|client| client.lease.is_none()).count();
    if without > 0 {
        let who = if without == 1 { "1 client runs".to_owned() } else { format!("{without} clients run") };
        findings.push(format!("{who} without a lease: each can use as much as the ceilings of the daemon allow"));
    }
    if let Some(most) =
        seen.policy.as_ref().map(|policy| policy.max_clients as usize).filter(|most| clients.len() > *most)
    {
        let are = if most == 1 { "is" } else { "are" };
        findings.push(format!("{} clients are connected, but only {most} {are} allowed", clients.len()));
    }
    let mut uids: BTreeMap<u32, usize> = BTreeMap::new();
    for uid in clients.iter().filter_map(|client| client.uid) {
        *uids.entry(uid).or_default() += 1;
    }
    let holders: Vec<u32> = leases.iter().map(|lease| lease.record.holder.uid).collect();
    let strangers: usize = uids.iter().filter(|(uid, _)| !holders.contains(uid)).map(|(_, count)| count).sum();
    if strangers > 0 && !holders.is_empty() {
        findings.push(format!("number of clients whose users have no lease on this daemon: {strangers}"));
    }
    findings
}

/// Returns a sentence for each client that must wait because the daemon serves another user. Leaves out clients that
/// the caller may not see.
pub(super) async fn waiting(mps: &Mps, caller: &Caller, seen: &DaemonReport) -> Vec<String> {
    let stuck = blocked(seen);
    let pids: Vec<u32> = stuck.iter().filter_map(|pid| u32::try_from(*pid).ok()).collect();
    let people = mps.handles.users.processes(pids.clone()).await;
    let why = "the daemon serves one user at a time; the clients of other users wait until all clients of the \
        current user have ended";
    let sentence = |pid: u32| match people.get(&pid).filter(|person| caller.viewer.may_see(Some(person.uid))) {
        Some(person) => format!("{} waits: {why}", person.describe(pid)),
        None => format!("a client waits: {why}"),
    };
    let mut reported: Vec<String> = pids.into_iter().map(sentence).collect();
    reported.dedup();
    reported
}
