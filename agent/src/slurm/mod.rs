//! Requests of Slurm's hooks: Prolog begins the lease of a job, Epilog ends it.
//!
//! ```text
//! start ─► devices found ─► concerned? ─► earlier run ended ─► GPUs usable? ─► lease requested ─► granted
//!            │ unknown        └ no: pass                         │ no            └ refused: an answer, recorded
//!            └► error ◄──────────────────────────────────────────┘                 with the job
//! end ───► leases of the job, this run or earlier ─► released, leftovers ended ─► free, or a list of the leftovers
//! ```
//!
//! An error means that the node cannot serve the job: the hook fails, and Slurm drains the node. So no input of a user
//! may cause an error. gpushd handles the requests for one job one after the other.
//!
//! | file | subject |
//! |---|---|
//! | `allocation` | the GPUs and MIG devices that Slurm allocated |
//! | `start` | Prolog |
//! | `end` | Epilog |

mod allocation;
mod end;
mod start;

use std::{
    collections::BTreeMap,
    sync::{Arc, Weak},
    time::Duration,
};

use gpush_api::{ApiError, Code, SlurmJobEnd, SlurmJobEnded, SlurmJobStart, SlurmJobStarted};
use gpush_locked::Locked;
use jiff::Timestamp;
use tokio::sync::OwnedMutexGuard;

use crate::{
    leases::{Delivery, JobKey, Leases},
    requests::caller::Caller,
    state::context::HostContext,
};

/// Maximum length of the name of a cluster or a node, in bytes.
const LONGEST_NAME: usize = 255;

/// Serves Slurm's hooks. A handle, cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Slurm(Arc<SlurmParts>);

#[derive(Debug)]
struct SlurmParts {
    context: Arc<HostContext>,
    leases: Leases,
    /// A lock for each job for which gpushd is handling a request.
    busy: Locked<BTreeMap<JobKey, Weak<tokio::sync::Mutex<()>>>>,
}

/// The answer to Prolog. If this value is dropped before Prolog gets the answer, gpushd ends the granted lease.
#[derive(Debug)]
pub(crate) struct Started {
    answer: SlurmJobStarted,
    delivery: Option<Delivery>,
}

impl Started {
    /// Marks the grant as delivered, and returns the answer.
    pub(crate) fn delivered(self) -> SlurmJobStarted {
        let Self { answer, delivery } = self;
        if let Some(delivery) = delivery {
            let _the_same_grant = delivery.into_delivered();
        }
        answer
    }
}

impl Slurm {
    /// Creates the handle.
    pub(crate) fn new(context: Arc<HostContext>, leases: Leases) -> Self {
        Self(Arc::new(SlurmParts { context, leases, busy: Locked::default() }))
    }

    /// Begins the lease of a job on this node.
    ///
    /// # Errors
    /// If the node cannot serve the job. The error says why.
    pub(crate) async fn start(&self, caller: Caller, job: SlurmJobStart) -> Result<Started, ApiError> {
        let key = key(&job.cluster, job.job, &job.node)?;
        let lock = self.lock(&key).await;
        start::start(self, &caller, &key, &job, lock).await
    }

    /// Ends the leases of a job on this node.
    ///
    /// # Errors
    /// If the end cannot be recorded.
    pub(crate) async fn end(&self, caller: Caller, job: SlurmJobEnd) -> Result<SlurmJobEnded, ApiError> {
        let key = key(&job.cluster, job.job, &job.node)?;
        let _lock = self.lock(&key).await;
        end::end(&self.0, &caller, &key, &job).await
    }

    async fn lock(&self, key: &JobKey) -> OwnedMutexGuard<()> {
        let lock = {
            let mut busy = self.0.busy.lock();
            busy.retain(|_, lock| lock.strong_count() > 0);
            let known = busy.get(key).and_then(Weak::upgrade);
            known.unwrap_or_else(|| {
                let lock = Arc::default();
                busy.insert(key.clone(), Arc::downgrade(&lock));
                lock
            })
        };
        lock.lock_owned().await
    }
}

fn key(cluster: &str, job: u32, node: &str) -> Result<JobKey, ApiError> {
    let bad = |what: &str| Err(ApiError::new(Code::BadRequest, format!("{what} of the job is not valid")));
    if cluster.is_empty() || cluster.len() > LONGEST_NAME || cluster.chars().any(char::is_control) {
        return bad("the cluster");
    }
    if node.len() > LONGEST_NAME || node.chars().any(char::is_control) {
        return bad("the node");
    }
    if job == 0 {
        return bad("the id");
    }
    Ok(JobKey { cluster: cluster.to_owned(), job, node: node.to_owned() })
}

/// Returns the time until the deadline of a hook.
///
/// # Errors
/// If the deadline has passed. Then the hook has already ended, so gpushd must not grant a lease.
fn left(until_ms: i64) -> Result<Duration, ApiError> {
    let left = time_until(until_ms);
    if left.is_zero() {
        let late = "gpushd read the request after the deadline of the hook, which no longer waits for an answer";
        return Err(ApiError::new(Code::TimedOut, late).hint("see the log of gpushd: `journalctl -u gpushd`"));
    }
    Ok(left)
}

/// Returns the time until `until_ms`, which is in milliseconds since the Unix epoch. Returns zero if `until_ms` is in
/// the past.
fn time_until(until_ms: i64) -> Duration {
    let left = until_ms.saturating_sub(Timestamp::now().as_millisecond());
    u64::try_from(left).map_or(Duration::ZERO, Duration::from_millis)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn job_key_with_an_invalid_name_is_refused() {
        let longest = "x".repeat(LONGEST_NAME);
        for (cluster, job, node) in [("ci", 1, "n1"), ("ci", u32::MAX, ""), (&*longest, 1, &*longest)] {
            assert!(key(cluster, job, node).is_ok(), "{cluster} {job} {node}");
        }
        let too_long = "x".repeat(LONGEST_NAME + 1);
        for (cluster, job, node, what) in [
            ("", 1, "n1", "the cluster"),
            ("c\ni", 1, "n1", "the cluster"),
            (&*too_long, 1, "n1", "the cluster"),
            ("ci", 1, "n\u{1b}1", "the node"),
            ("ci", 1, &*too_long, "the node"),
            ("ci", 0, "n1", "the id"),
        ] {
            let error = key(cluster, job, node).unwrap_err();
            assert_eq!((error.code, error.message), (Code::BadRequest, format!("{what} of the job is not valid")));
        }
    }

    #[test]
    fn hook_whose_deadline_has_passed_has_no_time_left() {
        let now = Timestamp::now().as_millisecond();
        assert!(left(now + 600_000).unwrap() > Duration::from_secs(500));
        for until_ms in [now, now - 1, 0, i64::MIN] {
            assert_eq!(time_until(until_ms), Duration::ZERO, "{until_ms}");
            assert_eq!(left(until_ms).unwrap_err().code, Code::TimedOut, "{until_ms}");
        }
        assert!(time_until(i64::MAX) > Duration::from_secs(1 << 40));
    }
}
