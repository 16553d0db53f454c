//! GPU performance monitoring (GPM), on Hopper and later models: the activity of a GPU or of a GPU
//! instance between two samples. If MIG mode is enabled, only GPM shows the load.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char};
use std::sync::MutexGuard;

use gpush_geometry::Architecture;
use gpush_locked::Locked;
use nvml_wrapper_sys::bindings::{nvmlGpmMetric_t, nvmlGpmSupport_t};
use silicon::machine::{Process, ProcessKind};
use silicon::{Machine, Return};

use crate::caller::{Opaque, Outcome, Ptr};
use crate::entry::exports;
use crate::readings::now_ms;

/// Version of both structs. It is a plain number, which does not contain the size of the struct.
const VERSION: u32 = 1;
/// Number of metrics in the 550 driver.
const METRICS: u32 = 98;

/// The start of `nvmlGpmMetricsGet_t`. An array of metrics follows. The length of this array
/// differs between versions of the header. So the library accesses only as many entries as the
/// count in this struct says.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct MetricsHead {
    version: u32,
    count: u32,
    earlier: usize,
    later: usize,
}

/// A measurement.
#[derive(Clone, Copy)]
struct Sample {
    at_ms: u64,
    gpu: u32,
    gpu_instance: Option<u32>,
    /// Percentage of time in which the streaming multiprocessors were active.
    active: f64,
    /// Percentage of time in which memory was used.
    memory: f64,
    /// PCIe traffic to the host and from the host, in KiB/s.
    pcie: (f64, f64),
}

struct Samples {
    next: usize,
    /// The samples that clients have allocated. A sample is `None` until it is measured.
    open: BTreeMap<usize, Option<Sample>>,
}

static SAMPLES: Locked<Samples> = Locked::new(Samples { next: 1, open: BTreeMap::new() });

fn samples() -> MutexGuard<'static, Samples> {
    SAMPLES.lock()
}

/// Drops all samples, because their session has ended.
pub(crate) fn forget_all() {
    samples().open.clear();
}

exports! {
    /// Returns whether the GPU has performance monitoring.
    fn nvmlGpmQueryDeviceSupport(device: Opaque, support: Ptr<nvmlGpmSupport_t>) |call| {
        if support.cast::<u32>().get()? != VERSION {
            return Err(Return::ArgumentVersionMismatch);
        }
        let supported = call.device(device, |m, at| has_gpm(m, at.gpu()))?;
        support.put(nvmlGpmSupport_t { version: VERSION, isSupportedDevice: supported.into() })
    }

    /// Allocates a sample.
    fn nvmlGpmSampleAlloc(sample: Ptr<usize>) |call| {
        sample.required()?;
        call.host(|_| Ok(()))?;
        let mut samples = samples();
        let id = samples.next;
        samples.next += 1;
        samples.open.insert(id, None);
        sample.put(id)
    }

    /// Frees a sample.
    fn nvmlGpmSampleFree(sample: usize) |call| {
        call.host(|_| Ok(()))?;
        samples().open.remove(&sample).map(|_| ()).ok_or(Return::InvalidArgument)
    }

    /// Measures a whole GPU.
    fn nvmlGpmSampleGet(device: Opaque, sample: usize) |call| {
        let measured = call.gpu(device, |m, gpu| measure(m, gpu, None))?;
        keep(sample, measured)
    }

    /// Measures one GPU instance.
    fn nvmlGpmMigSampleGet(device: Opaque, gpu_instance: u32, sample: usize) |call| {
        let measured = call.parent(device, |m, gpu| {
            m.gpu_instance(gpu, gpu_instance)?;
            measure(m, gpu, Some(gpu_instance))
        })?;
        keep(sample, measured)
    }

    /// Returns metrics between two samples of the same object. Each metric has its own return code.
    fn nvmlGpmMetricsGet(request: Ptr<MetricsHead>) |call| {
        let head = request.get()?;
        if head.version != VERSION {
            return Err(Return::ArgumentVersionMismatch);
        }
        call.host(|_| Ok(()))?;
        let taken = |id: usize| samples().open.get(&id).copied().flatten().ok_or(Return::InvalidArgument);
        let (earlier, later) = (taken(head.earlier)?, taken(head.later)?);
        if (earlier.gpu, earlier.gpu_instance) != (later.gpu, later.gpu_instance) || later.at_ms < earlier.at_ms {
            return Err(Return::InvalidArgument);
        }
        let metrics = request.at(1)?.cast::<nvmlGpmMetric_t>();
        for index in 0..head.count as usize {
            let place = metrics.at(index)?;
            let mut metric = place.get()?;
            match value(metric.metricId, &earlier, &later) {
                Ok((value, short, long, unit)) => {
                    metric.nvmlReturn = Return::Success.code();
                    metric.value = value;
                    metric.metricInfo.shortName = text(short);
                    metric.metricInfo.longName = text(long);
                    metric.metricInfo.unit = text(unit);
                }
                Err(code) => metric.nvmlReturn = code.code(),
            }
            place.put(metric)?;
        }
        Ok(())
    }
}

/// Returns a constant text with the pointer type that the struct needs. No code writes to the text.
fn text(constant: &'static CStr) -> *mut c_char {
    constant.as_ptr().cast_mut()
}

fn has_gpm(m: &Machine, gpu: u32) -> Outcome<bool> {
    Ok(match m.model(gpu)?.architecture {
        Architecture::Pascal
        | Architecture::Volta
        | Architecture::Turing
        | Architecture::Ampere
        | Architecture::Ada => false,
        Architecture::Hopper | Architecture::Blackwell => true,
    })
}

fn keep(sample: usize, measured: Sample) -> Outcome {
    let mut samples = samples();
    *samples.open.get_mut(&sample).ok_or(Return::InvalidArgument)? = Some(measured);
    Ok(())
}

/// Returns the current activity. The activity of a GPU instance comes from its processes, in
/// proportion to the size of the instance.
fn measure(m: &Machine, gpu: u32, gpu_instance: Option<u32>) -> Outcome<Sample> {
    if !has_gpm(m, gpu)? {
        return Err(Return::NotSupported);
    }
    let at_ms = now_ms();
    let whole = m.reading(gpu, at_ms)?;
    let part = m.part(gpu)?;
    let at = m.gpu(gpu)?;
    let share_of = |id: u32| -> f64 {
        let profile = at.instance(id).and_then(|gi| part.profile(gi.profile_id).ok());
        profile.map_or(1.0, |p| f64::from(p.data.slices) / f64::from(part.model.compute_slices.max(1)))
    };
    let scale = match gpu_instance {
        None => 1.0,
        Some(id) => {
            let weight = |process: &Process| process.gpu_instance.map_or(1.0, share_of);
            let contexts = || at.processes.iter().filter(|process| process.kind != ProcessKind::Handle);
            let all: f64 = contexts().map(weight).sum();
            let own: f64 = contexts().filter(|process| process.gpu_instance == Some(id)).map(weight).sum();
            if all > 0.0 { own / all / share_of(id) } else { 0.0 }
        }
    };
    let percent = |value: u32| (f64::from(value) * scale).min(100.0);
    Ok(Sample {
        at_ms,
        gpu,
        gpu_instance,
        active: percent(whole.gpu_percent),
        memory: percent(whole.memory_percent),
        pcie: (f64::from(whole.pcie_tx_kib_s) * scale, f64::from(whole.pcie_rx_kib_s) * scale),
    })
}

type Named = (f64, &'static CStr, &'static CStr, &'static CStr);

/// Returns the value of a metric: the mean of both samples, scaled for this metric.
fn value(metric: u32, a: &Sample, b: &Sample) -> Outcome<Named> {
    let active = f64::midpoint(a.active, b.active);
    let memory = f64::midpoint(a.memory, b.memory);
    Ok(match metric {
        1 => (active, c"GraphicsUtil", c"Graphics/Compute Engine Utilization", c"%"),
        2 => (active * 0.92, c"SmUtil", c"SM Utilization", c"%"),
        3 => (active * 0.48, c"SmOccupancy", c"SM Occupancy", c"%"),
        4 => (active * 0.12, c"IntegerUtil", c"Integer Utilization", c"%"),
        5 => (active * 0.55, c"AnyTensorUtil", c"Any Tensor Utilization", c"%"),
        6 => (0.0, c"DfmaTensorUtil", c"DFMA Tensor Utilization", c"%"),
        7 => (active * 0.55, c"HmmaTensorUtil", c"HMMA Tensor Utilization", c"%"),
        9 => (0.0, c"ImmaTensorUtil", c"IMMA Tensor Utilization", c"%"),
        10 => (memory, c"DramBwUtil", c"DRAM Bandwidth Utilization", c"%"),
        11 => (0.0, c"Fp64Util", c"FP64 Utilization", c"%"),
        12 => (active * 0.10, c"Fp32Util", c"FP32 Utilization", c"%"),
        13 => (active * 0.20, c"Fp16Util", c"FP16 Utilization", c"%"),
        20 => (f64::midpoint(a.pcie.0, b.pcie.0) / 1024.0, c"PcieTxPerSec", c"PCIe TX per second", c"MiB/sec"),
        21 => (f64::midpoint(a.pcie.1, b.pcie.1) / 1024.0, c"PcieRxPerSec", c"PCIe RX per second", c"MiB/sec"),
        0 | METRICS.. => return Err(Return::InvalidArgument),
        _ => return Err(Return::NotSupported),
    })
}
