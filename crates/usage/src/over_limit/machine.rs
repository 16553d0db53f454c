//! The state machine of one lease. The parent module draws it.

use gpush_api::OverLimitAction;

use super::{
    observe::{MemoryExcess, MemoryReading},
    policy::OverLimitPolicy,
};
use crate::moment::Moment;

/// Number of readings above the limit, in a row, after which the holder gets a notice.
pub const READINGS: u32 = 3;

/// A stage of the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OverLimitStage {
    /// The last reading is within the limit, or not known.
    Within,
    /// The last readings are above the limit, but too few.
    Counting {
        /// Number of readings.
        readings: u32,
        /// Time of the first one.
        since: Moment,
        /// Time of the last one.
        last: Moment,
    },
    /// The holder gets a notice.
    Notified {
        /// Number of the notice.
        notice: u32,
        /// What the notice announces.
        action: OverLimitAction,
        /// Time from the record of the notice to the end, in ms.
        grace_ms: u64,
        /// When the notice was recorded.
        recorded: Option<Moment>,
        /// Time of the first reading above the limit.
        since: Moment,
        /// Time of the last reading.
        last: Moment,
    },
    /// The end of the lease was requested.
    Ending {
        /// Time of the first reading above the limit.
        since: Moment,
    },
}

/// An input of the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OverLimitEvent {
    /// What the last samples say.
    Read(MemoryReading),
    /// A notice was delivered to the holder, or recorded where the holder sees it.
    NoticeRecorded(u32),
    /// The requested end of the lease was refused. The machine begins again.
    EndRefused,
}

/// What a notice reports to the holder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OverLimitReport {
    /// The memory.
    pub excess: MemoryExcess,
    /// Time of the first reading above the limit.
    pub since: Moment,
}

/// An instruction to the caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OverLimitEffect {
    /// Tell the holder, and answer with [`OverLimitEvent::NoticeRecorded`].
    Notify {
        /// Number of the notice.
        notice: u32,
        /// The memory.
        report: OverLimitReport,
        /// What happens if the lease stays above its limit.
        action: OverLimitAction,
        /// Time from the record of the notice to the end, in ms.
        grace_ms: u64,
    },
    /// The last notice does not apply any more.
    Withdraw,
    /// Revoke the lease, and end its processes.
    End(OverLimitReport),
}

/// The state machine of one lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OverLimitMachine {
    stage: OverLimitStage,
    /// Number of the next notice. Numbers do not repeat, so a late record of an old notice is recognized.
    next_notice: u32,
}

impl Default for OverLimitMachine {
    fn default() -> Self {
        Self::new()
    }
}

impl OverLimitMachine {
    /// Returns the machine of a lease that has just been granted, or of any lease after a start of gpushd. A notice from
    /// before the start does not count.
    #[must_use]
    pub fn new() -> Self {
        Self { stage: OverLimitStage::Within, next_notice: 1 }
    }

    /// Returns the stage.
    #[must_use]
    pub fn stage(&self) -> OverLimitStage {
        self.stage
    }

    /// Applies an event. Returns the instruction to the caller, if there is one.
    pub fn step(&mut self, event: OverLimitEvent, policy: &OverLimitPolicy, now: Moment) -> Option<OverLimitEffect> {
        match event {
            OverLimitEvent::Read(MemoryReading::Within | MemoryReading::Unknown) => self.begin_again(),
            OverLimitEvent::Read(MemoryReading::Above { excess, at }) => self.above(excess, at, policy),
            OverLimitEvent::NoticeRecorded(number) => {
                if let OverLimitStage::Notified { notice, recorded, .. } = &mut self.stage
                    && *notice == number
                {
                    *recorded = recorded.or(Some(now));
                }
                None
            }
            OverLimitEvent::EndRefused => {
                self.stage = OverLimitStage::Within;
                None
            }
        }
    }

    fn begin_again(&mut self) -> Option<OverLimitEffect> {
        match std::mem::replace(&mut self.stage, OverLimitStage::Within) {
            OverLimitStage::Notified { .. } => Some(OverLimitEffect::Withdraw),
            OverLimitStage::Within | OverLimitStage::Counting { .. } | OverLimitStage::Ending { .. } => None,
        }
    }

    fn above(&mut self, excess: MemoryExcess, at: Moment, policy: &OverLimitPolicy) -> Option<OverLimitEffect> {
        match self.stage {
            OverLimitStage::Within => {
                self.stage = OverLimitStage::Counting { readings: 1, since: at, last: at };
                None
            }
            OverLimitStage::Counting { readings, since, last } => {
                if at.ms_since(last) == 0 {
                    return None;
                }
                if readings + 1 < READINGS {
                    self.stage = OverLimitStage::Counting { readings: readings + 1, since, last: at };
                    return None;
                }
                Some(self.notify(OverLimitReport { excess, since }, at, policy))
            }
            OverLimitStage::Notified { notice, action, grace_ms, recorded, since, last } => {
                let report = OverLimitReport { excess, since };
                let is_longer = action == OverLimitAction::End && policy.grace_ms > grace_ms;
                if action != policy.action() || is_longer {
                    return Some(self.notify(report, at, policy));
                }
                if at.ms_since(last) == 0 {
                    return None;
                }
                let ends = match (action, recorded) {
                    (OverLimitAction::End, Some(recorded)) => is_passed(recorded, grace_ms, at),
                    (OverLimitAction::End, None) | (OverLimitAction::Report, _) => false,
                };
                if ends {
                    self.stage = OverLimitStage::Ending { since };
                    return Some(OverLimitEffect::End(report));
                }
                self.stage = OverLimitStage::Notified { notice, action, grace_ms, recorded, since, last: at };
                None
            }
            OverLimitStage::Ending { .. } => None,
        }
    }

    fn notify(&mut self, report: OverLimitReport, at: Moment, policy: &OverLimitPolicy) -> OverLimitEffect {
        let (notice, action, grace_ms) = (self.next_notice, policy.action(), policy.grace_ms);
        self.next_notice += 1;
        let since = report.since;
        self.stage = OverLimitStage::Notified { notice, action, grace_ms, recorded: None, since, last: at };
        OverLimitEffect::Notify { notice, report, action, grace_ms }
    }
}

/// Returns whether the grace period had passed when a sample was taken. After a change of the clock of the boot, it has
/// not.
fn is_passed(recorded: Moment, grace_ms: u64, at: Moment) -> bool {
    at.ms_since(recorded) > 0 && at.ms_since(recorded) >= grace_ms
}
