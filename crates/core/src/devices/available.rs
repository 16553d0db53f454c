//! Why a lease request cannot get a free MIG device.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use gpush_api::{Gpu, MigDevice, Mode, MpsDaemon};

use crate::{
    desired::whole_gpu_obstacles,
    lease::placement::{Closed, Host},
};

/// Why a new lease request cannot get a free device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Unavailable {
    /// No rule claims the GPU.
    NoRule,
    /// The rule of the GPU has mode `unmanaged`.
    Unmanaged,
    /// The GPU is not in the mode of its rule. Contains the difference.
    OtherMode(String),
    /// Only Slurm's hooks may lease the GPU.
    OnlySlurm,
    /// The device is shared through MPS.
    Mps,
    /// An entry of the queue gets the device first: `lease L3`.
    Ahead(String),
    /// An operation has claimed the GPU.
    Claimed,
    /// A new rule changes the GPU later, when its leases have ended.
    Pending,
    /// The reading of the GPU is too old.
    NotRead,
    /// A request is getting the device, or gpushd does not know enough about it.
    Taken,
}

impl fmt::Display for Unavailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoRule => f.write_str("no rule of the config claims the GPU"),
            Self::Unmanaged => f.write_str("mode `unmanaged`: gpushd grants no leases"),
            Self::OtherMode(difference) => write!(f, "the GPU is not in its mode: {difference}"),
            Self::OnlySlurm => f.write_str("only Slurm jobs can lease the GPU"),
            Self::Mps => f.write_str("shared through MPS: request it with --mps"),
            Self::Ahead(waiter) => write!(f, "{waiter} is ahead in the queue"),
            Self::Claimed => f.write_str("an operation is about to change the GPU"),
            Self::Pending => f.write_str("a new rule is about to change the GPU"),
            Self::NotRead => f.write_str("gpushd has no recent reading of the GPU"),
            Self::Taken => f.write_str("gpushd cannot grant the device at the moment"),
        }
    }
}

/// What only gpushd knows about its MIG devices.
#[derive(Debug, Clone, Copy)]
pub struct Offers<'a> {
    /// What the GPUs offer now. A free device counts as free here even if an entry of the queue gets it first.
    pub host: &'a Host,
    /// The entries of the queue that get free devices first, by UUID of the device: `lease L3`.
    pub takers: &'a BTreeMap<String, String>,
    /// Indexes of the GPUs that the caller may not lease, because only Slurm's hooks may lease them.
    pub slurm: &'a BTreeSet<u32>,
}

impl Offers<'_> {
    /// Returns why a new lease request of the caller cannot get a free device; `None` if it can.
    pub(super) fn unavailable(&self, device: &MigDevice) -> Option<Unavailable> {
        if self.slurm.contains(&device.gpu) {
            return Some(Unavailable::OnlySlurm);
        }
        let uuid = device.uuid.as_ref();
        if let Some(waiter) = uuid.and_then(|uuid| self.takers.get(uuid)) {
            return Some(Unavailable::Ahead(waiter.clone()));
        }
        if self.host.free_devices().any(|free| Some(free) == device.uuid.as_deref()) {
            return None;
        }
        let gpu = self.host.gpus.iter().find(|gpu| gpu.uuid == device.gpu_uuid);
        let mut offered =
            gpu.iter().flat_map(|gpu| &gpu.mig).flat_map(|mig| &mig.instances).flat_map(|one| &one.devices);
        Some(match gpu.and_then(|gpu| gpu.closed) {
            Some(Closed::Claimed) => Unavailable::Claimed,
            Some(Closed::NotReady | Closed::Cordoned) => Unavailable::NotRead,
            Some(Closed::Pending) => Unavailable::Pending,
            None if offered.any(|one| Some(&one.uuid) == uuid && one.shared) => Unavailable::Mps,
            None => Unavailable::Taken,
        })
    }
}

/// Returns why no lease request gets the devices of a GPU, or this device, even if nothing uses it.
pub(super) fn unavailable(gpu: &Gpu, daemon: Option<&MpsDaemon>) -> Option<Unavailable> {
    match gpu.mode {
        Mode::NoRule => Some(Unavailable::NoRule),
        Mode::Unmanaged => Some(Unavailable::Unmanaged),
        Mode::Mps | Mode::Timeslice | Mode::Exclusive => {
            Some(Unavailable::OtherMode(whole_gpu_obstacles(gpu.mode, gpu).join("; ")))
        }
        Mode::Mig => daemon.map(|_| Unavailable::Mps),
    }
}
