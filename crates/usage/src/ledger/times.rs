//! Time by state.

use std::ops::AddAssign;

use serde::{Deserialize, Serialize};

use crate::judge::UseState;

/// Milliseconds that a lease has spent in each state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct StateTimes {
    /// Milliseconds of work.
    #[serde(skip_serializing_if = "is_zero")]
    pub busy_ms: u64,
    /// Milliseconds with a process and without work.
    #[serde(skip_serializing_if = "is_zero")]
    pub idle_ms: u64,
    /// Milliseconds without a process.
    #[serde(skip_serializing_if = "is_zero")]
    pub empty_ms: u64,
    /// Milliseconds of unknown use.
    #[serde(skip_serializing_if = "is_zero")]
    pub unknown_ms: u64,
}

/// Returns whether a sum is 0. Rows leave out such sums.
#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
pub(super) fn is_zero(sum: &u64) -> bool {
    *sum == 0
}

impl StateTimes {
    /// Adds a time in one state.
    pub fn add(&mut self, state: UseState, ms: u64) {
        let sum = match state {
            UseState::Busy => &mut self.busy_ms,
            UseState::Idle => &mut self.idle_ms,
            UseState::Empty => &mut self.empty_ms,
            UseState::Unknown => &mut self.unknown_ms,
        };
        *sum += ms;
    }

    /// Returns the whole time that the lease was held.
    #[must_use]
    pub fn held_ms(&self) -> u64 {
        self.busy_ms + self.idle_ms + self.empty_ms + self.unknown_ms
    }

    /// Returns the time without work: idle and empty.
    #[must_use]
    pub fn unused_ms(&self) -> u64 {
        self.idle_ms + self.empty_ms
    }
}

impl AddAssign for StateTimes {
    fn add_assign(&mut self, other: Self) {
        self.busy_ms += other.busy_ms;
        self.idle_ms += other.idle_ms;
        self.empty_ms += other.empty_ms;
        self.unknown_ms += other.unknown_ms;
    }
}
