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
        /// The warning: time before the end, in ms.
        before_ms: u64,
        /// When the first notice of this announcement was recorded.
        recorded: Option<Moment>,
        /// What the notices announce.
        announced: Announced,
    },
    /// The lease was reported, or its end was requested. Lasts until the lease is used or ended.
    Done {
        /// The action.
        action: IdleAction,
    },
}

/// What notices announce. If another action becomes due, or the deadline moves to an earlier time, they do not count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Announced {
    /// Action.
    pub action: IdleAction,
    /// Deadline of the policy.
    pub deadline: Moment,
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
                self.forget_notices();
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
        match self.stage {
            // A reload of the config can demand more than the report that was made.
            IdleStage::Done { action: done } if done == action || done.ends_leases() => return Vec::new(),
            IdleStage::Done { .. } => self.forget_notices(),
            IdleStage::Warned { announced, .. } if announced.is_still(action, deadline) => {}
            // Nothing ends any more, so the holder must learn it.
            IdleStage::Warned { announced, .. } if announced.action.ends_leases() && !action.ends_leases() => {
                return self.begin_again();
            }
            IdleStage::Warned { .. } => self.forget_notices(),
            IdleStage::Watching => {}
        }
        match action {
            IdleAction::Report if is_reached(deadline.at, now) => {
                self.stage = IdleStage::Done { action };
                vec![IdleEffect::Report(report)]
            }
            IdleAction::Report => Vec::new(),
            IdleAction::Warn | IdleAction::Release | IdleAction::End => {
                let warnings = policy.warnings(deadline);
                let end = self.end(deadline, &warnings, now);
                if let Some(warning) = self.due_warning(end, &warnings, now) {
                    return vec![self.warn(warning, report, action)];
                }
                if !is_reached(end, now) || !self.is_warned() {
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

    /// Returns the earliest time of an action with warnings: the deadline, but not before the time of the longest warning
    /// has passed since the first notice was recorded.
    pub(super) fn end(&self, deadline: IdleDeadline, warnings: &[u64], now: Moment) -> Moment {
        let longest = warnings.iter().copied().max().unwrap_or(0);
        let warned = match self.stage {
            IdleStage::Warned { recorded: Some(recorded), .. } => recorded,
            IdleStage::Warned { recorded: None, .. } | IdleStage::Watching | IdleStage::Done { .. } => now,
        };
        deadline.at.later(warned.plus_ms(longest))
    }

    /// Returns the shortest warning that is due, if it is shorter than the last one. Several due warnings count as one.
    fn due_warning(&self, end: Moment, warnings: &[u64], now: Moment) -> Option<u64> {
        let last = match self.stage {
            IdleStage::Warned { before_ms, .. } => Some(before_ms),
            IdleStage::Watching | IdleStage::Done { .. } => None,
        };
        let left = end.ms_since(now);
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
        let announced = Announced { action, deadline: report.deadline.at };
        self.stage = IdleStage::Warned { notice, before_ms, recorded, announced };
        IdleEffect::Warn { notice, report, action }
    }

    /// Begins to warn again: earlier notices announced something else.
    fn forget_notices(&mut self) {
        self.stage = IdleStage::Watching;
        self.first_notice = self.next_notice;
    }

    /// Returns whether a notice was recorded.
    fn is_warned(&self) -> bool {
        match self.stage {
            IdleStage::Warned { recorded, .. } => recorded.is_some(),
            IdleStage::Watching | IdleStage::Done { .. } => false,
        }
    }
}

impl Announced {
    /// Returns whether the notices still say what happens, and not later than it happens.
    fn is_still(self, action: IdleAction, deadline: IdleDeadline) -> bool {
        self.action == action && self.deadline.ms_since(deadline.at) == 0
    }
}

fn is_reached(at: Moment, now: Moment) -> bool {
    at.ms_since(now) == 0
}
