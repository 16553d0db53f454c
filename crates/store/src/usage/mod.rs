//! The use of leases and GPUs: the checkpoint of the accounts, rows of hours and days, unused times, the totals of
//! ended leases, and bills.
//!
//! ```text
//! accounts in memory ──record_usage: one transaction──► checkpoint (replaced)
//!                                                       lease_hours, gpu_hours, unused_times, lease_totals (added)
//! hours of an ended day ──fold_days──► lease_days, gpu_days (added)
//! hours of an ended month ──close_bills──► closed_bills (never changed)
//! ```
//!
//! The checkpoint and the rows are always from the same moment, so after a crash no time is missing and none counts
//! twice. Opening the store does not check these rows, because a damaged row must not lead to the loss of the leases.
//! Reading checks them.

mod bills;
mod checkpoint;
mod days;
mod prune;
mod rows;

use gpush_api::LeaseId;
use gpush_usage::{
    account::{EndedLease, LeaseOwner, RequestDay},
    ledger::{GpuHour, LeaseHour, UnusedSpan},
};

pub use bills::{BillCorrection, ClosedMonth, GpuModel};
pub use prune::UsageBounds;
use rusqlite::Params;

use self::checkpoint::CheckpointPart;
use crate::{
    error::{StoreError, from_sqlite},
    fact::{Fact, USAGE_SEQUENCE},
    lease::LeaseRecord,
    record::{self, Record},
    tx::{Tx, View},
};

/// An hour of a lease, with its owner at that time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OwnedHour {
    /// The owner that the hour is charged to.
    pub owner: LeaseOwner,
    /// The hour.
    pub hour: LeaseHour,
}

/// Selects hours that begin in a period, in the order of their numbers.
const PAGE_OF_HOURS: &str = "WHERE hour >= ?1 AND hour < ?2 AND number >= ?3 ORDER BY number LIMIT ?4";

/// A page of the hours of a period. A long period has many hours, and while the store reads them, no change can be
/// recorded. So callers read page by page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HoursPage {
    /// Start of the period, in ms since 1970.
    pub from_ms: i64,
    /// End of the period.
    pub until_ms: i64,
    /// Only hours with at least this number.
    pub number: u64,
    /// Maximum number of hours.
    pub limit: usize,
}

impl HoursPage {
    /// Returns a page with all hours of all time.
    #[cfg(test)]
    fn all() -> Self {
        Self { from_ms: i64::MIN, until_ms: i64::MAX, number: 0, limit: usize::MAX }
    }

    fn parameters(self) -> [i64; 4] {
        let (number, limit) = (i64::try_from(self.number), i64::try_from(self.limit));
        [self.from_ms, self.until_ms, number.unwrap_or(i64::MAX), limit.unwrap_or(i64::MAX)]
    }
}

/// The number of requests for one share with one result on one UTC day.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RequestCount {
    /// Start of the day, in ms since 1970.
    pub day_ms: i64,
    /// Kind of the requested share.
    pub kind: String,
    /// Profile; empty if the request names none.
    pub profile: String,
    /// The outcome of the requests.
    pub result: String,
    /// Number of requests.
    pub count: u64,
}

/// The records of one transaction about the use.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct UsageRecord {
    /// The accounts, as JSON.
    pub checkpoint: String,
    /// Closed hours of leases.
    pub lease_hours: Vec<OwnedHour>,
    /// Closed hours of GPUs.
    pub gpu_hours: Vec<GpuHour>,
    /// Unused times that have ended.
    pub unused: Vec<UnusedSpan>,
    /// Leases that have ended.
    pub ended: Vec<EndedLease>,
    /// Requests since the last transaction. They are added to those of their days.
    pub requests: Vec<RequestCount>,
    /// The same requests, by owner.
    pub owner_requests: Vec<RequestDay>,
    /// Models of GPUs that are new, or that have changed.
    pub models: Vec<GpuModel>,
}

impl Tx<'_> {
    /// Replaces the checkpoint and adds the rows. A row that is recorded again replaces the old one. Returns the leases
    /// that have ended since the last checkpoint and have no totals: those that the accounts have not ended yet, and those
    /// that were too short for the accounts to notice.
    ///
    /// # Errors
    /// Fails if the store cannot write a record.
    pub fn record_usage(&mut self, usage: &UsageRecord) -> Result<Vec<LeaseRecord>, StoreError> {
        self.next_sequence();
        record::delete::<CheckpointPart>(self.connection, "", [])?;
        for part in checkpoint::split(&usage.checkpoint) {
            record::put(self.connection, &part)?;
        }
        for row in &usage.lease_hours {
            record::put(self.connection, row)?;
        }
        for row in &usage.gpu_hours {
            record::put(self.connection, row)?;
        }
        for row in &usage.unused {
            record::put(self.connection, row)?;
        }
        for row in &usage.ended {
            record::put(self.connection, row)?;
        }
        for row in &usage.requests {
            self.add_requests(row)?;
        }
        for row in &usage.owner_requests {
            self.add_owner_requests(row)?;
        }
        for row in &usage.models {
            record::put(self.connection, row)?;
        }
        let unaccounted = self.view().unaccounted_leases()?;
        let sequence = self.head.sequence.to_string();
        record::put(self.connection, &Fact { name: USAGE_SEQUENCE.to_owned(), value: sequence })?;
        Ok(unaccounted)
    }

    fn add_requests(&mut self, added: &RequestCount) -> Result<(), StoreError> {
        let rest = "WHERE day = ?1 AND kind = ?2 AND profile = ?3 AND result = ?4";
        let key = (added.day_ms, &added.kind, &added.profile, &added.result);
        let before = record::select::<RequestCount>(self.connection, rest, key, true)?;
        let count = added.count + before.iter().map(|row| row.count).sum::<u64>();
        record::put(self.connection, &RequestCount { count, ..added.clone() })
    }
}

impl View<'_> {
    /// Returns the last checkpoint as JSON; `None` before the first one.
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn usage_checkpoint(&self) -> Result<Option<String>, StoreError> {
        let parts: Vec<CheckpointPart> = self.usage_rows("ORDER BY part", [])?;
        Ok((!parts.is_empty()).then(|| parts.into_iter().map(|part| part.content).collect()))
    }

    /// Returns a number that is larger than the numbers of all hours.
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn next_usage_row(&self) -> Result<u64, StoreError> {
        let sql = "SELECT max(ifnull((SELECT max(number) FROM lease_hours), -1), \
                   ifnull((SELECT max(number) FROM gpu_hours), -1)) + 1";
        let number: i64 = self.connection.query_row(sql, [], |row| row.get(0)).map_err(|error| from_sqlite(&error))?;
        Ok(u64::try_from(number).unwrap_or_default())
    }

    /// Returns a page of the hours of leases.
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn lease_hours(&self, page: HoursPage) -> Result<Vec<OwnedHour>, StoreError> {
        self.usage_rows(PAGE_OF_HOURS, page.parameters())
    }

    /// Returns a page of the hours of GPUs.
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn gpu_hours(&self, page: HoursPage) -> Result<Vec<GpuHour>, StoreError> {
        self.usage_rows(PAGE_OF_HOURS, page.parameters())
    }

    /// Returns the counts of requests of the days that begin in a period. Times are in ms since 1970.
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn request_counts(&self, from_ms: i64, until_ms: i64) -> Result<Vec<RequestCount>, StoreError> {
        self.usage_rows("WHERE day >= ?1 AND day < ?2 ORDER BY day, kind, profile, result", (from_ms, until_ms))
    }

    /// Returns the unused times that ended since `from_ms`.
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn unused_times(&self, from_ms: i64) -> Result<Vec<UnusedSpan>, StoreError> {
        self.usage_rows("WHERE until >= ?1 ORDER BY lease, since", [from_ms])
    }

    /// Returns the totals of those of these leases that have ended.
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn lease_totals(&self, leases: &[LeaseId]) -> Result<Vec<EndedLease>, StoreError> {
        let ids: Vec<u64> = leases.iter().map(|lease| lease.0).collect();
        let ids = serde_json::Value::from(ids).to_string();
        self.usage_rows("WHERE lease IN (SELECT value FROM json_each(?1)) ORDER BY lease", [ids])
    }

    /// Returns the leases that ended in a period, in the order of their numbers. Times are in ms since 1970.
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn used_leases(&self, from_ms: i64, until_ms: i64) -> Result<Vec<EndedLease>, StoreError> {
        self.usage_rows("WHERE ended >= ?1 AND ended < ?2 ORDER BY lease", (from_ms, until_ms))
    }

    /// Returns a page of the leases that ended in a period, the newest first: at most `limit` leases whose numbers are below
    /// `below`. Times are in ms since 1970.
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn newest_used_leases(
        &self,
        from_ms: i64,
        until_ms: i64,
        below: LeaseId,
        limit: usize,
    ) -> Result<Vec<EndedLease>, StoreError> {
        let number = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
        let limit = i64::try_from(limit).unwrap_or(i64::MAX);
        let rest = "WHERE ended >= ?1 AND ended < ?2 AND lease < ?3 ORDER BY lease DESC LIMIT ?4";
        self.usage_rows(rest, (from_ms, until_ms, number(below.0), limit))
    }

    fn usage_rows<R: Record>(&self, rest: &str, parameters: impl Params) -> Result<Vec<R>, StoreError> {
        record::select(self.connection, rest, parameters, self.sealed).map_err(|error| match error {
            // Unlike damage in another table, this damage is not a reason to replace the database.
            StoreError::Corrupt { table, what } => StoreError::DamagedUse { table, what },
            other => other,
        })
    }

    /// Returns the leases that were granted, that have ended since the last checkpoint, and that have no totals. Before the
    /// first checkpoint, there are none.
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn unaccounted_leases(&self) -> Result<Vec<LeaseRecord>, StoreError> {
        let Some(text) = self.fact(USAGE_SEQUENCE)? else { return Ok(Vec::new()) };
        let corrupt =
            || StoreError::Corrupt { table: USAGE_SEQUENCE.to_owned(), what: format!("{text} is not a number") };
        let sequence: i64 = text.parse().map_err(|_| corrupt())?;
        let rest = "WHERE state = 'ended' AND sequence > ?1 AND granted_at IS NOT NULL \
                    AND id NOT IN (SELECT lease FROM lease_totals) ORDER BY id";
        record::select(self.connection, rest, [sequence], self.sealed)
    }
}

#[cfg(test)]
mod tests;
