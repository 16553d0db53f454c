//! Limits the rate of changing requests of each account.
//!
//! Each grant, renewal and release is a synced commit, an audit record, entries in the log, and often a scope of systemd.
//! So an account may send a burst of such requests, and then only a few per second: `[limits]` in the config. The limit
//! does not apply to administrators, or to requests through the admin socket, such as those of Slurm's hooks.
//!
//! gpushd logs the first refusal of an account at once, and then the number of further refusals once a minute. The last
//! entry also comes if the account sends no further request, or if gpushd stops.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use axum::{
    extract::{Request, State},
    http::{HeaderValue, Method, header},
    middleware::Next,
    response::{IntoResponse, Response},
};
use gpush_api::{ApiError, Code};
use gpush_core::{config::RequestLimits, duration};
use gpush_host::{accounts::Account, peer::Peer};
use gpush_locked::Locked;
use tokio_util::sync::CancellationToken;

use super::{HttpHandles, admin_socket::ThroughAdminSocket, body, failure::Failure};
use crate::{requests::caller::Caller, system::tasks::TaskName};

/// Number of accounts above which gpushd forgets the accounts that may send a whole burst.
const MANY_ACCOUNTS: usize = 1024;

/// Minimum time between two log entries about refused requests of one account.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// Maximum size of the body of a refused request that gpushd still reads, in bytes.
const MOST_READ: usize = 4 << 10;

/// Time limit for reading this body.
const READ_TIME: Duration = Duration::from_secs(1);

/// Limits the rate of changing requests. A handle, cheap to clone.
#[derive(Debug, Clone, Default)]
pub(crate) struct ChangeLimiter(Arc<Locked<HashMap<Account, Bucket>>>);

/// The requests of one account.
#[derive(Debug)]
struct Bucket {
    /// Time at which the account may send a whole burst again. Each admitted request moves this time by one interval.
    full: Instant,
    /// Number of refused requests that are not in the log yet.
    refused: u64,
    /// Time of the last log entry about refused requests.
    logged: Option<Instant>,
    /// Whether a task logs their number when the time for the next entry comes.
    is_sum_due: bool,
}

/// A refused request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct TooFast {
    /// Time until the next request is admitted.
    wait: Duration,
    /// When and how gpushd logs the refusal.
    log: RefusalLog,
}

/// How gpushd logs a refused request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RefusalLog {
    /// At once.
    Now,
    /// With the sum of the refusals. A task must log this sum after this time.
    SumAfter(Duration),
    /// With the sum, which another task logs.
    InSum,
}

impl ChangeLimiter {
    /// Counts a request.
    ///
    /// # Errors
    /// If the account has sent too many requests.
    fn admit(&self, account: Account, limits: RequestLimits, now: Instant) -> Result<(), TooFast> {
        let mut buckets = self.0.lock();
        if buckets.len() > MANY_ACCOUNTS {
            buckets.retain(|_, bucket| bucket.full > now || bucket.is_sum_due);
        }
        let new = || Bucket { full: now, refused: 0, logged: None, is_sum_due: false };
        buckets.entry(account).or_insert_with(new).admit(limits, now)
    }

    /// Waits until the sum is due, or until gpushd stops. Returns the number of refusals since the last log entry.
    async fn sum(&self, account: Account, after: Duration, stopping: &CancellationToken) -> u64 {
        let _is_stopping = stopping.run_until_cancelled(tokio::time::sleep(after)).await.is_none();
        let mut buckets = self.0.lock();
        let Some(bucket) = buckets.get_mut(&account) else { return 0 };
        (bucket.logged, bucket.is_sum_due) = (Some(Instant::now()), false);
        std::mem::take(&mut bucket.refused)
    }
}

impl Bucket {
    fn admit(&mut self, limits: RequestLimits, now: Instant) -> Result<(), TooFast> {
        let interval = Duration::from_secs(1) / limits.changes_per_second.max(1);
        let full = self.full.max(now) + interval;
        let wait = full.saturating_duration_since(now + interval * limits.changes_burst.max(1));
        if wait.is_zero() {
            self.full = full;
            return Ok(());
        }
        let next = self.logged.map_or(now, |logged| logged + LOG_INTERVAL);
        let log = if self.is_sum_due {
            RefusalLog::InSum
        } else if next <= now {
            RefusalLog::Now
        } else {
            RefusalLog::SumAfter(next - now)
        };
        match log {
            RefusalLog::Now => self.logged = Some(now),
            RefusalLog::SumAfter(_) | RefusalLog::InSum => (self.refused, self.is_sum_due) = (self.refused + 1, true),
        }
        Err(TooFast { wait, log })
    }
}

/// Refuses a changing request of an account that has sent too many. Identifies the caller only once: the handler gets the
/// same caller.
pub(super) async fn limit_changes(State(handles): State<HttpHandles>, mut request: Request, next: Next) -> Response {
    let changes = !matches!(*request.method(), Method::GET | Method::HEAD | Method::OPTIONS);
    if !changes || request.extensions().get::<ThroughAdminSocket>().is_some() {
        return next.run(request).await;
    }
    // The accept loop has added the peer to every request, so a request without a peer is a bug.
    let Some(peer) = request.extensions().get::<Peer>().cloned() else { return Failure::internal().into_response() };
    let caller = handles.0.authorization.identify(peer).await;
    if !caller.viewer.is_admin() {
        let account = caller.counted_account();
        let limits = handles.0.context.state.config().limits;
        if let Err(too_fast) = handles.0.changes.admit(account, limits, Instant::now()) {
            log(&handles, account, too_fast.log).await;
            let mut response = refuse(account, too_fast, limits);
            if !is_read(request).await {
                response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
            }
            return response;
        }
    }
    request.extensions_mut().insert::<Caller>(caller);
    next.run(request).await
}

/// Reads the rest of a refused request, so that the client can send the next one on the same connection. Returns `false`
/// if the body is too large or too slow. hyper then closes the connection.
async fn is_read(request: Request) -> bool {
    matches!(tokio::time::timeout(READ_TIME, body::skip(request, MOST_READ)).await, Ok(Ok(())))
}

/// Logs a refusal, or starts the task that logs the sum of several refusals.
async fn log(handles: &HttpHandles, account: Account, log: RefusalLog) {
    let handles = handles.0.clone();
    match log {
        RefusalLog::InSum => {}
        RefusalLog::Now => {
            let who = handles.authorization.describe(account).await;
            tracing::warn!(refused = 1, "{who} sends changing requests too fast: gpushd refuses them");
        }
        RefusalLog::SumAfter(after) => {
            let tasks = handles.context.tasks.clone();
            tasks.once_before_exit(TaskName::RefusalLog, async move {
                let refused = handles.changes.sum(account, after, handles.context.tasks.stopping()).await;
                let who = handles.authorization.describe(account).await;
                tracing::warn!(
                    refused,
                    "{who} sent changing requests too fast: gpushd refused {refused} more since the last such entry"
                );
            });
        }
    }
}

fn refuse(account: Account, too_fast: TooFast, limits: RequestLimits) -> Response {
    let seconds = too_fast.wait.as_secs_f64().ceil().max(1.0) as u64;
    let wait = duration::format(Duration::from_secs(seconds));
    let RequestLimits { changes_burst, changes_per_second } = limits;
    let error = ApiError::new(Code::Unavailable, format!("{account} sends changing requests too fast"))
        .cause(format!("the limit is {changes_burst} requests at once, then {changes_per_second} per second"))
        .hint(format!("try again in {wait}"))
        .retryable();
    let mut response = Failure::from(error).into_response();
    response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: RequestLimits = RequestLimits { changes_burst: 50, changes_per_second: 5 };
    const ALICE: Account = Account::User(1000);

    #[test]
    fn account_beyond_its_burst_is_limited_to_a_rate() {
        let (limiter, start) = (ChangeLimiter::default(), Instant::now());
        let admitted = |account, now| (0..200).filter(|_| limiter.admit(account, LIMITS, now).is_ok()).count();
        assert_eq!(admitted(ALICE, start), 50);
        let refused = limiter.admit(ALICE, LIMITS, start).unwrap_err();
        assert_eq!(refused.wait, Duration::from_millis(200));
        assert_eq!(admitted(ALICE, start + Duration::from_secs(1)), 5);
        assert_eq!(admitted(Account::Unknown, start), 50, "each account has its own");
        assert_eq!(admitted(ALICE, start + Duration::from_secs(100)), 50, "the burst is not larger after a pause");
    }

    /// Fault: the number of refused requests was logged only with the next refusal, so never if the user stopped.
    #[tokio::test(start_paused = true)]
    async fn refusals_are_summed_in_the_log_without_a_further_request() {
        let (limiter, start) = (ChangeLimiter::default(), Instant::now());
        let refusals = |now| -> Vec<RefusalLog> {
            let log = |_| Some(limiter.admit(ALICE, LIMITS, now).err()?.log);
            (0..100).filter_map(log).filter(|log| *log != RefusalLog::InSum).collect()
        };
        assert_eq!(refusals(start), [RefusalLog::Now, RefusalLog::SumAfter(LOG_INTERVAL)]);
        // 5 of 100 requests are admitted, and a task already waits for the sum.
        assert_eq!(refusals(start + Duration::from_secs(1)), []);
        let (asked, running) = (tokio::time::Instant::now(), CancellationToken::new());
        assert_eq!(limiter.sum(ALICE, LOG_INTERVAL, &running).await, 49 + 95);
        assert_eq!(asked.elapsed(), LOG_INTERVAL);
        assert!(
            matches!(refusals(start + Duration::from_secs(2))[..], [RefusalLog::SumAfter(after)] if after > Duration::ZERO)
        );
        running.cancel();
        assert_eq!(limiter.sum(ALICE, LOG_INTERVAL, &running).await, 95, "gpushd stops");
        assert_eq!(asked.elapsed(), LOG_INTERVAL);
    }

    #[test]
    fn idle_accounts_are_forgotten() {
        let (limiter, start) = (ChangeLimiter::default(), Instant::now());
        for uid in 0..u32::try_from(MANY_ACCOUNTS).unwrap() + 1 {
            limiter.admit(Account::User(uid), LIMITS, start).unwrap();
        }
        limiter.admit(ALICE, LIMITS, start + Duration::from_secs(1)).unwrap();
        assert_eq!(limiter.0.lock().len(), 1);
    }
}
