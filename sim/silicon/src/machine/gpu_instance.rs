//! GPU instances: capacity, default placement, creation and destruction.
//!
//! A new instance needs free memory slices, compute slots and engines. Without a given placement,
//! it gets the free id that leaves the most (profile, placement) pairs possible, over all profiles
//! of the GPU model. If several ids are equal in this respect, it gets the lowest id. This rule was
//! derived from observations. It reproduces every known transcript except one
//! (`tests/transcripts.rs`).

use gpush_geometry::{ComputeProfile, Engines};

use super::{Gpu, GpuInstance, GpuInstanceHandle, MAX_GPU_INSTANCES, Machine, Memory, Part, Placement, Profile, uuid};
use crate::returns::Return;

/// A MIG device: a compute instance as programs see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MigDevice {
    /// Index of the MIG device. The indexes have no gaps, and follow the order of GPU instance ids,
    /// and then of compute instance ids. Every change of instances can shift the indexes.
    pub index: u32,
    /// GPU instance id.
    pub gpu_instance: u32,
    /// Compute instance id.
    pub compute_instance: u32,
    /// Generation of the compute instance.
    pub generation: u64,
    /// `MIG-<uuid>`.
    pub uuid: String,
}

impl Gpu {
    /// Returns whether an instance of the profile at this placement fits into the free capacity.
    #[must_use]
    pub fn fits(&self, part: &Part, profile: &Profile, placement: Placement) -> bool {
        self.room(part).takes(profile, placement)
    }

    /// Returns how many more instances of the profile fit at present.
    #[must_use]
    pub fn remaining(&self, part: &Part, profile: &Profile) -> u32 {
        // All placements of a profile have the same size. So to find the maximum number, go through
        // the placements in the order of their starts, and take each one that still fits.
        let mut room = self.room(part);
        let mut count = 0;
        for (placement, _) in profile.placements() {
            if room.takes(profile, placement) {
                room.take(profile, placement);
                count += 1;
            }
        }
        count
    }

    fn room<'p>(&self, part: &'p Part) -> Room<'p> {
        let mut room = Room {
            part,
            spans: Vec::with_capacity(MAX_GPU_INSTANCES),
            slices: 0,
            engines: Engines { copy: 0, decoder: 0, encoder: 0, jpeg: 0, ofa: 0 },
        };
        for instance in &self.instances {
            if let Ok(profile) = part.profile(instance.profile_id) {
                room.take(profile, instance.placement);
            }
        }
        room
    }

    /// Returns the placement that the driver would choose for an instance of the profile, and the
    /// id that the instance would get.
    #[must_use]
    pub fn default_placement(&self, part: &Part, profile: &Profile) -> Option<(Placement, u32)> {
        let room = self.room(part);
        profile
            .placements()
            .filter(|&(placement, _)| room.takes(profile, placement))
            .map(|(placement, id)| {
                let mut after = room.clone();
                after.take(profile, placement);
                let possible = part
                    .profiles
                    .iter()
                    .map(|other| other.placements().filter(|&(at, _)| after.takes(other, at)).count())
                    .sum::<usize>();
                (std::cmp::Reverse(possible), id, placement)
            })
            .min()
            .map(|(_, id, placement)| (placement, id))
    }
}

/// The resources of a GPU that are in use.
#[derive(Debug, Clone)]
struct Room<'p> {
    part: &'p Part,
    spans: Vec<Placement>,
    slices: u8,
    engines: Engines,
}

impl Room<'_> {
    fn takes(&self, profile: &Profile, placement: Placement) -> bool {
        let (has, used, wants) = (&self.part.engines, &self.engines, &profile.data.engines);
        self.spans.len() < MAX_GPU_INSTANCES
            && self.slices + profile.data.slices <= self.part.model.compute_slices
            && used.copy + wants.copy <= has.copy
            && used.decoder + wants.decoder <= has.decoder
            && used.encoder + wants.encoder <= has.encoder
            && used.jpeg + wants.jpeg <= has.jpeg
            && used.ofa + wants.ofa <= has.ofa
            && !self.spans.iter().any(|span| span.overlaps(placement))
    }

    fn take(&mut self, profile: &Profile, placement: Placement) {
        let wants = &profile.data.engines;
        self.spans.push(placement);
        self.slices += profile.data.slices;
        self.engines.copy += wants.copy;
        self.engines.decoder += wants.decoder;
        self.engines.encoder += wants.encoder;
        self.engines.jpeg += wants.jpeg;
        self.engines.ofa += wants.ofa;
    }
}

impl Machine {
    /// Returns the GPU if it is in MIG mode.
    ///
    /// # Errors
    /// `NotSupported` with MIG off, otherwise as [`Machine::gpu`].
    pub fn mig_gpu(&self, gpu: u32) -> Result<&Gpu, Return> {
        let at = self.gpu(gpu)?;
        if at.mig { Ok(at) } else { Err(Return::NotSupported) }
    }

    /// Creates a GPU instance at the given placement. Without a given placement, uses the one that
    /// the driver would choose.
    ///
    /// # Errors
    /// `NotSupported` with MIG off, or for a profile that only other GPU models have;
    /// `InvalidArgument` for an unknown profile id or an impossible placement; `InUse` if the
    /// instance would be the first one and a process uses the GPU; `InsufficientResources` if
    /// capacity is missing or the placement is occupied; `GpuIsLost`.
    pub fn create_gpu_instance(
        &mut self,
        gpu: u32,
        profile_id: u32,
        placement: Option<Placement>,
    ) -> Result<GpuInstanceHandle, Return> {
        let part = self.part(gpu)?;
        let at = self.mig_gpu(gpu)?;
        let profile = part.profile(profile_id)?;
        if at.instances.is_empty() && !at.processes.is_empty() {
            return Err(Return::InUse);
        }
        let (placement, id) = match placement {
            Some(wanted) => {
                profile.placements().find(|&(possible, _)| possible == wanted).ok_or(Return::InvalidArgument).and_then(
                    |found| {
                        if at.fits(&part, profile, wanted) { Ok(found) } else { Err(Return::InsufficientResources) }
                    },
                )?
            }
            None => at.default_placement(&part, profile).ok_or(Return::InsufficientResources)?,
        };
        let generation = self.generation();
        let at = self.gpu_mut(gpu)?;
        at.instances.push(GpuInstance { id, profile_id, placement, generation, instances: Vec::new() });
        at.instances.sort_by_key(|instance| instance.id);
        self.mig_changed(gpu, Some(id), None);
        Ok(GpuInstanceHandle { gpu, id, generation })
    }

    /// Destroys a GPU instance.
    ///
    /// # Errors
    /// `InvalidArgument` for a stale handle; `InUse` while the instance has compute instances, or a
    /// process uses the instance or has an open handle of it; `NotSupported` with MIG off;
    /// `GpuIsLost`.
    pub fn destroy_gpu_instance(&mut self, handle: GpuInstanceHandle) -> Result<(), Return> {
        let instance = self.resolve_gpu_instance(handle)?;
        if !instance.instances.is_empty() || self.gpu(handle.gpu)?.processes_in(handle.id, None).next().is_some() {
            return Err(Return::InUse);
        }
        self.gpu_mut(handle.gpu)?.instances.retain(|instance| instance.id != handle.id);
        self.mig_changed(handle.gpu, Some(handle.id), None);
        Ok(())
    }

    /// Returns the GPU instance with this id.
    ///
    /// # Errors
    /// `NotSupported` with MIG off, `NotFound`, `GpuIsLost`, `InvalidArgument`.
    pub fn gpu_instance(&self, gpu: u32, id: u32) -> Result<&GpuInstance, Return> {
        self.mig_gpu(gpu)?.instance(id).ok_or(Return::NotFound)
    }

    /// Returns the handle of the GPU instance with this id.
    ///
    /// # Errors
    /// As [`Machine::gpu_instance`].
    pub fn gpu_instance_handle(&self, gpu: u32, id: u32) -> Result<GpuInstanceHandle, Return> {
        self.gpu_instance(gpu, id).map(|found| GpuInstanceHandle { gpu, id, generation: found.generation })
    }

    /// Returns the GPU instance of a handle.
    ///
    /// # Errors
    /// `InvalidArgument` if the instance was destroyed or replaced; `NotSupported` with MIG off;
    /// `GpuIsLost`.
    pub fn resolve_gpu_instance(&self, handle: GpuInstanceHandle) -> Result<&GpuInstance, Return> {
        self.mig_gpu(handle.gpu)?
            .instance(handle.id)
            .filter(|found| found.generation == handle.generation)
            .ok_or(Return::InvalidArgument)
    }

    /// Returns how many more instances of a profile fit on the GPU at present.
    ///
    /// # Errors
    /// `NotSupported` with MIG off or if this GPU model does not have the profile,
    /// `InvalidArgument`, `GpuIsLost`.
    pub fn remaining_gpu_instances(&self, gpu: u32, profile_id: u32) -> Result<u32, Return> {
        let part = self.part(gpu)?;
        let at = self.mig_gpu(gpu)?;
        Ok(at.remaining(&part, part.profile(profile_id)?))
    }

    /// Returns the memory of a GPU instance, which its compute instances share.
    ///
    /// # Errors
    /// As [`Machine::gpu_instance`].
    pub fn gpu_instance_memory(&self, gpu: u32, id: u32) -> Result<Memory, Return> {
        let profile_id = self.gpu_instance(gpu, id)?.profile_id;
        let part = self.part(gpu)?;
        let total = part.profile(profile_id)?.data.memory_mib;
        let used: u64 = self.gpu(gpu)?.processes_in(id, None).map(|p| p.memory_mib).sum();
        // The driver shows about 12 MiB of used memory for an idle 1g.10gb.
        let reserved = total / 768;
        Ok(Memory { total_mib: total, reserved_mib: reserved, used_mib: used.min(total - reserved) })
    }

    /// Returns the MIG devices of a GPU, in the order of their indexes. The list is empty if MIG is
    /// off.
    ///
    /// # Errors
    /// `GpuIsLost`, `InvalidArgument`.
    pub fn mig_devices(&self, gpu: u32) -> Result<Vec<MigDevice>, Return> {
        let at = self.gpu(gpu)?;
        let parent = &self.identity(gpu)?.uuid;
        let all = at.instances.iter().flat_map(|gi| gi.instances.iter().map(move |ci| (gi, ci)));
        Ok(all
            .zip(0..)
            .map(|((gi, ci), index)| MigDevice {
                index,
                gpu_instance: gi.id,
                compute_instance: ci.id,
                generation: ci.generation,
                uuid: uuid::of_mig_device(self.hardware().driver, parent, gi.id, ci.id),
            })
            .collect())
    }

    /// Returns the maximum number of MIG devices on the GPU, which is 0 if MIG is off.
    ///
    /// # Errors
    /// `GpuIsLost`, `InvalidArgument`.
    pub fn max_mig_devices(&self, gpu: u32) -> Result<u32, Return> {
        let part = self.part(gpu)?;
        let at = self.gpu(gpu)?;
        Ok(if at.mig { u32::from(part.model.compute_slices) } else { 0 })
    }

    /// Returns a compute profile of a GPU instance.
    ///
    /// # Errors
    /// `NotSupported` if the GPU model does not have the profile.
    pub fn compute_profile<'p>(&self, part: &'p Part, gi: &GpuInstance, id: u32) -> Result<&'p ComputeProfile, Return> {
        part.profile(gi.profile_id)?.compute(id).ok_or(Return::NotSupported)
    }
}
