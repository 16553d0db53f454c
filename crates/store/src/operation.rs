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

use gpush_api::{Actor, ApiError, GpuPlan, Mig, OperationState, StepState};
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

/// Whether an operation may go from one state to another; drawn in the module documentation.
#[must_use]
pub fn may_become(from: OperationState, to: OperationState) -> bool {
    use OperationState::{Cancelling, Done, Failed, Interrupted, Queued, RolledBack, Running, Waiting};
    match (from, to) {
        // What ended has ended; a state is not left for itself.
        (Done | RolledBack | Failed, _) => false,
        (_, Queued) => false,
        // Once it has run, the time before must stay as recorded: no waiting and planning anew.
        (_, Waiting) => from == Queued,
        (_, Running) => matches!(from, Queued | Waiting | Interrupted),
        (_, Cancelling | Interrupted) => from != to,
        // Before it runs nothing is changed, so nothing can be done or half done.
        (_, Done) => matches!(from, Running | Cancelling | Interrupted),
        (_, RolledBack | Failed) => true,
    }
}

/// What is to be done to one GPU, and how it was.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GpuIntent {
    /// MIG mode and instances before, as read; profiles and processes may be left out. `None` on a
    /// part without MIG, of which nothing is asked.
    pub before: Option<Mig>,
    /// The plan: GPU by UUID, layout aimed at, whether MIG mode is switched on, steps, instances kept.
    pub plan: GpuPlan,
}

/// Everything that recovery needs beside the hardware.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Intent {
    /// One a GPU.
    pub gpus: Vec<GpuIntent>,
    /// Whatever else the kind of operation needs: services to stop, hooks, the request.
    #[serde(default)]
    pub more: serde_json::Value,
    /// Sequence number at which it was recorded as running; `None` of what stands in line. Set by the
    /// store. Of two operations on one GPU the one that began later proves that the other had ended.
    #[serde(default)]
    pub begun: Option<u64>,
}

/// An operation that shall be recorded.
#[derive(Debug, Clone, PartialEq)]
pub struct NewOperation {
    /// What it does: `mig.apply`.
    pub kind: String,
    /// Who asked.
    pub by: Actor,
    /// Why, in their words.
    pub reason: Option<String>,
    /// What is known now of what it will do. An operation that waits is planned anew when it starts.
    pub intent: Intent,
    /// How far each GPU is: nowhere, with the number of its steps.
    pub progress: Vec<StepState>,
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
    pub stage: OperationState,
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
    /// Why, in the words of whoever asked.
    pub reason: Option<String>,
    /// For people: how far each GPU is.
    pub progress: Vec<StepState>,
    /// For people: what else happened to it, oldest first.
    pub notes: Vec<String>,
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
    use gpush_api::OperationState::{
        self, Cancelling, Done, Failed, Interrupted, Queued, RolledBack, Running, Waiting,
    };

    use super::may_become;

    #[test]
    fn states_change_as_drawn() {
        let mut allowed = Vec::new();
        for from in OperationState::ALL {
            for to in OperationState::ALL {
                if may_become(from, to) {
                    assert!(!from.is_final() && from != to);
                    allowed.push((from, to));
                }
            }
            // Whatever happens, it can end; and what has not ended can be interrupted.
            assert_eq!(may_become(from, Failed), !from.is_final());
            assert_eq!(may_become(from, Interrupted), !from.is_final() && from != Interrupted);
        }
        assert!(!may_become(Queued, Done) && !may_become(Cancelling, Running));
        assert!(may_become(Interrupted, Running) && may_become(Waiting, RolledBack));
        assert_eq!(allowed.len(), 25, "{allowed:?}");
    }
}
