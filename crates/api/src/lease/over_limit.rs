//! What gpushd does with a lease that uses more memory than its share has.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

/// What gpushd does with a lease that uses more memory than its share has. The strictest action is the last one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum OverLimitAction {
    /// Tell the holder.
    #[default]
    Report,
    /// Tell the holder, then revoke the lease and end its processes.
    End,
}

impl OverLimitAction {
    /// All actions.
    pub const ALL: [Self; 2] = [Self::Report, Self::End];

    /// Returns the name in JSON and in the config.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Report => "report",
            Self::End => "end",
        }
    }
}

/// A lease that uses more memory than its share has, in several readings in a row.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct LeaseOverLimit {
    /// What happens if the lease stays above its limit.
    pub action: OverLimitAction,
    /// Memory of its processes on the target that exceeds its limit most, in MiB.
    pub used_mib: u64,
    /// Memory of the share on this target, in MiB.
    pub limit_mib: u64,
    /// Time of the first reading above the limit.
    #[serde(with = "crate::timestamp")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub since: Timestamp,
    /// Earliest time at which the lease ends; absent if it does not end, or while the notice has not reached the holder.
    #[serde(default, with = "crate::timestamp::optional", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, format = DateTime))]
    pub ends_at: Option<Timestamp>,
    /// Whether the holder knows it: a notice was shown or recorded.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub warned: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn actions_have_their_names_in_json_and_become_stricter() {
        for action in OverLimitAction::ALL {
            assert_eq!(serde_json::to_value(action).unwrap(), action.name());
        }
        assert!(OverLimitAction::ALL.is_sorted());
    }
}
