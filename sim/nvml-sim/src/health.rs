//! Settings and health: persistence, compute mode, ECC, display, affinity.

use silicon::Return;

use crate::caller::{Opaque, Outcome, Ptr};
use crate::entry::{Change, exports};

/// Number of memory locations with error counters. NVML numbers them from 0.
const MEMORY_LOCATIONS: u32 = 8;

exports! {
    /// Returns whether persistence mode is on. In persistence mode, the driver keeps the GPU
    /// initialised while no client has it open.
    fn nvmlDeviceGetPersistenceMode(device: Opaque, mode: Ptr<u32>) |call| {
        mode.put(call.gpu(device, |m, gpu| Ok(m.gpu(gpu)?.persistence.into()))?)
    }

    /// Sets persistence mode.
    fn nvmlDeviceSetPersistenceMode(device: Opaque, mode: u32) |call| {
        let on = switch(mode)?;
        call.change_parent(device, &Change::value(mode), |m, gpu| m.set_persistence(gpu, on))
    }

    /// Returns the compute mode: 0 allows all processes, 2 allows none, and 3 allows one process. A
    /// MIG device has no compute mode.
    fn nvmlDeviceGetComputeMode(device: Opaque, mode: Ptr<u32>) |call| {
        mode.put(call.gpu(device, |m, gpu| Ok(m.gpu(gpu)?.compute_mode))?)
    }

    /// Sets the compute mode.
    fn nvmlDeviceSetComputeMode(device: Opaque, mode: u32) |call| {
        call.change_parent(device, &Change::value(mode), |m, gpu| m.set_compute_mode(gpu, mode))
    }

    /// Returns whether a display is active. The answer is always no.
    fn nvmlDeviceGetDisplayActive(device: Opaque, active: Ptr<u32>) |call| {
        active.put(call.gpu(device, |_, _| Ok(0))?)
    }

    /// Returns whether a display is attached. The answer is always no.
    fn nvmlDeviceGetDisplayMode(device: Opaque, mode: Ptr<u32>) |call| {
        mode.put(call.gpu(device, |m, _| Ok(m.hardware().virtual_machine.into()))?)
    }

    /// Always fails, because only Windows supports this function.
    fn nvmlDeviceGetDriverModel(device: Opaque, _current: Ptr<u32>, _pending: Ptr<u32>) |call| {
        call.gpu(device, |_, _| Err(Return::NotSupported))
    }

    /// Returns the current ECC mode and the ECC mode after the next reset. Both are always on.
    fn nvmlDeviceGetEccMode(device: Opaque, current: Ptr<u32>, pending: Ptr<u32>) |call| {
        call.gpu(device, |m, gpu| m.gpu(gpu).map(|_| ()))?;
        current.put(1)?;
        pending.put(1)
    }

    /// Returns the number of memory errors of a kind, since boot (counter 0) or over the life of
    /// the board (counter 1). The number is always 0.
    fn nvmlDeviceGetTotalEccErrors(device: Opaque, kind: u32, counter: u32, count: Ptr<u64>) |call| {
        error_counter(kind, counter)?;
        call.gpu(device, |m, gpu| m.gpu(gpu).map(|_| ()))?;
        count.put(0)
    }

    /// Returns the number of memory errors of a kind at a location. The number is always 0.
    fn nvmlDeviceGetMemoryErrorCounter(device: Opaque, kind: u32, counter: u32, location: u32, count: Ptr<u64>) |call| {
        error_counter(kind, counter)?;
        if location >= MEMORY_LOCATIONS {
            return Err(Return::InvalidArgument);
        }
        call.gpu(device, |m, gpu| m.gpu(gpu).map(|_| ()))?;
        count.put(0)
    }

    /// Returns the number of memory rows that were replaced by spare rows, for correctable and for
    /// uncorrectable errors. Also returns whether replacements are pending, and whether a
    /// replacement has failed because no spare row was left.
    fn nvmlDeviceGetRemappedRows(
        device: Opaque,
        correctable: Ptr<u32>,
        uncorrectable: Ptr<u32>,
        pending: Ptr<u32>,
        failed: Ptr<u32>
    ) |call| {
        let rows = call.gpu(device, |m, gpu| {
            let rows = m.gpu(gpu)?.rows;
            if m.part(gpu)?.remaps_rows() { Ok(rows) } else { Err(Return::NotSupported) }
        })?;
        correctable.put(rows.correctable)?;
        uncorrectable.put(rows.uncorrectable)?;
        pending.put(rows.pending.into())?;
        failed.put(rows.failed.into())
    }

    /// Returns the virtualization mode: 1 for a GPU that is passed through to a virtual machine, 0 on bare metal.
    fn nvmlDeviceGetVirtualizationMode(device: Opaque, mode: Ptr<u32>) |call| {
        mode.put(call.gpu(device, |m, _| Ok(m.hardware().virtual_machine.into()))?)
    }

    /// Returns the CPUs near the GPU as a bit set: always all CPUs of the host.
    fn nvmlDeviceGetCpuAffinity(device: Opaque, size: u32, set: Ptr<u64>) |call| {
        if size == 0 {
            return Err(Return::InvalidArgument);
        }
        call.gpu(device, |m, gpu| m.gpu(gpu).map(|_| ()))?;
        let processors = std::thread::available_parallelism().map_or(1, std::num::NonZeroUsize::get);
        let word = |index: usize| match processors.saturating_sub(index * 64) {
            left @ 0..64 => (1_u64 << left) - 1,
            64.. => u64::MAX,
        };
        set.put_all((0..size as usize).map(word).collect())
    }
}

fn switch(value: u32) -> Outcome<bool> {
    match value {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(Return::InvalidArgument),
    }
}

fn error_counter(kind: u32, counter: u32) -> Outcome {
    if kind <= 1 && counter <= 1 { Ok(()) } else { Err(Return::InvalidArgument) }
}
