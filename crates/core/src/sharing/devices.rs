//! Finds the MIG devices that the `:mps` entries of a layout select.
//!
//! A layout contains counts of devices, and placements for some of them. Entries with a placement,
//! shared or not, are resolved first: each selects the device at its placement. The other devices
//! of a kind are interchangeable. Among these, devices that are already shared are selected first,
//! then devices that no lease has for itself, then the devices with the lowest placement.

use std::collections::{BTreeMap, BTreeSet};

use gpush_api::{ComputeInstance, Gpu, GpuInstance, LeaseKind, Mig, TargetUuid};

use crate::geometry::{Geometry, Profile};
use crate::layout::{Entry, Layout};

/// A MIG device: a compute instance in its GPU instance.
#[derive(Debug, Clone, Copy)]
pub(super) struct SharedDevice<'a> {
    pub(super) instance: &'a GpuInstance,
    pub(super) compute: &'a ComputeInstance,
}

/// Returns the display name of a MIG device: `2g.20gb@2`. For a part of a GPU instance, the name
/// contains the compute slot: `1c.3g.40gb@0/2`. The name does not depend on other devices.
#[must_use]
pub fn device_name(instance: &GpuInstance, compute: &ComputeInstance) -> String {
    let start = instance.placement.start;
    if compute_slices_of(&compute.profile).is_none() {
        return format!("{}@{start}", instance.profile);
    }
    let slot = compute.placement.map_or(compute.id, |placement| u32::from(placement.start));
    format!("{}@{start}/{slot}", compute.profile)
}

impl SharedDevice<'_> {
    pub(super) fn display_name(&self) -> String {
        device_name(self.instance, self.compute)
    }

    /// Returns the number of compute slices of the device. If that number is unknown, returns the
    /// number of compute slices of the whole GPU.
    pub(super) fn slices(&self, mig: &Mig) -> u8 {
        compute_slices_of(&self.compute.profile)
            .or_else(|| gpu_slices_of(&self.instance.profile))
            .unwrap_or(mig.compute_slices)
    }

    fn was_shared(&self, shared_before: &BTreeSet<TargetUuid>) -> bool {
        self.compute.uuid.as_ref().is_some_and(|uuid| shared_before.contains(uuid))
    }

    fn position(&self) -> (u8, Option<u8>, u32, u32) {
        let slot = self.compute.placement.map(|placement| placement.start);
        (self.instance.placement.start, slot, self.instance.id, self.compute.id)
    }

    fn kind(&self) -> DeviceKind {
        DeviceKind::new(&self.instance.profile, &self.compute.profile)
    }
}

/// Devices that differ only in their placement.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct DeviceKind {
    /// Profile of the GPU instance.
    profile: String,
    /// Profile of the compute instance.
    compute: String,
}

impl DeviceKind {
    fn new(profile: &str, compute: &str) -> Self {
        Self { profile: profile.to_ascii_lowercase(), compute: compute.to_ascii_lowercase() }
    }

    /// Returns the kind of device that a layout entry selects on a GPU.
    fn of_entry(entry: &Entry, geometry: &Geometry) -> Self {
        let profile = entry.profile.to_ascii_lowercase();
        let known = geometry.named(&profile);
        let compute = match entry.compute_slices {
            None => known.and_then(Profile::whole),
            Some(slices) => known.and_then(|profile| profile.compute_of(slices)),
        };
        let compute = match (compute, entry.compute_slices) {
            (Some(compute), _) => compute.profile.name.clone(),
            (None, Some(slices)) if gpu_slices_of(&profile) != Some(slices) => format!("{slices}c.{profile}"),
            (None, Some(_) | None) => profile.clone(),
        };
        Self::new(&profile, &compute)
    }
}

/// Returns the number of compute slices in the name of a compute instance profile: 1 for
/// `1c.3g.40gb`.
fn compute_slices_of(compute_profile: &str) -> Option<u8> {
    compute_profile.split_once("c.")?.0.parse().ok()
}

/// Returns the number of compute slices in the name of a GPU instance profile: 3 for `3g.40gb`.
fn gpu_slices_of(profile: &str) -> Option<u8> {
    profile.split_once('g')?.0.parse().ok()
}

/// Number of requested devices of a kind: shared through MPS, and not shared.
#[derive(Debug, Clone, Copy, Default)]
struct DesiredDevices {
    shared: usize,
    plain: usize,
}

impl DesiredDevices {
    fn add(&mut self, entry: &Entry) {
        let count = usize::from(entry.count);
        if entry.share.is_some() {
            self.shared += count;
        } else {
            self.plain += count;
        }
    }
}

/// How the devices of a GPU are used now. Devices that change least are selected first.
#[derive(Debug, Clone, Default)]
pub(super) struct DeviceUses<'a> {
    /// UUIDs of the devices that were shared before, or have a lease of kind `mps`.
    shared: BTreeSet<&'a TargetUuid>,
    /// UUIDs of the devices that a lease has for itself.
    alone: BTreeSet<&'a TargetUuid>,
}

impl<'a> DeviceUses<'a> {
    /// Returns the uses of a GPU's devices. `shared_before` contains the UUIDs of the devices that were shared before.
    pub(super) fn of(gpu: &'a Gpu, shared_before: &'a BTreeSet<TargetUuid>) -> Self {
        let mut uses = Self { shared: shared_before.iter().collect(), alone: BTreeSet::new() };
        for lease in &gpu.leases {
            match lease.kind {
                LeaseKind::Mig => uses.alone.insert(&lease.target),
                LeaseKind::Mps => uses.shared.insert(&lease.target),
                LeaseKind::Timeslice | LeaseKind::Whole => false,
            };
        }
        uses
    }
}

/// Returns the existing devices that the layout shares, sorted by placement.
pub(super) fn shared<'a>(layout: &Layout, mig: &'a Mig, uses: &DeviceUses<'_>) -> Vec<SharedDevice<'a>> {
    let geometry = Geometry::new(&mig.profiles, mig.memory_slices, mig.compute_slices);
    let mut wanted: BTreeMap<DeviceKind, BTreeMap<Option<u8>, DesiredDevices>> = BTreeMap::new();
    for entry in &layout.entries {
        let of_kind = wanted.entry(DeviceKind::of_entry(entry, &geometry)).or_default();
        of_kind.entry(entry.start).or_default().add(entry);
    }
    let mut chosen = Vec::new();
    for (kind, mut places) in wanted {
        let mut pool: Vec<SharedDevice<'a>> = all_devices(mig).filter(|device| device.kind() == kind).collect();
        let is_in = |uuids: &BTreeSet<&TargetUuid>, device: &SharedDevice<'_>| {
            device.compute.uuid.as_ref().is_some_and(|uuid| uuids.contains(uuid))
        };
        pool.sort_by_key(|device| (!is_in(&uses.shared, device), is_in(&uses.alone, device), device.position()));
        let anywhere = places.remove(&None).unwrap_or_default();
        for (start, wanted) in places {
            let is_here = |device: &SharedDevice<'_>| Some(device.instance.placement.start) == start;
            chosen.extend(take_matching(&mut pool, wanted.shared, is_here));
            // Entries without `:mps` select devices from the other end of the order, so that
            // devices that are already shared remain for the `:mps` entries.
            pool.reverse();
            take_matching(&mut pool, wanted.plain, is_here);
            pool.reverse();
        }
        chosen.extend(take_matching(&mut pool, anywhere.shared, |_| true));
    }
    chosen.sort_by_key(SharedDevice::position);
    chosen
}

/// Returns the existing devices that were shared before, sorted by placement.
pub(super) fn previously_shared<'a>(mig: &'a Mig, shared_before: &BTreeSet<TargetUuid>) -> Vec<SharedDevice<'a>> {
    let mut devices: Vec<SharedDevice<'a>> =
        all_devices(mig).filter(|device| device.was_shared(shared_before)).collect();
    devices.sort_by_key(SharedDevice::position);
    devices
}

fn all_devices(mig: &Mig) -> impl Iterator<Item = SharedDevice<'_>> {
    let of = |instance| move |compute| SharedDevice { instance, compute };
    mig.instances.iter().flat_map(move |instance| instance.compute.iter().map(of(instance)))
}

/// Removes and returns the first `count` devices that fit.
fn take_matching<'a>(
    pool: &mut Vec<SharedDevice<'a>>,
    count: usize,
    fits: impl Fn(&SharedDevice<'a>) -> bool,
) -> Vec<SharedDevice<'a>> {
    let mut taken = Vec::new();
    pool.retain(|device| {
        let takes = taken.len() < count && fits(device);
        if takes {
            taken.push(*device);
        }
        !takes
    });
    taken
}
