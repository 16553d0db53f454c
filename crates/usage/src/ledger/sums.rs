//! Sums of one hold: over the life of a lease, or over one hour.

use serde::{Deserialize, Serialize};

use super::times::{StateTimes, is_zero};
use crate::{
    energy::EnergyMethod,
    input::{ClockLimits, Ratio},
    judge::UseState,
    share::Share,
};

/// Returns whether a part of the sums has its default value. Rows leave out such parts.
fn is_default<T: Default + PartialEq>(part: &T) -> bool {
    *part == T::default()
}

/// A mean that is weighted by time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct TimeMean {
    /// Sum of value times milliseconds.
    #[serde(skip_serializing_if = "is_zero")]
    pub value_ms: u64,
    /// Milliseconds for which there was a value.
    #[serde(skip_serializing_if = "is_zero")]
    pub known_ms: u64,
}

impl TimeMean {
    pub(crate) fn add(&mut self, value: u64, ms: u64) {
        self.value_ms = self.value_ms.saturating_add(value.saturating_mul(ms));
        self.known_ms += ms;
    }

    fn merge(&mut self, other: Self) {
        self.value_ms = self.value_ms.saturating_add(other.value_ms);
        self.known_ms += other.known_ms;
    }

    /// Returns the mean, rounded down; `None` if there was no value.
    #[must_use]
    pub fn mean(self) -> Option<u64> {
        self.value_ms.checked_div(self.known_ms)
    }
}

/// Sums of one hold. All of them can be added.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct HoldSums {
    /// Time by state.
    #[serde(skip_serializing_if = "is_default")]
    pub times: StateTimes,
    /// Compute part times time, in units times milliseconds. See [`crate::share::GPU_UNITS`].
    #[serde(skip_serializing_if = "is_zero")]
    pub unit_ms: u64,
    /// Compute part times the time of work.
    #[serde(skip_serializing_if = "is_zero")]
    pub busy_unit_ms: u64,
    /// Charged part times time.
    #[serde(skip_serializing_if = "is_zero")]
    pub charged_unit_ms: u64,
    /// Charged part times the time of work.
    #[serde(skip_serializing_if = "is_zero")]
    pub busy_charged_unit_ms: u64,
    /// Charged part times the time of unknown use.
    #[serde(skip_serializing_if = "is_zero")]
    pub unknown_charged_unit_ms: u64,
    /// Energy in mJ.
    #[serde(skip_serializing_if = "is_zero")]
    pub energy_mj: u64,
    /// The least exact method that determined active energy.
    #[serde(skip_serializing_if = "is_default")]
    pub method: EnergyMethod,
    /// Memory in MiB, over the time for which it is known.
    #[serde(skip_serializing_if = "is_default")]
    pub memory: TimeMean,
    /// Largest memory in MiB.
    #[serde(skip_serializing_if = "is_zero")]
    pub memory_peak_mib: u64,
    /// SM activity in millionths.
    #[serde(skip_serializing_if = "is_default")]
    pub sm: TimeMean,
    /// Activity of device memory in millionths.
    #[serde(skip_serializing_if = "is_default")]
    pub dram: TimeMean,
    /// Time for which the limits of the board's clocks are known, in ms. On a shared GPU, neighbours can cause a limit.
    #[serde(skip_serializing_if = "is_zero")]
    pub limits_known_ms: u64,
    /// Part of it under a power limit.
    #[serde(skip_serializing_if = "is_zero")]
    pub power_limited_ms: u64,
    /// Part of it under a thermal limit.
    #[serde(skip_serializing_if = "is_zero")]
    pub thermal_limited_ms: u64,
    /// Energy in mJ by method. Only windows with an active part count here.
    #[serde(skip_serializing_if = "is_default")]
    pub by_method: MethodSums,
}

/// Energy in mJ of the windows in which each method was used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct MethodSums {
    /// The counter of the board.
    #[serde(skip_serializing_if = "is_zero")]
    pub board: u64,
    /// The activity of the GPU instance.
    #[serde(skip_serializing_if = "is_zero")]
    pub gpm: u64,
    /// The use of the processes.
    #[serde(skip_serializing_if = "is_zero")]
    pub process: u64,
    /// The shares.
    #[serde(skip_serializing_if = "is_zero")]
    pub slices: u64,
}

impl MethodSums {
    fn add(&mut self, mj: u64, method: EnergyMethod) {
        match method {
            EnergyMethod::None => {}
            EnergyMethod::Board => self.board += mj,
            EnergyMethod::Gpm => self.gpm += mj,
            EnergyMethod::Process => self.process += mj,
            EnergyMethod::Slices => self.slices += mj,
        }
    }

    fn merge(&mut self, other: Self) {
        self.board += other.board;
        self.gpm += other.gpm;
        self.process += other.process;
        self.slices += other.slices;
    }

    /// Returns the methods that were used, each with its energy.
    fn used(self) -> impl Iterator<Item = (u64, EnergyMethod)> {
        let Self { board, gpm, process, slices } = self;
        let all = [
            (board, EnergyMethod::Board),
            (gpm, EnergyMethod::Gpm),
            (process, EnergyMethod::Process),
            (slices, EnergyMethod::Slices),
        ];
        all.into_iter().filter(|(mj, _)| *mj > 0)
    }
}

impl HoldSums {
    pub(crate) fn add_time(&mut self, share: Share, state: UseState, ms: u64) {
        let (unit_ms, charged) = (u64::from(share.units) * ms, u64::from(share.charged) * ms);
        self.times.add(state, ms);
        self.unit_ms += unit_ms;
        self.charged_unit_ms += charged;
        match state {
            UseState::Busy => {
                self.busy_unit_ms += unit_ms;
                self.busy_charged_unit_ms += charged;
            }
            UseState::Unknown => self.unknown_charged_unit_ms += charged,
            UseState::Idle | UseState::Empty => {}
        }
    }

    pub(crate) fn add_memory(&mut self, mib: u64, ms: u64) {
        self.memory.add(mib, ms);
        self.memory_peak_mib = self.memory_peak_mib.max(mib);
    }

    pub(crate) fn add_limits(&mut self, limits: ClockLimits, ms: u64) {
        self.limits_known_ms += ms;
        self.power_limited_ms += if limits.power { ms } else { 0 };
        self.thermal_limited_ms += if limits.thermal { ms } else { 0 };
    }

    pub(crate) fn add_activity(&mut self, sm: Option<Ratio>, dram: Option<Ratio>, ms: u64) {
        for (mean, value) in [(&mut self.sm, sm), (&mut self.dram, dram)] {
            if let Some(value) = value {
                mean.add(value.millionths().into(), ms);
            }
        }
    }

    pub(crate) fn add_energy(&mut self, mj: u64, method: EnergyMethod) {
        self.energy_mj += mj;
        self.method = self.method.max(method);
        self.by_method.add(mj, method);
    }

    /// Returns the method that determined most of the energy. Energy without an active part was distributed by slices.
    #[must_use]
    pub fn energy_method(&self) -> EnergyMethod {
        let most = self.by_method.used().max().map(|(_, method)| method);
        match most.unwrap_or(self.method) {
            EnergyMethod::None if self.energy_mj > 0 => EnergyMethod::Slices,
            method => method,
        }
    }

    /// Returns whether a part of the energy was determined by another method than [`Self::energy_method`].
    #[must_use]
    pub fn is_energy_mixed(&self) -> bool {
        self.by_method.used().nth(1).is_some()
    }

    /// Adds the sums of another time.
    pub fn merge(&mut self, other: &Self) {
        self.times += other.times;
        self.unit_ms += other.unit_ms;
        self.busy_unit_ms += other.busy_unit_ms;
        self.charged_unit_ms += other.charged_unit_ms;
        self.busy_charged_unit_ms += other.busy_charged_unit_ms;
        self.unknown_charged_unit_ms += other.unknown_charged_unit_ms;
        self.energy_mj += other.energy_mj;
        self.method = self.method.max(other.method);
        self.memory.merge(other.memory);
        self.memory_peak_mib = self.memory_peak_mib.max(other.memory_peak_mib);
        self.sm.merge(other.sm);
        self.dram.merge(other.dram);
        self.limits_known_ms += other.limits_known_ms;
        self.power_limited_ms += other.power_limited_ms;
        self.thermal_limited_ms += other.thermal_limited_ms;
        self.by_method.merge(other.by_method);
    }
}

/// Sums of the capacity and the energy of one GPU.
///
/// Two equations always hold, and the energy of all leases and `unattributed_mj` add up to `energy_mj`:
/// ```text
/// leased  + free + unusable = capacity + excess
/// charged + uncharged       = capacity + overlap
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct GpuSums {
    /// Time for which the GPU is accounted, in ms.
    #[serde(skip_serializing_if = "is_zero")]
    pub known_ms: u64,
    /// All units times milliseconds.
    #[serde(skip_serializing_if = "is_zero")]
    pub capacity: u64,
    /// Compute parts of the leases.
    #[serde(skip_serializing_if = "is_zero")]
    pub leased: u64,
    /// Capacity that leases could have had.
    #[serde(skip_serializing_if = "is_zero")]
    pub free: u64,
    /// Capacity that leases cannot have, because of the layout, a cordon or a fault.
    #[serde(skip_serializing_if = "is_zero")]
    pub unusable: u64,
    /// Holds beyond the capacity: a target that was shared out more than once.
    #[serde(skip_serializing_if = "is_zero")]
    pub excess: u64,
    /// Charged parts of the leases.
    #[serde(skip_serializing_if = "is_zero")]
    pub charged: u64,
    /// Capacity that no lease is charged for.
    #[serde(skip_serializing_if = "is_zero")]
    pub uncharged: u64,
    /// Capacity that is charged twice: one lease is charged by its memory, and its neighbour by its compute part.
    #[serde(skip_serializing_if = "is_zero")]
    pub overlap: u64,
    /// Difference of the energy counter, in mJ.
    #[serde(skip_serializing_if = "is_zero")]
    pub energy_mj: u64,
    /// Unattributed energy, in mJ.
    #[serde(skip_serializing_if = "is_zero")]
    pub unattributed_mj: u64,
}

impl GpuSums {
    /// Adds a time in which leases held these compute parts and these charged parts.
    pub(crate) fn add_time(&mut self, units: u64, charged: u64, unusable: u64, ms: u64) {
        let all = u64::from(crate::share::GPU_UNITS);
        let unusable = unusable.min(all.saturating_sub(units));
        self.known_ms += ms;
        self.capacity += all * ms;
        self.leased += units * ms;
        self.unusable += unusable * ms;
        self.free += all.saturating_sub(units).saturating_sub(unusable) * ms;
        self.excess += units.saturating_sub(all) * ms;
        self.charged += charged * ms;
        self.uncharged += all.saturating_sub(charged) * ms;
        self.overlap += charged.saturating_sub(all) * ms;
    }

    /// Adds the sums of another time or of another GPU.
    pub fn merge(&mut self, other: &Self) {
        self.known_ms += other.known_ms;
        self.capacity += other.capacity;
        self.leased += other.leased;
        self.free += other.free;
        self.unusable += other.unusable;
        self.excess += other.excess;
        self.charged += other.charged;
        self.uncharged += other.uncharged;
        self.overlap += other.overlap;
        self.energy_mj += other.energy_mj;
        self.unattributed_mj += other.unattributed_mj;
    }
}
