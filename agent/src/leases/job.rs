//! Leases of Slurm jobs. Only Slurm's hooks request them.
//!
//! gpushd finds such a lease by cluster, job id and node. The restart count of the job is not part
//! of this key. When a run ends, gpushd compares the restart counts, so that the end of this run
//! does not end the lease of a later run. Users can neither release nor renew such a lease, nor
//! request its environment. The lease ends with Epilog, a reboot or a revocation, or when its GPU
//! is lost.

use std::{collections::BTreeSet, sync::Arc};

use gpush_api::{ApiError, Code, GpuIndex, GpuUuid, LeaseBinding, LeaseGrant, LeaseId, LeaseRequest, SlurmLeftover};
use gpush_core::{config::Config, lease::machine::EndProcesses};

use super::{
    Leases, change, grant,
    job_terms::{JobKey, JobTerms},
    show,
};
use crate::{
    leases::Outcome,
    modes::mps,
    requests::caller::{Caller, Viewer},
    state::OpenLease,
    system::tasks::TaskName,
};

/// Requests the lease of a job. The request does not wait, because Slurm has its own queue.
///
/// # Errors
/// If the request is denied, cannot be met, or cannot be recorded.
pub(crate) async fn request_for_job(
    leases: &Leases,
    caller: &Caller,
    request: LeaseRequest,
    terms: &JobTerms,
) -> Result<grant::Delivery, ApiError> {
    match grant::request_with(leases, caller, request, None, Some(terms)).await? {
        Outcome::Granted(delivery) => Ok(delivery),
        Outcome::Queued(_) => Err(ApiError::new(Code::BadRequest, "the lease of a job cannot wait in the queue")),
    }
}

/// Returns the leases of a job, except ended leases, each with the restart count of its run. Leases
/// of other components of a heterogeneous job are not included: each component has its own hooks,
/// which end its lease.
pub(crate) fn of_job(leases: &Leases, key: &JobKey) -> Vec<(Arc<OpenLease>, u32)> {
    let table = leases.handles.context.state.leases();
    let restart = |lease: &OpenLease| match &lease.record.binding {
        LeaseBinding::Job { cluster, job, node, restart, .. }
            if *cluster == key.cluster && *node == key.node && *job == key.job =>
        {
            Some(*restart)
        }
        _ => None,
    };
    table.open.values().filter_map(|lease| Some((Arc::clone(lease), restart(lease)?))).collect()
}

/// Returns an active lease with its environment.
///
/// # Errors
/// If the lease is not active, or its MPS daemon does not run.
pub(crate) fn environment_of_job(leases: &Leases, caller: &Caller, lease: &OpenLease) -> Result<LeaseGrant, ApiError> {
    show::granted(leases, lease, caller.viewer)
}

/// Records the release of a job's lease. With `end`, gpushd also ends the processes in the job's
/// cgroup.
///
/// # Errors
/// If the release cannot be recorded.
pub(crate) async fn end_job(
    leases: &Leases,
    caller: &Caller,
    id: LeaseId,
    end: Option<EndProcesses>,
) -> Result<(), ApiError> {
    change::release_and_end(leases, caller, &id.to_string(), None, end).await.map(|_| ())
}

impl Leases {
    /// Returns the effective config.
    pub(crate) fn config(&self) -> Arc<Config> {
        self.handles.context.state.config()
    }

    /// Waits until all of these leases have ended.
    pub(crate) async fn all_ended(&self, ids: &[LeaseId]) {
        let mut snapshots = self.handles.context.state.watch();
        // Cannot fail: the state keeps the sender alive.
        let _ended = snapshots.wait_for(|host| ids.iter().all(|id| !host.leases.open.contains_key(id))).await.is_ok();
    }

    /// Returns what still uses the GPUs of a lease, such as processes; `None` if the lease has
    /// ended.
    pub(crate) fn what_is_left(&self, id: LeaseId) -> Option<SlurmLeftover> {
        let host = self.handles.context.state.now();
        let lease = host.leases.open.get(&id)?;
        let gpus = lease.record.members.iter().filter_map(|member| Some(host.gpu(&member.gpu_uuid)?.gpu.index));
        Some(SlurmLeftover {
            lease: id,
            gpus: gpus.collect::<BTreeSet<GpuIndex>>().into_iter().collect(),
            waits_for: lease.waits_for.clone(),
            unattributed: lease.unattributed,
        })
    }

    /// Executes `work` completely, even if the caller no longer waits for the result.
    ///
    /// # Errors
    /// If `work` fails.
    pub(crate) async fn execute<T: Send + 'static>(
        self,
        work: impl Future<Output = Result<T, ApiError>> + Send + 'static,
    ) -> Result<T, ApiError> {
        self.handles.context.tasks.once_before_exit(TaskName::Request, work).await.unwrap_or_else(|error| {
            Err(ApiError::new(Code::Internal, "the request failed because of an internal error of gpushd")
                .cause(error.to_string())
                .hint("see the log of gpushd: `journalctl -u gpushd`"))
        })
    }

    /// Returns whether one of these GPUs, or one of their MIG devices, is shared through MPS.
    pub(crate) fn has_mps_target(&self, gpus: &[GpuUuid]) -> bool {
        mps::has_target(&self.handles.context.state.now(), gpus)
    }

    /// Returns whether one of these GPUs has an MPS daemon that does not serve clients.
    pub(crate) fn lacks_an_mps_daemon(&self, gpus: &[GpuUuid]) -> bool {
        let gpus: Vec<&GpuUuid> = gpus.iter().collect();
        let host = self.handles.context.state.now();
        !mps::outlook(&host, Viewer::Agent).not_serving(&gpus).is_empty()
    }
}
