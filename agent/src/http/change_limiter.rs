//! Limits the rate of changing requests of each account.
//!
//! Each grant, renewal and release is a synced commit, an audit record, entries in the log, and often a scope of systemd.
//! So an account may send a burst of such requests, and then only a few per second: `[limits]` in the config. The limit
//! does not apply to administrators, or to requests through the admin socket, such as those of Slurm's hooks.

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

use super::{Handles, admin_socket::ThroughAdminSocket, body, failure::Failure};
use crate::caller::Caller;

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
}

/// A refused request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct TooFast {
    /// Time until the next request is admitted.
    wait: Duration,
    /// If gpushd must log the refusals, their number since the last log entry.
    to_log: Option<u64>,
}

impl ChangeLimiter {
    /// Counts a request.
    ///
    /// # Errors
    /// If the account has sent too many requests.
    fn admit(&self, account: Account, limits: RequestLimits, now: Instant) -> Result<(), TooFast> {
        let mut buckets = self.0.lock();
        if buckets.len() > MANY_ACCOUNTS {
            buckets.retain(|_, bucket| bucket.full > now);
        }
        let bucket = buckets.entry(account).or_insert(Bucket { full: now, refused: 0, logged: None });
        bucket.admit(limits, now)
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
        self.refused += 1;
        let is_due = self.logged.is_none_or(|logged| now.saturating_duration_since(logged) >= LOG_INTERVAL);
        let to_log = is_due.then(|| std::mem::take(&mut self.refused));
        if is_due {
            self.logged = Some(now);
        }
        Err(TooFast { wait, to_log })
    }
}

/// Refuses a changing request of an account that has sent too many. Identifies the caller only once: the handler gets the
/// same caller.
pub(super) async fn limit_changes(State(handles): State<Handles>, mut request: Request, next: Next) -> Response {
    let changes = !matches!(*request.method(), Method::GET | Method::HEAD | Method::OPTIONS);
    if !changes || request.extensions().get::<ThroughAdminSocket>().is_some() {
        return next.run(request).await;
    }
    // The accept loop has added the peer to every request, so a request without a peer is a bug.
    let Some(peer) = request.extensions().get::<Peer>().cloned() else { return Failure::internal().into_response() };
    let caller = handles.0.authorization.identify(peer).await;
    if !caller.viewer.is_admin() {
        let account = caller.counted_account();
        let limits = handles.0.state.config().limits;
        if let Err(too_fast) = handles.0.changes.admit(account, limits, Instant::now()) {
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

fn refuse(account: Account, too_fast: TooFast, limits: RequestLimits) -> Response {
    if let Some(refused) = too_fast.to_log {
        tracing::warn!(
            refused,
            "{account} sends changing requests too fast: refused {refused} since the last such entry"
        );
    }
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

    #[test]
    fn refusals_are_summed_in_the_log() {
        let (limiter, start) = (ChangeLimiter::default(), Instant::now());
        let logged =
            |now| -> Vec<u64> { (0..1000).filter_map(|_| limiter.admit(ALICE, LIMITS, now).err()?.to_log).collect() };
        assert_eq!(logged(start), [1]);
        assert_eq!(logged(start + Duration::from_secs(1)), [] as [u64; 0]);
        assert_eq!(logged(start + LOG_INTERVAL), [949 + 995 + 1]);
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
