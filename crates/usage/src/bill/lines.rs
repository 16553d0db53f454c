//! The lines of a bill.

use std::collections::{BTreeMap, BTreeSet};

use gpush_api::{BillModel, GpuUuid, LeaseId, LeaseKind, TargetUuid};
use rust_decimal::Decimal;
use serde::{Deserialize, Serialize};

use super::{
    month::Month,
    price::{Price, PriceList},
    quantity::{slice_hours, time},
};
use crate::{
    account::LeaseOwner,
    energy::EnergyMethod,
    ledger::{GpuHour, HoldSums, LeaseHour, StateTimes},
    moment::HOUR_MS,
};

/// The model of a GPU, as far as a bill needs it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BilledGpu {
    /// Model, as the driver reports it.
    pub model: String,
    /// Number of compute slices; 1 for a GPU without MIG.
    pub slices: u32,
}

/// A correction of a closed month. It is a line of the month in which it is made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Adjustment {
    /// Hour of the correction, in ms since 1970.
    pub hour_ms: i64,
    /// The owner who is charged, or gets the amount back.
    pub owner: LeaseOwner,
    /// Lease, if the correction is about one.
    pub lease: Option<LeaseId>,
    /// Amount; negative if the owner gets it back.
    pub amount: Decimal,
    /// Why.
    pub description: String,
}

/// The rows of which a bill is made.
#[derive(Debug, Clone, Copy)]
pub struct BillRows<'a> {
    /// Hours of leases.
    pub leases: &'a [LeaseHour],
    /// Hours of GPUs.
    pub gpus: &'a [GpuHour],
    /// Owners of the leases.
    pub owners: &'a BTreeMap<LeaseId, LeaseOwner>,
    /// Models of the GPUs.
    pub models: &'a BTreeMap<GpuUuid, BilledGpu>,
    /// Corrections.
    pub adjustments: &'a [Adjustment],
    /// Hours of leases of earlier months that were recorded after the bills of these months were closed. They are
    /// corrections in this bill.
    pub late_leases: &'a [LeaseHour],
    /// Hours of GPUs of earlier months, like `late_leases`.
    pub late_gpus: &'a [GpuHour],
}

/// The subject of a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ChargeKind {
    /// The share of a lease.
    Usage,
    /// Capacity that no lease was charged for.
    Unallocated,
    /// A correction.
    Adjustment,
}

impl ChargeKind {
    /// Returns the name in a CSV file.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Usage => "usage",
            Self::Unallocated => "unallocated",
            Self::Adjustment => "adjustment",
        }
    }
}

/// The lease and the owner of a line.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LineOwner {
    /// Lease.
    pub lease: Option<LeaseId>,
    /// Owner of the lease.
    pub owner: Option<LeaseOwner>,
}

/// One line of a bill.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BillLine {
    /// Subject of the line.
    pub charge: ChargeKind,
    /// Start of the UTC hour, in ms since 1970.
    pub from_ms: i64,
    /// End of the UTC hour.
    pub until_ms: i64,
    /// Lease and owner.
    pub of: LineOwner,
    /// Kind of the lease.
    pub kind: Option<LeaseKind>,
    /// GPU.
    pub gpu: Option<GpuUuid>,
    /// Target: GPU or MIG device.
    pub target: Option<TargetUuid>,
    /// Model of the GPU.
    pub model: Option<BilledGpu>,
    /// Charged part of the GPU, in units; 0 for other lines than usage.
    pub charged_units: u32,
    /// Time by state.
    pub times: StateTimes,
    /// Units times ms that are charged.
    pub charged_unit_ms: u64,
    /// Units times ms of work.
    pub busy_unit_ms: u64,
    /// Price of a slice for an hour; `None` if the line is not charged by the hour.
    pub unit_price: Option<Decimal>,
    /// Slice hours; `None` if the line is not charged by the hour.
    pub quantity: Option<Decimal>,
    /// Amount: quantity times price, or the flat price, or the amount of a correction.
    pub amount: Decimal,
    /// Energy in mJ.
    pub energy_mj: u64,
    /// The method that determined most of the energy.
    pub energy_method: EnergyMethod,
    /// Description of a correction; empty for other lines.
    pub description: String,
}

/// The bill of a month.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bill {
    /// Month.
    pub month: Month,
    /// Model.
    pub model: BillModel,
    /// Currency; `None` without prices.
    pub currency: Option<String>,
    /// The lines, in an order that depends only on the rows.
    pub lines: Vec<BillLine>,
}

impl Bill {
    /// Returns the sum of all amounts of one kind.
    #[must_use]
    pub fn sum(&self, charge: ChargeKind) -> Decimal {
        self.lines.iter().filter(|line| line.charge == charge).map(|line| line.amount).sum()
    }
}

/// Makes the bill of a month. Rows of other months are left out.
#[must_use]
pub fn bill(month: Month, model: BillModel, prices: &PriceList, rows: BillRows<'_>) -> Bill {
    let mut leases: Vec<&LeaseHour> = rows.leases.iter().filter(|row| month.contains(row.hour_ms)).collect();
    leases.sort_by_key(|row| (row.hour_ms, row.lease, &row.hold.gpu, &row.hold.target, row.number));
    let mut flat_charged = BTreeSet::new();
    let mut lines: Vec<BillLine> = Vec::with_capacity(leases.len());
    for row in leases {
        let is_first = flat_charged.insert(row.lease);
        lines.push(usage_line(row, model, prices, rows, is_first));
    }
    let mut gpus: Vec<&GpuHour> =
        rows.gpus.iter().filter(|row| month.contains(row.hour_ms) && row.sums.uncharged > 0).collect();
    gpus.sort_by_key(|row| (row.hour_ms, &row.gpu, row.number));
    lines.extend(gpus.into_iter().map(|row| unallocated_line(row, model, prices, rows)));
    let mut adjustments: Vec<&Adjustment> = rows.adjustments.iter().filter(|one| month.contains(one.hour_ms)).collect();
    adjustments.sort_by(|one, other| {
        let key = |one: &Adjustment| (one.hour_ms, one.lease, one.owner.clone(), one.description.clone(), one.amount);
        key(one).cmp(&key(other))
    });
    lines.extend(late_lines(month, model, prices, rows));
    lines.extend(adjustments.into_iter().map(adjustment_line));
    lines.sort_by_key(|line| (line.charge, line.from_ms));
    Bill { month, model, currency: prices.currency().map(str::to_owned), lines }
}

fn empty_line(charge: ChargeKind, hour_ms: i64) -> BillLine {
    BillLine {
        charge,
        from_ms: hour_ms,
        until_ms: hour_ms.saturating_add(HOUR_MS),
        of: LineOwner::default(),
        kind: None,
        gpu: None,
        target: None,
        model: None,
        charged_units: 0,
        times: StateTimes::default(),
        charged_unit_ms: 0,
        busy_unit_ms: 0,
        unit_price: None,
        quantity: None,
        amount: Decimal::ZERO,
        energy_mj: 0,
        energy_method: EnergyMethod::None,
        description: String::new(),
    }
}

fn usage_line(row: &LeaseHour, model: BillModel, prices: &PriceList, rows: BillRows<'_>, is_first: bool) -> BillLine {
    let billed = rows.models.get(&row.hold.gpu).cloned();
    let price = price_of(prices, row.hold.kind, billed.as_ref());
    let HoldSums { charged_unit_ms, busy_charged_unit_ms, unknown_charged_unit_ms, .. } = row.sums;
    let unit_ms = match model {
        BillModel::Requested | BillModel::Flat => charged_unit_ms,
        BillModel::Used => busy_charged_unit_ms + unknown_charged_unit_ms,
    };
    let (quantity, amount) = by_hour(model, unit_ms, price, billed.as_ref());
    BillLine {
        of: LineOwner { lease: Some(row.lease), owner: rows.owners.get(&row.lease).cloned() },
        kind: Some(row.hold.kind),
        gpu: Some(row.hold.gpu.clone()),
        target: Some(row.hold.target.clone()),
        charged_units: row.hold.share.charged,
        times: row.sums.times,
        charged_unit_ms: unit_ms,
        busy_unit_ms: busy_charged_unit_ms,
        unit_price: quantity.map(|_| price.map_or(Decimal::ZERO, |price| price.per_slice_hour)),
        quantity,
        amount: match (model, price) {
            (BillModel::Flat, Some(price)) if is_first => price.per_lease,
            (BillModel::Flat | BillModel::Requested | BillModel::Used, _) => amount,
        },
        energy_mj: row.sums.energy_mj,
        energy_method: row.sums.energy_method(),
        model: billed,
        ..empty_line(ChargeKind::Usage, row.hour_ms)
    }
}

/// Returns the line of capacity that no lease was charged for, at the price of a whole GPU.
fn unallocated_line(row: &GpuHour, model: BillModel, prices: &PriceList, rows: BillRows<'_>) -> BillLine {
    let billed = rows.models.get(&row.gpu).cloned();
    let price = price_of(prices, LeaseKind::Whole, billed.as_ref());
    let (quantity, amount) = by_hour(model, row.sums.uncharged, price, billed.as_ref());
    BillLine {
        gpu: Some(row.gpu.clone()),
        target: Some(row.gpu.as_target().clone()),
        charged_unit_ms: row.sums.uncharged,
        unit_price: quantity.map(|_| price.map_or(Decimal::ZERO, |price| price.per_slice_hour)),
        quantity,
        amount,
        energy_mj: row.sums.unattributed_mj,
        model: billed,
        ..empty_line(ChargeKind::Unallocated, row.hour_ms)
    }
}

/// Returns the corrections for hours that were recorded after their month was closed. They count for the first hour of
/// this month.
fn late_lines(month: Month, model: BillModel, prices: &PriceList, rows: BillRows<'_>) -> Vec<BillLine> {
    let correction = |line: BillLine, what: &str| BillLine {
        charge: ChargeKind::Adjustment,
        description: format!("{what} at {}, recorded after that month was closed", time(line.from_ms)),
        from_ms: month.start_ms(),
        until_ms: month.start_ms().saturating_add(HOUR_MS),
        unit_price: None,
        quantity: None,
        ..line
    };
    let mut leases: Vec<&LeaseHour> = rows.late_leases.iter().collect();
    leases.sort_by_key(|row| (row.hour_ms, row.lease, &row.hold.gpu, &row.hold.target, row.number));
    let mut gpus: Vec<&GpuHour> = rows.late_gpus.iter().filter(|row| row.sums.uncharged > 0).collect();
    gpus.sort_by_key(|row| (row.hour_ms, &row.gpu, row.number));
    // The price per lease was charged in the closed month already.
    let leases = leases.into_iter().map(|row| correction(usage_line(row, model, prices, rows, false), "use"));
    let gpus =
        gpus.into_iter().map(|row| correction(unallocated_line(row, model, prices, rows), "unallocated capacity"));
    leases.chain(gpus).collect()
}

fn adjustment_line(adjustment: &Adjustment) -> BillLine {
    BillLine {
        of: LineOwner { lease: adjustment.lease, owner: Some(adjustment.owner.clone()) },
        amount: adjustment.amount,
        description: adjustment.description.clone(),
        ..empty_line(ChargeKind::Adjustment, adjustment.hour_ms.div_euclid(HOUR_MS) * HOUR_MS)
    }
}

fn price_of<'a>(prices: &'a PriceList, kind: LeaseKind, billed: Option<&BilledGpu>) -> Option<&'a Price> {
    prices.find(kind, billed.map_or("", |billed| &billed.model))
}

/// Returns quantity and amount of a line that is charged by the hour.
fn by_hour(
    model: BillModel,
    unit_ms: u64,
    price: Option<&Price>,
    billed: Option<&BilledGpu>,
) -> (Option<Decimal>, Decimal) {
    match model {
        BillModel::Flat => (None, Decimal::ZERO),
        BillModel::Requested | BillModel::Used => {
            let quantity = slice_hours(unit_ms, billed.map_or(1, |billed| billed.slices));
            let amount = price.map_or(Decimal::ZERO, |price| quantity * price.per_slice_hour).normalize();
            (Some(quantity), amount)
        }
    }
}
