//! The memory of a lease over time: mean, peak and percentiles, in fixed size.

use serde::{Deserialize, Serialize};

/// Number of bins of the histogram.
const BINS: u64 = 128;

/// A histogram of memory use, weighted by time.
///
/// The bins divide the memory of the share evenly, so a percentile is at most 1/128 of the share's memory too high, and
/// never too low. More memory than the share has is in the last bin; there the percentile is the peak.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct MemoryHistogram {
    /// Memory of the share in MiB.
    scale_mib: u64,
    /// Milliseconds in each bin; empty before the first reading.
    bins: Vec<u64>,
    peak_mib: u64,
}

impl MemoryHistogram {
    /// Returns an empty histogram for a share with this much memory.
    #[must_use]
    pub fn new(scale_mib: u64) -> Self {
        Self { scale_mib: scale_mib.max(1), bins: Vec::new(), peak_mib: 0 }
    }

    /// Adds a time with this much memory in use.
    pub fn add(&mut self, mib: u64, ms: u64) {
        self.peak_mib = self.peak_mib.max(mib);
        if self.bins.is_empty() {
            self.bins = vec![0; usize::try_from(BINS).unwrap_or_default()];
        }
        let bin = (u128::from(mib) * u128::from(BINS) / u128::from(self.scale_mib.max(1))).min(u128::from(BINS - 1));
        if let Some(weight) = usize::try_from(bin).ok().and_then(|bin| self.bins.get_mut(bin)) {
            *weight += ms;
        }
    }

    /// Returns the largest memory use in MiB.
    #[must_use]
    pub fn peak_mib(&self) -> u64 {
        self.peak_mib
    }

    /// Returns the memory in MiB that was not exceeded in this percentage of the time; `None` without a reading.
    #[must_use]
    pub fn percentile_mib(&self, percent: u8) -> Option<u64> {
        let all: u128 = self.bins.iter().map(|ms| u128::from(*ms)).sum();
        if all == 0 {
            return None;
        }
        let wanted = (all * u128::from(percent.min(100))).div_ceil(100).max(1);
        let mut sum = 0;
        let last = self.bins.len().saturating_sub(1);
        for (bin, ms) in self.bins.iter().enumerate() {
            sum += u128::from(*ms);
            if sum >= wanted {
                let upper = u128::from(self.scale_mib) * (u128::try_from(bin).unwrap_or_default() + 1);
                let upper = u64::try_from(upper.div_ceil(u128::from(BINS))).unwrap_or(u64::MAX);
                return Some(if bin == last { self.peak_mib } else { upper.min(self.peak_mib) });
            }
        }
        Some(self.peak_mib)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn percentile_without_a_reading_is_absent() {
        assert_eq!(MemoryHistogram::new(100).percentile_mib(98), None);
    }

    #[test]
    fn short_peak_is_not_in_the_percentile() {
        let mut histogram = MemoryHistogram::new(81_920);
        histogram.add(1_000, 99_000);
        histogram.add(70_000, 1_000);
        assert_eq!(histogram.peak_mib(), 70_000);
        assert_eq!(histogram.percentile_mib(98), Some(1_280));
        assert_eq!(histogram.percentile_mib(100), Some(70_000));
    }

    proptest! {
        #[test]
        fn percentile_is_at_most_one_bin_too_high(
            scale in 1..300_000_u64,
            uses in prop::collection::vec((0..400_000_u64, 1..100_000_u64), 1..60),
            percent in 1..=100_u8,
        ) {
            let mut histogram = MemoryHistogram::new(scale);
            for (mib, ms) in &uses {
                histogram.add(*mib, *ms);
            }
            let mut sorted = uses.clone();
            sorted.sort_unstable();
            let all: u64 = sorted.iter().map(|(_, ms)| ms).sum();
            let mut sum = 0;
            let exact = sorted.iter().find(|(_, ms)| {
                sum += ms;
                sum * 100 >= all * u64::from(percent)
            });
            let exact = exact.unwrap().0;
            let found = histogram.percentile_mib(percent).unwrap();
            prop_assert!(found >= exact, "{} is below {}", found, exact);
            let peak = uses.iter().map(|(mib, _)| *mib).max().unwrap();
            let is_in_last_bin = exact * BINS / scale >= BINS - 1;
            let most = if is_in_last_bin { peak } else { (exact + scale.div_ceil(BINS) + 1).min(peak) };
            prop_assert!(found <= most, "{} is above {}", found, most);
        }
    }
}
