//! Overrides: layouts that replace the layout of a config rule until they are cleared or expire.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::{
    actor::Actor,
    ids::{GpuIndex, GpuUuid},
};

/// A layout that replaces the layout of the rule that claims the GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Override {
    /// UUID of the GPU.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub gpu_uuid: GpuUuid,
    /// Current index of the GPU; absent while the driver does not list the GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<u32>))]
    pub gpu: Option<GpuIndex>,
    /// Rule that claimed the GPU when the override was made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rule: Option<String>,
    /// Layout in canonical text.
    pub layout: Vec<String>,
    /// User who made the override.
    pub by: Actor,
    /// Reason that the user gave; empty if there is none.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// Time at which the override took effect.
    #[serde(with = "crate::timestamp")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub created_at: Timestamp,
    /// Time of expiry, by the system clock; absent if the override does not expire.
    #[serde(default, with = "crate::timestamp::optional", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, format = DateTime))]
    pub expires_at: Option<Timestamp>,
    /// Generation of the desired state after the override was made.
    pub generation: u64,
}

/// Answer of `GET /v1/overrides`: the active overrides, oldest first.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Overrides {
    /// Generation of the desired state. It increases when an override is made or ends, and when a
    /// reload changes the config. A request with an older generation in `If-Match` fails.
    pub generation: u64,
    /// Active overrides.
    pub overrides: Vec<Override>,
}

/// Answer of `DELETE /v1/overrides/{gpu}`: the cleared override.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct OverrideEnded {
    /// Generation of the desired state without the override.
    pub generation: u64,
    /// Override that was cleared.
    #[serde(rename = "override")]
    pub ended: Override,
}
