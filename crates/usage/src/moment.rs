//! Points in time. The crate reads no clock: each event brings its [`Moment`].

use serde::{Deserialize, Serialize};

/// Milliseconds of an hour.
pub const HOUR_MS: i64 = 3_600_000;

/// Milliseconds of a UTC day.
pub const DAY_MS: i64 = 24 * HOUR_MS;

/// Longest time that counts between two boots. The wall clock of a host can begin in 1970 until it is set.
const MOST_BETWEEN_BOOTS_MS: u64 = 62 * DAY_MS.unsigned_abs();

/// A point in time, by two clocks.
///
/// Durations come from the monotonic clock. The wall clock only says to which hour a time belongs, so a change of the
/// wall clock neither adds time nor removes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Moment {
    /// Any number that differs between two boots of the host.
    pub boot: u64,
    /// Milliseconds since boot. Time in which the host was suspended counts.
    pub monotonic_ms: u64,
    /// Milliseconds since 1970-01-01T00:00:00Z.
    pub wall_ms: i64,
}

impl Moment {
    /// Returns the milliseconds since an earlier moment; 0 if that moment is later.
    ///
    /// Between two boots, only the wall clock can tell the time. Then the result is at most 62 days.
    #[must_use]
    pub fn ms_since(self, earlier: Self) -> u64 {
        if self.boot == earlier.boot {
            self.monotonic_ms.saturating_sub(earlier.monotonic_ms)
        } else {
            u64::try_from(self.wall_ms.saturating_sub(earlier.wall_ms)).unwrap_or(0).min(MOST_BETWEEN_BOOTS_MS)
        }
    }

    /// Returns whether this moment is of the same boot as a limit, and not after it.
    #[must_use]
    pub fn is_within(self, limit: Self) -> bool {
        self.boot == limit.boot && self.monotonic_ms <= limit.monotonic_ms
    }

    /// Returns the moment a number of milliseconds later.
    #[must_use]
    pub fn plus_ms(self, ms: u64) -> Self {
        Self {
            monotonic_ms: self.monotonic_ms.saturating_add(ms),
            wall_ms: self.wall_ms.saturating_add(i64::try_from(ms).unwrap_or(i64::MAX)),
            ..self
        }
    }

    /// Returns the later one of two moments.
    #[must_use]
    pub fn later(self, other: Self) -> Self {
        if other.ms_since(self) > 0 { other } else { self }
    }

    /// Returns the moment between two moments at which the wall clock had this time. A time outside counts as the nearer
    /// of the two.
    #[must_use]
    pub fn between(earlier: Self, later: Self, wall_ms: i64) -> Self {
        let ms = u64::try_from(wall_ms.saturating_sub(earlier.wall_ms)).unwrap_or(0);
        earlier.plus_ms(ms.min(later.ms_since(earlier)))
    }

    /// Returns the start of the UTC hour, in milliseconds since 1970.
    #[must_use]
    pub fn hour_ms(self) -> i64 {
        self.wall_ms.div_euclid(HOUR_MS) * HOUR_MS
    }
}

/// Splits a time at the starts of UTC hours. Yields the start of each part, and its length in milliseconds.
pub(crate) fn hours(from: Moment, length_ms: u64) -> impl Iterator<Item = (Moment, u64)> {
    let (mut at, mut left) = (from, length_ms);
    std::iter::from_fn(move || {
        if left == 0 {
            return None;
        }
        let next_hour = at.hour_ms().saturating_add(HOUR_MS);
        let to_next = u64::try_from(next_hour.saturating_sub(at.wall_ms)).unwrap_or(left).max(1);
        let part = (at, to_next.min(left));
        left -= part.1;
        at = at.plus_ms(part.1);
        Some(part)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(boot: u64, monotonic_ms: u64, wall_ms: i64) -> Moment {
        Moment { boot, monotonic_ms, wall_ms }
    }

    #[test]
    fn wall_clock_counts_only_between_boots() {
        let start = at(1, 5_000, 1_000_000);
        assert_eq!(at(1, 7_000, 0).ms_since(start), 2_000);
        assert_eq!(at(1, 4_000, 9_000_000).ms_since(start), 0);
        assert_eq!(at(2, 10, 1_060_000).ms_since(start), 60_000);
        assert_eq!(at(2, 10, 0).ms_since(start), 0);
        assert_eq!(at(2, 10, i64::MAX).ms_since(start), MOST_BETWEEN_BOOTS_MS);
    }

    /// The time up to the moment and the time after it are together exactly the time between the two, on one boot and on
    /// two.
    #[test]
    fn moment_between_two_moments_splits_the_time_without_loss() {
        let earlier = at(1, 5_000, 1_000_000);
        for later in [at(1, 65_000, 1_060_000), at(2, 10, 1_060_000)] {
            for (wall_ms, expected) in [(1_020_000, 20_000), (0, 0), (i64::MAX, 60_000)] {
                let between = Moment::between(earlier, later, wall_ms);
                assert_eq!((between.ms_since(earlier), later.ms_since(between)), (expected, 60_000 - expected));
            }
        }
    }

    #[test]
    fn time_is_split_at_hours_without_loss() {
        let parts: Vec<(i64, u64)> =
            hours(at(1, 0, HOUR_MS - 1), 2 * 3_600_000 + 2).map(|(from, ms)| (from.wall_ms, ms)).collect();
        assert_eq!(parts, [(HOUR_MS - 1, 1), (HOUR_MS, 3_600_000), (2 * HOUR_MS, 3_600_000), (3 * HOUR_MS, 1)]);
        let before_1970: Vec<u64> = hours(at(1, 0, -1), 2).map(|(_, ms)| ms).collect();
        assert_eq!(before_1970, [1, 1]);
        assert_eq!(hours(at(1, 0, 0), 0).count(), 0);
    }
}
