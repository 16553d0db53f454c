//! Versions, health, maintenance, and the recovery from a lost database.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::{actor::Actor, ids::GpuUuid};

/// The driver that gpushd uses.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Driver {
    /// Driver version, such as `550.163.01`.
    pub version: String,
    /// NVML version.
    pub nvml: String,
    /// Newest CUDA version that the driver supports, such as `12.4`.
    pub cuda: String,
    /// Path of the loaded NVML library.
    pub library: String,
    /// Whether the library is gpush's simulator.
    pub simulated: bool,
    /// Whether the driver can limit the memory of a cgroup, as drivers since 615 can. gpushd does not use it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub memory_limits: bool,
}

/// Answer of `GET /v1/version`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Version {
    /// Version of gpushd.
    pub agent: String,
    /// API version, `v1`.
    pub api: String,
    /// Driver that gpushd uses; absent during maintenance, and if there is no driver.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub driver: Option<Driver>,
}

/// Overall health.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum HealthStatus {
    /// Everything works.
    Ok,
    /// gpushd runs, but something does not work, or the host is in maintenance: see `errors`.
    Degraded,
}

/// Progress of the layouts that gpushd applies at its first start after each boot.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct LayoutsAtStart {
    /// Whether all GPUs are settled.
    pub complete: bool,
    /// UUIDs of the settled GPUs. A GPU is settled if its layout is applied, was refused, or failed too often, or if no
    /// rule requires a layout. A GPU is also settled if a caller changed it or cancelled the attempt. gpushd makes no
    /// further attempt before the next boot, except on the GPUs in `waiting`.
    #[cfg_attr(feature = "openapi", schema(value_type = Vec<String>))]
    pub settled: Vec<GpuUuid>,
    /// UUIDs of the settled GPUs that are still in use, such as by a monitor. gpushd tries to apply their layouts every
    /// 30 s.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "openapi", schema(value_type = Vec<String>))]
    pub waiting: Vec<GpuUuid>,
}

/// Maintenance of the host. gpushd has no open driver handle, so that GPUs can be reset and the
/// driver can be replaced. Meanwhile, gpushd shows its last readings and changes nothing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Maintenance {
    /// Reason from the request that started the maintenance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// User who started the maintenance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by: Option<Actor>,
    /// Start of the maintenance.
    #[serde(with = "crate::timestamp")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub since: Timestamp,
}

/// Body of a request that takes a reason: cordon, uncordon, recover.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ReasonRequest {
    /// Reason for the request, at most 500 characters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// Body of `POST /v1/maintenance/enter` and `/leave`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct MaintenanceRequest {
    /// Reason for the request, at most 500 characters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// UUIDs of the GPUs that the caller resets during the maintenance. If the list is empty, every lease on the host
    /// prevents the maintenance. Otherwise, only leases on these GPUs prevent it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "openapi", schema(value_type = Vec<String>))]
    pub gpu_uuids: Vec<GpuUuid>,
}

/// Answer of `POST /v1/maintenance/enter` and `/leave`: the state after the request.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct MaintenanceState {
    /// Whether the host is in maintenance.
    pub in_maintenance: bool,
    /// Maintenance of the host; absent if the host is not in maintenance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub maintenance: Option<Maintenance>,
}

impl From<Option<Maintenance>> for MaintenanceState {
    fn from(maintenance: Option<Maintenance>) -> Self {
        Self { in_maintenance: maintenance.is_some(), maintenance }
    }
}

/// Answer of `POST /v1/recover`: the loss of data that the administrator accepted.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Recovered {
    /// What was wrong with the database; absent if no data was lost.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cause: Option<String>,
    /// Path of the damaged database, if gpushd kept it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kept: Option<String>,
    /// UUIDs of the GPUs that left the state `held`.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(value_type = Vec<String>))]
    pub released: Vec<GpuUuid>,
}

/// How gpushd treats a failure of a background task.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum TaskKind {
    /// Runs until gpushd stops. gpushd restarts the task; a second failure within a minute ends gpushd.
    Service,
    /// Runs for one object, such as a lease. gpushd restarts the task; a second failure for the same object within a
    /// minute ends gpushd.
    PerObject,
    /// Runs until gpushd stops. gpushd cannot restart the task, so a failure ends gpushd.
    Final,
    /// Runs once, for example for one request. A failure ends only the request.
    OneShot,
}

/// The background tasks with one name, and their failures since gpushd started.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct TaskHealth {
    /// Name, such as `scheduler`.
    pub name: String,
    /// How gpushd treats a failure.
    pub kind: TaskKind,
    /// Number of failures.
    pub failures: u64,
    /// Number of restarts after a failure.
    pub restarts: u64,
    /// Time of the last failure; absent if there is none.
    #[serde(default, with = "crate::timestamp::optional", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, format = DateTime))]
    pub failed_at: Option<Timestamp>,
    /// Description of the last failure, at most 512 bytes. Only administrators see it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
}

/// Answer of `GET /v1/health`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Health {
    /// Overall status.
    pub status: HealthStatus,
    /// Problems, each with a hint about what to do.
    pub errors: Vec<crate::ApiError>,
    /// Whether the GPUs are simulated.
    pub simulated: bool,
    /// Maintenance of the host; absent if the host is not in maintenance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub maintenance: Option<Maintenance>,
    /// Number of GPUs that the driver lists.
    pub gpu_count: u32,
    /// Progress of the layouts of this boot; absent if gpushd does not know the boot id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layouts_at_start: Option<LayoutsAtStart>,
    /// Whether the config file has changed since gpushd loaded it. `gpushctl apply` loads the file.
    #[serde(default)]
    pub config_file_changed: bool,
    /// Process id of gpushd.
    pub pid: u32,
    /// The background tasks of gpushd.
    #[serde(default)]
    pub tasks: Vec<TaskHealth>,
}
