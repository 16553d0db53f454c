//! Finds the remaining processes of a lease: by its binding, in the driver's lists, and from the
//! MPS daemons.
//!
//! `attribution` decides which of the processes on a target belong to the lease. `scan` reads all processes of the host
//! or of a job.

mod attribution;
mod scan;

use std::{collections::BTreeSet, io, sync::Arc, time::Duration};

use gpush_api::{GpuState, LeaseBinding, LeaseMember, MemberShare, Process};
use gpush_core::lease::machine::Remaining;
use gpush_host::{
    cgroup::{self, SlurmJob},
    proc, subtask,
};

use self::{
    attribution::{LeaseMatch, attribute},
    scan::{Incomplete, Reading, scan, scan_job},
};
use super::Leases;
use crate::{
    mps::{self, Place},
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
    /// Processes of the holder that may belong to the lease. gpushd never ends them.
    pub(super) others: BTreeSet<u32>,
    /// Why gpushd may not have found all processes of the lease, for example because it cannot read a cgroup. If set,
    /// the lease does not end.
    unknown: Option<Incomplete>,
    /// Time when gpushd began to read the processes, in clock ticks since boot.
    pub(super) read_at: u64,
    /// Whether the lease belongs to a Slurm job.
    of_job: bool,
}

/// The result of a search for processes of a lease: the processes, and why there may be more.
#[derive(Debug, Default)]
struct FoundProcesses {
    pids: BTreeSet<u32>,
    unknown: Option<Incomplete>,
}

/// Returns whether a process is alive. If gpushd cannot read the process, returns `true`.
fn may_be_alive(pid: u32) -> bool {
    !matches!(proc::try_start(pid), Ok(None))
}

impl RemainingProcesses {
    /// Returns the pids of all processes that the lease waits for.
    pub(super) fn pids(&self) -> impl Iterator<Item = u32> {
        self.own.iter().chain(&self.others).copied()
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
        let why = |pid: &u32| match self.of_job && self.others.contains(pid) {
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

    /// Notes an error that may hide a process of the lease.
    fn note_error(&mut self, error: &io::Error) {
        if !matches!(self.unknown, Some(Incomplete::Unread(_))) {
            self.unknown = Some(Incomplete::Unread(error.to_string()));
        }
        self.remaining.bound = None;
    }
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
    let (named, in_scope, lists) =
        tokio::join!(processes_naming_lease(leases, lease), processes_in_scope(lease, is_moving), lists(leases, lease));
    left.own = named.pids.into_iter().chain(in_scope.pids).collect();
    left.unknown = named.unknown.or(in_scope.unknown);
    left.remaining.bound = if left.unknown.is_none() { u32::try_from(left.own.len()).ok() } else { None };
    for (member, MemberLists { clients, listed }) in lease.record.members.iter().zip(lists) {
        // Use a blocking thread: the environments of processes may be large and swapped out.
        let (reader, lease) = (leases.clone(), lease.clone());
        let (member, mut before) = (member.clone(), left);
        let counted = subtask::blocking(move || {
            let table = reader.handles.state.leases();
            let count = |pids: Option<Vec<u32>>, left: &mut RemainingProcesses| {
                let mut count = 0;
                for pid in pids? {
                    let named = |pid| mps::named(&reader.handles.mps, pid, lease.record.holder.uid);
                    match attribute(&table, &lease, &member, pid, &named, &job_of) {
                        Ok(LeaseMatch::This) => drop(left.own.insert(pid)),
                        Ok(LeaseMatch::PerhapsThis) => drop(left.others.insert(pid)),
                        Ok(LeaseMatch::Another) => continue,
                        Err(error) => {
                            left.note_error(&error);
                            continue;
                        }
                    }
                    count += 1;
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

/// Returns the Slurm job of a process, by the cgroup of the process.
fn job_of(pid: u32) -> io::Result<Option<SlurmJob>> {
    Ok(cgroup::try_of(pid)?.and_then(|found| found.slurm_job))
}

/// Returns the processes in the scope of a lease; none if the lease has no scope.
async fn processes_in_scope(lease: &OpenLease, is_moving: bool) -> FoundProcesses {
    let LeaseBinding::Scope { cgroup: Some(cgroup), .. } = &lease.record.binding else {
        return FoundProcesses::default();
    };
    if is_moving {
        let unknown =
            Some(Incomplete::Unread("systemd is still moving the process into the scope of the lease".to_owned()));
        return FoundProcesses { pids: BTreeSet::new(), unknown };
    }
    let cgroup = cgroup.clone();
    let found = subtask::blocking(move || cgroup::processes(&cgroup).unwrap_or_default()).await;
    match found {
        Some(found) => FoundProcesses {
            pids: found.pids.into_iter().collect(),
            unknown: found.error.map(|error| Incomplete::Unread(error.to_string())),
        },
        None => FoundProcesses::unread(),
    }
}

impl FoundProcesses {
    /// Returns the result of a search that did not finish, because gpushd is stopping.
    fn unread() -> Self {
        Self { pids: BTreeSet::new(), unknown: Some(stopping()) }
    }
}

fn stopping() -> Incomplete {
    Incomplete::Unread("gpushd is stopping".to_owned())
}

/// Returns the processes of the holder whose environment names the lease: the command of
/// `gpushctl run`, and the processes that this command started. A login shell is not included,
/// even if the lease is bound to the shell. For the lease of a Slurm job, returns the processes in
/// the job's cgroup instead.
async fn processes_naming_lease(leases: &Leases, lease: &OpenLease) -> FoundProcesses {
    let (leases, lease) = (leases.clone(), lease.clone());
    let (uid, id) = (lease.record.holder.uid, lease.id().to_string());
    let job = match lease.record.binding {
        LeaseBinding::Job { job, .. } => Some(u64::from(job)),
        LeaseBinding::None
        | LeaseBinding::Process { .. }
        | LeaseBinding::Time
        | LeaseBinding::Scope { .. }
        | LeaseBinding::Cgroup { .. } => None,
    };
    let Some(job) = job else {
        let all = leases.named_by(uid).after_now(|| processes_naming_leases(leases.clone(), uid)).await;
        // Count processes that have ended since the scan: they may have started others, which the scan did not see.
        let its = all.named.iter().filter(|(_, name)| *name == id);
        return FoundProcesses { pids: its.map(|(pid, _)| *pid).collect(), unknown: all.unknown.clone() };
    };
    let own = subtask::blocking(move || {
        let table = leases.handles.state.leases();
        let read = |pid: u32| -> io::Result<Reading<u32>> {
            let Some(owner) = proc::try_owner(pid)? else { return Ok(Reading::Ended) };
            if owner != uid {
                return Ok(Reading::Other);
            }
            let job = job_of(pid)?;
            if proc::try_start(pid)?.is_none() {
                return Ok(Reading::Ended);
            }
            let is_its = job.is_some_and(|job| lease.fits_job(&job) && !table.is_ambiguous(&job, uid));
            Ok(if is_its { Reading::Found(pid) } else { Reading::Other })
        };
        scan_job(|| cgroup::job_processes(job, uid), all_processes, read)
    });
    match own.await {
        Some((pids, unknown)) => FoundProcesses { pids: pids.into_iter().collect(), unknown },
        None => FoundProcesses::unread(),
    }
}

/// Processes of a user that name a lease.
#[derive(Debug)]
pub(super) struct NamingProcesses {
    /// The pid of each process, and the lease that the process names.
    named: Vec<(u32, String)>,
    /// Why gpushd may not have found all processes that name a lease.
    unknown: Option<Incomplete>,
}

/// The result of a scan for processes of a user that name a lease.
pub(super) type ProcessLeases = Arc<NamingProcesses>;

/// Finds the processes of a user whose environment names a lease of this gpushd.
async fn processes_naming_leases(leases: Leases, uid: u32) -> ProcessLeases {
    let found = subtask::blocking(move || {
        let mps = &leases.handles.mps;
        let table = leases.handles.state.leases();
        let of_user = table.of_holder(uid);
        let named = |pid: u32| -> io::Result<Reading<(u32, String)>> {
            match proc::try_uids(pid)? {
                None => return Ok(Reading::Ended),
                Some(uids) if uids != [uid; 4] => return Ok(Reading::Other),
                Some(_) => {}
            }
            let Some(name) = mps::named(mps, pid, uid)? else {
                // A process that is ending has no environment any more.
                let has_ended = proc::image(pid).is_none() && proc::is_ending(pid);
                return Ok(if has_ended { Reading::Ended } else { Reading::Other });
            };
            if mps::is_of_another_agent(mps, pid)? {
                return Ok(Reading::Other);
            }
            // A process in the scope of a lease belongs to that lease, even if its environment names another lease.
            let in_scope = table.by_cgroup(&of_user, &proc::try_cgroups(pid)?.unwrap_or_default()).certain();
            Ok(Reading::Found((pid, in_scope.map_or(name, |id| id.to_string()))))
        };
        scan(all_processes, named)
    });
    let (named, unknown) = found.await.unwrap_or_else(|| (Vec::new(), Some(stopping())));
    Arc::new(NamingProcesses { named, unknown })
}

/// Visits all processes of the host.
fn all_processes(visit: &mut dyn FnMut(u32)) -> io::Result<()> {
    proc::each_pid(|pid| u32::try_from(pid).into_iter().for_each(&mut *visit))
}

/// Returns the pids that the driver lists on the target of a member; `None` if they are unknown. Leaves out gpushd's
/// MPS servers: a server runs as the user of its clients, but it ends with these clients, so the lease need not wait
/// for the server.
async fn driver_processes(leases: &Leases, member: &LeaseMember) -> Option<Vec<u32>> {
    let host = leases.handles.state.now();
    if host.gpu(&member.gpu).is_some_and(|gpu| gpu.gpu.state == GpuState::Lost) {
        // No process computes on a lost GPU.
        return Some(Vec::new());
    }
    let reading = leases.handles.readings.read_now_within(&member.gpu, DRIVER).await?.ok()?;
    if !reading.processes_known {
        return None;
    }
    // Each process with whether the driver lists it on the MIG device.
    let mut processes: Vec<(&Process, bool)> = Vec::new();
    if member.target == member.gpu {
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
            let device = on_device.then_some(member.target.as_str());
            servers.of_process(*pid, *kind, Place::Device { gpu: &member.gpu, device }).is_none()
        });
        found.into_iter().map(|(pid, ..)| pid).collect()
    });
    without_servers.await
}

#[cfg(test)]
mod tests;
