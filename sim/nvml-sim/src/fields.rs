//! Field values: readings by field number, each with its own return code.

use nvml_wrapper_sys::bindings::{nvmlFieldValue_t, nvmlValue_t};
use silicon::fault::Sensor;
use silicon::{Machine, Return};

use crate::caller::{Opaque, Outcome, Ptr};
use crate::entry::exports;
use crate::readings::{board, reading, unless_zero};

/// `NVML_VALUE_TYPE_UNSIGNED_INT`.
const UNSIGNED_INT: u32 = 1;
/// `NVML_VALUE_TYPE_UNSIGNED_LONG_LONG`.
const UNSIGNED_LONG_LONG: u32 = 3;

exports! {
    /// Fills a list of field values. The call succeeds even if every field fails.
    fn nvmlDeviceGetFieldValues(device: Opaque, count: i32, values: Ptr<nvmlFieldValue_t>) |call| {
        values.required()?;
        let count = usize::try_from(count).ok().filter(|count| *count > 0).ok_or(Return::InvalidArgument)?;
        let wanted = (0..count).map(|index| values.at(index)?.get()).collect::<Outcome<Vec<_>>>()?;
        let answered = call.now(device, |m, gpu, now| {
            m.gpu(gpu)?;
            Ok(wanted.into_iter().map(|field| answer(m, gpu, field, now, call.sensor())).collect())
        })?;
        values.put_all(answered)
    }
}

/// How old a value with the fault [`Sensor::Stale`] is, in ms.
pub(crate) const STALE_MS: u64 = 3_600_000;

fn answer(m: &Machine, gpu: u32, mut field: nvmlFieldValue_t, now_ms: u64, sensor: Option<Sensor>) -> nvmlFieldValue_t {
    let at_ms = if sensor == Some(Sensor::Stale) { now_ms.saturating_sub(STALE_MS) } else { now_ms };
    field.timestamp = i64::try_from(at_ms * 1000).unwrap_or(i64::MAX);
    field.latencyUsec = 0;
    match value(m, gpu, field.fieldId, now_ms, sensor) {
        Ok((kind, value)) => {
            field.nvmlReturn = Return::Success.code();
            field.valueType = kind;
            field.value = value;
        }
        Err(code) => field.nvmlReturn = code.code(),
    }
    field
}

fn value(m: &Machine, gpu: u32, field: u32, now_ms: u64, sensor: Option<Sensor>) -> Outcome<(u32, nvmlValue_t)> {
    let narrow = |value: u32| {
        // The upper half stays 0, so that a client that reads the 64-bit member gets the same
        // value.
        (UNSIGNED_INT, nvmlValue_t { ullVal: unless_zero(sensor, value.into()) })
    };
    let wide = |value: u64| (UNSIGNED_LONG_LONG, nvmlValue_t { ullVal: unless_zero(sensor, value) });
    Ok(match field {
        // ECC mode, current and pending.
        1 | 2 => narrow(1),
        // ECC errors by kind and location, retired pages, and pending pages: always 0.
        3..=28 => wide(0),
        29 | 30 => wide(0),
        31 => narrow(0),
        // Memory temperature, which is a few degrees above the core temperature.
        82 => narrow(reading(m, gpu)?.temperature_c + 6),
        // Time under the power limit and above the slowdown temperature, in ns.
        74 => wide(m.limited_ms(gpu, now_ms)?.0 * 1_000_000),
        75 => wide(m.limited_ms(gpu, now_ms)?.1 * 1_000_000),
        // Energy in mJ since the driver was loaded or the GPU was reset.
        83 | 191 => wide(m.energy_mj(gpu, now_ms)?),
        // Speed of an NVLink link in MB/s, and number of links.
        90 if board(m, gpu)?.nvlinks > 0 => narrow(26_562),
        91 => narrow(board(m, gpu)?.nvlinks),
        // PCIe replays.
        94 | 95 => narrow(0),
        // NVLink traffic in KiB: always 0.
        138..=141 if board(m, gpu)?.nvlinks > 0 => wide(0),
        // Power in mW: average and current power, and then the limits: minimum, maximum, default,
        // effective, requested.
        185 | 186 => narrow(reading(m, gpu)?.power_mw),
        187 => narrow(board(m, gpu)?.power_limit_mw / 2),
        188 | 189 => narrow(board(m, gpu)?.power_limit_mw),
        190 | 192 => narrow(reading(m, gpu)?.power_limit_mw),
        _ => return Err(Return::NotSupported),
    })
}
