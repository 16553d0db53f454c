//! Notices: what gpushd tells the holder of a lease, before and when something happens to the lease.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::{LeaseHolder, LeaseId};
use crate::ids::GpuUuid;

/// Why gpushd tells the holder of a lease something.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum NoticeKind {
    /// The lease expires soon.
    EndsSoon,
    /// The lease has expired.
    Expired,
    /// An administrator has revoked the lease.
    Revoked,
    /// A GPU or MIG device of the lease does not exist any more.
    GpuLost,
    /// A GPU of the lease takes no new leases: an administrator or a fault has cordoned it.
    Cordoned,
    /// The MPS daemon of the lease has stopped serving.
    MpsFault,
    /// The lease is unused, and gpushd may end it.
    Unused,
    /// The holder was warned of an unused lease, and the lease is in use again, or is kept.
    UnusedNoMore,
    /// The lease uses more memory than its share has, and gpushd may end it.
    OverLimit,
    /// The holder got a notice about memory above the limit, and it does not apply any more.
    OverLimitNoMore,
}

impl NoticeKind {
    /// All kinds.
    pub const ALL: [Self; 10] = [
        Self::EndsSoon,
        Self::Expired,
        Self::Revoked,
        Self::GpuLost,
        Self::Cordoned,
        Self::MpsFault,
        Self::Unused,
        Self::UnusedNoMore,
        Self::OverLimit,
        Self::OverLimitNoMore,
    ];

    /// Returns whether the notice is about the end of the lease. Its holder must not miss such a notice.
    #[must_use]
    pub fn is_about_end(self) -> bool {
        match self {
            Self::EndsSoon | Self::Expired | Self::Revoked | Self::GpuLost | Self::Unused => true,
            // A program can cause many of these. gpushd repeats one that was left out before it ends a lease.
            Self::OverLimit | Self::OverLimitNoMore => false,
            Self::Cordoned | Self::MpsFault | Self::UnusedNoMore => false,
        }
    }

    /// Returns the name in JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::EndsSoon => "ends_soon",
            Self::Expired => "expired",
            Self::Revoked => "revoked",
            Self::GpuLost => "gpu_lost",
            Self::Cordoned => "cordoned",
            Self::MpsFault => "mps_fault",
            Self::Unused => "unused",
            Self::UnusedNoMore => "unused_no_more",
            Self::OverLimit => "over_limit",
            Self::OverLimitNoMore => "over_limit_no_more",
        }
    }
}

/// A notice of gpushd to the holder of a lease.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct LeaseNotice {
    /// Time of the notice.
    #[serde(with = "crate::timestamp")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub at: Timestamp,
    /// Why gpushd tells it.
    #[serde(rename = "notice_kind")]
    pub kind: NoticeKind,
    /// The text, one line without control characters.
    pub text: String,
    /// Time at which the lease expires, or gpushd ends it or its processes; absent if nothing ends at a known time.
    #[serde(default, with = "crate::timestamp::optional", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, format = DateTime))]
    pub ends_at: Option<Timestamp>,
    /// Number of terminals that show the notice; absent if it is not known. It can be 0: the lease has no process on a
    /// terminal, or the holder has closed them to messages (`mesg n`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub terminals: Option<u32>,
}

/// A notice to the holder of a lease, as an event. Only the holder and administrators see `text`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct NoticeChange {
    /// Lease id, such as `L17`.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub lease_id: LeaseId,
    /// User who may use the targets.
    pub holder: LeaseHolder,
    /// UUIDs of the GPUs of the lease.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "openapi", schema(value_type = Vec<String>))]
    pub gpu_uuids: Vec<GpuUuid>,
    /// The notice. It is an object of its own, because an event has another `at`.
    pub notice: LeaseNotice,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_of_notices_have_their_names_in_json() {
        for kind in NoticeKind::ALL {
            assert_eq!(serde_json::to_value(kind).unwrap(), kind.name());
        }
    }
}
