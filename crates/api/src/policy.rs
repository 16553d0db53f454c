//! What the config says, as the API shows it.

use serde::{Deserialize, Serialize};

use crate::{error::ApiError, lease::LeaseTerms, mps::MpsPolicy, overrides::Override, timeslice::TimeslicePolicy};

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

impl Mode {
    /// As it is written in the config.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Unmanaged => "unmanaged",
            Self::Exclusive => "exclusive",
            Self::Mig => "mig",
            Self::Mps => "mps",
            Self::Timeslice => "timeslice",
        }
    }
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
    pub selectors: Vec<String>,
    /// Mode.
    pub mode: Mode,
    /// Layout for mode `mig`: a name, entries in canonical text, or `dynamic`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layout: Option<Vec<String>>,
    /// How clients of MPS share what it claims, in mode `mps`; in mode `mig`, where it is for MIG devices
    /// that the layout shares, when the file says it.
    #[serde(default, rename = "mps_policy", skip_serializing_if = "Option::is_none")]
    pub mps: Option<MpsPolicy>,
    /// How holders of the GPUs that it claims are time-sliced, in mode `timeslice`.
    #[serde(default, rename = "timeslice_policy", skip_serializing_if = "Option::is_none")]
    pub timeslice: Option<TimeslicePolicy>,
    /// How its GPUs are leased; absent in mode `unmanaged`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease: Option<LeaseTerms>,
    /// Indexes of the GPUs that it claims now.
    pub claims: Vec<u32>,
}

/// A setting that the file has changed and that takes effect with the next start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct PendingRestart {
    /// With its table: `driver.read_ms`.
    pub key: String,
    /// Effective value, as TOML; `None` when it is not set.
    #[serde(rename = "effective")]
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
    /// Settings that the file has changed since gpushd started, and that take effect at its next start.
    #[serde(default, rename = "pending_settings")]
    pub pending_restart: Vec<PendingRestart>,
    /// Why the last reload was refused, so that what the file said before is in force.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trouble: Option<ApiError>,
    /// Generation of what is wanted, as in [`crate::Overrides`].
    #[serde(default)]
    pub generation: u64,
}

/// What is wanted of a GPU by a config, without overrides.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct WantedView {
    /// Mode.
    pub mode: Mode,
    /// Rule that claims it; `None` when none does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rule: Option<String>,
    /// Layout, in mode `mig`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layout: Option<Vec<String>>,
    /// How clients of MPS share it, as in [`RuleView`].
    #[serde(default, rename = "mps_policy", skip_serializing_if = "Option::is_none")]
    pub mps: Option<MpsPolicy>,
    /// How holders are time-sliced, as in [`RuleView`].
    #[serde(default, rename = "timeslice_policy", skip_serializing_if = "Option::is_none")]
    pub timeslice: Option<TimeslicePolicy>,
    /// How it is leased, as in [`RuleView`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease: Option<LeaseTerms>,
}

/// One GPU: what the file says, what is in force, what stands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct GpuDiff {
    /// Index.
    pub gpu: u32,
    /// UUID.
    pub gpu_uuid: String,
    /// By the file; `None` while the file has errors.
    #[serde(default, rename = "file_policy", skip_serializing_if = "Option::is_none")]
    pub in_file: Option<WantedView>,
    /// By the effective config.
    #[serde(rename = "effective_policy")]
    pub in_force: WantedView,
    /// What stands above it.
    #[serde(default, rename = "override", skip_serializing_if = "Option::is_none")]
    pub overridden: Option<Override>,
    /// Instances that the GPU holds, `3g.40gb@4`; `None` with MIG mode off or when it can't be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stands: Option<Vec<String>>,
    /// How that differs from what is wanted, as in [`crate::Gpu`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub drift: Vec<String>,
}

/// A setting that differs between the file and what is in force.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SettingDiff {
    /// With its table: `log.level`.
    pub key: String,
    /// Effective value, as TOML; `None` when it is not set.
    #[serde(rename = "effective")]
    pub in_force: Option<String>,
    /// Value in the file, or its default, as TOML; `None` when it is not set.
    pub in_file: Option<String>,
    /// Whether it takes effect only with the next start of gpushd.
    #[serde(default)]
    pub restart: bool,
}

/// `GET /v1/config/diff`: the file as a reload would read it now, the config in force, what stands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ConfigDiff {
    /// The file; `None` when there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// Why a reload would be refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trouble: Option<ApiError>,
    /// Settings that differ.
    pub settings: Vec<SettingDiff>,
    /// GPUs, by index.
    #[serde(rename = "gpu_diffs")]
    pub gpus: Vec<GpuDiff>,
    /// GPUs of which nobody knows whether they are as wanted, and why; the whole host's where there is no
    /// driver.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unseen: Vec<ApiError>,
    /// Generation of what is wanted, as in [`crate::Overrides`].
    pub generation: u64,
}

/// `POST /v1/config/reload`: reads the file again, as SIGHUP does.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ReloadRequest {
    /// Whether overrides end whose rule the file changes. Without it such a file is refused.
    #[serde(default)]
    pub clear_overrides: bool,
}

/// What a reload changed. Nothing is reshaped by it, unless `auto_reconcile` says so.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Reloaded {
    /// The file; `None` when there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// Settings that were changed; `effective` is the value from before.
    pub settings: Vec<SettingDiff>,
    /// GPUs whose policy changed; `effective_policy` is the one from before.
    #[serde(rename = "gpu_diffs")]
    pub gpus: Vec<GpuDiff>,
    /// Overrides that it ended.
    #[serde(rename = "ended_overrides")]
    pub ended: Vec<Override>,
    /// What its rules want of GPUs that these can't give, one sentence each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub findings: Vec<String>,
    /// Generation of what is wanted, as in [`crate::Overrides`].
    pub generation: u64,
}
