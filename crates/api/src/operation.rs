//! Operations: plans being carried out.
//!
//! ```text
//!  queued ──► waiting (for idle instances)        ┌──► done          as planned, read back
//!     │          │                                │
//!     ├──────────┴──► running ────────────────────┼──► rolled_back   as before, read back; also when
//!     │          │       │                        │                  it ended before it began
//!     └──────────┴───────┴──► cancelling ─────────┤
//!                                                 └──► failed        at least one GPU is neither:
//!                                                                    degraded, unknown or lost
//!  the agent ended in any of these four ──► interrupted ──► running, cancelling, or an end
//! ```

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::{error::ApiError, plan::GpuPlan};

/// Who asked, by the kernel's word.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Actor {
    /// User id.
    pub uid: u32,
    /// User name, when it has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Process id at the time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
}

/// State of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum OperationState {
    /// Accepted; another operation has its GPUs.
    Queued,
    /// Accepted; instances in its way are in use.
    Waiting,
    /// Being carried out.
    Running,
    /// Being taken back: a step failed, or somebody cancelled it.
    Cancelling,
    /// gpushd ended in the middle of it; the next one takes it over.
    Interrupted,
    /// Every GPU is as planned, read back from the hardware.
    Done,
    /// Something failed, or it was cancelled; every GPU is as it was before.
    RolledBack,
    /// Something failed and at least one GPU is neither as planned nor as before.
    Failed,
}

impl std::fmt::Display for OperationState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl OperationState {
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

    /// As it is written in JSON and in sentences.
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

/// Progress of one GPU within an operation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct StepState {
    /// Index of the GPU.
    pub gpu: u32,
    /// Steps carried out and read back.
    pub done: u32,
    /// Steps in all: the plan's, and the switch of MIG mode where it has one.
    pub total: u32,
    /// Step in progress, in words.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub doing: Option<String>,
    /// Whether the steps of this GPU are being, or were, taken back.
    #[serde(default)]
    pub rolling_back: bool,
    /// What went wrong on this GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<ApiError>,
}

/// What agents say that do not tell it: theirs were not told apart.
fn begun() -> bool {
    true
}

/// An operation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Operation {
    /// `op-<number>`, unique in the life of the state directory.
    pub id: String,
    /// Another one after each change, for `GET /v1/operations/{id}?after=N&wait_ms=M`.
    pub revision: u64,
    /// Whether it was begun. Until then nothing of it is done, and its plans tell only what is wanted;
    /// one that ends without it has done nothing.
    #[serde(default = "begun")]
    pub begun: bool,
    /// What it does: `mig.apply`.
    pub kind: String,
    /// State.
    pub state: OperationState,
    /// Who asked.
    pub by: Actor,
    /// When it was asked for.
    #[serde(with = "crate::timestamp")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub created_at: Timestamp,
    /// When it ended.
    #[serde(default, with = "crate::timestamp::optional", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, format = DateTime))]
    pub ended_at: Option<Timestamp>,
    /// Why, in the words of whoever asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Plans, one a GPU.
    pub plans: Vec<GpuPlan>,
    /// Progress, one a GPU, in the order of `plans`.
    pub progress: Vec<StepState>,
    /// What it waits for before it can begin, one sentence each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub waits_for: Vec<String>,
    /// Other occurrences, oldest first: a restart of gpushd, what it waited for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
    /// What went wrong as a whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<ApiError>,
}

/// An operation in a list: `GET /v1/operations/{id}` has all of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct OperationSummary {
    /// As in [`Operation`], like all fields of the same name.
    pub id: String,
    /// Counts changes.
    pub revision: u64,
    /// What it does: `mig.apply`.
    pub kind: String,
    /// State.
    pub state: OperationState,
    /// Who asked.
    pub by: Actor,
    /// When it was asked for.
    #[serde(with = "crate::timestamp")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub created_at: Timestamp,
    /// When it ended.
    #[serde(default, with = "crate::timestamp::optional", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, format = DateTime))]
    pub ended_at: Option<Timestamp>,
    /// Indexes of its GPUs.
    pub gpus: Vec<u32>,
    /// Whether it began, as in [`Operation`].
    #[serde(default = "begun")]
    pub begun: bool,
    /// Steps carried out and read back, on all GPUs together.
    pub done: u32,
    /// Steps in all.
    pub total: u32,
    /// What went wrong as a whole, without its causes.
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
            begun: one.begun,
            done: one.progress.iter().map(|progress| progress.done).sum(),
            total: one.progress.iter().map(|progress| progress.total).sum(),
            // A list shows only the message: there may be several causes, and several errors for one GPU.
            error: one.error.as_ref().map(|error| {
                let (causes, errors) = (Vec::new(), Box::default());
                ApiError { causes, errors, ..error.clone() }
            }),
        }
    }
}
