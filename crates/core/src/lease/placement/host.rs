//! What the GPUs of a host offer to leases, and which capacity is occupied.
//!
//! The caller builds a [`Host`] from one snapshot of the host's state, including its leases.
//! Placement uses no other data, so the same snapshot always gives the same result.

use std::sync::Arc;

use gpush_api::{
    ComputeMode, GpuIndex, GpuUuid, LeaseKind, Mode, PendingChange, Percentage, Placement, TargetUuid, TimesliceLevel,
};

use crate::geometry::Geometry;

use super::{PlacementRequest, RequestedDevice};

/// The known end of a lease, in seconds since 1970; `None` if the end is not known.
pub type KnownEnd = Option<u64>;

/// All GPUs of a host.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Host {
    /// GPUs, sorted by index.
    pub gpus: Vec<GpuOffer>,
}

/// The offers of one GPU.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct GpuOffer {
    /// Index.
    pub index: GpuIndex,
    /// `GPU-<uuid>`.
    pub uuid: GpuUuid,
    /// Why the GPU accepts no grants now; `None` if it accepts grants.
    pub closed: Option<Closed>,
    /// Why the GPU offers nothing; `None` if it offers leases.
    pub unoffered: Option<Unoffered>,
    /// Whether gpushd ends the processes of a lease on this GPU when the lease reaches its end time.
    pub ends_leases: bool,
    /// Changes that a new rule requires, but that gpushd does not make yet because of leases.
    pub pending: Vec<PendingChange>,
    /// MIG devices, if the GPU offers any.
    pub mig: Option<MigOffer>,
    /// Targets that are shared through MPS: the whole GPU, or its MIG devices.
    pub mps: Vec<MpsOffer>,
    /// Time-slice replicas, if the GPU offers any.
    pub timeslice: Option<TimesliceOffer>,
    /// The whole GPU, if it is offered.
    pub whole: Option<WholeOffer>,
}

/// Why a GPU accepts no grants now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Closed {
    /// An administrator set a cordon, or gpushd set one after a fault.
    Cordoned,
    /// An operation has claimed the GPU.
    Claimed,
    /// The compute mode of the GPU is PROHIBITED, so no program can use it.
    Prohibited,
    /// The state of the GPU does not allow grants: degraded, unknown, held, lost, maintenance.
    NotReady,
    /// A new rule requires a change of the whole GPU, which gpushd does not make yet because of leases.
    Pending,
    /// The MPS daemon of an earlier rule still runs on the GPU.
    StillShared,
    /// The rule of the GPU has mode `mps`, but no operation has started the MPS daemon.
    NotShared,
}

/// Why a GPU offers no leases.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unoffered {
    /// No rule of the config claims the GPU.
    NoRule,
    /// The rule of the GPU has mode `unmanaged`.
    Unmanaged,
    /// The GPU is not in the mode of its rule: its MIG mode differs from the rule, or the GPU has
    /// no MPS target.
    OtherMode(Mode),
    /// The rule of the GPU has mode `mps`, which the GPU does not support.
    NoMps,
    /// The GPU gets the mode of its rule when its virtual machine reboots.
    Reboot(Mode),
    /// The state of the GPU does not allow grants, so its offers are not known. Contains the mode
    /// of its rule.
    NotReady(Mode),
    /// The GPU still follows an earlier rule, and changes to the mode of its rule later.
    Pending(Mode),
}

/// The MIG devices that a GPU offers.
#[derive(Debug, Clone, PartialEq)]
pub struct MigOffer {
    /// Geometry of the GPU.
    pub geometry: Arc<Geometry>,
    /// Whether instances are created on demand.
    pub dynamic: bool,
    /// GPU instances, sorted by placement.
    pub instances: Vec<Instance>,
    /// Instances that earlier requests in the queue will create, as profile id and placement.
    pub reserved: Vec<(u32, Placement)>,
}

impl MigOffer {
    /// Returns whether a device of this instance meets a request.
    pub(super) fn meets(&self, wanted: &RequestedDevice, instance: &Instance, device: &Device) -> bool {
        match self.geometry.profile(instance.profile_id) {
            Some(profile) if device.whole => wanted.is_met_by(profile),
            Some(_) | None => wanted.is_met_by_part(&device.profile),
        }
    }

    /// Returns whether free devices of this instance can be granted: the instance itself is not in use, and no earlier
    /// request in the queue needs the slices of the instance.
    pub(super) fn is_grantable(&self, instance: &Instance) -> bool {
        let is_reserved = self.reserved.iter().any(|(_, placement)| placement.overlaps(instance.placement));
        !instance.busy && !instance.clearing && !is_reserved
    }
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
    /// Whether another program created the instance. Such an instance is never destroyed for a
    /// lease.
    pub foreign: bool,
    /// Whether the instance is in use, although none of its devices is marked as in use.
    pub busy: bool,
    /// Whether a queued request will destroy the instance. If so, its devices are not granted.
    pub clearing: bool,
    /// MIG devices.
    pub devices: Vec<Device>,
}

impl Instance {
    /// Returns whether no part of the instance is in use.
    #[must_use]
    pub fn is_free(&self) -> bool {
        !self.busy && self.devices.iter().all(|device| device.free)
    }
}

/// A MIG device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// `MIG-<uuid>`.
    pub uuid: TargetUuid,
    /// Compute instance profile, such as `1g.10gb`, or `1c.3g.40gb` for a part of the GPU instance.
    pub profile: String,
    /// Whether the device occupies the whole GPU instance.
    pub whole: bool,
    /// Whether no lease, process, MPS daemon or reservation uses the device.
    pub free: bool,
    /// Whether a lease has the device.
    pub leased: bool,
    /// Whether the device is shared through MPS. Such a device is never granted as a MIG device.
    pub shared: bool,
    /// End of the lease that has the device.
    pub end: KnownEnd,
}

/// A target that is shared through MPS.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MpsOffer {
    /// UUID of the GPU or MIG device.
    pub target: TargetUuid,
    /// Memory of the target in MiB.
    pub memory_mib: u64,
    /// Maximum sum of the shares of all leases, in tenths of a percent. A value above 1000
    /// oversubscribes the target.
    pub capacity_tenths: u32,
    /// Sum of the shares of current leases and reservations, in tenths of a percent.
    pub taken_tenths: u32,
    /// Number of leases and reservations on the target.
    pub leases: u32,
    /// Maximum number of leases. Each lease needs at least one client.
    pub most_leases: u32,
    /// Percentage of a lease whose request does not contain a percentage.
    pub default: Percentage,
    /// Largest percentage that the running daemon allows a client. A request for more is refused.
    pub ceiling: Percentage,
    /// Whether the rule requests a daemon for several users at a time.
    pub wants_many_users: bool,
    /// User id that the daemon serves now; `None` if the daemon is idle or serves several users.
    pub user: Option<u32>,
    /// Number of leases that exclude a share of the target: leases of other kinds on an overlapping target.
    pub excluding: u32,
    /// Shares of the leases on the target, in tenths of a percent, with their ends.
    pub ends: Vec<(u32, KnownEnd)>,
}

/// Time-slice replicas of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TimesliceOffer {
    /// Number of all replicas.
    pub replicas: u32,
    /// Time-slice level that a lease gets.
    pub level: TimesliceLevel,
    /// Compute mode that the rule sets; `None` if it sets none.
    pub compute_mode: Option<ComputeMode>,
    /// Number of replicas that have a lease or a reservation.
    pub taken: u32,
    /// Number of leases that exclude a replica: leases of other kinds on the GPU or its MIG devices.
    pub excluding: u32,
    /// The earliest known end of a replica's lease.
    pub first_end: KnownEnd,
}

/// A GPU that can be leased as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WholeOffer {
    /// Whether no lease, process or reservation uses the GPU.
    pub free: bool,
    /// Whether a lease has the GPU.
    pub leased: bool,
    /// End of this lease.
    pub end: KnownEnd,
}

impl Device {
    /// Returns the name of the device in messages, such as `0:3g.40gb@4`. A device that does not occupy its whole GPU
    /// instance has its UUID as its name.
    pub(super) fn name(&self, gpu: GpuIndex, instance: &Instance) -> String {
        if self.whole { format!("{gpu}:{}@{}", self.profile, instance.placement.start) } else { self.uuid.to_string() }
    }
}

impl GpuOffer {
    /// Returns the UUIDs of the GPU, its MIG devices and its MPS targets.
    pub(super) fn targets(&self) -> impl Iterator<Item = &TargetUuid> {
        let instances = self.mig.iter().flat_map(|mig| &mig.instances);
        let devices = instances.flat_map(|instance| &instance.devices).map(|device| &device.uuid);
        devices.chain(self.mps.iter().map(|mps| &mps.target)).chain([self.uuid.as_target()])
    }

    /// Returns the kinds of leases that the GPU offers, even if no capacity of a kind is free.
    pub fn kinds(&self) -> impl Iterator<Item = LeaseKind> {
        let kinds = [
            self.mig.is_some().then_some(LeaseKind::Mig),
            (!self.mps.is_empty()).then_some(LeaseKind::Mps),
            self.timeslice.map(|_| LeaseKind::Timeslice),
            self.whole.map(|_| LeaseKind::Whole),
        ];
        kinds.into_iter().flatten()
    }

    /// Returns the GPU as it would be without leases, processes and reservations, and with no
    /// reason to refuse grants. The result shows whether the GPU can ever fulfil a request.
    pub(super) fn emptied(&self) -> Self {
        let mut empty = Self { closed: None, ..self.clone() };
        if let Some(mig) = &mut empty.mig {
            mig.reserved.clear();
            for instance in &mut mig.instances {
                // Instances of other programs count as destroyable here, because those programs can
                // destroy them.
                (instance.busy, instance.clearing, instance.foreign) = (false, false, false);
                for device in &mut instance.devices {
                    (device.free, device.leased, device.end) = (!device.shared, false, None);
                }
            }
        }
        for mps in &mut empty.mps {
            (mps.taken_tenths, mps.leases, mps.user, mps.excluding) = (0, 0, None, 0);
            mps.ends.clear();
        }
        empty.timeslice =
            empty.timeslice.map(|slices| TimesliceOffer { taken: 0, excluding: 0, first_end: None, ..slices });
        empty.whole = empty.whole.map(|_| WholeOffer { free: true, leased: false, end: None });
        empty
    }
}

impl Host {
    /// Returns the host with only the GPUs that a request selects, by their index and by its targets.
    pub(super) fn selected(&self, wanted: &PlacementRequest) -> Self {
        let is_selected = |gpu: &&GpuOffer| wanted.gpus.as_ref().is_none_or(|gpus| gpus.contains(&gpu.index));
        let has_target = |gpu: &&GpuOffer| gpu.targets().any(|uuid| wanted.has_target(uuid));
        let selected = || self.gpus.iter().filter(is_selected);
        // A target that does not exist any more selects no GPU.
        let is_known = selected().any(|gpu| has_target(&gpu));
        Self { gpus: selected().filter(|gpu| !is_known || has_target(gpu)).cloned().collect() }
    }

    /// Returns the UUIDs of the existing MIG devices that a request can get now.
    pub fn free_devices(&self) -> impl Iterator<Item = &TargetUuid> {
        let open = self.gpus.iter().filter(|gpu| gpu.closed.is_none()).flat_map(|gpu| &gpu.mig);
        let instances = open.flat_map(|mig| mig.instances.iter().filter(|instance| mig.is_grantable(instance)));
        instances.flat_map(|instance| &instance.devices).filter(|device| device.free).map(|device| &device.uuid)
    }

    /// Returns the kinds of leases that the GPUs offer, sorted.
    #[must_use]
    pub fn kinds(&self) -> Vec<LeaseKind> {
        let mut kinds: Vec<LeaseKind> = self.gpus.iter().flat_map(GpuOffer::kinds).collect();
        kinds.sort_unstable();
        kinds.dedup();
        kinds
    }
}
