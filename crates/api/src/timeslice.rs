//! Time-slicing: programs of several holders on one full GPU, by turns.
//!
//! The driver gives each its turn and no share: how long a turn is it takes as a hint, and nobody's memory
//! is kept from the others.

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
