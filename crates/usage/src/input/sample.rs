//! One sample of a GPU.

use gpush_api::{GpuUuid, LeaseId, TargetUuid};
use gpush_core::attribution::Attribution;
use serde::{Deserialize, Serialize};

use crate::moment::Moment;

/// A value of the driver, or why there is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Reading<T> {
    /// The value.
    Value(T),
    /// The GPU, its mode or the driver does not have this value, so nothing is missing.
    Unsupported,
    /// The value should exist, but could not be read, or the driver gave an impossible value.
    #[default]
    Failed,
}

impl<T> Reading<T> {
    /// Returns the value, if there is one.
    #[must_use]
    pub fn value(self) -> Option<T> {
        match self {
            Self::Value(value) => Some(value),
            Self::Unsupported | Self::Failed => None,
        }
    }

    /// Returns a reference to the value, if there is one.
    #[must_use]
    pub fn as_ref(&self) -> Reading<&T> {
        match self {
            Self::Value(value) => Reading::Value(value),
            Self::Unsupported => Reading::Unsupported,
            Self::Failed => Reading::Failed,
        }
    }

    /// Returns whether the value could not be read.
    #[must_use]
    pub fn is_failed(&self) -> bool {
        matches!(self, Self::Failed)
    }
}

/// A part of the time or of the capacity, in millionths: 0 to 1,000,000.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Hash, Serialize, Deserialize)]
pub struct Ratio {
    millionths: u32,
}

impl Ratio {
    /// No activity.
    pub const ZERO: Self = Self { millionths: 0 };

    /// Converts millionths. More than 1,000,000 counts as 1,000,000.
    #[must_use]
    pub fn from_millionths(millionths: u32) -> Self {
        Self { millionths: millionths.min(1_000_000) }
    }

    /// Returns the millionths.
    #[must_use]
    pub fn millionths(self) -> u32 {
        self.millionths
    }

    /// Returns whether there was no activity at all.
    #[must_use]
    pub fn is_zero(self) -> bool {
        self.millionths == 0
    }
}

/// Mean activities of a GPU or GPU instance since the last sample. `None` means that the driver has left out the value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Activity {
    /// Part of the time in which a graphics or compute engine was active.
    pub graphics: Option<Ratio>,
    /// Mean part of the SMs that had work.
    pub sm: Option<Ratio>,
    /// Part of the time in which a tensor pipe was active. Optional: GPUs without such work always read 0.
    pub tensor: Option<Ratio>,
    /// Part of the time in which device memory moved data.
    pub dram: Option<Ratio>,
}

/// The device of an activity window.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum WindowScope {
    /// The whole GPU.
    Gpu,
    /// The GPU instance with this id.
    Instance(u32),
}

/// Activities of one GPU or GPU instance, from GPM. A GPU instance has one window, also if it has several compute
/// instances.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ActivityWindow {
    /// GPU or GPU instance.
    pub scope: WindowScope,
    /// Time from the start of the window to the sample, in ms. It is more than the length of the window if the window ended
    /// before the sample.
    pub age_ms: u64,
    /// Compute part of the GPU that the scope has, in units of [`crate::share::GPU_UNITS`].
    pub units: u32,
    /// The activities.
    pub activity: Reading<Activity>,
}

/// The lease of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProcessOwner {
    /// It belongs to this lease.
    Lease(LeaseId),
    /// It may belong to one of these leases, or a fact that decides could not be read.
    Perhaps(Vec<LeaseId>),
    /// It belongs to no lease.
    NoLease,
}

impl From<&Attribution> for ProcessOwner {
    fn from(attribution: &Attribution) -> Self {
        match attribution {
            Attribution::Lease { id, .. } => Self::Lease(*id),
            Attribution::Perhaps { leases, .. } | Attribution::Unknown { leases, .. } => Self::Perhaps(leases.clone()),
            Attribution::NoLease => Self::NoLease,
        }
    }
}

/// A process that has a context on the GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuProcess {
    /// Process id.
    pub pid: u32,
    /// Start time of the process, in clock ticks since boot. It distinguishes processes with the same pid.
    pub start: u64,
    /// Lease of the process.
    pub owner: ProcessOwner,
    /// GPU instance that the process uses; `None` without MIG, or if it is not known.
    pub instance: Option<u32>,
    /// MIG device that the process uses; `None` without MIG, or if it is not known.
    pub target: Option<TargetUuid>,
    /// Device memory in MiB.
    pub memory_mib: Reading<u64>,
    /// Mean SM use since the last sample, as a part of the GPU.
    pub sm: Reading<Ratio>,
}

/// Why the clocks of the board are lower than they could be, from the clock event reasons of the driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ClockLimits {
    /// A power limit, in software or hardware.
    pub power: bool,
    /// The temperature.
    pub thermal: bool,
}

/// One sample of a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuSample {
    /// UUID of the GPU.
    pub gpu: GpuUuid,
    /// Time of the sample.
    pub at: Moment,
    /// Time to the next sample, in milliseconds. If no sample follows within three times this time, the time is unknown.
    pub interval_ms: u64,
    /// Energy counter of the board, in mJ since the driver was loaded.
    pub energy_mj: Reading<u64>,
    /// Power of the board, in mW. Used only without an energy counter.
    pub power_mw: Reading<u64>,
    /// Power limit of the board, in mW.
    pub power_limit_mw: Reading<u64>,
    /// Limits of the clocks. They count until the next sample.
    pub limits: Reading<ClockLimits>,
    /// Part of the time in which a kernel ran. Unsupported under MIG.
    pub utilization: Reading<Ratio>,
    /// Activity windows: one for the GPU, or one for each GPU instance. Empty if the GPU does not have GPM.
    pub windows: Vec<ActivityWindow>,
    /// All compute and graphics processes on the GPU and its MIG devices, without MPS servers: the list has their clients.
    /// `Failed` if one list or one lease of a process is not known.
    pub processes: Reading<Vec<GpuProcess>>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uncertain_lease_of_a_process_stays_uncertain() {
        use gpush_core::attribution::{Doubt, Evidence};
        let certain = Attribution::Lease { id: LeaseId(1), evidence: Evidence::Scope, earlier_runs: Vec::new() };
        assert_eq!(ProcessOwner::from(&certain), ProcessOwner::Lease(LeaseId(1)));
        let doubt = Attribution::Perhaps { leases: vec![LeaseId(1), LeaseId(2)], doubt: Doubt::NoEvidence };
        assert_eq!(ProcessOwner::from(&doubt), ProcessOwner::Perhaps(vec![LeaseId(1), LeaseId(2)]));
        assert_eq!(ProcessOwner::from(&Attribution::NoLease), ProcessOwner::NoLease);
    }
}
