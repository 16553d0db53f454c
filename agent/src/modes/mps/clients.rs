//! The clients of a daemon: their processes, users and leases.
//!
//! [`gpush_core::attribution`] finds the lease of a client, as for all processes. So `mps show` names the same lease as
//! `ps`.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use gpush_api::{GpuUuid, LeaseId, MpsClient, ProcessKind, TargetUuid};
use gpush_core::{attribution::GpuUse, mps::DaemonReport};
use gpush_host::{process_facts::ProcessFacts, subtask};
use gpush_mps::daemon::{DaemonRequest, DriverClients, blocked};

use super::Mps;
use crate::{requests::caller::Caller, state::OpenLease};

/// Maximum time that an MPS daemon may take to end a client's work.
const TERMINATE: Duration = Duration::from_secs(5);

/// Maximum time that the driver may take to list the processes on a GPU.
const DRIVER: Duration = Duration::from_secs(2);

/// Returns a function that asks the driver for the MPS clients of a target. gpushd calls the function if the daemon
/// does not report its clients.
pub(super) fn driver_clients(mps: &Mps, gpu_uuid: &GpuUuid, uuid: &TargetUuid) -> DriverClients {
    let (mps, gpu_uuid, uuid) = (mps.clone(), gpu_uuid.clone(), uuid.clone());
    Arc::new(move || {
        let (mps, gpu_uuid, uuid) = (mps.clone(), gpu_uuid.clone(), uuid.clone());
        Box::pin(async move {
            let reading =
                tokio::time::timeout(DRIVER, mps.handles.context.readings.read_now(&gpu_uuid)).await.ok()?.ok()?;
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

/// Returns whether leases are granted on a GPU or MIG device that is shared through MPS: `false` if its daemon is stopped
/// or about to be removed. `None` if the GPU or MIG device is not shared through MPS.
pub(crate) fn grants_leases(mps: &Mps, uuid: &TargetUuid) -> Option<bool> {
    Some(mps.handles.context.state.now().mps.get(uuid)?.report.wanted)
}

/// Asks the MPS daemon of a client to end the client's work on the GPU.
pub(crate) async fn terminate(mps: &Mps, pid: u32) {
    let Ok(pid) = i32::try_from(pid) else { return };
    let targets = mps.handles.context.state.mps();
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

/// Returns the clients of the daemon of the target `uuid`, with their processes, users and leases.
pub(super) async fn of(mps: &Mps, seen: &DaemonReport, uuid: &TargetUuid) -> Vec<MpsClient> {
    let pids: Vec<u32> = seen.clients.iter().filter_map(|(_, client)| u32::try_from(*client).ok()).collect();
    let people = mps.handles.context.users.processes(pids).await;
    // Use a blocking thread: the environments of processes may be large and swapped out.
    let (reader, uuid) = (mps.clone(), uuid.clone());
    let uids: Vec<(u32, u32)> = people.iter().map(|(pid, person)| (*pid, person.uid)).collect();
    let leases = subtask::blocking(move || {
        let lease = |(pid, uid)| Some((pid, lease_of(&reader, pid, uid, &uuid)?));
        uids.into_iter().filter_map(lease).collect()
    });
    let leases: BTreeMap<u32, (LeaseId, bool)> = leases.await.unwrap_or_default();
    let mut clients = Vec::new();
    for (server, client) in &seen.clients {
        let (Ok(server), Ok(pid)) = (u32::try_from(*server), u32::try_from(*client)) else { continue };
        let person = people.get(&pid);
        let uid = person.map(|person| person.uid);
        let lease = leases.get(&pid);
        clients.push(MpsClient {
            pid: Some(pid),
            server: Some(server),
            uid,
            user: person.and_then(|person| person.user.clone()),
            command: person.and_then(|person| person.command.clone()),
            lease: lease.map(|(id, _)| id.to_string()),
            unattributed: lease.is_some_and(|(_, is_guess)| *is_guess),
            unidentified: person.is_none(),
        });
    }
    clients
}

/// Returns the lease of a client, and whether the lease is only a guess. `uid` is the user that is shown with the client.
fn lease_of(mps: &Mps, pid: u32, uid: u32, target: &TargetUuid) -> Option<(LeaseId, bool)> {
    let table = mps.handles.context.state.leases();
    let lease = |facts: &ProcessFacts<'_>| {
        let attribution = table.attribute(facts, GpuUse::Target(target));
        attribution.shown().filter(|_| facts.owner() == uid)
    };
    ProcessFacts::examine(&mps.handles.lease_names, pid, lease).ok().flatten().flatten()
}

/// Returns one sentence for each problem: the findings in the daemon's report, and problems with the clients, such as
/// clients without a lease.
pub(super) fn findings(seen: &DaemonReport, clients: &[MpsClient], leases: &[OpenLease]) -> Vec<String> {
    let mut findings = seen.findings.clone();
    findings.extend(lease_findings(clients));
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

/// Returns one sentence for the clients without a lease, and one for the clients whose lease is not certain.
fn lease_findings(clients: &[MpsClient]) -> Vec<String> {
    let mut findings = Vec::new();
    let without = clients.iter().filter(|client| client.lease.is_none()).count();
    if without > 0 {
        let who = if without == 1 { "1 client runs".to_owned() } else { format!("{without} clients run") };
        findings.push(format!("{who} without a lease: each can use as much as the ceilings of the daemon allow"));
    }
    let unattributed = clients.iter().filter(|client| client.unattributed).count();
    if unattributed > 0 {
        let who = match unattributed {
            1 => "it is not certain to which lease 1 client belongs: it".to_owned(),
            number => format!("it is not certain to which leases {number} clients belong: each"),
        };
        findings.push(format!("{who} may use as much as the ceilings of the daemon allow"));
    }
    findings
}

/// Returns a sentence for each client that must wait because the daemon serves another user. Leaves out clients that
/// the caller may not see.
pub(super) async fn waiting(mps: &Mps, caller: &Caller, seen: &DaemonReport) -> Vec<String> {
    let stuck = blocked(seen);
    let pids: Vec<u32> = stuck.iter().filter_map(|pid| u32::try_from(*pid).ok()).collect();
    let people = mps.handles.context.users.processes(pids.clone()).await;
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

#[cfg(test)]
mod tests {
    use gpush_api::MpsPolicy;

    use super::*;
    use crate::{
        modes::scene::{READY, daemon_report},
        state::leases::tests::record,
    };

    #[test]
    fn clients_above_the_limit_of_the_rule_are_reported() {
        let of = |count: usize, max_clients| {
            let policy = Some(MpsPolicy { max_clients, ..MpsPolicy::default() });
            let seen = DaemonReport { policy, findings: vec!["of the daemon".to_owned()], ..daemon_report(READY) };
            findings(&seen, &vec![client(Some("L1"), false); count], &[])
        };
        assert_eq!(of(2, 2), ["of the daemon"]);
        assert_eq!(of(3, 2), ["of the daemon", "3 clients are connected, but only 2 are allowed"]);
        assert_eq!(of(2, 1), ["of the daemon", "2 clients are connected, but only 1 is allowed"]);
    }

    #[test]
    fn clients_of_users_without_a_lease_are_counted() {
        let of = |uids: &[u32], holders: &[u32]| {
            let clients: Vec<MpsClient> =
                uids.iter().map(|uid| MpsClient { uid: Some(*uid), ..client(Some("L1"), false) }).collect();
            let leases: Vec<OpenLease> = holders.iter().map(|uid| OpenLease::new(record(1, *uid, "GPU-0"))).collect();
            findings(&daemon_report(READY), &clients, &leases)
        };
        assert_eq!(of(&[1000, 1000], &[1000]), [] as [&str; 0]);
        let strangers = |count| [format!("number of clients whose users have no lease on this daemon: {count}")];
        assert_eq!(of(&[1000, 1001, 1001, 1002], &[1000, 1002]), strangers(2));
        // No lease exists, so another finding says that the clients have none.
        assert_eq!(of(&[1000], &[]), [] as [&str; 0]);
    }

    fn client(lease: Option<&str>, unattributed: bool) -> MpsClient {
        MpsClient {
            pid: Some(7),
            server: None,
            uid: Some(1000),
            user: None,
            command: None,
            lease: lease.map(str::to_owned),
            unattributed,
            unidentified: false,
        }
    }

    /// Fault: `mps show` said that a client runs without a lease, and `ps` named a lease of this client.
    #[test]
    fn client_with_an_uncertain_lease_is_not_reported_as_without_one() {
        let (certain, perhaps, none) = (client(Some("L1"), false), client(Some("L1"), true), client(None, false));
        assert_eq!(lease_findings(std::slice::from_ref(&certain)), [] as [&str; 0]);
        assert_eq!(
            lease_findings(&[certain, perhaps.clone()]),
            [
                "it is not certain to which lease 1 client belongs: it may use as much as the ceilings of the daemon allow"
            ]
        );
        assert_eq!(
            lease_findings(&[none, perhaps.clone(), perhaps]),
            [
                "1 client runs without a lease: each can use as much as the ceilings of the daemon allow",
                "it is not certain to which leases 2 clients belong: each may use as much as the ceilings of the daemon \
                 allow"
            ]
        );
    }
}
