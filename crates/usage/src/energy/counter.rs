//! The energy counter of a board.

use serde::{Deserialize, Serialize};

use crate::{input::Reading, moment::Moment};

/// Most mean power of a board, as a multiple of its power limit.
const MOST_OF_LIMIT: u64 = 2;

/// Most mean power of a board whose power limit is not known, in mW.
const MOST_WITHOUT_LIMIT_MW: u64 = 4_000_000;

/// The driver updates the counter at intervals, so a difference can include the energy of this much more time, in ms.
const UPDATE_MS: u64 = 1_000;

/// The last reading of the counter, from which the next difference counts.
///
/// The counter falls to 0 when the driver is loaded or the GPU is reset. A lower reading, another boot or a reported
/// reset therefore begins a new base, and the energy until then is not known. A failed reading keeps the base, so the
/// next difference includes it. A difference that the board cannot have used begins a new base, too: the driver or the
/// clock was wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(crate) struct EnergyCounter {
    base: Option<(u64, Moment)>,
}

impl EnergyCounter {
    /// Takes a reading. Returns the energy since the last reading in mJ, and the time in ms; `None` if the reading is a
    /// new base. The second value says whether a new window begins.
    pub(crate) fn take(
        &mut self,
        reading: Reading<u64>,
        limit_mw: Reading<u64>,
        at: Moment,
    ) -> (Option<(u64, u64)>, bool) {
        let Reading::Value(now) = reading else { return (None, false) };
        let last = self.base.replace((now, at));
        let difference = last.filter(|(_, since)| since.boot == at.boot).and_then(|(base, since)| {
            let (energy, ms) = (now.checked_sub(base)?, at.ms_since(since));
            (energy <= most_mj(limit_mw, ms)).then_some((energy, ms))
        });
        (difference, true)
    }

    /// Forgets the base, because the driver was loaded or the GPU was reset.
    pub(crate) fn reset(&mut self) {
        self.base = None;
    }
}

/// Returns the most energy in mJ that a board can use in a time.
fn most_mj(limit_mw: Reading<u64>, ms: u64) -> u64 {
    let limit = limit_mw.value().filter(|limit| *limit > 0);
    let most_mw = limit.map_or(MOST_WITHOUT_LIMIT_MW, |limit| limit.saturating_mul(MOST_OF_LIMIT));
    let mj = u128::from(most_mw) * u128::from(ms.saturating_add(UPDATE_MS)) / 1000;
    u64::try_from(mj).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Reading<u64> = Reading::Value(200_000);

    fn at(boot: u64, monotonic_ms: u64) -> Moment {
        Moment { boot, monotonic_ms, wall_ms: 0 }
    }

    #[test]
    fn lower_reading_is_a_new_base() {
        let mut counter = EnergyCounter::default();
        assert_eq!(counter.take(Reading::Value(100), LIMIT, at(1, 0)), (None, true));
        assert_eq!(counter.take(Reading::Value(160), LIMIT, at(1, 10)), (Some((60, 10)), true));
        assert_eq!(counter.take(Reading::Value(20), LIMIT, at(1, 20)), (None, true));
        assert_eq!(counter.take(Reading::Value(25), LIMIT, at(1, 30)), (Some((5, 10)), true));
    }

    #[test]
    fn failed_reading_keeps_the_base() {
        let mut counter = EnergyCounter::default();
        let _ = counter.take(Reading::Value(100), LIMIT, at(1, 0));
        assert_eq!(counter.take(Reading::Failed, LIMIT, at(1, 10)), (None, false));
        assert_eq!(counter.take(Reading::Value(160), LIMIT, at(1, 20)), (Some((60, 20)), true));
    }

    #[test]
    fn reset_and_boot_begin_a_new_base_of_a_higher_counter() {
        let mut counter = EnergyCounter::default();
        let _ = counter.take(Reading::Value(100), LIMIT, at(1, 0));
        assert_eq!(counter.take(Reading::Value(200), LIMIT, at(2, 0)), (None, true));
        counter.reset();
        assert_eq!(counter.take(Reading::Value(300), LIMIT, at(2, 5)), (None, true));
    }

    /// Fault: the clock of the driver was set forward by hours. The lease paid for 1.9 MJ in 15 s.
    #[test]
    fn impossible_step_is_a_new_base() {
        let mut counter = EnergyCounter::default();
        let _ = counter.take(Reading::Value(0), LIMIT, at(1, 0));
        let full = 200 * 15_000;
        assert_eq!(counter.take(Reading::Value(full), LIMIT, at(1, 15_000)), (Some((full, 15_000)), true));
        assert_eq!(counter.take(Reading::Value(full + 6_400_001), LIMIT, at(1, 30_000)), (None, true));
        assert_eq!(counter.take(Reading::Value(full + 6_400_005), LIMIT, at(1, 31_000)), (Some((4, 1_000)), true));
        for unknown in [Reading::Failed, Reading::Unsupported, Reading::Value(0)] {
            let mut counter = EnergyCounter::default();
            let _ = counter.take(Reading::Value(0), unknown, at(1, 0));
            assert_eq!(counter.take(Reading::Value(64_000_001), unknown, at(1, 15_000)), (None, true));
            assert_eq!(counter.take(Reading::Value(128_000_001), unknown, at(1, 30_000)).0, Some((64_000_000, 15_000)));
        }
    }
}
