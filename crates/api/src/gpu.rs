//! A GPU as gpushd reads it: identity, MIG state, instances, and the processes that use them.

use std::{collections::BTreeSet, sync::Arc};

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::{
    actor::Actor,
    compute::ComputeMode,
    holder::Holder,
    ids::{GpuIndex, GpuUuid, TargetUuid},
    lease::{LeaseAccess, LeaseUse},
    mode::Mode,
    overrides::Override,
    pending::PendingChange,
    placement::Placement,
    process::{Process, UnleasedProcess},
    timeslice::TimesliceView,
};

/// GPU generation. It determines how a change of MIG mode works.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum Architecture {
    /// Kepler to Pascal. gpush can only show these GPUs, not change them.
    Legacy,
    /// Volta.
    Volta,
    /// Turing.
    Turing,
    /// Ampere. A change of MIG mode needs a GPU reset.
    Ampere,
    /// Ada Lovelace.
    Ada,
    /// Hopper. A change of MIG mode takes effect without a reset. MIG mode is off after a reboot.
    Hopper,
    /// Blackwell. MIG mode works as on Hopper.
    Blackwell,
    /// A generation that this version of gpush does not know.
    Unknown,
}

/// Numbers of copy and media engines.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Engines {
    /// Copy engines.
    pub copy: u8,
    /// Video decoders (NVDEC).
    pub decoder: u8,
    /// Video encoders (NVENC).
    pub encoder: u8,
    /// JPEG decoders (NVJPG).
    pub jpeg: u8,
    /// Optical flow accelerators.
    pub ofa: u8,
}

/// A compute instance profile within a GPU instance profile.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ComputeProfile {
    /// Name, such as `1c.3g.40gb`. If the compute instance uses all compute slices, this is the
    /// name of the GPU instance profile.
    pub name: String,
    /// Profile id, as the driver reports it.
    #[serde(rename = "profile_id")]
    pub id: u32,
    /// NVML enum value for queries and for creation.
    pub index: u32,
    /// Number of compute slices.
    pub slices: u8,
    /// Maximum number of such instances in one GPU instance.
    pub max: u8,
    /// Number of streaming multiprocessors.
    pub sm: u32,
    /// Possible placements in compute slots, in the driver's order.
    pub placements: Vec<Placement>,
}

/// A GPU instance profile of one GPU, as its driver describes it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct GpuProfile {
    /// Name, such as `3g.40gb`, without NVML's `MIG ` prefix.
    pub name: String,
    /// Profile id in the driver's reports and in requests to create an instance.
    #[serde(rename = "profile_id")]
    pub id: u32,
    /// NVML enum value for queries.
    pub index: u32,
    /// Number of compute slices.
    pub slices: u8,
    /// Maximum number of such instances on the GPU.
    pub max: u8,
    /// Number of such instances that the driver can still create; absent if MIG mode is off or the driver does not
    /// report it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remaining: Option<u8>,
    /// Memory of one instance, in MiB.
    pub memory_mib: u64,
    /// Number of streaming multiprocessors.
    pub sm: u32,
    /// Engines of one instance.
    pub engines: Engines,
    /// Whether instances support graphics.
    #[serde(default)]
    pub gfx: bool,
    /// Possible placements in memory slices, in the driver's order.
    pub placements: Vec<Placement>,
    /// Compute instance profiles in such an instance.
    #[serde(rename = "compute_profiles")]
    pub compute: Vec<ComputeProfile>,
}

/// A compute instance: the MIG device that programs use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ComputeInstance {
    /// Compute instance id within its GPU instance.
    #[serde(rename = "ci")]
    pub id: u32,
    /// Profile id.
    pub profile_id: u32,
    /// Profile name, such as `1c.3g.40gb`.
    pub profile: String,
    /// Placement in compute slots; absent if the driver does not report it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub placement: Option<Placement>,
    /// UUID of the MIG device, `MIG-<uuid>`. An instance that is created again in the same slot gets the same UUID.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>))]
    pub uuid: Option<TargetUuid>,
    /// Processes on the MIG device.
    #[serde(default)]
    pub processes: Vec<Process>,
}

/// A GPU instance, with or without compute instances.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct GpuInstance {
    /// GPU instance id. It identifies a physical slot, which is not the placement.
    #[serde(rename = "gi")]
    pub id: u32,
    /// Profile id.
    pub profile_id: u32,
    /// Profile name; `profile <id>` if this version of gpush does not know the profile.
    pub profile: String,
    /// Placement in memory slices.
    pub placement: Placement,
    /// Memory of the instance, as its MIG device reports it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<Memory>,
    /// Compute instances, in the order of their ids.
    #[serde(default, rename = "compute_instances")]
    pub compute: Vec<ComputeInstance>,
    /// Processes that the driver reports for this GPU instance but not for one of its compute instances.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub processes: Vec<Process>,
}

/// Total and used memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Memory {
    /// Capacity in MiB.
    pub total_mib: u64,
    /// Memory in use, in MiB. Includes the memory that the driver reserves.
    pub used_mib: u64,
}

/// NVLink connections of a GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct NvLink {
    /// Number of connected ports.
    pub links: u32,
    /// Whether some ports connect to an NVSwitch, and through the switch to all GPUs on it.
    #[serde(default)]
    pub switched: bool,
    /// PCI addresses of the GPUs that are connected directly.
    #[serde(default)]
    pub peers: Vec<String>,
}

/// Sensors and error counters of a GPU. A value that the driver does not report is absent. In MIG
/// mode, the driver does not report utilization.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Sensors {
    /// Percentage of the time in which a kernel ran.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub utilization_percent: Option<u32>,
    /// Percentage of the time in which device memory was read or written.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_utilization_percent: Option<u32>,
    /// Temperature of the GPU core, in °C.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub temperature_c: Option<u32>,
    /// Power draw, in mW.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power_mw: Option<u32>,
    /// Enforced power limit, in mW.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power_limit_mw: Option<u32>,
    /// Number of corrected ECC errors since the driver was loaded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ecc_corrected: Option<u64>,
    /// Number of uncorrected ECC errors since the driver was loaded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ecc_uncorrected: Option<u64>,
}

/// MIG state of a GPU that supports MIG.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Mig {
    /// Whether MIG mode is on now.
    pub enabled: bool,
    /// Whether the next GPU reset changes MIG mode: from off to on, or from on to off.
    pub reset_pending: bool,
    /// Number of memory slices of the GPU: 8 on an A100, 4 on an A30, 12 on an RTX PRO 6000.
    pub memory_slices: u8,
    /// Number of compute slices of the GPU.
    pub compute_slices: u8,
    /// GPU instances, in the order of their placements.
    pub instances: Vec<GpuInstance>,
    /// Profiles, smallest first. `GET /v1/gpus` omits them unless `?profiles=true` is set.
    // `Arc`: copies of the GPU share the profiles, because they are large and rarely used.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "openapi", schema(value_type = Vec<GpuProfile>))]
    pub profiles: Arc<Vec<GpuProfile>>,
}

impl Mig {
    /// Returns whether MIG mode is on after the next GPU reset: NVML's pending mode.
    #[must_use]
    pub fn pending_mode(&self) -> bool {
        self.enabled != self.reset_pending
    }

    /// Returns whether MIG mode is off now and also after the next GPU reset.
    #[must_use]
    pub fn is_off(&self) -> bool {
        !self.enabled && !self.reset_pending
    }

    /// Sets the current mode and NVML's pending mode.
    pub fn set_mode(&mut self, enabled: bool, pending: bool) {
        self.enabled = enabled;
        self.reset_pending = enabled != pending;
    }
}

/// State of a GPU. If several states apply, gpushd reports the one that is last in this list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum GpuState {
    /// The GPU can be used and changed.
    Ready,
    /// The GPU gets no new work: gpushd grants no leases on it and admits no new MPS clients. An
    /// administrator set a cordon, or gpushd set one after a reported fault. A request to change
    /// the layout must name the GPU.
    Cordoned,
    /// A change failed, and its rollback failed too.
    Degraded,
    /// An operation is changing the GPU.
    Changing,
    /// gpushd does not know who may use the GPU, so it grants and changes nothing there. Either the database was lost,
    /// until a reboot or `gpushctl recover`; or the config cannot be used, until a valid config is loaded.
    Held,
    /// A driver call exceeded its deadline and may still take effect, or the GPU cannot be read.
    Unknown,
    /// The driver reports that the GPU fell off the bus, or no longer lists it.
    Lost,
    /// The host is in maintenance: gpushd has no open driver handle, and shows its last reading.
    Maintenance,
}

impl GpuState {
    /// All states.
    pub const ALL: [Self; 8] = [
        Self::Ready,
        Self::Cordoned,
        Self::Degraded,
        Self::Changing,
        Self::Held,
        Self::Unknown,
        Self::Lost,
        Self::Maintenance,
    ];

    /// Returns the name in JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Ready => "ready",
            Self::Cordoned => "cordoned",
            Self::Degraded => "degraded",
            Self::Changing => "changing",
            Self::Held => "held",
            Self::Unknown => "unknown",
            Self::Lost => "lost",
            Self::Maintenance => "maintenance",
        }
    }
}

/// A cordon, which blocks new work on a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Cordon {
    /// Cause, for programs: `admin`, `xid-79`, `row-remap`.
    pub cause: String,
    /// Reason, for users.
    pub reason: String,
    /// User who set the cordon; absent if gpushd did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by: Option<Actor>,
    /// Time at which the cordon was set.
    #[serde(with = "crate::timestamp")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub since: Timestamp,
}

/// The hint about how to recover a lost GPU. nvidia-smi gives the same advice ("Reboot the system
/// to recover this GPU"): a GPU that does not answer on the bus cannot be reset.
pub const LOST_GPU_HINT: &str = "find the cause with `dmesg | grep -i xid`, then reboot the host (administrator): a GPU that is off the bus cannot \
    be reset";

/// Clause of messages about a GPU whose `processes_known` is false.
pub const USERS_UNKNOWN: &str = "the processes that use the GPU are not known";

fn yes() -> bool {
    true
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
fn is_true(flag: &bool) -> bool {
    *flag
}

/// One physical GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Gpu {
    /// Index in the current driver session. The index may change when a GPU is lost; `uuid` never
    /// changes.
    #[cfg_attr(feature = "openapi", schema(value_type = u32))]
    pub index: GpuIndex,
    /// UUID, `GPU-<uuid>`.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub uuid: GpuUuid,
    /// PCI address, `0000:07:00.0`.
    pub pci: String,
    /// PCI device id and vendor id, in the format of NVML: `0x20B210DE`; absent if not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pci_id: Option<String>,
    /// PCI subsystem ids, which identify the manufacturer of the board, in the same format.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pci_subsystem: Option<String>,
    /// Device minor number: `/dev/nvidia<minor>`.
    pub minor: u32,
    /// Product name, as the driver reports it.
    pub name: String,
    /// GPU generation.
    pub architecture: Architecture,
    /// Whether the GPU is passed through to a virtual machine, in which gpushd runs. Such a GPU cannot be reset there.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub passed_through: bool,
    /// Memory of the whole GPU.
    pub memory: Memory,
    /// How the config shares the GPU.
    pub mode: Mode,
    /// Name or position of the config rule that claims the GPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rule: Option<String>,
    /// Users who may lease the GPU, as the rule says; absent if all users may.
    #[serde(default, rename = "lease_access", skip_serializing_if = "Option::is_none")]
    pub access: Option<LeaseAccess>,
    /// Desired layout in canonical text: the layout of the active override, or of the rule if there
    /// is no override.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layout: Option<Vec<String>>,
    /// Active override, which replaces the rule's layout.
    #[serde(default, rename = "override", skip_serializing_if = "Option::is_none")]
    pub overridden: Option<Override>,
    /// Differences between the desired and the actual state, one sentence each.
    #[serde(default)]
    pub drift: Vec<String>,
    /// Changes that the rule or the override requires, but that gpushd does not make yet because of leases.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pending: Vec<PendingChange>,
    /// State of the GPU.
    pub state: GpuState,
    /// Reasons why the GPU is in this `state`, or why `processes_known` is false, one sentence each.
    #[serde(default)]
    pub reasons: Vec<String>,
    /// Cordons of the GPU. A cordon also applies while `state` shows another state.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cordons: Vec<Cordon>,
    /// MIG state; absent on GPUs without MIG.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mig: Option<Mig>,
    /// Which processes may create a CUDA context; absent if the driver does not report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compute_mode: Option<ComputeMode>,
    /// Time-slicing of the GPU; absent unless its rule has mode `timeslice`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeslice: Option<TimesliceView>,
    /// NVLink connections; absent if no port is connected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nvlink: Option<NvLink>,
    /// Utilization, temperature, power and ECC errors, at the time of the reading.
    #[serde(default)]
    pub sensors: Sensors,
    /// Processes on the whole GPU, not on a MIG device.
    #[serde(default)]
    pub processes: Vec<Process>,
    /// Leases on the GPU and its MIG devices. A leased target is in use even if no process runs on it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub leases: Vec<LeaseUse>,
    /// UUIDs of the GPU and its MIG devices that have an MPS daemon. A plan destroys such a device only if no other plan
    /// is possible.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    #[cfg_attr(feature = "openapi", schema(value_type = BTreeSet<String>))]
    pub mps_daemons: BTreeSet<TargetUuid>,
    /// Whether the driver reported all processes. If false, even an instance without processes may be in use, so gpushd
    /// destroys no instance on the GPU. The field is absent if its value is true.
    #[serde(default = "yes", skip_serializing_if = "is_true")]
    pub processes_known: bool,
    /// Error of the driver because of which `processes_known` is false.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub processes_error: Option<String>,
    /// Processes that must not use the GPU or its MIG devices.
    #[serde(rename = "unleased_processes", default, skip_serializing_if = "Vec::is_empty")]
    pub unleased: Vec<UnleasedProcess>,
    /// What prevents gpushd from applying the rule after a boot, or with `auto_reconcile`. gpushd tries again every 30 s.
    /// Empty if nothing prevents it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub blocked_by: Vec<Holder>,
    /// Time of the reading.
    #[serde(with = "crate::timestamp")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub observed_at: Timestamp,
    /// Whether this reading is old: a newer one was requested but is not available.
    #[serde(default)]
    pub stale: bool,
}

impl Gpu {
    /// Returns whether the MIG mode of the GPU changes when its virtual machine reboots.
    #[must_use]
    pub fn waits_for_reboot(&self) -> bool {
        self.passed_through && self.mig.as_ref().is_some_and(|mig| mig.reset_pending)
    }
}
