//! Waits for changes in gpushd about which gpushd sends no event.

use std::time::{Duration, Instant};

use super::{Agent, PATIENCE};

impl Agent {
    /// Polls until `look` returns a value. Use this function only for a state without a revision.
    /// With a revision, a test can use a long poll instead.
    ///
    /// # Panics
    /// If `look` returns no value within [`PATIENCE`].
    pub fn until<T>(&self, what: &str, mut look: impl FnMut() -> Option<T>) -> T {
        let until = Instant::now() + PATIENCE;
        loop {
            if let Some(found) = look() {
                return found;
            }
            assert!(Instant::now() < until, "no {what}:\n{}", self.log());
            // Requests without a pause would use up gpushd's CPU time.
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Polls until a condition is true. Use this function only for a state without a revision. With
    /// a revision, a test can use a long poll instead.
    ///
    /// # Panics
    /// If the condition does not become true within [`PATIENCE`].
    pub fn await_that(&self, what: &str, is_so: impl Fn() -> bool) {
        self.until(what, || is_so().then_some(()));
    }

    /// Waits until all readings that the API shows are newer than this call. A test calls this
    /// function after it has changed the hardware without gpushd.
    ///
    /// # Panics
    /// If a GPU gets no newer reading in time.
    pub fn settle_reads(&self) {
        self.settle_reads_except(u32::MAX);
    }

    /// Does the same as [`Agent::settle_reads`], but does not wait for GPU `index`.
    ///
    /// # Panics
    /// If any other GPU gets no newer reading in time.
    pub fn settle_reads_except(&self, index: u32) {
        let before = jiff::Timestamp::now();
        let until = Instant::now() + PATIENCE;
        while self.gpus().iter().any(|gpu| gpu.index != index && gpu.observed_at < before) {
            assert!(Instant::now() < until, "{}", self.log());
        }
    }

    /// Waits until the log contains `text`, then returns the log.
    ///
    /// # Panics
    /// If the log does not contain `text` within [`PATIENCE`].
    pub fn wait_for_log(&self, text: &str) -> String {
        self.until(&format!("{text:?} in the log"), || {
            let log = self.log();
            log.contains(text).then_some(log)
        })
    }

    /// Waits until gpushd has applied or refused each layout that it must apply at its start.
    ///
    /// # Panics
    /// If gpushd does not finish within [`PATIENCE`].
    pub fn wait_for_layouts_at_start(&self) {
        self.await_that("layouts at start", || {
            self.get("/v1/health").json()["layouts_at_start"]["complete"] == serde_json::json!(true)
        });
    }
}
