//! Waiting for gpushd to do something that it does not announce.

use std::time::{Duration, Instant};

use super::{Agent, PATIENCE};

impl Agent {
    /// Waits until `look` finds something that can't be followed by its revision.
    ///
    /// # Panics
    /// When it finds nothing for too long.
    pub fn until<T>(&self, what: &str, mut look: impl FnMut() -> Option<T>) -> T {
        let until = Instant::now() + PATIENCE;
        loop {
            if let Some(found) = look() {
                return found;
            }
            assert!(Instant::now() < until, "no {what}:\n{}", self.log());
            // To ask all the time would take the agent's processor.
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until something is so that can't be followed by its revision.
    ///
    /// # Panics
    /// When it is not for too long.
    pub fn await_that(&self, what: &str, is_so: impl Fn() -> bool) {
        self.until(what, || is_so().then_some(()));
    }

    /// Waits until readings made before this call are no longer shown: something beside the agent
    /// has changed the hardware.
    ///
    /// # Panics
    /// When no newer reading comes.
    pub fn settle_reads(&self) {
        self.settle_reads_except(u32::MAX);
    }

    /// The same, but for one GPU of which no new reading may come.
    ///
    /// # Panics
    /// When no newer reading of another comes.
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
