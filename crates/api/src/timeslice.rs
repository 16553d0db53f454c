//! Time-slicing: programs of several holders on one full GPU, by turns.
//!
//! The driver gives each its turn and no share: how long a turn is it takes as a hint, and nobody's memory
//! is kept from the others.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::compute::{ComputeMode, TimesliceLevel};

/// How a config rule wants a GPU shared by turns.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct TimeslicePolicy {
    /// How many may hold the GPU at a time.
    pub replicas: u32,
    /// How long a turn is; programs that start later follow a change.
    #[serde(default)]
    pub level: TimesliceLevel,
    /// Who may make a CUDA context; without it the GPU's compute mode is left as it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compute_mode: Option<ComputeMode>,
}

impl Default for TimeslicePolicy {
    /// One holder: nothing is oversubscribed that nobody asked to be.
    fn default() -> Self {
        Self { replicas: 1, level: TimesliceLevel::Default, compute_mode: Some(ComputeMode::Default) }
    }
}

/// How a GPU is shared by turns, and how far the driver goes along. None of it is a promise to those who
/// compute there: memory and faults are shared, and nobody is sure of any part of the time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct TimesliceView {
    /// How many may hold the GPU at a time.
    pub replicas: u32,
    /// Level that the config wants. Programs that start once it is in force follow it, those that run do not.
    #[serde(rename = "desired_level")]
    pub wanted: TimesliceLevel,
    /// What is known of the level in force.
    pub state: TimesliceState,
    /// Level in force; `None` when `state` is not `known`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub level: Option<TimesliceLevel>,
    /// Why there is no level, or not the wanted one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Since when it is seen so; `None` before the first look.
    #[serde(default, with = "crate::timestamp::optional", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, format = DateTime))]
    pub since: Option<Timestamp>,
    /// When that was read, or was to be: a level is read once a minute at most, other than all else of a GPU.
    /// Not in events.
    #[serde(default, with = "crate::timestamp::optional", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, format = DateTime))]
    pub read_at: Option<Timestamp>,
}

/// What is known of a GPU's time-slice level.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum TimesliceState {
    /// It was read.
    Known,
    /// The part has no levels, its driver says: Turing and later have them.
    Unsupported,
    /// It could not be read, or not yet.
    #[default]
    Unknown,
}
