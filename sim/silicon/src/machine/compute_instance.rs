//! Compute instances, which programs see as MIG devices.
//!
//! A new instance gets the lowest free id. Without a given placement, it gets the free span that
//! leaves the most (profile, placement) pairs possible in the GPU instance. If several spans are
//! equal in this respect, it gets the span with the lowest start. The spans come from the geometry
//! data: on Hopper and later, 3c takes four compute slots and 7c takes eight.

use gpush_geometry::ComputeProfile;

use super::{
    ComputeInstance, ComputeInstanceHandle, GpuInstance, GpuInstanceHandle, MAX_COMPUTE_INSTANCES, Machine, Placement,
    Profile, uuid,
};
use crate::returns::Return;

/// Profile ids of compute instances that exist on at least one GPU model.
const KNOWN_PROFILE_IDS: std::ops::Range<u32> = 0..9;

/// Returns the possible placements of a compute profile, in the order of the geometry data.
pub(super) fn spans(profile: &ComputeProfile) -> impl Iterator<Item = Placement> + '_ {
    profile.placements.iter().map(|&(start, size)| Placement { start, size })
}

impl GpuInstance {
    /// Returns whether a compute instance at this placement fits into the free capacity.
    #[must_use]
    pub fn fits(&self, within: &Profile, profile: &ComputeProfile, placement: Placement) -> bool {
        Taken::of(self, within).takes(within, profile, placement)
    }

    /// Returns how many more compute instances of the profile fit at present.
    #[must_use]
    pub fn remaining(&self, within: &Profile, profile: &ComputeProfile) -> u32 {
        let mut taken = Taken::of(self, within);
        let mut count = 0;
        for placement in spans(profile) {
            if taken.takes(within, profile, placement) {
                taken.take(profile, placement);
                count += 1;
            }
        }
        count
    }

    /// Returns the placement that the driver would choose for a compute instance of the profile.
    #[must_use]
    pub fn default_placement(&self, within: &Profile, profile: &ComputeProfile) -> Option<Placement> {
        let taken = Taken::of(self, within);
        spans(profile)
            .filter(|&placement| taken.takes(within, profile, placement))
            .map(|placement| {
                let mut after = taken.clone();
                after.take(profile, placement);
                let possible =
                    |other: &ComputeProfile| spans(other).filter(|&at| after.takes(within, other, at)).count();
                (std::cmp::Reverse(within.data.compute.iter().map(possible).sum::<usize>()), placement)
            })
            .min()
            .map(|(_, placement)| placement)
    }
}

/// The resources of a GPU instance that are in use.
#[derive(Debug, Clone)]
struct Taken {
    spans: Vec<Placement>,
    slices: u8,
}

impl Taken {
    fn of(instance: &GpuInstance, within: &Profile) -> Self {
        let mut taken = Self { spans: Vec::with_capacity(MAX_COMPUTE_INSTANCES), slices: 0 };
        for ci in &instance.instances {
            if let Some(profile) = within.compute(ci.profile_id) {
                taken.take(profile, ci.placement);
            }
        }
        taken
    }

    fn takes(&self, within: &Profile, profile: &ComputeProfile, placement: Placement) -> bool {
        self.spans.len() < MAX_COMPUTE_INSTANCES
            && self.slices + profile.slices <= within.data.slices
            && !self.spans.iter().any(|span| span.overlaps(placement))
    }

    fn take(&mut self, profile: &ComputeProfile, placement: Placement) {
        self.spans.push(placement);
        self.slices += profile.slices;
    }
}

impl Machine {
    /// Creates a compute instance at the given placement. Without a given placement, uses the one
    /// that the driver would choose.
    ///
    /// # Errors
    /// `InvalidArgument` for a stale handle, an unknown profile id or an impossible placement;
    /// `NotSupported` for a profile that this GPU instance does not have; `InsufficientResources`
    /// if capacity is missing or the placement is occupied; `GpuIsLost`.
    pub fn create_compute_instance(
        &mut self,
        handle: GpuInstanceHandle,
        profile_id: u32,
        placement: Option<Placement>,
    ) -> Result<ComputeInstanceHandle, Return> {
        let part = self.part(handle.gpu)?;
        let instance = self.resolve_gpu_instance(handle)?;
        let within = part.profile(instance.profile_id)?;
        let unknown =
            if KNOWN_PROFILE_IDS.contains(&profile_id) { Return::NotSupported } else { Return::InvalidArgument };
        let profile = within.compute(profile_id).ok_or(unknown)?;
        let placement = match placement {
            Some(wanted) if !spans(profile).any(|possible| possible == wanted) => return Err(Return::InvalidArgument),
            Some(wanted) if !instance.fits(within, profile, wanted) => return Err(Return::InsufficientResources),
            Some(wanted) => wanted,
            None => instance.default_placement(within, profile).ok_or(Return::InsufficientResources)?,
        };
        let id = (0..).find(|&id| instance.compute(id).is_none()).ok_or(Return::InsufficientResources)?;
        let generation = self.generation();
        let made = ComputeInstance { id, profile_id, placement, generation };
        let at = self.gpu_mut(handle.gpu)?;
        let instance = at.instances.iter_mut().find(|gi| gi.id == handle.id).ok_or(Return::InvalidArgument)?;
        instance.instances.push(made);
        instance.instances.sort_by_key(|ci| ci.id);
        self.mig_changed(handle.gpu, Some(handle.id), Some(id));
        Ok(ComputeInstanceHandle { gpu: handle.gpu, gpu_instance: handle.id, id, generation })
    }

    /// Destroys a compute instance.
    ///
    /// # Errors
    /// `InvalidArgument` for a stale handle, `InUse` while a process uses the instance or has an
    /// open handle of it, `NotSupported` with MIG off, `GpuIsLost`.
    pub fn destroy_compute_instance(&mut self, handle: ComputeInstanceHandle) -> Result<(), Return> {
        self.resolve_compute_instance(handle)?;
        let at = self.gpu_mut(handle.gpu)?;
        if at.processes_in(handle.gpu_instance, Some(handle.id)).next().is_some() {
            return Err(Return::InUse);
        }
        for instance in at.instances.iter_mut().filter(|gi| gi.id == handle.gpu_instance) {
            instance.instances.retain(|ci| ci.id != handle.id);
        }
        self.mig_changed(handle.gpu, Some(handle.gpu_instance), Some(handle.id));
        Ok(())
    }

    /// Returns the handle of the compute instance with this id.
    ///
    /// # Errors
    /// `NotFound` if no compute instance has this id, otherwise as
    /// [`Machine::resolve_gpu_instance`].
    pub fn compute_instance_handle(&self, gi: GpuInstanceHandle, id: u32) -> Result<ComputeInstanceHandle, Return> {
        let found = self.resolve_gpu_instance(gi)?.compute(id).ok_or(Return::NotFound)?;
        Ok(ComputeInstanceHandle { gpu: gi.gpu, gpu_instance: gi.id, id, generation: found.generation })
    }

    /// Returns the compute instance of a handle, with its GPU instance.
    ///
    /// # Errors
    /// `InvalidArgument` if the instance was destroyed or replaced; `NotSupported` with MIG off;
    /// `GpuIsLost`.
    pub fn resolve_compute_instance(
        &self,
        handle: ComputeInstanceHandle,
    ) -> Result<(&GpuInstance, &ComputeInstance), Return> {
        let gi = self.mig_gpu(handle.gpu)?.instance(handle.gpu_instance).ok_or(Return::InvalidArgument)?;
        let ci = gi.compute(handle.id).filter(|found| found.generation == handle.generation);
        ci.map(|ci| (gi, ci)).ok_or(Return::InvalidArgument)
    }

    /// Returns the handle of the MIG device at an index. The indexes have no gaps.
    ///
    /// # Errors
    /// `InvalidArgument` for an index at or above the maximum number of devices, `NotFound` for an
    /// unused index, `NotSupported` with MIG off, `GpuIsLost`.
    pub fn mig_device_by_index(&self, gpu: u32, index: u32) -> Result<ComputeInstanceHandle, Return> {
        self.mig_gpu(gpu)?;
        if index >= self.max_mig_devices(gpu)? {
            return Err(Return::InvalidArgument);
        }
        let devices = self.mig_devices(gpu)?;
        let found = devices.get(index as usize).ok_or(Return::NotFound)?;
        Ok(ComputeInstanceHandle {
            gpu,
            gpu_instance: found.gpu_instance,
            id: found.compute_instance,
            generation: found.generation,
        })
    }

    /// Returns the handle of the MIG device with this `MIG-<uuid>`.
    ///
    /// # Errors
    /// `NotFound` if no MIG device has this UUID.
    pub fn mig_device_by_uuid(&self, uuid: &str) -> Result<ComputeInstanceHandle, Return> {
        for gpu in self.gpus().iter().filter(|gpu| !gpu.lost) {
            for device in self.mig_devices(gpu.index)? {
                if device.uuid == uuid {
                    return Ok(ComputeInstanceHandle {
                        gpu: gpu.index,
                        gpu_instance: device.gpu_instance,
                        id: device.compute_instance,
                        generation: device.generation,
                    });
                }
            }
        }
        Err(Return::NotFound)
    }

    /// Returns the `MIG-<uuid>` of a compute instance.
    ///
    /// # Errors
    /// `InvalidArgument` if the GPU does not exist.
    pub fn mig_uuid(&self, handle: ComputeInstanceHandle) -> Result<String, Return> {
        Ok(uuid::of_mig_device(
            self.hardware().driver,
            &self.identity(handle.gpu)?.uuid,
            handle.gpu_instance,
            handle.id,
        ))
    }
}
