//! GPU performance monitoring (GPM), on Hopper and later models: the activity of a GPU or of a GPU
//! instance between two samples. If MIG mode is enabled, only GPM shows the load.
//!
//! A sample has sums over the whole past, so a metric is the exact mean over the window, and no burst is missed:
//! - A window below 100 ms has the value NaN.
//! - A GPU instance without compute instance has no data, and its metrics about PCIe are not supported.
//! - The library does not know that a GPU instance was created again with the same id. The sums then start from 0, and
//!   a window across that moment has nonsense above 100 %.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char};
use std::sync::MutexGuard;

use gpush_geometry::Architecture;
use gpush_locked::Locked;
use nvml_wrapper_sys::bindings::{nvmlGpmMetric_t, nvmlGpmSupport_t};
use silicon::fault::Sensor;
use silicon::machine::{Activity, PCIE_RX_KIB_S, PCIE_TX_KIB_S, WHOLE_PPM};
use silicon::{Machine, Return};

use crate::caller::{Opaque, Outcome, Ptr};
use crate::entry::exports;

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

/// Shortest window in ms.
const SHORTEST_MS: u64 = 100;

/// A measurement.
#[derive(Clone, Copy)]
struct Sample {
    gpu: u32,
    gpu_instance: Option<u32>,
    activity: Activity,
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
        let measured = call.now(device, |m, gpu, now| measure(m, gpu, None, now))?;
        keep(sample, measured)
    }

    /// Measures one GPU instance.
    fn nvmlGpmMigSampleGet(device: Opaque, gpu_instance: u32, sample: usize) |call| {
        let measured = call.instance_now(device, gpu_instance, |m, gpu, now| measure(m, gpu, Some(gpu_instance), now))?;
        keep(sample, measured)
    }

    /// Returns metrics between two samples of the same object. Each metric has its own return code.
    fn nvmlGpmMetricsGet(request: Ptr<MetricsHead>) |call| {
        let head = request.get()?;
        if head.version != VERSION {
            return Err(Return::ArgumentVersionMismatch);
        }
        let taken = |id: usize| samples().open.get(&id).copied().flatten().ok_or(Return::InvalidArgument);
        let (earlier, later) = (taken(head.earlier)?, taken(head.later)?);
        call.place(later.gpu, later.gpu_instance, |m| m.gpu(later.gpu).map(|_| ()))?;
        let place = |sample: &Sample| (sample.gpu, sample.gpu_instance);
        if place(&earlier) != place(&later) || later.activity.at_ms < earlier.activity.at_ms {
            return Err(Return::InvalidArgument);
        }
        let metrics = request.at(1)?.cast::<nvmlGpmMetric_t>();
        for index in 0..head.count as usize {
            let place = metrics.at(index)?;
            let mut metric = place.get()?;
            match value(metric.metricId, &earlier, &later, call.sensor()) {
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

fn measure(m: &Machine, gpu: u32, gpu_instance: Option<u32>, now_ms: u64) -> Outcome<Sample> {
    if !has_gpm(m, gpu)? {
        return Err(Return::NotSupported);
    }
    Ok(Sample { gpu, gpu_instance, activity: m.activity(gpu, gpu_instance, now_ms)? })
}

type Named = (f64, &'static CStr, &'static CStr, &'static CStr);

/// Returns the value of a metric: the mean over the window.
fn value(metric: u32, a: &Sample, b: &Sample, sensor: Option<Sensor>) -> Outcome<Named> {
    if !b.activity.has_data {
        return Err(Return::NoData);
    }
    let (from, to) = (&a.activity.sums, &b.activity.sums);
    let window_ms = b.activity.at_ms - a.activity.at_ms;
    // The subtraction wraps around if the instance was created again, and the value is then far above 100 %.
    let part = |from: u64, to: u64| to.wrapping_sub(from) as f64 / window_ms as f64 / f64::from(WHOLE_PPM);
    let checked = |value: f64| match sensor {
        Some(Sensor::Nan) => f64::NAN,
        _ if window_ms < SHORTEST_MS => f64::NAN,
        Some(Sensor::Zero) => 0.0,
        Some(Sensor::Excess) => value + 1e12,
        Some(Sensor::Foreign | Sensor::Stale) | None => value,
    };
    let percent = |factor: f64, from: u64, to: u64| checked(part(from, to) * factor * 100.0);
    let pcie = |most_kib_s: u32| match b.gpu_instance {
        Some(_) => Err(Return::NotSupported),
        None => Ok(checked(part(from.busy, to.busy) * f64::from(most_kib_s) / 1024.0)),
    };
    let sm = |factor: f64| percent(factor, from.sm, to.sm);
    let tensor = percent(1.0, from.tensor, to.tensor);
    Ok(match metric {
        1 => (percent(1.0, from.busy, to.busy), c"GraphicsUtil", c"Graphics/Compute Engine Utilization", c"%"),
        2 => (sm(1.0), c"SmUtil", c"SM Utilization", c"%"),
        3 => (sm(0.52), c"SmOccupancy", c"SM Occupancy", c"%"),
        4 => (sm(0.13), c"IntegerUtil", c"Integer Utilization", c"%"),
        5 => (tensor, c"AnyTensorUtil", c"Any Tensor Utilization", c"%"),
        6 => (checked(0.0), c"DfmaTensorUtil", c"DFMA Tensor Utilization", c"%"),
        7 => (tensor, c"HmmaTensorUtil", c"HMMA Tensor Utilization", c"%"),
        9 => (checked(0.0), c"ImmaTensorUtil", c"IMMA Tensor Utilization", c"%"),
        10 => (percent(1.0, from.dram, to.dram), c"DramBwUtil", c"DRAM Bandwidth Utilization", c"%"),
        11 => (checked(0.0), c"Fp64Util", c"FP64 Utilization", c"%"),
        12 => (sm(0.11), c"Fp32Util", c"FP32 Utilization", c"%"),
        13 => (sm(0.22), c"Fp16Util", c"FP16 Utilization", c"%"),
        20 => (pcie(PCIE_TX_KIB_S)?, c"PcieTxPerSec", c"PCIe TX per second", c"MiB/sec"),
        21 => (pcie(PCIE_RX_KIB_S)?, c"PcieRxPerSec", c"PCIe RX per second", c"MiB/sec"),
        0 | METRICS.. => return Err(Return::InvalidArgument),
        _ => return Err(Return::NotSupported),
    })
}
