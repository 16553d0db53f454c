//! Operations: the execution of plans.
//!
//! ```text
//!     ┌──────────┬────────────────────────────────────► not_started   nothing was started or changed
//!  queued ──► waiting (for idle instances)        ┌──► done          as planned, verified
//!     │          │                                │
//!     └──────────┴──► running ────────────────────┼──► rolled_back   as before, verified
//!                        │                        │
//!                        └──► cancelling ─────────┤
//!                                                 └──► failed        at least one GPU is neither:
//!                                                                    degraded, unknown or lost
//!  gpushd ended in one of these four states ──► interrupted ──► running, cancelling, or a final state
//! ```

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::{
    actor::Actor,
    error::ApiError,
    ids::{GpuIndex, GpuUuid},
    plan::{GpuLayout, GpuPlan},
};

/// State of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum OperationState {
    /// Accepted. Another operation has its GPUs.
    Queued,
    /// Accepted. Instances that are in use block the operation.
    Waiting,
    /// Its steps are being executed.
    Running,
    /// Its steps are being rolled back, because one failed or a user cancelled the operation.
    Cancelling,
    /// gpushd ended before the operation did. The next gpushd recovers the operation.
    Interrupted,
    /// Every GPU is as planned. gpushd has verified this on the hardware.
    Done,
    /// The operation ended before its first step, because it was cancelled, waited too long or could not begin. It has
    /// changed nothing.
    NotStarted,
    /// A step failed, or the operation was cancelled. Every GPU is as it was before.
    RolledBack,
    /// A step failed. At least one GPU is neither as planned nor as before.
    Failed,
}

impl std::fmt::Display for OperationState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl OperationState {
    /// All states.
    pub const ALL: [Self; 9] = [
        Self::Queued,
        Self::Waiting,
        Self::Running,
        Self::Cancelling,
        Self::Interrupted,
        Self::Done,
        Self::NotStarted,
        Self::RolledBack,
        Self::Failed,
    ];

    /// Returns whether the operation has ended.
    #[must_use]
    pub fn is_final(self) -> bool {
        match self {
            Self::Queued | Self::Waiting | Self::Running | Self::Cancelling | Self::Interrupted => false,
            Self::Done | Self::NotStarted | Self::RolledBack | Self::Failed => true,
        }
    }

    /// Returns the name in JSON and in messages.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Queued => "queued",
            Self::Waiting => "waiting",
            Self::Running => "running",
            Self::Cancelling => "cancelling",
            Self::Interrupted => "interrupted",
            Self::Done => "done",
            Self::NotStarted => "not_started",
            Self::RolledBack => "rolled_back",
            Self::Failed => "failed",
        }
    }
}

/// Progress of one GPU within an operation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct StepState {
    /// Index of the GPU.
    #[cfg_attr(feature = "openapi", schema(value_type = u32))]
    pub gpu: GpuIndex,
    /// Number of steps that were executed and verified.
    pub done: u32,
    /// Number of steps of the plan.
    pub total: u32,
    /// Description of the step in progress.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub doing: Option<String>,
    /// Whether the steps on this GPU are being, or were, rolled back.
    #[serde(default)]
    pub rolling_back: bool,
    /// Whether the state before the operation was restored on this GPU and read back.
    #[serde(default)]
    pub restored: bool,
    /// Error on this GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<ApiError>,
}

/// Returns the value of `begun` for answers of an older gpushd, which does not report that field.
fn begun() -> bool {
    true
}

/// An operation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Operation {
    /// Operation id, `op-<number>`. Ids are unique within one state directory.
    pub id: String,
    /// Number that increases with each change of the operation, for
    /// `GET /v1/operations/{id}?after=N&wait_ms=M`.
    pub revision: u64,
    /// Whether the operation has begun. Until it begins, the operation has changed nothing, and its
    /// plans contain only the desired layouts.
    #[serde(default = "begun")]
    pub begun: bool,
    /// Action, such as `mig.apply`.
    pub kind: String,
    /// State of the operation.
    pub state: OperationState,
    /// User who requested the operation.
    pub by: Actor,
    /// Time of the request.
    #[serde(with = "crate::timestamp")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub created_at: Timestamp,
    /// Time of the end.
    #[serde(default, with = "crate::timestamp::optional", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, format = DateTime))]
    pub ended_at: Option<Timestamp>,
    /// Reason that the user gave.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Plans, one for each GPU.
    pub plans: Vec<GpuPlan>,
    /// MIG mode and layout before the operation, one entry for each GPU that supports MIG; empty until the operation
    /// begins.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub layouts_before: Vec<GpuLayout>,
    /// Progress, one entry for each GPU, in the order of `plans`.
    pub progress: Vec<StepState>,
    /// What the operation waits for before it begins, one sentence each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub waits_for: Vec<String>,
    /// Other events, oldest first, such as a restart of gpushd, or a wait that has ended.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
    /// Error of the whole operation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<ApiError>,
}

/// An operation in a list, with fewer fields than `GET /v1/operations/{id}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct OperationSummary {
    /// Operation id. All fields have the same meaning as in [`Operation`].
    pub id: String,
    /// Number that increases with each change.
    pub revision: u64,
    /// Action, such as `mig.apply`.
    pub kind: String,
    /// State of the operation.
    pub state: OperationState,
    /// User who requested the operation.
    pub by: Actor,
    /// Time of the request.
    #[serde(with = "crate::timestamp")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub created_at: Timestamp,
    /// Time of the end.
    #[serde(default, with = "crate::timestamp::optional", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, format = DateTime))]
    pub ended_at: Option<Timestamp>,
    /// Indexes of the operation's GPUs at the time of the request.
    #[serde(rename = "gpu_indexes")]
    #[cfg_attr(feature = "openapi", schema(value_type = Vec<u32>))]
    pub gpus: Vec<GpuIndex>,
    /// UUIDs of the operation's GPUs, in the same order.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(value_type = Vec<String>))]
    pub gpu_uuids: Vec<GpuUuid>,
    /// Whether the operation has begun. Until it begins, the operation has changed nothing.
    #[serde(default = "begun")]
    pub begun: bool,
    /// Number of steps that were executed and verified, on all GPUs together.
    pub done: u32,
    /// Number of steps of all plans.
    pub total: u32,
    /// Error of the whole operation, without its causes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<ApiError>,
}

impl From<&Operation> for OperationSummary {
    fn from(one: &Operation) -> Self {
        Self {
            id: one.id.clone(),
            revision: one.revision,
            kind: one.kind.clone(),
            state: one.state,
            by: one.by.clone(),
            created_at: one.created_at,
            ended_at: one.ended_at,
            gpus: one.progress.iter().map(|progress| progress.gpu).collect(),
            gpu_uuids: one.plans.iter().map(|plan| plan.gpu_uuid.clone()).collect(),
            begun: one.begun,
            done: one.progress.iter().map(|progress| progress.done).sum(),
            total: one.progress.iter().map(|progress| progress.total).sum(),
            // A list shows only the message, because one error may contain several causes and the
            // errors of several GPUs.
            error: one.error.as_ref().map(|error| {
                let (causes, errors) = (Vec::new(), Box::default());
                ApiError { causes, errors, ..error.clone() }
            }),
        }
    }
}
