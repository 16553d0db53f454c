//! A value that gpushd reads from the hardware on request. Only one reading of the value runs at a time.
//!
//! If the last reading is fresh, a caller gets it without a driver call. If a reading is running, a caller waits for
//! its result. If a reading fails or takes too long, callers get the last good reading, marked as stale.
//!
//! A caller waits for a reading only until a certain time after the reading began. So if a reading hangs, it delays
//! only callers that ask soon after the reading began.

use std::{
    fmt,
    future::Future,
    sync::{Arc, MutexGuard},
    time::Duration,
};

use gpush_locked::Locked;
use gpush_nvml::DriverError;
use jiff::Timestamp;
use tokio::{
    sync::watch,
    time::{Instant, timeout_at},
};

use crate::system::tasks::{TaskName, Tasks};

/// How long a reading stays fresh.
pub(crate) const FRESH_FOR: Duration = Duration::from_secs(1);

/// A moment on two clocks. The wall clock is for users and may be set back. The monotonic clock is for comparisons.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Moment {
    pub(crate) wall: Timestamp,
    pub(crate) own: Instant,
}

impl Moment {
    /// Returns the current moment.
    pub(crate) fn now() -> Self {
        Self { wall: Timestamp::now(), own: Instant::now() }
    }
}

/// The last good reading of a value, and the result of the last attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LastReading<V> {
    /// The last good reading, and when it began.
    pub(crate) good: Option<(V, Moment)>,
    /// The error of the last attempt; `None` if it succeeded.
    pub(crate) error: Option<DriverError>,
    /// Whether the last attempt failed, or the value has changed since the last attempt began.
    pub(crate) stale: bool,
}

impl<V> Default for LastReading<V> {
    fn default() -> Self {
        Self { good: None, error: None, stale: false }
    }
}

/// The cache calls this function with each new reading, in order. The lock of the cache is held during the call.
pub(crate) type OnChange<V> = Box<dyn Fn(LastReading<V>) + Send + Sync>;

/// The cache of one value. A handle, cheap to clone.
pub(crate) struct Cached<V>(Arc<CachedParts<V>>);

impl<V> Clone for Cached<V> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<V: fmt::Debug> fmt::Debug for Cached<V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cached").field("state", &self.0.state).finish_non_exhaustive()
    }
}

struct CachedParts<V> {
    state: Locked<CachedState<V>>,
    /// Notified when a reading has finished. Wakes the callers that wait.
    ended: watch::Sender<()>,
    on_change: OnChange<V>,
    tasks: Tasks,
}

#[derive(Debug)]
struct CachedState<V> {
    good: Option<(V, Moment)>,
    error: Option<DriverError>,
    /// The start of the last finished attempt.
    begun: Option<Instant>,
    /// Time at which gpushd last changed the value. Readings that began earlier may not show the change.
    changed: Option<Instant>,
    /// Time at which the running reading began.
    running: Option<Instant>,
}

impl<V: Clone> CachedState<V> {
    /// Returns whether the last attempt began before gpushd last changed the value.
    fn is_outdated(&self) -> bool {
        self.changed.is_some_and(|changed| self.begun.is_some_and(|begun| begun <= changed))
    }

    fn last(&self) -> LastReading<V> {
        let stale = self.error.is_some() || self.is_outdated();
        LastReading { good: self.good.clone(), error: self.error.clone(), stale }
    }
}

impl<V: Clone + Send + 'static> Cached<V> {
    /// Creates an empty cache.
    pub(crate) fn new(tasks: Tasks, on_change: OnChange<V>) -> Self {
        let state = CachedState { good: None, error: None, begun: None, changed: None, running: None };
        Self(Arc::new(CachedParts { state: Locked::new(state), ended: watch::Sender::new(()), on_change, tasks }))
    }

    fn state(&self) -> MutexGuard<'_, CachedState<V>> {
        self.0.state.lock()
    }

    /// Returns whether a reading has finished, even if it failed.
    pub(crate) fn is_known(&self) -> bool {
        self.state().begun.is_some()
    }

    /// Starts a reading. Does nothing if the last reading is fresh, or if a reading is running.
    pub(crate) fn refresh<F>(&self, read: impl FnOnce() -> F)
    where
        F: Future<Output = Result<V, DriverError>> + Send + 'static,
    {
        let mut state = self.state();
        if state.running.is_some()
            || (!state.is_outdated() && state.begun.is_some_and(|begun| begun.elapsed() < FRESH_FOR))
        {
            return;
        }
        state.running = Some(Instant::now());
        drop(state);
        let reading = read();
        let ended = RunningReading { cache: self.clone(), begun: Moment::now() };
        self.0.tasks.once(TaskName::GpuReading, async move {
            let outcome = reading.await;
            ended.with(outcome);
        });
    }

    /// Waits for the running reading, at most until `patience` after it began. Returns whether it is still running.
    pub(crate) async fn wait(&self, patience: Duration) -> bool {
        let lasts = |begun: &Instant| begun.elapsed() < patience;
        if self.state().running.as_ref().is_some_and(lasts) {
            let mut ended = self.0.ended.subscribe();
            ended.borrow_and_update();
            // Check the state again, because the reading may have finished before the call of `subscribe`.
            let running = self.state().running;
            if let Some(begun) = running {
                let _ = timeout_at(begun + patience, ended.changed()).await;
            }
        }
        self.state().running.is_some()
    }

    /// Stores a reading that was made without the cache and began at `begun`.
    pub(crate) fn put(&self, begun: Moment, outcome: Result<V, DriverError>) {
        let mut state = self.state();
        // Ignore this reading if a newer one has already finished.
        if state.begun.is_some_and(|other| other > begun.own) {
            return;
        }
        state.begun = Some(begun.own);
        match outcome {
            Ok(value) => {
                state.good = Some((value, begun));
                state.error = None;
            }
            Err(error) => state.error = Some(error),
        }
        (self.0.on_change)(state.last());
    }

    /// Makes the next caller start a new reading, and removes the error of the last attempt.
    pub(crate) fn restart(&self) {
        self.state().error = None;
        self.invalidate();
    }

    /// Marks all readings as stale, including a running one. The next caller starts a new reading.
    pub(crate) fn invalidate(&self) {
        let mut state = self.state();
        state.changed = Some(Instant::now());
        if state.begun.is_some() {
            (self.0.on_change)(state.last());
        }
    }
}

/// A running reading. Dropping this value marks the reading as finished, even if its task panics.
struct RunningReading<V: Clone + Send + 'static> {
    cache: Cached<V>,
    begun: Moment,
}

impl<V: Clone + Send + 'static> RunningReading<V> {
    fn with(self, outcome: Result<V, DriverError>) {
        self.cache.put(self.begun, outcome);
    }
}

impl<V: Clone + Send + 'static> Drop for RunningReading<V> {
    fn drop(&mut self) {
        self.cache.state().running = None;
        self.cache.0.ended.send_replace(());
    }
}

#[cfg(test)]
mod tests {
    use gpush_nvml::ErrorKind;
    use tokio::sync::Semaphore;

    use super::*;

    impl<V: Clone + Send + 'static> Cached<V> {
        fn alone() -> Self {
            Self::new(Tasks::for_tests(), Box::new(|_| ()))
        }

        fn last(&self) -> LastReading<V> {
            let state = self.state();
            let last = state.last();
            LastReading { stale: last.stale || state.running.is_some(), ..last }
        }

        async fn waited(&self, patience: Duration) -> LastReading<V> {
            self.wait(patience).await;
            self.last()
        }
    }

    const SOON: Duration = Duration::from_millis(100);

    #[tokio::test(start_paused = true)]
    async fn concurrent_callers_share_one_reading() {
        let cache = Cached::alone();
        let mut readings = 0;
        for _ in 0..10 {
            cache.refresh(|| {
                readings += 1;
                async { Ok(7) }
            });
        }
        let known = cache.waited(SOON).await;
        assert_eq!((readings, known.good.map(|g| g.0), known.stale), (1, Some(7), false));
        cache.refresh(|| {
            readings += 1;
            async { Ok(8) }
        });
        assert_eq!(readings, 1, "it is still good");
        tokio::time::advance(FRESH_FOR).await;
        cache.refresh(|| async { Ok(8) });
        assert_eq!(cache.waited(SOON).await.good.map(|g| g.0), Some(8));
    }

    #[tokio::test(start_paused = true)]
    async fn slow_reading_leaves_the_last_one_stale() {
        let cache = Cached::alone();
        cache.refresh(|| async { Ok(1) });
        assert!(!cache.waited(SOON).await.stale);
        tokio::time::advance(FRESH_FOR).await;
        let gate = Arc::new(Semaphore::new(0));
        let pass = Arc::clone(&gate);
        cache.refresh(|| async move {
            let _ = pass.acquire().await;
            Ok(2)
        });
        let asked = Instant::now();
        let known = cache.waited(SOON).await;
        assert_eq!((known.good.map(|g| g.0), known.stale), (Some(1), true));
        assert!(asked.elapsed() >= SOON);
        // The reading has already hung for longer than the time limit, so the next request gets its answer at once.
        let asked = Instant::now();
        assert!(cache.waited(SOON).await.stale);
        assert_eq!(asked.elapsed(), Duration::ZERO);
        gate.add_permits(1);
        let known = cache.waited(2 * SOON).await;
        assert_eq!((known.good.map(|g| g.0), known.stale), (Some(2), false));
    }

    #[tokio::test(start_paused = true)]
    async fn failed_reading_keeps_the_last_good_one() {
        let cache = Cached::alone();
        cache.refresh(|| async { Ok(1) });
        cache.waited(SOON).await;
        tokio::time::advance(FRESH_FOR).await;
        cache.refresh(|| async { Err(DriverError::new(ErrorKind::GpuIsLost, "nvmlX")) });
        let known = cache.waited(SOON).await;
        assert_eq!((known.good.map(|g| g.0), known.stale), (Some(1), true));
        assert_eq!(known.error.unwrap().kind, ErrorKind::GpuIsLost);
    }

    #[tokio::test(start_paused = true)]
    async fn panicking_reading_lets_the_next_one_run() {
        let cache: Cached<u32> = Cached::alone();
        cache.refresh(|| async { panic!("on purpose") });
        assert_eq!(cache.waited(SOON).await.good, None);
        cache.refresh(|| async { Ok(3) });
        assert_eq!(cache.waited(SOON).await.good.map(|g| g.0), Some(3));
    }

    #[tokio::test(start_paused = true)]
    async fn reading_begun_before_a_change_is_stale() {
        let cache = Cached::alone();
        cache.refresh(|| async { Ok(1) });
        assert!(!cache.waited(SOON).await.stale);
        cache.invalidate();
        assert!(cache.last().stale);
        // The reading was running when the value changed, so it may show the old or the new value.
        tokio::time::advance(Duration::from_millis(1)).await;
        let gate = Arc::new(Semaphore::new(0));
        let pass = Arc::clone(&gate);
        cache.refresh(|| async move {
            let _ = pass.acquire().await;
            Ok(1)
        });
        tokio::time::advance(Duration::from_millis(1)).await;
        cache.invalidate();
        gate.add_permits(1);
        let known = cache.waited(SOON).await;
        assert_eq!((known.good.map(|g| g.0), known.stale), (Some(1), true));
        tokio::time::advance(Duration::from_millis(1)).await;
        cache.refresh(|| async { Ok(2) });
        let known = cache.waited(SOON).await;
        assert_eq!((known.good.map(|g| g.0), known.stale), (Some(2), false));
    }

    #[tokio::test(start_paused = true)]
    async fn older_reading_never_replaces_a_newer_one() {
        let cache = Cached::alone();
        let before = Moment::now();
        tokio::time::advance(Duration::from_millis(5)).await;
        cache.put(Moment::now(), Ok(2));
        cache.put(before, Ok(1));
        assert_eq!(cache.waited(SOON).await.good.map(|g| g.0), Some(2));
    }
}
