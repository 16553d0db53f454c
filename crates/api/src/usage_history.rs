//! What each lease of a period was used for, and which requests were refused: `GET /v1/usage/history`.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::{GpuUuid, LeaseId, RequestLine};

/// What a lease was used for on one target.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct UsedTarget {
    /// UUID of the GPU.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub gpu_uuid: GpuUuid,
    /// Kind of the share, such as `mig`.
    pub share_kind: String,
    /// Profile of the MIG device; absent for other shares, and if it is not known any more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub profile: Option<String>,
    /// Compute part of the share, from 0 to 1.
    pub compute_part: f64,
    /// Memory of the share in MiB. For shares without a memory of their own, the memory of the GPU.
    pub share_memory_mib: u64,
    /// Time for which the lease held the target, in seconds.
    pub held_s: u64,
    /// Time of work in seconds.
    pub busy_s: u64,
    /// Part of the held time for which the memory is known, in seconds.
    pub memory_known_s: u64,
    /// Largest memory in MiB; absent if the memory was never known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_peak_mib: Option<u64>,
    /// Memory in MiB that was not exceeded in 98 % of the time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_p98_mib: Option<u64>,
    /// Part of the held time for which the activity is known, in seconds.
    pub activity_known_s: u64,
    /// Mean part of active streaming multiprocessors of the device in that time, from 0 to 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sm_mean: Option<f64>,
}

/// What a lease was used for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct UsedLease {
    /// Id of the lease.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub lease_id: LeaseId,
    /// The user who is accounted for the lease.
    pub user: String,
    /// Time of the grant.
    #[serde(with = "crate::timestamp")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub begun_at: Timestamp,
    /// Time of the end; absent if the lease is open.
    #[serde(default, with = "crate::timestamp::optional", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, format = DateTime))]
    pub ended_at: Option<Timestamp>,
    /// Time in the queue before the grant, in seconds.
    pub waited_s: u64,
    /// What was used, for each target.
    pub used_targets: Vec<UsedTarget>,
}

/// The requests of one UTC day.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct RequestDay {
    /// Start of the day.
    #[serde(rename = "day_begins_at", with = "crate::timestamp")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub day: Timestamp,
    /// The requests, by share.
    pub request_lines: Vec<RequestLine>,
}

/// What each lease of a period was used for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct UsageHistory {
    /// Start of the period.
    #[serde(with = "crate::timestamp")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub from: Timestamp,
    /// End of the period.
    #[serde(rename = "period_end", with = "crate::timestamp")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub until: Timestamp,
    /// The user whose leases the answer has; absent if it has the leases of all users.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// The leases that were open in the period, the newest first. Their sums count from their begin.
    pub used_leases: Vec<UsedLease>,
    /// Whether the period has older leases, which the answer leaves out.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub has_older_leases: bool,
    /// Requests for leases on the UTC days of the period; only for administrators.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub request_days: Vec<RequestDay>,
}
