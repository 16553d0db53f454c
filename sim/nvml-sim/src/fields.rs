//! Field values: readings by field number, each with its own return code.

use nvml_wrapper_sys::bindings::{nvmlFieldValue_t, nvmlValue_t};
use silicon::{Machine, Return};

use crate::caller::{Opaque, Outcome, Ptr};
use crate::entry::exports;
use crate::readings::{board, now_ms, reading};

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
        let now = i64::try_from(now_ms() * 1000).unwrap_or(i64::MAX);
        let answered = call.gpu(device, |m, gpu| {
            m.gpu(gpu)?;
            Ok(wanted.into_iter().map(|field| answer(m, gpu, field, now)).collect())
        })?;
        values.put_all(answered)
    }
}

fn answer(m: &Machine, gpu: u32, mut field: nvmlFieldValue_t, now_us: i64) -> nvmlFieldValue_t {
    field.timestamp = now_us;
    field.latencyUsec = 0;
    match value(m, gpu, field.fieldId) {
        Ok((kind, value)) => {
            field.nvmlReturn = Return::Success.code();
            field.valueType = kind;
            field.value = value;
        }
        Err(code) => field.nvmlReturn = code.code(),
    }
    field
}

fn value(m: &Machine, gpu: u32, field: u32) -> Outcome<(u32, nvmlValue_t)> {
    let narrow = |value: u32| {
        // The upper half stays 0, so that a client that reads the 64-bit member gets the same
        // value.
        (UNSIGNED_INT, nvmlValue_t { ullVal: value.into() })
    };
    let wide = |value: u64| (UNSIGNED_LONG_LONG, nvmlValue_t { ullVal: value });
    Ok(match field {
        // ECC mode, current and pending.
        1 | 2 => narrow(1),
        // ECC errors by kind and location, retired pages, and pending pages: always 0.
        3..=28 => wide(0),
        29 | 30 => wide(0),
        31 => narrow(0),
        // Memory temperature, which is a few degrees above the core temperature.
        82 => narrow(reading(m, gpu)?.temperature_c + 6),
        // Energy in mJ. On a real GPU, this is the energy since the driver was loaded. The
        // simulation multiplies the current power draw by the time since midnight UTC.
        83 => wide(u64::from(reading(m, gpu)?.power_mw) * (now_ms() % 86_400_000) / 1000),
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
        188 | 189 | 190 | 192 => narrow(board(m, gpu)?.power_limit_mw),
        _ => return Err(Return::NotSupported),
    })
}
