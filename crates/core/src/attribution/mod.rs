//! Decides to which lease a process belongs.
//!
//! These parts of gpushd call [`attribute`]: the list of processes, the search for unleased processes, the end of a lease,
//! and the list of MPS clients.
//!
//! The kernel reports the user and the cgroup of a process, and a user cannot enter a cgroup that root created. But a
//! process can write its own environment. So the user comes first, then the cgroup, then the environment, and the
//! environment counts only if it names a lease of the process's own user.
//!
//! ```text
//! the user of the process holds a lease on the GPU or MIG device that the process uses ("here"):
//!
//! what identifies the lease                               | the process belongs to
//! --------------------------------------------------------+----------------------------------------------------------
//! it is in the scope of a lease here                      | that lease
//! it is in the cgroup of a Slurm job with a lease here    | that lease; the lease of the last run, if the job has several
//!   jobs of several clusters or nodes may have the cgroup | perhaps each of their leases here
//! it is in the scope or job of a lease on another device  | perhaps the lease here that it or an ancestor names, else the
//!                                                         |   lease that is bound to its cgroup, else the oldest here
//! its environment names a lease here                      | that lease
//!   that lease belongs to a Slurm job                     | perhaps that lease: the user can set the environment
//! its environment names a lease on another device         | as for the scope of a lease on another device
//! it, or an ancestor of the same user, named a lease here | that lease, but gpushd never ends the process
//! it is in the session, service or container of a lease   | that lease
//!   several leases here are bound to that cgroup          | perhaps the oldest of them
//!   its environment was overwritten, and the user holds   | perhaps that lease
//!   other leases here                                     |
//! nothing                                                 | perhaps the oldest lease here
//!
//! its user holds no lease here, but it is in the cgroup of another user's lease here:
//!                                                         | perhaps that lease: a setuid program, or another user of a
//!                                                         |   container
//!
//! it uses no GPU: only a scope, the cgroup of a job, or the environment identify its lease. So a login shell does not
//! keep a released lease open. If nothing identifies a lease, the process belongs to none.
//! ```
//!
//! Guarantees:
//! - If a user holds a lease here, then every process of this user here counts for a lease, so the lease keeps its
//!   capacity until the process ends.
//! - A process belongs with certainty to at most one lease ([`LeaseMatch::This`]). Only such a process may be ended together
//!   with its lease.
//! - If a fact cannot be read and could change the answer, the answer is [`Attribution::Unknown`]. Each lease to which the
//!   process may belong then keeps its capacity.
//! - Leases of other users on other devices never change the answer.
//!
//! The kind of a process (compute, graphics, MPS client) does not matter for its lease.

mod cgroups;
mod facts;
mod lease;
mod outcome;

use gpush_api::LeaseId;

use self::lease::{ByCgroup, ids};
pub use self::{
    cgroups::{Cgroups, SlurmJob, is_at_or_below},
    facts::{Fact, FactName, Facts, NamedLease, Unreadable},
    lease::{AttributableLease, GpuUse},
    outcome::{Attribution, Doubt, Evidence, LeaseMatch},
};

/// Returns to which lease a process belongs. `leases` are the leases that hold capacity, of all users.
#[must_use]
pub fn attribute<'a>(
    facts: &impl Facts,
    gpu_use: GpuUse<'_>,
    leases: impl IntoIterator<Item = AttributableLease<'a>>,
) -> Attribution {
    let mut leases: Vec<AttributableLease<'_>> = leases.into_iter().collect();
    leases.sort_by_key(|lease| lease.id);
    let here = |lease: &&AttributableLease<'_>| gpu_use.is_of(lease);
    let uid = match facts.uid() {
        Ok(uid) => uid,
        Err(unreadable) => return Attribution::unknown(ids(leases.iter().filter(here)), unreadable),
    };
    let own: Vec<&AttributableLease<'_>> = leases.iter().filter(|lease| lease.holder == uid).collect();
    if gpu_use == GpuUse::None {
        return without_gpu(facts, &own);
    }
    let own_here: Vec<&AttributableLease<'_>> = own.iter().copied().filter(here).collect();
    if own_here.is_empty() {
        return of_another_user(facts, leases.iter().filter(here).filter(|lease| lease.has_cgroup()).collect());
    }
    of_holder(facts, &own, &own_here)
}

/// Attributes a process that uses no GPU. `own` are the leases of its user.
fn without_gpu(facts: &impl Facts, own: &[&AttributableLease<'_>]) -> Attribution {
    if own.is_empty() {
        return Attribution::NoLease;
    }
    let by_cgroup = match facts.cgroups() {
        Ok(cgroups) => ByCgroup::of(own, &cgroups),
        Err(unreadable) => return Attribution::unknown(ids(own.iter().copied()), unreadable),
    };
    match by_cgroup {
        ByCgroup::One { id, evidence, earlier_runs } => return Attribution::Lease { id, evidence, earlier_runs },
        ByCgroup::Several(leases) => return Attribution::Perhaps { leases, doubt: Doubt::SeveralJobs },
        ByCgroup::None => {}
    }
    // The environment does not prove that a process belongs to a job.
    let nameable: Vec<&AttributableLease<'_>> = own.iter().copied().filter(|lease| !lease.is_of_job()).collect();
    if nameable.is_empty() {
        return Attribution::NoLease;
    }
    match facts.named_lease(&|id| nameable.iter().any(|lease| lease.id == id)) {
        Ok(NamedLease::Named(id)) => Attribution::lease(id, Evidence::Environment),
        Ok(NamedLease::None | NamedLease::Overwritten) => Attribution::NoLease,
        Err(unreadable) => Attribution::unknown(ids(nameable), unreadable),
    }
}

/// Attributes a process whose user holds no lease on the device. `leases` are the leases there that have a cgroup.
fn of_another_user(facts: &impl Facts, leases: Vec<&AttributableLease<'_>>) -> Attribution {
    if leases.is_empty() {
        return Attribution::NoLease;
    }
    let cgroups = match facts.cgroups() {
        Ok(cgroups) => cgroups,
        Err(unreadable) => return Attribution::unknown(ids(leases), unreadable),
    };
    let owning = leases.iter().find(|lease| lease.owns_cgroup_of(&cgroups));
    match owning.or_else(|| leases.iter().find(|lease| lease.shares_cgroup_of(&cgroups))) {
        Some(lease) => Attribution::Perhaps { leases: vec![lease.id], doubt: Doubt::OtherUser },
        None => Attribution::NoLease,
    }
}

/// Attributes a process whose user holds leases on the device. `own` are all leases of the user, `here` those on the
/// device, the oldest first.
fn of_holder(facts: &impl Facts, own: &[&AttributableLease<'_>], here: &[&AttributableLease<'_>]) -> Attribution {
    let cgroups = match facts.cgroups() {
        Ok(cgroups) => cgroups,
        Err(unreadable) => return Attribution::unknown(ids(here.iter().copied()), unreadable),
    };
    let is_here = |id: &LeaseId| here.iter().any(|lease| lease.id == *id);
    let is_in_cgroup_elsewhere = match ByCgroup::of(own, &cgroups) {
        ByCgroup::One { id, evidence, mut earlier_runs } => {
            earlier_runs.retain(is_here);
            match (is_here(&id), earlier_runs.is_empty()) {
                (true, _) => return Attribution::Lease { id, evidence, earlier_runs },
                (false, false) => {
                    return Attribution::Perhaps { leases: earlier_runs, doubt: Doubt::LaterRun };
                }
                (false, true) => true,
            }
        }
        ByCgroup::Several(mut leases) => {
            leases.retain(is_here);
            if !leases.is_empty() {
                return Attribution::Perhaps { leases, doubt: Doubt::SeveralJobs };
            }
            true
        }
        ByCgroup::None => false,
    };
    // Nothing else can identify the lease with certainty, and there is only one lease, so do not read the environment.
    if let [only] = here
        && only.is_exclusive()
        && (is_in_cgroup_elsewhere || only.is_of_job())
    {
        let doubt = if is_in_cgroup_elsewhere { Doubt::OtherDevice { is_named: false } } else { Doubt::OutsideJob };
        return Attribution::Perhaps { leases: vec![only.id], doubt };
    }
    let named = match facts.named_lease(&|id| own.iter().any(|lease| lease.id == id)) {
        Ok(named) => named,
        Err(unreadable) => return Attribution::unknown(ids(here.iter().copied()), unreadable),
    };
    let names_elsewhere = matches!(named, NamedLease::Named(id) if !is_here(&id));
    let identified = match named {
        NamedLease::Named(id) if is_here(&id) => Some((id, Evidence::Environment)),
        NamedLease::Named(_) | NamedLease::None | NamedLease::Overwritten => {
            match facts.inherited_lease(&|id| is_here(&id)) {
                Ok(inherited) => inherited.map(|id| (id, Evidence::Inherited)),
                Err(unreadable) => return Attribution::unknown(ids(here.iter().copied()), unreadable),
            }
        }
    };
    let is_elsewhere = is_in_cgroup_elsewhere || names_elsewhere;
    if let Some((id, evidence)) = identified {
        let is_of_job = here.iter().any(|lease| lease.id == id && lease.is_of_job());
        return match (is_elsewhere, is_of_job) {
            (true, _) => Attribution::perhaps(id, Doubt::OtherDevice { is_named: true }),
            (false, true) => Attribution::perhaps(id, Doubt::NamesJob),
            (false, false) => Attribution::lease(id, evidence),
        };
    }
    let bound: Vec<LeaseId> = ids(here.iter().copied().filter(|lease| lease.shares_cgroup_of(&cgroups)));
    let is_overwritten = named == NamedLease::Overwritten;
    let doubt = match (&*bound, here) {
        _ if is_elsewhere => Doubt::OtherDevice { is_named: false },
        ([only], [_]) => return Attribution::lease(*only, Evidence::Cgroup),
        ([only], _) if !is_overwritten => return Attribution::lease(*only, Evidence::Cgroup),
        ([_], _) => Doubt::Overwritten,
        ([_, ..], _) => Doubt::SeveralLeases,
        ([], _) if is_overwritten => Doubt::Overwritten,
        ([], [oldest, ..]) if oldest.is_of_job() => Doubt::OutsideJob,
        ([], _) => Doubt::NoEvidence,
    };
    let oldest = bound.first().copied().into_iter().chain(here.iter().map(|lease| lease.id)).take(1);
    Attribution::Perhaps { leases: oldest.collect(), doubt }
}

#[cfg(test)]
mod tests;
