//! When to look, and when what failed is tried again.
//!
//! ```text
//! something is different ──► look now
//! nothing is ──────────────► look a minute after the last one, while there is something to look at
//! what failed ─────────────► a minute later, then two, … at most sixteen; at once with a reload
//! ```

use std::{collections::BTreeMap, time::Duration};

use tokio::time::Instant;

use super::Subject;

/// Between two looks although nothing is said to be different, and so between two runs of `nvidia-smi`.
const LOOK: Duration = Duration::from_secs(60);

/// Most doublings of that.
const DOUBLINGS: u32 = 4;

/// When levels were read last, and what has failed.
#[derive(Debug, Default)]
pub(super) struct Pace {
    read_at: Option<Instant>,
    failed: BTreeMap<Subject, (u32, Instant)>,
    /// Whether there is something to look at by the clock.
    goes_on: bool,
}

impl Pace {
    /// Whether levels are to be read: something is `new`, or there are some to keep and it was long ago.
    /// When they are, that counts as the last time.
    pub(super) fn is_due(&mut self, new: bool, some_to_keep: bool) -> bool {
        let waited = self.read_at.is_none_or(|at| at.elapsed() >= LOOK);
        let due = new || some_to_keep && waited && self.may_try(&Subject::Program);
        if due {
            self.read_at = Some(Instant::now());
        }
        due
    }

    /// Whether GPUs are to be looked at by the clock.
    pub(super) fn go_on(&mut self, goes_on: bool) {
        self.goes_on = goes_on;
    }

    /// Whether it may be tried, after what failed.
    pub(super) fn may_try(&self, subject: &Subject) -> bool {
        self.failed.get(subject).is_none_or(|(_, again)| *again <= Instant::now())
    }

    pub(super) fn failed(&mut self, subject: Subject) {
        let (times, again) = self.failed.entry(subject).or_insert((0, Instant::now()));
        *again = Instant::now() + LOOK * (1 << (*times).min(DOUBLINGS));
        *times += 1;
    }

    pub(super) fn well(&mut self, subject: &Subject) {
        self.failed.remove(subject);
    }

    /// When to look next by the clock.
    pub(super) fn next(&self) -> Option<Instant> {
        self.goes_on.then(|| Instant::now() + LOOK)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_look_a_minute_and_less_often_what_fails() {
        let mut pace = Pace::default();
        assert_eq!(pace.next(), None);
        pace.go_on(true);
        assert!(pace.next().is_some());
        assert!(pace.is_due(false, true), "the first");
        assert!(!pace.is_due(false, true), "nothing is different");
        assert!(pace.is_due(true, true), "something is");
        tokio::time::advance(LOOK).await;
        assert!(!pace.is_due(false, false), "nothing that has levels");
        assert!(pace.is_due(false, true));

        let mut waited = Vec::new();
        for _ in 0..7 {
            pace.failed(Subject::Program);
            let mut minutes = 0;
            while !pace.may_try(&Subject::Program) {
                tokio::time::advance(LOOK).await;
                minutes += 1;
            }
            waited.push(minutes);
        }
        assert_eq!(waited, [1, 2, 4, 8, 16, 16, 16]);
        pace.failed(Subject::Program);
        tokio::time::advance(LOOK).await;
        assert!(!pace.is_due(false, true), "it has failed too often");
        pace.well(&Subject::Program);
        assert!(pace.may_try(&Subject::Program));
    }
}
