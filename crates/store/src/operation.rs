//! The journal: what was begun, how things were before, and how it ended.
//!
//! ```text
//!  queued ──► waiting (for idle instances)        ┌──► done          as planned, read back
//!     │          │                                │
//!     ├──────────┴──► running ────────────────────┼──► rolled_back   as before, read back; also when
//!     │          │       │                        │                  it ended before it began
//!     └──────────┴───────┴──► cancelling ─────────┤
//!                                                 └──► failed        neither: degraded or unknown
//!
//!  the agent ended in any of these four ──► interrupted ──► running, cancelling, or an end
//! ```
//!
//! `done` is not to be had from `queued` or `waiting`. What was queued or waiting when its agent
//! ended may simply stay so: nothing of it was begun.
//!
//! An operation runs only with its intent on disk: the whole plan and the instances from before,
//! in one transaction ahead of the first driver call. Recovery reads intent and hardware, never
//! marks of single steps; [`crate::Tx::progress`] is for people. Who may change an operation: the agent
//! that carries it out, and after a restart the one that recovers it.

use std::fmt;

use gpush_api::{Actor, ApiError, GpuPlan, Mig, StepState};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::{
    error::StoreError,
    record::{Columns, Record},
};

/// Number of an operation, unique in the life of a state directory. Shown as `op-<number>`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct OperationId(pub u64);

impl fmt::Display for OperationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "op-{}", self.0)
    }
}

/// Where an operation is; drawn in the module documentation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// Accepted; another operation has its GPUs.
    Queued,
    /// Accepted; instances in its way are in use.
    Waiting,
    /// Being carried out: the hardware may be anything between before and after.
    Running,
    /// To be taken back.
    Cancelling,
    /// An agent ended while it was in one of the stages above.
    Interrupted,
    /// Everything is as planned, read back.
    Done,
    /// Everything is as before, read back.
    RolledBack,
    /// At least one GPU is neither.
    Failed,
}

impl Stage {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::Queued,
        Self::Waiting,
        Self::Running,
        Self::Cancelling,
        Self::Interrupted,
        Self::Done,
        Self::RolledBack,
        Self::Failed,
    ];

    /// Whether nothing more will happen.
    #[must_use]
    pub fn is_final(self) -> bool {
        match self {
            Self::Queued | Self::Waiting | Self::Running | Self::Cancelling | Self::Interrupted => false,
            Self::Done | Self::RolledBack | Self::Failed => true,
        }
    }

    /// Whether an operation may go from here to `next`.
    #[must_use]
    pub fn may_become(self, next: Self) -> bool {
        match (self, next) {
            // What ended has ended; a stage is not left for itself.
            (Self::Done | Self::RolledBack | Self::Failed, _) => false,
            (_, Self::Queued) => false,
            // Once it has run, the time before must stay as recorded: no waiting and planning anew.
            (_, Self::Waiting) => self == Self::Queued,
            (_, Self::Running) => matches!(self, Self::Queued | Self::Waiting | Self::Interrupted),
            (_, Self::Cancelling | Self::Interrupted) => self != next,
            // Before it runs nothing is changed, so nothing can be done or half done.
            (_, Self::Done) => matches!(self, Self::Running | Self::Cancelling | Self::Interrupted),
            (_, Self::RolledBack | Self::Failed) => true,
        }
    }

    /// Name in the table and in sentences.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Queued => "queued",
            Self::Waiting => "waiting",
            Self::Running => "running",
            Self::Cancelling => "cancelling",
            Self::Interrupted => "interrupted",
            Self::Done => "done",
            Self::RolledBack => "rolled_back",
            Self::Failed => "failed",
        }
    }
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What is to be done to one GPU, and how it was.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GpuIntent {
    /// MIG mode and instances before, as read; profiles and processes may be left out.
    pub before: Mig,
    /// The plan: GPU by UUID, layout aimed at, steps, instances kept.
    pub plan: GpuPlan,
    /// MIG mode aimed at.
    pub mig_after: bool,
}

/// Everything that recovery needs beside the hardware.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Intent {
    /// One a GPU.
    pub gpus: Vec<GpuIntent>,
    /// Whatever else the kind of operation needs: services to stop, hooks, the request.
    #[serde(default)]
    pub more: serde_json::Value,
}

/// An operation that shall be recorded.
#[derive(Debug, Clone, PartialEq)]
pub struct NewOperation {
    /// What it does: `mig.apply`.
    pub kind: String,
    /// Who asked.
    pub by: Actor,
    /// What is known now of what it will do. An operation that waits is planned anew when it starts.
    pub intent: Intent,
}

/// An operation as recorded.
#[derive(Debug, Clone, PartialEq)]
pub struct OperationRecord {
    /// Which.
    pub id: OperationId,
    /// Sequence number of its last change.
    pub sequence: u64,
    /// What it does.
    pub kind: String,
    /// Where it is.
    pub stage: Stage,
    /// Who asked.
    pub by: Actor,
    /// Boot in which it last changed.
    pub boot_id: String,
    /// Agent instance ([`crate::Store::instance`]) that last changed it.
    pub instance: String,
    /// Counts its changes, from 1.
    pub revision: u64,
    /// When it was accepted.
    pub created_at: Timestamp,
    /// When it ended.
    pub ended_at: Option<Timestamp>,
    /// For people: how far each GPU is.
    pub progress: Vec<StepState>,
    /// What went wrong.
    pub error: Option<ApiError>,
}

/// Something done beside the driver calls that has to be taken back whatever becomes of the
/// operation: a service that was stopped, a unit that was started. Recorded before it is done.
#[derive(Debug, Clone, PartialEq)]
pub struct Undo {
    /// Order in which they were done; they are taken back last first.
    pub position: u64,
    /// What to do.
    pub what: serde_json::Value,
    /// Whether it was taken back.
    pub undone: bool,
}

/// An operation that has not ended, or not taken back everything, with all that recovery needs.
#[derive(Debug, Clone, PartialEq)]
pub struct UnfinishedOperation {
    /// The operation, its stage as the agent before left it.
    pub record: OperationRecord,
    /// How things were, and what was to become of them.
    pub intent: Intent,
    /// What is still to be taken back, in the order in which it was done.
    pub undo: Vec<Undo>,
}

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
        "progress",
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
        columns.put_json(&self.progress)?;
        columns.put_json(&self.error)
    }

    fn read(columns: &mut Columns) -> Result<Self, StoreError> {
        Ok(Self {
            id: OperationId(columns.number()?),
            sequence: columns.number()?,
            kind: columns.text()?,
            stage: {
                let name = columns.text()?;
                let stage = Stage::ALL.into_iter().find(|stage| stage.name() == name);
                stage.ok_or_else(|| columns.corrupt(&format!("there is no stage {name:?}")))?
            },
            by: columns.json()?,
            boot_id: columns.text()?,
            instance: columns.text()?,
            revision: columns.number()?,
            created_at: columns.time()?,
            ended_at: columns.time_or_null()?,
            progress: columns.json()?,
            error: columns.json()?,
        })
    }
}

/// An intent by its operation.
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

/// An undo by its operation.
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

#[cfg(test)]
mod tests {
    use super::Stage;

    #[test]
    fn stages_change_as_drawn() {
        let mut allowed = Vec::new();
        for from in Stage::ALL {
            for to in Stage::ALL {
                if from.may_become(to) {
                    assert!(!from.is_final() && from != to);
                    allowed.push((from, to));
                }
            }
            // Whatever happens, it can end; and what has not ended can be interrupted.
            assert_eq!(from.may_become(Stage::Failed), !from.is_final());
            assert_eq!(from.may_become(Stage::Interrupted), !from.is_final() && from != Stage::Interrupted);
        }
        assert!(!Stage::Queued.may_become(Stage::Done) && !Stage::Cancelling.may_become(Stage::Running));
        assert!(Stage::Interrupted.may_become(Stage::Running) && Stage::Waiting.may_become(Stage::RolledBack));
        assert_eq!(allowed.len(), 25, "{allowed:?}");
    }
}
