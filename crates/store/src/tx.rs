//! What a caller's closure works with: [`View`] to read, [`Tx`] to read and change.

use jiff::Timestamp;
use rusqlite::Connection;

use crate::{
    answer::StoredAnswer,
    audit::AuditRecord,
    condition::Condition,
    error::StoreError,
    fact::{Fact, Head},
    mps::MpsTarget,
    operation::{IntentRow, OperationRecord, UndoRow},
    overrides::Override,
    record,
    shared_gpu::SharedGpu,
};

/// The store as of the last commit; within a transaction, with its changes so far.
pub struct View<'a> {
    pub(crate) connection: &'a Connection,
    pub(crate) head: &'a Head,
    pub(crate) now: Timestamp,
    /// Whether rows are sealed in the way that this build knows.
    pub(crate) sealed: bool,
}

/// A transaction. All of it is recorded or nothing.
pub struct Tx<'a> {
    pub(crate) connection: &'a Connection,
    pub(crate) head: &'a mut Head,
    pub(crate) now: Timestamp,
    pub(crate) instance: &'a str,
    pub(crate) boot_id: &'a str,
}

impl View<'_> {
    /// The wall clock, to the millisecond, the same throughout a transaction.
    #[must_use]
    pub fn now(&self) -> Timestamp {
        self.now
    }

    /// Last sequence number given to a change: what orders records, whatever the clock does.
    #[must_use]
    pub fn sequence(&self) -> u64 {
        self.head.sequence
    }

    /// Generation of what is wanted beside the config: grows with each change of an override.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.head.generation
    }

    /// Reads every record there is: damage shows as an error.
    pub(crate) fn check_records(&self) -> Result<(), StoreError> {
        record::select::<Fact>(self.connection, "", [], self.sealed)?;
        let operations = record::select::<OperationRecord>(self.connection, "", [], self.sealed)?;
        record::select::<IntentRow>(self.connection, "", [], self.sealed)?;
        record::select::<UndoRow>(self.connection, "", [], self.sealed)?;
        record::select::<Override>(self.connection, "", [], self.sealed)?;
        record::select::<Condition>(self.connection, "", [], self.sealed)?;
        record::select::<StoredAnswer>(self.connection, "", [], self.sealed)?;
        record::select::<AuditRecord>(self.connection, "", [], self.sealed)?;
        self.check_leases()?;
        record::select::<MpsTarget>(self.connection, "", [], self.sealed)?;
        record::select::<SharedGpu>(self.connection, "", [], self.sealed)?;
        match operations.iter().find(|operation| operation.id.0 > self.head.operation) {
            None => Ok(()),
            Some(operation) => Err(StoreError::Corrupt {
                table: "operations".to_owned(),
                what: format!("{} is beyond the last, {}", operation.id, self.head.operation),
            }),
        }
    }
}

impl Tx<'_> {
    /// Adds one to the sequence; each change of a record takes the next.
    pub(crate) fn next_sequence(&mut self) -> u64 {
        self.head.sequence += 1;
        self.head.sequence
    }

    /// Adds one to the generation of what is wanted: a config reload, for instance. Changes of
    /// overrides do so themselves.
    pub fn next_generation(&mut self) -> u64 {
        self.next_sequence();
        self.head.generation += 1;
        self.head.generation
    }

    /// The wall clock, to the millisecond, the same throughout a transaction.
    #[must_use]
    pub fn now(&self) -> Timestamp {
        self.now
    }

    /// Generation of what is wanted beside the config, changes of this transaction included.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.head.generation
    }

    /// The same, to read from.
    pub(crate) fn view(&self) -> View<'_> {
        View { connection: self.connection, head: self.head, now: self.now, sealed: true }
    }

    /// Runs `read` on the transaction as it is so far.
    pub fn read<T>(&self, read: impl FnOnce(&View<'_>) -> T) -> T {
        read(&self.view())
    }
}
