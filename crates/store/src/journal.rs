//! Changes of operation records: create with the intent, move from state to state, end, delete. [`crate::operation`]
//! shows the states.

use std::collections::BTreeMap;

use gpush_api::{ApiError, OperationState, StepState};

use crate::{
    error::{StoreError, from_sqlite},
    journal_rows::{IntentRow, UndoRow},
    operation::{
        Intent, IntentSummary, NewOperation, OperationId, OperationRecord, Undo, UnfinishedOperation, may_become,
    },
    record,
    tx::{Tx, View},
};

impl View<'_> {
    /// Returns the operations, oldest first.
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn operations(&self) -> Result<Vec<OperationRecord>, StoreError> {
        record::select(self.connection, "ORDER BY number", [], self.sealed)
    }

    /// Returns the last `limit` operations, newest first. With `before`, returns only operations
    /// before that number.
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn latest_operations(
        &self,
        before: Option<OperationId>,
        limit: usize,
    ) -> Result<Vec<OperationRecord>, StoreError> {
        let before = before.map_or(i64::MAX, |id| i64::try_from(id.0).unwrap_or(i64::MAX));
        let limit = i64::try_from(limit).unwrap_or(i64::MAX);
        let rest = "WHERE number < ?1 ORDER BY number DESC LIMIT ?2";
        record::select(self.connection, rest, [before, limit], self.sealed)
    }

    /// Returns the number of the last operation; 0 before the first.
    #[must_use]
    pub fn last_operation(&self) -> OperationId {
        OperationId(self.head.operation)
    }

    /// Returns one operation.
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn operation(&self, id: OperationId) -> Result<Option<OperationRecord>, StoreError> {
        Ok(record::select(self.connection, "WHERE number = ?1", [id.0.cast_signed()], self.sealed)?.pop())
    }

    /// Returns the intent of an operation.
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn intent(&self, id: OperationId) -> Result<Option<Intent>, StoreError> {
        let rows =
            record::select::<IntentRow>(self.connection, "WHERE operation = ?1", [id.0.cast_signed()], self.sealed)?;
        Ok(rows.into_iter().next().map(|row| row.intent))
    }

    /// Returns summaries of the intents of the operations from number `first` to the number before `before`. Does not
    /// read plans, so the call is cheap enough for a list.
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn intent_summaries(
        &self,
        first: OperationId,
        before: Option<OperationId>,
    ) -> Result<BTreeMap<OperationId, IntentSummary>, StoreError> {
        let before = before.map_or(i64::MAX, |id| i64::try_from(id.0).unwrap_or(i64::MAX));
        // An operation with damaged JSON must not abort the list, so treat its intent as empty.
        let intent = "iif(json_valid(intent), intent, '{}')";
        let sql = format!(
            "SELECT operation, {intent} ->> '$.begun' IS NOT NULL, \
             (SELECT json_group_array(gpu.value ->> '$.plan.gpu_uuid') FROM json_each({intent}, '$.gpus') AS gpu) \
             FROM intents WHERE operation >= ?1 AND operation < ?2"
        );
        let mut statement = self.connection.prepare_cached(&sql).map_err(|error| from_sqlite(&error))?;
        let rows = statement.query_map([first.0.cast_signed(), before], |row| {
            let uuids: String = row.get(2)?;
            let gpu_uuids = serde_json::from_str(&uuids).unwrap_or_default();
            Ok((OperationId(row.get::<_, i64>(0)?.cast_unsigned()), IntentSummary { begun: row.get(1)?, gpu_uuids }))
        });
        let rows = rows.map_err(|error| from_sqlite(&error))?;
        rows.collect::<Result<_, _>>().map_err(|error| from_sqlite(&error))
    }

    /// Returns the undo entries of an operation, in order. Each action other than a driver call has
    /// an undo entry.
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn undo(&self, id: OperationId) -> Result<Vec<Undo>, StoreError> {
        let rest = "WHERE operation = ?1 ORDER BY position";
        let rows = record::select::<UndoRow>(self.connection, rest, [id.0.cast_signed()], self.sealed)?;
        Ok(rows.into_iter().map(|row| row.undo).collect())
    }

    /// Returns the operations that have not ended or still have undo entries, oldest first. The result contains
    /// everything that recovery needs.
    ///
    /// # Errors
    /// The store cannot be read, or an intent is missing.
    pub fn unfinished(&self) -> Result<Vec<UnfinishedOperation>, StoreError> {
        let pending = record::select::<UndoRow>(self.connection, "WHERE undone = 0", [], self.sealed)?;
        let mut unfinished = Vec::new();
        for record in self.operations()? {
            if record.stage.is_final() && !pending.iter().any(|row| row.operation == record.id.0) {
                continue;
            }
            let intent = self.intent(record.id)?.ok_or_else(|| StoreError::Corrupt {
                table: "intents".to_owned(),
                what: format!("the record of {} is missing", record.id),
            })?;
            let undo = self.undo(record.id)?.into_iter().filter(|undo| !undo.undone).collect();
            unfinished.push(UnfinishedOperation { record, intent, undo });
        }
        Ok(unfinished)
    }
}

impl Tx<'_> {
    /// Records an operation as queued.
    ///
    /// # Errors
    /// The record cannot be written.
    pub fn enqueue(&mut self, new: NewOperation) -> Result<OperationRecord, StoreError> {
        self.insert(new, OperationState::Queued)
    }

    /// Records an operation as running. The caller may make the first driver call only after this change is recorded.
    ///
    /// # Errors
    /// The record cannot be written.
    pub fn begin(&mut self, new: NewOperation) -> Result<OperationRecord, StoreError> {
        self.insert(new, OperationState::Running)
    }

    fn insert(&mut self, new: NewOperation, stage: OperationState) -> Result<OperationRecord, StoreError> {
        self.head.operation += 1;
        let id = OperationId(self.head.operation);
        let sequence = self.next_sequence();
        let begun = (stage == OperationState::Running).then_some(sequence);
        let record = OperationRecord {
            id,
            sequence,
            kind: new.kind,
            stage,
            by: new.by,
            boot_id: self.boot_id.to_owned(),
            instance: self.instance.to_owned(),
            revision: 1,
            created_at: self.now,
            ended_at: None,
            reason: new.reason,
            progress: new.progress,
            notes: Vec::new(),
            error: None,
        };
        let intent = Intent { begun, ..new.intent };
        record::put(self.connection, &IntentRow { operation: id.0, intent })?;
        record::put(self.connection, &record)?;
        Ok(record)
    }

    /// Starts a queued or waiting operation, with its current intent and steps. The caller may make the first driver
    /// call only after this change is recorded.
    ///
    /// # Errors
    /// The operation is not queued or waiting, or the record cannot be written.
    pub fn start(
        &mut self,
        id: OperationId,
        intent: Intent,
        progress: Vec<StepState>,
    ) -> Result<OperationRecord, StoreError> {
        let record = self.existing_operation(id)?;
        match record.stage {
            OperationState::Queued | OperationState::Waiting => {}
            // The intent contains the state before the operation. Refuse a second start, because a reading made after
            // the first start must not replace that state.
            OperationState::Running
            | OperationState::Cancelling
            | OperationState::Interrupted
            | OperationState::Done
            | OperationState::NotStarted
            | OperationState::RolledBack
            | OperationState::Failed => {
                return Err(StoreError::Transition { operation: id, from: record.stage, to: OperationState::Running });
            }
        }
        let record = self.update(record, OperationState::Running, |record| record.progress = progress)?;
        let intent = Intent { begun: Some(record.sequence), ..intent };
        record::put(self.connection, &IntentRow { operation: id.0, intent })?;
        Ok(record)
    }

    /// Moves an operation to a state that is not final. An interrupted operation can become `Running` again. For the
    /// first start, use [`Tx::start`].
    ///
    /// # Errors
    /// The operation cannot change to this state ([`may_become`]), or the record cannot be written.
    pub fn advance(&mut self, id: OperationId, to: OperationState) -> Result<OperationRecord, StoreError> {
        let record = self.existing_operation(id)?;
        let begins =
            to == OperationState::Running && matches!(record.stage, OperationState::Queued | OperationState::Waiting);
        if to.is_final() || begins {
            return Err(StoreError::Transition { operation: id, from: record.stage, to });
        }
        self.update(record, to, |_| {})
    }

    /// Moves an operation to `Cancelling` with the reason for the rollback. If gpushd ends before the rollback is
    /// complete, the next gpushd reports that reason. Also works if the operation is already cancelling.
    ///
    /// # Errors
    /// The operation has ended, or the record cannot be written.
    pub fn begin_rollback(&mut self, id: OperationId, why: ApiError) -> Result<OperationRecord, StoreError> {
        let record = self.existing_operation(id)?;
        self.update(record, OperationState::Cancelling, |record| record.error = Some(why))
    }

    /// Records a cancellation. An operation that has not started ends as `NotStarted` with the error `why`. An
    /// operation that has started becomes `Cancelling`.
    ///
    /// # Errors
    /// The operation has ended, or the record cannot be written.
    pub fn cancel(&mut self, id: OperationId, why: ApiError) -> Result<OperationRecord, StoreError> {
        match self.existing_operation(id)?.stage {
            OperationState::Queued | OperationState::Waiting => self.end(id, OperationState::NotStarted, Some(why)),
            OperationState::Running
            | OperationState::Cancelling
            | OperationState::Interrupted
            | OperationState::Done
            | OperationState::NotStarted
            | OperationState::RolledBack
            | OperationState::Failed => self.advance(id, OperationState::Cancelling),
        }
    }

    /// Replaces the notes that an operation shows to users.
    ///
    /// # Errors
    /// The operation has ended, or the record cannot be written.
    pub fn notes(&mut self, id: OperationId, notes: Vec<String>) -> Result<OperationRecord, StoreError> {
        let record = self.existing_operation(id)?;
        let stage = record.stage;
        self.update(record, stage, |record| record.notes = notes)
    }

    /// Records the progress of an operation.
    ///
    /// # Errors
    /// The operation has ended, or the record cannot be written.
    pub fn progress(&mut self, id: OperationId, progress: Vec<StepState>) -> Result<OperationRecord, StoreError> {
        let record = self.existing_operation(id)?;
        let stage = record.stage;
        self.update(record, stage, |record| record.progress = progress)
    }

    /// Ends an operation. Send this change through [`crate::Store::write_ending`], so that the end can be recorded on a
    /// full disk.
    ///
    /// # Errors
    /// The operation cannot change to this state, or the record cannot be written.
    pub fn end(
        &mut self,
        id: OperationId,
        to: OperationState,
        error: Option<ApiError>,
    ) -> Result<OperationRecord, StoreError> {
        let record = self.existing_operation(id)?;
        if !to.is_final() {
            return Err(StoreError::Transition { operation: id, from: record.stage, to });
        }
        let now = self.now;
        self.update(record, to, |record| {
            record.ended_at = Some(now);
            record.error = error;
            for progress in &mut record.progress {
                progress.doing = None;
            }
        })
    }

    /// Records, for administrators, why an operation did not start.
    ///
    /// # Errors
    /// There is no such operation, or the record cannot be written.
    pub fn error_in_full(&mut self, id: OperationId, error: ApiError) -> Result<(), StoreError> {
        let intent = self.view().intent(id)?.unwrap_or_default();
        let intent = Intent { error_in_full: Some(error), ..intent };
        record::put(self.connection, &IntentRow { operation: id.0, intent })
    }

    /// Raises the revision of an operation to `revision`, in any state. While an operation runs,
    /// clients see revisions that are not recorded. At the end of the operation, the revision must
    /// not be lower than a revision that clients have seen.
    ///
    /// # Errors
    /// There is no such operation, or the record cannot be written.
    pub fn raise_revision(&mut self, id: OperationId, revision: u64) -> Result<OperationRecord, StoreError> {
        let mut record = self.existing_operation(id)?;
        if record.revision < revision {
            record.revision = revision;
            record.sequence = self.next_sequence();
            record::put(self.connection, &record)?;
        }
        Ok(record)
    }

    /// Records an undo entry, and returns its position. Record the entry before the action that it undoes.
    ///
    /// # Errors
    /// The operation has ended, or the record cannot be written.
    pub fn add_undo(&mut self, id: OperationId, what: serde_json::Value) -> Result<u64, StoreError> {
        let record = self.existing_operation(id)?;
        let stage = record.stage;
        self.update(record, stage, |_| {})?;
        let position = self.view().undo(id)?.last().map_or(0, |last| last.position + 1);
        record::put(self.connection, &UndoRow { operation: id.0, undo: Undo { position, what, undone: false } })?;
        Ok(position)
    }

    /// Records that an undo entry was executed. Also works after the operation has ended. Returns `false` if there is
    /// no such entry.
    ///
    /// # Errors
    /// The record cannot be written.
    pub fn mark_undone(&mut self, id: OperationId, position: u64) -> Result<bool, StoreError> {
        let Some(undo) = self.view().undo(id)?.into_iter().find(|undo| undo.position == position) else {
            return Ok(false);
        };
        self.next_sequence();
        record::put(self.connection, &UndoRow { operation: id.0, undo: Undo { undone: true, ..undo } })?;
        Ok(true)
    }

    fn existing_operation(&self, id: OperationId) -> Result<OperationRecord, StoreError> {
        self.view().operation(id)?.ok_or(StoreError::NoSuchOperation(id))
    }

    fn update(
        &mut self,
        mut record: OperationRecord,
        to: OperationState,
        change: impl FnOnce(&mut OperationRecord),
    ) -> Result<OperationRecord, StoreError> {
        let stays = record.stage == to && !to.is_final();
        if !stays && !may_become(record.stage, to) {
            return Err(StoreError::Transition { operation: record.id, from: record.stage, to });
        }
        record.stage = to;
        record.sequence = self.next_sequence();
        record.revision += 1;
        self.boot_id.clone_into(&mut record.boot_id);
        self.instance.clone_into(&mut record.instance);
        change(&mut record);
        record::put(self.connection, &record)?;
        Ok(record)
    }

    /// Deletes the records of the operations that ended first (by sequence), so that at most `keep` ended operations
    /// remain. Keeps operations that still have undo entries.
    pub(crate) fn prune_operations(&mut self, keep: usize) -> Result<usize, StoreError> {
        let mut ended: Vec<_> = self.view().operations()?;
        ended.retain(|record| record.stage.is_final());
        ended.sort_by_key(|record| record.sequence);
        let excess = ended.len().saturating_sub(keep);
        let mut forgotten = 0;
        for record in &ended[..excess] {
            if self.view().undo(record.id)?.iter().any(|undo| !undo.undone) {
                continue;
            }
            let number = [record.id.0.cast_signed()];
            record::delete::<UndoRow>(self.connection, "WHERE operation = ?1", number)?;
            record::delete::<IntentRow>(self.connection, "WHERE operation = ?1", number)?;
            forgotten += record::delete::<OperationRecord>(self.connection, "WHERE number = ?1", number)?;
        }
        Ok(forgotten)
    }
}
