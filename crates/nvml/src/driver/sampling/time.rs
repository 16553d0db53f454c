//! The driver's clock, and the time up to which its buffers were read.

/// Difference between two clock readings of one sample that is no sign of a clock that was set back.
const TOLERANCE_US: u64 = 1_000_000;

/// The driver's clock. It is the host's real-time clock, so it can be set back.
#[derive(Debug, Default)]
pub(super) struct DriverTime {
    newest_us: u64,
    wall_us: u64,
    /// Newest entry of the utilization buffer.
    pub(super) utilization_us: u64,
    /// Newest entry of the process utilization.
    pub(super) processes_us: u64,
}

impl DriverTime {
    /// Accepts the time of new values. Returns whether the values are newer than the last ones.
    pub(super) fn accept(&mut self, at_us: u64, wall_us: u64) -> bool {
        if wall_us < self.wall_us {
            // The host's clock was set back, so older times are right.
            *self = Self::default();
        }
        self.wall_us = wall_us;
        let fresh = at_us > self.newest_us;
        self.newest_us = self.newest_us.max(at_us);
        fresh
    }

    /// Limits the times of entries to the present. After the clock was set back, the driver's buffers still have entries of
    /// later times. Such a time must not hide the entries of the next samples.
    pub(super) fn limit_entries(&mut self) {
        let latest = self.newest_us.max(self.wall_us).saturating_add(TOLERANCE_US);
        self.utilization_us = self.utilization_us.min(latest);
        self.processes_us = self.processes_us.min(latest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_times_are_stale_unless_the_clock_was_set_back() {
        let mut time = DriverTime::default();
        assert!(time.accept(1000, 1000));
        assert!(!time.accept(1000, 1001), "the same values");
        assert!(!time.accept(400, 1100));
        assert!(time.accept(1200, 1200));
        assert!(time.accept(500, 500), "the clock was set back");
        assert!(!time.accept(500, 501));
    }

    /// Fault: the clock was set back by an hour, and the use of processes was unknown for an hour.
    #[test]
    fn clock_set_back_makes_buffers_readable_again() {
        const HOUR_US: u64 = 3_600_000_000;
        let mut time = DriverTime::default();
        time.accept(2 * HOUR_US, 2 * HOUR_US);
        (time.utilization_us, time.processes_us) = (2 * HOUR_US - 1, 2 * HOUR_US - 2);
        time.limit_entries();
        assert_eq!((time.utilization_us, time.processes_us), (2 * HOUR_US - 1, 2 * HOUR_US - 2));
        time.accept(HOUR_US, HOUR_US);
        assert_eq!((time.utilization_us, time.processes_us), (0, 0));
        // The driver still has entries of the time before.
        (time.utilization_us, time.processes_us) = (2 * HOUR_US, HOUR_US);
        time.limit_entries();
        assert_eq!((time.utilization_us, time.processes_us), (HOUR_US + TOLERANCE_US, HOUR_US));
    }
}
