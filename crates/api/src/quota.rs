//! Quotas of users, and what is left of them.

use serde::{Deserialize, Serialize};

use crate::{ids::GpuIndex, lease::LeaseKind};

/// What a limit of a quota counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum QuotaResource {
    /// Leases that hold capacity.
    Leases,
    /// Requests that wait.
    Waiting,
    /// GPU memory of all leases, in MiB.
    MemoryMib,
    /// GPU memory of all leases, in GPUs of any size: 1.5 is one and a half GPUs.
    Gpus,
    /// MPS percentage of all leases.
    MpsPercent,
}

/// A limit of a quota, and how much of it is used.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct QuotaLimit {
    /// What the limit counts.
    pub resource: QuotaResource,
    /// Amount that the user uses.
    pub used: f64,
    /// Maximum; absent if there is no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub maximum: Option<f64>,
    /// Amount that the user may still request; absent if there is no limit. Not below 0, although a changed config may
    /// have lowered the limit below the use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub amount_left: Option<f64>,
}

/// The quota of a user.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct QuotaView {
    /// User id.
    pub uid: u32,
    /// User name; absent if the uid has no name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Users that the quota names: `user anna`, `group students`, `everybody`. Absent for root, who has no limits, and for
    /// a user that no quota names.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quota: Option<String>,
    /// Later quotas that name the user too. They have no effect, because only the first quota applies.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ignored_quotas: Vec<String>,
    /// Kinds of leases that the user may request; absent for all kinds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allowed_kinds: Option<Vec<LeaseKind>>,
    /// Indexes of the GPUs that the quota allows; absent for all GPUs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Vec<u32>>))]
    pub allowed_gpus: Option<Vec<GpuIndex>>,
    /// Indexes of the GPUs whose rules permit only other users; empty if there is none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "openapi", schema(value_type = Vec<u32>))]
    pub closed_gpus: Vec<GpuIndex>,
    /// Indexes of the GPUs that only Slurm jobs can lease: their rules have `owner = "slurm"`. Empty if there is none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "openapi", schema(value_type = Vec<u32>))]
    pub slurm_gpus: Vec<GpuIndex>,
    /// Maximum duration of a lease in seconds; absent if a lease may have no end. A request without a duration gets this
    /// duration.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub longest_s: Option<u64>,
    /// What a request without a share means, such as `mig=1g.10gb,for=4h`; absent if it means the only kind that the GPUs
    /// offer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub default_request: Option<String>,
    /// The limits with their use.
    pub limits: Vec<QuotaLimit>,
}
