//! The audit trail: who changed what, and the result.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::actor::Actor;

/// A record of the audit trail. Only administrators can read the trail.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct AuditRecord {
    /// Position in the trail. Later records have higher numbers, even if the clock was set back.
    pub sequence: u64,
    /// Time of the record, by the system clock.
    #[serde(with = "crate::timestamp")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub at: Timestamp,
    /// User who made the change; absent for gpushd itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by: Option<Actor>,
    /// If the uid in `by` is a subordinate uid: the user who owns it now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub account: Option<String>,
    /// Action, such as `mig.apply` or `operation.cancel`.
    pub action: String,
    /// Object of the action: an operation, a lease, a GPU's UUID, an MPS target, `config`, `host`.
    pub object: String,
    /// Result, such as `accepted`, `done`, `not_started`, `rolled_back`, `failed` or `refused`.
    pub result: String,
    /// Further details, which depend on the action.
    #[serde(default, skip_serializing_if = "serde_json::Value::is_null")]
    pub detail: serde_json::Value,
}
