//! Converts integers of the ledger to decimals, and times to text.

use jiff::Timestamp;
use rust_decimal::{Decimal, RoundingStrategy};

use crate::share::GPU_UNITS;

/// Decimals of quantities. A nanohour of a GPU is 3.6 µs.
const DECIMALS: u32 = 9;

/// Returns units times milliseconds as hours of a whole GPU, with 9 decimals.
#[must_use]
pub fn gpu_hours(unit_ms: u64) -> Decimal {
    rounded(Decimal::from(unit_ms) / (Decimal::from(GPU_UNITS) * Decimal::from(3_600_000_u32)))
}

/// Returns units times milliseconds as hours of slices: the GPU hours times the number of slices of the GPU.
#[must_use]
pub fn slice_hours(unit_ms: u64, slices: u32) -> Decimal {
    (gpu_hours(unit_ms) * Decimal::from(slices.max(1))).normalize()
}

/// Returns milliseconds as seconds, exactly.
#[must_use]
pub fn seconds(ms: u64) -> Decimal {
    (Decimal::from(ms) / Decimal::from(1000_u32)).normalize()
}

/// Returns millijoules as kWh, with 9 decimals.
#[must_use]
pub fn kilowatt_hours(mj: u64) -> Decimal {
    rounded(Decimal::from(mj) / Decimal::from(3_600_000_000_u64))
}

pub(super) fn rounded(value: Decimal) -> Decimal {
    value.round_dp_with_strategy(DECIMALS, RoundingStrategy::MidpointNearestEven).normalize()
}

/// Formats a time of the wall clock in UTC.
pub(super) fn time(ms: i64) -> String {
    Timestamp::from_millisecond(ms).map(|at| at.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()).unwrap_or_default()
}
