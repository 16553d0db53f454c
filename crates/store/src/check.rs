//! The check of every record, which opening the store makes.

use gpush_core::mps::MpsTargetRecord;

use crate::{
    answer::StoredAnswer,
    audit::AuditRecord,
    condition::Condition,
    error::StoreError,
    fact::Fact,
    journal_rows::{IntentRow, UndoRow},
    operation::OperationRecord,
    overrides::Override,
    record,
    shared_gpu::SharedGpu,
    tx::View,
};

impl View<'_> {
    /// Reads every record. Damage is an error.
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
        self.check_notices_and_keeps()?;
        record::select::<MpsTargetRecord>(self.connection, "", [], self.sealed)?;
        record::select::<SharedGpu>(self.connection, "", [], self.sealed)?;
        match operations.iter().find(|operation| operation.id.0 > self.head.operation) {
            None => Ok(()),
            Some(operation) => Err(StoreError::Corrupt {
                table: "operations".to_owned(),
                what: format!("{} is higher than the last operation number, {}", operation.id, self.head.operation),
            }),
        }
    }
}
