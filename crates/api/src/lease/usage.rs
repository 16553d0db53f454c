//! Leases as the answers about GPUs and MIG devices show them.

use std::fmt;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::ids::{GpuUuid, TargetUuid};

use super::{Lease, LeaseHolder, LeaseId, LeaseKind, MemberShare};

/// A lease on a GPU or MIG device. It contains only fields that every caller may see.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct LeaseUse {
    /// Lease id, such as `L17`.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub id: LeaseId,
    /// UUID of the GPU or MIG device.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub target: TargetUuid,
    /// Kind of the lease: how it shares the target.
    pub kind: LeaseKind,
    /// Share that is granted on the target.
    #[serde(rename = "granted_share")]
    pub share: MemberShare,
    /// User who may use the target.
    pub holder: LeaseHolder,
    /// Time of expiry; absent if the lease has no end time.
    #[serde(default, with = "crate::timestamp::optional", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, format = DateTime))]
    pub until: Option<Timestamp>,
}

impl LeaseUse {
    /// Returns one entry for each target that the lease has on the GPU with this UUID. Returns no
    /// entries while the lease occupies no capacity.
    pub fn of<'a>(lease: &'a Lease, gpu: &'a GpuUuid) -> impl Iterator<Item = Self> + 'a {
        let members = lease.members.iter().filter(|_| lease.state.holds_capacity());
        members.filter(move |member| member.gpu_uuid == *gpu).map(|member| Self {
            id: lease.id,
            target: member.target.clone(),
            kind: lease.kind,
            share: member.share.clone(),
            holder: lease.holder.clone(),
            until: lease.expires_at,
        })
    }
}

impl fmt::Display for LeaseUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "lease {} of ", self.id)?;
        match &self.holder.user {
            Some(user) => f.write_str(user)?,
            None => write!(f, "uid {}", self.holder.uid)?,
        }
        match self.until {
            Some(until) => write!(f, ", until {}", crate::text::local_time(until)),
            None => f.write_str(", without an end"),
        }
    }
}
