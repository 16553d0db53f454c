//! What the config says, as the API shows it.

use serde::{Deserialize, Serialize};

/// How a GPU is shared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum Mode {
    /// Seen, never touched.
    #[default]
    Unmanaged,
    /// One holder at a time.
    Exclusive,
    /// Cut into MIG instances.
    Mig,
    /// Co-scheduled through MPS.
    Mps,
    /// Taking turns.
    Timeslice,
}

/// A layout of the config.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct NamedLayout {
    /// Name under `[layouts]`.
    pub name: String,
    /// Entries in canonical text.
    pub entries: Vec<String>,
}

/// A rule of the config.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct RuleView {
    /// Name, or `rule 2` by position.
    pub name: String,
    /// Selectors as written.
    pub gpus: Vec<String>,
    /// Mode.
    pub mode: Mode,
    /// Layout for mode `mig`: a name or entries, in canonical text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layout: Option<Vec<String>>,
    /// Indexes of the GPUs that it claims now.
    pub claims: Vec<u32>,
}

/// A setting that the file has changed and that takes effect with the next start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct PendingRestart {
    /// With its table: `driver.read_ms`.
    pub key: String,
    /// Value in force, as TOML; `None` when it is not set.
    pub in_force: Option<String>,
    /// Value in the file, or its default, as TOML; `None` when it is not set.
    pub in_file: Option<String>,
}

/// `GET /v1/config`: the config in force.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ConfigView {
    /// File that was read; `None` when built-in defaults are in force.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// Rules in order.
    pub rules: Vec<RuleView>,
    /// Named layouts by name.
    pub layouts: Vec<NamedLayout>,
    /// Whole effective config as TOML, defaults filled in.
    pub effective: String,
    /// Settings of which the file says something else since the agent started.
    #[serde(default)]
    pub pending_restart: Vec<PendingRestart>,
}
