//! Who is answering, and whether it is well.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::operation::Actor;

/// The driver behind the agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Driver {
    /// Driver version, such as `550.163.01`.
    pub version: String,
    /// NVML version.
    pub nvml: String,
    /// CUDA version that the driver supports, `12.4`.
    pub cuda: String,
    /// Path of the library that was loaded.
    pub library: String,
    /// Whether the library is gpush's simulator.
    pub simulated: bool,
}

/// `GET /v1/version`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Version {
    /// Version of gpushd.
    pub agent: String,
    /// API version, `v1`.
    pub api: String,
    /// Driver, when there is one.
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
    /// The agent is up, something behind it is not: see `errors`.
    Degraded,
}

/// How far the layouts are that gpushd applies by itself after each boot.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct LayoutsAtStart {
    /// Whether none is due any more.
    pub complete: bool,
    /// GPUs, by UUID, on which none is due: they have it, it was refused for good, or no rule
    /// claims them.
    pub settled: Vec<String>,
}

/// A host in maintenance: the agent has no handle of the driver open, so that GPUs can be reset and
/// the driver be replaced. It shows what it saw last and changes nothing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Maintenance {
    /// Why, as it was said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Who entered it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by: Option<Actor>,
    /// Since when.
    #[serde(with = "crate::timestamp")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub since: Timestamp,
}

/// Body of the requests that an administrator gives a reason for: cordon, uncordon, maintenance,
/// recover.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct WhyRequest {
    /// Why, for whoever comes across it; at most 500 characters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// Answer of `POST /v1/maintenance/enter` and `/leave`: the state after.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct MaintenanceState {
    /// Absent outside of maintenance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub maintenance: Option<Maintenance>,
}

/// Answer of `POST /v1/recover`: what was lost, and is held against no GPU any more.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Recovered {
    /// What was wrong with the database; absent when nothing was lost.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cause: Option<String>,
    /// Where the damaged one is kept, if there was one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kept: Option<String>,
    /// GPUs that were held for it, by UUID.
    #[serde(default)]
    pub released: Vec<String>,
}

/// `GET /v1/health`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Health {
    /// Overall.
    pub status: HealthStatus,
    /// What is wrong, each with its next step.
    pub errors: Vec<crate::ApiError>,
    /// Whether GPUs are simulated.
    pub simulated: bool,
    /// Who has taken the host's GPUs out of the agent's hands; absent when nobody has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub maintenance: Option<Maintenance>,
    /// Number of GPUs that the driver shows.
    pub gpu_count: u32,
    /// How far the layouts of this boot are; absent when it can't be told which boot this is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layouts_at_start: Option<LayoutsAtStart>,
    /// Pid of the agent.
    pub pid: u32,
}
