//! Asks Slurm how far a job reaches.

use std::{collections::BTreeMap, time::Duration};

use gpush_core::slurm::{JOB_EXTENT_FORMAT, JobExtent};
use gpush_host::helper::{End, Job};

use super::host_services::HostServices;

/// The program that lists jobs.
const SQUEUE: &str = "/usr/bin/squeue";

/// Maximum run time of `squeue`.
const DEADLINE: Duration = Duration::from_secs(10);

/// Returns what a job consists of; `None` if Slurm does not say it.
pub(crate) async fn extent(host_services: &HostServices, job: u32) -> Option<JobExtent> {
    let operation = format!("extent-{job}");
    let run = Job {
        operation: operation.clone(),
        step: format!("squeue-{job}"),
        program: SQUEUE.to_owned(),
        args: ["--noheader", "--array", &format!("--jobs={job}"), &format!("--Format={JOB_EXTENT_FORMAT}")]
            .map(str::to_owned)
            .into(),
        env: BTreeMap::new(),
        input: None,
        deadline: DEADLINE,
        routine: true,
    };
    let ended = host_services.helpers.run(run).await;
    host_services.helpers.forget(&operation);
    match ended {
        Ok(ended) if ended.end == End::Exited(0) => JobExtent::parse(&ended.output, job),
        Ok(ended) => {
            tracing::warn!("{SQUEUE} for job {job} {}{}", ended.end, ended.output_suffix());
            None
        }
        Err(error) => {
            tracing::warn!("{SQUEUE} for job {job}: {error}");
            None
        }
    }
}
