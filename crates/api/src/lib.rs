//! Wire types of the gpush API: the JSON that `gpushd` and its clients exchange.
//!
//! The crate contains serde types, error codes with their exit statuses, and the rule that decides
//! which characters of foreign text are shown. `gpush-core` uses the same types, so that offline
//! plans can read the host from a saved answer of gpushd (`gpushctl gpu list --json`). Within `v1`,
//! JSON fields are added, but never renamed or removed.

pub mod audit;
pub mod compute;
pub mod device;
pub mod error;
pub mod event;
pub mod gpu;
pub mod health;
pub mod lease;
pub mod mps;
pub mod operation;
pub mod overrides;
pub mod plan;
pub mod policy;
pub mod process;
pub mod refusal;
pub mod slurm;
pub mod step;
pub mod text;
pub mod timeslice;
mod timestamp;

pub use audit::AuditRecord;
pub use compute::{ComputeMode, TimesliceLevel};
pub use device::{DeviceGrant, DeviceUse, MigDevice};
pub use error::{ApiError, Code, Remedy};
pub use event::*;
pub use gpu::{
    Architecture, ComputeInstance, ComputeProfile, Cordon, Engines, Gpu, GpuInstance, GpuProfile, GpuState,
    LOST_GPU_HINT, Memory, Mig, NvLink, Placement, Process, ProcessKind, Sensors, USERS_UNKNOWN,
};
pub use health::{
    Driver, Health, HealthStatus, LayoutsAtStart, Maintenance, MaintenanceRequest, MaintenanceState, ReasonRequest,
    Recovered, Version,
};
pub use lease::{
    AtLeaseEnd, BindTo, EndReason, Enforcement, LONGEST_LEASE_S, Lease, LeaseBinding, LeaseGrant, LeaseHolder, LeaseId,
    LeaseKind, LeaseMember, LeaseOwner, LeaseQueuePosition, LeaseRenewRequest, LeaseRequest, LeaseRequirement,
    LeaseRevocation, LeaseRevokeRequest, LeaseShare, LeaseState, LeaseTerms, LeaseUse, LeaseWait, MOST_MEMBERS,
    MemberShare, NotALeaseId,
};
pub use mps::{
    BadValue, MPS_CLIENTS, MemoryLimit, MpsActionRequest, MpsClient, MpsComputeMode, MpsDaemon, MpsLog, MpsLogs,
    MpsPolicy, MpsServer, MpsServerState, MpsSetRequest, MpsSetResponse, MpsSettings, MpsState, MpsUsers, Percentage,
    Priority,
};
pub use operation::{Actor, Operation, OperationState, OperationSummary, StepState};
pub use overrides::{Override, OverrideEnded, Overrides};
pub use plan::{ApplyRequest, GpuLayout, GpuPlan, LayoutSource, PlanRequest, Plans};
pub use policy::{
    ConfigDiff, ConfigView, DesiredView, GpuDiff, Mode, MpsScope, NamedLayout, PendingRestart, ReloadRequest, Reloaded,
    RuleView, SettingDiff,
};
pub use process::{GpuProcess, GpuProcesses, UnknownProcesses, UnleasedPolicy};
pub use refusal::{Blocker, Holder, Refusal};
pub use slurm::{
    SlurmDevice, SlurmGpu, SlurmJobEnd, SlurmJobEnded, SlurmJobStart, SlurmJobStarted, SlurmLeftover, SlurmOutcome,
};
pub use step::{InstanceStep, MigModeStep, MpsStep, Peer, Phase, Reset, Step, TimesliceStep};
pub use timeslice::{TimeslicePolicy, TimesliceState, TimesliceView};
pub use timestamp::whole_second;
