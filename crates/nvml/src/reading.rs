//! What the driver says about a GPU: everything of [`gpush_api::Gpu`] but policy.

use gpush_api::{Architecture, ComputeMode, Memory, Mig, NvLink, Process, Sensors};
use serde::{Deserialize, Serialize};

use crate::error::DriverError;

/// What a GPU is, whatever its state.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// Index in this driver session; shifts when a GPU is lost. Key things by `uuid`.
    pub index: u32,
    /// `GPU-<uuid>`.
    pub uuid: String,
    /// PCI address, `0000:07:00.0`.
    pub pci: String,
    /// PCI device id and vendor as NVML packs them: 0x20b2_10de.
    pub pci_id: u32,
    /// The same of the subsystem; `None` when the driver does not say.
    pub pci_subsystem: Option<u32>,
    /// Device minor number: `/dev/nvidia<minor>`.
    pub minor: u32,
    /// Product name, as the driver tells it.
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

/// One GPU of the driver's enumeration. One that can't be read is listed all the same.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listed {
    /// Index in this driver session.
    pub index: u32,
    /// What it is, or why that can't be told.
    pub identity: Result<Identity, DriverError>,
}

/// A GPU as read from the driver.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reading {
    /// What it is.
    pub identity: Identity,
    /// Memory of the whole GPU.
    pub memory: Memory,
    /// MIG side, profiles included; `None` on parts without MIG.
    pub mig: Option<Mig>,
    /// Who may make a CUDA context; `None` where the driver does not say.
    #[serde(default)]
    pub compute_mode: Option<ComputeMode>,
    /// Where its NVLink ports lead; `None` when none leads anywhere, or the driver does not tell.
    #[serde(default)]
    pub nvlink: Option<NvLink>,
    /// Utilization, temperature, power and ECC errors.
    #[serde(default)]
    pub sensors: Sensors,
    /// Processes on the GPU as a whole. Only pid, kind and memory are filled.
    pub processes: Vec<Process>,
    /// Whether all process lists could be read. While it is false, what shows no process may be
    /// in use all the same; the warnings say why.
    pub processes_known: bool,
    /// What the row remapper has done; `None` on parts, or with drivers, that don't tell.
    #[serde(default)]
    pub rows: Option<RemappedRows>,
    /// The parts that could not be read.
    pub warnings: Vec<Unread>,
}

/// A part of a reading that could not be read; the other parts are valid.
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
    /// A part that failed with this error.
    pub(crate) fn new(part: ReadingPart, error: &impl std::fmt::Display) -> Self {
        Self { part, message: error.to_string() }
    }
}

/// Rows of memory that the GPU replaced by spare ones after ECC errors.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemappedRows {
    /// For correctable errors.
    pub correctable: u32,
    /// For uncorrectable errors.
    pub uncorrectable: u32,
    /// A replacement waits for the next reset: until then the bad row is in use.
    pub pending: bool,
    /// A row could not be replaced: the part is to be looked at.
    pub failed: bool,
}

/// What became of a MIG mode change.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModeChange {
    /// Mode in force, read back.
    pub enabled: bool,
    /// Mode after the next reset, read back.
    pub pending: bool,
    /// Why the driver could not put it in force although it returned success.
    pub activation: Option<DriverError>,
}

impl ModeChange {
    /// Whether `wanted` is in force, without a reset being due.
    #[must_use]
    pub fn is(&self, wanted: bool) -> bool {
        self.enabled == wanted && self.pending == wanted
    }
}

/// Something that the driver reports by itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// UUID of the GPU.
    pub uuid: String,
    /// What happened.
    pub kind: EventKind,
    /// GPU instance concerned, when the driver names one.
    pub gi: Option<u32>,
    /// Compute instance concerned, when the driver names one.
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
