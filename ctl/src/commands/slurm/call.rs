//! Requests to gpushd within the time limit of a hook.
//!
//! If gpushd restarts, the hook waits for it, at most [`RESTART`]. If gpushd is suspended
//! (SIGSTOP), connections succeed but get no answer, and the hook ends at its deadline. When gpushd
//! continues, it refuses these requests, because they are too late.

use std::time::{Duration, Instant};

use gpush_api::{ApiError, Code, SlurmJobEnd, SlurmJobEnded, SlurmJobStart, SlurmJobStarted};
use gpush_client::{Client, Kind};
use gpush_core::slurm::Job;
use jiff::Timestamp;

use super::directory::Directory;
use crate::args::Global;

/// How long a hook waits for a gpushd that restarts.
const RESTART: Duration = Duration::from_secs(5);

/// Pause between two attempts.
const PAUSE: Duration = Duration::from_millis(100);

/// Time between the deadline of gpushd and that of the hook, so that gpushd answers before the hook
/// gives up.
const MARGIN: Duration = Duration::from_millis(500);

/// Maximum number of ends of other jobs that one hook delivers.
const MOST_ENDS: usize = 16;

/// Why a call was not successful.
#[derive(Debug)]
pub(super) enum Unanswered {
    /// gpushd did not answer in time.
    NoAnswer(ApiError),
    /// gpushd answered with an error.
    Error(ApiError),
}

/// Calls of one hook.
pub(super) struct Calls {
    client: Client,
    until: Instant,
}

impl Calls {
    /// Creates the calls of a hook that ends at `until`.
    pub(super) fn new(global: &Global, until: Instant) -> Self {
        Self { client: Client::new(super::super::socket(global).for_hooks()), until }
    }

    fn left(&self) -> Duration {
        self.until.saturating_duration_since(Instant::now())
    }

    /// Returns the time by which gpushd must have answered, in milliseconds since the Unix epoch.
    fn answered_by(&self) -> i64 {
        let left = self.left().saturating_sub(MARGIN.min(self.left() / 4));
        Timestamp::now().as_millisecond().saturating_add(i64::try_from(left.as_millis()).unwrap_or(i64::MAX))
    }

    /// Begins a job.
    pub(super) async fn start(&mut self, job: SlurmJobStart) -> Result<SlurmJobStarted, Unanswered> {
        self.repeat(async |client, until_ms| {
            let job = SlurmJobStart { until_ms, ..job.clone() };
            client.slurm_start(&job).await
        })
        .await
    }

    /// Ends a job.
    pub(super) async fn end(&mut self, job: &SlurmJobEnd) -> Result<SlurmJobEnded, Unanswered> {
        self.repeat(async |client, until_ms| {
            let job = SlurmJobEnd { until_ms, ..job.clone() };
            client.slurm_end(&job).await
        })
        .await
    }

    /// Delivers the ends that earlier hooks could not deliver. Stops at the first failure; the next
    /// hook delivers the rest.
    pub(super) async fn deliver_ends(&mut self, directory: &Directory) {
        for end in directory.undelivered_ends().into_iter().take(MOST_ENDS) {
            // This hook does not report leftovers of other jobs, so gpushd need not wait for their
            // processes to end.
            let now = SlurmJobEnd { until_ms: Timestamp::now().as_millisecond(), ..end.clone() };
            self.client.set_deadline(self.left().min(Duration::from_secs(2)));
            match self.client.slurm_end(&now).await {
                Ok(_) => directory.end_delivered(&end),
                Err(_) => return,
            }
        }
    }

    async fn repeat<T>(
        &mut self,
        call: impl AsyncFn(&mut Client, i64) -> Result<T, gpush_client::Error>,
    ) -> Result<T, Unanswered> {
        let give_up = self.until.min(Instant::now() + RESTART);
        loop {
            let left = self.left();
            if left.is_zero() {
                return Err(Unanswered::NoAnswer(late()));
            }
            self.client.set_deadline(left);
            let answered_by = self.answered_by();
            let error = match call(&mut self.client, answered_by).await {
                Ok(answer) => return Ok(answer),
                Err(error) => error,
            };
            let (until, answered) = match error.kind {
                // gpushd or an MPS daemon is starting or stopping.
                Kind::Answer if error.error.retryable => (self.until, true),
                Kind::Answer => return Err(Unanswered::Error(*error.error)),
                Kind::Connect | Kind::Lost => (give_up, false),
                Kind::TimedOut | Kind::Foreign => return Err(Unanswered::NoAnswer(*error.error)),
            };
            if Instant::now() + PAUSE >= until {
                let error = *error.error;
                return Err(if answered { Unanswered::Error(error) } else { Unanswered::NoAnswer(error) });
            }
            tokio::time::sleep(PAUSE).await;
        }
    }
}

fn late() -> ApiError {
    ApiError::new(Code::TimedOut, "gpushd did not answer in time")
}

/// Returns the request for the end of a job.
pub(super) fn end_of(job: &Job) -> SlurmJobEnd {
    SlurmJobEnd {
        cluster: job.cluster.clone(),
        job: job.id,
        node: job.node.clone(),
        restart: job.restart,
        until_ms: Timestamp::now().as_millisecond(),
    }
}
