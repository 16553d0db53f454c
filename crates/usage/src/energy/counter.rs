//! The energy counter of a board.

use serde::{Deserialize, Serialize};

use crate::{input::Reading, moment::Moment};

/// The last reading of the counter, from which the next difference counts.
///
/// The counter falls to 0 when the driver is loaded or the GPU is reset. A lower reading, another boot or a reported
/// reset therefore begins a new base, and the energy until then is not known. A failed reading keeps the base, so the
/// next difference includes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(crate) struct EnergyCounter {
    base: Option<(u64, Moment)>,
}

impl EnergyCounter {
    /// Takes a reading. Returns the energy since the last reading in mJ, and the time in ms; `None` if the reading is a
    /// new base. The second value says whether a new window begins.
    pub(crate) fn take(&mut self, reading: Reading<u64>, at: Moment) -> (Option<(u64, u64)>, bool) {
        let Reading::Value(now) = reading else { return (None, false) };
        let last = self.base.replace((now, at));
        let difference = last.filter(|(_, since)| since.boot == at.boot).and_then(|(base, since)| {
            let energy = now.checked_sub(base)?;
            Some((energy, at.ms_since(since)))
        });
        (difference, true)
    }

    /// Forgets the base, because the driver was loaded or the GPU was reset.
    pub(crate) fn reset(&mut self) {
        self.base = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(boot: u64, monotonic_ms: u64) -> Moment {
        Moment { boot, monotonic_ms, wall_ms: 0 }
    }

    #[test]
    fn lower_reading_is_a_new_base() {
        let mut counter = EnergyCounter::default();
        assert_eq!(counter.take(Reading::Value(100), at(1, 0)), (None, true));
        assert_eq!(counter.take(Reading::Value(160), at(1, 10)), (Some((60, 10)), true));
        assert_eq!(counter.take(Reading::Value(20), at(1, 20)), (None, true));
        assert_eq!(counter.take(Reading::Value(25), at(1, 30)), (Some((5, 10)), true));
    }

    #[test]
    fn failed_reading_keeps_the_base() {
        let mut counter = EnergyCounter::default();
        let _ = counter.take(Reading::Value(100), at(1, 0));
        assert_eq!(counter.take(Reading::Failed, at(1, 10)), (None, false));
        assert_eq!(counter.take(Reading::Value(160), at(1, 20)), (Some((60, 20)), true));
    }

    #[test]
    fn reset_and_boot_begin_a_new_base_of_a_higher_counter() {
        let mut counter = EnergyCounter::default();
        let _ = counter.take(Reading::Value(100), at(1, 0));
        assert_eq!(counter.take(Reading::Value(200), at(2, 0)), (None, true));
        counter.reset();
        assert_eq!(counter.take(Reading::Value(300), at(2, 5)), (None, true));
    }
}
