//! Finds the remaining processes of a lease: by its binding, in the driver's lists, and from the
//! MPS daemons.
//!
//! A process of the holder on a target belongs to the first of these leases:
//!
//! 1. the lease whose scope contains the process;
//! 2. the lease that the environment of the process names;
//! 3. the only lease that is bound to the cgroup of the process, such as a login session or service.
//!
//! If there is no such lease, the process is unattributed, and counts for the holder's oldest lease
//! on the target. The capacity of that lease stays in use, because the process may belong to it.
//! gpushd never ends an unattributed process. A MIG device or a whole GPU has only one lease, so
//! every process of the holder on the device or GPU counts for that lease.
//!
//! A process that does not use the GPU belongs to the lease only if it is in the scope of the lease,
//! or if its environment names the lease. So a shell does not keep a lease open.
//!
//! `run` in a service or container leaves its command in the cgroup of the service or container. If
//! a process there has another user, such as a setuid program, and uses a target of the lease, the
//! process is unattributed too.
//!
//! The processes of a Slurm job's lease are the processes in the job's cgroup. The path of the cgroup contains the job
//! id, and sometimes the node and the user, but never the cluster. gpushd cannot attribute a process of the holder if
//! it is not in the cgroup of a job, or if jobs of several clusters or nodes may have that cgroup. The lease waits for
//! such a process, and gpushd does not end it.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use gpush_api::{GpuState, LeaseBinding, LeaseId, LeaseMember, MemberShare, Process};
use gpush_core::lease::machine::Remaining;
use gpush_host::{
    cgroup::{self, SlurmJob},
    proc,
};

use super::Leases;
use crate::{
    mps,
    state::{LeaseTable, OpenLease},
};

/// How long the driver may take to list the processes on a GPU.
const DRIVER: Duration = Duration::from_secs(2);

/// Maximum number of processes that the reasons of a releasing lease name.
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
    /// Whether the lease belongs to a Slurm job.
    of_job: bool,
}

impl RemainingProcesses {
    /// Returns the pids of all processes that the lease waits for.
    pub(super) fn pids(&self) -> impl Iterator<Item = u32> {
        self.own.iter().chain(&self.others).copied()
    }

    /// Returns whether the lease of a Slurm job waits only for processes outside the job's cgroup, or for an MPS daemon
    /// that does not answer. A user can cause both.
    pub(super) fn is_unattributed(&self) -> bool {
        let is_alive = |pid: &u32| proc::is_alive(*pid);
        self.of_job
            && self.remaining.driver.is_some()
            && !self.own.iter().any(is_alive)
            && (self.remaining.daemon.is_none() || self.others.iter().any(is_alive))
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
        // Leave out processes that have ended: the driver and the daemon still list them briefly.
        let alive: Vec<u32> = self.pids().filter(|pid| proc::is_alive(*pid)).collect();
        let mut words: Vec<String> = alive.iter().take(MOST_NAMED).map(|pid| sentence(*pid)).collect();
        if let Some(more) = alive.len().checked_sub(MOST_NAMED).filter(|more| *more > 0) {
            words.push(format!("{more} more processes run"));
        }
        if self.remaining.driver.is_none() {
            words.push("gpushd cannot read from the driver which processes use the GPUs of the lease".to_owned());
        }
        if self.remaining.daemon.is_none() {
            words.push("gpushd cannot get the list of clients from the MPS daemon".to_owned());
        }
        words
    }
}

/// Finds the remaining processes of a lease.
pub(super) async fn remaining_processes(leases: &Leases, lease: &OpenLease) -> RemainingProcesses {
    let mut left = RemainingProcesses {
        remaining: Remaining { bound: Some(0), driver: Some(0), daemon: Some(0) },
        ..RemainingProcesses::default()
    };
    left.of_job = matches!(lease.record.binding, LeaseBinding::Job { .. });
    // gpushd scans the processes while the driver and the daemons answer.
    let (own, lists) = tokio::join!(processes_naming_lease(leases, lease), lists(leases, lease));
    left.own = own;
    if let LeaseBinding::Scope { cgroup: Some(cgroup), .. } = &lease.record.binding {
        left.own.extend(cgroup::processes(cgroup).unwrap_or_default());
    }
    left.remaining.bound = u32::try_from(left.own.len()).ok();
    for (member, MemberLists { clients, listed }) in lease.record.members.iter().zip(lists) {
        // Use a blocking thread: the environments of processes may be large and swapped out.
        let (reader, lease) = (leases.clone(), lease.clone());
        let (member, mut before) = (member.clone(), left);
        let counted = tokio::task::spawn_blocking(move || {
            let table = reader.handles.state.leases();
            let count = |pids: Option<Vec<u32>>, left: &mut RemainingProcesses| {
                let pids = pids?;
                let named = |pid| mps::named(&reader.handles.mps, pid);
                let attributed = pids.into_iter().filter_map(|pid| {
                    let owner = proc::owner(pid)?;
                    let attribution = match owner == lease.record.holder.uid {
                        true => attribute(&table, &lease, &member, pid, &named, &job_of),
                        false => attribute_of_another_user(&table, &lease, &member, pid, owner),
                    };
                    Some((pid, attribution))
                });
                let mut count = 0;
                for (pid, attribution) in attributed {
                    match attribution {
                        LeaseMatch::This => drop(left.own.insert(pid)),
                        LeaseMatch::PerhapsThis => drop(left.others.insert(pid)),
                        LeaseMatch::Another => continue,
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
            Ok(counted) => counted,
            // This fails only if gpushd is stopping.
            Err(_) => return RemainingProcesses::default(),
        };
    }
    left
}

/// The processes on the target of a member; `None` if they are not known.
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

/// Returns the Slurm job of a process, according to its cgroup.
fn job_of(pid: u32) -> Option<SlurmJob> {
    cgroup::of(pid)?.slurm_job
}

/// Returns the processes of the holder that name the lease in their environment, such as the command of `gpushctl run`
/// and its children. For a Slurm job, returns the processes in the job's cgroup instead. A login shell is never
/// included, even if the lease is bound to it.
async fn processes_naming_lease(leases: &Leases, lease: &OpenLease) -> BTreeSet<u32> {
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
        // Leave out processes that have ended, including zombies.
        let its = all.iter().filter(|(pid, name)| *name == id && proc::is_alive(*pid));
        return its.map(|(pid, _)| *pid).collect();
    };
    let own = tokio::task::spawn_blocking(move || {
        let pids = cgroup::job_processes(job, uid).unwrap_or_else(|| pids().collect());
        let of_holder = pids.into_iter().filter(|pid| proc::owner(*pid) == Some(uid) && proc::is_alive(*pid));
        let table = leases.handles.state.leases();
        let is_its = |pid: &u32| job_of(*pid).is_some_and(|job| lease.fits_job(&job) && !table.is_ambiguous(&job, uid));
        of_holder.filter(is_its).collect()
    });
    own.await.unwrap_or_default()
}

/// Processes of a user that name a lease in their environment: the pid and the lease.
pub(super) type ProcessLeases = Arc<[(u32, String)]>;

/// Finds the processes of a user whose environment names a lease of this gpushd.
async fn processes_naming_leases(leases: Leases, uid: u32) -> ProcessLeases {
    let found = tokio::task::spawn_blocking(move || {
        let mps = &leases.handles.mps;
        let of_user = pids().filter(|pid| proc::owner(*pid) == Some(uid));
        let named = of_user.filter_map(|pid| Some((pid, mps::named(mps, pid)?)));
        named.filter(|(pid, _)| !mps::is_of_another_agent(mps, *pid)).collect::<Vec<_>>()
    });
    found.await.unwrap_or_default().into()
}

fn pids() -> impl Iterator<Item = u32> {
    proc::pids().filter_map(|pid| u32::try_from(pid).ok())
}

/// Returns the pids that the driver lists on the target of a member; `None` if they are unknown. Leaves out gpushd's
/// MPS servers, which run as the user and end with their clients.
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
    let mut processes: Vec<&Process> = Vec::new();
    if member.target == member.gpu {
        processes.extend(&reading.processes);
    }
    for instance in reading.mig.iter().flat_map(|mig| &mig.instances) {
        let devices = instance.compute.iter().filter(|compute| compute.uuid.as_ref() == Some(&member.target));
        let mut is_here = false;
        for device in devices {
            is_here = true;
            processes.extend(&device.processes);
        }
        if is_here {
            // The driver may list a process only for the GPU instance, because it does not list it for the compute
            // instance yet.
            processes.extend(&instance.processes);
        }
    }
    let servers = leases.handles.mps.servers();
    let is_server = |process: &Process| process.pid.is_some_and(|pid| servers.of_process(pid, process.kind).is_some());
    // A process without a pid is in another pid namespace, and its user is not known. Leave it out.
    Some(processes.into_iter().filter(|process| !is_server(process)).filter_map(|process| process.pid).collect())
}

/// Whether a process of the holder belongs to this lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LeaseMatch {
    This,
    PerhapsThis,
    Another,
}

fn attribute(
    table: &LeaseTable,
    lease: &OpenLease,
    member: &LeaseMember,
    pid: u32,
    named: &dyn Fn(u32) -> Option<String>,
    job_of: &dyn Fn(u32) -> Option<SlurmJob>,
) -> LeaseMatch {
    let job = job_of(pid);
    let uid = lease.record.holder.uid;
    let of_job = |one: &OpenLease| one.record.holder.uid == uid && job.as_ref().is_some_and(|job| one.fits_job(job));
    if of_job(lease) {
        let is_ambiguous = job.as_ref().is_some_and(|job| table.is_ambiguous(job, uid));
        return if is_ambiguous { LeaseMatch::PerhapsThis } else { LeaseMatch::This };
    }
    if table.on_target(&member.target).any(of_job) {
        return LeaseMatch::Another;
    }
    let is_job = matches!(lease.record.binding, LeaseBinding::Job { .. });
    // A MIG device or a whole GPU has only one lease at a time.
    let is_alone = matches!(member.share, MemberShare::Mig { .. } | MemberShare::Whole);
    if is_alone && is_job {
        return LeaseMatch::PerhapsThis;
    }
    if is_alone && lease.cgroup().is_none() {
        return LeaseMatch::This;
    }
    let here = table.on_target(&member.target).filter(|one| one.record.holder.uid == uid).map(OpenLease::id);
    let here: Vec<LeaseId> = here.collect();
    let bound = table.by_cgroup(&here, &proc::cgroups(pid).unwrap_or_default());
    let named = || named(pid).and_then(|name| name.parse().ok()).filter(|id| here.contains(id));
    let found = bound.certain().or_else(named).or_else(|| bound.likely());
    let oldest = bound.oldest().or(here.first().copied());
    match found {
        // The environment does not prove that a process belongs to a job, because the user can set it.
        Some(id) if id == lease.id() && is_job => LeaseMatch::PerhapsThis,
        Some(id) if id == lease.id() => LeaseMatch::This,
        Some(_) => LeaseMatch::Another,
        None if oldest == Some(lease.id()) => LeaseMatch::PerhapsThis,
        None => LeaseMatch::Another,
    }
}

/// Attributes a process of another user than the holder: the command of `run`, in a service or container, may have
/// started it.
fn attribute_of_another_user(
    table: &LeaseTable,
    lease: &OpenLease,
    member: &LeaseMember,
    pid: u32,
    owner: u32,
) -> LeaseMatch {
    let here: Vec<&OpenLease> = table.on_target(&member.target).collect();
    let is_bound_to_cgroup = matches!(lease.record.binding, LeaseBinding::Cgroup { .. });
    if !is_bound_to_cgroup || here.iter().any(|one| one.record.holder.uid == owner) {
        return LeaseMatch::Another;
    }
    let here: Vec<LeaseId> = here.into_iter().map(OpenLease::id).collect();
    let bound = table.by_cgroup(&here, &proc::cgroups(pid).unwrap_or_default());
    if bound.oldest() == Some(lease.id()) { LeaseMatch::PerhapsThis } else { LeaseMatch::Another }
}
