//! The administrator's comment of a Slurm job, in which `scontrol show job` and `sacct` show the last notice.
//!
//! A job has no terminal, and no hook of Slurm can write to the standard error of a running job. gpushd does not change the
//! user's own comment, because sites use it for requests.

use std::{collections::BTreeMap, time::Duration};

use gpush_api::LeaseBinding;
use gpush_host::helper::{End, Job};
use gpush_store::LeaseRecord;

use super::queue::JobComment;
use crate::system::{host_services::HostServices, slurm_job};

/// The program that changes jobs.
const SCONTROL: &str = "/usr/bin/scontrol";

/// The name of the runs.
const OPERATION: &str = "notify-job";

/// Maximum run time of `scontrol`.
const DEADLINE: Duration = Duration::from_secs(10);

/// Returns the Slurm job of a lease.
pub(super) fn job_of(record: &LeaseRecord) -> Option<u32> {
    match &record.binding {
        LeaseBinding::Job { job, .. } => Some(*job),
        LeaseBinding::None
        | LeaseBinding::Time
        | LeaseBinding::Process { .. }
        | LeaseBinding::Cgroup { .. }
        | LeaseBinding::Scope { .. } => None,
    }
}

/// Sets the comment of a job to a notice.
pub(super) async fn set(host_services: &HostServices, comment: &JobComment) {
    let JobComment { lease, job, text } = comment;
    // The number of a task can also be the number of its array.
    let name = slurm_job::extent(host_services, *job).await.map_or_else(|| job.to_string(), |extent| extent.name);
    let run = Job {
        operation: OPERATION.to_owned(),
        step: format!("comment-{job}"),
        program: SCONTROL.to_owned(),
        args: vec!["update".to_owned(), format!("JobId={name}"), format!("AdminComment=gpush: {text}")],
        env: BTreeMap::new(),
        input: None,
        deadline: DEADLINE,
        routine: true,
    };
    let ended = host_services.helpers.run(run).await;
    host_services.helpers.forget(OPERATION);
    match ended {
        Ok(ended) if ended.end == End::Exited(0) => {
            tracing::debug!(%lease, "lease {lease}: the comment of job {job} has the notice");
        }
        Ok(ended) => {
            let (output, end) = (ended.output_suffix(), ended.end);
            tracing::warn!(%lease, "lease {lease}: cannot set the comment of job {job}: {SCONTROL} {end}{output}");
        }
        Err(error) => tracing::warn!(%lease, "lease {lease}: cannot set the comment of job {job}: {error}"),
    }
}
