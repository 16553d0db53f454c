//! Time-slicing: the driver runs the programs of several lease holders alternately on one whole GPU.
//!
//! The length of a slice is a hint to the driver. No program has a guaranteed share of the time, and memory is not
//! isolated.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::compute::{ComputeMode, TimesliceLevel};

/// The time-slicing settings of a config rule.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct TimeslicePolicy {
    /// Maximum number of leases on the GPU at a time.
    pub replicas: u32,
    /// Length of the time slices. A change applies only to programs that start afterwards.
    #[serde(default)]
    pub level: TimesliceLevel,
    /// Compute mode that gpushd sets; if absent, gpushd does not change the mode.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compute_mode: Option<ComputeMode>,
}

impl Default for TimeslicePolicy {
    /// Returns a policy with one replica, so that only an explicit setting oversubscribes a GPU.
    fn default() -> Self {
        Self { replicas: 1, level: TimesliceLevel::Default, compute_mode: Some(ComputeMode::Default) }
    }
}

/// Time-slicing of a GPU: the settings, and the level that is effective in the driver.
///
/// Time-slicing guarantees nothing: programs share memory and faults, and no program has a guaranteed share of the
/// time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct TimesliceView {
    /// Maximum number of leases on the GPU at a time.
    pub replicas: u32,
    /// Level that the config asks for. The level applies to programs that start after gpushd has set the level.
    #[serde(rename = "desired_level")]
    pub wanted: TimesliceLevel,
    /// Whether the effective level is known.
    pub state: TimesliceState,
    /// Effective level; present only if `state` is `known`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub level: Option<TimesliceLevel>,
    /// Why the level is not known, or why gpushd could not set the desired level.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Time of the first reading that had this result; absent before the first reading.
    #[serde(default, with = "crate::timestamp::optional", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, format = DateTime))]
    pub since: Option<Timestamp>,
    /// Time of the last attempt to read the level. While nothing changes, gpushd reads levels at
    /// most once a minute, so this time may be earlier than `observed_at` of the GPU. Absent in
    /// events.
    #[serde(default, with = "crate::timestamp::optional", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, format = DateTime))]
    pub read_at: Option<Timestamp>,
}

/// Whether the time-slice level of a GPU is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum TimesliceState {
    /// The level was read.
    Known,
    /// The driver reports no levels for this GPU. Only Turing and later GPUs have levels.
    Unsupported,
    /// gpushd could not read the level, or has not read it yet.
    #[default]
    Unknown,
}
