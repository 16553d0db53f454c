//! Calls of Slurm's hooks.

use std::time::Duration;

use gpush_api::{SlurmJobEnd, SlurmJobEnded, SlurmJobStart, SlurmJobStarted};

use crate::{client::Client, error::Error};

impl Client {
    /// `POST /v1/slurm/jobs`. The job is the idempotency key: if the request is repeated, gpushd
    /// answers with the same lease.
    ///
    /// # Errors
    /// See [`crate::Kind`]. If gpushd answers with an error, the node cannot serve the job.
    pub async fn slurm_start(&mut self, job: &SlurmJobStart) -> Result<SlurmJobStarted, Error> {
        self.post("/v1/slurm/jobs", job, None).await
    }

    /// `POST /v1/slurm/jobs/end`. The request can be repeated.
    ///
    /// # Errors
    /// See [`crate::Kind`].
    pub async fn slurm_end(&mut self, job: &SlurmJobEnd) -> Result<SlurmJobEnded, Error> {
        self.post("/v1/slurm/jobs/end", job, None).await
    }

    /// Sets the time limit of each answer from now on.
    pub fn set_deadline(&mut self, deadline: Duration) {
        *self.deadline_mut() = deadline;
    }
}
