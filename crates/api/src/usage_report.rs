//! Who used how much in a period: `GET /v1/usage/report`.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::EnergyMethod;

/// By what a report groups.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum UsageGrouping {
    /// User.
    #[default]
    User,
    /// Primary group of the user.
    Group,
    /// Slurm job, as `cluster/id`.
    Job,
    /// Slurm account of the job.
    Account,
    /// Kind of the lease.
    Kind,
    /// UUID of the GPU.
    Gpu,
}

impl UsageGrouping {
    /// All groupings.
    pub const ALL: [Self; 6] = [Self::User, Self::Group, Self::Job, Self::Account, Self::Kind, Self::Gpu];

    /// Returns the name in requests and JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::User => "user",
            Self::Group => "group",
            Self::Job => "job",
            Self::Account => "account",
            Self::Kind => "kind",
            Self::Gpu => "gpu",
        }
    }
}

/// Sums of leases over a period.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct UsageSums {
    /// Time of work in seconds. A lease with several targets counts once for each target.
    pub busy_s: u64,
    /// Time with a process and without work, in seconds.
    pub idle_s: u64,
    /// Time without a process, in seconds.
    pub empty_s: u64,
    /// Time of which gpushd does not know what the leases did, in seconds.
    pub unknown_s: u64,
    /// Held compute shares times time, in hours of a whole GPU.
    pub held_gpu_hours: f64,
    /// Held compute shares times the time of work.
    pub busy_gpu_hours: f64,
    /// Memory times time in GiB hours; absent if the memory was never known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_gib_hours: Option<f64>,
    /// Energy in J.
    pub energy_j: f64,
    /// How most of the energy was found.
    #[serde(default)]
    pub energy_method: EnergyMethod,
    /// Whether a part of the energy was found by another method.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub energy_mixed: bool,
}

/// One line of a report.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct UsageLine {
    /// User, group, job, account, kind or GPU; absent for leases without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// Sums.
    #[serde(rename = "usage_sums")]
    pub sums: UsageSums,
    /// Requests on the UTC days of the period. Requests have no GPU, so with `by=gpu` all numbers are 0.
    #[serde(default)]
    pub request_sums: RequestTotals,
}

/// The requests of one line of a report.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct RequestTotals {
    /// Requests that were granted.
    pub granted_requests: u64,
    /// Requests that were refused, or that ended while they waited.
    pub refused_requests: u64,
    /// Time from the granted requests to their grants, in seconds.
    pub waited_s: u64,
}

/// The capacity of the GPUs in a period, in hours of a whole GPU.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct CapacitySums {
    /// All capacity.
    pub capacity_gpu_hours: f64,
    /// What leases held.
    pub leased_gpu_hours: f64,
    /// What a lease could have had.
    pub free_gpu_hours: f64,
    /// What no lease could have, because of the layout, a cordon or a fault.
    pub unusable_gpu_hours: f64,
    /// Energy of the GPUs in J.
    pub energy_j: f64,
    /// Energy in J that gpushd attributes to no lease.
    pub unattributed_j: f64,
}

/// The requests for one share in a period.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct RequestLine {
    /// Kind of the share, or `default` if the requests name none.
    pub share_kind: String,
    /// Profile or size of a MIG device.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub profile: String,
    /// Requests that were granted at once.
    pub granted_requests: u64,
    /// Requests that were queued.
    pub queued_requests: u64,
    /// Requests that were refused because the capacity was in use.
    pub no_capacity: u64,
    /// Requests that a quota, a rule or a missing permission refused.
    pub not_allowed: u64,
    /// Requests that the host can never meet.
    pub impossible: u64,
    /// Requests that failed.
    pub failed_requests: u64,
}

impl RequestLine {
    /// Returns the number of requests.
    #[must_use]
    pub fn all(&self) -> u64 {
        let Self { granted_requests, queued_requests, no_capacity, not_allowed, impossible, failed_requests, .. } =
            self;
        granted_requests + queued_requests + no_capacity + not_allowed + impossible + failed_requests
    }
}

/// Who used how much in a period.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct UsageReport {
    /// Start of the first hour (UTC) of the period.
    #[serde(with = "crate::timestamp")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub from: Timestamp,
    /// End of the period.
    #[serde(rename = "period_end", with = "crate::timestamp")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub until: Timestamp,
    /// Time from which gpushd has records, if the period begins earlier; the end of the period if it has none. Absent if
    /// the records begin before the period. The figures lack the use before this time.
    #[serde(default, with = "crate::timestamp::optional", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, format = DateTime))]
    pub recorded_since: Option<Timestamp>,
    /// By what the lines are grouped.
    #[serde(rename = "grouped_by")]
    pub by: UsageGrouping,
    /// One line for each key, in the order of the keys.
    #[serde(rename = "usage_lines")]
    pub lines: Vec<UsageLine>,
    /// Sums of all lines.
    #[serde(rename = "usage_total")]
    pub total: UsageSums,
    /// Requests of all lines.
    #[serde(default)]
    pub total_requests: RequestTotals,
    /// Capacity of the GPUs; only for administrators.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capacity: Option<CapacitySums>,
    /// Requests for leases on the UTC days of the period; only for administrators.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub request_lines: Vec<RequestLine>,
}
