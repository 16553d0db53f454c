//! The state machine of the GPUs of one host. It does no I/O. Each file has one subject.
//!
//! ```text
//!            SetMigMode on             create GI             create CI
//!  MIG off ───────────────▶ MIG on ◀──────────▶ GI, no CI ◀──────────▶ GI with CIs = MIG devices
//!     ▲   Ampere: pending      │     destroy GI            destroy CI        │
//!     │   until a reset        │                                             │
//!     └────────────────────────┴── reset, reboot: instances gone ◀───────────┘
//!         reboot: Hopper and later lose the mode, Ampere keeps it
//! ```
//!
//! Functions return NVML's return codes ([`Return`]). If a function fails, it changes nothing. The
//! caller of the state machine checks permissions with [`crate::Host::privileged`].

use std::collections::BTreeMap;
use std::sync::Arc;

use gpush_geometry::Model;
use serde::{Deserialize, Serialize};

use crate::description::DriverVersion;
use crate::returns::Return;

mod activity;
mod buffers;
pub mod capability;
mod clock;
mod compute_instance;
mod event;
mod gpu;
mod gpu_instance;
mod handle;
mod instance;
mod load;
mod nvlink;
mod part;
mod process;
mod reading;
mod sharing;
mod sums;
mod timeslice;
mod usage;
pub mod uuid;

pub use activity::{Activity, SLOWDOWN_C};
pub use buffers::{GpuSample, PROCESS_PERIOD_MS, ProcessActivity};
pub use clock::Clock;
pub use event::{Event, Events, MIG_CONFIG_CHANGE, XID_CRITICAL_ERROR};
pub use gpu::{Conditions, Gpu, Memory, RemappedRows};
pub use gpu_instance::MigDevice;
pub use handle::{ComputeInstanceHandle, GpuHandle, GpuInstanceHandle, Handle};
pub use instance::{ComputeInstance, GpuInstance};
pub use load::{Load, WHOLE_PPM};
pub use nvlink::{End, Links, Wiring};
pub use part::{Chip, Part, Profile};
pub use process::{Client, Pid, Process, ProcessKind};
pub use reading::{Board, PCIE_RX_KIB_S, PCIE_TX_KIB_S, Reading, reason};
pub use sharing::COMPUTE_MODES;
pub use sums::{Rates, Sums};
pub use timeslice::Timeslice;
pub use usage::Usage;

/// Maximum number of GPU instances on a GPU.
pub const MAX_GPU_INSTANCES: usize = 8;
/// Maximum number of compute instances in a GPU instance.
pub const MAX_COMPUTE_INSTANCES: usize = 8;

/// A range of slices: memory slices for a GPU instance, and compute slots for a compute instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Placement {
    /// First slice.
    pub start: u8,
    /// Number of slices.
    pub size: u8,
}

impl Placement {
    /// Returns whether both ranges contain the same slice.
    #[must_use]
    pub fn overlaps(self, other: Self) -> bool {
        self.start < other.start + other.size && other.start < self.start + self.size
    }
}

/// The fixed properties of a GPU of the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// `GPU-<uuid>`.
    pub uuid: String,
    /// Serial number of the board.
    pub serial: String,
    /// PCI domain.
    pub pci_domain: u32,
    /// PCI bus.
    pub pci_bus: u32,
    /// PCI device.
    pub pci_device: u32,
    /// PCI device id and vendor id, as in `nvmlPciInfo_t.pciDeviceId`.
    pub pci_device_id: u32,
    /// PCI subsystem id and vendor id, as in `nvmlPciInfo_t.pciSubSystemId`.
    pub pci_subsystem_id: u32,
    /// Minor number of the device file `/dev/nvidia<minor>`.
    pub minor: u32,
    /// Product name as the driver reports it, such as `NVIDIA A100-SXM4-80GB`.
    pub name: String,
    /// Seed of the GPU's readings.
    pub seed: u64,
    /// Whether MIG mode is on at the start.
    pub mig_at_start: bool,
    /// Whether a boot script enables MIG mode again after each boot. GPUs of Hopper and later lose
    /// MIG mode at a reboot.
    pub mig_at_boot: bool,
    /// Whether the driver resets an idle Ampere GPU when its MIG mode changes. A real driver does
    /// this on bare metal if no process has the GPU open. If false, the change stays pending.
    pub resets_itself: bool,
}

impl Identity {
    /// Returns the PCI address as the kernel writes it, such as `0000:07:00.0`.
    #[must_use]
    pub fn pci_address(&self) -> String {
        format!("{:04x}:{:02x}:{:02x}.0", self.pci_domain, self.pci_bus, self.pci_device)
    }
}

/// The data of a GPU that never changes.
#[derive(Debug, Clone)]
pub struct Slot {
    /// Identity.
    pub identity: Identity,
    /// Model of the GPU under the host's driver.
    pub part: Arc<Part>,
    /// NVLink connections.
    pub nvlink: Links,
}

/// The properties of the host that never change.
#[derive(Debug, Clone)]
pub struct Hardware {
    /// Driver version.
    pub driver: DriverVersion,
    /// CUDA version as `major * 1000 + minor * 10`.
    pub cuda: u32,
    /// Whether the owner of the host's directory has root permissions on the host.
    pub owner_is_root: bool,
    /// Whether calls take as long as on hardware.
    pub latencies: bool,
    /// Whether a fabric manager manages the host's NVSwitches.
    pub fabric_manager: bool,
    /// Whether the host is a virtual machine, which cannot reset a GPU.
    pub virtual_machine: bool,
    /// GPUs.
    pub slots: Vec<Slot>,
}

/// Counters of a fault rule.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counter {
    /// Number of calls that the rule has matched.
    pub seen: u64,
    /// Number of calls in which the rule has taken effect.
    pub fired: u64,
}

/// The state that changes. It is serialized into the shared file of the host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    /// Number of the current boot, counted from 1.
    pub boot: u64,
    /// Boot id, as in `/proc/sys/kernel/random/boot_id`.
    pub boot_id: String,
    /// Generation that the next instance will get.
    pub next_generation: u64,
    /// GPUs, in the order of their indexes.
    pub gpus: Vec<Gpu>,
    /// Clients of the driver.
    pub clients: Vec<Client>,
    /// Events.
    pub events: Events,
    /// Counters of the fault rules, by fingerprint of the rule.
    pub faults: BTreeMap<u64, Counter>,
    /// Clock of the host.
    #[serde(default)]
    pub clock: Clock,
}

/// The state machine of one host: its GPUs and their state.
#[derive(Debug, Clone)]
pub struct Machine {
    hardware: Arc<Hardware>,
    pub(crate) state: State,
    /// Time of the following changes, in ms of the host's clock. It is an argument of the changes, not a part of the
    /// state.
    now_ms: u64,
}

impl Machine {
    /// Creates a host with this hardware, at its first boot.
    #[must_use]
    pub fn first_boot(hardware: Arc<Hardware>) -> Self {
        let gpus = hardware.slots.iter().zip(0..).map(|(slot, index)| Gpu::new(index, slot.identity.mig_at_start, 0));
        let state = State {
            boot: 1,
            boot_id: String::new(),
            next_generation: 1,
            gpus: gpus.collect(),
            clients: Vec::new(),
            events: Events::default(),
            faults: BTreeMap::new(),
            clock: Clock::default(),
        };
        Self { hardware, state, now_ms: 0 }
    }

    /// Combines hardware and a state. Returns `None` if they do not match.
    #[must_use]
    pub fn resume(hardware: Arc<Hardware>, state: State) -> Option<Self> {
        (hardware.slots.len() == state.gpus.len()).then_some(Self { hardware, state, now_ms: 0 })
    }

    /// Returns the fixed properties of the host.
    #[must_use]
    pub fn hardware(&self) -> &Arc<Hardware> {
        &self.hardware
    }

    /// Returns the variable state.
    #[must_use]
    pub fn state(&self) -> &State {
        &self.state
    }

    /// Returns all GPUs, including lost ones.
    #[must_use]
    pub fn gpus(&self) -> &[Gpu] {
        &self.state.gpus
    }

    /// Returns the driver events.
    #[must_use]
    pub fn events(&self) -> &Events {
        &self.state.events
    }

    /// Returns the identity of a GPU, even if the GPU is lost.
    ///
    /// # Errors
    /// `InvalidArgument` if the GPU does not exist.
    pub fn identity(&self, gpu: u32) -> Result<&Identity, Return> {
        self.hardware.slots.get(gpu as usize).map(|slot| &slot.identity).ok_or(Return::InvalidArgument)
    }

    /// Returns the model of a GPU under the host's driver.
    ///
    /// # Errors
    /// `InvalidArgument` if the GPU does not exist.
    pub fn part(&self, gpu: u32) -> Result<Arc<Part>, Return> {
        self.hardware.slots.get(gpu as usize).map(|slot| Arc::clone(&slot.part)).ok_or(Return::InvalidArgument)
    }

    /// Returns the geometry data of a GPU's model.
    ///
    /// # Errors
    /// `InvalidArgument` if the GPU does not exist.
    pub fn model(&self, gpu: u32) -> Result<&Model, Return> {
        self.hardware.slots.get(gpu as usize).map(|slot| &slot.part.model).ok_or(Return::InvalidArgument)
    }

    /// Returns a GPU.
    ///
    /// # Errors
    /// `InvalidArgument` if the GPU does not exist, `GpuIsLost` if the GPU has fallen off the bus.
    pub fn gpu(&self, gpu: u32) -> Result<&Gpu, Return> {
        match self.state.gpus.get(gpu as usize) {
            None => Err(Return::InvalidArgument),
            Some(at) if at.lost => Err(Return::GpuIsLost),
            Some(at) => Ok(at),
        }
    }

    pub(crate) fn gpu_mut(&mut self, gpu: u32) -> Result<&mut Gpu, Return> {
        match self.state.gpus.get_mut(gpu as usize) {
            None => Err(Return::InvalidArgument),
            Some(at) if at.lost => Err(Return::GpuIsLost),
            Some(at) => Ok(at),
        }
    }

    /// Returns the handle of a GPU for this boot.
    ///
    /// # Errors
    /// As [`Machine::gpu`].
    pub fn gpu_handle(&self, gpu: u32) -> Result<GpuHandle, Return> {
        self.gpu(gpu).map(|at| GpuHandle { gpu: at.index, boot: self.state.boot })
    }

    /// Returns the GPU of a handle.
    ///
    /// # Errors
    /// `InvalidArgument` for a handle of an earlier boot, otherwise as [`Machine::gpu`].
    pub fn resolve_gpu(&self, handle: GpuHandle) -> Result<&Gpu, Return> {
        if handle.boot != self.state.boot {
            return Err(Return::InvalidArgument);
        }
        self.gpu(handle.gpu)
    }

    /// Returns the index of the GPU with this `GPU-<uuid>`.
    ///
    /// # Errors
    /// `NotFound` if no GPU has this UUID.
    pub fn gpu_by_uuid(&self, uuid: &str) -> Result<u32, Return> {
        let slots = self.hardware.slots.iter().zip(0..);
        slots.filter(|(slot, _)| slot.identity.uuid == uuid).map(|(_, index)| index).next().ok_or(Return::NotFound)
    }

    pub(crate) fn generation(&mut self) -> u64 {
        let generation = self.state.next_generation;
        self.state.next_generation += 1;
        generation
    }
}
