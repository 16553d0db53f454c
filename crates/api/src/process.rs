//! Processes on GPUs: whose they are, and whether they belong to anybody who was given a share.

use serde::{Deserialize, Serialize};

use crate::{error::ApiError, gpu::Process};

/// What is done about a process that belongs to nobody who was given a share.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum StrayPolicy {
    /// It is shown.
    #[default]
    Report,
    /// And the log warns of it.
    Warn,
    /// And it is ended: SIGTERM, a while to obey, SIGKILL.
    End,
}

/// A process on a GPU, once a GPU or MIG device that it is on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct GpuProcess {
    /// Index of the GPU.
    pub gpu: u32,
    /// UUID of the GPU.
    pub gpu_uuid: String,
    /// The MIG device in words, `2g.20gb@2`; `None` for the GPU as a whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// Who it is.
    #[serde(flatten)]
    pub process: Process,
    /// Its cgroup, for its owner and admins.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cgroup: Option<String>,
    /// Systemd unit that it runs in: `jupyter.service`, `session-4.scope`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unit: Option<String>,
    /// Slurm job that it belongs to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slurm_job: Option<u64>,
    /// What it serves, where it is an MPS server: `MPS server of GPU 4`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub serves: Option<String>,
    /// The lease of its user that it runs with, `L17`: by its cgroup, or named in its environment.
    #[serde(rename = "lease_id", default, skip_serializing_if = "Option::is_none")]
    pub lease: Option<String>,
    /// Whether neither its cgroup nor its environment tells the lease. It then counts for the oldest lease of its user.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unattributed: bool,
    /// Whether the config allows it although it has no share.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub allowed: bool,
    /// Why it is taken for a stray; `None` for those that belong there, and for those of which it is not
    /// asked: on GPUs that no rule gives shares of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stray: Option<String>,
    /// What gpushd did about a stray, or why it does nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stray_action: Option<String>,
}

/// `GET /v1/processes`: all that the driver lists, by GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct GpuProcesses {
    /// What is done about strays.
    pub policy: StrayPolicy,
    /// The processes.
    #[serde(rename = "gpu_processes")]
    pub processes: Vec<GpuProcess>,
    /// GPUs whose processes are not known, and why.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unseen: Vec<ApiError>,
}
