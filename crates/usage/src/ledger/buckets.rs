//! The recent past of a lease in minutes, hours and days, in fixed size.

use crate::{
    judge::UseState,
    moment::{DAY_MS, HOUR_MS},
};

/// Numbers of buckets of each length.
const MINUTES: usize = 60;
const HOURS: usize = 24;
const DAYS: usize = 7;

const MINUTE_MS: i64 = 60_000;

/// One minute, hour or day of a lease. Times are in ms.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Bucket {
    /// Time of work.
    pub busy_ms: u32,
    /// Time without work.
    pub unused_ms: u32,
    /// Unknown time.
    pub unknown_ms: u32,
    /// Largest memory in MiB.
    pub memory_peak_mib: u32,
    /// Energy in mJ.
    pub energy_mj: u64,
}

/// The last buckets of one length.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Ring<const N: usize> {
    length_ms: i64,
    /// Number of the newest bucket: its start divided by its length.
    newest: Option<i64>,
    buckets: [Bucket; N],
}

impl<const N: usize> Ring<N> {
    fn new(length_ms: i64) -> Self {
        Self { length_ms, newest: None, buckets: [Bucket::default(); N] }
    }

    /// Returns the bucket of a time. A time before the oldest bucket means that the wall clock was set back; then the ring
    /// begins again.
    fn bucket(&mut self, wall_ms: i64) -> &mut Bucket {
        let number = wall_ms.div_euclid(self.length_ms);
        let count = i64::try_from(N).unwrap_or(i64::MAX);
        match self.newest {
            Some(newest) if number <= newest && newest - number < count => {}
            Some(newest) if number > newest && number - newest < count => {
                for passed in newest + 1..=number {
                    self.buckets[Self::place(passed)] = Bucket::default();
                }
                self.newest = Some(number);
            }
            Some(_) | None => {
                self.buckets = [Bucket::default(); N];
                self.newest = Some(number);
            }
        }
        &mut self.buckets[Self::place(number)]
    }

    fn place(number: i64) -> usize {
        let count = i64::try_from(N).unwrap_or(i64::MAX);
        usize::try_from(number.rem_euclid(count)).unwrap_or_default()
    }

    fn parts(&self, from_ms: i64, length_ms: u64) -> Vec<(i64, u32)> {
        let oldest = i64::try_from(N).unwrap_or(i64::MAX).saturating_mul(self.length_ms);
        let until = from_ms.saturating_add(i64::try_from(length_ms).unwrap_or(i64::MAX));
        // Only the last buckets are kept, so a long time needs no more steps than there are buckets.
        let mut at = from_ms.max(until.saturating_sub(oldest));
        let mut parts = Vec::new();
        while at < until {
            let next = (at.div_euclid(self.length_ms) + 1).saturating_mul(self.length_ms).min(until);
            parts.push((at, u32::try_from(next - at).unwrap_or(u32::MAX)));
            at = next;
        }
        parts
    }

    fn list(&self) -> Vec<(i64, Bucket)> {
        let Some(newest) = self.newest else { return Vec::new() };
        let count = i64::try_from(N).unwrap_or(i64::MAX);
        let all =
            (newest - count + 1..=newest).map(|number| (number * self.length_ms, self.buckets[Self::place(number)]));
        all.skip_while(|(_, bucket)| *bucket == Bucket::default()).collect()
    }
}

/// The last 60 minutes, 24 hours and 7 days of a lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Buckets {
    minutes: Ring<MINUTES>,
    hours: Ring<HOURS>,
    days: Ring<DAYS>,
}

impl Default for Buckets {
    fn default() -> Self {
        Self { minutes: Ring::new(MINUTE_MS), hours: Ring::new(HOUR_MS), days: Ring::new(DAY_MS) }
    }
}

impl Buckets {
    pub(crate) fn add_time(&mut self, from_ms: i64, length_ms: u64, state: UseState) {
        add_time(&mut self.minutes, from_ms, length_ms, state);
        add_time(&mut self.hours, from_ms, length_ms, state);
        add_time(&mut self.days, from_ms, length_ms, state);
    }

    pub(crate) fn add_sample(&mut self, at_ms: i64, memory_mib: Option<u64>, energy_mj: u64) {
        let memory = u32::try_from(memory_mib.unwrap_or(0)).unwrap_or(u32::MAX);
        let buckets = [self.minutes.bucket(at_ms), self.hours.bucket(at_ms), self.days.bucket(at_ms)];
        for bucket in buckets {
            bucket.memory_peak_mib = bucket.memory_peak_mib.max(memory);
            bucket.energy_mj += energy_mj;
        }
    }

    /// Returns the start of each minute and its bucket, the oldest first.
    #[must_use]
    pub fn minutes(&self) -> Vec<(i64, Bucket)> {
        self.minutes.list()
    }

    /// Returns the start of each hour and its bucket, the oldest first.
    #[must_use]
    pub fn hours(&self) -> Vec<(i64, Bucket)> {
        self.hours.list()
    }

    /// Returns the start of each UTC day and its bucket, the oldest first.
    #[must_use]
    pub fn days(&self) -> Vec<(i64, Bucket)> {
        self.days.list()
    }
}

fn add_time<const N: usize>(ring: &mut Ring<N>, from_ms: i64, length_ms: u64, state: UseState) {
    for (at, ms) in ring.parts(from_ms, length_ms) {
        let bucket = ring.bucket(at);
        let sum = match state {
            UseState::Busy => &mut bucket.busy_ms,
            UseState::Idle | UseState::Empty => &mut bucket.unused_ms,
            UseState::Unknown => &mut bucket.unknown_ms,
        };
        *sum = sum.saturating_add(ms);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_falls_into_its_minutes_hours_and_days() {
        let mut buckets = Buckets::default();
        buckets.add_time(DAY_MS - 90_000, 120_000, UseState::Busy);
        let busy: Vec<(i64, u32)> = buckets.minutes().iter().map(|(at, bucket)| (*at, bucket.busy_ms)).collect();
        assert_eq!(busy, [(DAY_MS - 120_000, 30_000), (DAY_MS - 60_000, 60_000), (DAY_MS, 30_000)]);
        assert_eq!(buckets.hours().len(), 2);
        assert_eq!(buckets.days().iter().map(|(_, bucket)| bucket.busy_ms).collect::<Vec<_>>(), [90_000, 30_000]);
    }

    #[test]
    fn old_buckets_are_replaced() {
        let mut buckets = Buckets::default();
        buckets.add_time(0, 1_000, UseState::Idle);
        buckets.add_time(59 * MINUTE_MS, 1_000, UseState::Unknown);
        assert_eq!(buckets.minutes().len(), 60);
        buckets.add_time(60 * MINUTE_MS, 1_000, UseState::Busy);
        assert_eq!(buckets.minutes().first().map(|(at, _)| *at), Some(59 * MINUTE_MS));
        buckets.add_time(0, u64::MAX, UseState::Busy);
        assert_eq!(buckets.minutes().len(), 60);
    }

    #[test]
    fn clock_set_back_begins_the_ring_again() {
        let mut buckets = Buckets::default();
        buckets.add_time(10 * DAY_MS, 1_000, UseState::Busy);
        buckets.add_time(DAY_MS, 500, UseState::Busy);
        assert_eq!(buckets.minutes(), [(DAY_MS, Bucket { busy_ms: 500, ..Bucket::default() })]);
        buckets.add_time(DAY_MS - MINUTE_MS, 500, UseState::Busy);
        assert_eq!(buckets.minutes().len(), 2);
    }

    /// 200 leases must stay far below 2 MiB.
    #[test]
    fn buckets_of_a_lease_have_a_fixed_size() {
        assert!(size_of::<Buckets>() < 2_400, "{}", size_of::<Buckets>());
    }
}
