//! The sums of a bill, by user, group, job, account, kind or GPU.

use std::collections::{BTreeMap, BTreeSet};

use gpush_api::LeaseId;
use rust_decimal::Decimal;

use super::lines::{Bill, BillLine, ChargeKind};
use crate::{
    account::{Grouping, LeaseOwner},
    ledger::StateTimes,
};

/// Sums of lines of a bill.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct BillSum {
    /// Number of leases.
    pub leases: usize,
    /// Time by state. A lease with several targets counts once for each.
    pub times: StateTimes,
    /// Units times ms that are charged.
    pub charged_unit_ms: u64,
    /// Slice hours.
    pub quantity: Decimal,
    /// Amount, with the corrections.
    pub amount: Decimal,
    /// The part of `amount` that comes from corrections.
    pub corrections: Decimal,
    /// Energy in mJ.
    pub energy_mj: u64,
}

/// One line of a summary.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SummaryLine {
    /// User, group, job, account, kind or GPU; `None` for lines without one.
    pub key: Option<String>,
    /// Sums.
    pub sum: BillSum,
}

/// The sums of a bill.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BillSummary {
    /// One line for each key, in the order of the keys.
    pub lines: Vec<SummaryLine>,
    /// Capacity that no lease was charged for.
    pub unallocated: BillSum,
    /// Everything.
    pub total: BillSum,
}

/// Leases and sums of one key.
#[derive(Default)]
struct Collected {
    leases: BTreeSet<LeaseId>,
    sum: BillSum,
}

impl Collected {
    fn add(&mut self, line: &BillLine) {
        self.leases.extend(line.of.lease);
        self.sum.times += line.times;
        self.sum.charged_unit_ms += line.charged_unit_ms;
        self.sum.quantity += line.quantity.unwrap_or_default();
        self.sum.amount += line.amount;
        self.sum.energy_mj += line.energy_mj;
        match line.charge {
            ChargeKind::Usage | ChargeKind::Unallocated => {}
            ChargeKind::Adjustment => self.sum.corrections += line.amount,
        }
    }

    fn finish(self) -> BillSum {
        let Self { leases, sum } = self;
        let [quantity, amount, corrections] =
            [sum.quantity, sum.amount, sum.corrections].map(|value| value.normalize());
        BillSum { leases: leases.len(), quantity, amount, corrections, ..sum }
    }
}

/// Returns the sums of a bill. Corrections count for the owner that they name.
#[must_use]
pub fn summary(bill: &Bill, by: Grouping) -> BillSummary {
    let mut lines: BTreeMap<Option<String>, Collected> = BTreeMap::new();
    let (mut unallocated, mut total) = (Collected::default(), Collected::default());
    let without_owner = LeaseOwner::default();
    for line in &bill.lines {
        total.add(line);
        let is_unallocated = line.charge == ChargeKind::Unallocated || (line.of.owner.is_none() && line.kind.is_none());
        if is_unallocated {
            unallocated.add(line);
        } else {
            let owner = line.of.owner.as_ref().unwrap_or(&without_owner);
            lines.entry(by.key(owner, line.kind, line.gpu.as_ref())).or_default().add(line);
        }
    }
    let line = |(key, collected): (Option<String>, Collected)| SummaryLine { key, sum: collected.finish() };
    BillSummary {
        lines: lines.into_iter().map(line).collect(),
        unallocated: unallocated.finish(),
        total: total.finish(),
    }
}
