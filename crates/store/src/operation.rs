//! The journal: intent, previous state and outcome of operations.
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
//! `queued` and `waiting` cannot become `done`. An operation that was queued or waiting when its agent ended
//! may stay so, because none of it had begun.
//!
//! An operation runs only after its intent is on disk: the whole plan and the previous instances, in one
//! transaction before the first driver call. Recovery reads intent and hardware, never marks of single steps;
//! [`crate::Tx::progress`] is for people. An operation is changed only by the agent that executes it, and after
//! a restart by the one that recovers it.

use std::fmt;

use gpush_api::{Actor, ApiError, GpuPlan, Mig, OperationState, StepState};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::{
    error::StoreError,
    record::{Columns, Record},
};

/// Number of an operation, unique within a state directory. Shown as `op-<number>`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct OperationId(pub u64);

impl fmt::Display for OperationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "op-{}", self.0)
    }
}

/// Returns whether an operation may change from one state to another, as drawn in the module documentation.
#[must_use]
pub fn may_become(from: OperationState, to: OperationState) -> bool {
    use OperationState::{Cancelling, Done, Failed, Interrupted, Queued, RolledBack, Running, Waiting};
    match (from, to) {
        // Final states never change, and no state follows itself.
        (Done | RolledBack | Failed, _) => false,
        (_, Queued) => false,
        // After it has run, the recorded previous state must stay: no waiting and no new plan.
        (_, Waiting) => from == Queued,
        (_, Running) => matches!(from, Queued | Waiting | Interrupted),
        (_, Cancelling | Interrupted) => from != to,
        // Before it runs nothing is changed, so it can be neither done nor failed.
        (_, Done) => matches!(from, Running | Cancelling | Interrupted),
        (_, RolledBack | Failed) => true,
    }
}

/// The plan for one GPU, and its previous state.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GpuIntent {
    /// MIG mode and instances before, as read; profiles and processes may be missing. `None` on a part without
    /// MIG, for which MIG steps are never planned.
    pub before: Option<Mig>,
    /// The plan: UUID of the GPU, target layout, change of MIG mode, steps, kept instances.
    pub plan: GpuPlan,
}

/// Everything that recovery needs besides the hardware.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Intent {
    /// One a GPU.
    pub gpus: Vec<GpuIntent>,
    /// Other data for this kind of operation: services to stop, hooks, the request.
    #[serde(default)]
    pub more: serde_json::Value,
    /// Sequence number at which it was recorded as running; `None` while queued. The store sets it. Of two
    /// operations on one GPU, the later one began only after the earlier one had ended.
    #[serde(default)]
    pub begun: Option<u64>,
}

/// An operation to record.
#[derive(Debug, Clone, PartialEq)]
pub struct NewOperation {
    /// Its kind: `mig.apply`.
    pub kind: String,
    /// The caller.
    pub by: Actor,
    /// The caller's reason.
    pub reason: Option<String>,
    /// The plan as known now. A waiting operation gets a new plan when it starts.
    pub intent: Intent,
    /// Progress of each GPU: no steps done, with the number of its steps.
    pub progress: Vec<StepState>,
}

/// An operation as recorded.
#[derive(Debug, Clone, PartialEq)]
pub struct OperationRecord {
    /// Id.
    pub id: OperationId,
    /// Sequence number of its last change.
    pub sequence: u64,
    /// Its kind.
    pub kind: String,
    /// Its stage.
    pub stage: OperationState,
    /// The caller.
    pub by: Actor,
    /// Boot of its last change.
    pub boot_id: String,
    /// Agent instance ([`crate::Store::instance`]) that last changed it.
    pub instance: String,
    /// Counts its changes, from 1.
    pub revision: u64,
    /// When it was accepted.
    pub created_at: Timestamp,
    /// When it ended.
    pub ended_at: Option<Timestamp>,
    /// The caller's reason.
    pub reason: Option<String>,
    /// For people: progress of each GPU.
    pub progress: Vec<StepState>,
    /// For people: other things that happened to it, oldest first.
    pub notes: Vec<String>,
    /// The error, if it failed.
    pub error: Option<ApiError>,
}

/// An action other than a driver call that must be undone, whatever the outcome: a stopped service, a started
/// unit. Recorded before the action.
#[derive(Debug, Clone, PartialEq)]
pub struct Undo {
    /// Order of the actions; they are undone in reverse order.
    pub position: u64,
    /// The action to undo it.
    pub what: serde_json::Value,
    /// Whether it was undone.
    pub undone: bool,
}

/// An operation that has not ended, or has undo entries left, with everything that recovery needs.
#[derive(Debug, Clone, PartialEq)]
pub struct UnfinishedOperation {
    /// The operation, at the stage in which the previous agent left it.
    pub record: OperationRecord,
    /// The previous state and the plan.
    pub intent: Intent,
    /// The remaining undo entries, in the order of the actions.
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
    fn state_transitions_match_the_drawing() {
        let mut allowed = Vec::new();
        for from in OperationState::ALL {
            for to in OperationState::ALL {
                if may_become(from, to) {
                    assert!(!from.is_final() && from != to);
                    allowed.push((from, to));
                }
            }
            // Every unfinished operation can fail or be interrupted.
            assert_eq!(may_become(from, Failed), !from.is_final());
            assert_eq!(may_become(from, Interrupted), !from.is_final() && from != Interrupted);
        }
        assert!(!may_become(Queued, Done) && !may_become(Cancelling, Running));
        assert!(may_become(Interrupted, Running) && may_become(Waiting, RolledBack));
        assert_eq!(allowed.len(), 25, "{allowed:?}");
    }
}
