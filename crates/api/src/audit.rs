//! The audit trail: who changed what, and what came of it.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::operation::Actor;

/// A record of the trail, for administrators.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct AuditRecord {
    /// Orders the trail, also where the clock was set back.
    pub sequence: u64,
    /// Wall clock at the time.
    #[serde(with = "crate::timestamp")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub at: Timestamp,
    /// Who; absent for the agent itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by: Option<Actor>,
    /// What was done: `mig.apply`, `operation.cancel`.
    pub action: String,
    /// To what: an operation, a GPU's UUID, `config`.
    pub object: String,
    /// What came of it: `accepted`, `done`, `rolled_back`, `failed`.
    pub result: String,
    /// Whatever else, by action.
    #[serde(default, skip_serializing_if = "serde_json::Value::is_null")]
    pub detail: serde_json::Value,
}
