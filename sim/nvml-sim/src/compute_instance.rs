//! Compute instances of a GPU instance: profiles, placements, creation, destruction, lists.

use nvml_wrapper_sys::bindings::{
    nvmlComputeInstanceInfo_t, nvmlComputeInstancePlacement_t, nvmlComputeInstanceProfileInfo_t,
    nvmlComputeInstanceProfileInfo_v2_t, nvmlComputeInstanceProfileInfo_v3_t,
};
use silicon::machine::{ComputeInstanceHandle, GpuInstanceHandle, Handle};
use silicon::{Machine, Return};

use crate::caller::{Opaque, Outcome, Ptr, text_field, version_word};
use crate::entry::{Change, exports};
use crate::gpu_instance::{put_placements, span};

/// `NVML_COMPUTE_INSTANCE_PROFILE_CAPS_GFX`.
const CAPABILITY_GFX: u32 = 1;
/// `NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED`, the only engine profile.
const ENGINES_SHARED: u32 = 0;

/// The output of `nvmlComputeInstanceGetInfo` before R455. It has no placement.
#[repr(C)]
pub(crate) struct ComputeInstanceInfoV1 {
    device: *mut std::ffi::c_void,
    gpu_instance: *mut std::ffi::c_void,
    id: u32,
    profile_id: u32,
}

exports! {
    /// Returns a profile by its enum index. The result has no name.
    fn nvmlGpuInstanceGetComputeInstanceProfileInfo(
        instance: Opaque, index: u32, engines: u32, info: Ptr<nvmlComputeInstanceProfileInfo_t>,
    ) |call| {
        info.required()?;
        let row = call.gpu_instance(instance, |m, handle| profile(m, handle, index, engines))?;
        info.put(nvmlComputeInstanceProfileInfo_t {
            id: row.id,
            sliceCount: row.slices,
            instanceCount: row.max,
            multiprocessorCount: row.sm,
            sharedCopyEngineCount: row.engines[0],
            sharedDecoderCount: row.engines[1],
            sharedEncoderCount: row.engines[2],
            sharedJpegCount: row.engines[3],
            sharedOfaCount: row.engines[4],
        })
    }

    /// Returns a profile by its enum index, with its name. Version 3 of the result also has the
    /// profile's capabilities.
    fn nvmlGpuInstanceGetComputeInstanceProfileInfoV(
        instance: Opaque, index: u32, engines: u32, info: Ptr<nvmlComputeInstanceProfileInfo_v2_t>,
    ) |call| {
        let version = info.cast::<u32>().get()?;
        let third = match version {
            word if word == version_word::<nvmlComputeInstanceProfileInfo_v2_t>(2) => false,
            word if word == version_word::<nvmlComputeInstanceProfileInfo_v3_t>(3) => true,
            _ => return Err(Return::ArgumentVersionMismatch),
        };
        let row = call.gpu_instance(instance, |m, handle| profile(m, handle, index, engines))?;
        let name = text_field(&format!("MIG {}", row.name));
        if third {
            return info.cast().put(nvmlComputeInstanceProfileInfo_v3_t {
                version,
                id: row.id,
                sliceCount: row.slices,
                instanceCount: row.max,
                multiprocessorCount: row.sm,
                sharedCopyEngineCount: row.engines[0],
                sharedDecoderCount: row.engines[1],
                sharedEncoderCount: row.engines[2],
                sharedJpegCount: row.engines[3],
                sharedOfaCount: row.engines[4],
                name,
                capabilities: if row.gfx { CAPABILITY_GFX } else { 0 },
            });
        }
        info.put(nvmlComputeInstanceProfileInfo_v2_t {
            version,
            id: row.id,
            sliceCount: row.slices,
            instanceCount: row.max,
            multiprocessorCount: row.sm,
            sharedCopyEngineCount: row.engines[0],
            sharedDecoderCount: row.engines[1],
            sharedEncoderCount: row.engines[2],
            sharedJpegCount: row.engines[3],
            sharedOfaCount: row.engines[4],
            name,
        })
    }

    /// Returns all possible placements of a profile, both free and used ones. If the array is NULL,
    /// returns only their number.
    fn nvmlGpuInstanceGetComputeInstancePossiblePlacements(
        instance: Opaque, profile: u32, placements: Ptr<nvmlComputeInstancePlacement_t>, count: Ptr<u32>,
    ) |call| {
        let found = call.gpu_instance(instance, |m, handle| {
            let part = m.part(handle.gpu)?;
            let row = m.compute_profile(&part, m.resolve_gpu_instance(handle)?, profile)?;
            let placements = row.placements.iter();
            Ok(placements
                .map(|&(start, size)| nvmlComputeInstancePlacement_t { start: start.into(), size: size.into() })
                .collect())
        })?;
        put_placements(placements, count, found)
    }

    /// Returns how many more compute instances of a profile fit at present.
    fn nvmlGpuInstanceGetComputeInstanceRemainingCapacity(instance: Opaque, profile: u32, count: Ptr<u32>) |call| {
        count.put(call.gpu_instance(instance, |m, handle| {
            let part = m.part(handle.gpu)?;
            let gi = m.resolve_gpu_instance(handle)?;
            let row = m.compute_profile(&part, gi, profile)?;
            Ok(gi.remaining(part.profile(gi.profile_id)?, row))
        })?)
    }

    /// Creates a compute instance at a placement that the driver chooses.
    fn nvmlGpuInstanceCreateComputeInstance(instance: Opaque, profile: u32, made: Ptr<Opaque>) |call| {
        made.required()?;
        let change = Change::create_compute_instance(profile, None);
        let handle = call.change_gpu_instance(instance, &change, |m, gi| m.create_compute_instance(gi, profile, None))?;
        made.put(Opaque::of(Handle::ComputeInstance(handle)))
    }

    /// Creates a compute instance at the placement that the caller gives.
    fn nvmlGpuInstanceCreateComputeInstanceWithPlacement(
        instance: Opaque, profile: u32, placement: Ptr<nvmlComputeInstancePlacement_t>, made: Ptr<Opaque>,
    ) |call| {
        made.required()?;
        let wanted = placement.get()?;
        let wanted = span(wanted.start, wanted.size)?;
        let change = Change::create_compute_instance(profile, Some(wanted));
        let handle =
            call.change_gpu_instance(instance, &change, |m, gi| m.create_compute_instance(gi, profile, Some(wanted)))?;
        made.put(Opaque::of(Handle::ComputeInstance(handle)))
    }

    /// Destroys a compute instance if it has no processes.
    fn nvmlComputeInstanceDestroy(instance: Opaque) |call| {
        call.change_compute_instance(instance, &Change::NONE, Machine::destroy_compute_instance)
    }

    /// Returns the compute instances of a profile, ordered by id. The caller's array must have room
    /// for the profile's maximum number.
    fn nvmlGpuInstanceGetComputeInstances(instance: Opaque, profile: u32, instances: Ptr<Opaque>, count: Ptr<u32>) |call| {
        instances.required()?;
        count.required()?;
        let found = call.gpu_instance(instance, |m, handle| {
            let part = m.part(handle.gpu)?;
            let gi = m.resolve_gpu_instance(handle)?;
            m.compute_profile(&part, gi, profile)?;
            let of_profile = gi.instances.iter().filter(|ci| ci.profile_id == profile);
            of_profile.map(|ci| m.compute_instance_handle(handle, ci.id)).collect::<Outcome<Vec<_>>>()
        })?;
        count.put(u32::try_from(found.len()).map_err(|_| Return::Unknown)?)?;
        instances.put_all(found.into_iter().map(|handle| Opaque::of(Handle::ComputeInstance(handle))).collect())
    }

    /// Returns the compute instance with an id.
    fn nvmlGpuInstanceGetComputeInstanceById(instance: Opaque, id: u32, found: Ptr<Opaque>) |call| {
        found.required()?;
        let handle = call.gpu_instance(instance, |m, gi| m.compute_instance_handle(gi, id))?;
        found.put(Opaque::of(Handle::ComputeInstance(handle)))
    }

    /// Returns the properties of a compute instance, in the old struct, which has no placement.
    fn nvmlComputeInstanceGetInfo(instance: Opaque, info: Ptr<ComputeInstanceInfoV1>) |call| {
        let found = call.compute_instance(instance, describe)?;
        info.put(ComputeInstanceInfoV1 {
            device: found.device.cast(),
            gpu_instance: found.gpuInstance.cast(),
            id: found.id,
            profile_id: found.profileId,
        })
    }

    /// Returns the properties and the placement of a compute instance, and its MIG device.
    fn nvmlComputeInstanceGetInfo_v2(instance: Opaque, info: Ptr<nvmlComputeInstanceInfo_t>) |call| {
        info.put(call.compute_instance(instance, describe)?)
    }
}

fn describe(m: &Machine, handle: ComputeInstanceHandle) -> Outcome<nvmlComputeInstanceInfo_t> {
    let (gi, ci) = m.resolve_compute_instance(handle)?;
    let parent = GpuInstanceHandle { gpu: handle.gpu, id: gi.id, generation: gi.generation };
    Ok(nvmlComputeInstanceInfo_t {
        device: Opaque::of(Handle::MigDevice(handle)).pointer(),
        gpuInstance: Opaque::of(Handle::GpuInstance(parent)).pointer(),
        id: ci.id,
        profileId: ci.profile_id,
        placement: nvmlComputeInstancePlacement_t { start: ci.placement.start.into(), size: ci.placement.size.into() },
    })
}

/// A compute instance profile, in a form from which all versions of the call are filled.
struct Row {
    name: String,
    id: u32,
    slices: u32,
    max: u32,
    sm: u32,
    gfx: bool,
    /// Numbers of the GPU instance's engines: copy, decoder, encoder, JPEG, optical flow.
    engines: [u32; 5],
}

fn profile(m: &Machine, handle: GpuInstanceHandle, index: u32, engines: u32) -> Outcome<Row> {
    let part = m.part(handle.gpu)?;
    let within = part.profile(m.resolve_gpu_instance(handle)?.profile_id)?;
    if engines != ENGINES_SHARED {
        return Err(Return::InvalidArgument);
    }
    let row = part.compute_profile_by_index(within, index)?;
    let shared = &within.data.engines;
    Ok(Row {
        name: row.name.clone(),
        id: row.id,
        slices: row.slices.into(),
        max: row.max.into(),
        sm: row.sm,
        gfx: within.data.gfx,
        engines: [shared.copy, shared.decoder, shared.encoder, shared.jpeg, shared.ofa].map(u32::from),
    })
}
