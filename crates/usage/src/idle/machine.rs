//! The state machine of one lease. The parent module draws it.

use super::{
    keep::Keep,
    policy::{IdleAction, IdleDeadline, IdlePolicy, LeaseTerms},
};
use crate::{judge::UseState, moment::Moment};

/// A stage of the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IdleStage {
    /// Nothing is due.
    Watching,
    /// The holder was warned.
    Warned {
        /// Number of the last notice.
        notice: u32,
        /// The warning: time before the deadline, in ms.
        before_ms: u64,
        /// When the first notice of this unused time was recorded.
        recorded: Option<Moment>,
    },
    /// The lease was reported, or its end was requested. Lasts until the lease is used or ended.
    Done {
        /// The action.
        action: IdleAction,
    },
}

/// An input of the machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum IdleEvent {
    /// The present state of the lease.
    Observed {
        /// State.
        state: UseState,
        /// Start of this state.
        since: Moment,
        /// Start of the time in which the lease was idle or empty without interruption.
        unused_since: Option<Moment>,
    },
    /// A notice was delivered to the holder, or recorded where the holder sees it.
    NoticeRecorded(u32),
    /// The holder or an administrator keeps the lease.
    Kept(Keep),
    /// The requested end of the lease was refused. The machine begins again.
    EndRefused,
}

/// The unused time that a notice reports to the holder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UnusedReport {
    /// Start of the unused time.
    pub unused_since: Moment,
    /// When the action is due. With `action = "warn"`, nothing ends then.
    pub deadline: IdleDeadline,
}

/// An instruction to the caller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum IdleEffect {
    /// Tell the holder, and answer with [`IdleEvent::NoticeRecorded`].
    Warn {
        /// Number of the notice.
        notice: u32,
        /// The unused time.
        report: UnusedReport,
        /// Action at the deadline.
        action: IdleAction,
    },
    /// The lease is used, kept or exempt again: the last warning does not apply any more.
    Withdraw,
    /// Report the unused lease.
    Report(UnusedReport),
    /// Release the lease. Its processes may finish.
    Release(UnusedReport),
    /// Release the lease, and end its processes.
    End(UnusedReport),
}

/// The state machine of one lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IdleMachine {
    stage: IdleStage,
    /// Number of the next notice. Numbers do not repeat, so a late record of an old notice is recognized.
    next_notice: u32,
    /// Number of the first notice about the present unused time.
    first_notice: u32,
    keep: Option<Keep>,
}

impl Default for IdleMachine {
    fn default() -> Self {
        Self::new()
    }
}

impl IdleMachine {
    /// Returns the machine of a lease that has just been granted, or of any lease after a start of gpushd. A notice from
    /// before the start does not count.
    #[must_use]
    pub fn new() -> Self {
        Self { stage: IdleStage::Watching, next_notice: 1, first_notice: 1, keep: None }
    }

    /// Returns the stage.
    #[must_use]
    pub fn stage(&self) -> IdleStage {
        self.stage
    }

    /// Returns the keep, if it has not ended.
    #[must_use]
    pub fn keep(&self, now: Moment) -> Option<&Keep> {
        self.keep.as_ref().filter(|keep| keep.until.ms_since(now) > 0)
    }

    /// Returns the end of the last keep, which may have passed.
    pub(super) fn kept_until(&self) -> Option<Moment> {
        self.keep.as_ref().map(|keep| keep.until)
    }

    /// Returns the number of notices about the present unused time.
    #[must_use]
    pub fn warnings(&self) -> u32 {
        self.next_notice - self.first_notice
    }

    /// Returns the last notice if it is not recorded yet.
    #[must_use]
    pub fn unrecorded_notice(&self) -> Option<u32> {
        match self.stage {
            IdleStage::Warned { notice, recorded: None, .. } => Some(notice),
            IdleStage::Warned { recorded: Some(_), .. } | IdleStage::Watching | IdleStage::Done { .. } => None,
        }
    }

    /// Applies an event. Returns the instructions to the caller, in order.
    pub fn step(&mut self, event: IdleEvent, policy: &IdlePolicy, terms: LeaseTerms, now: Moment) -> Vec<IdleEffect> {
        match event {
            IdleEvent::Observed { state, since, unused_since } => match (state, unused_since) {
                (UseState::Idle | UseState::Empty, Some(unused)) if !terms.is_exempt && self.keep(now).is_none() => {
                    self.unused(state, unused, since, policy, terms, now)
                }
                (UseState::Busy | UseState::Unknown | UseState::Idle | UseState::Empty, _) => self.begin_again(),
            },
            IdleEvent::NoticeRecorded(notice) => {
                let is_present = notice >= self.first_notice && notice < self.next_notice;
                if let IdleStage::Warned { recorded, .. } = &mut self.stage
                    && is_present
                {
                    *recorded = recorded.or(Some(now));
                }
                Vec::new()
            }
            IdleEvent::Kept(keep) => {
                self.keep = Some(keep);
                self.begin_again()
            }
            IdleEvent::EndRefused => {
                self.stage = IdleStage::Watching;
                self.first_notice = self.next_notice;
                Vec::new()
            }
        }
    }

    fn begin_again(&mut self) -> Vec<IdleEffect> {
        self.first_notice = self.next_notice;
        match std::mem::replace(&mut self.stage, IdleStage::Watching) {
            IdleStage::Warned { .. } => vec![IdleEffect::Withdraw],
            IdleStage::Watching | IdleStage::Done { .. } => Vec::new(),
        }
    }

    fn unused(
        &mut self,
        state: UseState,
        unused: Moment,
        since: Moment,
        policy: &IdlePolicy,
        terms: LeaseTerms,
        now: Moment,
    ) -> Vec<IdleEffect> {
        let deadline = policy.deadline(terms, state, unused, since, self.kept_until());
        let report = UnusedReport { unused_since: unused, deadline };
        let action = policy.action_for(terms);
        let is_due = is_reached(deadline.at, now);
        if let IdleStage::Done { action: done } = self.stage {
            // After a reload of the config, the action can be stricter than the report that was made.
            if done == action || matches!(done, IdleAction::Release | IdleAction::End) {
                return Vec::new();
            }
            self.stage = IdleStage::Watching;
        }
        match action {
            IdleAction::Report if is_due => {
                self.stage = IdleStage::Done { action };
                vec![IdleEffect::Report(report)]
            }
            IdleAction::Report => Vec::new(),
            IdleAction::Warn | IdleAction::Release | IdleAction::End => {
                let warnings = policy.warnings(deadline);
                if let Some(warning) = self.due_warning(deadline, &warnings, now) {
                    return vec![self.warn(warning, report, action)];
                }
                let shortest = warnings.first().copied().unwrap_or(0);
                if !is_due || !self.is_warned_since(shortest, now) {
                    return Vec::new();
                }
                self.stage = IdleStage::Done { action };
                vec![match action {
                    IdleAction::Report | IdleAction::Warn => IdleEffect::Report(report),
                    IdleAction::Release => IdleEffect::Release(report),
                    IdleAction::End => IdleEffect::End(report),
                }]
            }
        }
    }

    /// Returns the shortest warning that is due, if it is shorter than the last one. Several due warnings count as one.
    fn due_warning(&self, deadline: IdleDeadline, warnings: &[u64], now: Moment) -> Option<u64> {
        let last = match self.stage {
            IdleStage::Warned { before_ms, .. } => Some(before_ms),
            IdleStage::Watching | IdleStage::Done { .. } => None,
        };
        let left = deadline.at.ms_since(now);
        let due = warnings.iter().copied().find(|before| left <= *before)?;
        last.is_none_or(|last| due < last).then_some(due)
    }

    fn warn(&mut self, before_ms: u64, report: UnusedReport, action: IdleAction) -> IdleEffect {
        let recorded = match self.stage {
            IdleStage::Warned { recorded, .. } => recorded,
            IdleStage::Watching | IdleStage::Done { .. } => None,
        };
        let notice = self.next_notice;
        self.next_notice += 1;
        self.stage = IdleStage::Warned { notice, before_ms, recorded };
        IdleEffect::Warn { notice, report, action }
    }

    /// Returns whether a notice was recorded, and this time has passed since.
    fn is_warned_since(&self, ms: u64, now: Moment) -> bool {
        match self.stage {
            IdleStage::Warned { recorded: Some(recorded), .. } => is_reached(recorded.plus_ms(ms), now),
            IdleStage::Warned { recorded: None, .. } | IdleStage::Watching | IdleStage::Done { .. } => false,
        }
    }
}

fn is_reached(at: Moment, now: Moment) -> bool {
    at.ms_since(now) == 0
}
