//! Waits for changes in gpushd for which gpushd sends no event.

use std::time::{Duration, Instant};

use super::{Agent, PATIENCE};

impl Agent {
    /// Polls until `look` returns a value. Use it for state without a revision that a request could
    /// follow.
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

    /// Polls until a condition is true. Use it for state without a revision that a request could
    /// follow.
    ///
    /// # Panics
    /// If the condition does not become true within [`PATIENCE`].
    pub fn await_that(&self, what: &str, is_so: impl Fn() -> bool) {
        self.until(what, || is_so().then_some(()));
    }

    /// Waits until the API shows only readings that are newer than this call. For tests that
    /// changed the hardware without gpushd.
    ///
    /// # Panics
    /// If a GPU gets no newer reading in time.
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

    /// Waits until gpushd, after its start, has applied the layouts of its config or refused to
    /// apply them.
    ///
    /// # Panics
    /// If gpushd does not finish within [`PATIENCE`].
    pub fn wait_for_layouts_at_start(&self) {
        self.await_that("layouts at start", || {
            self.get("/v1/health").json()["layouts_at_start"]["complete"] == serde_json::json!(true)
        });
    }
}
