//! The clock of a simulated host.
//!
//! All programs of a host read this clock for the times of its GPUs: samples, energy, timestamps. It follows the real
//! clock, and a test can advance, stop or set it. Timeouts, delays of faults and latencies use the real clock.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The clock of a host. Times are in milliseconds since the epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Clock {
    /// Differs from the real clock by a constant.
    Running {
        /// Simulated time less real time, in ms.
        offset_ms: i64,
    },
    /// Shows the same time until it is advanced, set or started.
    Stopped {
        /// The time.
        at_ms: u64,
    },
}

impl Default for Clock {
    fn default() -> Self {
        Self::Running { offset_ms: 0 }
    }
}

impl Clock {
    /// Returns the simulated time at a real time.
    #[must_use]
    pub fn at(self, real_ms: u64) -> u64 {
        match self {
            Self::Running { offset_ms } => real_ms.saturating_add_signed(offset_ms),
            Self::Stopped { at_ms } => at_ms,
        }
    }

    /// Returns the clock, advanced by a duration.
    #[must_use]
    pub fn advanced(self, by: Duration) -> Self {
        let by_ms = u64::try_from(by.as_millis()).unwrap_or(u64::MAX);
        match self {
            Self::Running { offset_ms } => Self::Running { offset_ms: offset_ms.saturating_add_unsigned(by_ms) },
            Self::Stopped { at_ms } => Self::Stopped { at_ms: at_ms.saturating_add(by_ms) },
        }
    }

    /// Returns the clock, set to a time. A stopped clock stays stopped.
    #[must_use]
    pub fn set(self, to_ms: u64, real_ms: u64) -> Self {
        match self {
            Self::Running { .. } => Self::Running { offset_ms: to_ms.wrapping_sub(real_ms).cast_signed() },
            Self::Stopped { .. } => Self::Stopped { at_ms: to_ms },
        }
    }

    /// Returns the clock, stopped at its present time.
    #[must_use]
    pub fn stopped(self, real_ms: u64) -> Self {
        Self::Stopped { at_ms: self.at(real_ms) }
    }

    /// Returns the clock, running on from its present time.
    #[must_use]
    pub fn started(self, real_ms: u64) -> Self {
        Self::Running { offset_ms: self.at(real_ms).wrapping_sub(real_ms).cast_signed() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clock_keeps_its_time_when_stopped_and_started() {
        let clock = Clock::default().advanced(Duration::from_secs(5));
        assert_eq!(clock.at(1000), 6000);
        let stopped = clock.stopped(2000);
        assert_eq!((stopped.at(2000), stopped.at(9000)), (7000, 7000));
        assert_eq!(stopped.advanced(Duration::from_millis(1)).at(9000), 7001);
        let started = stopped.started(9000);
        assert_eq!((started.at(9000), started.at(9500)), (7000, 7500));
        assert_eq!(started.set(100, 9000).at(9001), 101);
        assert_eq!(stopped.set(100, 9000).at(9001), 100);
    }
}
