//! Epilog: ends the lease of a job, and the processes of the job that still use its GPUs.

use std::time::Duration;

use super::{SlurmParts, time_until};
use crate::{
    leases::{JobKey, end_job, of_job},
    requests::caller::Caller,
};
use gpush_api::{ApiError, LeaseId, SlurmJobEnd, SlurmJobEnded, SlurmLeftover};
use gpush_core::{config::Leftovers, lease::machine::EndProcesses, slurm::decide};

/// Time from SIGTERM to SIGKILL. It is short, because Slurm has already sent both signals to the
/// processes (see KillWait).
const GRACE: Duration = Duration::from_secs(2);

/// How long Epilog waits for processes that gpushd cannot attribute to the job.
const OUTSIDE: Duration = Duration::from_secs(3);

/// Ends the leases of a job. Waits until the capacity of these leases is free, but not beyond the
/// deadline of the hook. The caller must hold the lock of the job.
///
/// # Errors
/// If the end cannot be recorded.
pub(super) async fn end(
    slurm: &SlurmParts,
    caller: &Caller,
    key: &JobKey,
    job: &SlurmJobEnd,
) -> Result<SlurmJobEnded, ApiError> {
    let mut answer = SlurmJobEnded::default();
    let mut ending = Vec::new();
    for (lease, restart) in of_job(&slurm.leases, key) {
        if decide::ends(job.restart, restart) {
            ending.push(lease.id());
        } else {
            answer.later.push(lease.id());
        }
    }
    if ending.is_empty() {
        return Ok(answer);
    }
    // If the deadline has passed, the end was not reported in time, and the hook of another job
    // reports it now. In this case, the job may already run again without a lease, with processes
    // in the same cgroup. So gpushd ends no process. The lease stays until the cgroup has no
    // processes.
    let leftovers =
        if time_until(job.until_ms).is_zero() { Leftovers::Report } else { slurm.leases.config().slurm.leftovers };
    release_all(slurm, caller, ending.iter().copied(), leftovers).await?;
    let patience = time_until(job.until_ms);
    let left = |id: &LeaseId| slurm.leases.what_is_left(*id);
    let is_late = tokio::time::timeout(patience.min(OUTSIDE), slurm.leases.all_ended(&ending)).await.is_err();
    if is_late && ending.iter().filter_map(left).any(|left| !left.unattributed) {
        let patience = time_until(job.until_ms);
        let _late = tokio::time::timeout(patience, slurm.leases.all_ended(&ending)).await.is_err();
    }
    for id in ending {
        match left(&id) {
            None => answer.ended.push(id),
            Some(left) => answer.left.push(log_leftover(key, left)),
        }
    }
    Ok(answer)
}

/// Releases leases of a job. `leftovers` says whether gpushd ends the remaining processes of the
/// job.
///
/// # Errors
/// If a release cannot be recorded.
pub(super) async fn release_all(
    slurm: &SlurmParts,
    caller: &Caller,
    leases: impl Iterator<Item = LeaseId>,
    leftovers: Leftovers,
) -> Result<(), ApiError> {
    let end = match leftovers {
        Leftovers::End => Some(EndProcesses { notice: Duration::ZERO, grace: GRACE }),
        Leftovers::Report => None,
    };
    for lease in leases {
        end_job(&slurm.leases, caller, lease, end).await?;
    }
    Ok(())
}

/// Logs why a lease has not ended although its job has. If gpushd does not know the reason yet,
/// adds a sentence that says so.
fn log_leftover(key: &JobKey, mut left: SlurmLeftover) -> SlurmLeftover {
    if left.waits_for.is_empty() {
        left.waits_for.push("gpushd does not know yet whether the processes of the lease have ended".to_owned());
    }
    let (lease, job, why) = (left.lease, key.job, left.waits_for.join(", "));
    tracing::warn!(lease = %lease, "job {job} has ended, but its GPUs stay reserved for lease {lease}: {why}");
    left
}

#[cfg(test)]
mod tests {
    use super::*;
    use gpush_api::GpuIndex;

    /// The reason goes into Slurm's log and into the reason of a drain, so it must never be empty.
    #[test]
    fn leftover_always_has_a_reason() {
        let key = JobKey { cluster: "ci".to_owned(), job: 7, node: "n1".to_owned() };
        let left = |waits_for: &[&str]| {
            let waits_for = waits_for.iter().map(|why| (*why).to_owned()).collect();
            SlurmLeftover { lease: LeaseId(3), gpus: vec![GpuIndex(0)], waits_for, unattributed: false }
        };
        let known = left(&["process 42 (sh) runs"]);
        assert_eq!(log_leftover(&key, known.clone()), known);
        let unknown = log_leftover(&key, left(&[]));
        let [why] = &unknown.waits_for[..] else { panic!("{unknown:?}") };
        assert!(why.starts_with("gpushd does not know yet"), "{why}");
        assert_eq!((unknown.lease, unknown.gpus), (LeaseId(3), vec![GpuIndex(0)]));
    }
}
