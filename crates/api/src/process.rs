//! Processes on GPUs, with their users, and whether they have a lease.

use serde::{Deserialize, Serialize};

use crate::{
    error::ApiError,
    ids::{GpuIndex, GpuUuid, TargetUuid},
};

/// Kind of GPU use. The driver has one list of processes for each kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum ProcessKind {
    /// The process has a CUDA context.
    Compute,
    /// The process has a graphics context.
    Graphics,
    /// The process is a client of an MPS server.
    MpsClient,
}

/// A process that uses a GPU or MIG device. Fields that the caller may not see are absent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Process {
    /// Process id in the host's pid namespace.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// User id of the process.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    /// User name; absent if the caller may not see it, or if the uid has no name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Command line, at most 256 characters. Only the owner of the process and administrators see
    /// it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
    /// Kind of context.
    pub kind: ProcessKind,
    /// Memory in use on this GPU or MIG device, in MiB; absent if the driver does not report it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_mib: Option<u64>,
    /// Whether gpushd could not find out the user of the process. Such a process may belong to the caller.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unidentified: bool,
}

/// What gpushd does about an unleased process: a process without a lease on a target that requires one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum UnleasedPolicy {
    /// Shows the process.
    #[default]
    Report,
    /// Shows the process, and logs a warning.
    Warn,
    /// Shows the process, logs a warning, and ends the process if its user has no lease on the
    /// target: with SIGTERM, and with SIGKILL after `processes.grace`.
    End,
}

/// What gpushd did about an unleased process. Events contain only the steps `found`, `asked` and `killed`. Audit records
/// contain only `asked` and `killed`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum UnleasedStep {
    /// gpushd has found the process on a device that a lease of another user holds alone, or that Slurm owns.
    Found,
    /// gpushd does not end the process.
    Exempt,
    /// gpushd logged a warning about the process.
    Warned,
    /// gpushd sent SIGTERM, which asks the process to end.
    Asked,
    /// The process did not end in time, and gpushd killed it with SIGKILL.
    Killed,
}

impl UnleasedStep {
    /// Returns the text for the log and the audit trail.
    #[must_use]
    pub fn log_text(self) -> &'static str {
        match self {
            Self::Found => "found",
            Self::Exempt => "not ended",
            Self::Warned => "warned about",
            Self::Asked => "asked to end",
            Self::Killed => "killed",
        }
    }
}

/// A process on a GPU. A process on several GPUs or MIG devices has one entry for each of them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct GpuProcess {
    /// Index of the GPU.
    #[cfg_attr(feature = "openapi", schema(value_type = u32))]
    pub gpu: GpuIndex,
    /// UUID of the GPU.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub gpu_uuid: GpuUuid,
    /// MIG device, such as `2g.20gb@2`; absent for the whole GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// Process and its user.
    #[serde(flatten)]
    pub process: Process,
    /// If the uid of the process is a subordinate uid: the user who owns it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub account: Option<String>,
    /// Cgroup of the process. Only the owner of the process and administrators see `cgroup`,
    /// `unit`, `slurm_job` and `lease_id`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cgroup: Option<String>,
    /// systemd unit of the process, such as `jupyter.service` or `session-4.scope`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unit: Option<String>,
    /// Id of the process's Slurm job.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slurm_job: Option<u64>,
    /// For an MPS server: what it serves, such as `MPS server of GPU 4`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub serves: Option<String>,
    /// Lease with which the process runs, such as `L17`. Either the process is in the cgroup of the lease, or the
    /// environment of the process names the lease.
    #[serde(rename = "lease_id", default, skip_serializing_if = "Option::is_none")]
    pub lease: Option<String>,
    /// Whether it is not certain that the process belongs to `lease_id`. For example, neither the cgroup nor the
    /// environment of the process identifies a lease; the process then counts for the oldest lease of its user on the
    /// target.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unattributed: bool,
    /// Whether the config allows the process to run without a lease.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub allowed: bool,
    /// Why the process is unleased: it needs a lease and has none. Absent for other processes, and if gpushd does not
    /// check the GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unleased: Option<String>,
    /// What gpushd did about the unleased process; absent if it has done nothing yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unleased_step: Option<UnleasedStep>,
    /// `unleased_step` as text, with the reason or the time left.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unleased_action: Option<String>,
}

/// A process on a GPU or MIG device that it must not use. Either a lease of another user holds the device alone, or Slurm
/// owns the GPU and the process belongs to no Slurm job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct UnleasedProcess {
    /// UUID of the GPU or MIG device.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub target: TargetUuid,
    /// MIG device, such as `2g.20gb@2`; absent for the whole GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// Process and its user.
    #[serde(flatten)]
    pub process: Process,
    /// Why the process must not use the device.
    pub why: String,
}

/// Answer of `GET /v1/processes`: all processes that the driver lists, by GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct GpuProcesses {
    /// What gpushd does about unleased processes.
    pub policy: UnleasedPolicy,
    /// Processes, by GPU.
    #[serde(rename = "gpu_processes")]
    pub processes: Vec<GpuProcess>,
    /// GPUs whose processes are not known.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unknown: Vec<UnknownProcesses>,
}

/// A GPU whose processes are not known.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct UnknownProcesses {
    /// Index of the GPU.
    #[cfg_attr(feature = "openapi", schema(value_type = u32))]
    pub gpu: GpuIndex,
    /// UUID of the GPU.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub gpu_uuid: GpuUuid,
    /// Why its processes are not known.
    pub error: ApiError,
}
