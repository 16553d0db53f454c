//! Finds the time from which the use of GPUs is recorded, so that a report can say which part of its period it covers.

use std::collections::BTreeMap;

use gpush_api::GpuUuid;

use super::day::GpuDay;
use crate::{
    ledger::GpuHour,
    moment::{DAY_MS, HOUR_MS},
};

/// Tolerance for the missing time of a row, in ms: durations come from another clock than hours.
const TOLERANCE_MS: i64 = 60_000;

/// Returns the time, in ms since 1970, from which GPUs are recorded; `None` if there is no row. `days` are days whose
/// hours are not listed.
///
/// A row contains the length of its time, but not the start. Recording does not stop after it has begun, so the first
/// row lacks time only at its start.
#[must_use]
pub fn recorded_since(hours: &[GpuHour], days: &[GpuDay], now_ms: i64) -> Option<i64> {
    let hours = hours.iter().map(|row| (row.hour_ms, row.hour_ms + HOUR_MS, &row.gpu, row.sums.known_ms));
    let days = days.iter().map(|row| (row.day_ms, row.day_ms + DAY_MS, &row.gpu, row.sums.known_ms));
    let rows: Vec<(i64, i64, &GpuUuid, u64)> = days.chain(hours).collect();
    let (from_ms, until_ms) = rows.iter().map(|(from_ms, until_ms, ..)| (*from_ms, *until_ms)).min()?;
    let mut known: BTreeMap<&GpuUuid, u64> = BTreeMap::new();
    for (_, _, gpu, ms) in rows.into_iter().filter(|row| (row.0, row.1) == (from_ms, until_ms)) {
        *known.entry(gpu).or_default() += ms;
    }
    let known_ms = known.into_values().max().and_then(|ms| i64::try_from(ms).ok()).unwrap_or(0);
    let since_ms = until_ms.min(now_ms) - known_ms;
    Some(if since_ms < from_ms + TOLERANCE_MS { from_ms } else { since_ms })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::GpuSums;

    const DAY: i64 = 20_000 * DAY_MS;

    fn sums(known_ms: i64) -> GpuSums {
        GpuSums { known_ms: known_ms.unsigned_abs(), ..GpuSums::default() }
    }

    fn hour(gpu: &str, hour: i64, known_ms: i64) -> GpuHour {
        GpuHour { gpu: gpu.into(), number: 0, hour_ms: DAY + hour * HOUR_MS, sums: sums(known_ms) }
    }

    #[test]
    fn records_begin_with_the_first_accounted_hour() {
        let rows = [hour("GPU-a", 5, HOUR_MS), hour("GPU-a", 4, 600_000), hour("GPU-b", 4, 200_000)];
        let began = DAY + 5 * HOUR_MS - 600_000;
        assert_eq!(recorded_since(&rows, &[], DAY + 6 * HOUR_MS), Some(began));
        let split = [hour("GPU-a", 4, 400_000), hour("GPU-a", 4, 200_000)];
        assert_eq!(recorded_since(&split, &[], DAY + 6 * HOUR_MS), Some(began), "an hour can have several rows");
    }

    #[test]
    fn present_hour_ends_now() {
        let rows = [hour("GPU-a", 4, 600_000)];
        assert_eq!(recorded_since(&rows, &[], DAY + 4 * HOUR_MS + 900_000), Some(DAY + 4 * HOUR_MS + 300_000));
        assert_eq!(recorded_since(&rows, &[], DAY + 4 * HOUR_MS + 610_000), Some(DAY + 4 * HOUR_MS));
        assert_eq!(
            recorded_since(&rows, &[], DAY + 4 * HOUR_MS + 10),
            Some(DAY + 4 * HOUR_MS),
            "the clock was set back"
        );
    }

    #[test]
    fn days_without_hours_count_and_no_row_is_no_time() {
        let days = [GpuDay { day_ms: DAY - DAY_MS, gpu: "GPU-a".into(), sums: sums(DAY_MS / 2) }];
        assert_eq!(recorded_since(&[hour("GPU-a", 0, HOUR_MS)], &days, DAY + DAY_MS), Some(DAY - DAY_MS / 2));
        assert_eq!(recorded_since(&[], &[], DAY), None);
    }
}
