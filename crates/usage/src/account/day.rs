//! Folds rows of hours into rows of UTC days.

use std::collections::BTreeMap;

use gpush_api::{GpuUuid, LeaseKind};
use serde::{Deserialize, Serialize};

use super::ended::LeaseOwner;
use crate::{
    ledger::{GpuHour, GpuSums, HoldSums, LeaseHour},
    moment::DAY_MS,
};

/// The use of one owner on one GPU by leases of one kind, on one UTC day.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseDay {
    /// Start of the day, in ms since 1970.
    pub day_ms: i64,
    /// The owner that the use is charged to.
    pub owner: LeaseOwner,
    /// Kind of the leases.
    pub kind: LeaseKind,
    /// GPU.
    pub gpu: GpuUuid,
    /// Sums.
    pub sums: HoldSums,
}

/// The capacity and energy of one GPU on one UTC day.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuDay {
    /// Start of the day, in ms since 1970.
    pub day_ms: i64,
    /// GPU.
    pub gpu: GpuUuid,
    /// Sums.
    pub sums: GpuSums,
}

/// Folds hours of leases into days, in the order of day, owner, kind and GPU. `owner` returns the owner of a row.
pub fn fold_leases<'a, 'b>(
    hours: impl IntoIterator<Item = &'a LeaseHour>,
    owner: impl Fn(&LeaseHour) -> &'b LeaseOwner,
) -> Vec<LeaseDay> {
    let mut days: BTreeMap<(i64, &LeaseOwner, &'static str, &GpuUuid), (LeaseKind, HoldSums)> = BTreeMap::new();
    for hour in hours {
        let key = (day_ms(hour.hour_ms), owner(hour), hour.hold.kind.name(), &hour.hold.gpu);
        days.entry(key).or_insert((hour.hold.kind, HoldSums::default())).1.merge(&hour.sums);
    }
    let day = |((day_ms, owner, _, gpu), (kind, sums)): ((i64, &LeaseOwner, _, &GpuUuid), (LeaseKind, HoldSums))| {
        LeaseDay { day_ms, owner: owner.clone(), kind, gpu: gpu.clone(), sums }
    };
    days.into_iter().map(day).collect()
}

/// Folds hours of GPUs into days, in the order of day and GPU.
pub fn fold_gpus<'a>(hours: impl IntoIterator<Item = &'a GpuHour>) -> Vec<GpuDay> {
    let mut days: BTreeMap<(i64, &GpuUuid), GpuSums> = BTreeMap::new();
    for hour in hours {
        days.entry((day_ms(hour.hour_ms), &hour.gpu)).or_default().merge(&hour.sums);
    }
    days.into_iter().map(|((day_ms, gpu), sums)| GpuDay { day_ms, gpu: gpu.clone(), sums }).collect()
}

fn day_ms(ms: i64) -> i64 {
    ms.div_euclid(DAY_MS) * DAY_MS
}
