//! Limits for the rows about the use. Without them, the database would grow without end.
//!
//! | rows | kept |
//! |---|---|
//! | hours | until they are old and in a closed bill: see `days`; at most 400,000 of leases and of GPUs |
//! | days, totals of leases, counts of requests, closed bills, corrections | for `history.days`; at most 400,000 of each |
//! | ended leases | for `history.days`, within [`crate::Bounds`] |
//! | unused times | for 100 days; at most 400,000 |

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
    /// Unused times before this time are deleted.
    pub unused_from_ms: i64,
    /// Everything else before this time is deleted: days, leases that ended before it and their totals, closed bills.
    /// For hours, see [`Tx::delete_folded_hours`].
    pub history_from_ms: i64,
}

impl Tx<'_> {
    /// Deletes the rows beyond the limits, and returns their number.
    ///
    /// # Errors
    /// Fails if the store cannot delete the rows.
    pub fn prune_usage(&mut self, bounds: UsageBounds) -> Result<usize, StoreError> {
        let UsageBounds { unused_from_ms, history_from_ms } = bounds;
        let beyond = |column: &str, table: &str| {
            format!(
                "WHERE {column} < ?1 OR rowid IN (SELECT rowid FROM {table} ORDER BY rowid DESC LIMIT -1 OFFSET ?2)"
            )
        };
        let connection = self.connection;
        let history = (history_from_ms, MOST_ROWS);
        // Hours are deleted by their number alone: an old hour may be in no bill yet.
        let too_many =
            |table: &str| format!("WHERE rowid IN (SELECT rowid FROM {table} ORDER BY rowid DESC LIMIT -1 OFFSET ?1)");
        let hours = record::delete::<OwnedHour>(connection, &too_many("lease_hours"), [MOST_ROWS])?
            + record::delete::<GpuHour>(connection, &too_many("gpu_hours"), [MOST_ROWS])?;
        if hours > 0 {
            tracing::warn!("the database has more than {MOST_ROWS} hours of use: the {hours} oldest ones are deleted");
        }
        let deleted = hours
            + record::delete::<UnusedSpan>(connection, &beyond("until", "unused_times"), (unused_from_ms, MOST_ROWS))?
            + record::delete::<EndedLease>(connection, &beyond("ended", "lease_totals"), history)?
            + record::delete::<RequestCount>(connection, "WHERE day < ?1", [history_from_ms])?
            + self.delete_days(history_from_ms, MOST_ROWS)?
            + self.delete_bills_before(history_from_ms)?
            + self.delete_leases_before(history_from_ms)?;
        if deleted > 0 {
            self.next_sequence();
        }
        Ok(deleted)
    }
}
