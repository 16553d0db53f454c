//! The journal: intent, previous state and outcome of operations.
//!
//! ```text
//!     ┌──────────┬────────────────────────────────────► not_started   nothing of it has begun
//!  queued ──► waiting (for idle instances)        ┌──► done          as planned, read back
//!     │          │                                │
//!     └──────────┴──► running ────────────────────┼──► rolled_back   as before, read back
//!                        │                        │
//!                        └──► cancelling ─────────┤
//!                                                 └──► failed        neither: degraded or unknown
//!
//!  gpushd ended in any of these four ──► interrupted ──► running, cancelling, or an end
//! ```
//!
//! `queued` and `waiting` cannot become `done`. If gpushd ends while an operation is queued or waiting, the operation
//! may keep its state, because nothing of it has begun.
//!
//! An operation starts only when its intent is on disk. The intent contains the whole plan and the previous instances,
//! and is written in one transaction before the first driver call. Recovery reads only the intent and the hardware. It
//! does not read the progress of single steps ([`crate::Tx::progress`]), which is recorded only for display. Only the
//! gpushd that executes an operation, or recovers it after a restart, changes its record.

use std::fmt;

use gpush_api::{Actor, ApiError, GpuPlan, GpuUuid, Mig, OperationState, StepState};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

/// Number of an operation, unique within a state directory. Its text form is `op-<number>`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct OperationId(pub u64);

impl fmt::Display for OperationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "op-{}", self.0)
    }
}

/// Returns whether an operation may change from one state to another, as the figure in the module documentation shows.
#[must_use]
pub fn may_become(from: OperationState, to: OperationState) -> bool {
    use OperationState::{Cancelling, Done, Failed, Interrupted, NotStarted, Queued, RolledBack, Running, Waiting};
    match (from, to) {
        // Final states never change.
        (Done | NotStarted | RolledBack | Failed, _) => false,
        (_, Queued) => false,
        // An operation that has run must keep the recorded previous state of its GPUs. So it cannot
        // wait or get a new plan.
        (_, Waiting) => from == Queued,
        (_, Running) => matches!(from, Queued | Waiting | Interrupted),
        (_, Cancelling | Interrupted) => from != to,
        // An operation that has not run has changed nothing, so it cannot become done.
        (_, Done) => matches!(from, Running | Cancelling | Interrupted),
        (_, NotStarted) => matches!(from, Queued | Waiting),
        // An interrupted operation has begun. An operation that has not begun cannot be rolled back.
        (_, RolledBack) => !matches!(from, Queued | Waiting),
        (_, Failed) => true,
    }
}

/// The plan for one GPU, and its previous state.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GpuIntent {
    /// MIG mode and instances before the operation, as read; profiles and processes may be missing. `None` on a GPU
    /// without MIG, for which gpushd never plans MIG steps.
    pub before: Option<Mig>,
    /// The plan: UUID of the GPU, target layout, change of MIG mode, steps, kept instances.
    pub plan: GpuPlan,
}

/// Everything that recovery needs, except the state of the hardware.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Intent {
    /// One entry for each GPU.
    pub gpus: Vec<GpuIntent>,
    /// Other data for this kind of operation: services to stop, hooks, the request.
    #[serde(default)]
    pub more: serde_json::Value,
    /// Sequence number at which the operation was recorded as running; `None` while it is queued.
    /// The store sets this field. If two operations have the same GPU, the operation with the
    /// higher `begun` began only after the other operation had ended.
    #[serde(default)]
    pub begun: Option<u64>,
    /// Why the operation did not start, with the names of the processes that prevented the start. For administrators
    /// only: the operation's `error` does not name these processes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error_in_full: Option<ApiError>,
}

/// The parts of an intent that a list of operations shows.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct IntentSummary {
    /// Whether the operation has begun.
    pub begun: bool,
    /// UUIDs of the operation's GPUs.
    pub gpu_uuids: Vec<GpuUuid>,
}

/// An operation to record.
#[derive(Debug, Clone, PartialEq)]
pub struct NewOperation {
    /// Kind of the operation, such as `mig.apply`.
    pub kind: String,
    /// The caller.
    pub by: Actor,
    /// The caller's reason.
    pub reason: Option<String>,
    /// The current plan. A waiting operation gets a new plan when it starts.
    pub intent: Intent,
    /// Progress of each GPU: its number of steps, with 0 steps done.
    pub progress: Vec<StepState>,
}

/// An operation as recorded.
#[derive(Debug, Clone, PartialEq)]
pub struct OperationRecord {
    /// Id.
    pub id: OperationId,
    /// Sequence number of the last change.
    pub sequence: u64,
    /// Kind of the operation.
    pub kind: String,
    /// State of the operation.
    pub stage: OperationState,
    /// The caller.
    pub by: Actor,
    /// Boot of the last change.
    pub boot_id: String,
    /// The gpushd instance ([`crate::Store::instance`]) that made the last change.
    pub instance: String,
    /// Number of changes, starting at 1.
    pub revision: u64,
    /// Time at which the operation was accepted.
    pub created_at: Timestamp,
    /// Time at which the operation ended.
    pub ended_at: Option<Timestamp>,
    /// The caller's reason.
    pub reason: Option<String>,
    /// Progress of each GPU, for users.
    pub progress: Vec<StepState>,
    /// Events of the operation other than its steps, oldest first, for users.
    pub notes: Vec<String>,
    /// The error, if the operation failed.
    pub error: Option<ApiError>,
}

/// An action other than a driver call, such as stopping a service or starting a unit. gpushd
/// records the action before it executes the action. At the end of the operation, gpushd must undo
/// the action, after success and after failure.
#[derive(Debug, Clone, PartialEq)]
pub struct Undo {
    /// Position in the order of the actions. gpushd undoes actions in reverse order.
    pub position: u64,
    /// What gpushd must do to undo the action.
    pub what: serde_json::Value,
    /// Whether the action was undone.
    pub undone: bool,
}

/// An operation that has not ended or still has undo entries, with everything that recovery needs.
#[derive(Debug, Clone, PartialEq)]
pub struct UnfinishedOperation {
    /// The operation, in the state in which the previous gpushd left it.
    pub record: OperationRecord,
    /// The intent: previous state and plan.
    pub intent: Intent,
    /// The remaining undo entries, in the order of the actions.
    pub undo: Vec<Undo>,
}

#[cfg(test)]
mod tests {
    use gpush_api::OperationState::{
        self, Cancelling, Done, Failed, Interrupted, NotStarted, Queued, Running, Waiting,
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
        assert!(may_become(Interrupted, Running) && may_become(Waiting, NotStarted));
        assert_eq!(allowed.len(), 25, "{allowed:?}");
    }
}
