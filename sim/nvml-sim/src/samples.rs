//! The driver's buffer of samples, and the reasons why the clocks are below their maximum.

use nvml_wrapper_sys::bindings::{nvmlSample_t, nvmlValue_t};
use silicon::Return;
use silicon::fault::Sensor;
use silicon::machine::{GpuSample, reason};

use crate::caller::{Opaque, Ptr};
use crate::entry::exports;
use crate::fields::STALE_MS;
use crate::readings::{EXCESS, without_mig};

/// `NVML_VALUE_TYPE_UNSIGNED_INT`.
const UNSIGNED_INT: u32 = 1;
/// Number of samples in the buffer.
const BUFFER: u32 = 120;
/// Period of the samples of the power, in ms.
const POWER_PERIOD_MS: u64 = 100;
/// Period of the samples of the load, in ms: a sixth of a second.
const LOAD_PERIOD_MS: u64 = 167;

exports! {
    /// Returns the samples of the buffer that are newer than a time in µs, oldest first. A caller that passes NULL gets
    /// the size of the buffer. The samples of the load are `NOT_SUPPORTED` with MIG on.
    fn nvmlDeviceGetSamples(
        device: Opaque, kind: u32, since: u64, value_type: Ptr<u32>, count: Ptr<u32>, samples: Ptr<nvmlSample_t>,
    ) |call| {
        value_type.required()?;
        count.required()?;
        let of = |sample: &GpuSample| match kind {
            0 => sample.power_mw,
            1 => sample.busy_percent,
            _ => sample.dram_percent,
        };
        let read = call.now(device, |m, gpu, now| {
            let period = match kind {
                0 => POWER_PERIOD_MS,
                1 | 2 => {
                    without_mig(m, gpu)?;
                    LOAD_PERIOD_MS
                }
                3..=9 => return Err(Return::NotSupported),
                _ => return Err(Return::InvalidArgument),
            };
            m.samples(gpu, since / 1000, now, period)
        })?;
        value_type.put(UNSIGNED_INT)?;
        if samples.is_null() {
            return count.put(BUFFER);
        }
        if read.is_empty() {
            count.put(0)?;
            return Err(Return::NotFound);
        }
        let sensor = call.sensor();
        let entry = |sample: &GpuSample| {
            let at_ms = if sensor == Some(Sensor::Stale) { sample.at_ms.saturating_sub(STALE_MS) } else { sample.at_ms };
            let value = match sensor {
                Some(Sensor::Zero) => 0,
                Some(Sensor::Excess) => of(sample) + EXCESS,
                Some(Sensor::Nan | Sensor::Foreign | Sensor::Stale) | None => of(sample),
            };
            nvmlSample_t { timeStamp: at_ms * 1000, sampleValue: nvmlValue_t { ullVal: value.into() } }
        };
        let room = count.get()? as usize;
        // If the caller's array is too small, the oldest samples are left out.
        let newest = &read[read.len().saturating_sub(room)..];
        count.put(u32::try_from(newest.len()).map_err(|_| Return::Unknown)?)?;
        samples.put_all(newest.iter().map(entry).collect())
    }

    /// Returns why the clocks are below their maximum, as a set of bits.
    fn nvmlDeviceGetCurrentClocksEventReasons(device: Opaque, reasons: Ptr<u64>) |call| {
        reasons.put(call.gpu(device, |m, gpu| Ok(m.reading(gpu)?.event_reasons))?)
    }

    /// Old name of `nvmlDeviceGetCurrentClocksEventReasons`.
    fn nvmlDeviceGetCurrentClocksThrottleReasons(device: Opaque, reasons: Ptr<u64>) |call| {
        reasons.put(call.gpu(device, |m, gpu| Ok(m.reading(gpu)?.event_reasons))?)
    }

    /// Returns the reasons that the GPU can report.
    fn nvmlDeviceGetSupportedClocksEventReasons(device: Opaque, reasons: Ptr<u64>) |call| {
        reasons.put(call.gpu(device, |m, gpu| m.gpu(gpu).map(|_| KNOWN))?)
    }

    /// Old name of `nvmlDeviceGetSupportedClocksEventReasons`.
    fn nvmlDeviceGetSupportedClocksThrottleReasons(device: Opaque, reasons: Ptr<u64>) |call| {
        reasons.put(call.gpu(device, |m, gpu| m.gpu(gpu).map(|_| KNOWN))?)
    }
}

/// All reasons of the simulated GPUs.
const KNOWN: u64 = reason::IDLE | reason::POWER_CAP | reason::THERMAL;
