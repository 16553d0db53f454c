//! The account of one GPU. All its holds are accounted up to the same moment, so that their sums add up.

use gpush_api::{GpuUuid, LeaseId};
use serde::{Deserialize, Serialize};

use super::{
    hold::HoldAccount,
    rows::{ClosedRows, GpuHour},
    sums::GpuSums,
    windows::energy_window,
};
use crate::{
    energy::{EndedInWindow, EnergyCounter, attribute},
    input::{ClockLimits, GpuSample, Hold},
    judge::{HoldPast, Judgement, PowerLevels, Signals, UseState, decide},
    moment::{Moment, hours},
};

/// Number of intervals for which a sample counts as recent. A longer silence is unknown time.
pub const MOST_INTERVALS: u64 = 3;

/// The account of one GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct GpuAccount {
    gpu: GpuUuid,
    /// Moment up to which all time is accounted.
    settled: Moment,
    /// Time of the last sample, and the interval that it promised; `None` without a recent sample.
    sampled: Option<(Moment, u64)>,
    /// The interval that the last sample promised, in ms. It stays known after the sample is forgotten.
    #[serde(default)]
    promised_ms: u64,
    /// Hash of all processes of the last sample; `None` without a recent sample, or if it did not list them.
    processes: Option<u64>,
    /// Limits of the clocks at the last sample.
    #[serde(skip)]
    limits: Option<ClockLimits>,
    pub(crate) holds: Vec<HoldAccount>,
    /// Holds of leases that ended since the last reading of the energy counter, and may have worked until then.
    ended: Vec<EndedInWindow>,
    unusable: u32,
    pub(crate) total: GpuSums,
    row: GpuSums,
    hour_ms: i64,
    counter: EnergyCounter,
    pub(crate) levels: PowerLevels,
}

impl GpuAccount {
    pub(crate) fn new(gpu: GpuUuid, now: Moment) -> Self {
        Self {
            gpu,
            settled: now,
            sampled: None,
            promised_ms: 0,
            processes: None,
            limits: None,
            holds: Vec::new(),
            ended: Vec::new(),
            unusable: 0,
            total: GpuSums::default(),
            row: GpuSums::default(),
            hour_ms: now.hour_ms(),
            counter: EnergyCounter::default(),
            levels: PowerLevels::default(),
        }
    }

    /// Returns the moment up to which all time is accounted.
    pub(crate) fn settled(&self) -> Moment {
        self.settled
    }

    /// Returns whether an event is older than the accounted time. Its time would count twice.
    pub(crate) fn is_late(&self, at: Moment) -> bool {
        self.settled.boot == at.boot && at.monotonic_ms < self.settled.monotonic_ms
    }

    /// Returns whether the last sample is too old, or from before a boot, to say anything about the time until `at`.
    pub(crate) fn is_silent(&self, at: Moment) -> bool {
        self.sampled.is_none_or(|(sampled, interval)| {
            sampled.boot != at.boot || at.ms_since(sampled) > interval.saturating_mul(MOST_INTERVALS)
        })
    }

    /// Returns the judgement of the last sample about a hold.
    pub(crate) fn present(&self, hold: &HoldAccount, now: Moment) -> Judgement {
        if self.is_silent(now) { Judgement::NO_SAMPLE } else { hold.judgement }
    }

    /// Returns the GPU instances whose activity of 0 is refuted by the power of the board; `None` is the whole GPU.
    pub(crate) fn refuted(&self, now: Moment) -> Vec<Option<u32>> {
        let refuted = self.holds.iter().filter(|hold| self.present(hold, now).is_refuted());
        refuted.map(|hold| hold.hold.instance).collect()
    }

    /// Returns the longest silence, in ms, after which a sample still continues the earlier state.
    pub(crate) fn longest_silence_ms(&self) -> u64 {
        self.promised_ms.saturating_mul(MOST_INTERVALS)
    }

    /// Accounts the time until a moment. After a silence, that time is unknown.
    pub(crate) fn settle(&mut self, to: Moment, closed: &mut ClosedRows) {
        if self.is_late(to) {
            return;
        }
        if self.is_silent(to) {
            self.forget_sample();
        }
        let units = self.holds.iter().map(|account| u64::from(account.hold.share.units)).sum();
        let charged = self.holds.iter().map(|account| u64::from(account.hold.share.charged)).sum();
        for (from, ms) in hours(self.settled, to.ms_since(self.settled)) {
            if self.hour_ms != from.hour_ms() {
                self.close(closed);
                self.hour_ms = from.hour_ms();
            }
            for sums in [&mut self.total, &mut self.row] {
                sums.add_time(units, charged, self.unusable.into(), ms);
            }
            for account in &mut self.holds {
                account.add_time(from, ms, self.limits, closed);
            }
        }
        self.settled = to;
    }

    /// Adds a sample. The caller must have settled the time up to the sample. Returns the energy of each hold.
    pub(crate) fn take(&mut self, sample: &GpuSample) -> Vec<u64> {
        let since_last = self.sampled.map(|(at, _)| sample.at.ms_since(at));
        let holds: Vec<(LeaseId, Hold)> =
            self.holds.iter().map(|account| (account.lease, account.hold.clone())).collect();
        let holds: Vec<(LeaseId, &Hold)> = holds.iter().map(|(lease, hold)| (*lease, hold)).collect();
        let signals = Signals::new(sample, &holds, since_last);
        let (difference, is_new_window) = self.counter.take(sample.energy_mj, sample.power_limit_mw, sample.at);
        let mean_mw = match difference {
            Some((mj, ms)) => u64::try_from(u128::from(mj) * 1000 / u128::from(ms.max(1))).ok().map(|mw| (mw, ms)),
            None => sample.power_mw.value().map(|mw| (mw, sample.interval_ms)),
        };
        if let Some((mw, ms)) = mean_mw {
            // After a failed reading of the counter, the window began before the last sample.
            let is_whole = difference.is_none_or(|(_, ms)| since_last == Some(ms));
            let is_same = self.processes.is_some() && self.processes == signals.all_processes();
            let activity = signals.board_activity().after(is_whole && is_same);
            self.levels.learn(mw, ms, activity, sample.power_limit_mw);
        }
        let mut energies = vec![0; self.holds.len()];
        if let Some((mj, ms)) = difference {
            let least_mw = self.levels.least.unwrap_or(0);
            let window = energy_window(&signals, &self.holds, self.ended.clone(), (mj, ms), least_mw);
            let attributed = attribute(&window);
            for (sums, unattributed) in
                [(&mut self.total, attributed.unattributed_mj), (&mut self.row, attributed.unattributed_mj)]
            {
                sums.energy_mj += mj;
                sums.unattributed_mj += unattributed;
            }
            for ((account, energy), (mj, method)) in self.holds.iter_mut().zip(&mut energies).zip(attributed.holds) {
                account.add_energy(mj, method);
                *energy = mj;
            }
        }
        if is_new_window {
            self.begin_window();
        }
        for account in &mut self.holds {
            let (lease, hold) = (account.lease, account.hold.clone());
            let held_ms = sample.at.ms_since(account.begun);
            let past = HoldPast { trace: account.trace_at(sample.at), held_ms };
            let observation = signals.observe(lease, &hold, past, mean_mw.map(|(mw, _)| mw), &self.levels);
            account.set_judgement(sample.at, decide(observation));
            if let Some(trace) = signals.trace(lease, &hold) {
                let until = sample.at.plus_ms(sample.interval_ms.saturating_mul(MOST_INTERVALS));
                account.trace = Some((trace, until));
            }
            account.set_memory(signals.memory_mib(lease, &hold), signals.least_memory_mib(lease, &hold));
            let measured = signals.own_activity_of_device(lease, &hold, held_ms);
            let activity = measured.or_else(|| signals.estimated_activity(lease, &hold));
            let activity = activity.filter(|_| !account.judgement.is_refuted()).unwrap_or_default();
            account.add_activity(activity.sm, activity.dram, since_last.unwrap_or(0).min(held_ms));
        }
        self.processes = signals.all_processes();
        self.limits = sample.limits.value();
        self.sampled = Some((sample.at, sample.interval_ms));
        self.promised_ms = sample.interval_ms;
        energies
    }

    /// Forgets the last sample: the time until the next one is unknown.
    pub(crate) fn forget_sample(&mut self) {
        self.sampled = None;
        self.limits = None;
        self.processes = None;
        for account in &mut self.holds {
            account.forget_sample();
        }
    }

    /// Begins a new base of the energy counter.
    pub(crate) fn reset_counter(&mut self) {
        self.counter.reset();
        self.begin_window();
    }

    /// Removes the holds that have ended. The time until now must be settled already.
    pub(crate) fn end_holds(&mut self, has_ended: impl Fn(&HoldAccount) -> bool) -> Vec<HoldAccount> {
        let ended: Vec<HoldAccount> = self.holds.extract_if(.., |account| has_ended(account)).collect();
        for account in &ended {
            self.note_ended(account);
        }
        ended
    }

    /// Keeps the part of a hold in the energy window, unless the lease was idle or empty.
    fn note_ended(&mut self, account: &HoldAccount) {
        match account.judgement.state {
            UseState::Busy | UseState::Unknown => {}
            UseState::Idle | UseState::Empty => return,
        }
        let (unit_ms, held_ms) = (account.window_unit_ms, account.window_ms);
        let instance = account.hold.instance;
        match self.ended.iter_mut().find(|ended| ended.instance == instance) {
            Some(ended) => {
                ended.unit_ms = ended.unit_ms.saturating_add(unit_ms);
                ended.held_ms = ended.held_ms.saturating_add(held_ms);
            }
            None => self.ended.push(EndedInWindow { instance, unit_ms, held_ms }),
        }
    }

    /// Begins a new energy window.
    fn begin_window(&mut self) {
        self.ended.clear();
        for account in &mut self.holds {
            account.begin_window();
        }
    }

    /// Returns the time of the last sample.
    pub(crate) fn sampled_at(&self) -> Option<Moment> {
        self.sampled.map(|(at, _)| at)
    }

    pub(crate) fn set_unusable(&mut self, units: u32) {
        self.unusable = units;
    }

    pub(crate) fn unusable(&self) -> u32 {
        self.unusable
    }

    /// Closes the row of the GPU, if it is not empty.
    pub(crate) fn close(&mut self, closed: &mut ClosedRows) {
        if self.row == GpuSums::default() {
            return;
        }
        let sums = std::mem::take(&mut self.row);
        closed.gpus.push(GpuHour { gpu: self.gpu.clone(), number: 0, hour_ms: self.hour_ms, sums });
    }
}
