//! Reading leases.

use gpush_api::LeaseId;

use super::LeaseRecord;
use crate::{error::StoreError, fact::LAST_LEASE, record, tx::View};

/// Leases that have not ended, in order of arrival. SQLite uses the partial index only for this very condition.
pub(super) const OPEN: &str = "WHERE state <> 'ended' ORDER BY id";
/// Ended leases of one user, last first.
pub(super) const ENDED_OF_USER: &str =
    "WHERE state = 'ended' AND uid = ?1 AND sequence < ?2 ORDER BY sequence DESC LIMIT ?3";
/// Ended leases of all users, last first.
pub(super) const ENDED: &str = "WHERE state = 'ended' AND sequence < ?1 ORDER BY sequence DESC LIMIT ?2";

/// Which ended leases to read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LeaseHistory {
    /// Only leases of this user.
    pub uid: Option<u32>,
    /// Only leases that ended before this sequence number; `None` for the last ones.
    pub before: Option<u64>,
    /// At most this many.
    pub limit: usize,
}

impl View<'_> {
    /// Leases that have not ended, in order of arrival, including those past their end time.
    ///
    /// # Errors
    /// When the store can't be read.
    pub fn open_leases(&self) -> Result<Vec<LeaseRecord>, StoreError> {
        record::select(self.connection, OPEN, [], self.sealed)
    }

    /// One lease, ended or not; `None` when there is none, or it was deleted from history.
    ///
    /// # Errors
    /// When the store can't be read.
    pub fn lease(&self, id: LeaseId) -> Result<Option<LeaseRecord>, StoreError> {
        Ok(record::select(self.connection, "WHERE id = ?1", [id.0.cast_signed()], self.sealed)?.pop())
    }

    /// Ended leases, last first.
    ///
    /// # Errors
    /// When the store can't be read.
    pub fn ended_leases(&self, history: LeaseHistory) -> Result<Vec<LeaseRecord>, StoreError> {
        let before = history.before.map_or(i64::MAX, |before| i64::try_from(before).unwrap_or(i64::MAX));
        let limit = i64::try_from(history.limit).unwrap_or(i64::MAX);
        match history.uid {
            Some(uid) => record::select(self.connection, ENDED_OF_USER, (uid, before, limit), self.sealed),
            None => record::select(self.connection, ENDED, (before, limit), self.sealed),
        }
    }

    /// Number of the last lease; 0 before the first.
    ///
    /// # Errors
    /// When the store can't be read.
    pub fn last_lease(&self) -> Result<LeaseId, StoreError> {
        let Some(text) = self.fact(LAST_LEASE)? else { return Ok(LeaseId(0)) };
        let corrupt = || StoreError::Corrupt { table: LAST_LEASE.to_owned(), what: format!("{text} is not a number") };
        text.parse().map(LeaseId).map_err(|_| corrupt())
    }

    /// Reads every lease and checks that none is beyond the last number.
    pub(crate) fn check_leases(&self) -> Result<(), StoreError> {
        let last = self.last_lease()?;
        let leases = record::select::<LeaseRecord>(self.connection, "", [], self.sealed)?;
        match leases.iter().find(|lease| lease.id > last) {
            None => Ok(()),
            Some(lease) => Err(StoreError::Corrupt {
                table: "leases".to_owned(),
                what: format!("{} is beyond the last, {last}", lease.id),
            }),
        }
    }
}
