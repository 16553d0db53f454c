//! The bill of a month: `GET /v1/bill`.

use serde::{Deserialize, Serialize};

use crate::UsageGrouping;

/// What a bill charges for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum BillModel {
    /// Held shares.
    #[default]
    Requested,
    /// Busy shares. A time about which nothing is known counts as busy.
    Used,
    /// A price per lease.
    Flat,
}

impl BillModel {
    /// All models.
    pub const ALL: [Self; 3] = [Self::Requested, Self::Used, Self::Flat];

    /// Returns the name in requests and JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Requested => "requested",
            Self::Used => "used",
            Self::Flat => "flat",
        }
    }
}

/// Whether a bill can still change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum BillState {
    /// The month is not over.
    Running,
    /// The month is over, and gpushd closes it soon.
    Ended,
    /// The month is closed: the bill never changes.
    Closed,
}

/// Sums of lines of a bill. Amounts and quantities are exact decimals, as text.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct BillSums {
    /// Number of leases.
    pub lease_count: u64,
    /// Time in which the leases held their shares, in seconds. A lease with several targets counts once for each.
    pub held_s: u64,
    /// The part of it in which they worked.
    pub busy_s: u64,
    /// Charged shares times time, in hours of a whole GPU. A share is charged by the larger of its compute part and its
    /// memory part.
    pub charged_gpu_hours: String,
    /// The same in hours of slices, which the price is for; `0` in bills of the model `flat`.
    pub slice_hours: String,
    /// Amount, with the corrections.
    pub amount: String,
    /// The part of the amount that is corrections.
    pub corrections: String,
    /// Energy in J.
    pub energy_j: f64,
}

/// One line of a bill.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct BillLine {
    /// User, group, job, account, kind or GPU; absent for leases without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// Sums.
    #[serde(rename = "bill_sums")]
    pub sums: BillSums,
}

/// The bill of a month.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Bill {
    /// Month in UTC, such as `2026-11`.
    pub month: String,
    /// Whether the bill can still change.
    #[serde(rename = "bill_state")]
    pub state: BillState,
    /// What the bill charges for.
    #[serde(rename = "bill_model")]
    pub model: BillModel,
    /// Currency of the amounts; absent without prices. Then all amounts are 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub currency: Option<String>,
    /// User whose bill this is; absent for the bill of all users.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// By what the lines are grouped.
    #[serde(rename = "grouped_by")]
    pub by: UsageGrouping,
    /// One line for each key, in the order of the keys.
    #[serde(rename = "bill_lines")]
    pub lines: Vec<BillLine>,
    /// Capacity that no lease was charged for; only in the bill of all users.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unallocated: Option<BillSums>,
    /// Sums of all lines and of the unallocated capacity.
    #[serde(rename = "bill_total")]
    pub total: BillSums,
    /// What is particular about this bill, one sentence each.
    #[serde(rename = "bill_notes", default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}
