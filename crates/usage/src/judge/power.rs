//! The power that a board needs without work, as the second kind of evidence for idle leases.
//!
//! | level | learned from windows |
//! |---|---|
//! | least | all |
//! | without a process | without a process on the GPU |
//! | with an idle context | with processes, and without activity |
//!
//! An activity sensor can read zero under full load. If it does so from the first process on, the level with a context
//! would be learned from that load. So this level counts only if it is close to the level without a process.

use serde::{Deserialize, Serialize};

use crate::input::Reading;

/// Most power, in mW, that an idle context adds. Published measurements are 26 to 50 W on boards with HBM.
const MOST_CONTEXT_MW: u64 = 60_000;

/// An idle context adds at most this part of the power limit, which matters for small boards.
const CONTEXT_PART_OF_LIMIT: u64 = 4;

/// Least tolerance of a comparison, in mW.
const LEAST_NOISE_MW: u64 = 3_000;

/// Shortest window, in ms, from which a level is learned. The counter is updated only every 20 to 100 ms.
const SHORTEST_LEARNED_MS: u64 = 1_000;

/// How the power of the board compares with the levels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BoardPower {
    /// Not above the level with an idle context.
    Idle,
    /// Above it, although no activity was measured.
    Above,
    /// Other work on the board was measured, so the power says nothing.
    Explained,
    /// There is no reading or no level.
    NotKnown,
}

/// Levels of power of one GPU, in mW.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct PowerLevels {
    /// Least power seen.
    pub least: Option<u64>,
    /// Least power without a process on the GPU.
    pub without_process: Option<u64>,
    /// Least power with a process and without activity.
    pub with_context: Option<u64>,
}

/// What happened in a window from which levels are learned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BoardActivity {
    /// No process was on the GPU, at the start and at the end, and no activity was measured.
    NoProcess,
    /// Processes were on the GPU, and all activity was zero.
    Zero,
    /// Activity was measured, or something is not known.
    Other,
}

impl BoardActivity {
    /// Returns the activity of a window that began with this state: `true` if no lease had a process then.
    pub(crate) fn after(self, was_empty: bool) -> Self {
        match self {
            Self::NoProcess if !was_empty => Self::Other,
            Self::NoProcess | Self::Zero | Self::Other => self,
        }
    }
}

impl PowerLevels {
    /// Learns from the mean power of a window.
    pub(crate) fn learn(&mut self, mean_mw: u64, window_ms: u64, activity: BoardActivity, limit_mw: Reading<u64>) {
        // A board that is on needs power, so 0 is a failed reading.
        if mean_mw == 0 || window_ms < SHORTEST_LEARNED_MS {
            return;
        }
        lower(&mut self.least, mean_mw);
        match activity {
            BoardActivity::NoProcess => lower(&mut self.without_process, mean_mw),
            BoardActivity::Zero if self.highest_idle(limit_mw).is_some_and(|highest| mean_mw <= highest) => {
                lower(&mut self.with_context, mean_mw);
            }
            BoardActivity::Zero | BoardActivity::Other => {}
        }
    }

    /// Compares the mean power of a window in which no activity was measured.
    pub(crate) fn compare(&self, mean_mw: Option<u64>, limit_mw: Reading<u64>) -> BoardPower {
        let (Some(mean), Some(highest)) = (mean_mw, self.highest_idle(limit_mw)) else { return BoardPower::NotKnown };
        if mean <= highest { BoardPower::Idle } else { BoardPower::Above }
    }

    /// Returns the highest power that an idle board with a context can need.
    fn highest_idle(&self, limit_mw: Reading<u64>) -> Option<u64> {
        let context = match limit_mw {
            Reading::Value(limit) => MOST_CONTEXT_MW.min(limit / CONTEXT_PART_OF_LIMIT),
            Reading::Unsupported | Reading::Failed => MOST_CONTEXT_MW,
        };
        let level = self.without_process?.saturating_add(context);
        let level = self.with_context.map_or(level, |seen| level.min(seen));
        Some(level.saturating_add(LEAST_NOISE_MW.max(level / 10)))
    }
}

fn lower(level: &mut Option<u64>, value: u64) {
    *level = Some(level.map_or(value, |level| level.min(value)));
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Reading<u64> = Reading::Value(700_000);

    #[test]
    fn power_is_not_judged_before_the_gpu_was_seen_without_process() {
        let mut levels = PowerLevels::default();
        levels.learn(300_000, 15_000, BoardActivity::Zero, LIMIT);
        assert_eq!(levels.compare(Some(300_000), LIMIT), BoardPower::NotKnown);
        assert_eq!(levels.with_context, None);
        levels.learn(70_000, 15_000, BoardActivity::NoProcess, LIMIT);
        assert_eq!(levels.compare(Some(300_000), LIMIT), BoardPower::Above);
        assert_eq!(levels.compare(Some(115_000), LIMIT), BoardPower::Idle);
        assert_eq!(levels.compare(None, LIMIT), BoardPower::NotKnown);
    }

    #[test]
    fn level_with_context_makes_the_comparison_stricter() {
        let mut levels = PowerLevels::default();
        levels.learn(70_000, 15_000, BoardActivity::NoProcess, LIMIT);
        levels.learn(90_000, 15_000, BoardActivity::Zero, LIMIT);
        assert_eq!(levels.compare(Some(99_000), LIMIT), BoardPower::Idle);
        assert_eq!(levels.compare(Some(115_000), LIMIT), BoardPower::Above);
    }

    /// A sensor that reads zero while a small board needs 20 W instead of 4 W.
    #[test]
    fn small_board_under_load_is_above_its_level() {
        let limit = Reading::Value(25_000);
        let mut levels = PowerLevels::default();
        levels.learn(4_000, 15_000, BoardActivity::NoProcess, limit);
        assert_eq!(levels.compare(Some(20_000), limit), BoardPower::Above);
        levels.learn(20_000, 15_000, BoardActivity::Zero, limit);
        assert_eq!(levels.with_context, None);
    }

    #[test]
    fn zero_and_short_windows_teach_nothing() {
        let mut levels = PowerLevels::default();
        levels.learn(0, 15_000, BoardActivity::NoProcess, LIMIT);
        levels.learn(5, 999, BoardActivity::NoProcess, LIMIT);
        assert_eq!(levels, PowerLevels::default());
    }
}
