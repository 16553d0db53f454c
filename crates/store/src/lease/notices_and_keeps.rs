//! What belongs to a lease, and changes without the lease: the last notice to the holder, and the last request to keep the
//! lease although it is unused. Both stay as long as the record of the lease.

use std::collections::BTreeMap;

use gpush_api::{LeaseId, LeaseKeep, LeaseNotice, LeaseState};

use crate::{
    error::StoreError,
    record::{self, Columns, Record},
    tx::{Tx, View},
};

/// The last notice to the holder of a lease.
#[derive(Debug, Clone, PartialEq)]
struct StoredNotice {
    lease: LeaseId,
    notice: LeaseNotice,
}

/// The last keep of a lease.
#[derive(Debug, Clone, PartialEq)]
struct StoredKeep {
    lease: LeaseId,
    keep: LeaseKeep,
}

impl Record for StoredNotice {
    const TABLE: &'static str = "lease_notices";
    const COLUMNS: &'static [&'static str] = &["lease", "notice"];

    fn write(&self, columns: &mut Columns) -> Result<(), StoreError> {
        columns.put_number(self.lease.0)?;
        columns.put_json(&self.notice)
    }

    fn read(columns: &mut Columns) -> Result<Self, StoreError> {
        Ok(Self { lease: LeaseId(columns.number()?), notice: columns.json()? })
    }
}

impl Record for StoredKeep {
    const TABLE: &'static str = "lease_keeps";
    const COLUMNS: &'static [&'static str] = &["lease", "keep"];

    fn write(&self, columns: &mut Columns) -> Result<(), StoreError> {
        columns.put_number(self.lease.0)?;
        columns.put_json(&self.keep)
    }

    fn read(columns: &mut Columns) -> Result<Self, StoreError> {
        Ok(Self { lease: LeaseId(columns.number()?), keep: columns.json()? })
    }
}

impl Tx<'_> {
    /// Records a notice to the holder of a lease, in place of the last one.
    ///
    /// # Errors
    /// Fails if there is no such lease, or if the store cannot write the record.
    pub fn record_notice(&mut self, lease: LeaseId, notice: LeaseNotice) -> Result<(), StoreError> {
        self.view().lease(lease)?.ok_or(StoreError::NoSuchLease(lease))?;
        self.next_sequence();
        record::put(self.connection, &StoredNotice { lease, notice })
    }

    /// Records that an active lease is kept, in place of the last keep.
    ///
    /// # Errors
    /// Fails if the lease is not active, or if the store cannot write the record.
    pub fn keep_lease(&mut self, lease: LeaseId, keep: LeaseKeep) -> Result<(), StoreError> {
        let from = self.view().lease(lease)?.ok_or(StoreError::NoSuchLease(lease))?.state;
        if from != LeaseState::Active {
            return Err(StoreError::LeaseTransition { lease, from, to: LeaseState::Active });
        }
        self.next_sequence();
        record::put(self.connection, &StoredKeep { lease, keep })
    }

    /// Deletes the notices and keeps of leases whose records were deleted.
    pub(crate) fn prune_notices_and_keeps(&mut self) -> Result<usize, StoreError> {
        const WITHOUT_LEASE: &str = "WHERE lease NOT IN (SELECT id FROM leases)";
        Ok(record::delete::<StoredNotice>(self.connection, WITHOUT_LEASE, [])?
            + record::delete::<StoredKeep>(self.connection, WITHOUT_LEASE, [])?)
    }
}

impl View<'_> {
    /// Returns the last notices to the holders of these leases.
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn lease_notices(&self, leases: &[LeaseId]) -> Result<BTreeMap<LeaseId, LeaseNotice>, StoreError> {
        let rows: Vec<StoredNotice> = self.of_leases(leases)?;
        Ok(rows.into_iter().map(|row| (row.lease, row.notice)).collect())
    }

    /// Returns the last keeps of these leases.
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn lease_keeps(&self, leases: &[LeaseId]) -> Result<BTreeMap<LeaseId, LeaseKeep>, StoreError> {
        let rows: Vec<StoredKeep> = self.of_leases(leases)?;
        Ok(rows.into_iter().map(|row| (row.lease, row.keep)).collect())
    }

    fn of_leases<R: Record>(&self, leases: &[LeaseId]) -> Result<Vec<R>, StoreError> {
        let ids: Vec<u64> = leases.iter().map(|lease| lease.0).collect();
        let ids = serde_json::Value::from(ids).to_string();
        let rest = "WHERE lease IN (SELECT value FROM json_each(?1)) ORDER BY lease";
        record::select(self.connection, rest, [ids], self.sealed)
    }

    /// Reads every notice and keep. Damage is an error.
    pub(crate) fn check_notices_and_keeps(&self) -> Result<(), StoreError> {
        record::select::<StoredNotice>(self.connection, "", [], self.sealed)?;
        record::select::<StoredKeep>(self.connection, "", [], self.sealed)?;
        Ok(())
    }
}
