//! What gpushd does with a lease that is not used: when it warns the holder, when the lease ends, and how the holder keeps
//! the lease.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::{LeaseHolder, LeaseId};
use crate::{actor::Actor, usage::UseState};

/// What gpushd does with unused leases. The strictest action is the last one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum IdleAction {
    /// Report them.
    Report,
    /// Warn the holder, and report them.
    Warn,
    /// Warn the holder, then release the lease. Its processes may finish.
    Release,
    /// Warn the holder, then release the lease and end its processes.
    End,
}

impl IdleAction {
    /// All actions.
    pub const ALL: [Self; 4] = [Self::Report, Self::Warn, Self::Release, Self::End];

    /// Returns the name in JSON and in the config.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Report => "report",
            Self::Warn => "warn",
            Self::Release => "release",
            Self::End => "end",
        }
    }

    /// Returns whether the action ends leases.
    #[must_use]
    pub fn ends_leases(self) -> bool {
        match self {
            Self::Report | Self::Warn => false,
            Self::Release | Self::End => true,
        }
    }
}

/// A time for which a lease is kept although it is unused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct LeaseKeep {
    /// User who keeps the lease.
    pub by: Actor,
    /// Reason that the user gave.
    pub reason: String,
    /// Time of the request.
    #[serde(with = "crate::timestamp")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub at: Timestamp,
    /// End. Unused time counts again from then on.
    #[serde(with = "crate::timestamp")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub until: Timestamp,
}

/// Body of `POST /v1/leases/{id}/keep`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct LeaseKeepRequest {
    /// Seconds from now for which the lease is kept, at most `idle.max_keep` of the config.
    pub duration_s: u64,
    /// Reason, shown to administrators; at most 200 bytes.
    pub reason: String,
}

/// What gpushd does with an unused lease.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct LeaseIdle {
    /// What happens after the unused time that the config allows.
    pub action: IdleAction,
    /// Start of the unused time.
    #[serde(with = "crate::timestamp")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub unused_since: Timestamp,
    /// Time of the action, if the lease stays unused.
    #[serde(with = "crate::timestamp")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub due_at: Timestamp,
    /// Whether the holder was warned of this unused time.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub warned: bool,
    /// Longest time in seconds for which the holder can keep the lease; 0 if the config permits no keep.
    #[serde(default)]
    pub longest_keep_s: u64,
}

/// An unused lease in the answer of `GET /v1/leases/idle`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct UnusedLease {
    /// Lease id, such as `L17`.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub lease_id: LeaseId,
    /// User who may use the targets.
    pub holder: LeaseHolder,
    /// `idle`: with a process; `empty`: without a process.
    pub state: UseState,
    /// Start of the unused time.
    #[serde(with = "crate::timestamp")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub unused_since: Timestamp,
    /// What gpushd does or would have done. Leases that the config exempts are not in the answer.
    pub action: IdleAction,
    /// Time of the action.
    #[serde(with = "crate::timestamp")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub due_at: Timestamp,
    /// Number of warnings before the action.
    pub warning_count: u32,
    /// Whether the lease has not ended yet.
    pub is_open: bool,
}

/// Answer of `GET /v1/leases/idle`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct IdleReport {
    /// Start of the period.
    #[serde(with = "crate::timestamp")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub from: Timestamp,
    /// The action for which the dry run was made; absent if each lease has the action of its rule.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub assumed_action: Option<IdleAction>,
    /// Open leases that are unused now.
    pub unused_now: Vec<UnusedLease>,
    /// What the idle policy would have done in the period, from the recorded use.
    pub would_have: Vec<UnusedLease>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn actions_have_their_names_in_json_and_become_stricter() {
        for action in IdleAction::ALL {
            assert_eq!(serde_json::to_value(action).unwrap(), action.name());
        }
        assert!(IdleAction::ALL.is_sorted());
        assert_eq!(IdleAction::ALL.map(IdleAction::ends_leases), [false, false, true, true]);
    }
}
