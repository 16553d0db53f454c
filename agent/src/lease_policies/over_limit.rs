//! The memory of one lease, and its limit.

use gpush_api::{LeaseOverLimit, OverLimitAction};
use gpush_core::lease::over_limit::{OverLimitEnd, OverLimitWarning};
use gpush_usage::{
    moment::Moment,
    over_limit::{
        MemoryExcess, MemoryReading, OverLimitEffect, OverLimitEvent, OverLimitMachine, OverLimitPolicy, OverLimitStage,
    },
};

use super::{
    PolicyName,
    act::{PolicyAct, PolicyEnd, RETRY_MS},
};
use crate::{leases::HolderNews, usage::Usage};

/// What gpushd knows about the memory of an active lease.
#[derive(Debug)]
pub(super) struct WatchedMemory {
    machine: OverLimitMachine,
    policy: OverLimitPolicy,
    read: MemoryReading,
    /// The last attempt to deliver a notice: its number, and the time.
    attempt: Option<(u32, Moment)>,
}

impl WatchedMemory {
    /// Returns what was known before, with the present policy and reading.
    pub(super) fn observed(before: Option<Self>, policy: OverLimitPolicy, read: MemoryReading) -> Self {
        match before {
            Some(before) => Self { policy, read, ..before },
            None => Self { machine: OverLimitMachine::new(), policy, read, attempt: None },
        }
    }

    /// Tells the machine about the present reading. Returns what to do.
    pub(super) fn step(&mut self, now: Moment) -> Option<PolicyAct> {
        let effect = self.machine.step(OverLimitEvent::Read(self.read), &self.policy, now);
        let act = match effect {
            Some(OverLimitEffect::Notify { notice, report, action, grace_ms }) => {
                Some(self.warning(notice, report.excess, action, grace_ms, now))
            }
            Some(OverLimitEffect::Withdraw) => {
                let why = if self.read == MemoryReading::Within { OverLimitEnd::Within } else { OverLimitEnd::Unknown };
                Some(PolicyAct::Withdraw(HolderNews::OverLimitNoMore(why)))
            }
            Some(OverLimitEffect::End(report)) => Some(PolicyAct::End(PolicyEnd::OverLimit(report.excess))),
            None => self.repeated_notice(now),
        };
        if let Some(PolicyAct::Warn { notice, .. }) = &act {
            self.attempt = Some((*notice, now));
        }
        act
    }

    /// Tells the machine the outcome of an effect.
    pub(super) fn note(&mut self, event: OverLimitEvent, now: Moment) {
        let _ = self.machine.step(event, &self.policy, now);
    }

    /// Returns what happens to the lease; `None` while too few readings are above its limit.
    pub(super) fn shown(&self) -> Option<LeaseOverLimit> {
        let MemoryReading::Above { excess: MemoryExcess { used_mib, limit_mib }, .. } = self.read else { return None };
        let (action, since, ends_at, warned) = match self.machine.stage() {
            OverLimitStage::Within | OverLimitStage::Counting { .. } => return None,
            OverLimitStage::Notified { action, grace_ms, recorded, since, .. } => {
                let ends = recorded.filter(|_| action == OverLimitAction::End).map(|at| at.plus_ms(grace_ms));
                (action, since, ends, recorded.is_some())
            }
            OverLimitStage::Ending { since } => (OverLimitAction::End, since, None, true),
        };
        let (since, ends_at) = (Usage::timestamp(since), ends_at.map(Usage::timestamp));
        Some(LeaseOverLimit { action, used_mib, limit_mib, since, ends_at, warned })
    }

    fn warning(
        &self,
        notice: u32,
        excess: MemoryExcess,
        action: OverLimitAction,
        grace_ms: u64,
        now: Moment,
    ) -> PolicyAct {
        let MemoryExcess { used_mib, limit_mib } = excess;
        let ends_at = (action == OverLimitAction::End).then(|| Usage::timestamp(now.plus_ms(grace_ms)));
        let of_job = self.policy.is_slurm_job;
        let news = HolderNews::OverLimit(OverLimitWarning { used_mib, limit_mib, ends_at, of_job });
        PolicyAct::Warn { policy: PolicyName::OverLimit, notice, news }
    }

    /// Returns the last notice again if it has not reached the holder for a while.
    fn repeated_notice(&self, now: Moment) -> Option<PolicyAct> {
        let OverLimitStage::Notified { notice, action, grace_ms, recorded: None, .. } = self.machine.stage() else {
            return None;
        };
        let MemoryReading::Above { excess, .. } = self.read else { return None };
        let (last, at) = self.attempt?;
        let is_due = last == notice && now.ms_since(at) >= RETRY_MS;
        is_due.then(|| self.warning(notice, excess, action, grace_ms, now))
    }
}
