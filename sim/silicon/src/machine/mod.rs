//! The pure state machine of one host's GPUs: one subject a file.
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
//! Calls return NVML's codes ([`Return`]) and change nothing when they fail. Who may call is the
//! caller's business: [`crate::Host::privileged`].

use std::collections::BTreeMap;
use std::sync::Arc;

use gpush_geometry::Model;
use serde::{Deserialize, Serialize};

use crate::description::{Description, DescriptionError, DriverVersion};
use crate::returns::Return;

pub mod capability;
mod compute_instance;
mod event;
mod gpu;
mod gpu_instance;
mod handle;
mod nvlink;
mod part;
mod process;
mod reading;
mod sharing;
pub mod uuid;

pub use compute_instance::ComputeInstance;
pub use event::{Event, Events, MIG_CONFIG_CHANGE, XID_CRITICAL_ERROR};
pub use gpu::{Gpu, Memory, RemappedRows};
pub use gpu_instance::{GpuInstance, MigDevice};
pub use handle::{ComputeInstanceHandle, GpuHandle, GpuInstanceHandle, Handle};
pub use nvlink::{End, Links, Wiring};
pub use part::{Chip, Part, Profile};
pub use process::{Client, Pid, Process, ProcessKind};
pub use reading::{Board, Reading};
pub use sharing::{COMPUTE_MODES, Timeslice};

/// Largest number of GPU instances on a GPU.
pub const MAX_GPU_INSTANCES: usize = 8;
/// Largest number of compute instances in a GPU instance.
pub const MAX_COMPUTE_INSTANCES: usize = 8;

/// A span of slices: memory slices for a GPU instance, compute slots for a compute instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
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

/// What never changes about a GPU of the host.
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
    /// PCI device id and vendor, as `nvmlPciInfo_t.pciDeviceId` has them.
    pub pci_device_id: u32,
    /// `/dev/nvidia<minor>`.
    pub minor: u32,
    /// Product name, as the driver tells it: `NVIDIA A100-SXM4-80GB`.
    pub name: String,
    /// Seed of its readings.
    pub seed: u64,
    /// Whether MIG mode is on at the start.
    pub mig_at_start: bool,
    /// Whether a boot script of the host switches MIG mode on (Hopper and later lose it).
    pub mig_at_boot: bool,
    /// Whether the driver itself resets an idle Ampere GPU on a mode change, as it does on bare
    /// metal where nothing holds the GPU. If not, the change stays pending.
    pub resets_itself: bool,
}

impl Identity {
    /// PCI address as the kernel writes it: `0000:07:00.0`.
    #[must_use]
    pub fn pci_address(&self) -> String {
        format!("{:04x}:{:02x}:{:02x}.0", self.pci_domain, self.pci_bus, self.pci_device)
    }
}

/// A GPU of the host: who it is and what it offers.
#[derive(Debug, Clone)]
pub struct Slot {
    /// Identity.
    pub identity: Identity,
    /// What it offers.
    pub part: Arc<Part>,
    /// How it hangs together with others.
    pub nvlink: Links,
}

/// What never changes about the host.
#[derive(Debug, Clone)]
pub struct Hardware {
    /// Driver version.
    pub driver: DriverVersion,
    /// CUDA version as `major * 1000 + minor * 10`.
    pub cuda: u32,
    /// Whether the uid that owns the host counts as root on it.
    pub owner_is_root: bool,
    /// Whether calls take as long as on hardware.
    pub latencies: bool,
    /// Whether a fabric manager looks after the host's NVSwitches.
    pub fabric_manager: bool,
    /// GPUs.
    pub slots: Vec<Slot>,
}

/// How often a fault rule was met.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counter {
    /// Calls that it matched.
    pub seen: u64,
    /// Calls in which it acted.
    pub fired: u64,
}

/// All that changes. Serialized into the host's shared file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    /// Number of the boot, from 1.
    pub boot: u64,
    /// Boot id, as `/proc/sys/kernel/random/boot_id` would say.
    pub boot_id: String,
    /// Generation that the next instance gets.
    pub next_generation: u64,
    /// GPUs, by index.
    pub gpus: Vec<Gpu>,
    /// Clients of the driver.
    pub clients: Vec<Client>,
    /// Events.
    pub events: Events,
    /// Counters of the fault rules, by the rule's fingerprint.
    pub faults: BTreeMap<u64, Counter>,
}

/// The GPUs of one host.
#[derive(Debug, Clone)]
pub struct Machine {
    hardware: Arc<Hardware>,
    pub(crate) state: State,
}

impl Machine {
    /// A host as described, just booted for the first time.
    ///
    /// # Errors
    /// When the description names what does not exist or cannot go together.
    pub fn new(description: &Description) -> Result<Self, DescriptionError> {
        Ok(Self::first_boot(Arc::new(description.hardware()?)))
    }

    /// One GPU of a model on the newest driver that any part needs, with MIG mode on where the
    /// part has it: for tests of planners. `None` for an unknown key.
    #[must_use]
    pub fn of_model(key: &str) -> Option<Self> {
        let description = Description::of_model(key, DriverVersion::NEWEST);
        Self::new(&description).ok()
    }

    /// The same hardware at its first boot.
    #[must_use]
    pub fn first_boot(hardware: Arc<Hardware>) -> Self {
        let gpus = hardware.slots.iter().zip(0..).map(|(slot, index)| Gpu::new(index, slot.identity.mig_at_start));
        let state = State {
            boot: 1,
            boot_id: String::new(),
            next_generation: 1,
            gpus: gpus.collect(),
            clients: Vec::new(),
            events: Events::default(),
            faults: BTreeMap::new(),
        };
        Self { hardware, state }
    }

    /// Puts hardware and a state of it together. `None` when they do not belong together.
    #[must_use]
    pub fn resume(hardware: Arc<Hardware>, state: State) -> Option<Self> {
        (hardware.slots.len() == state.gpus.len()).then_some(Self { hardware, state })
    }

    /// What never changes.
    #[must_use]
    pub fn hardware(&self) -> &Arc<Hardware> {
        &self.hardware
    }

    /// What changes.
    #[must_use]
    pub fn state(&self) -> &State {
        &self.state
    }

    /// All GPUs, lost ones too.
    #[must_use]
    pub fn gpus(&self) -> &[Gpu] {
        &self.state.gpus
    }

    /// Driver events.
    #[must_use]
    pub fn events(&self) -> &Events {
        &self.state.events
    }

    /// Who a GPU is. Known of lost ones too.
    ///
    /// # Errors
    /// `InvalidArgument` without such a GPU.
    pub fn identity(&self, gpu: u32) -> Result<&Identity, Return> {
        self.hardware.slots.get(gpu as usize).map(|slot| &slot.identity).ok_or(Return::InvalidArgument)
    }

    /// What a GPU offers.
    ///
    /// # Errors
    /// `InvalidArgument` without such a GPU.
    pub fn part(&self, gpu: u32) -> Result<Arc<Part>, Return> {
        self.hardware.slots.get(gpu as usize).map(|slot| Arc::clone(&slot.part)).ok_or(Return::InvalidArgument)
    }

    /// Figures of a GPU's model.
    ///
    /// # Errors
    /// `InvalidArgument` without such a GPU.
    pub fn model(&self, gpu: u32) -> Result<&Model, Return> {
        self.hardware.slots.get(gpu as usize).map(|slot| &slot.part.model).ok_or(Return::InvalidArgument)
    }

    /// A GPU.
    ///
    /// # Errors
    /// `InvalidArgument` without such a GPU, `GpuIsLost` when it fell off the bus.
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

    /// Handle of a GPU for this boot.
    ///
    /// # Errors
    /// As [`Machine::gpu`].
    pub fn gpu_handle(&self, gpu: u32) -> Result<GpuHandle, Return> {
        self.gpu(gpu).map(|at| GpuHandle { gpu: at.index, boot: self.state.boot })
    }

    /// The GPU that a handle means.
    ///
    /// # Errors
    /// `InvalidArgument` for a handle of an earlier boot, else as [`Machine::gpu`].
    pub fn resolve_gpu(&self, handle: GpuHandle) -> Result<&Gpu, Return> {
        if handle.boot != self.state.boot {
            return Err(Return::InvalidArgument);
        }
        self.gpu(handle.gpu)
    }

    /// Index of the GPU with this `GPU-<uuid>`.
    ///
    /// # Errors
    /// `NotFound`.
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
