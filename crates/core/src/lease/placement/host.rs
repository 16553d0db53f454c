//! What the GPUs of a host offer to leases, and what is occupied.
//!
//! The caller builds it from one snapshot of the host state, the leases included. Placement reads nothing else, so
//! the same snapshot always gives the same answer.

use std::sync::Arc;

use gpush_api::{LeaseKind, Percentage, Placement};

use crate::geometry::Geometry;

/// All GPUs of a host.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Host {
    /// GPUs by index.
    pub gpus: Vec<GpuOffer>,
}

/// What one GPU offers.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct GpuOffer {
    /// Index.
    pub index: u32,
    /// `GPU-<uuid>`.
    pub uuid: String,
    /// Why nothing is granted on it now.
    pub closed: Option<Closed>,
    /// MIG devices.
    pub mig: Option<MigOffer>,
    /// Targets that are shared through MPS: the GPU, or MIG devices on it.
    pub mps: Vec<MpsOffer>,
    /// Time-slice replicas.
    pub timeslice: Option<TimesliceOffer>,
    /// The GPU as a whole.
    pub whole: Option<WholeOffer>,
}

/// Why nothing is granted on a GPU now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Closed {
    /// An administrator or a fault cordoned it.
    Cordoned,
    /// An operation has claimed it.
    Claimed,
    /// Its state does not allow grants: degraded, unknown, held, lost, maintenance.
    NotReady,
}

/// The MIG side of a GPU.
#[derive(Debug, Clone, PartialEq)]
pub struct MigOffer {
    /// What the GPU can hold.
    pub geometry: Arc<Geometry>,
    /// Whether instances are created on demand.
    pub dynamic: bool,
    /// GPU instances by placement.
    pub instances: Vec<Instance>,
    /// Instances that the heads of the queue will create, by profile id and placement.
    pub reserved: Vec<(u32, Placement)>,
}

/// A GPU instance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Instance {
    /// GPU instance id.
    pub id: u32,
    /// Profile id.
    pub profile_id: u32,
    /// Placement in memory slices.
    pub placement: Placement,
    /// Whether another program created it: it is never destroyed for a lease.
    pub foreign: bool,
    /// Whether it is in use in a way that no device shows.
    pub busy: bool,
    /// Whether a waiting request will destroy it: its devices are not granted.
    pub clearing: bool,
    /// MIG devices.
    pub devices: Vec<Device>,
}

impl Instance {
    /// Whether nothing of it is in use.
    #[must_use]
    pub fn is_free(&self) -> bool {
        !self.busy && self.devices.iter().all(|device| device.free)
    }
}

/// A MIG device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// `MIG-<uuid>`.
    pub uuid: String,
    /// Compute instance profile: `1g.10gb`, or `1c.3g.40gb` for a part of its GPU instance.
    pub profile: String,
    /// Whether it is all of its GPU instance.
    pub whole: bool,
    /// Whether no lease, process, MPS daemon or reservation has it.
    pub free: bool,
}

/// A target that is shared through MPS.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MpsOffer {
    /// UUID of the GPU or MIG device.
    pub target: String,
    /// Its memory, MiB.
    pub memory_mib: u64,
    /// Most that all leases together may have, tenths of a percent: over 1000 they oversubscribe.
    pub capacity_tenths: u32,
    /// What leases and reservations have, tenths of a percent.
    pub taken_tenths: u32,
    /// Leases and reservations on it.
    pub leases: u32,
    /// Most leases on it: each has at least one client.
    pub most_leases: u32,
    /// Percentage of a lease that names none.
    pub default: Percentage,
    /// The user whose daemon it is now; `None` while it is idle or serves several users.
    pub user: Option<u32>,
}

/// Time-slice replicas of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TimesliceOffer {
    /// All.
    pub replicas: u32,
    /// Those with a lease or reservation.
    pub taken: u32,
}

/// A GPU that is leased as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WholeOffer {
    /// Whether no lease, process or reservation has it.
    pub free: bool,
}

impl GpuOffer {
    /// Kinds of lease that the GPU offers, used up or not.
    pub fn kinds(&self) -> impl Iterator<Item = LeaseKind> {
        let kinds = [
            self.mig.is_some().then_some(LeaseKind::Mig),
            (!self.mps.is_empty()).then_some(LeaseKind::Mps),
            self.timeslice.map(|_| LeaseKind::Timeslice),
            self.whole.map(|_| LeaseKind::Whole),
        ];
        kinds.into_iter().flatten()
    }

    /// The GPU without leases, processes, reservations, and reasons against a grant. Shows whether a request can
    /// ever be met.
    pub(super) fn emptied(&self) -> Self {
        let mut empty = Self { closed: None, ..self.clone() };
        if let Some(mig) = &mut empty.mig {
            mig.reserved.clear();
            for instance in &mut mig.instances {
                // Another program can remove what it created.
                (instance.busy, instance.clearing, instance.foreign) = (false, false, false);
                instance.devices.iter_mut().for_each(|device| device.free = true);
            }
        }
        for mps in &mut empty.mps {
            (mps.taken_tenths, mps.leases, mps.user) = (0, 0, None);
        }
        empty.timeslice = empty.timeslice.map(|slices| TimesliceOffer { taken: 0, ..slices });
        empty.whole = empty.whole.map(|_| WholeOffer { free: true });
        empty
    }
}

impl Host {
    /// Kinds of lease that the GPUs offer, sorted.
    #[must_use]
    pub fn kinds(&self) -> Vec<LeaseKind> {
        let mut kinds: Vec<LeaseKind> = self.gpus.iter().flat_map(GpuOffer::kinds).collect();
        kinds.sort_unstable();
        kinds.dedup();
        kinds
    }

    /// The host without what occupies it; see [`GpuOffer::emptied`].
    pub(super) fn emptied(&self) -> Self {
        Self { gpus: self.gpus.iter().map(GpuOffer::emptied).collect() }
    }
}
