//! Decides to which lease a process on a GPU or MIG device belongs.
//!
//! A process of the holder on a target belongs to the first of these leases:
//!
//! 1. the lease whose scope contains the process;
//! 2. the lease that the environment of the process names;
//! 3. the only lease that is bound to the cgroup of the process, such as a login session or service.
//!
//! If there is no such lease, the process is unattributed, and counts for the holder's oldest lease
//! on the target. The capacity of the oldest lease stays in use, because the process may belong to
//! this lease. gpushd never ends an unattributed process. A MIG device or a whole GPU has only one
//! lease, so every process of the holder on the device or GPU counts for that lease.
//!
//! A process that does not use the GPU belongs to the lease only if it is in the scope of the lease,
//! or if its environment names the lease. So a login shell does not keep a released lease open.
//!
//! If a user calls `gpushctl run` in a service or container, the command stays in the cgroup of the
//! service or container. A process of another user in this cgroup, such as a setuid program, is
//! unattributed if it uses a target of the lease.
//!
//! The processes of a Slurm job's lease are the processes in the job's cgroup. The path of the cgroup contains the job
//! id, and sometimes the node and the user, but never the cluster. gpushd cannot attribute a process of the holder if
//! it is not in the cgroup of a job, or if jobs of several clusters or nodes may have that cgroup. The lease waits
//! until such a process ends. gpushd does not end the process.

use std::io;

use gpush_api::{LeaseBinding, LeaseId, LeaseMember, MemberShare};
use gpush_host::{cgroup::SlurmJob, proc};

use crate::state::{LeaseTable, OpenLease};

/// Whether a process of the holder belongs to this lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LeaseMatch {
    This,
    PerhapsThis,
    Another,
}

/// Returns whether a process on the target of a member belongs to a lease. `named` reads the lease that the process
/// names in its environment, and `job_of` reads the Slurm job of the process.
///
/// # Errors
/// The process cannot be read, for example because of too many open files. It may then belong to the lease. For the
/// lease of a Slurm job, an unreadable environment is not an error.
pub(super) fn attribute(
    table: &LeaseTable,
    lease: &OpenLease,
    member: &LeaseMember,
    pid: u32,
    named: &dyn Fn(u32) -> io::Result<Option<String>>,
    job_of: &dyn Fn(u32) -> io::Result<Option<SlurmJob>>,
) -> io::Result<LeaseMatch> {
    let uid = lease.record.holder.uid;
    match proc::try_owner(pid)? {
        Some(owner) if owner == uid => {}
        Some(owner) => return attribute_of_another_user(table, lease, member, pid, owner),
        None => return Ok(LeaseMatch::Another),
    }
    let job = job_of(pid)?;
    let of_job = |one: &OpenLease| one.record.holder.uid == uid && job.as_ref().is_some_and(|job| one.fits_job(job));
    if of_job(lease) {
        let is_ambiguous = job.as_ref().is_some_and(|job| table.is_ambiguous(job, uid));
        return Ok(if is_ambiguous { LeaseMatch::PerhapsThis } else { LeaseMatch::This });
    }
    if table.on_target(&member.target).any(of_job) {
        return Ok(LeaseMatch::Another);
    }
    let cgroups = proc::try_cgroups(pid)?.unwrap_or_default();
    let is_in_other_scope =
        table.by_cgroup(&table.of_holder(uid), &cgroups).certain().is_some_and(|id| id != lease.id());
    let is_job = matches!(lease.record.binding, LeaseBinding::Job { .. });
    // A MIG device or a whole GPU has only one lease at a time.
    let is_alone = matches!(member.share, MemberShare::Mig { .. } | MemberShare::Whole);
    if is_alone && (is_job || is_in_other_scope) {
        return Ok(LeaseMatch::PerhapsThis);
    }
    let here = table.on_target(&member.target).filter(|one| one.record.holder.uid == uid).map(OpenLease::id);
    let here: Vec<LeaseId> = here.collect();
    let bound = table.by_cgroup(&here, &cgroups);
    let found = match bound.certain() {
        Some(certain) => Some(certain),
        None => {
            let name = match named(pid) {
                Ok(name) => name,
                // The environment does not prove that a process belongs to a job. The user can prevent gpushd from
                // reading it, so a failed read must not count as a failure of the node.
                Err(_) if is_job => return Ok(LeaseMatch::PerhapsThis),
                Err(error) => return Err(error),
            };
            name.and_then(|name| name.parse().ok()).filter(|id| here.contains(id)).or_else(|| bound.likely())
        }
    };
    let oldest = bound.oldest().or(here.first().copied());
    Ok(match found {
        // The environment does not prove that a process belongs to a job, because the user can set the environment. A
        // process in the scope of another lease belongs to that other lease, so gpushd must not end it for this lease.
        Some(id) if id == lease.id() && (is_job || is_in_other_scope) => LeaseMatch::PerhapsThis,
        Some(id) if id == lease.id() => LeaseMatch::This,
        Some(_) => LeaseMatch::Another,
        None if oldest == Some(lease.id()) => LeaseMatch::PerhapsThis,
        None => LeaseMatch::Another,
    })
}

/// Attributes a process whose user is not the holder. If `gpushctl run` was called in a service or container, its
/// command may have started the process.
fn attribute_of_another_user(
    table: &LeaseTable,
    lease: &OpenLease,
    member: &LeaseMember,
    pid: u32,
    owner: u32,
) -> io::Result<LeaseMatch> {
    let here: Vec<&OpenLease> = table.on_target(&member.target).collect();
    let is_bound_to_cgroup = matches!(lease.record.binding, LeaseBinding::Cgroup { .. });
    if !is_bound_to_cgroup || here.iter().any(|one| one.record.holder.uid == owner) {
        return Ok(LeaseMatch::Another);
    }
    let here: Vec<LeaseId> = here.into_iter().map(OpenLease::id).collect();
    let bound = table.by_cgroup(&here, &proc::try_cgroups(pid)?.unwrap_or_default());
    Ok(if bound.oldest() == Some(lease.id()) { LeaseMatch::PerhapsThis } else { LeaseMatch::Another })
}
