//! Readings of a GPU from the driver, which contain everything in [`gpush_api::Gpu`] except policy.

use gpush_api::{Architecture, ComputeMode, GpuIndex, GpuUuid, Memory, Mig, NvLink, Process, Sensors, USERS_UNKNOWN};
use serde::{Deserialize, Serialize};

use crate::error::DriverError;

/// The fixed properties of a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// Index in this driver session. The index changes when a GPU is lost, so use `uuid` to
    /// identify a GPU.
    pub index: GpuIndex,
    /// `GPU-<uuid>`.
    pub uuid: GpuUuid,
    /// PCI address, `0000:07:00.0`.
    pub pci: String,
    /// PCI device id and vendor id as NVML packs them: 0x20b2_10de.
    pub pci_id: u32,
    /// PCI device id and vendor id of the subsystem; `None` if the driver does not report them.
    pub pci_subsystem: Option<u32>,
    /// Device minor number: `/dev/nvidia<minor>`.
    pub minor: u32,
    /// Product name, as the driver reports it.
    pub name: String,
    /// Generation.
    pub architecture: Architecture,
    /// Whether the GPU is passed through to this host, which is a virtual machine. Such a host cannot reset the GPU.
    pub passed_through: bool,
}

impl Identity {
    /// Returns the PCI device id without the vendor id: 0x20b2 is an A100.
    #[must_use]
    pub fn pci_device_id(&self) -> u16 {
        (self.pci_id >> 16) as u16
    }
}

/// One GPU of the driver's list, which also contains GPUs that cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listed {
    /// Index in this driver session.
    pub index: GpuIndex,
    /// The GPU's identity, or why it cannot be read.
    pub identity: Result<Identity, DriverError>,
}

/// A GPU as read from the driver.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reading {
    /// The fixed properties.
    pub identity: Identity,
    /// Memory of the whole GPU.
    pub memory: Memory,
    /// MIG mode, profiles and instances; `None` on GPUs without MIG.
    pub mig: Option<Mig>,
    /// Compute mode, which limits CUDA contexts; `None` if the driver does not report it.
    #[serde(default)]
    pub compute_mode: Option<ComputeMode>,
    /// Peers of the GPU's NVLink ports; `None` if no port has a peer, or the driver does not report them.
    #[serde(default)]
    pub nvlink: Option<NvLink>,
    /// Utilization, temperature, power and ECC errors.
    #[serde(default)]
    pub sensors: Sensors,
    /// Processes on the whole GPU. Only pid, kind and memory are known.
    pub processes: Vec<Process>,
    /// Whether all process lists could be read. If this is false, the GPU may be in use although no
    /// process is listed; the warnings contain the reason.
    pub processes_known: bool,
    /// Row remapper counts; `None` if the GPU or the driver does not report them.
    #[serde(default)]
    pub rows: Option<RemappedRows>,
    /// The parts that cannot be read.
    pub warnings: Vec<Unread>,
}

/// A part of a reading that cannot be read; the other parts are valid.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unread {
    /// The part.
    pub part: ReadingPart,
    /// Error of the driver.
    pub error: String,
}

/// Parts of a reading that can fail separately.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReadingPart {
    /// Processes on the GPU.
    Processes,
    /// The compute mode.
    ComputeMode,
    /// Free capacity of a profile, or the compute instance profiles of a GPU instance.
    Profiles,
    /// Details of instances, or remapped rows of memory.
    Details,
}

impl Unread {
    /// Creates the warning for a part that failed with this error.
    pub(crate) fn new(part: ReadingPart, error: &impl std::fmt::Display) -> Self {
        Self { part, error: error.to_string() }
    }
}

impl std::fmt::Display for Unread {
    /// Writes what cannot be read, and why.
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.part {
            ReadingPart::Processes => write!(out, "{USERS_UNKNOWN}: {}", self.error),
            ReadingPart::ComputeMode | ReadingPart::Profiles | ReadingPart::Details => out.write_str(&self.error),
        }
    }
}

impl Reading {
    /// Returns the first error that makes `part` incomplete; `None` if `part` is complete.
    #[must_use]
    pub fn unread(&self, part: ReadingPart) -> Option<&str> {
        self.warnings.iter().find(|unread| unread.part == part).map(|unread| unread.error.as_str())
    }
}

/// Rows of memory that the GPU replaced by spare rows after ECC errors.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemappedRows {
    /// Rows replaced because of correctable errors.
    pub correctable: u32,
    /// Rows replaced because of uncorrectable errors.
    pub uncorrectable: u32,
    /// Whether a replacement is pending. Until the next reset, the GPU continues to use the bad
    /// row.
    pub pending: bool,
    /// Whether a row could not be replaced. If so, the hardware needs attention.
    pub failed: bool,
}

/// The result of a MIG mode change.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModeChange {
    /// Current mode, read back.
    pub enabled: bool,
    /// Mode after the next reset, read back.
    pub pending: bool,
    /// Why the mode did not change although the driver returned success.
    pub activation: Option<DriverError>,
}

impl ModeChange {
    /// Returns whether the mode is `wanted` and no change is pending.
    #[must_use]
    pub fn is(&self, wanted: bool) -> bool {
        self.enabled == wanted && self.pending == wanted
    }
}

/// An event reported by the driver.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// UUID of the GPU.
    pub uuid: GpuUuid,
    /// Kind of event.
    pub kind: EventKind,
    /// The GPU instance, if the driver names one.
    pub gi: Option<u32>,
    /// The compute instance, if the driver names one.
    pub ci: Option<u32>,
}

/// Kinds of events that gpush listens to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EventKind {
    /// An Xid error, by number.
    Xid(u64),
    /// MIG configuration changed (0x100).
    MigConfigChanged,
    /// Any other event type, by its bits.
    Other(u64),
}
