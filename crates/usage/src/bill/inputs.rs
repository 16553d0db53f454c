//! The inputs of the bill of a month, in one document. A closed month keeps this document, so its bill never changes.

use std::collections::BTreeMap;

use gpush_api::{BillModel, GpuUuid, LeaseId};
use serde::{Deserialize, Serialize};

use super::{
    lines::{Adjustment, Bill, BillRows, BilledGpu, bill},
    month::Month,
    price::PriceList,
};
use crate::{
    account::LeaseOwner,
    ledger::{GpuHour, LeaseHour},
};

/// The inputs of the bill of a month.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MonthInputs {
    /// Month.
    pub month: Month,
    /// Prices. Those of a closed month are the prices at the time when it was closed.
    pub prices: PriceList,
    /// Models of the GPUs.
    pub models: BTreeMap<GpuUuid, BilledGpu>,
    /// Owners of the leases.
    pub owners: BTreeMap<LeaseId, LeaseOwner>,
    /// Hours of leases in the month.
    pub leases: Vec<LeaseHour>,
    /// Hours of GPUs in the month.
    pub gpus: Vec<GpuHour>,
    /// Hours of leases of earlier months that were recorded after the bills of these months were closed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub late_leases: Vec<LeaseHour>,
    /// Hours of GPUs of earlier months, like `late_leases`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub late_gpus: Vec<GpuHour>,
    /// Corrections.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub adjustments: Vec<Adjustment>,
}

impl MonthInputs {
    /// Creates the document of a month without rows.
    #[must_use]
    pub fn new(month: Month, prices: PriceList) -> Self {
        Self {
            month,
            prices,
            models: BTreeMap::new(),
            owners: BTreeMap::new(),
            leases: Vec::new(),
            gpus: Vec::new(),
            late_leases: Vec::new(),
            late_gpus: Vec::new(),
            adjustments: Vec::new(),
        }
    }

    /// Adds an hour of a lease. An hour of another month is a late one.
    pub fn add_lease(&mut self, owner: LeaseOwner, hour: LeaseHour) {
        // A lease has one owner in a bill, although names can change in the month.
        self.owners.entry(hour.lease).or_insert(owner);
        let is_late = !self.month.contains(hour.hour_ms);
        (if is_late { &mut self.late_leases } else { &mut self.leases }).push(hour);
    }

    /// Adds an hour of a GPU. An hour of another month is a late one.
    pub fn add_gpu(&mut self, hour: GpuHour) {
        let is_late = !self.month.contains(hour.hour_ms);
        (if is_late { &mut self.late_gpus } else { &mut self.gpus }).push(hour);
    }

    /// Returns only the inputs about the leases of one user, without unallocated capacity.
    #[must_use]
    pub fn of_user(mut self, user: &str) -> Self {
        self.owners.retain(|_, owner| owner.user == user);
        let owners = &self.owners;
        self.leases.retain(|row| owners.contains_key(&row.lease));
        self.late_leases.retain(|row| owners.contains_key(&row.lease));
        self.adjustments.retain(|one| one.owner.user == user);
        self.gpus.clear();
        self.late_gpus.clear();
        self
    }

    /// Makes the bill.
    #[must_use]
    pub fn bill(&self, model: BillModel) -> Bill {
        let Self { month, prices, models, owners, leases, gpus, late_leases, late_gpus, adjustments } = self;
        let rows = BillRows { leases, gpus, owners, models, adjustments, late_leases, late_gpus };
        bill(*month, model, prices, rows)
    }
}
