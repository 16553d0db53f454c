//! Sums of time, memory, activity and energy for each lease and each GPU.
//!
//! ```text
//! sample      sample      share changes   sample                          sample
//!   │  busy     │  busy         │  busy     │  unknown: > 3 intervals        │
//!   ├───────────┼───────────────┼───────────┼────────────────────────────────┼──► time
//!   state of the sample at its start        the state begins again here ─────┘
//! ```
//!
//! - The time between two samples belongs to the state of the first. If no sample follows within three intervals, the
//!   whole time since the last event is unknown, and the state begins again. A shorter silence, such as a restart of the
//!   driver worker or of gpushd, is unknown too, but the lease stays unused since the same moment.
//! - All accounts of a GPU are settled up to the same moment, and each event settles all of them. Shares and times are integers, so
//!   the sums of a GPU add up exactly: see [`GpuSums`].
//! - Each hour of UTC closes a row for each lease and target, and for each GPU. The agent takes closed rows with
//!   [`Ledger::take_closed`], and writes them in one transaction with the [`Ledger`] itself, which is the checkpoint.
//!   After a start, [`Ledger::resume`] continues from there. So a crash loses the states since the last checkpoint, but
//!   not the held time.
//! - An event that is older than the accounted time is late. It counts at the end of the accounted time.

mod buckets;
mod figures;
mod gpu;
mod hold;
mod lease;
mod memory;
mod rows;
mod sums;
mod times;
mod windows;

pub use buckets::{Bucket, Buckets};
pub use figures::{GpuFigures, LeaseFigures, MemberFigures};
pub use gpu::MOST_INTERVALS;
pub use memory::MemoryHistogram;
pub use rows::{ClosedRows, GpuHour, LeaseHour, LeaseTotals, MemberTotals, RowBound, UnusedSpan};
pub use sums::{GpuSums, HoldSums, MethodSums, TimeMean};
pub use times::StateTimes;

use std::collections::{BTreeMap, BTreeSet};

use gpush_api::{GpuUuid, LeaseId, TargetUuid};
use serde::{Deserialize, Serialize};

use self::{
    gpu::GpuAccount,
    hold::HoldAccount,
    lease::{Entered, LeaseAccount},
};
use crate::{
    input::{GpuSample, Hold, unique_holds},
    judge::{PowerLevels, UnknownReason, UseState},
    moment::Moment,
    share::GPU_UNITS,
};

/// An event between a checkpoint and the start that continues from it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Missed {
    /// A lease began with these holds.
    Begun(LeaseId, Vec<Hold>),
    /// A lease ended.
    Ended(LeaseId),
}

/// The accounts of all leases and GPUs of the host.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Ledger {
    gpus: BTreeMap<GpuUuid, GpuAccount>,
    leases: BTreeMap<LeaseId, LeaseAccount>,
    closed: ClosedRows,
    /// Number of the next row.
    next_row: u64,
}

impl Ledger {
    /// Returns an empty ledger.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Continues from a checkpoint, with the later events, in order. The time since the checkpoint counts as held, and
    /// its states are unknown. Returns the totals of the leases that have ended.
    pub fn resume(&mut self, missed: Vec<(Moment, Missed)>, now: Moment) -> Vec<LeaseTotals> {
        for gpu in self.gpus.values_mut() {
            gpu.forget_sample();
        }
        let mut ended = Vec::new();
        for (at, missed) in missed {
            match missed {
                Missed::Begun(lease, holds) => self.set_lease(lease, holds, at),
                Missed::Ended(lease) => ended.extend(self.end_lease(lease, at)),
            }
        }
        self.advance(now);
        ended
    }

    /// Begins to account a GPU. Has no effect if the GPU is known.
    pub fn add_gpu(&mut self, gpu: &GpuUuid, now: Moment) {
        if !self.gpus.contains_key(gpu) {
            self.gpus.insert(gpu.clone(), GpuAccount::new(gpu.clone(), now));
        }
    }

    /// Ends the account of a GPU that does not exist any more. The leases keep their sums there. Returns the sums of
    /// the GPU.
    pub fn remove_gpu(&mut self, gpu: &GpuUuid, now: Moment) -> Option<GpuSums> {
        self.settle(gpu, now);
        let mut account = self.gpus.remove(gpu)?;
        account.close(&mut self.closed);
        for mut hold in account.holds {
            hold.close(&mut self.closed);
            if let Some(lease) = self.leases.get_mut(&hold.lease) {
                lease.left.push(hold.totals());
            }
        }
        Some(account.total)
    }

    /// Sets the units of a GPU that no lease can have: slices that the layout leaves over, or the whole GPU if it is
    /// cordoned or lost. Units that leases hold count as leased.
    pub fn set_unusable(&mut self, gpu: &GpuUuid, units: u32, now: Moment) {
        self.settle(gpu, now);
        if let Some(account) = self.gpus.get_mut(gpu) {
            account.set_unusable(units.min(GPU_UNITS));
        }
    }

    /// Returns the hold of a lease on a target.
    #[must_use]
    pub fn hold(&self, lease: LeaseId, target: &TargetUuid) -> Option<&Hold> {
        self.holds_of(lease).map(|(_, account)| &account.hold).find(|hold| hold.target == *target)
    }

    /// Begins a lease, or changes its holds. A target that the lease held before, or that it holds again, keeps its
    /// sums. GPUs that are not known are added.
    pub fn set_lease(&mut self, lease: LeaseId, holds: Vec<Hold>, now: Moment) {
        let holds = unique_holds(holds);
        let mut gpus: BTreeSet<GpuUuid> = holds.iter().map(|hold| hold.gpu.clone()).collect();
        gpus.extend(self.gpus_of(lease));
        let now = self.not_late(&gpus, now);
        for gpu in &gpus {
            self.add_gpu(gpu, now);
            self.settle(gpu, now);
        }
        let Self { gpus: accounts, leases, closed, next_row: _ } = self;
        let lease_account = leases.entry(lease).or_insert_with(|| LeaseAccount::new(lease, now));
        for gpu in &gpus {
            let Some(account) = accounts.get_mut(gpu) else { continue };
            let is_kept = |old: &HoldAccount| {
                old.lease != lease || holds.iter().any(|hold| hold.gpu == *gpu && hold.target == old.hold.target)
            };
            for mut old in account.end_holds(|old| !is_kept(old)) {
                old.close(closed);
                lease_account.left.push(old.totals());
            }
            for hold in holds.iter().filter(|hold| hold.gpu == *gpu) {
                let same = |old: &&mut HoldAccount| old.lease == lease && old.hold.target == hold.target;
                match account.holds.iter_mut().find(same) {
                    Some(old) => old.change(hold.clone(), closed),
                    None => {
                        let left = &mut lease_account.left;
                        let before = left.iter().position(|one| one.hold.gpu == *gpu && one.hold.target == hold.target);
                        account.holds.push(match before {
                            Some(at) => HoldAccount::returned(lease, hold.clone(), now, &left.remove(at)),
                            None => HoldAccount::new(lease, hold.clone(), now),
                        });
                    }
                }
            }
        }
        self.enter_states([lease], now);
    }

    /// Ends a lease. Returns its totals; `None` if the lease is not known. To attribute its last energy, take a sample
    /// of its GPUs first.
    pub fn end_lease(&mut self, lease: LeaseId, now: Moment) -> Option<LeaseTotals> {
        self.leases.get(&lease)?;
        self.set_lease(lease, Vec::new(), now);
        let mut account = self.leases.remove(&lease)?;
        // `set_lease` does not settle a lease whose GPUs were removed.
        account.settle(now, Entered::UNKNOWN, &mut self.closed);
        // Leaving the state records the last unused time.
        account.enter(account.settled(), Entered::UNKNOWN, &mut self.closed);
        let until_ms = account.settled().wall_ms;
        Some(LeaseTotals {
            lease,
            begun_ms: account.begun.wall_ms,
            until_ms,
            times: account.times,
            members: account.left,
        })
    }

    /// Takes a sample. Returns whether it was used: a sample of an unknown GPU is not used, nor a sample that is older
    /// than the accounted time.
    pub fn sample(&mut self, sample: &GpuSample) -> bool {
        let Some(account) = self.gpus.get(&sample.gpu) else { return false };
        if account.is_late(sample.at) {
            return false;
        }
        self.settle(&sample.gpu, sample.at);
        let Some(account) = self.gpus.get_mut(&sample.gpu) else { return false };
        let energies = account.take(sample);
        let mut leases = BTreeSet::new();
        for (hold, energy) in account.holds.iter().zip(energies) {
            leases.insert(hold.lease);
            if let Some(lease) = self.leases.get_mut(&hold.lease) {
                lease.buckets.add_sample(sample.at.wall_ms, hold.memory_mib, energy);
            }
        }
        self.enter_states(leases, sample.at);
        true
    }

    /// Notes that samples of a GPU are missing from now on, until the next one: a restart of the driver worker, or
    /// maintenance. The energy counter goes on.
    pub fn gap(&mut self, gpu: &GpuUuid, now: Moment) {
        self.settle(gpu, now);
        let Some(account) = self.gpus.get_mut(gpu) else { return };
        account.forget_sample();
        let at = account.settled();
        let leases: BTreeSet<LeaseId> = account.holds.iter().map(|hold| hold.lease).collect();
        self.enter_states(leases, at);
    }

    /// Notes that the driver was loaded or the GPU was reset: a gap, after which the energy counter has a new base.
    pub fn reset(&mut self, gpu: &GpuUuid, now: Moment) {
        self.gap(gpu, now);
        if let Some(account) = self.gpus.get_mut(gpu) {
            account.reset_counter();
        }
    }

    /// Accounts the time of all GPUs that have no recent sample, so that their hours are closed. Other GPUs are accounted
    /// with their next sample, which decides about the time.
    pub fn advance(&mut self, now: Moment) {
        let silent: Vec<GpuUuid> =
            self.gpus.iter().filter(|(_, account)| account.is_silent(now)).map(|(gpu, _)| gpu.clone()).collect();
        for gpu in silent {
            self.settle(&gpu, now);
        }
    }

    /// Continues the numbers of rows: the next row gets at least this number.
    pub fn number_rows_from(&mut self, number: u64) {
        self.next_row = self.next_row.max(number);
    }

    /// Takes the closed rows, and numbers them.
    pub fn take_closed(&mut self) -> ClosedRows {
        let mut closed = std::mem::take(&mut self.closed);
        let numbers = closed.leases.iter_mut().map(|row| &mut row.number);
        for number in numbers.chain(closed.gpus.iter_mut().map(|row| &mut row.number)) {
            *number = self.next_row;
            self.next_row += 1;
        }
        closed
    }

    /// Returns all rows that are not taken yet, as if all hours ended now, and the number of the next row. The open rows
    /// are numbered from there on.
    #[must_use]
    pub fn open_rows(&self, now: Moment) -> (ClosedRows, u64) {
        let mut present = self.clone();
        let gpus: Vec<GpuUuid> = present.gpus.keys().cloned().collect();
        for gpu in gpus {
            present.settle(&gpu, now);
        }
        for account in present.gpus.values_mut() {
            account.close(&mut present.closed);
            account.holds.iter_mut().for_each(|hold| hold.close(&mut present.closed));
        }
        (present.take_closed(), self.next_row)
    }

    /// Returns the ids of the leases.
    pub fn leases(&self) -> impl Iterator<Item = LeaseId> {
        self.leases.keys().copied()
    }

    /// Returns the present figures of a lease.
    #[must_use]
    pub fn lease(&self, lease: LeaseId, now: Moment) -> Option<LeaseFigures> {
        let account = self.leases.get(&lease)?;
        // Settling a copy does not decide about the time that has passed since the last sample.
        let mut present = account.clone();
        present.settle(now, self.state_of(lease, now), &mut ClosedRows::default());
        let members = self.holds_of(lease).map(|(gpu, hold)| MemberFigures {
            judgement: gpu.present(hold, now),
            sampled: gpu.sampled_at().filter(|_| !gpu.is_silent(now)),
            memory_mib: hold.memory_mib.filter(|_| !gpu.is_silent(now)),
            least_memory_mib: hold.least_memory_mib.filter(|_| !gpu.is_silent(now)),
            sm: hold.activity.0.filter(|_| !gpu.is_silent(now)),
            dram: hold.activity.1.filter(|_| !gpu.is_silent(now)),
            totals: hold.totals(),
        });
        Some(LeaseFigures {
            members: members.collect(),
            state: present.state,
            since: present.since,
            unused_since: present.unused_since,
            quiet_since: self.quiet_since(lease, now),
            begun: present.begun,
            times: present.times,
        })
    }

    /// Returns the start of the time in which no sample showed work on any target of a lease.
    fn quiet_since(&self, lease: LeaseId, now: Moment) -> Option<Moment> {
        let starts = self.holds_of(lease).map(|(gpu, hold)| hold.quiet_since.filter(|_| !gpu.is_silent(now)));
        starts.reduce(|one, other| Some(one?.later(other?))).flatten()
    }

    /// Returns the totals of a lease up to now, also of targets that it does not hold any more. The time since the last
    /// sample counts in the present state. If no sample follows, that time becomes unknown, and other times fall.
    #[must_use]
    pub fn totals(&self, lease: LeaseId, now: Moment) -> Option<LeaseTotals> {
        let times = self.lease(lease, now)?.times;
        Some(LeaseTotals { until_ms: now.wall_ms, times, ..self.settled_totals(lease)? })
    }

    /// Returns the totals of a lease up to the last event that has decided about its time, such as a sample. The times,
    /// the energy and their sums never fall while the ledger lasts. After [`Ledger::resume`], they continue from those
    /// of the checkpoint.
    #[must_use]
    pub fn settled_totals(&self, lease: LeaseId) -> Option<LeaseTotals> {
        let account = self.leases.get(&lease)?;
        let mut members = account.left.clone();
        members.extend(self.holds_of(lease).map(|(_, hold)| hold.totals()));
        let (begun_ms, until_ms) = (account.begun.wall_ms, account.settled().wall_ms);
        Some(LeaseTotals { lease, begun_ms, until_ms, times: account.times, members })
    }

    /// Returns the unused time of a lease that still lasts, for a dry run together with the recorded ones.
    #[must_use]
    pub fn open_span(&self, lease: LeaseId, now: Moment) -> Option<UnusedSpan> {
        let mut present = self.leases.get(&lease)?.clone();
        present.settle(now, self.state_of(lease, now), &mut ClosedRows::default());
        present.span(now)
    }

    /// Returns the recent past of a lease.
    #[must_use]
    pub fn buckets(&self, lease: LeaseId) -> Option<&Buckets> {
        self.leases.get(&lease).map(|account| &account.buckets)
    }

    /// Returns the present figures of all GPUs.
    pub fn gpus(&self, now: Moment) -> impl Iterator<Item = GpuFigures> {
        self.gpus.iter().map(move |(gpu, account)| {
            let units = |state: fn(UseState) -> bool| {
                let held = account.holds.iter().filter(|hold| state(hold.judgement.state));
                held.map(|hold| hold.hold.share.units).fold(0, u32::saturating_add)
            };
            let leased = units(|_| true);
            let is_sampled = !account.is_silent(now);
            let unusable = account.unusable().min(GPU_UNITS.saturating_sub(leased));
            GpuFigures {
                gpu: gpu.clone(),
                is_sampled,
                leased,
                unused: is_sampled.then(|| units(|state| matches!(state, UseState::Idle | UseState::Empty))),
                free: GPU_UNITS.saturating_sub(leased).saturating_sub(unusable),
                unusable,
                targets: account.holds.iter().map(|hold| hold.hold.target.clone()).collect(),
                sums: account.total,
                levels: account.levels,
                refuted: account.refuted(now),
            }
        })
    }

    /// Sets levels of power that were learned before, such as from the store.
    pub fn set_levels(&mut self, gpu: &GpuUuid, levels: PowerLevels) {
        if let Some(account) = self.gpus.get_mut(gpu) {
            account.levels = levels;
        }
    }

    /// Accounts the time of a GPU and of the leases on it.
    fn settle(&mut self, gpu: &GpuUuid, to: Moment) {
        let Some(account) = self.gpus.get_mut(gpu) else { return };
        account.settle(to, &mut self.closed);
        let leases: BTreeSet<LeaseId> = account.holds.iter().map(|hold| hold.lease).collect();
        for lease in leases {
            let elapsed = self.state_of(lease, to);
            if let Some(account) = self.leases.get_mut(&lease) {
                account.settle(to, elapsed, &mut self.closed);
            }
        }
    }

    /// Returns the moment of an event, or the last moment that one of the GPUs has accounted if the event is late.
    fn not_late(&self, gpus: &BTreeSet<GpuUuid>, now: Moment) -> Moment {
        let settled = gpus.iter().filter_map(|gpu| self.gpus.get(gpu)).filter(|account| account.is_late(now));
        settled.map(GpuAccount::settled).max_by_key(|settled| settled.monotonic_ms).unwrap_or(now)
    }

    fn enter_states(&mut self, leases: impl IntoIterator<Item = LeaseId>, now: Moment) {
        for lease in leases {
            let state = self.state_of(lease, now);
            if let Some(account) = self.leases.get_mut(&lease) {
                account.enter(now, state, &mut self.closed);
            }
        }
    }

    /// Returns the state of a lease, from the last samples of its GPUs. On a GPU without a recent sample, the state is
    /// unknown.
    fn state_of(&self, lease: LeaseId, now: Moment) -> Entered {
        let judgements = self.holds_of(lease).map(|(gpu, hold)| (gpu, gpu.present(hold, now)));
        let state = UseState::of_members(judgements.clone().map(|(_, judgement)| judgement.state));
        let is_weak = judgements.clone().any(|(_, judgement)| judgement.is_weak);
        let is_missing = |reason| matches!(reason, Some(UnknownReason::NoSample | UnknownReason::SourceFailed));
        let silences = judgements
            .filter(|(_, judgement)| judgement.state == UseState::Unknown)
            .map(|(gpu, judgement)| is_missing(judgement.reason).then(|| gpu.longest_silence_ms()));
        let silences: Option<Vec<u64>> = silences.collect();
        let silence_ms = silences.and_then(|silences| silences.into_iter().min());
        Entered {
            state,
            silence_ms: silence_ms.filter(|_| state == UseState::Unknown),
            is_weak: state == UseState::Idle && is_weak,
        }
    }

    fn holds_of(&self, lease: LeaseId) -> impl Iterator<Item = (&GpuAccount, &HoldAccount)> + Clone {
        self.gpus
            .values()
            .flat_map(move |gpu| gpu.holds.iter().filter(move |hold| hold.lease == lease).map(move |hold| (gpu, hold)))
    }

    fn gpus_of(&self, lease: LeaseId) -> Vec<GpuUuid> {
        self.holds_of(lease).map(|(_, hold)| hold.hold.gpu.clone()).collect()
    }
}

#[cfg(test)]
mod tests;
