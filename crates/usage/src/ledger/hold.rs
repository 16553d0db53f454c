//! The account of one hold: sums over the life of the lease, and the row of the current hour.

use gpush_api::LeaseId;
use serde::{Deserialize, Serialize};

use super::{
    memory::MemoryHistogram,
    rows::{ClosedRows, LeaseHour, MemberTotals},
    sums::HoldSums,
};
use crate::{
    energy::EnergyMethod,
    input::{ClockLimits, Hold, Ratio},
    judge::{Judgement, ProcessTrace, UseState},
    moment::Moment,
};

/// The account of the hold of one lease on one target.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct HoldAccount {
    pub(crate) lease: LeaseId,
    pub(crate) hold: Hold,
    /// Start of the hold. A change of the share does not change it.
    pub(crate) begun: Moment,
    /// The judgement of the last sample.
    pub(crate) judgement: Judgement,
    /// Memory of its processes at the last sample, in MiB.
    pub(crate) memory_mib: Option<u64>,
    /// Memory that they use at least, in MiB; `None` if they are not known.
    #[serde(default)]
    pub(crate) least_memory_mib: Option<u64>,
    /// Activities of the last window; `None` if they are not known, or if another lease can have caused them.
    pub(crate) activity: (Option<Ratio>, Option<Ratio>),
    /// Processes at the last sample that listed them, and the time until which the next sample is compared with them.
    pub(crate) trace: Option<(ProcessTrace, Moment)>,
    /// Start of the time in which each sample showed no work: without a process, idle by strong evidence, or
    /// [`Judgement::is_still`].
    #[serde(default)]
    pub(crate) quiet_since: Option<Moment>,
    pub(crate) total: HoldSums,
    histogram: MemoryHistogram,
    row: HoldSums,
    /// Start of the hour of the row.
    hour_ms: i64,
    /// Units times ms, and ms, since the last reading of the energy counter.
    pub(crate) window_unit_ms: u64,
    pub(crate) window_ms: u64,
}

impl HoldAccount {
    pub(crate) fn new(lease: LeaseId, hold: Hold, now: Moment) -> Self {
        Self {
            lease,
            begun: now,
            judgement: Judgement::NO_SAMPLE,
            memory_mib: None,
            least_memory_mib: None,
            activity: (None, None),
            trace: None,
            quiet_since: None,
            total: HoldSums::default(),
            histogram: MemoryHistogram::new(hold.memory_mib),
            row: HoldSums::default(),
            hour_ms: now.hour_ms(),
            window_unit_ms: 0,
            window_ms: 0,
            hold,
        }
    }

    /// Continues the sums of a target that the lease held before. Its 98th percentile of the memory begins again.
    pub(crate) fn returned(lease: LeaseId, hold: Hold, now: Moment, before: &MemberTotals) -> Self {
        Self { total: before.sums, ..Self::new(lease, hold, now) }
    }

    /// Adds a time that lies within one hour, in the state of the last sample and with the limits of the board's
    /// clocks.
    pub(crate) fn add_time(&mut self, from: Moment, ms: u64, limits: Option<ClockLimits>, closed: &mut ClosedRows) {
        self.enter_hour(from.hour_ms(), closed);
        for sums in [&mut self.total, &mut self.row] {
            sums.add_time(self.hold.share, self.judgement.state, ms);
            if let Some(mib) = self.memory_mib {
                sums.add_memory(mib, ms);
            }
            if let Some(limits) = limits {
                sums.add_limits(limits, ms);
            }
        }
        if let Some(mib) = self.memory_mib {
            self.histogram.add(mib, ms);
        }
        self.window_unit_ms += u64::from(self.hold.share.units) * ms;
        self.window_ms += ms;
    }

    /// Adds the activity of a window that ends now. `ms` is the time for which it counts.
    pub(crate) fn add_activity(&mut self, sm: Option<Ratio>, dram: Option<Ratio>, ms: u64) {
        self.activity = (sm, dram);
        for sums in [&mut self.total, &mut self.row] {
            sums.add_activity(sm, dram, ms);
        }
    }

    /// Adds energy. It counts in the hour in which its window ends.
    pub(crate) fn add_energy(&mut self, mj: u64, method: EnergyMethod) {
        for sums in [&mut self.total, &mut self.row] {
            sums.add_energy(mj, method);
        }
    }

    /// Notes the memory of a sample. It counts from now on, and its peak at once.
    pub(crate) fn set_memory(&mut self, mib: Option<u64>, least_mib: Option<u64>) {
        self.memory_mib = mib;
        self.least_memory_mib = least_mib;
        if let Some(mib) = mib {
            for sums in [&mut self.total, &mut self.row] {
                sums.add_memory(mib, 0);
            }
            self.histogram.add(mib, 0);
        }
    }

    /// Notes the judgement of a sample.
    pub(crate) fn set_judgement(&mut self, at: Moment, judgement: Judgement) {
        let is_quiet = match judgement.state {
            UseState::Empty => true,
            UseState::Idle => !judgement.is_weak,
            UseState::Unknown => judgement.is_still,
            UseState::Busy => false,
        };
        self.quiet_since = if is_quiet { self.quiet_since.or(Some(at)) } else { None };
        self.judgement = judgement;
    }

    /// Forgets the last sample.
    pub(crate) fn forget_sample(&mut self) {
        self.quiet_since = None;
        self.judgement = Judgement::NO_SAMPLE;
        self.memory_mib = None;
        self.least_memory_mib = None;
        self.activity = (None, None);
    }

    /// Returns the processes with which a sample is compared; `None` after a long silence.
    pub(crate) fn trace_at(&self, at: Moment) -> Option<ProcessTrace> {
        self.trace.filter(|(_, until)| at.is_within(*until)).map(|(trace, _)| trace)
    }

    /// Begins a new energy window.
    pub(crate) fn begin_window(&mut self) {
        self.window_unit_ms = 0;
        self.window_ms = 0;
    }

    /// Changes the share, from now on.
    pub(crate) fn change(&mut self, hold: Hold, closed: &mut ClosedRows) {
        if hold.share != self.hold.share || hold.kind != self.hold.kind {
            self.close(closed);
        }
        self.hold = hold;
    }

    /// Closes the row, if it is not empty.
    pub(crate) fn close(&mut self, closed: &mut ClosedRows) {
        if self.row == HoldSums::default() {
            return;
        }
        let sums = std::mem::take(&mut self.row);
        let (lease, hold) = (self.lease, self.hold.clone());
        closed.leases.push(LeaseHour { lease, hold, number: 0, hour_ms: self.hour_ms, sums });
    }

    /// Returns the totals.
    pub(crate) fn totals(&self) -> MemberTotals {
        let memory_p98_mib = self.histogram.percentile_mib(98);
        MemberTotals { hold: self.hold.clone(), sums: self.total, memory_p98_mib }
    }

    fn enter_hour(&mut self, hour_ms: i64, closed: &mut ClosedRows) {
        if self.hour_ms != hour_ms {
            self.close(closed);
            self.hour_ms = hour_ms;
        }
    }
}
