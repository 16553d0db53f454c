//! A GPU as the agent sees it: identity, MIG state, instances, and who uses them.

use std::sync::Arc;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::{
    compute::ComputeMode, lease::LeaseUse, operation::Actor, overrides::Override, policy::Mode,
    timeslice::TimesliceView,
};

/// GPU generation. It decides how a MIG mode change works.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum Architecture {
    /// Kepler to Pascal, in one: nothing of gpush applies to them but being shown.
    Legacy,
    /// Volta.
    Volta,
    /// Turing.
    Turing,
    /// Ampere: a MIG mode change needs a GPU reset.
    Ampere,
    /// Ada Lovelace.
    Ada,
    /// Hopper: MIG mode changes at once and is lost at reboot.
    Hopper,
    /// Blackwell: as Hopper.
    Blackwell,
    /// Newer than this build of gpush.
    Unknown,
}

/// A span of slices: memory slices for a GPU instance, compute slots for a compute instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Placement {
    /// First slice.
    pub start: u8,
    /// Number of slices.
    pub size: u8,
}

impl Placement {
    /// Whether both spans share a slice.
    #[must_use]
    pub fn overlaps(self, other: Self) -> bool {
        self.start < other.start + other.size && other.start < self.start + self.size
    }
}

/// Copy and media engines, in counts.
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
    /// Name, such as `1c.3g.40gb`; the GPU instance profile's own name when it takes all of it.
    pub name: String,
    /// Profile id, as the driver reports it.
    #[serde(rename = "profile_id")]
    pub id: u32,
    /// NVML enum index by which it is asked for and created.
    pub index: u32,
    /// Compute slices.
    pub slices: u8,
    /// Largest number of such instances in one GPU instance.
    pub max: u8,
    /// Streaming multiprocessors.
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
    /// Profile id, as the driver reports it and takes it at creation.
    #[serde(rename = "profile_id")]
    pub id: u32,
    /// NVML enum index by which it is asked for.
    pub index: u32,
    /// Compute slices.
    pub slices: u8,
    /// Largest number of such instances on the GPU.
    pub max: u8,
    /// How many more the driver would make now; `None` with MIG off or when it does not say.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remaining: Option<u8>,
    /// Memory in MiB.
    pub memory_mib: u64,
    /// Streaming multiprocessors.
    pub sm: u32,
    /// Engines that one instance takes.
    pub engines: Engines,
    /// Whether it can do graphics.
    #[serde(default)]
    pub gfx: bool,
    /// Possible placements in memory slices, in the driver's order.
    pub placements: Vec<Placement>,
    /// Compute instance profiles in it.
    #[serde(rename = "compute_profiles")]
    pub compute: Vec<ComputeProfile>,
}

/// What a process uses the GPU for, by the driver list in which it was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum ProcessKind {
    /// A CUDA context of its own.
    Compute,
    /// A graphics context.
    Graphics,
    /// A client of an MPS server.
    MpsClient,
}

/// A process that holds a GPU or MIG device. What the asker may not see is absent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Process {
    /// Process id in the host's pid namespace.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// User id of the process.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    /// User name; `None` to askers who may not know, or when the uid has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Command line, for its owner and admins; at most 256 characters.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
    /// Kind of context.
    pub kind: ProcessKind,
    /// Memory in use on this GPU or MIG device, MiB, when the driver tells.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_mib: Option<u64>,
}

/// A compute instance: the MIG device that programs see.
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
    /// Placement in compute slots; `None` when the driver does not say.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub placement: Option<Placement>,
    /// `MIG-<uuid>`: the same slot re-created gets the same one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
    /// Processes in it.
    #[serde(default)]
    pub processes: Vec<Process>,
}

/// A GPU instance, with or without compute instances.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct GpuInstance {
    /// GPU instance id: the physical slot, not the placement.
    #[serde(rename = "gi")]
    pub id: u32,
    /// Profile id.
    pub profile_id: u32,
    /// Profile name; `profile <id>` when this build does not know it.
    pub profile: String,
    /// Placement in memory slices.
    pub placement: Placement,
    /// Memory of the instance, as its MIG device reports it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<Memory>,
    /// Compute instances, by id.
    #[serde(default, rename = "compute_instances")]
    pub compute: Vec<ComputeInstance>,
    /// Processes that the driver charges to this GPU instance but to no compute instance.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub processes: Vec<Process>,
}

/// Memory in MiB.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Memory {
    /// Capacity.
    pub total_mib: u64,
    /// In use, reserved memory included.
    pub used_mib: u64,
}

/// What the NVLink ports of a GPU lead to.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct NvLink {
    /// Ports that lead somewhere.
    pub links: u32,
    /// Whether some lead to an NVSwitch, and so to every GPU on it.
    #[serde(default)]
    pub switched: bool,
    /// PCI addresses of the GPUs that some lead to directly.
    #[serde(default)]
    pub peers: Vec<String>,
}

/// Sensors and error counters of a GPU. A value that the driver does not report is absent: of a GPU in MIG mode it does
/// not report the utilization.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Sensors {
    /// Percentage of the time in which a kernel ran.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub utilization_percent: Option<u32>,
    /// Percentage of the time in which device memory was read or written.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_utilization_percent: Option<u32>,
    /// Temperature of the GPU core, °C.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub temperature_c: Option<u32>,
    /// Power draw, mW.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power_mw: Option<u32>,
    /// Enforced power limit, mW.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power_limit_mw: Option<u32>,
    /// Corrected ECC errors since the driver was loaded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ecc_corrected: Option<u64>,
    /// Uncorrected ECC errors since the driver was loaded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ecc_uncorrected: Option<u64>,
}

/// MIG side of a GPU that can do MIG.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Mig {
    /// Whether MIG mode is on now.
    pub enabled: bool,
    /// Whether the next GPU reset changes MIG mode: from off to on, or from on to off.
    pub reset_pending: bool,
    /// Memory slices of the part (8 on an A100, 4 on an A30, 12 on an RTX PRO 6000).
    pub memory_slices: u8,
    /// Compute slices of the part.
    pub compute_slices: u8,
    /// GPU instances by placement.
    pub instances: Vec<GpuInstance>,
    /// Profiles, largest last. Left out of lists unless asked for with `?profiles=true`. Shared, since
    /// they are most of a GPU and rarely looked at.
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

    /// Returns whether MIG mode is off, and stays off after a GPU reset.
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

/// Whether the agent works with a GPU. Several may hold at once: the first of them, from below, is
/// the state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum GpuState {
    /// Can be used and reshaped.
    Ready,
    /// No new work, by an administrator or by a fault that the driver reported; reshaped only by
    /// those who name it.
    Cordoned,
    /// A change failed and its rollback too.
    Degraded,
    /// An operation is changing it.
    Changing,
    /// What was promised about it was lost: nothing is admitted or reshaped until a reboot or
    /// `gpushctl recover`.
    Held,
    /// A driver call passed its deadline and may still land, or the GPU cannot be read.
    Unknown,
    /// The driver says that the GPU is lost (fallen off the bus).
    Lost,
    /// The host is in maintenance: the agent has no handle open, and shows what it saw last.
    Maintenance,
}

/// Why a GPU takes no new work.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Cordon {
    /// What brought it about, for programs: `admin`, `xid-79`, `row-remap`.
    pub cause: String,
    /// Why, for people.
    pub reason: String,
    /// Who set it; absent when the agent did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by: Option<Actor>,
    /// Since when.
    #[serde(with = "crate::timestamp")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub since: Timestamp,
}

/// How a sentence in [`Gpu::reasons`] begins that says why `processes_known` is false.
pub const USERS_UNKNOWN: &str = "which processes use it is not known";

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
    /// Index in this driver session; shifts when a GPU is lost. Key things by `uuid`.
    pub index: u32,
    /// `GPU-<uuid>`.
    pub uuid: String,
    /// PCI address, `0000:07:00.0`.
    pub pci: String,
    /// PCI device id and vendor as NVML packs them, `0x20B210DE`; `None` when it was not told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pci_id: Option<String>,
    /// The same of the PCI subsystem: who built the board.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pci_subsystem: Option<String>,
    /// Device minor number: `/dev/nvidia<minor>`.
    pub minor: u32,
    /// Product name, as the driver tells it.
    pub name: String,
    /// Generation.
    pub architecture: Architecture,
    /// Memory of the whole GPU.
    pub memory: Memory,
    /// How the config wants it shared.
    pub mode: Mode,
    /// Name or position of the config rule that claims it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rule: Option<String>,
    /// Layout that is wanted, in canonical text: the override's while one stands, else the rule's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layout: Option<Vec<String>>,
    /// What somebody asked for in place of the rule's layout.
    #[serde(default, rename = "override", skip_serializing_if = "Option::is_none")]
    pub overridden: Option<Override>,
    /// Difference between wanted and real, one sentence each; empty when they agree.
    #[serde(default)]
    pub drift: Vec<String>,
    /// Whether the agent works with it.
    pub state: GpuState,
    /// Why `state` is what it is.
    #[serde(default)]
    pub reasons: Vec<String>,
    /// What keeps new work off it, whatever `state` says beside.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cordons: Vec<Cordon>,
    /// MIG side; `None` on parts without MIG.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mig: Option<Mig>,
    /// Who may make a CUDA context on it; `None` when the driver does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compute_mode: Option<ComputeMode>,
    /// How it is shared by turns; `None` when its rule is not of mode `timeslice`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeslice: Option<TimesliceView>,
    /// NVLink; `None` where no port leads anywhere.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nvlink: Option<NvLink>,
    /// Utilization, temperature, power and ECC errors, from the same reading.
    #[serde(default)]
    pub sensors: Sensors,
    /// Processes on the GPU as a whole (not in a MIG device).
    #[serde(default)]
    pub processes: Vec<Process>,
    /// Leases on the GPU and its MIG devices. A leased target is in use, whether processes run on it or not.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub leases: Vec<LeaseUse>,
    /// Whether the driver told of all processes. While it is false, an instance without
    /// processes may be in use all the same, and nothing on the GPU is destroyed. Absent when true.
    #[serde(default = "yes", skip_serializing_if = "is_true")]
    pub processes_known: bool,
    /// When the hardware was read.
    #[serde(with = "crate::timestamp")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub observed_at: Timestamp,
    /// Whether a newer reading was wanted and could not be had.
    #[serde(default)]
    pub stale: bool,
}
