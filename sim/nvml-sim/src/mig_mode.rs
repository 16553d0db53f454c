//! MIG mode of a GPU, and MIG devices as devices: handles, ids, attributes.

use nvml_wrapper_sys::bindings::nvmlDeviceAttributes_t;
use silicon::machine::Handle;
use silicon::{Machine, Return};

use crate::caller::{Opaque, Ptr};
use crate::entry::{Device, exports};

exports! {
    /// Returns the current MIG mode, and the MIG mode after the next reset.
    fn nvmlDeviceGetMigMode(device: Opaque, current: Ptr<u32>, pending: Ptr<u32>) |call| {
        current.required()?;
        pending.required()?;
        let (now, then) = call.parent(device, |m, gpu| {
            let at = m.gpu(gpu)?;
            if m.part(gpu)?.has_mig() { Ok((at.mig, at.mig_pending)) } else { Err(Return::NotSupported) }
        })?;
        current.put(u32::from(now))?;
        pending.put(u32::from(then))
    }

    /// Sets MIG mode. Success does not mean that the mode is in effect: only the activation status
    /// shows that.
    fn nvmlDeviceSetMigMode(device: Opaque, mode: u32, activation: Ptr<u32>) |call| {
        activation.required()?;
        let enable = match mode {
            0 => false,
            1 => true,
            _ => return Err(Return::InvalidArgument),
        };
        let status = call.set_mig_mode(device, enable)?;
        activation.put(status.code())
    }

    /// Returns the maximum number of MIG devices on the GPU, or 0 if MIG is off.
    fn nvmlDeviceGetMaxMigDeviceCount(device: Opaque, count: Ptr<u32>) |call| {
        count.put(call.parent(device, Machine::max_mig_devices)?)
    }

    /// Returns the MIG device at an index. The indexes have no gaps. They follow the order of GPU
    /// instance ids, and then of compute instance ids.
    fn nvmlDeviceGetMigDeviceHandleByIndex(device: Opaque, index: u32, mig: Ptr<Opaque>) |call| {
        mig.required()?;
        let handle = call.parent(device, |m, gpu| m.mig_device_by_index(gpu, index))?;
        mig.put(Opaque::of(Handle::MigDevice(handle)))
    }

    /// Returns whether a handle belongs to a MIG device.
    fn nvmlDeviceIsMigDeviceHandle(device: Opaque, is_mig: Ptr<u32>) |call| {
        is_mig.put(call.device(device, |_, at| Ok(match at { Device::Gpu(_) => 0, Device::Mig(_) => 1 }))?)
    }

    /// Returns the GPU of a MIG device.
    fn nvmlDeviceGetDeviceHandleFromMigDeviceHandle(mig: Opaque, device: Ptr<Opaque>) |call| {
        let parent = call.mig_device(mig, |m, ci| m.gpu_handle(ci.gpu))?;
        device.put(Opaque::of(Handle::Gpu(parent)))
    }

    /// Returns the GPU instance id of a MIG device.
    fn nvmlDeviceGetGpuInstanceId(mig: Opaque, id: Ptr<u32>) |call| {
        id.put(call.mig_device(mig, |_, ci| Ok(ci.gpu_instance))?)
    }

    /// Returns the compute instance id of a MIG device.
    fn nvmlDeviceGetComputeInstanceId(mig: Opaque, id: Ptr<u32>) |call| {
        id.put(call.mig_device(mig, |_, ci| Ok(ci.id))?)
    }

    /// Returns the resources of a MIG device: its own multiprocessors, and the engines and memory
    /// of its GPU instance.
    fn nvmlDeviceGetAttributes_v2(mig: Opaque, attributes: Ptr<nvmlDeviceAttributes_t>) |call| {
        attributes.put(call.mig_device(mig, |m, handle| {
            let part = m.part(handle.gpu)?;
            let (gi, ci) = m.resolve_compute_instance(handle)?;
            let (profile, compute) = (part.profile(gi.profile_id)?, m.compute_profile(&part, gi, ci.profile_id)?);
            let engines = &profile.data.engines;
            Ok(nvmlDeviceAttributes_t {
                multiprocessorCount: compute.sm,
                sharedCopyEngineCount: engines.copy.into(),
                sharedDecoderCount: engines.decoder.into(),
                sharedEncoderCount: engines.encoder.into(),
                sharedJpegCount: engines.jpeg.into(),
                sharedOfaCount: engines.ofa.into(),
                gpuInstanceSliceCount: profile.data.slices.into(),
                computeInstanceSliceCount: compute.slices.into(),
                memorySizeMB: profile.data.memory_mib,
            })
        })?)
    }
}
