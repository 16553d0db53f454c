//! GPU instances: profiles, placements, creation, destruction, lists.
//!
//! The call for profile information exists in three versions. All three use the same code, so that
//! old and new clients read the same values.

use nvml_wrapper_sys::bindings::{
    nvmlGpuInstanceInfo_t, nvmlGpuInstancePlacement_t, nvmlGpuInstanceProfileInfo_t, nvmlGpuInstanceProfileInfo_v2_t,
    nvmlGpuInstanceProfileInfo_v3_t,
};
use silicon::machine::{Handle, Placement};
use silicon::{Machine, Return};

use crate::caller::{Opaque, Outcome, Ptr, text_field, version_word};
use crate::entry::{Change, exports};

/// `NVML_GPU_INSTANCE_PROFILE_CAPS_GFX`.
const CAPABILITY_GFX: u32 = 2;

exports! {
    /// Returns a profile by its enum index. The result has no name.
    fn nvmlDeviceGetGpuInstanceProfileInfo(device: Opaque, index: u32, info: Ptr<nvmlGpuInstanceProfileInfo_t>) |call| {
        info.required()?;
        info.put(call.parent(device, |m, gpu| {
            let part = m.part(gpu)?;
            let data = &part.profile_by_index(index)?.data;
            Ok(nvmlGpuInstanceProfileInfo_t {
                id: data.id,
                isP2pSupported: 0,
                sliceCount: data.slices.into(),
                instanceCount: data.max.into(),
                multiprocessorCount: data.sm,
                copyEngineCount: data.engines.copy.into(),
                decoderCount: data.engines.decoder.into(),
                encoderCount: data.engines.encoder.into(),
                jpegCount: data.engines.jpeg.into(),
                ofaCount: data.engines.ofa.into(),
                memorySizeMB: data.memory_mib,
            })
        })?)
    }

    /// Returns a profile by its enum index, with its name. Version 3 of the result also has the
    /// profile's capabilities.
    fn nvmlDeviceGetGpuInstanceProfileInfoV(device: Opaque, index: u32, info: Ptr<nvmlGpuInstanceProfileInfo_v2_t>) |call| {
        let version = info.cast::<u32>().get()?;
        let third = match version {
            word if word == version_word::<nvmlGpuInstanceProfileInfo_v2_t>(2) => false,
            word if word == version_word::<nvmlGpuInstanceProfileInfo_v3_t>(3) => true,
            _ => return Err(Return::ArgumentVersionMismatch),
        };
        let data = call.parent(device, |m, gpu| Ok(m.part(gpu)?.profile_by_index(index)?.data.clone()))?;
        let name = text_field(&format!("MIG {}", data.name));
        if third {
            return info.cast().put(nvmlGpuInstanceProfileInfo_v3_t {
                version,
                id: data.id,
                sliceCount: data.slices.into(),
                instanceCount: data.max.into(),
                multiprocessorCount: data.sm,
                copyEngineCount: data.engines.copy.into(),
                decoderCount: data.engines.decoder.into(),
                encoderCount: data.engines.encoder.into(),
                jpegCount: data.engines.jpeg.into(),
                ofaCount: data.engines.ofa.into(),
                memorySizeMB: data.memory_mib,
                name,
                capabilities: if data.gfx { CAPABILITY_GFX } else { 0 },
            });
        }
        info.put(nvmlGpuInstanceProfileInfo_v2_t {
            version,
            id: data.id,
            isP2pSupported: 0,
            sliceCount: data.slices.into(),
            instanceCount: data.max.into(),
            multiprocessorCount: data.sm,
            copyEngineCount: data.engines.copy.into(),
            decoderCount: data.engines.decoder.into(),
            encoderCount: data.engines.encoder.into(),
            jpegCount: data.engines.jpeg.into(),
            ofaCount: data.engines.ofa.into(),
            memorySizeMB: data.memory_mib,
            name,
        })
    }

    /// Returns all possible placements of a profile, both free and used ones, even if MIG is off.
    /// If the array is NULL, returns only their number.
    fn nvmlDeviceGetGpuInstancePossiblePlacements(
        device: Opaque, profile: u32, placements: Ptr<nvmlGpuInstancePlacement_t>, count: Ptr<u32>,
    ) |call| {
        let found = call.parent(device, |m, gpu| possible_placements(m, gpu, profile))?;
        put_placements(placements, count, found)
    }

    /// Returns the same as the version without `_v2`.
    fn nvmlDeviceGetGpuInstancePossiblePlacements_v2(
        device: Opaque, profile: u32, placements: Ptr<nvmlGpuInstancePlacement_t>, count: Ptr<u32>,
    ) |call| {
        let found = call.parent(device, |m, gpu| possible_placements(m, gpu, profile))?;
        put_placements(placements, count, found)
    }

    /// Returns how many more instances of a profile fit at present.
    fn nvmlDeviceGetGpuInstanceRemainingCapacity(device: Opaque, profile: u32, count: Ptr<u32>) |call| {
        count.put(call.parent(device, |m, gpu| m.remaining_gpu_instances(gpu, profile))?)
    }

    /// Creates an instance at a placement that the driver chooses.
    fn nvmlDeviceCreateGpuInstance(device: Opaque, profile: u32, instance: Ptr<Opaque>) |call| {
        instance.required()?;
        let made = call.change_parent(device, &Change::create_gpu_instance(profile, None), |m, gpu| {
            m.create_gpu_instance(gpu, profile, None)
        })?;
        instance.put(Opaque::of(Handle::GpuInstance(made)))
    }

    /// Creates an instance at the placement that the caller gives.
    fn nvmlDeviceCreateGpuInstanceWithPlacement(
        device: Opaque, profile: u32, placement: Ptr<nvmlGpuInstancePlacement_t>, instance: Ptr<Opaque>,
    ) |call| {
        instance.required()?;
        let wanted = placement.get()?;
        let wanted = span(wanted.start, wanted.size)?;
        let made = call.change_parent(device, &Change::create_gpu_instance(profile, Some(wanted)), |m, gpu| {
            m.create_gpu_instance(gpu, profile, Some(wanted))
        })?;
        instance.put(Opaque::of(Handle::GpuInstance(made)))
    }

    /// Destroys an instance if it has no compute instances and no processes.
    fn nvmlGpuInstanceDestroy(instance: Opaque) |call| {
        call.change_gpu_instance(instance, &Change::NONE, Machine::destroy_gpu_instance)
    }

    /// Returns the instances of a profile, ordered by id. The caller's array must have room for the
    /// profile's maximum number.
    fn nvmlDeviceGetGpuInstances(device: Opaque, profile: u32, instances: Ptr<Opaque>, count: Ptr<u32>) |call| {
        instances.required()?;
        count.required()?;
        let found = call.parent(device, |m, gpu| {
            let part = m.part(gpu)?;
            let at = m.mig_gpu(gpu)?;
            part.profile(profile)?;
            let of_profile = at.instances.iter().filter(|instance| instance.profile_id == profile);
            of_profile.map(|instance| m.gpu_instance_handle(gpu, instance.id)).collect::<Outcome<Vec<_>>>()
        })?;
        count.put(u32::try_from(found.len()).map_err(|_| Return::Unknown)?)?;
        instances.put_all(found.into_iter().map(|handle| Opaque::of(Handle::GpuInstance(handle))).collect())
    }

    /// Returns the instance with an id.
    fn nvmlDeviceGetGpuInstanceById(device: Opaque, id: u32, instance: Ptr<Opaque>) |call| {
        instance.required()?;
        let found = call.parent(device, |m, gpu| m.gpu_instance_handle(gpu, id))?;
        instance.put(Opaque::of(Handle::GpuInstance(found)))
    }

    /// Returns the properties and the placement of an instance.
    fn nvmlGpuInstanceGetInfo(instance: Opaque, info: Ptr<nvmlGpuInstanceInfo_t>) |call| {
        info.put(call.gpu_instance(instance, |m, handle| {
            let found = m.resolve_gpu_instance(handle)?;
            Ok(nvmlGpuInstanceInfo_t {
                device: Opaque::of(Handle::Gpu(m.gpu_handle(handle.gpu)?)).pointer(),
                id: found.id,
                profileId: found.profile_id,
                placement: nvmlGpuInstancePlacement_t {
                    start: found.placement.start.into(),
                    size: found.placement.size.into(),
                },
            })
        })?)
    }
}

/// Returns a caller's placement as a span. Returns `INVALID_ARGUMENT` if a number is too large.
pub(crate) fn span(start: u32, size: u32) -> Outcome<Placement> {
    let narrow = |value: u32| u8::try_from(value).map_err(|_| Return::InvalidArgument);
    Ok(Placement { start: narrow(start)?, size: narrow(size)? })
}

fn possible_placements(m: &Machine, gpu: u32, profile: u32) -> Outcome<Vec<nvmlGpuInstancePlacement_t>> {
    m.gpu(gpu)?;
    let part = m.part(gpu)?;
    let placements = part.profile(profile)?.placements();
    Ok(placements.map(|(at, _)| nvmlGpuInstancePlacement_t { start: at.start.into(), size: at.size.into() }).collect())
}

/// Writes the number of placements. Also writes the placements, unless the array is NULL.
pub(crate) fn put_placements<T>(to: Ptr<T>, count: Ptr<u32>, found: Vec<T>) -> Outcome {
    count.put(u32::try_from(found.len()).map_err(|_| Return::Unknown)?)?;
    if to.is_null() { Ok(()) } else { to.put_all(found) }
}
