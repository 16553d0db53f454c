//! Limits concurrent expensive responses, in total and for each account.
//!
//! A plan for 64 GPUs, or a list of all GPUs with their profiles, takes milliseconds to compute and to write as JSON. A
//! few dozen such responses on the async workers would delay all other responses. So gpushd computes an expensive
//! response on a blocking thread, and only while the response holds a permit:
//!
//! ```text
//! request ─┬─► permit ─► polled once ─► ready ─► response
//!          └─── woken ◄─── pending ◄────┘
//! ```
//!
//! While a response waits, for example for a reading of the hardware, it gives its permit back. So a GPU that hangs
//! does not delay other callers, not even callers of the same account. gpushd limits the connections per account, and so
//! also how many responses of the account wait.
//!
//! [`AccountPermits`] says who gets a permit next. Administrators have permits that no other caller can use.

use std::{
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Wake, Waker},
    thread::available_parallelism,
};

use axum::{body::Bytes, http::StatusCode, response::Response};
use gpush_host::subtask;
use serde::Serialize;
use tokio::sync::watch;

use super::{
    answer_budget::{AnswerBudget, CSV, JSON, response},
    failure::Failure,
};
use crate::{
    requests::caller::Caller,
    system::{
        account_permits::AccountPermits,
        tasks::{TaskName, Tasks},
    },
};

/// Maximum number of permits. More threads would only make each response slower.
const MOST_PERMITS: usize = 4;

/// Limits concurrent expensive responses. A handle, cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct ResponseLimiter(Arc<ResponseLimiterParts>);

#[derive(Debug)]
struct ResponseLimiterParts {
    public: AccountPermits,
    /// Permits for administrators.
    privileged: AccountPermits,
    budget: AnswerBudget,
    tasks: Tasks,
}

/// Wakes the task of a response that waited. The task then requests a permit again.
struct WakeTask(watch::Sender<()>);

impl Wake for WakeTask {
    fn wake(self: Arc<Self>) {
        self.0.send_replace(());
    }
}

impl ResponseLimiter {
    /// Creates the limiter. It has two pools. Each pool has one permit for every two processors, at most
    /// [`MOST_PERMITS`].
    pub(crate) fn new(tasks: Tasks) -> Self {
        let permits = (available_parallelism().map_or(1, usize::from) / 2).clamp(1, MOST_PERMITS);
        Self::with_permits(permits, tasks)
    }

    fn with_permits(permits: usize, tasks: Tasks) -> Self {
        let pool = || AccountPermits::new(permits, permits.div_ceil(2));
        Self(Arc::new(ResponseLimiterParts { public: pool(), privileged: pool(), budget: AnswerBudget::new(), tasks }))
    }

    /// Runs `work` to its end. gpushd holds a permit of the caller's account each time it polls `work`.
    ///
    /// # Errors
    /// If `work` panics.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        caller: &Caller,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Result<T, Failure> {
        let pool = if caller.viewer.is_admin() { &self.0.privileged } else { &self.0.public };
        let share = pool.share(caller.counted_account());
        let (wake, mut woken) = watch::channel(());
        let waker = Waker::from(Arc::new(WakeTask(wake)));
        let mut work: Pin<Box<dyn Future<Output = _> + Send>> =
            Box::pin(self.0.tasks.clone().run_once(TaskName::Request, work));
        loop {
            let permit = share.permit().await;
            let waker = waker.clone();
            let polled = subtask::blocking(move || {
                let polled = work.as_mut().poll(&mut Context::from_waker(&waker));
                drop(permit);
                (polled, work)
            });
            match polled.await.ok_or_else(Failure::internal)? {
                (Poll::Ready(done), _) => return done.map_err(|_| Failure::internal()),
                (Poll::Pending, unfinished) => work = unfinished,
            }
            // Cannot fail: `waker` keeps the sender.
            let _ = woken.changed().await;
        }
    }

    /// Runs `work` and returns its value as a JSON response.
    ///
    /// # Errors
    /// If `work` fails or panics, or if the caller's account has too many unread answers.
    pub(super) async fn answer<T: Serialize>(
        &self,
        caller: &Caller,
        status: StatusCode,
        work: impl Future<Output = Result<T, Failure>> + Send + 'static,
    ) -> Result<Response, Failure> {
        let json = self.run(caller, async move { to_json(&work.await?) }).await??;
        Ok(response(status, JSON, self.0.budget.take(caller, json)?))
    }

    /// Runs `work` and returns its rows as a response.
    ///
    /// # Errors
    /// If `work` fails or panics, or if the caller's account has too many unread answers.
    pub(super) async fn answer_csv(
        &self,
        caller: &Caller,
        work: impl Future<Output = Result<String, Failure>> + Send + 'static,
    ) -> Result<Response, Failure> {
        let rows = Bytes::from(self.run(caller, work).await??);
        Ok(response(StatusCode::OK, CSV, self.0.budget.take(caller, rows)?))
    }
}

/// Writes a value as JSON.
pub(super) fn to_json<T: Serialize>(value: &T) -> Result<Bytes, Failure> {
    serde_json::to_vec(value).map(Bytes::from).map_err(|_| Failure::internal())
}

#[cfg(test)]
mod tests {
    use std::{sync::Mutex, time::Duration};

    use gpush_host::accounts::Account;
    use tokio::sync::oneshot;

    use super::*;
    use crate::requests::caller::tests::caller_of;

    fn one_permit() -> ResponseLimiter {
        ResponseLimiter::with_permits(1, Tasks::for_tests())
    }

    #[tokio::test]
    async fn waiting_response_holds_no_permit_and_resumes_when_woken() {
        let limiter = one_permit();
        let (tx, rx) = oneshot::channel::<u32>();
        let waiting = tokio::spawn({
            let limiter = limiter.clone();
            async move { limiter.run(&caller_of(1000), rx).await.unwrap().unwrap() }
        });
        // A response that waits holds no permit, so 100 responses may wait at once.
        let mut others = tokio::task::JoinSet::new();
        for _ in 0..100 {
            let limiter = limiter.clone();
            others.spawn(async move { limiter.run(&caller_of(1000), std::future::pending::<()>()).await.is_ok() });
        }
        tokio::task::yield_now().await;
        // The waiting responses hold no permit, so each of the two uids gets a permit.
        assert_eq!(limiter.run(&caller_of(1000), async { 1 }).await.unwrap(), 1);
        assert_eq!(limiter.run(&caller_of(1001), async { 2 }).await.unwrap(), 2);
        tx.send(7).unwrap();
        assert_eq!(waiting.await.unwrap(), 7);
        others.shutdown().await;
        // A thread may still poll one of the aborted responses and hold the only permit. Wait until it returns the
        // permit.
        drop(limiter.0.public.share(Account::Unknown).permit().await);
        limiter.run(&caller_of(1), async {}).await.unwrap();
        assert_eq!(limiter.0.public.left(Account::User(1000)), None, "accounts without responses are forgotten");
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn flood_of_one_account_delays_others_by_one_response() {
        let limiter = one_permit();
        let (started, mut start) = tokio::sync::mpsc::unbounded_channel();
        let (gate, gates) = std::sync::mpsc::channel::<()>();
        let gates = Arc::new(Mutex::new(gates));
        let mut work = Vec::new();
        for _ in 0..20 {
            let (limiter, gates, started) = (limiter.clone(), Arc::clone(&gates), started.clone());
            work.push(tokio::spawn(async move {
                let blocks = async move {
                    started.send(()).unwrap();
                    gates.lock().unwrap().recv().unwrap();
                };
                limiter.run(&caller_of(1000), blocks).await.unwrap();
            }));
        }
        start.recv().await.unwrap();
        // Root has its own permits, so it does not wait for the only public permit.
        assert_eq!(limiter.run(&caller_of(0), async { 1 }).await.unwrap(), 1);
        let other = tokio::spawn({
            let limiter = limiter.clone();
            async move { limiter.run(&caller_of(1001), async { 2 }).await.unwrap() }
        });
        // Wait until the request of uid 1001 is in the queue for the permit.
        while limiter.0.public.left(Account::User(1001)).is_none_or(|left| left > 0) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        gate.send(()).unwrap();
        assert_eq!(other.await.unwrap(), 2);
        assert!(work.iter().filter(|work| work.is_finished()).count() < 3);
        for _ in 0..19 {
            gate.send(()).unwrap();
        }
        for work in work {
            work.await.unwrap();
        }
    }

    #[tokio::test]
    async fn response_that_panics_returns_its_permit() {
        let limiter = one_permit();
        assert!(limiter.run::<()>(&caller_of(1000), async { panic!("on purpose") }).await.is_err());
        assert_eq!(limiter.run(&caller_of(1000), async { 3 }).await.unwrap(), 3);
    }
}
