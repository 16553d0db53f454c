//! Requests to gpushd within the time limit of a hook.
//!
//! If gpushd restarts, the hook waits for it, at most [`RESTART`]. If gpushd is suspended (SIGSTOP), connections
//! succeed, but gpushd does not answer, and the hook ends at its deadline. When gpushd continues, it refuses the
//! requests of this hook, because their deadline has passed.

use std::time::{Duration, Instant};

use gpush_api::{ApiError, Code, Lease, LeaseId, SlurmJobEnd, SlurmJobEnded, SlurmJobStart, SlurmJobStarted};
use gpush_client::{BlockingClient, Kind, LeaseSelection};
use gpush_core::slurm::{Job, decide::Concern};
use jiff::Timestamp;

use crate::{admin_comment, directory::Directory, settings::Settings};

/// How long a hook waits for a gpushd that restarts.
const RESTART: Duration = Duration::from_secs(5);

/// Time limit of the requests for a job that does not need gpushd.
const SHORT: Duration = Duration::from_secs(2);

/// Pause before the hook sends a request again.
const PAUSE: Duration = Duration::from_millis(100);

/// gpushd's deadline is this much earlier than the hook's, so that gpushd can answer before the hook gives up.
const MARGIN: Duration = Duration::from_millis(500);

/// Maximum number of ended jobs that one hook reports to gpushd in place of earlier hooks.
const MOST_ENDS: usize = 16;

/// Maximum number of reports of ended jobs that may fail. After one more failure, the hook stops reporting.
const MOST_FAILED: usize = 2;

/// Time limit for the report of one ended job.
const DELIVERY: Duration = Duration::from_secs(1);

/// Why the hook got no useful answer.
#[derive(Debug)]
pub enum Unanswered {
    /// gpushd did not get the request, or did not execute the request because gpushd was stopping.
    NotSent(ApiError),
    /// gpushd did not answer in time, but may still execute the request.
    NoAnswer(ApiError),
    /// gpushd answered with an error.
    Error(ApiError),
}

/// The requests of one hook to gpushd.
pub struct Calls {
    client: BlockingClient,
    until: Instant,
    /// How long the hook waits for a gpushd that restarts.
    restart: Duration,
}

impl Calls {
    /// Creates the client for one hook.
    #[must_use]
    pub fn new(settings: &Settings) -> Self {
        Self { client: BlockingClient::new(settings.socket()), until: settings.until, restart: RESTART }
    }

    /// Creates the client for one of several jobs. Each job may take the whole time of a hook.
    #[must_use]
    pub fn of_one_job(settings: &Settings) -> Self {
        Self { until: Instant::now() + settings.deadline, ..Self::new(settings) }
    }

    /// Adapts the client to why a job needs gpushd. If the job does not need it (`Concern::Nothing`), requests have a
    /// short time limit and do not wait for a restart of gpushd, because the node may have no gpushd or a hanging one.
    pub(crate) fn for_concern(self, concern: Concern) -> Self {
        match concern {
            Concern::Request | Concern::Gpus => self,
            Concern::Nothing => Self {
                client: self.client.without_waiting_for_start(),
                until: self.until.min(Instant::now() + SHORT),
                restart: Duration::ZERO,
            },
        }
    }

    fn left(&self) -> Duration {
        self.until.saturating_duration_since(Instant::now())
    }

    /// Returns gpushd's deadline, in milliseconds since the Unix epoch.
    fn answered_by(&self) -> i64 {
        let left = self.left().saturating_sub(MARGIN.min(self.left() / 4));
        Timestamp::now().as_millisecond().saturating_add(i64::try_from(left.as_millis()).unwrap_or(i64::MAX))
    }

    /// Requests that gpushd begins the lease of a job. Before each attempt, calls `is_current`, because the next run of
    /// the job may begin while the hook waits for gpushd. If `is_current` returns false, sends nothing and returns
    /// `None`: a request would end the lease of the next run.
    pub(crate) fn start(
        &mut self,
        job: &SlurmJobStart,
        is_current: impl Fn() -> bool,
    ) -> Result<Option<SlurmJobStarted>, Unanswered> {
        self.repeat(|client, until_ms| match is_current() {
            true => client.slurm_start(&SlurmJobStart { until_ms, ..job.clone() }).map(Some),
            false => Ok(None),
        })
    }

    /// Requests that gpushd ends the leases of a job.
    ///
    /// # Errors
    /// If gpushd gives no useful answer within the time of the hook.
    pub fn end(&mut self, job: &SlurmJobEnd) -> Result<SlurmJobEnded, Unanswered> {
        self.end_run(|| Some(job.clone()))
    }

    /// Requests that gpushd ends a run of a Slurm job. Before each attempt, calls `run` to get the request, because the
    /// next run of the job may begin while the hook waits for gpushd. Sends nothing if `run` returns `None`.
    pub(crate) fn end_run(&mut self, run: impl Fn() -> Option<SlurmJobEnd>) -> Result<SlurmJobEnded, Unanswered> {
        self.repeat(|client, until_ms| match run() {
            Some(end) => client.slurm_end(&SlurmJobEnd { until_ms, ..end }),
            None => Ok(SlurmJobEnded::default()),
        })
    }

    /// Returns the leases that have not ended.
    ///
    /// # Errors
    /// If gpushd gives no useful answer within the time of the hook.
    pub fn leases(&mut self) -> Result<Vec<Lease>, Unanswered> {
        self.repeat(|client, _| client.leases_of(&LeaseSelection::default()))
    }

    /// Returns leases of a job that have just ended, with their final sums. Waits a short time for the sums. If gpushd does
    /// not answer, returns no lease.
    pub(crate) fn ended_leases(&mut self, job: u32, ended: &[LeaseId]) -> Vec<Lease> {
        let until = Instant::now() + self.left().min(admin_comment::PATIENCE);
        let selection = LeaseSelection { job: Some(job), ended: MOST_ENDS, ..LeaseSelection::default() };
        loop {
            self.client.set_deadline(self.left());
            let Ok(mut leases) = self.client.leases_of(&selection) else { return Vec::new() };
            leases.retain(|lease| ended.contains(&lease.id));
            if Instant::now() >= until || leases.iter().all(|lease| lease.usage.is_some()) {
                return leases;
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// Reports ended jobs to gpushd that earlier hooks could not report. If this fails again, the next hook tries
    /// again.
    pub fn deliver_ends(&mut self, directory: &Directory) {
        let mut failed = 0;
        for end in directory.undelivered_ends().into_iter().take(MOST_ENDS) {
            // Set the deadline to now: this hook does not report leftovers of other jobs, so gpushd need not wait for
            // processes.
            let now = SlurmJobEnd { until_ms: Timestamp::now().as_millisecond(), ..end.clone() };
            self.client.set_deadline(self.left().min(DELIVERY));
            let Err(error) = self.client.slurm_end(&now) else {
                directory.end_delivered(&end);
                continue;
            };
            match (error.kind, error.code()) {
                // gpushd will never accept this report, so no lease of this job can exist.
                (Kind::Answer, Code::BadRequest) => directory.end_delivered(&end),
                // The failure may concern only this job, for which another hook may be running. So try the next report.
                // Stop after several failures: if gpushd does not answer at all, no time is left for other reports.
                (Kind::Answer | Kind::TimedOut, _) if failed < MOST_FAILED => failed += 1,
                (Kind::Answer | Kind::TimedOut | Kind::Connect | Kind::Lost | Kind::Foreign, _) => return,
            }
        }
    }

    fn repeat<T>(
        &mut self,
        call: impl Fn(&mut BlockingClient, i64) -> Result<T, gpush_client::Error>,
    ) -> Result<T, Unanswered> {
        // Time at which the hook stops waiting for a restart of gpushd. Each restart has its own time limit.
        let mut give_up: Option<Instant> = None;
        let mut is_sent = false;
        let unanswered =
            |error, is_sent| if is_sent { Unanswered::NoAnswer(error) } else { Unanswered::NotSent(error) };
        loop {
            let left = self.left();
            if left.is_zero() {
                return Err(unanswered(late(), is_sent));
            }
            self.client.set_deadline(left);
            let answered_by = self.answered_by();
            let began = Instant::now();
            let error = match call(&mut self.client, answered_by) {
                Ok(answer) => return Ok(answer),
                Err(error) => error,
            };
            let (is_stopping, is_late) = (error.code() == Code::Stopping, error.code() == Code::TimedOut);
            let until = match error.kind {
                // gpushd says that the deadline has passed, according to the clock of the host. The clock may have been
                // set forward, so the hook may still have time.
                Kind::Answer if is_late => {
                    (is_sent, give_up) = (true, None);
                    self.until
                }
                // gpushd or an MPS daemon is stopping or starting, so try again.
                Kind::Answer if error.error.retryable => {
                    give_up = None;
                    self.until
                }
                Kind::Answer => return Err(Unanswered::Error(*error.error)),
                Kind::Connect => *give_up.get_or_insert(began + self.restart),
                Kind::Lost => {
                    is_sent = true;
                    *give_up.get_or_insert_with(|| Instant::now() + self.restart)
                }
                Kind::TimedOut | Kind::Foreign => return Err(Unanswered::NoAnswer(*error.error)),
            };
            if Instant::now() + PAUSE >= until.min(self.until) {
                return Err(match error.kind {
                    // If gpushd is stopping or the request is late, treat this as no answer, because the node itself has
                    // no error.
                    Kind::Answer if !is_stopping && !is_late => Unanswered::Error(*error.error),
                    Kind::Answer | Kind::Connect | Kind::Lost | Kind::TimedOut | Kind::Foreign => {
                        unanswered(*error.error, is_sent)
                    }
                });
            }
            std::thread::sleep(PAUSE);
        }
    }
}

impl Unanswered {
    /// Returns the error.
    #[must_use]
    pub fn into_error(self) -> ApiError {
        match self {
            Self::NotSent(error) | Self::NoAnswer(error) | Self::Error(error) => error,
        }
    }
}

fn late() -> ApiError {
    ApiError::new(Code::TimedOut, "gpushd did not answer in time")
}

/// Returns the request that ends this run of a job and all earlier runs.
pub(crate) fn end_of(job: &Job, restart: u32) -> SlurmJobEnd {
    SlurmJobEnd {
        cluster: job.cluster.clone(),
        job: job.id,
        node: job.node.clone(),
        restart,
        until_ms: Timestamp::now().as_millisecond(),
    }
}

#[cfg(test)]
pub(crate) mod tests;
