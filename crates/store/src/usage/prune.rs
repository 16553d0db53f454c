//! Limits for the rows about the use. Without them, the database would grow without end.

use gpush_usage::{
    account::EndedLease,
    ledger::{GpuHour, UnusedSpan},
};

use super::{OwnedHour, RequestCount};
use crate::{error::StoreError, record, tx::Tx};

/// Maximum number of rows of one table. The oldest rows are deleted first.
const MOST_ROWS: i64 = 400_000;

/// Limits for the rows about the use, in ms since 1970.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UsageBounds {
    /// Hours and unused times before this time are deleted.
    pub hours_from_ms: i64,
    /// Totals of leases that ended before this time are deleted, and counts of requests of earlier days.
    pub leases_from_ms: i64,
}

impl Tx<'_> {
    /// Deletes the rows beyond the limits, and returns their number.
    ///
    /// # Errors
    /// Fails if the store cannot delete the rows.
    pub fn prune_usage(&mut self, bounds: UsageBounds) -> Result<usize, StoreError> {
        let UsageBounds { hours_from_ms, leases_from_ms } = bounds;
        let beyond = |column: &str, table: &str| {
            format!(
                "WHERE {column} < ?1 OR rowid IN (SELECT rowid FROM {table} ORDER BY rowid DESC LIMIT -1 OFFSET ?2)"
            )
        };
        let connection = self.connection;
        let hours = (hours_from_ms, MOST_ROWS);
        let leases = (leases_from_ms, MOST_ROWS);
        let deleted = record::delete::<OwnedHour>(connection, &beyond("hour", "lease_hours"), hours)?
            + record::delete::<GpuHour>(connection, &beyond("hour", "gpu_hours"), hours)?
            + record::delete::<UnusedSpan>(connection, &beyond("until", "unused_times"), hours)?
            + record::delete::<EndedLease>(connection, &beyond("ended", "lease_totals"), leases)?
            + record::delete::<RequestCount>(connection, "WHERE day < ?1", [leases_from_ms])?;
        if deleted > 0 {
            self.next_sequence();
        }
        Ok(deleted)
    }
}
