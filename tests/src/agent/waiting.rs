//! Waits for changes in gpushd that it does not announce.

use std::time::{Duration, Instant};

use super::{Agent, PATIENCE};

impl Agent {
    /// Polls until `look` returns a value. For state that has no revision to follow.
    ///
    /// # Panics
    /// If it returns no value within [`PATIENCE`].
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

    /// Polls until a condition is true. For state that has no revision to follow.
    ///
    /// # Panics
    /// If it does not become true within [`PATIENCE`].
    pub fn await_that(&self, what: &str, is_so: impl Fn() -> bool) {
        self.until(what, || is_so().then_some(()));
    }

    /// Waits until the API no longer shows readings from before this call. For tests that changed the hardware
    /// outside gpushd.
    ///
    /// # Panics
    /// If no newer reading arrives.
    pub fn settle_reads(&self) {
        self.settle_reads_except(u32::MAX);
    }

    /// As [`Agent::settle_reads`], except for one GPU that may have no new reading.
    ///
    /// # Panics
    /// If another GPU gets no newer reading.
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

    /// Waits until gpushd has applied, or refused to apply, the layouts of its config after its start.
    ///
    /// # Panics
    /// If it does not finish within [`PATIENCE`].
    pub fn wait_for_layouts_at_start(&self) {
        self.await_that("layouts at start", || {
            self.get("/v1/health").json()["layouts_at_start"]["complete"] == serde_json::json!(true)
        });
    }
}
