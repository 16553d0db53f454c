//! The config, as the API shows it.

use serde::{Deserialize, Serialize};

use crate::{
    error::ApiError,
    ids::{GpuIndex, GpuUuid},
    lease::{LeaseAccess, LeaseTerms},
    mode::Mode,
    mps::MpsPolicy,
    overrides::Override,
    pending::PendingChange,
    process::UnleasedPolicy,
    timeslice::TimeslicePolicy,
};

/// A named layout of the config.
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
    /// Name of the rule; by default its position, such as `rule 2`.
    pub name: String,
    /// Selectors, as written in the config.
    pub selectors: Vec<String>,
    /// Sharing mode.
    pub mode: Mode,
    /// Layout in mode `mig`: a name, entries in canonical text, or `dynamic`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layout: Option<Vec<String>>,
    /// MPS settings, in mode `mps`. In mode `mig`, the settings for MIG devices that the layout shares; absent if the
    /// file has none.
    #[serde(default, rename = "mps_policy", skip_serializing_if = "Option::is_none")]
    pub mps: Option<MpsPolicy>,
    /// Time-slicing settings, in mode `timeslice`.
    #[serde(default, rename = "timeslice_policy", skip_serializing_if = "Option::is_none")]
    pub timeslice: Option<TimeslicePolicy>,
    /// Lease settings; absent in mode `unmanaged`.
    #[serde(default, rename = "lease_terms", skip_serializing_if = "Option::is_none")]
    pub lease: Option<LeaseTerms>,
    /// Users who may lease the GPUs of the rule; absent if all users may.
    #[serde(default, rename = "lease_access", skip_serializing_if = "Option::is_none")]
    pub access: Option<LeaseAccess>,
    /// Indexes of the GPUs that the rule claims now.
    #[cfg_attr(feature = "openapi", schema(value_type = Vec<u32>))]
    pub claims: Vec<GpuIndex>,
}

/// A changed setting of the file that takes effect at the next start of gpushd.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct PendingRestart {
    /// Key with its table, such as `driver.library`.
    pub key: String,
    /// Effective value, as TOML; absent if it is not set.
    #[serde(rename = "effective")]
    pub in_force: Option<String>,
    /// Value in the file, or its default, as TOML; absent if it is not set.
    pub in_file: Option<String>,
}

/// Answer of `GET /v1/config`: the effective config.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ConfigView {
    /// Path of the config file; absent if the built-in defaults are effective.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// Rules, in order.
    pub rules: Vec<RuleView>,
    /// Named layouts, in the order of their names.
    pub layouts: Vec<NamedLayout>,
    /// What gpushd does about processes without a lease, where the rule requires leases.
    #[serde(default)]
    pub unleased: UnleasedPolicy,
    /// Whole effective config as TOML, with all defaults. For a user who is not an administrator, only rules, layouts and
    /// the quota of the user.
    pub effective: String,
    /// Changed settings of the file that take effect at the next start of gpushd.
    #[serde(default, rename = "pending_settings")]
    pub pending_restart: Vec<PendingRestart>,
    /// Why gpushd did not load the config file at its start or at the last reload. The previous config is then still effective.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trouble: Option<ApiError>,
    /// Generation of the desired state, as in [`crate::Overrides`].
    #[serde(default)]
    pub generation: u64,
}

/// What a config says about a GPU, without overrides.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct DesiredView {
    /// Sharing mode.
    pub mode: Mode,
    /// Rule that claims the GPU; absent if there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rule: Option<String>,
    /// Layout, in mode `mig`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layout: Option<Vec<String>>,
    /// MPS settings, as in [`RuleView`].
    #[serde(default, rename = "mps_policy", skip_serializing_if = "Option::is_none")]
    pub mps: Option<MpsPolicy>,
    /// Time-slicing settings, as in [`RuleView`].
    #[serde(default, rename = "timeslice_policy", skip_serializing_if = "Option::is_none")]
    pub timeslice: Option<TimeslicePolicy>,
    /// Lease settings, as in [`RuleView`].
    #[serde(default, rename = "lease_terms", skip_serializing_if = "Option::is_none")]
    pub lease: Option<LeaseTerms>,
    /// Users who may lease the GPU, as in [`RuleView`].
    #[serde(default, rename = "lease_access", skip_serializing_if = "Option::is_none")]
    pub access: Option<LeaseAccess>,
}

/// One GPU: what the file and the effective config say, and its actual state.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct GpuDiff {
    /// Index of the GPU.
    #[cfg_attr(feature = "openapi", schema(value_type = u32))]
    pub gpu: GpuIndex,
    /// UUID of the GPU.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub gpu_uuid: GpuUuid,
    /// What the file says; absent while the file has errors.
    #[serde(default, rename = "file_policy", skip_serializing_if = "Option::is_none")]
    pub in_file: Option<DesiredView>,
    /// What the effective config says.
    #[serde(rename = "effective_policy")]
    pub in_force: DesiredView,
    /// Active override.
    #[serde(default, rename = "override", skip_serializing_if = "Option::is_none")]
    pub overridden: Option<Override>,
    /// Actual instances, such as `3g.40gb@4`; absent if MIG mode is off or the GPU cannot be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stands: Option<Vec<String>>,
    /// Differences between the desired and the actual state, as in [`crate::Gpu`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub drift: Vec<String>,
    /// Changes that gpushd does not make yet because of leases, as in [`crate::Gpu`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pending: Vec<PendingChange>,
    /// Whether the actual state is known, so that `drift` is complete.
    pub drift_known: bool,
}

/// A setting that differs between the file and the effective config.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SettingDiff {
    /// Key with its table, such as `log.level`.
    pub key: String,
    /// Effective value, as TOML; absent if it is not set.
    #[serde(rename = "effective")]
    pub in_force: Option<String>,
    /// Value in the file, or its default, as TOML; absent if it is not set.
    pub in_file: Option<String>,
    /// Whether the setting takes effect only at the next start of gpushd.
    #[serde(default)]
    pub restart: bool,
}

/// Answer of `GET /v1/config/diff`: how the present file, the effective config and the GPUs differ.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ConfigDiff {
    /// Path of the config file; absent if there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// Why a reload would fail.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trouble: Option<ApiError>,
    /// Settings that differ.
    pub settings: Vec<SettingDiff>,
    /// GPUs, in the order of their indexes.
    #[serde(rename = "gpu_diffs")]
    pub gpus: Vec<GpuDiff>,
    /// Errors for GPUs whose actual state is not known. If there is no driver, the list contains one error for the
    /// whole host.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unseen: Vec<ApiError>,
    /// Generation of the desired state, as in [`crate::Overrides`].
    pub generation: u64,
}

/// Body of `POST /v1/config/reload`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ReloadRequest {
    /// Whether to end the overrides whose rule the new file changes. If false, gpushd refuses a file that changes the
    /// rule of an override.
    #[serde(default)]
    pub clear_overrides: bool,
}

/// Answer of `POST /v1/config/reload`: what the reload changed. It changes no layout unless `auto_reconcile` is on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Reloaded {
    /// Path of the config file; absent if there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// Changed settings. `effective` is the previous value.
    pub settings: Vec<SettingDiff>,
    /// GPUs whose policy changed. `effective_policy` is the previous policy.
    #[serde(rename = "gpu_diffs")]
    pub gpus: Vec<GpuDiff>,
    /// Overrides that the reload ended.
    #[serde(rename = "ended_overrides")]
    pub ended: Vec<Override>,
    /// What the rules require of GPUs that do not support it, the leases on GPUs whose mode the reload changed, and the users
    /// and groups that the file names but the host does not have, one sentence each. Such a lease continues until it ends.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub findings: Vec<String>,
    /// Generation of the desired state, as in [`crate::Overrides`].
    pub generation: u64,
}
