//! Activity as rates, and as sums of rates over time.

use serde::{Deserialize, Serialize};

use super::load::{Load, WHOLE_PPM};

/// Activity at one moment, in ppm.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Rates {
    /// Part of the time in which a kernel runs.
    pub busy: u32,
    /// Part of the streaming multiprocessors that are active.
    pub sm: u32,
    /// Part of the tensor cores that are active.
    pub tensor: u32,
    /// Part of the memory bandwidth.
    pub dram: u32,
}

impl Rates {
    pub(super) fn of(load: &Load) -> Self {
        Self { busy: load.busy_ppm, sm: load.sm_ppm, tensor: load.tensor_ppm, dram: load.dram_ppm }
    }

    pub(super) fn each(self, other: Self, of: impl Fn(u32, u32) -> u32) -> Self {
        Self {
            busy: of(self.busy, other.busy),
            sm: of(self.sm, other.sm),
            tensor: of(self.tensor, other.tensor),
            dram: of(self.dram, other.dram),
        }
    }

    pub(super) fn plus(self, other: Self) -> Self {
        self.each(other, u32::saturating_add)
    }

    /// Returns the part of these rates that a process gets on a place where all processes together want `wanted`. If
    /// they want more than the whole, each gets less in proportion.
    pub(super) fn granted(self, wanted: Self) -> Self {
        self.each(wanted, |own, all| match all {
            ..=WHOLE_PPM => own,
            // The result is at most `own`, so it fits.
            _ => (u64::from(own) * u64::from(WHOLE_PPM) / u64::from(all)) as u32,
        })
    }

    pub(super) fn limited(self) -> Self {
        self.each(Self::default(), |own, _| own.min(WHOLE_PPM))
    }
}

/// Activity summed over time, in ppm × ms. Between two moments, the difference divided by the time is the mean.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sums {
    /// See [`Rates::busy`].
    pub busy: u64,
    /// See [`Rates::sm`].
    pub sm: u64,
    /// See [`Rates::tensor`].
    pub tensor: u64,
    /// See [`Rates::dram`].
    pub dram: u64,
}

impl Sums {
    /// Returns the sums after `ms` more milliseconds at these rates.
    #[must_use]
    pub fn after(self, rates: Rates, ms: u64) -> Self {
        let add = |sum: u64, rate: u32| sum.saturating_add(u64::from(rate).saturating_mul(ms));
        Self {
            busy: add(self.busy, rates.busy),
            sm: add(self.sm, rates.sm),
            tensor: add(self.tensor, rates.tensor),
            dram: add(self.dram, rates.dram),
        }
    }
}

/// The sums of a GPU or a process at a moment in the past. The state contains it as a list of its fields, because a
/// state has many marks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "[u64; 4]", into = "[u64; 4]")]
pub(super) struct Mark {
    pub(super) at_ms: u64,
    pub(super) busy: u64,
    pub(super) dram: u64,
    /// Energy in µJ; 0 for a process.
    pub(super) energy_uj: u64,
}

impl From<[u64; 4]> for Mark {
    fn from([at_ms, busy, dram, energy_uj]: [u64; 4]) -> Self {
        Self { at_ms, busy, dram, energy_uj }
    }
}

impl From<Mark> for [u64; 4] {
    fn from(mark: Mark) -> Self {
        [mark.at_ms, mark.busy, mark.dram, mark.energy_uj]
    }
}

/// Number of marks of a GPU or a process. Older marks are dropped.
const MARKS: usize = 8;

/// Adds a mark. Drops the last mark if the rates did not change there, and the oldest one if there are too many.
pub(super) fn push(marks: &mut Vec<Mark>, mark: Mark) {
    let slope = |a: &Mark, b: &Mark| {
        let ms = b.at_ms.saturating_sub(a.at_ms).max(1);
        [b.busy - a.busy, b.dram - a.dram, b.energy_uj - a.energy_uj].map(|sum| (sum / ms, sum % ms))
    };
    if let [.., before, last] = marks.as_slice()
        && slope(before, last) == slope(last, &mark)
    {
        marks.pop();
    }
    marks.push(mark);
    if marks.len() > MARKS {
        marks.remove(0);
    }
}

/// Returns the sums at a time between two marks. Rates are constant between marks, so the result is exact. Before the
/// first mark, nothing is known, so the result is the first mark.
pub(super) fn between(marks: &[Mark], at_ms: u64) -> Mark {
    let after = marks.partition_point(|mark| mark.at_ms <= at_ms);
    match (after.checked_sub(1).and_then(|before| marks.get(before)), marks.get(after)) {
        (None, first) => first.copied().unwrap_or_default(),
        (Some(last), None) => *last,
        (Some(a), Some(b)) => {
            let (part, whole) = (u128::from(at_ms - a.at_ms), u128::from((b.at_ms - a.at_ms).max(1)));
            // The result lies between both values, so it fits.
            let inner = |from: u64, to: u64| from + (u128::from(to.saturating_sub(from)) * part / whole) as u64;
            Mark {
                at_ms,
                busy: inner(a.busy, b.busy),
                dram: inner(a.dram, b.dram),
                energy_uj: inner(a.energy_uj, b.energy_uj),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_between_marks_are_interpolated() {
        let mark = |at_ms, busy| Mark { at_ms, busy, dram: busy / 2, energy_uj: busy * 2 };
        let mut marks = vec![mark(100, 0), mark(200, 1000), mark(400, 1000)];
        assert_eq!(between(&marks, 150), mark(150, 500));
        assert_eq!(between(&marks, 300), mark(300, 1000));
        assert_eq!(between(&marks, 5), mark(100, 0), "nothing is known before the first mark");
        assert_eq!(between(&marks, 900), mark(400, 1000));
        assert_eq!(between(&[], 5), Mark::default());
        (0..20).for_each(|n| push(&mut marks, mark(1000 + n, 2000)));
        assert_eq!(marks.len(), 5, "the rates did not change: {marks:?}");
        (0..20).for_each(|n| push(&mut marks, mark(2000 + n, 3000 + n * n)));
        assert_eq!(marks.len(), MARKS);
    }

    #[test]
    fn overloaded_place_is_divided_in_proportion() {
        let wants = |busy| Rates { busy, ..Rates::default() };
        let all = wants(900_000).plus(wants(600_000));
        assert_eq!(wants(900_000).granted(all).busy, 600_000);
        assert_eq!(wants(600_000).granted(all).busy, 400_000);
        assert_eq!(wants(600_000).granted(wants(600_000)).busy, 600_000);
    }
}
