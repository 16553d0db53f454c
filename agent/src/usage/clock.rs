//! The present moment, by two clocks: durations come from the monotonic clock, and hours from the wall clock.

use gpush_usage::moment::Moment;
use jiff::Timestamp;
use nix::time::{ClockId, clock_gettime};

/// The clocks of this boot.
#[derive(Debug, Clone, Copy)]
pub(super) struct Clock {
    boot: u64,
}

impl Clock {
    /// Creates the clock. The boot id is a UUID; its first half is enough to tell two boots apart.
    pub(super) fn of_boot(boot_id: &str) -> Self {
        let digits: String = boot_id.chars().filter(char::is_ascii_hexdigit).take(16).collect();
        Self { boot: u64::from_str_radix(&digits, 16).unwrap_or_default() }
    }

    /// Returns the present moment. Time in which the host was suspended counts.
    pub(super) fn now(self) -> Moment {
        // Every Linux that systemd supports has this clock.
        let since_boot = clock_gettime(ClockId::CLOCK_BOOTTIME).map_or(0, |time| {
            let (seconds, nanoseconds) = (time.tv_sec(), time.tv_nsec());
            u64::try_from(seconds).unwrap_or(0) * 1000 + u64::try_from(nanoseconds).unwrap_or(0) / 1_000_000
        });
        Moment { boot: self.boot, monotonic_ms: since_boot, wall_ms: Timestamp::now().as_millisecond() }
    }
}

/// Returns a moment as a time of the wall clock.
pub(super) fn timestamp(moment: Moment) -> Timestamp {
    Timestamp::from_millisecond(moment.wall_ms).unwrap_or(Timestamp::UNIX_EPOCH)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn boots_differ_and_time_moves_forward() {
        let one = Clock::of_boot("0b2f4a53-1c1e-4f0e-9a51-3f0c0a7a4c11");
        assert_eq!(one.boot, 0x0b2f_4a53_1c1e_4f0e);
        assert_ne!(one.boot, Clock::of_boot("1b2f4a53-1c1e-4f0e-9a51-3f0c0a7a4c11").boot);
        assert_eq!(Clock::of_boot("unknown").boot, 0, "it has no digits");
        let (before, after) = (one.now(), one.now());
        assert!(before.monotonic_ms > 0 && before.monotonic_ms <= after.monotonic_ms);
    }
}
