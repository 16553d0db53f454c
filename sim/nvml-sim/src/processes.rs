//! Processes on GPUs and in MIG devices, their load, and accounting.
//!
//! There are three lists of processes (compute, graphics, MPS clients). Each list exists in three
//! versions. Version 1, which nvtop 3.0 uses, has entries of 16 bytes without instance ids.
//! Versions 2 and 3 are equal.

use nvml_wrapper_sys::bindings::{
    nvmlAccountingStats_t, nvmlProcessInfo_v1_t, nvmlProcessInfo_v2_t, nvmlProcessUtilizationSample_t,
};
use silicon::fault::Sensor;
use silicon::machine::{Process, ProcessActivity, ProcessKind};
use silicon::{Machine, Return};

use crate::caller::{Opaque, Outcome, Ptr};
use crate::entry::{Change, Device, exports};
use crate::fields::STALE_MS;
use crate::readings::{EXCESS, reading, without_mig};

const MIB: u64 = 1 << 20;
/// The instance id in the entry of a process that does not belong to an instance.
const NO_INSTANCE: u32 = u32::MAX;
/// Number of processes whose statistics the driver can store.
const ACCOUNTING_BUFFER: u32 = 4000;

exports! {
    /// Returns compute processes, in entries of 16 bytes.
    fn nvmlDeviceGetComputeRunningProcesses(device: Opaque, count: Ptr<u32>, infos: Ptr<nvmlProcessInfo_v1_t>) |call| {
        infos.put_list(count, call.device(device, |m, at| listed(m, at, ProcessKind::Compute, first))?)
    }

    /// Returns compute processes.
    fn nvmlDeviceGetComputeRunningProcesses_v2(device: Opaque, count: Ptr<u32>, infos: Ptr<nvmlProcessInfo_v2_t>) |call| {
        infos.put_list(count, call.device(device, |m, at| listed(m, at, ProcessKind::Compute, second))?)
    }

    /// Returns compute processes.
    fn nvmlDeviceGetComputeRunningProcesses_v3(device: Opaque, count: Ptr<u32>, infos: Ptr<nvmlProcessInfo_v2_t>) |call| {
        infos.put_list(count, call.device(device, |m, at| listed(m, at, ProcessKind::Compute, second))?)
    }

    /// Returns graphics processes, in entries of 16 bytes.
    fn nvmlDeviceGetGraphicsRunningProcesses(device: Opaque, count: Ptr<u32>, infos: Ptr<nvmlProcessInfo_v1_t>) |call| {
        infos.put_list(count, call.device(device, |m, at| listed(m, at, ProcessKind::Graphics, first))?)
    }

    /// Returns graphics processes.
    fn nvmlDeviceGetGraphicsRunningProcesses_v2(device: Opaque, count: Ptr<u32>, infos: Ptr<nvmlProcessInfo_v2_t>) |call| {
        infos.put_list(count, call.device(device, |m, at| listed(m, at, ProcessKind::Graphics, second))?)
    }

    /// Returns graphics processes.
    fn nvmlDeviceGetGraphicsRunningProcesses_v3(device: Opaque, count: Ptr<u32>, infos: Ptr<nvmlProcessInfo_v2_t>) |call| {
        infos.put_list(count, call.device(device, |m, at| listed(m, at, ProcessKind::Graphics, second))?)
    }

    /// Returns clients of MPS servers, in entries of 16 bytes.
    fn nvmlDeviceGetMPSComputeRunningProcesses(device: Opaque, count: Ptr<u32>, infos: Ptr<nvmlProcessInfo_v1_t>) |call| {
        infos.put_list(count, call.device(device, |m, at| listed(m, at, ProcessKind::Mps, first))?)
    }

    /// Returns clients of MPS servers.
    fn nvmlDeviceGetMPSComputeRunningProcesses_v2(device: Opaque, count: Ptr<u32>, infos: Ptr<nvmlProcessInfo_v2_t>) |call| {
        infos.put_list(count, call.device(device, |m, at| listed(m, at, ProcessKind::Mps, second))?)
    }

    /// Returns clients of MPS servers.
    fn nvmlDeviceGetMPSComputeRunningProcesses_v3(device: Opaque, count: Ptr<u32>, infos: Ptr<nvmlProcessInfo_v2_t>) |call| {
        infos.put_list(count, call.device(device, |m, at| listed(m, at, ProcessKind::Mps, second))?)
    }

    /// Returns the mean load of each process over the complete sampling periods since a time in µs. Processes that did
    /// nothing are missing. If MIG is on, returns `NOT_SUPPORTED`.
    fn nvmlDeviceGetProcessUtilization(
        device: Opaque, samples: Ptr<nvmlProcessUtilizationSample_t>, count: Ptr<u32>, since: u64,
    ) |call| {
        count.required()?;
        let (now, found) = call.now(device, |m, gpu, now| {
            without_mig(m, gpu)?;
            // A client that starts with 0 gets the newest sample, as with the real driver.
            let since_ms = if since == 0 { now.saturating_sub(2000) } else { since / 1000 };
            Ok((now, m.process_activity(gpu, since_ms, now)?))
        })?;
        let entries: Vec<_> = reported(&found, now, call.sensor());
        if entries.is_empty() {
            count.put(0)?;
            return Err(Return::NotFound);
        }
        if samples.is_null() {
            count.put(u32::try_from(entries.len()).map_err(|_| Return::Unknown)?)?;
            return Err(Return::InsufficientSize);
        }
        samples.put_list(count, entries)
    }

    /// Returns accounting mode: whether the driver records statistics about processes.
    fn nvmlDeviceGetAccountingMode(device: Opaque, mode: Ptr<u32>) |call| {
        mode.put(call.gpu(device, |m, gpu| Ok(m.gpu(gpu)?.accounting.into()))?)
    }

    /// Sets accounting mode.
    fn nvmlDeviceSetAccountingMode(device: Opaque, mode: u32) |call| {
        let on = match mode {
            0 => false,
            1 => true,
            _ => return Err(Return::InvalidArgument),
        };
        call.change_parent(device, &Change::value(mode), |m, gpu| m.set_accounting(gpu, on))
    }

    /// Returns the accounting statistics of a process.
    fn nvmlDeviceGetAccountingStats(device: Opaque, pid: u32, stats: Ptr<nvmlAccountingStats_t>) |call| {
        stats.put(call.gpu(device, |m, gpu| {
            accounted(m, gpu)?;
            let process = contexts(m, gpu)?.find(|process| process.pid.pid == pid).ok_or(Return::NotFound)?;
            let now = reading(m, gpu)?;
            Ok(nvmlAccountingStats_t {
                gpuUtilization: now.gpu_percent,
                memoryUtilization: now.memory_percent,
                maxMemoryUsage: process.memory_mib * MIB,
                time: 0,
                startTime: 0,
                isRunning: 1,
                reserved: [0; 5],
            })
        })?)
    }

    /// Returns the processes that have accounting statistics.
    fn nvmlDeviceGetAccountingPids(device: Opaque, count: Ptr<u32>, pids: Ptr<u32>) |call| {
        let found = call.gpu(device, |m, gpu| {
            accounted(m, gpu)?;
            Ok(contexts(m, gpu)?.map(|process| process.pid.pid).collect())
        })?;
        pids.put_list(count, found)
    }

    /// Returns the number of processes whose statistics the driver can store.
    fn nvmlDeviceGetAccountingBufferSize(device: Opaque, size: Ptr<u32>) |call| {
        size.put(call.gpu(device, |m, gpu| m.gpu(gpu).map(|_| ACCOUNTING_BUFFER))?)
    }

    /// Does nothing. The real driver clears the statistics of ended processes, but the simulation
    /// has only statistics of running processes.
    fn nvmlDeviceClearAccountingPids(device: Opaque) |call| {
        call.change_parent(device, &Change::NONE, |m, gpu| accounted(m, gpu))
    }
}

/// Returns the processes of one kind on a GPU, including its instances, or in one MIG device.
fn listed<T>(m: &Machine, at: Device, kind: ProcessKind, entry: fn(&Process) -> T) -> Outcome<Vec<T>> {
    let gpu = m.gpu(at.gpu())?;
    let here = |process: &&Process| match at {
        Device::Gpu(_) => true,
        Device::Mig(ci) => {
            process.gpu_instance == Some(ci.gpu_instance) && process.compute_instance.is_none_or(|id| id == ci.id)
        }
    };
    Ok(gpu.listed(kind).filter(here).map(entry).collect())
}

fn first(process: &Process) -> nvmlProcessInfo_v1_t {
    nvmlProcessInfo_v1_t { pid: process.pid.pid, usedGpuMemory: process.memory_mib * MIB }
}

fn second(process: &Process) -> nvmlProcessInfo_v2_t {
    nvmlProcessInfo_v2_t {
        pid: process.pid.pid,
        usedGpuMemory: process.memory_mib * MIB,
        gpuInstanceId: process.gpu_instance.unwrap_or(NO_INSTANCE),
        computeInstanceId: process.compute_instance.unwrap_or(NO_INSTANCE),
    }
}

/// Returns the processes with a context. A process that only has a handle open has no context.
fn contexts(m: &Machine, gpu: u32) -> Outcome<impl Iterator<Item = &Process>> {
    Ok(m.gpu(gpu)?.processes.iter().filter(|process| process.kind != ProcessKind::Handle))
}

fn accounted(m: &Machine, gpu: u32) -> Outcome {
    without_mig(m, gpu)?;
    if m.gpu(gpu)?.accounting { Ok(()) } else { Err(Return::NotSupported) }
}

/// Pid of a process that does not exist, because it is above the kernel's largest pid.
const NO_PROCESS: u32 = 1 << 23;

/// Returns the entries as the driver reports them, with the wrong values that a fault rule demands.
fn reported(found: &[ProcessActivity], now_ms: u64, sensor: Option<Sensor>) -> Vec<nvmlProcessUtilizationSample_t> {
    let entry = |one: &ProcessActivity| {
        let at_ms = if sensor == Some(Sensor::Stale) { one.at_ms.saturating_sub(STALE_MS) } else { one.at_ms };
        let of = |percent: u32| match sensor {
            Some(Sensor::Zero) => 0,
            Some(Sensor::Excess) => percent + EXCESS,
            Some(Sensor::Nan | Sensor::Foreign | Sensor::Stale) | None => percent,
        };
        nvmlProcessUtilizationSample_t {
            pid: one.pid.pid,
            timeStamp: at_ms * 1000,
            smUtil: of(one.busy_percent),
            memUtil: of(one.dram_percent),
            encUtil: 0,
            decUtil: 0,
        }
    };
    let mut entries: Vec<_> = found.iter().map(entry).collect();
    if sensor == Some(Sensor::Foreign) {
        entries.push(nvmlProcessUtilizationSample_t {
            pid: NO_PROCESS,
            timeStamp: now_ms * 1000,
            smUtil: 40,
            memUtil: 10,
            encUtil: 0,
            decUtil: 0,
        });
    }
    entries
}
