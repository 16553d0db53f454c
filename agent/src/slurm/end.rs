//! Epilog: ends the lease of a job, and the processes of the job that still use its GPUs.

use std::time::Duration;

use super::{Inner, time_until};
use crate::{
    caller::Caller,
    leases::{JobKey, end_job, of_job},
    state::OpenLease,
};
use gpush_api::{ApiError, LeaseId, SlurmJobEnd, SlurmJobEnded, SlurmLeftover};
use gpush_core::{config::Leftovers, lease::machine::EndProcesses, slurm::decide};

/// Time from SIGTERM to SIGKILL. It is short, because Slurm has already sent both signals (see KillWait).
const GRACE: Duration = Duration::from_secs(2);

/// Ends a job. Waits until its capacity is free, at most until the deadline. The caller has the lock of the job.
///
/// # Errors
/// When the end cannot be recorded.
pub(super) async fn end(
    slurm: &Inner,
    caller: &Caller,
    key: &JobKey,
    job: &SlurmJobEnd,
) -> Result<SlurmJobEnded, ApiError> {
    let mut answer = SlurmJobEnded::default();
    let mut ending = Vec::new();
    for (lease, restart) in of_job(&slurm.leases, key) {
        if decide::ends(job.restart, restart) {
            ending.push(lease);
        } else {
            answer.later.push(lease.id());
        }
    }
    if ending.is_empty() {
        return Ok(answer);
    }
    release_all(slurm, caller, ending.iter()).await?;
    let is_open = |id: LeaseId| slurm.leases.is_open(id);
    let patience = time_until(job.until_ms);
    let ids: Vec<LeaseId> = ending.iter().map(OpenLease::id).collect();
    let _late = tokio::time::timeout(patience, slurm.leases.all_ended(&ids)).await.is_err();
    for lease in &ending {
        match is_open(lease.id()) {
            false => answer.ended.push(lease.id()),
            true => answer.left.push(leftover(slurm, lease)),
        }
    }
    Ok(answer)
}

/// Begins the end of leases of a job. Ends processes that the job left, if the config says so.
///
/// # Errors
/// When it cannot be recorded.
pub(super) async fn release_all(
    slurm: &Inner,
    caller: &Caller,
    leases: impl Iterator<Item = &OpenLease>,
) -> Result<(), ApiError> {
    let end = match slurm.leases.config().slurm.leftovers {
        Leftovers::End => Some(EndProcesses { notice: Duration::ZERO, grace: GRACE }),
        Leftovers::Report => None,
    };
    for lease in leases {
        end_job(&slurm.leases, caller, lease.id(), end).await?;
    }
    Ok(())
}

fn leftover(slurm: &Inner, lease: &OpenLease) -> SlurmLeftover {
    let (gpus, mut waits_for) = slurm.leases.what_is_left(lease.id());
    if waits_for.is_empty() {
        waits_for.push("the end of its processes is not known yet".to_owned());
    }
    SlurmLeftover { lease: lease.id(), gpus, waits_for }
}
