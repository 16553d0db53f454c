//! Closed rows, which the agent writes to the store. Times are milliseconds since 1970.

use gpush_api::{GpuUuid, LeaseId, LeaseKind};
use serde::{Deserialize, Serialize};

use super::{
    sums::{GpuSums, HoldSums},
    times::StateTimes,
};
use crate::{input::Hold, judge::UseState, share::Share};

/// One lease on one target in one UTC hour, with one share. A change of the share or of the wall clock can cause several
/// rows for one hour.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseHour {
    /// Lease.
    pub lease: LeaseId,
    /// Hold of the lease.
    pub hold: Hold,
    /// Number of the row. [`super::Ledger::take_closed`] gives each row a number that no other row has.
    pub number: u64,
    /// Start of the hour.
    pub hour_ms: i64,
    /// Sums.
    pub sums: HoldSums,
}

/// The capacity and the energy of one GPU in one UTC hour.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuHour {
    /// GPU.
    pub gpu: GpuUuid,
    /// Number of the row. [`super::Ledger::take_closed`] gives each row a number that no other row has.
    pub number: u64,
    /// Start of the hour.
    pub hour_ms: i64,
    /// Sums.
    pub sums: GpuSums,
}

/// A time in which a lease did no work, for the dry run of an idle policy. Only times of 5 minutes or more are recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct UnusedSpan {
    /// Lease.
    pub lease: LeaseId,
    /// `Idle` or `Empty`.
    pub state: UseState,
    /// Start.
    pub from_ms: i64,
    /// End.
    pub until_ms: i64,
}

/// The totals of a lease on one target.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemberTotals {
    /// Last hold of the lease.
    pub hold: Hold,
    /// Sums over the life of the lease.
    pub sums: HoldSums,
    /// 98th percentile of the memory, in MiB. It can be too high by at most 1/128 of the share's memory.
    pub memory_p98_mib: Option<u64>,
}

/// The totals of a lease.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseTotals {
    /// Lease.
    pub lease: LeaseId,
    /// Start.
    pub begun_ms: i64,
    /// End, or the time of the figures.
    pub until_ms: i64,
    /// Time by state of the lease as a whole.
    pub times: StateTimes,
    /// The targets.
    pub members: Vec<MemberTotals>,
}

impl LeaseTotals {
    /// Returns the sums of all targets.
    #[must_use]
    pub fn sums(&self) -> HoldSums {
        let mut all = HoldSums::default();
        for member in &self.members {
            all.merge(&member.sums);
        }
        all
    }

    /// Returns the kind of the lease; `None` without targets.
    #[must_use]
    pub fn kind(&self) -> Option<LeaseKind> {
        self.members.first().map(|member| member.hold.kind)
    }

    /// Returns the charged part of all targets together.
    #[must_use]
    pub fn share(&self) -> Share {
        self.members.iter().fold(Share { units: 0, charged: 0 }, |sum, member| Share {
            units: sum.units.saturating_add(member.hold.share.units),
            charged: sum.charged.saturating_add(member.hold.share.charged),
        })
    }
}

/// A bound of rows of hours. It contains the rows of earlier hours with lower numbers, from which something was made.
/// Rows that are recorded later have higher numbers, even if they are about an earlier hour.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RowBound {
    /// Time after all these hours, in ms since 1970.
    pub until_ms: i64,
    /// Number above those of all these rows.
    pub number: u64,
}

impl RowBound {
    /// Returns whether the bound contains a row.
    #[must_use]
    pub fn contains(&self, hour_ms: i64, number: u64) -> bool {
        hour_ms < self.until_ms && number < self.number
    }
}

/// Rows that are closed and not yet written.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ClosedRows {
    /// Rows of leases.
    pub leases: Vec<LeaseHour>,
    /// Rows of GPUs.
    pub gpus: Vec<GpuHour>,
    /// Unused times.
    pub spans: Vec<UnusedSpan>,
}

impl ClosedRows {
    /// Returns whether there is nothing to write.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.leases.is_empty() && self.gpus.is_empty() && self.spans.is_empty()
    }
}
