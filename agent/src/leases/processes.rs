//! Finds the remaining processes of a lease: by its binding, in the driver's lists, and from the
//! MPS daemons.
//!
//! [`gpush_core::attribution`] decides which processes belong to the lease. `bound` finds the processes that belong to the
//! lease even if they use no GPU. `scan` reads all processes of the host or of a job.
//!
//! ```text
//! belongs to the lease ──────────► counts; may be ended with the lease
//! may belong to the lease ───────► counts; gpushd never ends it
//! cannot be read ────────────────► the lease does not end before the next probe
//!   only its environment, and the
//!   lease belongs to a Slurm job ► as "may belong": its user can prevent gpushd from reading it, so this must not count
//!                                  as a failure of the node
//! belongs to another lease ──────► does not count
//! ```

mod bound;
mod scan;

use std::{collections::BTreeSet, time::Duration};

use gpush_api::{GpuState, LeaseBinding, LeaseId, LeaseMember, MemberShare, Process};
use gpush_core::{
    attribution::{Attribution, FactName, GpuUse, LeaseMatch},
    lease::machine::Remaining,
};
use gpush_host::{proc, process_facts::ProcessFacts, subtask};

pub(super) use self::bound::BoundProcessScan;
use self::{
    bound::{bound_processes, processes_in_scope},
    scan::Incomplete,
};
use super::Leases;
use crate::{
    modes::mps::{self, Place},
    notices::NoticeReceivers,
    state::OpenLease,
};

/// How long the driver may take to list the processes on a GPU.
const DRIVER: Duration = Duration::from_secs(2);

/// Maximum number of processes to name in the reasons why a lease is still releasing.
const MOST_NAMED: usize = 8;

/// The remaining processes of a lease.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct RemainingProcesses {
    /// Number of processes that each source reports: the binding, the driver, the MPS daemons.
    pub(super) remaining: Remaining,
    /// Processes that belong to the lease. gpushd may end them.
    pub(super) own: BTreeSet<u32>,
    /// Processes that may belong to the lease. gpushd never ends them.
    pub(super) others: BTreeSet<u32>,
    /// Why gpushd may not have found all processes of the lease, for example because it cannot read a cgroup. If set,
    /// the lease does not end.
    unknown: Option<Incomplete>,
    /// Time when gpushd began to read the processes, in clock ticks since boot.
    pub(super) read_at: u64,
    /// Whether the lease belongs to a Slurm job.
    of_job: bool,
}

/// Returns whether a process is alive. If gpushd cannot read the process, returns `true`.
fn may_be_alive(pid: u32) -> bool {
    !matches!(proc::try_start(pid), Ok(None))
}

impl RemainingProcesses {
    /// Returns the pids of all processes that the lease waits for.
    pub(super) fn pids(&self) -> impl Iterator<Item = u32> {
        self.own.iter().chain(self.others.difference(&self.own)).copied()
    }

    /// Returns why gpushd may not have found all processes of the lease.
    pub(super) fn unknown(&self) -> Option<String> {
        self.unknown.as_ref().map(ToString::to_string)
    }

    /// Returns whether the end of a Slurm job's lease waits only because of processes outside the job's cgroup, an MPS
    /// daemon that does not answer, or processes that start and end during each scan. A user can cause each of these,
    /// so Slurm's Epilog does not wait for long.
    pub(super) fn is_unattributed(&self) -> bool {
        let is_alive = |pid: &u32| may_be_alive(*pid);
        let is_unread = matches!(self.unknown, Some(Incomplete::Unread(_)));
        let is_churn = self.unknown == Some(Incomplete::Churn);
        self.of_job
            && !is_unread
            && self.remaining.driver.is_some()
            && !self.own.iter().any(is_alive)
            && (is_churn || self.remaining.daemon.is_none() || self.others.iter().any(is_alive))
    }

    /// Returns one sentence for each process or daemon that the lease waits for.
    pub(super) fn words(&self) -> Vec<String> {
        let why = |pid: &u32| match self.of_job && !self.own.contains(pid) {
            true => "may be outside the job's cgroup, so gpushd cannot attribute it to the job",
            false => "runs",
        };
        let sentence = |pid: u32| match proc::name(pid) {
            name if name.is_empty() => format!("process {pid} {}", why(&pid)),
            name => format!("process {pid} ({name}) {}", why(&pid)),
        };
        // The driver and the daemon still list a process for a moment after its end, so leave out ended processes.
        let alive: Vec<u32> = self.pids().filter(|pid| may_be_alive(*pid)).collect();
        let mut words: Vec<String> = alive.iter().take(MOST_NAMED).map(|pid| sentence(*pid)).collect();
        if let Some(more) = alive.len().checked_sub(MOST_NAMED).filter(|more| *more > 0) {
            words.push(format!("other processes that run: {more}"));
        }
        if let Some(why) = &self.unknown {
            words.push(format!("gpushd cannot read all processes: {why}"));
        }
        if self.remaining.driver.is_none() {
            words.push("gpushd cannot read from the driver which processes use the GPUs of the lease".to_owned());
        }
        if self.remaining.daemon.is_none() {
            words.push("gpushd cannot get the list of clients from the MPS daemon".to_owned());
        }
        words
    }

    /// Notes that a process of the lease may be hidden, and why.
    fn note_unread(&mut self, why: String) {
        if !matches!(self.unknown, Some(Incomplete::Unread(_))) {
            self.unknown = Some(Incomplete::Unread(why));
        }
        self.remaining.bound = None;
    }

    /// Adds a process on a target of the lease `id`. Returns whether the process counts for the lease.
    fn add(&mut self, pid: u32, id: LeaseId, attribution: &Attribution) -> bool {
        match attribution.matches(id) {
            LeaseMatch::This => drop(self.own.insert(pid)),
            LeaseMatch::Unread(unreadable) if !self.of_job || unreadable.fact != FactName::Environment => {
                self.note_unread(unreadable.to_string());
                return false;
            }
            LeaseMatch::PerhapsThis | LeaseMatch::Unread(_) => drop(self.others.insert(pid)),
            LeaseMatch::Another => return false,
        }
        true
    }
}

/// Finds the processes that a notice about a lease concerns: those that belong to the lease, and the process that it is
/// bound to.
pub(super) async fn notice_receivers(leases: &Leases, lease: &OpenLease) -> NoticeReceivers {
    let mut own = bound_processes(leases, lease).await.pids;
    own.extend(processes_in_scope(lease, false).await.pids);
    let mut others = BTreeSet::new();
    match &lease.record.binding {
        LeaseBinding::Process { pid: Some(pid), start } => {
            others.extend(Some(*pid).filter(|pid| proc::start(*pid) == *start));
        }
        LeaseBinding::Cgroup { pid: Some(pid), start, .. } => {
            others.extend(Some(*pid).filter(|pid| proc::start(*pid) == *start));
        }
        LeaseBinding::None
        | LeaseBinding::Time
        | LeaseBinding::Process { pid: None, .. }
        | LeaseBinding::Cgroup { pid: None, .. }
        | LeaseBinding::Scope { .. }
        | LeaseBinding::Job { .. } => {}
    }
    NoticeReceivers { own, others }
}

/// Finds the remaining processes of a lease. `is_moving` says whether systemd is still moving a process into the scope of
/// the lease.
pub(super) async fn remaining_processes(leases: &Leases, lease: &OpenLease, is_moving: bool) -> RemainingProcesses {
    let mut left = RemainingProcesses {
        remaining: Remaining { bound: Some(0), driver: Some(0), daemon: Some(0) },
        ..RemainingProcesses::default()
    };
    left.of_job = matches!(lease.record.binding, LeaseBinding::Job { .. });
    left.read_at = proc::now();
    // The scan and the queries run concurrently: the driver and the daemons answer while gpushd
    // scans the processes.
    let (found, in_scope, lists) =
        tokio::join!(bound_processes(leases, lease), processes_in_scope(lease, is_moving), lists(leases, lease));
    left.own = found.pids.into_iter().chain(in_scope.pids).collect();
    left.others = found.of_later_runs;
    left.unknown = found.unknown.or(in_scope.unknown);
    left.remaining.bound = if left.unknown.is_none() { u32::try_from(left.pids().count()).ok() } else { None };
    for (member, MemberLists { clients, listed }) in lease.record.members.iter().zip(lists) {
        // Use a blocking thread: the environments of processes may be large and swapped out.
        let (reader, lease) = (leases.clone(), lease.clone());
        let (member, mut before) = (member.clone(), left);
        let counted = subtask::blocking(move || {
            let (table, names) = (reader.handles.context.state.leases(), &reader.handles.lease_names);
            let gpu_use = GpuUse::Target(&member.target);
            let count = |pids: Option<Vec<u32>>, left: &mut RemainingProcesses| {
                let mut count = 0;
                for pid in pids? {
                    match ProcessFacts::examine(names, pid, |facts| table.attribute(facts, gpu_use)) {
                        Ok(Some(found)) => count += u32::from(left.add(pid, lease.id(), &found)),
                        Ok(None) => {}
                        Err(error) => left.note_unread(error.to_string()),
                    }
                }
                Some(count)
            };
            let driver = count(listed, &mut before);
            let daemon = count(clients, &mut before);
            let add = |sum: Option<u32>, count: Option<u32>| Some(sum? + count?);
            before.remaining.driver = add(before.remaining.driver, driver);
            before.remaining.daemon = add(before.remaining.daemon, daemon);
            before
        });
        left = match counted.await {
            Some(counted) => counted,
            // The thread fails only if gpushd is stopping.
            None => return RemainingProcesses::default(),
        };
    }
    left
}

/// The processes on the target of a member, as listed by the MPS daemon and by the driver. A list is `None` if it is
/// not known.
struct MemberLists {
    clients: Option<Vec<u32>>,
    listed: Option<Vec<u32>>,
}

/// Asks the driver and the MPS daemons which processes are on the targets of a lease.
async fn lists(leases: &Leases, lease: &OpenLease) -> Vec<MemberLists> {
    let mut lists = Vec::new();
    for member in &lease.record.members {
        let clients = async {
            match member.share {
                MemberShare::Mps { .. } => mps::clients_now(&leases.handles.mps, &member.target).await,
                MemberShare::Mig { .. } | MemberShare::Timeslice { .. } | MemberShare::Whole => Some(Vec::new()),
            }
        };
        let (clients, listed) = tokio::join!(clients, driver_processes(leases, member));
        lists.push(MemberLists { clients, listed });
    }
    lists
}

/// Returns the pids that the driver lists on the target of a member; `None` if they are unknown. Leaves out gpushd's
/// MPS servers: a server runs as the user of its clients, but it ends with these clients, so the lease need not wait
/// for the server.
async fn driver_processes(leases: &Leases, member: &LeaseMember) -> Option<Vec<u32>> {
    let host = leases.handles.context.state.now();
    if host.gpu(&member.gpu_uuid).is_some_and(|gpu| gpu.gpu.state == GpuState::Lost) {
        // No process computes on a lost GPU.
        return Some(Vec::new());
    }
    let reading = leases.handles.context.readings.read_now_within(&member.gpu_uuid, DRIVER).await?.ok()?;
    if !reading.processes_known {
        return None;
    }
    // Each process with whether the driver lists it on the MIG device.
    let mut processes: Vec<(&Process, bool)> = Vec::new();
    if member.target == member.gpu_uuid {
        processes.extend(reading.processes.iter().map(|process| (process, false)));
    }
    for instance in reading.mig.iter().flat_map(|mig| &mig.instances) {
        let devices = instance.compute.iter().filter(|compute| compute.uuid.as_ref() == Some(&member.target));
        let mut is_here = false;
        for device in devices {
            is_here = true;
            processes.extend(device.processes.iter().map(|process| (process, true)));
        }
        if is_here {
            // Include processes of the GPU instance: the driver may not list them for a compute instance yet.
            processes.extend(instance.processes.iter().map(|process| (process, false)));
        }
    }
    // A process without a pid is in another pid namespace, and its user is not known. Leave it out.
    let found = processes.into_iter().filter_map(|(process, on_device)| Some((process.pid?, process.kind, on_device)));
    let mut found: Vec<_> = found.collect();
    let (mps, member) = (leases.handles.mps.clone(), member.clone());
    // Use a blocking thread: the file systems of the processes may not answer.
    let without_servers = subtask::blocking(move || {
        let servers = mps.servers();
        found.retain(|(pid, kind, on_device)| {
            let device = on_device.then_some(&member.target);
            servers.of_process(*pid, *kind, Place::Device { gpu: &member.gpu_uuid, device }).is_none()
        });
        found.into_iter().map(|(pid, ..)| pid).collect()
    });
    without_servers.await
}

#[cfg(test)]
mod tests;
