//! Who is answering, and whether it is well.

use serde::{Deserialize, Serialize};

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
    /// The agent is up, something behind it is not: see `causes`.
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

/// `GET /v1/health`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Health {
    /// Overall.
    pub status: HealthStatus,
    /// What is wrong, each with its way out.
    pub causes: Vec<crate::ApiError>,
    /// Whether GPUs are simulated.
    pub simulated: bool,
    /// Number of GPUs that the driver shows.
    pub gpus: u32,
    /// How far the layouts of this boot are; absent when it can't be told which boot this is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layouts_at_start: Option<LayoutsAtStart>,
    /// Pid of the agent.
    pub pid: u32,
}
