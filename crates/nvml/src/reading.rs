//! Readings of a GPU from the driver: everything in [`gpush_api::Gpu`] except policy.

use gpush_api::{Architecture, ComputeMode, Memory, Mig, NvLink, Process, Sensors};
use serde::{Deserialize, Serialize};

use crate::error::DriverError;

/// The fixed properties of a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// Index in this driver session. It shifts when a GPU is lost, so identify GPUs by `uuid`.
    pub index: u32,
    /// `GPU-<uuid>`.
    pub uuid: String,
    /// PCI address, `0000:07:00.0`.
    pub pci: String,
    /// PCI device id and vendor as packed by NVML: 0x20b2_10de.
    pub pci_id: u32,
    /// The same for the subsystem; `None` if the driver does not report it.
    pub pci_subsystem: Option<u32>,
    /// Device minor number: `/dev/nvidia<minor>`.
    pub minor: u32,
    /// Product name, as the driver reports it.
    pub name: String,
    /// Generation.
    pub architecture: Architecture,
}

impl Identity {
    /// PCI device id without the vendor's: 0x20b2 is an A100.
    #[must_use]
    pub fn pci_device_id(&self) -> u16 {
        (self.pci_id >> 16) as u16
    }
}

/// One GPU of the driver's enumeration, including unreadable ones.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listed {
    /// Index in this driver session.
    pub index: u32,
    /// Its identity, or why it cannot be read.
    pub identity: Result<Identity, DriverError>,
}

/// A GPU as read from the driver.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reading {
    /// Its identity.
    pub identity: Identity,
    /// Memory of the whole GPU.
    pub memory: Memory,
    /// MIG part, including profiles; `None` on parts without MIG.
    pub mig: Option<Mig>,
    /// Compute mode, which limits CUDA contexts; `None` if the driver does not report it.
    #[serde(default)]
    pub compute_mode: Option<ComputeMode>,
    /// Peers of its NVLink ports; `None` if none has a peer, or the driver does not report them.
    #[serde(default)]
    pub nvlink: Option<NvLink>,
    /// Utilization, temperature, power and ECC errors.
    #[serde(default)]
    pub sensors: Sensors,
    /// Processes on the whole GPU, with pid, kind and memory only.
    pub processes: Vec<Process>,
    /// Whether all process lists could be read. If false, a GPU without listed processes may still be in use;
    /// the warnings give the reason.
    pub processes_known: bool,
    /// Row remapper counts; `None` on parts or drivers that do not report them.
    #[serde(default)]
    pub rows: Option<RemappedRows>,
    /// The parts that cannot be read.
    pub warnings: Vec<Unread>,
}

/// A part of a reading that cannot be read; the other parts are valid.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unread {
    /// Which part.
    pub part: ReadingPart,
    /// What failed, one sentence.
    pub message: String,
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
        Self { part, message: error.to_string() }
    }
}

/// Rows of memory that the GPU replaced by spare rows after ECC errors.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemappedRows {
    /// For correctable errors.
    pub correctable: u32,
    /// For uncorrectable errors.
    pub uncorrectable: u32,
    /// A replacement is pending until the next reset; until then the bad row is in use.
    pub pending: bool,
    /// A row could not be replaced: the hardware needs attention.
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
    /// Returns whether the mode is `wanted`, with no reset pending.
    #[must_use]
    pub fn is(&self, wanted: bool) -> bool {
        self.enabled == wanted && self.pending == wanted
    }
}

/// An event reported by the driver.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// UUID of the GPU.
    pub uuid: String,
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
