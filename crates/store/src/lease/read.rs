//! Reads leases.

use gpush_api::LeaseId;

use super::LeaseRecord;
use crate::{
    error::{StoreError, from_sqlite},
    fact::LAST_LEASE,
    record,
    tx::View,
};

/// Leases that have not ended, in order of arrival. SQLite uses the partial index only for exactly this condition.
pub(super) const OPEN: &str = "WHERE state <> 'ended' ORDER BY id";
/// Ended leases of one user. The leases that ended last come first.
pub(super) const ENDED_OF_USER: &str =
    "WHERE state = 'ended' AND uid = ?1 AND sequence < ?2 ORDER BY sequence DESC LIMIT ?3";
/// Ended leases of several users. The leases that ended last come first.
const ENDED_OF_USERS: &str = "WHERE state = 'ended' AND uid IN (SELECT value FROM json_each(?1)) AND sequence < ?2 \
                              ORDER BY sequence DESC LIMIT ?3";
/// Ended leases of all users. The leases that ended last come first.
pub(super) const ENDED: &str = "WHERE state = 'ended' AND sequence < ?1 ORDER BY sequence DESC LIMIT ?2";

/// Granted leases with a higher number.
pub(super) const GRANTED_AFTER: &str = "WHERE id > ?1 AND granted_at IS NOT NULL";

/// Ended leases of a Slurm job. The leases that ended last come first.
pub(super) const ENDED_OF_JOB: &str =
    "WHERE job = ?1 AND state = 'ended' AND sequence < ?2 ORDER BY sequence DESC LIMIT ?3";

/// Number of ended leases that opening the store checks. The others are checked when they are read.
const CHECKED: usize = 1000;

/// A selection of ended leases.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeaseHistory {
    /// Only leases of these users.
    pub uids: Option<Vec<u32>>,
    /// Only leases that ended before this sequence number; `None` for the latest leases.
    pub before: Option<u64>,
    /// Maximum number of leases.
    pub limit: usize,
}

impl View<'_> {
    /// Returns the leases that have not ended, in order of arrival. Includes leases past their end
    /// time.
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn open_leases(&self) -> Result<Vec<LeaseRecord>, StoreError> {
        record::select(self.connection, OPEN, [], self.sealed)
    }

    /// Returns a lease, ended or not; `None` if there is no such lease, or its record was deleted.
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn lease(&self, id: LeaseId) -> Result<Option<LeaseRecord>, StoreError> {
        Ok(record::select(self.connection, "WHERE id = ?1", [id.0.cast_signed()], self.sealed)?.pop())
    }

    /// Returns ended leases. The leases that ended last come first.
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn ended_leases(&self, history: &LeaseHistory) -> Result<Vec<LeaseRecord>, StoreError> {
        let before = history.before.map_or(i64::MAX, |before| i64::try_from(before).unwrap_or(i64::MAX));
        let limit = i64::try_from(history.limit).unwrap_or(i64::MAX);
        match history.uids.as_deref() {
            Some([uid]) => record::select(self.connection, ENDED_OF_USER, (uid, before, limit), self.sealed),
            Some(uids) => {
                let uids = serde_json::Value::from(uids).to_string();
                record::select(self.connection, ENDED_OF_USERS, (uids, before, limit), self.sealed)
            }
            None => record::select(self.connection, ENDED, (before, limit), self.sealed),
        }
    }

    /// Returns ended leases of the Slurm jobs with this id, of any cluster. The leases that ended last come first.
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn ended_leases_of_job(
        &self,
        job: u32,
        before: Option<u64>,
        limit: usize,
    ) -> Result<Vec<LeaseRecord>, StoreError> {
        let before = before.map_or(i64::MAX, |before| i64::try_from(before).unwrap_or(i64::MAX));
        let limit = i64::try_from(limit).unwrap_or(i64::MAX);
        record::select(self.connection, ENDED_OF_JOB, (job, before, limit), self.sealed)
    }

    /// Returns the number of leases with a higher number than `id` that were granted, ended or not.
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn granted_after(&self, id: LeaseId) -> Result<u64, StoreError> {
        let count = format!("SELECT count(*) FROM leases {GRANTED_AFTER}");
        let counted = self
            .connection
            .prepare_cached(&count)
            .and_then(|mut statement| statement.query_row([id.0.cast_signed()], |row| row.get::<_, i64>(0)));
        counted.map(i64::unsigned_abs).map_err(|error| from_sqlite(&error))
    }

    /// Returns the uids of the holders of ended leases.
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn ended_holders(&self) -> Result<Vec<u32>, StoreError> {
        let select = "SELECT DISTINCT uid FROM leases WHERE state = 'ended'";
        let uids = self.connection.prepare_cached(select).and_then(|mut statement| {
            let uids = statement.query_map([], |row| row.get(0))?;
            uids.collect()
        });
        uids.map_err(|error| from_sqlite(&error))
    }

    /// Returns the number of the last lease; 0 before the first one.
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn last_lease(&self) -> Result<LeaseId, StoreError> {
        let Some(text) = self.fact(LAST_LEASE)? else { return Ok(LeaseId(0)) };
        let corrupt = || StoreError::Corrupt { table: LAST_LEASE.to_owned(), what: format!("{text} is not a number") };
        text.parse().map(LeaseId).map_err(|_| corrupt())
    }

    /// Reads every lease that has not ended, and the leases that ended last. Checks that no lease has a number higher than
    /// the recorded last number. The many older leases are only history, so they do not delay the start.
    pub(crate) fn check_leases(&self) -> Result<(), StoreError> {
        let last = self.last_lease()?;
        self.open_leases()?;
        self.ended_leases(&LeaseHistory { uids: None, before: None, limit: CHECKED })?;
        let highest = self.connection.query_row("SELECT max(id) FROM leases", [], |row| row.get::<_, Option<i64>>(0));
        let highest = highest.map_err(|error| from_sqlite(&error))?.and_then(|id| u64::try_from(id).ok());
        match highest.map(LeaseId).filter(|lease| *lease > last) {
            None => Ok(()),
            Some(lease) => Err(StoreError::Corrupt {
                table: "leases".to_owned(),
                what: format!("{lease} is higher than the last lease number, {last}"),
            }),
        }
    }
}
