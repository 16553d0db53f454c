//! The rows of the journal's tables: operations, intents, undo entries.

use gpush_api::OperationState;

use crate::{
    error::StoreError,
    operation::{Intent, OperationId, OperationRecord, Undo},
    record::{Columns, Record},
};

impl Record for OperationRecord {
    const TABLE: &'static str = "operations";
    const COLUMNS: &'static [&'static str] = &[
        "number",
        "sequence",
        "kind",
        "stage",
        "actor",
        "boot_id",
        "instance",
        "revision",
        "created_at",
        "ended_at",
        "reason",
        "progress",
        "notes",
        "error",
    ];

    fn write(&self, columns: &mut Columns) -> Result<(), StoreError> {
        columns.put_number(self.id.0)?;
        columns.put_number(self.sequence)?;
        columns.put_text(&self.kind);
        columns.put_text(self.stage.name());
        columns.put_json(&self.by)?;
        columns.put_text(&self.boot_id);
        columns.put_text(&self.instance);
        columns.put_number(self.revision)?;
        columns.put_time(self.created_at);
        columns.put_time_or_null(self.ended_at);
        columns.put_json(&self.reason)?;
        columns.put_json(&self.progress)?;
        columns.put_json(&self.notes)?;
        columns.put_json(&self.error)
    }

    fn read(columns: &mut Columns) -> Result<Self, StoreError> {
        Ok(Self {
            id: OperationId(columns.number()?),
            sequence: columns.number()?,
            kind: columns.text()?,
            stage: {
                let name = columns.text()?;
                let stage = OperationState::ALL.into_iter().find(|stage| stage.name() == name);
                stage.ok_or_else(|| columns.corrupt(&format!("there is no stage {name:?}")))?
            },
            by: columns.json()?,
            boot_id: columns.text()?,
            instance: columns.text()?,
            revision: columns.number()?,
            created_at: columns.time()?,
            ended_at: columns.time_or_null()?,
            reason: columns.json()?,
            progress: columns.json()?,
            notes: columns.json()?,
            error: columns.json()?,
        })
    }
}

/// The intent of an operation.
pub(crate) struct IntentRow {
    pub(crate) operation: u64,
    pub(crate) intent: Intent,
}

impl Record for IntentRow {
    const TABLE: &'static str = "intents";
    const COLUMNS: &'static [&'static str] = &["operation", "intent"];

    fn write(&self, columns: &mut Columns) -> Result<(), StoreError> {
        columns.put_number(self.operation)?;
        columns.put_json(&self.intent)
    }

    fn read(columns: &mut Columns) -> Result<Self, StoreError> {
        Ok(Self { operation: columns.number()?, intent: columns.json()? })
    }
}

/// An undo entry of an operation.
pub(crate) struct UndoRow {
    pub(crate) operation: u64,
    pub(crate) undo: Undo,
}

impl Record for UndoRow {
    const TABLE: &'static str = "undo";
    const COLUMNS: &'static [&'static str] = &["operation", "position", "what", "undone"];

    fn write(&self, columns: &mut Columns) -> Result<(), StoreError> {
        columns.put_number(self.operation)?;
        columns.put_number(self.undo.position)?;
        columns.put_json(&self.undo.what)?;
        columns.put_number(u64::from(self.undo.undone))
    }

    fn read(columns: &mut Columns) -> Result<Self, StoreError> {
        Ok(Self {
            operation: columns.number()?,
            undo: Undo { position: columns.number()?, what: columns.json()?, undone: columns.number()? == 1 },
        })
    }
}
