//! An answer that concurrent callers share. A caller never gets an answer whose computation began before the call. So
//! the answer includes every change that preceded the call.
//!
//! ```text
//! caller 1  ├─ computes ─────┤
//! caller 2     ├─ waits ─────┼─ computes ──────┤      the first computation began before this call
//! caller 3        ├─ waits ──┼─────────────────┤      shares the second answer
//! caller 4           ├─ waits ┼────────────────┤      shares the second answer
//! ```
//!
//! So any number of concurrent callers causes at most two computations.

use std::time::{Duration, Instant};

use tokio::sync::Mutex;

/// The last answer, and when its computation began. The answer is `None` if the computation exceeded its time limit.
/// The mutex stays locked while an answer is computed.
#[derive(Debug)]
pub(crate) struct Coalesced<T>(Mutex<Option<(Instant, Option<T>)>>);

impl<T> Default for Coalesced<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<T: Clone> Coalesced<T> {
    /// Returns an answer whose computation begins after the call. If the caller that computes the answer is dropped,
    /// the next waiting caller computes it.
    pub(crate) async fn after_now<F: Future<Output = T>>(&self, compute: impl FnOnce() -> F) -> T {
        let called = Instant::now();
        let mut last = self.0.lock().await;
        if let Some(Some(answer)) = since(&last, called) {
            return answer;
        }
        let begun = Instant::now();
        let answer = compute().await;
        *last = Some((begun, Some(answer.clone())));
        answer
    }

    /// Does the same as [`Coalesced::after_now`], but returns `None` if the computation takes longer than `limit`.
    /// Callers that share this computation get `None` too. Time spent waiting for an earlier computation does not
    /// count.
    pub(crate) async fn after_now_within<F: Future<Output = T>>(
        &self,
        limit: Duration,
        compute: impl FnOnce() -> F,
    ) -> Option<T> {
        let called = Instant::now();
        let mut last = self.0.lock().await;
        if let Some(answer) = since(&last, called) {
            return answer;
        }
        let begun = Instant::now();
        let answer = tokio::time::timeout(limit, compute()).await.ok();
        *last = Some((begun, answer.clone()));
        answer
    }
}

/// Returns the last answer if its computation began at `called` or later.
fn since<T: Clone>(last: &Option<(Instant, Option<T>)>, called: Instant) -> Option<Option<T>> {
    last.as_ref().filter(|(begun, _)| *begun >= called).map(|(_, answer)| answer.clone())
}

#[cfg(test)]
mod tests {
    use std::sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    };

    use tokio::sync::Semaphore;

    use super::*;

    /// Starts concurrent callers, and counts the computations that they cause. Each computation waits for a permit.
    fn call(
        callers: usize,
        shared: &Arc<Coalesced<usize>>,
        computed: &Arc<AtomicUsize>,
        permits: &Arc<Semaphore>,
    ) -> Vec<tokio::task::JoinHandle<usize>> {
        let one = || {
            let (shared, computed, permits) = (Arc::clone(shared), Arc::clone(computed), Arc::clone(permits));
            tokio::spawn(async move {
                let compute = || async {
                    let number = computed.fetch_add(1, Relaxed) + 1;
                    permits.acquire().await.unwrap().forget();
                    number
                };
                shared.after_now(compute).await
            })
        };
        (0..callers).map(|_| one()).collect()
    }

    #[tokio::test]
    async fn callers_that_wait_together_share_an_answer_that_began_after_their_calls() {
        let (shared, computed, permits) = (Arc::default(), Arc::default(), Arc::new(Semaphore::new(0)));
        let first = call(1, &shared, &computed, &permits).remove(0);
        tokio::task::yield_now().await;
        let others = call(31, &shared, &computed, &permits);
        // The runtime has one thread, so all callers have called when `yield_now` returns.
        tokio::task::yield_now().await;
        permits.add_permits(32);
        assert_eq!(first.await.unwrap(), 1);
        for other in others {
            assert_eq!(other.await.unwrap(), 2, "the first answer began before this call");
        }
        assert_eq!(computed.load(Relaxed), 2);
        assert_eq!(call(1, &shared, &computed, &permits).remove(0).await.unwrap(), 3);
    }

    /// Fault: to end a lease, gpushd reads the GPU within a time limit. A wait for the slow reading of another caller
    /// used up this limit, and the lease did not end.
    #[tokio::test]
    async fn time_for_which_a_caller_waits_for_another_does_not_count() {
        let (shared, computed, permits) = (Arc::default(), Arc::default(), Arc::new(Semaphore::new(0)));
        let first = call(1, &shared, &computed, &permits).remove(0);
        tokio::task::yield_now().await;
        let second = tokio::spawn({
            let shared = Arc::clone(&shared);
            async move { shared.after_now_within(Duration::ZERO, || std::future::ready(7)).await }
        });
        // The runtime has one thread, so the second caller already waits when `yield_now` returns.
        tokio::task::yield_now().await;
        assert!(!second.is_finished());
        permits.add_permits(1);
        assert_eq!((first.await.unwrap(), second.await.unwrap()), (1, Some(7)));
        let never = shared.after_now_within(Duration::ZERO, std::future::pending);
        assert_eq!(never.await, None, "the time of its own computation counts");
    }

    /// Fault: several callers waited for a GPU that hung, and each of them read the GPU, one after the other.
    #[tokio::test]
    async fn callers_with_a_limit_share_that_it_was_exceeded() {
        let (shared, computed, permits) = (Arc::default(), Arc::default(), Arc::new(Semaphore::new(0)));
        let first = call(1, &shared, &computed, &permits).remove(0);
        tokio::task::yield_now().await;
        let limited: Vec<_> = (0..8)
            .map(|_| {
                let (shared, computed) = (Arc::clone(&shared), Arc::clone(&computed));
                tokio::spawn(async move {
                    let never = || {
                        computed.fetch_add(1, Relaxed);
                        std::future::pending()
                    };
                    shared.after_now_within(Duration::ZERO, never).await
                })
            })
            .collect();
        tokio::task::yield_now().await;
        permits.add_permits(1);
        assert_eq!(first.await.unwrap(), 1);
        for one in limited {
            assert_eq!(one.await.unwrap(), None);
        }
        assert_eq!(computed.load(Relaxed), 2);
    }

    #[tokio::test]
    async fn next_caller_computes_when_the_first_one_is_dropped() {
        let (shared, computed, permits) = (Arc::default(), Arc::default(), Arc::new(Semaphore::new(0)));
        let first = call(1, &shared, &computed, &permits).remove(0);
        tokio::task::yield_now().await;
        let second = call(1, &shared, &computed, &permits).remove(0);
        tokio::task::yield_now().await;
        first.abort();
        permits.add_permits(2);
        assert_eq!(second.await.unwrap(), 2);
        assert!(first.await.unwrap_err().is_cancelled());
    }
}
