//! Whether the wall clock may decide what cannot be undone: closing the bills of a month, and deleting old rows.
//!
//! ```text
//! the clock shows another UTC day ─────────────► wait for `pause` (an hour)
//! the clock is 32 days after the last settled
//! day: the host was off, or the clock is wrong ─► wait for 168 times `pause` (a week)
//! both times have passed ──────────────────────► settled
//! ```
//!
//! The clock of a host can be wrong after a boot until it is set. Without this wait, a clock in the future would delete the
//! whole history at once.

use crate::moment::{DAY_MS, Moment};

/// Distance to the last settled day from which the clock is doubtful.
const DOUBTFUL_MS: i64 = 32 * DAY_MS;

/// How much longer a doubtful clock must run.
const DOUBTFUL_FACTOR: u64 = 168;

/// Observes the wall clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SettledClock {
    pause_ms: u64,
    /// The present UTC day, and since when the clock has shown it.
    day: (i64, Moment),
    /// Since when the clock is doubtful.
    doubtful: Option<Moment>,
}

impl SettledClock {
    /// Creates the observer. `pause_ms` is how long the clock must show a day.
    #[must_use]
    pub fn new(pause_ms: u64, now: Moment) -> Self {
        Self { pause_ms, day: (day_of(now), now), doubtful: None }
    }

    /// Observes the clock. `settled_ms` is the last day that was settled, if there was one. Returns whether the clock is
    /// settled.
    pub fn observe(&mut self, now: Moment, settled_ms: Option<i64>) -> bool {
        let day = day_of(now);
        if self.day.0 != day {
            self.day = (day, now);
        }
        let is_doubtful = settled_ms.is_some_and(|settled| now.wall_ms.saturating_sub(settled) > DOUBTFUL_MS);
        self.doubtful = is_doubtful.then(|| self.doubtful.unwrap_or(now));
        let has_passed = |since: Moment, ms: u64| now.ms_since(since) >= ms;
        has_passed(self.day.1, self.pause_ms)
            && self.doubtful.is_none_or(|since| has_passed(since, self.pause_ms.saturating_mul(DOUBTFUL_FACTOR)))
    }
}

fn day_of(moment: Moment) -> i64 {
    moment.wall_ms.div_euclid(DAY_MS)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: u64 = 3_600_000;

    /// Returns a moment: hours of running time, and the day and hour that the clock shows.
    fn at(running: u64, day: i64, hour: i64) -> Moment {
        Moment { boot: 1, monotonic_ms: running * HOUR, wall_ms: day * DAY_MS + hour * 3_600_000 }
    }

    #[test]
    fn day_is_settled_after_an_hour_of_running_time() {
        let mut clock = SettledClock::new(HOUR, at(0, 100, 5));
        let mut seen = |running, day, hour| clock.observe(at(running, day, hour), Some(99 * DAY_MS));
        assert!(!seen(0, 100, 5) && seen(1, 100, 6) && seen(9, 100, 23));
        assert!(!seen(10, 101, 0) && seen(11, 101, 1));
    }

    /// Fault: a host that booted with a clock 500 days in the future lost its history, and hours that were in no bill.
    #[test]
    fn clock_in_the_future_is_not_settled_before_a_week() {
        let mut clock = SettledClock::new(HOUR, at(0, 100, 5));
        let settled = Some(100 * DAY_MS);
        for running in 0..167 {
            let (day, hour) = (600 + i64::try_from(running / 24).unwrap(), i64::try_from(running % 24).unwrap());
            assert!(!clock.observe(at(running, day, hour), settled), "{running}");
        }
        assert!(!clock.observe(at(167, 101, 0), settled) && clock.observe(at(168, 101, 1), settled), "the right time");
        assert!(!clock.observe(at(169, 600, 2), settled), "again wrong");
        let is_settled = |running: u64, clock: &mut SettledClock| {
            let (day, hour) = (600 + i64::try_from(running / 24).unwrap(), i64::try_from(running % 24).unwrap());
            clock.observe(at(running, day, hour), settled)
        };
        let first = (169..400).find(|running| is_settled(*running, &mut clock));
        assert_eq!(first, Some(169 + 168), "a host that was off for long");
    }

    #[test]
    fn host_without_history_needs_no_week() {
        let mut clock = SettledClock::new(HOUR, at(0, 100, 5));
        assert!(!clock.observe(at(0, 100, 0), None) && clock.observe(at(1, 100, 1), None));
        assert!(SettledClock::new(0, at(0, 900, 0)).observe(at(0, 900, 0), Some(0)), "without a pause");
    }
}
