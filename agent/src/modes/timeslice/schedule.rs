//! Decides when gpushd reads levels, and when it tries again after a failure.
//!
//! ```text
//! something has changed ──► now
//! no change ──────────────► a minute after the last reading, while a GPU has a level
//! a failure ──────────────► a minute later, then two, … at most sixteen; at once after a reload
//! ```

use std::{collections::BTreeMap, time::Duration};

use backon::ExponentialBackoff;
use tokio::time::Instant;

use super::TroubleSubject;
use crate::system::backoff::backoff;

/// Interval at which gpushd reads the levels, and so calls `nvidia-smi`, if nothing changes.
pub(crate) const INTERVAL: Duration = Duration::from_secs(60);

/// Longest pause after several failures.
const LONGEST: Duration = Duration::from_secs(16 * 60);

/// When gpushd last read the levels, and which attempts have failed.
#[derive(Debug)]
pub(super) struct Schedule {
    /// Interval at which gpushd reads the levels if nothing changes. Usually [`INTERVAL`].
    interval: Duration,
    read_at: Option<Instant>,
    failed: BTreeMap<TroubleSubject, (ExponentialBackoff, Instant)>,
    /// Whether there are GPUs that gpushd must check periodically.
    goes_on: bool,
}

impl Schedule {
    pub(super) fn new(interval: Duration) -> Self {
        Self { interval, read_at: None, failed: BTreeMap::new(), goes_on: false }
    }

    /// Returns whether gpushd must read the levels now, because something is `new`, or the last
    /// reading is old and there are levels to keep. If so, stores the time of this reading.
    pub(super) fn is_due(&mut self, new: bool, some_to_keep: bool) -> bool {
        let waited = self.read_at.is_none_or(|at| at.elapsed() >= self.interval);
        let due = new || some_to_keep && waited && self.may_try(&TroubleSubject::Program);
        if due {
            self.read_at = Some(Instant::now());
        }
        due
    }

    /// Sets whether GPUs are checked periodically.
    pub(super) fn set_periodic(&mut self, goes_on: bool) {
        self.goes_on = goes_on;
    }

    /// Returns whether gpushd may try again after its last failure.
    pub(super) fn may_try(&self, subject: &TroubleSubject) -> bool {
        self.failed.get(subject).is_none_or(|(_, again)| *again <= Instant::now())
    }

    pub(super) fn failed(&mut self, subject: TroubleSubject) {
        let first = || (backoff((INTERVAL, LONGEST)), Instant::now());
        let (pauses, again) = self.failed.entry(subject).or_insert_with(first);
        *again = Instant::now() + pauses.next().unwrap_or(LONGEST);
    }

    pub(super) fn mark_ok(&mut self, subject: &TroubleSubject) {
        self.failed.remove(subject);
    }

    /// Returns the time of the next periodic check.
    pub(super) fn next(&self) -> Option<Instant> {
        self.goes_on.then(|| Instant::now() + self.interval)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn levels_are_read_each_minute_and_less_after_failures() {
        let mut pace = Schedule::new(INTERVAL);
        assert_eq!(pace.next(), None);
        pace.set_periodic(true);
        assert!(pace.next().is_some());
        assert!(pace.is_due(false, true), "the first");
        assert!(!pace.is_due(false, true), "nothing is different");
        assert!(pace.is_due(true, true), "something is");
        tokio::time::advance(INTERVAL).await;
        assert!(!pace.is_due(false, false), "nothing that has levels");
        assert!(pace.is_due(false, true));

        let mut waited = Vec::new();
        for _ in 0..7 {
            pace.failed(TroubleSubject::Program);
            let mut minutes = 0;
            while !pace.may_try(&TroubleSubject::Program) {
                tokio::time::advance(INTERVAL).await;
                minutes += 1;
            }
            waited.push(minutes);
        }
        assert_eq!(waited, [1, 2, 4, 8, 16, 16, 16]);
        pace.failed(TroubleSubject::Program);
        tokio::time::advance(INTERVAL).await;
        assert!(!pace.is_due(false, true), "it has failed too often");
        pace.mark_ok(&TroubleSubject::Program);
        assert!(pace.may_try(&TroubleSubject::Program));
    }

    #[tokio::test(start_paused = true)]
    async fn failure_of_one_gpu_delays_no_other_gpu() {
        let (level, mode) = (|gpu: &str| TroubleSubject::Level(gpu.into()), TroubleSubject::ComputeMode("0".into()));
        let mut pace = Schedule::new(INTERVAL);
        pace.failed(level("0"));
        assert!(!pace.may_try(&level("0")));
        assert!(pace.may_try(&level("1")) && pace.may_try(&mode) && pace.may_try(&TroubleSubject::Program));
        // After a success, the next failure has the shortest pause again.
        pace.failed(level("0"));
        pace.mark_ok(&level("0"));
        pace.failed(level("0"));
        tokio::time::advance(INTERVAL).await;
        assert!(pace.may_try(&level("0")));
    }
}
