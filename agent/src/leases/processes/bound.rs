//! Finds the processes that belong to a lease even if they use no GPU: by the scope of the lease, the cgroup of its Slurm
//! job, or their environment.

use std::{collections::BTreeSet, io, sync::Arc};

use gpush_api::{LeaseBinding, LeaseId};
use gpush_core::attribution::{Attribution, FactName, GpuUse, LeaseMatch};
use gpush_host::{cgroup, proc, process_facts::ProcessFacts, subtask};

use super::scan::{Incomplete, Reading, scan, scan_job};
use crate::{
    leases::Leases,
    state::{LeaseTable, OpenLease},
};

/// The result of a search for processes of a lease: the processes, and why there may be more.
#[derive(Debug, Default)]
pub(super) struct FoundProcesses {
    pub(super) pids: BTreeSet<u32>,
    /// Processes in the cgroup of the Slurm job that belong to a later run of the job.
    pub(super) of_later_runs: BTreeSet<u32>,
    pub(super) unknown: Option<Incomplete>,
}

/// Returns the processes in the scope of a lease; none if the lease has no scope.
pub(super) async fn processes_in_scope(lease: &OpenLease, is_moving: bool) -> FoundProcesses {
    let LeaseBinding::Scope { cgroup: Some(cgroup), .. } = &lease.record.binding else {
        return FoundProcesses::default();
    };
    if is_moving {
        let unknown =
            Some(Incomplete::Unread("systemd is still moving the process into the scope of the lease".to_owned()));
        return FoundProcesses { unknown, ..FoundProcesses::default() };
    }
    let cgroup = cgroup.clone();
    let found = subtask::blocking(move || cgroup::processes(&cgroup).unwrap_or_default()).await;
    match found {
        Some(found) => FoundProcesses {
            pids: found.pids.into_iter().collect(),
            unknown: found.error.map(|error| Incomplete::Unread(error.to_string())),
            ..FoundProcesses::default()
        },
        None => FoundProcesses::unread(),
    }
}

impl FoundProcesses {
    /// Returns the result of a search that did not finish, because gpushd is stopping.
    fn unread() -> Self {
        Self { unknown: Some(stopping()), ..Self::default() }
    }
}

fn stopping() -> Incomplete {
    Incomplete::Unread("gpushd is stopping".to_owned())
}

/// Returns the processes of the holder that belong to the lease, even if they use no GPU: the command of `gpushctl run`,
/// and the processes that this command started. A login shell is not included, even if the lease is bound to the shell.
/// For the lease of a Slurm job, returns the processes in the job's cgroup.
pub(super) async fn bound_processes(leases: &Leases, lease: &OpenLease) -> FoundProcesses {
    let (leases, lease) = (leases.clone(), lease.clone());
    let (uid, id) = (lease.record.holder.uid, lease.id());
    let job = match lease.record.binding {
        LeaseBinding::Job { job, .. } => Some(u64::from(job)),
        LeaseBinding::None
        | LeaseBinding::Process { .. }
        | LeaseBinding::Time
        | LeaseBinding::Scope { .. }
        | LeaseBinding::Cgroup { .. } => None,
    };
    let Some(job) = job else {
        let all = leases.bound_by(uid).after_now(|| processes_of_leases(leases.clone(), uid)).await;
        // Count processes that have ended since the scan: they may have started others, which the scan did not see.
        let its = all.found.iter().filter(|(_, lease)| *lease == id);
        let pids = its.map(|(pid, _)| *pid).collect();
        return FoundProcesses { pids, unknown: all.unknown.clone(), ..FoundProcesses::default() };
    };
    let own = subtask::blocking(move || {
        let scan = BoundScan::new(&leases, uid, true);
        let read = |pid: u32| {
            scan.read(pid, |found| match found {
                // The process may belong to a later run of the job.
                Attribution::Lease { .. } => match found.matches(id) {
                    LeaseMatch::This => Some((pid, false)),
                    LeaseMatch::PerhapsThis => Some((pid, true)),
                    LeaseMatch::Unread(_) | LeaseMatch::Another => None,
                },
                Attribution::Perhaps { .. } | Attribution::Unknown { .. } | Attribution::NoLease => None,
            })
        };
        scan_job(|| cgroup::job_processes(job, uid), all_processes, read)
    });
    match own.await {
        Some((found, unknown)) => {
            let (later, pids): (Vec<_>, Vec<_>) = found.into_iter().partition(|(_, is_later)| *is_later);
            let pids_of = |found: Vec<(u32, bool)>| found.into_iter().map(|(pid, _)| pid).collect();
            FoundProcesses { pids: pids_of(pids), of_later_runs: pids_of(later), unknown }
        }
        None => FoundProcesses::unread(),
    }
}

/// The processes of a user that belong to leases, even if they use no GPU.
#[derive(Debug)]
pub(in crate::leases) struct BoundProcesses {
    /// The pid of each process, and its lease.
    found: Vec<(u32, LeaseId)>,
    /// Why gpushd may not have found all processes.
    unknown: Option<Incomplete>,
}

/// The result of a scan for processes of a user that belong to leases.
pub(in crate::leases) type BoundProcessScan = Arc<BoundProcesses>;

/// Finds the processes of a user that belong to a lease by their scope or their environment.
async fn processes_of_leases(leases: Leases, uid: u32) -> BoundProcessScan {
    let found = subtask::blocking(move || {
        let bound = BoundScan::new(&leases, uid, false);
        let its_lease = |found: &Attribution| match found {
            Attribution::Lease { id, .. } => Some(*id),
            Attribution::Perhaps { .. } | Attribution::Unknown { .. } | Attribution::NoLease => None,
        };
        scan(all_processes, |pid| bound.read(pid, |found| Some((pid, its_lease(found)?))))
    });
    let (found, unknown) = found.await.unwrap_or_else(|| (Vec::new(), Some(stopping())));
    Arc::new(BoundProcesses { found, unknown })
}

/// Reads which processes of a user belong to leases, even if they use no GPU.
struct BoundScan<'a> {
    leases: &'a Leases,
    table: Arc<LeaseTable>,
    uid: u32,
    /// Whether the scan looks for the processes of a Slurm job.
    of_job: bool,
}

impl<'a> BoundScan<'a> {
    fn new(leases: &'a Leases, uid: u32, of_job: bool) -> Self {
        Self { leases, table: leases.handles.context.state.leases(), uid, of_job }
    }

    /// Reads a process. `select` returns what to keep of a process.
    ///
    /// # Errors
    /// The process cannot be read. It may then belong to a lease.
    fn read<T>(&self, pid: u32, select: impl Fn(&Attribution) -> Option<T>) -> io::Result<Reading<T>> {
        // Read as few files as possible, because this is called for each process of the host. Most processes are
        // kernel threads, which belong to root and use no GPU, or processes of other users.
        if self.uid != 0 {
            match proc::try_owner(pid)? {
                None => return Ok(Reading::Ended),
                Some(owner) if owner != self.uid => return Ok(Reading::Other),
                Some(_) => {}
            }
        }
        let first = proc::try_reading(pid)?;
        if first.is_kernel_thread {
            return Ok(Reading::Other);
        }
        let attribution = |facts: &ProcessFacts<'_>| match facts.owner() == self.uid {
            false => Reading::Other,
            true if facts.has_ended() => Reading::Ended,
            true => Reading::Found((self.table.attribute(facts, GpuUse::None), facts.executes_program())),
        };
        let names = &self.leases.handles.lease_names;
        let (found, executes_program) = match ProcessFacts::examine_since(names, pid, first, attribution)? {
            None | Some(Reading::Ended) => return Ok(Reading::Ended),
            Some(Reading::Other) => return Ok(Reading::Other),
            Some(Reading::Found(found)) => found,
        };
        match &found {
            // The environment does not matter for the lease of a job.
            Attribution::Unknown { unreadable, .. } if self.of_job && unreadable.fact == FactName::Environment => {}
            Attribution::Unknown { unreadable, .. } => return Err(io::Error::other(unreadable.to_string())),
            Attribution::Lease { .. } | Attribution::Perhaps { .. } | Attribution::NoLease => {}
        }
        if let Some(selected) = select(&found) {
            return Ok(Reading::Found(selected));
        }
        // A process that is ending has no environment any more.
        let has_ended = found == Attribution::NoLease && !executes_program && proc::is_ending(pid);
        Ok(if has_ended { Reading::Ended } else { Reading::Other })
    }
}

/// Visits all processes of the host.
fn all_processes(visit: &mut dyn FnMut(u32)) -> io::Result<()> {
    proc::each_pid(|pid| u32::try_from(pid).into_iter().for_each(&mut *visit))
}
