//! Who used how much: rows of ended leases, rows of days, and reports over a period.
//!
//! ```text
//! LeaseHour + owner ──► LeaseDay ──────┼─► UsageReport, by user, group, job, account, kind or GPU
//! GpuHour           ──► GpuDay ────────┤
//! grants, refusals  ──► RequestDay ────┘
//! LeaseTotals + owner ──► EndedLease, kept until it is folded away
//! ```

mod day;
mod ended;
mod recorded;
mod report;
mod request;

pub use day::{GpuDay, LeaseDay, fold_gpus, fold_leases};
pub use ended::{EndedLease, LeaseOwner};
pub use recorded::recorded_since;
pub use report::{BadGrouping, Grouping, ReportLine, UsageReport, report};
pub use request::{RequestDay, RequestSums};

#[cfg(test)]
mod tests;
