//! Leases of Slurm jobs, which only Slurm's hooks request.
//!
//! The key of such a lease is cluster, job and node, without the restart count of the job. The
//! count only determines whether the end of one run ends the lease of another run. Users can
//! neither release nor renew such a lease, nor request its environment. The lease of a job ends
//! with Epilog, a reboot, a revocation, or when its GPU is lost.

use std::{collections::BTreeSet, sync::Arc};

use gpush_api::{ApiError, Code, LeaseBinding, LeaseGrant, LeaseId, LeaseRequest, LeaseState, SlurmLeftover};
use gpush_core::{
    config::Config,
    lease::machine::{EndProcesses, Event},
};

use super::{Leases, change, grant, lease_end, show};
use crate::{
    caller::Caller,
    leases::Outcome,
    mps,
    state::{LeaseTable, OpenLease},
};

/// What Slurm's hooks add to a request.
#[derive(Debug, Clone)]
pub(crate) struct JobTerms {
    /// The job.
    pub(crate) binding: LeaseBinding,
    /// UUIDs of the MIG devices that Slurm allocated; `None` if it allocated whole GPUs.
    pub(crate) targets: Option<BTreeSet<String>>,
    /// Whether Slurm allocated the devices, and so limits their number and time.
    pub(crate) has_gres: bool,
}

/// A job on a node.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct JobKey {
    pub(crate) cluster: String,
    pub(crate) job: u32,
    pub(crate) node: String,
}

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

/// Returns the leases of a job that have not ended, each with the restart count of its run. Each
/// component of a heterogeneous job has its own hooks and its own lease, so the hooks of the leader
/// do not end the leases of the other components.
pub(crate) fn of_job(leases: &Leases, key: &JobKey) -> Vec<(Arc<OpenLease>, u32)> {
    let table = leases.handles.state.leases();
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

/// Returns whether a later run of the same job has a lease. If so, the processes in the job's
/// cgroup belong to that run.
pub(super) fn is_superseded(table: &LeaseTable, lease: &OpenLease) -> bool {
    let run = |lease: &OpenLease| match &lease.record.binding {
        LeaseBinding::Job { cluster, job, node, restart, .. } => Some((cluster.clone(), *job, node.clone(), *restart)),
        _ => None,
    };
    let Some((cluster, job, node, restart)) = run(lease) else { return false };
    let is_later = |other: &OpenLease| {
        run(other).is_some_and(|it| (it.0, it.1, it.2) == (cluster.clone(), job, node.clone()) && it.3 > restart)
    };
    table.open.values().map(Arc::as_ref).any(is_later)
}

/// Returns an active lease with its environment.
///
/// # Errors
/// If the lease is not active, or its MPS daemon does not run.
pub(crate) fn environment_of_job(leases: &Leases, caller: &Caller, lease: &OpenLease) -> Result<LeaseGrant, ApiError> {
    show::granted(leases, lease, caller.viewer)
}

/// Releases the lease of a job, and records the release. With `end`, gpushd ends the processes in
/// the job's cgroup.
///
/// # Errors
/// If the release cannot be recorded.
pub(crate) async fn end_job(
    leases: &Leases,
    caller: &Caller,
    id: LeaseId,
    end: Option<EndProcesses>,
) -> Result<(), ApiError> {
    change::release(leases, caller, &id.to_string(), None).await?;
    let is_releasing =
        leases.handles.state.leases().open.get(&id).is_some_and(|lease| lease.state.name() == LeaseState::Releasing);
    if is_releasing && end.is_some() {
        // The end reason stays `released`. Sending this event twice has no further effect.
        lease_end::apply(leases, id, Event::Expired(end));
        lease_end::watch(leases, id);
    }
    Ok(())
}

impl Leases {
    /// Returns the effective config.
    pub(crate) fn config(&self) -> Arc<Config> {
        self.handles.state.config()
    }

    /// Waits until all of these leases have ended.
    pub(crate) async fn all_ended(&self, ids: &[LeaseId]) {
        let mut snapshots = self.handles.state.watch();
        // Cannot fail: the sender lives as long as the state.
        let _ended = snapshots.wait_for(|host| ids.iter().all(|id| !host.leases.open.contains_key(id))).await.is_ok();
    }

    /// Returns what keeps the GPUs of a lease in use; `None` if the lease has ended.
    pub(crate) fn what_is_left(&self, id: LeaseId) -> Option<SlurmLeftover> {
        let host = self.handles.state.now();
        let lease = host.leases.open.get(&id)?;
        let gpus = lease.record.members.iter().filter_map(|member| Some(host.gpu(&member.gpu)?.gpu.index));
        Some(SlurmLeftover {
            lease: id,
            gpus: gpus.collect::<BTreeSet<u32>>().into_iter().collect(),
            waits_for: lease.waits_for.clone(),
            unattributed: lease.unattributed,
        })
    }

    /// Returns whether an MPS daemon on one of these GPUs does not serve clients.
    pub(crate) fn lacks_an_mps_daemon(&self, gpus: &[String]) -> bool {
        let gpus: Vec<&str> = gpus.iter().map(String::as_str).collect();
        !mps::not_serving(&self.handles.mps, &gpus).is_empty()
    }
}
