//! The power that a board needs without work, as the second kind of evidence for idle leases.
//!
//! | level | learned from windows |
//! |---|---|
//! | least | all |
//! | without a process | without a process on the GPU |
//! | with an idle context | with the same processes at the start and at the end, and without activity |
//!
//! A level falls at once and rises slowly, so that one low window does not make idle leases undetectable for ever. `least`
//! only falls. It serves only to divide energy into idle and active.
//!
//! An activity sensor can read zero under full load. If it does so from the first process on, the level with a context
//! would be learned from that load. So this level counts only if it is close to the level without a process.
//!
//! While other GPU instances work, the power of the board can only refute that a lease is idle: their measured activity
//! explains a limited part of the power limit.

use serde::{Deserialize, Serialize};

use crate::input::Reading;

/// Most power, in mW, that an idle context adds. Published measurements are 26 to 50 W on boards with HBM.
const MOST_CONTEXT_MW: u64 = 60_000;

/// An idle context adds at most 1/`CONTEXT_PART_OF_LIMIT` of the power limit. This bound matters for small boards.
const CONTEXT_PART_OF_LIMIT: u64 = 4;

/// Least tolerance of a comparison, in mW.
const LEAST_NOISE_MW: u64 = 3_000;

/// Shortest window, in ms, from which a level is learned. The counter is updated only every 20 to 100 ms.
const SHORTEST_LEARNED_MS: u64 = 1_000;

/// Time in ms in which a level rises by about two thirds of the difference to the power of its windows. So a level that one
/// wrong window has lowered is right again after a few hours.
const RISING_MS: u64 = 3_600_000;

/// Most power that a GPU instance needs, as a multiple of its part of the power limit. An instance with busy neighbours has
/// lower clocks than one alone, and a kernel can need much power with few active SMs.
const MOST_PER_WORK: u64 = 2;

/// The power of the board in comparison with the levels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BoardPower {
    /// Not above the level with an idle context.
    Idle,
    /// Above it, although no activity was measured.
    Above,
    /// Other work on the board was measured, and any power up to this one could come from it.
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

/// The activity in a window from which levels are learned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BoardActivity {
    /// No process was on the GPU, and no activity was measured.
    NoProcess,
    /// Processes were on the GPU, and all activity was zero.
    Zero,
    /// Activity was measured, or something is not known.
    Other,
}

impl BoardActivity {
    /// Returns the activity of the whole window. `is_same` says whether the GPU had the same processes at its start: a
    /// process can need power without activity while it starts or ends.
    pub(crate) fn after(self, is_same: bool) -> Self {
        if is_same { self } else { Self::Other }
    }
}

impl PowerLevels {
    /// Learns from the mean power of a window.
    pub(crate) fn learn(&mut self, mean_mw: u64, window_ms: u64, activity: BoardActivity, limit_mw: Reading<u64>) {
        // A board that is on needs power, so 0 is a failed reading.
        if mean_mw == 0 || window_ms < SHORTEST_LEARNED_MS {
            return;
        }
        self.least = Some(self.least.map_or(mean_mw, |least| least.min(mean_mw)));
        match activity {
            BoardActivity::NoProcess => follow(&mut self.without_process, mean_mw, window_ms),
            BoardActivity::Zero if self.highest_context(limit_mw).is_some_and(|level| mean_mw <= tolerated(level)) => {
                follow(&mut self.with_context, mean_mw, window_ms);
            }
            BoardActivity::Zero | BoardActivity::Other => {}
        }
    }

    /// Compares the mean power of a window in which no activity was measured.
    pub(crate) fn compare(&self, mean_mw: Option<u64>, limit_mw: Reading<u64>) -> BoardPower {
        let (Some(mean), Some(highest)) = (mean_mw, self.highest_idle(limit_mw)) else { return BoardPower::NotKnown };
        if mean <= highest { BoardPower::Idle } else { BoardPower::Above }
    }

    /// Compares the mean power of a window in which only other GPU instances worked. `work` is their activity, as a part of
    /// the GPU in millionths.
    pub(crate) fn compare_beside(&self, mean_mw: Option<u64>, limit_mw: Reading<u64>, work: u32) -> BoardPower {
        let (Some(mean), Reading::Value(limit), Some(idle), Some(without)) =
            (mean_mw, limit_mw, self.highest_idle(limit_mw), self.without_process)
        else {
            return BoardPower::Explained;
        };
        let most = u128::from(limit.saturating_sub(without)) * u128::from(work) * u128::from(MOST_PER_WORK) / 1_000_000;
        let most = u64::try_from(most).unwrap_or(u64::MAX).saturating_add(idle);
        if mean <= most { BoardPower::Explained } else { BoardPower::Above }
    }

    /// Returns the highest power that an idle board with a context can need, as far as it is known.
    fn highest_idle(&self, limit_mw: Reading<u64>) -> Option<u64> {
        let highest = self.highest_context(limit_mw)?;
        Some(tolerated(self.with_context.map_or(highest, |seen| highest.min(seen))))
    }

    /// Returns the highest level with an idle context that is possible for a board with this level without a process.
    fn highest_context(&self, limit_mw: Reading<u64>) -> Option<u64> {
        let context = match limit_mw {
            Reading::Value(limit) => MOST_CONTEXT_MW.min(limit / CONTEXT_PART_OF_LIMIT),
            Reading::Unsupported | Reading::Failed => MOST_CONTEXT_MW,
        };
        Some(self.without_process?.saturating_add(context))
    }
}

/// Returns the highest power that still counts as a level.
fn tolerated(level: u64) -> u64 {
    level.saturating_add(LEAST_NOISE_MW.max(level / 10))
}

/// Lowers a level to the power of a window, or raises it by the part of [`RISING_MS`] that the window lasts.
fn follow(level: &mut Option<u64>, mean_mw: u64, window_ms: u64) {
    let Some(before) = *level else {
        *level = Some(mean_mw);
        return;
    };
    let above = u128::from(mean_mw.saturating_sub(before));
    let rise = (above * u128::from(window_ms.min(RISING_MS))).div_ceil(u128::from(RISING_MS));
    *level = Some(before.saturating_add(u64::try_from(rise).unwrap_or(0)).min(mean_mw));
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

    /// Fault: a process created its context at the end of a window. The mean became the level for ever, and no lease with
    /// an idle context at 110 W was idle any more.
    #[test]
    fn level_that_is_too_low_rises_again() {
        let mut levels = PowerLevels::default();
        levels.learn(70_000, 15_000, BoardActivity::NoProcess, LIMIT);
        levels.learn(73_000, 15_000, BoardActivity::Zero, LIMIT);
        assert_eq!(levels.compare(Some(110_000), LIMIT), BoardPower::Above);
        for _ in 0..8 * 240 {
            levels.learn(110_000, 15_000, BoardActivity::Zero, LIMIT);
        }
        assert_eq!(levels.compare(Some(110_000), LIMIT), BoardPower::Idle);
        for _ in 0..8 * 240 {
            levels.learn(300_000, 15_000, BoardActivity::Zero, LIMIT);
        }
        assert_eq!(levels.compare(Some(300_000), LIMIT), BoardPower::Above, "no idle context needs 230 W");
        levels.learn(90_000, 15_000, BoardActivity::Zero, LIMIT);
        assert_eq!(levels.with_context, Some(90_000), "a level falls at once");
    }

    /// Fault: any work of a neighbour explained any power of the board.
    #[test]
    fn work_of_neighbours_explains_a_part_of_the_limit() {
        let levels = PowerLevels { least: Some(70_000), without_process: Some(70_000), with_context: Some(100_000) };
        let compare = |mw, work| levels.compare_beside(Some(mw), LIMIT, work);
        assert_eq!(compare(110_000, 0), BoardPower::Explained);
        assert_eq!(compare(111_000, 0), BoardPower::Above);
        assert_eq!(compare(700_000, 40_000), BoardPower::Above);
        assert_eq!(compare(400_000, 250_000), BoardPower::Explained);
        assert_eq!(compare(700_000, 500_000), BoardPower::Explained);
        assert_eq!(levels.compare_beside(None, LIMIT, 0), BoardPower::Explained);
        assert_eq!(levels.compare_beside(Some(700_000), Reading::Failed, 0), BoardPower::Explained);
        assert_eq!(PowerLevels::default().compare_beside(Some(700_000), LIMIT, 0), BoardPower::Explained);
    }

    #[test]
    fn zero_and_short_windows_teach_nothing() {
        let mut levels = PowerLevels::default();
        levels.learn(0, 15_000, BoardActivity::NoProcess, LIMIT);
        levels.learn(5, 999, BoardActivity::NoProcess, LIMIT);
        assert_eq!(levels, PowerLevels::default());
    }
}
