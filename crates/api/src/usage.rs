//! What leases and GPUs are used for: `GET /v1/usage`.
//!
//! A figure that the driver does not report, or that cannot be right, is absent: it is never 0.
//! Ratios are from 0 to 1. The ratios of a GPU instance are relative to the instance.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::{GpuIndex, GpuUuid, LeaseId, TargetUuid};

/// What a lease does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum UseState {
    /// It works.
    Busy,
    /// It has a process on the GPU, and does no work.
    Idle,
    /// It has no process on the GPU.
    Empty,
    /// It is not known.
    Unknown,
}

impl UseState {
    /// All states.
    pub const ALL: [Self; 4] = [Self::Busy, Self::Idle, Self::Empty, Self::Unknown];

    /// Returns the name in JSON and in messages.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Busy => "busy",
            Self::Idle => "idle",
            Self::Empty => "empty",
            Self::Unknown => "unknown",
        }
    }

    /// Returns the state of a lease with several members. One busy member makes the lease busy, and one unknown member
    /// keeps it from being idle.
    #[must_use]
    pub fn of_members(members: impl IntoIterator<Item = Self>) -> Self {
        let rank = |state: &Self| match state {
            Self::Busy => 3,
            Self::Unknown => 2,
            Self::Idle => 1,
            Self::Empty => 0,
        };
        members.into_iter().max_by_key(rank).unwrap_or(Self::Unknown)
    }
}

/// Why a state is unknown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum UnknownReason {
    /// There is no sample: the lease has just begun, sampling has paused, or samples were late.
    NoSample,
    /// A wanted reading has failed.
    SourceFailed,
    /// The GPU reports no activity in its mode, only memory and processes.
    MemoryOnly,
    /// The activity is zero, but the board needs more power than with an idle context.
    PowerDisagrees,
    /// The activity is zero, but it is not yet known how much power the board needs without work.
    NoPowerLevel,
    /// The activity is zero, but the memory of a process has changed.
    MemoryChanged,
    /// The activity is zero, but a process has started or ended.
    ProcessesChanged,
    /// It is not certain whether a process belongs to the lease.
    UncertainProcess,
    /// The device is active, and several leases use it. The driver does not report which of them works.
    SharedDevice,
}

impl UnknownReason {
    /// Returns the name in JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::NoSample => "no_sample",
            Self::SourceFailed => "source_failed",
            Self::MemoryOnly => "memory_only",
            Self::PowerDisagrees => "power_disagrees",
            Self::NoPowerLevel => "no_power_level",
            Self::MemoryChanged => "memory_changed",
            Self::ProcessesChanged => "processes_changed",
            Self::UncertainProcess => "uncertain_process",
            Self::SharedDevice => "shared_device",
        }
    }
}

/// What the activity of a lease is based on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum SignalSource {
    /// GPU performance monitoring: the mean over the whole window (Hopper and later).
    Gpm,
    /// The utilization of the GPU: the part of the time in which a kernel ran.
    Utilization,
    /// The utilization of each process.
    Processes,
    /// Process list and memory only.
    MemoryOnly,
    /// Nothing.
    #[default]
    None,
}

/// How the energy of a lease was found. A later method is less exact.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum EnergyMethod {
    /// There is no energy.
    #[default]
    None,
    /// The lease had the whole GPU, so the counter of the board is the energy of the lease.
    Board,
    /// By the activity of the GPU instance.
    Gpm,
    /// By the use of the processes. Under MPS, these figures are estimates.
    Process,
    /// By the shares of the leases that had a process.
    Slices,
}

impl EnergyMethod {
    /// Returns the name in JSON, labels and columns.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Board => "board",
            Self::Gpm => "gpm",
            Self::Process => "process",
            Self::Slices => "slices",
        }
    }
}

/// What the GPUs and leases of the host are used for.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct HostUsage {
    /// Pause between two samples in ms; absent if gpushd takes no samples at present.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interval_ms: Option<u64>,
    /// The GPUs, by index.
    pub gpu_usage: Vec<GpuUsage>,
    /// The leases that hold capacity. Other users' leases are left out, except for administrators.
    pub lease_usage: Vec<LeaseUsage>,
}

/// Activity in one window.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct DeviceActivity {
    /// Part of the time in which a kernel ran.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub busy: Option<f64>,
    /// Active streaming multiprocessors.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sm_activity: Option<f64>,
    /// Occupancy of the streaming multiprocessors.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub occupancy: Option<f64>,
    /// Active tensor cores.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tensor_activity: Option<f64>,
    /// Memory bandwidth.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dram_activity: Option<f64>,
}

/// What a GPU is used for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct GpuUsage {
    /// Index of the GPU.
    #[cfg_attr(feature = "openapi", schema(value_type = u32))]
    pub gpu: GpuIndex,
    /// UUID of the GPU.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub gpu_uuid: GpuUuid,
    /// Time of the last sample; absent if there is none.
    #[serde(default, with = "crate::timestamp::optional", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, format = DateTime))]
    pub sampled_at: Option<Timestamp>,
    /// Why the last attempt gave no sample.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
    /// What the activity is based on.
    pub source: SignalSource,
    /// Activity of the whole GPU. With MIG, see `instance_usage`.
    pub activity: DeviceActivity,
    /// Used memory in MiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_used_mib: Option<u64>,
    /// Power in W.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power_w: Option<f64>,
    /// Power limit in W.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power_limit_w: Option<f64>,
    /// Energy in J since the driver was loaded or the GPU was reset.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub energy_j: Option<f64>,
    /// Energy in J that no lease used, since gpushd accounts the GPU.
    pub unattributed_j: f64,
    /// Core temperature in °C.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub temperature_c: Option<u32>,
    /// Memory temperature in °C.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_temperature_c: Option<u32>,
    /// Clock of the streaming multiprocessors in MHz.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sm_clock_mhz: Option<u32>,
    /// Memory clock in MHz.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_clock_mhz: Option<u32>,
    /// What keeps the clocks below their maximum: `power`, `thermal`, `hardware`, `sync`, `setting`. Absent if it is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limited_by: Option<Vec<ClockLimit>>,
    /// Part of the GPU that leases hold.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub leased: Option<f64>,
    /// Part of the GPU that leases hold without work; absent without a recent sample.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unused: Option<f64>,
    /// Part of the GPU that no lease can have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unusable: Option<f64>,
    /// GPU instances.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub instance_usage: Vec<InstanceUsage>,
}

/// What keeps the clocks of a GPU below their maximum.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum ClockLimit {
    /// The power limit.
    Power,
    /// The temperature.
    Thermal,
    /// The hardware itself, for example because of the power supply.
    Hardware,
    /// The clocks of other GPUs.
    Sync,
    /// A setting of the administrator.
    Setting,
}

impl ClockLimit {
    /// All limits.
    pub const ALL: [Self; 5] = [Self::Power, Self::Thermal, Self::Hardware, Self::Sync, Self::Setting];

    /// Returns the name in JSON and in labels.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Power => "power",
            Self::Thermal => "thermal",
            Self::Hardware => "hardware",
            Self::Sync => "sync",
            Self::Setting => "setting",
        }
    }
}

/// What a GPU instance is used for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct InstanceUsage {
    /// GPU instance id.
    pub gi: u32,
    /// Profile, such as `3g.40gb`.
    pub profile: String,
    /// Activity of the instance. The driver reports it for GPU instances, not for compute instances.
    pub activity: DeviceActivity,
    /// Used memory in MiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_used_mib: Option<u64>,
    /// Memory in MiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_total_mib: Option<u64>,
}

/// What a lease is used for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct LeaseUsage {
    /// Id of the lease.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub lease_id: LeaseId,
    /// What the lease does.
    pub state: UseState,
    /// Why the state is unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<UnknownReason>,
    /// Whether an idle state is not certain on one of the targets: see `weak` in `target_usage`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub weak: bool,
    /// Start of the state.
    #[serde(with = "crate::timestamp")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub since: Timestamp,
    /// Start of the time in which the lease has done no work.
    #[serde(default, with = "crate::timestamp::optional", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, format = DateTime))]
    pub unused_since: Option<Timestamp>,
    /// Seconds in which the lease has done no work, until now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unused_s: Option<u64>,
    /// Time of work in seconds.
    pub busy_s: u64,
    /// Time with a process and without work, in seconds.
    pub idle_s: u64,
    /// Time without a process, in seconds.
    pub empty_s: u64,
    /// Time of which gpushd does not know what the lease did, in seconds.
    pub unknown_s: u64,
    /// Energy in J.
    pub energy_j: f64,
    /// How most of the energy was found.
    pub energy_method: EnergyMethod,
    /// Whether a part of the energy was found by another method.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub energy_mixed: bool,
    /// The use of each target.
    pub target_usage: Vec<TargetUsage>,
}

/// What a lease is used for on one target.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct TargetUsage {
    /// UUID of the target.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub target: TargetUuid,
    /// UUID of the GPU.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub gpu_uuid: GpuUuid,
    /// What the activity is based on.
    pub source: SignalSource,
    /// Whether the figures are estimates, because processes share the device.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub estimate: bool,
    /// Whether an idle state rests on the activity readings alone, because the work of neighbours hides the power that the
    /// lease needs. Such a state never ends a lease.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub weak: bool,
    /// Active streaming multiprocessors in the last window. On a device that several leases use, it is an estimate: the part
    /// of the time in which the processes of the lease worked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sm_activity: Option<f64>,
    /// Memory bandwidth in the last window.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dram_activity: Option<f64>,
    /// Mean of `sm_activity` over the life of the lease.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sm_mean: Option<f64>,
    /// Memory of the processes in MiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_mib: Option<u64>,
    /// Largest memory in MiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_peak_mib: Option<u64>,
    /// Memory in MiB that was not exceeded in 98 % of the time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_p98_mib: Option<u64>,
}

/// What a lease is or was used for, in one line: the sums over its targets.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct LeaseUsageSummary {
    /// What the lease does; absent if it has ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<UseState>,
    /// Why the state is unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<UnknownReason>,
    /// Whether an idle state is not certain: other work on the GPU hides the power that the lease needs, so only the
    /// activity readings say that it is idle. Such a state never ends a lease.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub weak: bool,
    /// Start of the time in which the lease has done no work.
    #[serde(default, with = "crate::timestamp::optional", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, format = DateTime))]
    pub unused_since: Option<Timestamp>,
    /// Seconds in which the lease has done no work, until now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unused_s: Option<u64>,
    /// Time of work in seconds.
    pub busy_s: u64,
    /// Time with a process and without work, in seconds.
    pub idle_s: u64,
    /// Time without a process, in seconds.
    pub empty_s: u64,
    /// Time of which gpushd does not know what the lease did, in seconds.
    pub unknown_s: u64,
    /// Number of its processes on the GPUs in the last sample.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process_count: Option<u64>,
    /// Memory of the processes in MiB in the last sample.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_mib: Option<u64>,
    /// Largest memory in MiB, as the sum of the largest memory on each target.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_peak_mib: Option<u64>,
    /// Energy in J; absent if it is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub energy_j: Option<f64>,
    /// How most of the energy was found.
    pub energy_method: EnergyMethod,
    /// Whether a part of the energy was found by another method.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub energy_mixed: bool,
    /// Part of the time in which the power limit lowered the clocks of the GPUs; absent if it is not known. On a shared
    /// GPU, a neighbour can be the cause.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power_limited: Option<f64>,
    /// Part of the time in which the temperature lowered the clocks of the GPUs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub thermal_limited: Option<f64>,
}

/// A minute, an hour or a day of a lease.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct UsageBucket {
    /// Start.
    #[serde(with = "crate::timestamp")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub begins_at: Timestamp,
    /// Time of work in seconds.
    pub busy_s: u64,
    /// Time without work in seconds.
    pub unused_s: u64,
    /// Time of which gpushd does not know what the lease did, in seconds.
    pub unknown_s: u64,
    /// Largest memory in MiB.
    pub memory_peak_mib: u64,
    /// Energy in J.
    pub energy_j: f64,
}

/// The recent past of a lease that has not ended, the oldest part first. A restart of gpushd begins it again.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct LeasePast {
    /// Id of the lease.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub lease_id: LeaseId,
    /// The last 60 minutes.
    pub minutes: Vec<UsageBucket>,
    /// The last 24 hours.
    pub hours: Vec<UsageBucket>,
    /// The last 7 days, by UTC.
    pub days: Vec<UsageBucket>,
}
