//! Samples of a GPU: activity, memory, power and processes, for figures about use. A [`Reading`](crate::Reading) is for
//! decisions about shares, and costs about ten times as many driver calls.
//!
//! Every value is optional. A value that the driver does not report, or that cannot be right, is absent: it is never 0.
//! [`Activity::doubt`] and [`Sample::doubts`] say why.

use gpush_api::{GpuUuid, SignalSource};
use serde::{Deserialize, Serialize};

/// A part of a whole, from 0 to 1.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Ratio(u32);

impl Ratio {
    /// Nothing.
    pub const ZERO: Self = Self(0);

    /// Creates a ratio from parts per million. A larger number than a million becomes a million.
    #[must_use]
    pub const fn from_ppm(ppm: u32) -> Self {
        Self(if ppm > 1_000_000 { 1_000_000 } else { ppm })
    }

    /// Returns the ratio in parts per million.
    #[must_use]
    pub const fn ppm(self) -> u32 {
        self.0
    }

    /// Returns the ratio as a number from 0 to 1.
    #[must_use]
    pub fn get(self) -> f64 {
        f64::from(self.0) / 1e6
    }

    /// Converts a percentage of the driver. A positive value never becomes 0: one short kernel in a long window must not
    /// look like no work.
    ///
    /// # Errors
    /// Why the percentage cannot be right.
    pub fn from_percent(percent: f64) -> Result<Self, Doubt> {
        /// A mean over a window can be above 100 % by the error of the two times.
        const TOLERANCE: f64 = 1.0;
        if percent.is_nan() {
            Err(Doubt::NotANumber)
        } else if (0.0..=100.0 + TOLERANCE).contains(&percent) {
            // The range was checked, so the conversion is exact to the unit.
            let least = if percent > 0.0 { 1.0 } else { 0.0 };
            Ok(Self::from_ppm((percent * 1e4).round().max(least) as u32))
        } else {
            Err(Doubt::Impossible)
        }
    }
}

/// Why a value is absent that the GPU has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Doubt {
    /// The value is not a number. The driver reports this for a window that is too short.
    NotANumber,
    /// The value is negative or above 100 %.
    Impossible,
    /// The process does not use this GPU.
    ForeignProcess,
    /// The time of the value is not newer than that of the last sample.
    StaleTime,
    /// The GPU instance has no data, because it has no compute instance.
    NoData,
    /// There is no complete window: the GPU instance is new, or the worker was started again.
    FirstSample,
    /// The window continues: this sample did not read the instance, because of [`Wanted::windows`].
    Skipped,
    /// The driver call failed.
    Failed,
}

/// What to read beyond field values. Each part has a price in driver calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wanted {
    /// Largest number of GPU instances whose window ends with this sample: 2 calls each. The instances whose window is
    /// the longest come first, so that no time is lost: each window is the mean over all time since the last one.
    pub windows: u8,
    /// The processes with their memory: 1 call for compute processes, and with MIG off 1 call for graphics processes.
    pub processes: bool,
    /// The utilization of each process, if MIG is off: 1 call. Needs `processes`.
    pub process_activity: bool,
    /// With MIG on, the memory of the GPU and of each GPU instance: 1 call each. With MIG off, the memory of the GPU is
    /// always read.
    pub memory: bool,
    /// Core temperature, clocks, and the reasons why the clocks are below their maximum: 4 calls.
    pub board: bool,
}

impl Default for Wanted {
    /// At most 8 calls for a GPU, also with 7 GPU instances: 64 calls for 8 such GPUs.
    fn default() -> Self {
        Self { windows: 3, processes: true, process_activity: true, memory: false, board: false }
    }
}

impl Wanted {
    /// Everything at once, for `top`: up to 28 calls for a GPU with 7 GPU instances.
    pub const ALL: Self = Self { windows: u8::MAX, processes: true, process_activity: true, memory: true, board: true };
}

/// A GPU instance to sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct InstanceRef {
    /// GPU instance id.
    pub gi: u32,
    /// The caller's number of the instance. A new instance in the same slot has the same id and UUIDs, but must have
    /// another generation: its window then begins again.
    pub generation: u64,
}

/// Activity of a GPU or of a GPU instance. A ratio is relative to the GPU or the instance.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Activity {
    /// Where the ratios come from.
    pub source: SignalSource,
    /// Length of the time that the ratios are a mean of, in µs of the driver's clock. `None` is the present moment.
    pub window_us: Option<u64>,
    /// Part of the time in which a kernel ran.
    pub busy: Option<Ratio>,
    /// Active streaming multiprocessors.
    pub sm: Option<Ratio>,
    /// Occupancy of the streaming multiprocessors.
    pub occupancy: Option<Ratio>,
    /// Active tensor cores.
    pub tensor: Option<Ratio>,
    /// Memory bandwidth.
    pub dram: Option<Ratio>,
    /// Why ratios are absent.
    pub doubt: Option<Doubt>,
}

/// Memory in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryUse {
    /// Capacity.
    pub total_bytes: u64,
    /// Used memory, including the memory that the driver reserves.
    pub used_bytes: u64,
}

/// A sampled GPU instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct InstanceSample {
    /// The instance, as in the request.
    pub instance: InstanceRef,
    /// Activity of the instance.
    pub activity: Activity,
    /// Memory of the instance, if [`Wanted::memory`].
    pub memory: Option<MemoryUse>,
}

/// A process on the GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessSample {
    /// Process id.
    pub pid: u32,
    /// GPU instance id.
    pub gi: Option<u32>,
    /// Compute instance id.
    pub ci: Option<u32>,
    /// Used memory in bytes.
    pub memory_bytes: Option<u64>,
    /// Part of the time in which a kernel of the process ran. Under MPS, this is an estimate that no document confirms.
    pub busy: Option<Ratio>,
    /// Part of the memory bandwidth.
    pub dram: Option<Ratio>,
}

/// How long something limited the clocks since the driver was loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LimitedTime {
    /// The power limit, in ns.
    pub power_ns: Option<u64>,
    /// The temperature, in ns.
    pub thermal_ns: Option<u64>,
}

/// Number of values that were left out, by reason.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Doubts {
    /// See [`Doubt::NotANumber`].
    pub not_a_number: u32,
    /// See [`Doubt::Impossible`].
    pub impossible: u32,
    /// See [`Doubt::ForeignProcess`].
    pub foreign_process: u32,
    /// See [`Doubt::StaleTime`].
    pub stale_time: u32,
    /// See [`Doubt::Failed`].
    pub failed: u32,
}

impl Doubts {
    /// Counts a value that was left out. A window that is not complete yet is not counted.
    pub fn count(&mut self, doubt: Doubt) {
        match doubt {
            Doubt::NotANumber => self.not_a_number += 1,
            Doubt::Impossible => self.impossible += 1,
            Doubt::ForeignProcess => self.foreign_process += 1,
            Doubt::StaleTime => self.stale_time += 1,
            Doubt::Failed => self.failed += 1,
            Doubt::NoData | Doubt::FirstSample | Doubt::Skipped => {}
        }
    }

    /// Returns whether values were left out that the driver should have reported correctly.
    #[must_use]
    pub fn any(&self) -> bool {
        *self != Self::default()
    }
}

/// A sample of one GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sample {
    /// The GPU.
    pub uuid: GpuUuid,
    /// Time of the sample on the driver's clock, in µs since the epoch.
    pub at_us: u64,
    /// Activity of the whole GPU. With MIG on, it has no ratios: see `instances`.
    pub activity: Activity,
    /// Memory of the whole GPU.
    pub memory: Option<MemoryUse>,
    /// GPU instances, in the order of the request.
    pub instances: Vec<InstanceSample>,
    /// Compute and graphics processes, including MPS clients. `None` if they are not wanted or cannot be listed.
    pub processes: Option<Vec<ProcessSample>>,
    /// Energy in mJ since the driver was loaded or the GPU was reset. A smaller value than the last one is a new start.
    pub energy_mj: Option<u64>,
    /// Power in mW.
    pub power_mw: Option<u32>,
    /// Effective power limit in mW.
    pub power_limit_mw: Option<u32>,
    /// Core temperature in °C, if [`Wanted::board`].
    pub temperature_c: Option<u32>,
    /// Memory temperature in °C.
    pub memory_temperature_c: Option<u32>,
    /// Clock of the streaming multiprocessors in MHz, if [`Wanted::board`].
    pub sm_clock_mhz: Option<u32>,
    /// Memory clock in MHz, if [`Wanted::board`].
    pub memory_clock_mhz: Option<u32>,
    /// Why the clocks are below their maximum, as bits of NVML (`nvmlClocksEventReason*`), if [`Wanted::board`].
    pub event_reasons: Option<u64>,
    /// How long limits lowered the clocks.
    pub limited: LimitedTime,
    /// Number of values that were left out.
    pub doubts: Doubts,
    /// Duration of the sample in the worker, in µs.
    pub took_us: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn impossible_percentages_are_doubted() {
        assert_eq!(Ratio::from_percent(37.5), Ok(Ratio::from_ppm(375_000)));
        assert_eq!(Ratio::from_percent(100.4), Ok(Ratio::from_ppm(1_000_000)));
        assert_eq!(Ratio::from_percent(1e-9), Ok(Ratio::from_ppm(1)), "it is not nothing");
        assert_eq!(Ratio::from_percent(0.0), Ok(Ratio::ZERO));
        for percent in [-0.1, 101.1, f64::INFINITY, f64::NEG_INFINITY, 1.8e19] {
            assert_eq!(Ratio::from_percent(percent), Err(Doubt::Impossible), "{percent}");
        }
        assert_eq!(Ratio::from_percent(f64::NAN), Err(Doubt::NotANumber));
        assert!((Ratio::from_ppm(250_000).get() - 0.25).abs() < f64::EPSILON);
    }

    #[test]
    fn incomplete_windows_are_not_counted_as_doubts() {
        let mut doubts = Doubts::default();
        [Doubt::NoData, Doubt::FirstSample, Doubt::Skipped].into_iter().for_each(|doubt| doubts.count(doubt));
        assert!(!doubts.any());
        [Doubt::StaleTime, Doubt::StaleTime, Doubt::NotANumber].into_iter().for_each(|doubt| doubts.count(doubt));
        assert!(doubts.any());
        assert_eq!((doubts.stale_time, doubts.not_a_number), (2, 1));
    }
}
