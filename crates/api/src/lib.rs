//! Wire types of the gpush API: what `gpushd` says and its clients read.
//!
//! Nothing here does anything: serde types, error codes and their exit statuses, and which
//! characters of foreign text are shown. `gpush-core`
//! reads the same types, so that a saved answer of the agent (`gpushctl gpu list --json`) is a
//! state that can be planned on offline. JSON made from them is stable within `v1`: fields are
//! added, never renamed or removed.

pub mod error;
pub mod gpu;
pub mod health;
pub mod operation;
pub mod plan;
pub mod policy;
pub mod text;

pub use error::{ApiError, Code};
pub use gpu::{
    Architecture, ComputeInstance, ComputeProfile, Engines, Gpu, GpuInstance, GpuProfile, GpuState, Memory, Mig,
    Placement, Process, ProcessKind, USERS_UNKNOWN,
};
pub use health::{Driver, Health, HealthStatus, LayoutsAtStart, Version};
pub use operation::{Actor, Operation, OperationState, OperationSummary, StepState};
pub use plan::{
    ApplyRequest, Blocker, GpuLayout, GpuPlan, Holder, LayoutSource, Peer, PlanRequest, Plans, Refusal, Reset, Step,
};
pub use policy::{ConfigView, Mode, NamedLayout, PendingRestart, RuleView};
