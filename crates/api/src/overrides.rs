//! Overrides: layouts that were asked for in place of what the config says, and stand until somebody
//! ends them or their time comes.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::operation::Actor;

/// A layout that stands above the rule of the config that claims the GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Override {
    /// UUID of the GPU.
    #[serde(rename = "gpu_uuid")]
    pub uuid: String,
    /// Its index now; `None` while the driver does not show it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<u32>,
    /// Rule that claimed the GPU when it was made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rule: Option<String>,
    /// Layout in canonical text.
    pub layout: Vec<String>,
    /// Who made it.
    pub by: Actor,
    /// Why, in their words; empty when they said nothing.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// When it took effect.
    #[serde(with = "crate::timestamp")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub created_at: Timestamp,
    /// When it ends by itself, by the wall clock.
    #[serde(default, with = "crate::timestamp::optional", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, format = DateTime))]
    pub expires_at: Option<Timestamp>,
    /// Generation that it made.
    pub generation: u64,
}

/// `GET /v1/overrides`: those that stand, in the order in which they were made.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Overrides {
    /// Generation of what is wanted: grows with each override that is made or ends, and with each
    /// reload that changes the config. Sent back as `If-Match`, it makes a request count only while
    /// nothing of that happened meanwhile.
    pub generation: u64,
    /// The overrides.
    pub overrides: Vec<Override>,
}

/// `DELETE /v1/overrides/{gpu}`: what was ended. The GPU stays as it stands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct OverrideEnded {
    /// Generation that this made.
    pub generation: u64,
    /// The override, as it was.
    #[serde(rename = "override")]
    pub ended: Override,
}
