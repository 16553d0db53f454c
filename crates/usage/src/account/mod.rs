//! Who used how much: rows of ended leases, rows of days, and reports over a period.
//!
//! ```text
//! LeaseHour + owner ──► LeaseDay ──► UsageReport, by user, group, job, account, kind or GPU
//! GpuHour           ──► GpuDay
//! LeaseTotals + owner ──► EndedLease, kept until it is folded away
//! ```

mod day;
mod ended;
mod report;

pub use day::{GpuDay, LeaseDay, fold_gpus, fold_leases};
pub use ended::{EndedLease, LeaseOwner};
pub use report::{Grouping, ReportLine, UsageReport, report};

#[cfg(test)]
mod tests;
