//! The place of a lease in the queue, and the capacity that gpushd keeps for it.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::LeaseId;
use crate::ids::GpuIndex;

/// Position of a lease in the queue.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct LeaseQueuePosition {
    /// Position in the queue; 1 is the first.
    pub position: u32,
    /// Leases and operations that must end before the lease is granted, such as `L12` and `op-7`.
    #[serde(default)]
    pub behind: Vec<String>,
    /// Reasons why the lease waits, one sentence each.
    #[serde(default)]
    pub reasons: Vec<String>,
    /// Capacity that gpushd keeps for the lease; absent if the lease does not reserve yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reserves: Option<LeaseQueueReservation>,
}

/// Capacity that gpushd keeps for a lease in the queue. No later request gets it, unless gpushd ends the later lease
/// before the capacity is free.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct LeaseQueueReservation {
    /// Indexes of the GPUs.
    #[serde(rename = "gpu_indexes")]
    #[cfg_attr(feature = "openapi", schema(value_type = Vec<u32>))]
    pub gpus: Vec<GpuIndex>,
    /// Time at which the last lease in the way ends; absent if this is not known.
    #[serde(default, with = "crate::timestamp::optional", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, format = DateTime))]
    pub free_at: Option<Timestamp>,
    /// Leases that use this capacity now. A single lease here alone keeps the capacity from this request. Only
    /// administrators and the holder of the request see them.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(value_type = Vec<String>))]
    pub blocking_leases: Vec<LeaseId>,
    /// Those of `blocking_leases` whose end is not known.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(value_type = Vec<String>))]
    pub without_end: Vec<LeaseId>,
}

impl LeaseQueuePosition {
    /// Removes what only the holder and administrators may see.
    pub(super) fn redact(&mut self) {
        self.reasons.clear();
        if let Some(reserves) = &mut self.reserves {
            reserves.blocking_leases.clear();
            reserves.without_end.clear();
        }
    }
}
