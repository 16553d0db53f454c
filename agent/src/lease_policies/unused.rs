//! One lease, as the idle policy sees it.

use gpush_api::LeaseKeep;
use gpush_core::lease::unused::{UnusedEnd, UnusedWarning};
use gpush_usage::{
    idle::{IdleAction, IdleEffect, IdleEvent, IdleMachine, IdleOutlook, IdlePolicy, Keep, LeaseTerms, UnusedReport},
    judge::UseState,
    moment::Moment,
};

use super::{
    PolicyName,
    act::{PolicyAct, PolicyEnd, RETRY_MS, words},
};
use crate::{leases::HolderNews, usage::Usage};

/// What the idle policy knows about an active lease.
#[derive(Debug)]
pub(super) struct WatchedUse {
    pub(super) machine: IdleMachine,
    pub(super) policy: IdlePolicy,
    pub(super) terms: LeaseTerms,
    /// The last observation.
    pub(super) observed: IdleEvent,
    /// The last `lease keep` that the state machine has received.
    pub(super) keep: Option<LeaseKeep>,
    /// The last attempt to deliver a notice: its number, and the time.
    pub(super) attempt: Option<(u32, Moment)>,
}

impl WatchedUse {
    /// Tells the machine about a new keep and the present observation. Returns what to do.
    pub(super) fn step(&mut self, keep: Option<&LeaseKeep>, now: Moment) -> Vec<PolicyAct> {
        let mut effects = Vec::new();
        if let Some(keep) = self.takes_over(keep, now) {
            effects.extend(self.machine.step(IdleEvent::Kept(keep), &self.policy, self.terms, now));
        }
        effects.extend(self.machine.step(self.observed.clone(), &self.policy, self.terms, now));
        let mut acts: Vec<PolicyAct> = effects.into_iter().map(|effect| self.act(&effect, now)).collect();
        if acts.is_empty() {
            acts.extend(self.repeated_notice(now));
        }
        if let Some(PolicyAct::Warn { notice, .. }) = acts.last() {
            self.attempt = Some((*notice, now));
        }
        acts
    }

    /// Tells the machine the outcome of an effect.
    pub(super) fn note(&mut self, event: IdleEvent, now: Moment) {
        let _ = self.machine.step(event, &self.policy, self.terms, now);
    }

    /// Returns what happens if the lease stays unused, and the number of warnings so far.
    pub(super) fn outlook(&self, now: Moment) -> Option<(IdleOutlook, u32)> {
        let outlook = self.machine.outlook(&self.observed, &self.policy, self.terms, now)?;
        Some((outlook, self.machine.warnings()))
    }

    /// Applies a keep that the machine does not know yet. Returns it, if there was one.
    fn takes_over(&mut self, keep: Option<&LeaseKeep>, now: Moment) -> Option<Keep> {
        if self.keep.as_ref() == keep {
            return None;
        }
        self.keep = keep.cloned();
        let keep = keep?;
        let left = u64::try_from(keep.until.as_millisecond().saturating_sub(now.wall_ms)).unwrap_or(0);
        Some(Keep { until: now.plus_ms(left), reason: keep.reason.clone() })
    }

    fn act(&self, effect: &IdleEffect, now: Moment) -> PolicyAct {
        match effect {
            IdleEffect::Warn { notice, report, action } => {
                let deadline = self.machine.outlook(&self.observed, &self.policy, self.terms, now);
                let due = deadline.map_or(report.deadline.at, |outlook| outlook.due);
                self.warning(*notice, *report, *action, due)
            }
            IdleEffect::Withdraw => PolicyAct::Withdraw(HolderNews::UnusedNoMore(self.end_of_unused_time(now))),
            IdleEffect::Report(report) => PolicyAct::Report(words(report)),
            IdleEffect::Release(report) => PolicyAct::End(PolicyEnd::Unused { report: *report, ends_processes: false }),
            IdleEffect::End(report) => PolicyAct::End(PolicyEnd::Unused { report: *report, ends_processes: true }),
        }
    }

    fn warning(&self, notice: u32, report: UnusedReport, action: IdleAction, due: Moment) -> PolicyAct {
        let news = HolderNews::Unused(UnusedWarning {
            unused_since: Usage::timestamp(report.unused_since),
            is_empty: report.deadline.is_empty,
            action,
            due_at: Usage::timestamp(due),
            of_job: self.terms.is_slurm_job,
            longest_keep_s: self.policy.max_keep_ms / 1000,
        });
        PolicyAct::Warn { policy: PolicyName::Idle, notice, news }
    }

    /// Returns the last notice again if it has not reached the holder for a while.
    fn repeated_notice(&self, now: Moment) -> Option<PolicyAct> {
        let notice = self.machine.unrecorded_notice()?;
        let (last, at) = self.attempt?;
        if last != notice || now.ms_since(at) < RETRY_MS {
            return None;
        }
        let &IdleEvent::Observed { state, since, unused_since: Some(unused) } = &self.observed else { return None };
        let deadline = self.policy.deadline(self.terms, state, unused, since, None);
        let report = UnusedReport { unused_since: unused, deadline };
        let outlook = self.machine.outlook(&self.observed, &self.policy, self.terms, now)?;
        Some(self.warning(notice, report, outlook.action, outlook.due))
    }

    /// Returns why the last warning does not apply any more.
    fn end_of_unused_time(&self, now: Moment) -> UnusedEnd {
        if let Some(keep) = self.machine.keep(now) {
            return UnusedEnd::Kept(Usage::timestamp(keep.until));
        }
        if self.terms.is_exempt {
            return UnusedEnd::Exempt;
        }
        match &self.observed {
            IdleEvent::Observed { state: UseState::Busy, .. } => UnusedEnd::Used,
            IdleEvent::Observed { unused_since: Some(_), .. } if !self.policy.action_for(self.terms).ends_leases() => {
                UnusedEnd::NotEnded
            }
            IdleEvent::Observed { .. } | IdleEvent::NoticeRecorded(_) | IdleEvent::Kept(_) | IdleEvent::EndRefused => {
                UnusedEnd::Unknown
            }
        }
    }
}
