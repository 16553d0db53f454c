//! What a client requests of `POST /v1/leases`.

use serde::{Deserialize, Serialize};

use super::LeaseKind;
use crate::mps::{MemoryLimit, Percentage, Priority};

/// Most members of one lease.
pub const MOST_MEMBERS: u32 = 64;

/// Longest duration of a lease in seconds: 52 weeks.
pub const LONGEST_LEASE_S: u64 = 52 * 7 * 86_400;

/// The share that a request asks for, once for each member.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum LeaseShare {
    /// The only kind that the GPUs offer. Refused where they offer several.
    #[default]
    Default,
    /// A MIG device of one profile.
    MigProfile {
        /// Profile name, `1g.10gb` or `1c.3g.40gb`.
        profile: String,
    },
    /// The smallest MIG device that has at least this.
    MigSize {
        /// Memory in MiB, compared with the profile's nominal size: `1g.10gb` has 10 GiB.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        memory_mib: Option<u64>,
        /// Compute slices.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        slices: Option<u8>,
    },
    /// A part of a target that is shared through MPS.
    Mps {
        /// Active thread percentage; without it, the rule's.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[cfg_attr(feature = "openapi", schema(value_type = Option<f64>))]
        percentage: Option<Percentage>,
        /// Most device memory that one client process may pin, MiB; without it, the rule's limit.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[cfg_attr(feature = "openapi", schema(value_type = Option<u64>))]
        memory_limit_mib: Option<MemoryLimit>,
        /// Priority of kernels; without it, the rule's.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        priority: Option<Priority>,
    },
    /// A time-slice replica.
    Timeslice,
    /// A whole GPU.
    Whole,
}

impl LeaseShare {
    /// Returns the kind, if the request names one.
    #[must_use]
    pub fn kind(&self) -> Option<LeaseKind> {
        match self {
            Self::Default => None,
            Self::MigProfile { .. } | Self::MigSize { .. } => Some(LeaseKind::Mig),
            Self::Mps { .. } => Some(LeaseKind::Mps),
            Self::Timeslice => Some(LeaseKind::Timeslice),
            Self::Whole => Some(LeaseKind::Whole),
        }
    }
}

/// How long a request may wait in the queue.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum LeaseWait {
    /// Not at all: the request is refused when the capacity is not free.
    #[default]
    No,
    /// At most this many seconds.
    Seconds(u64),
    /// Without a limit.
    Unlimited,
}

/// What a lease is bound to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum BindTo {
    /// The process that the request names; without one, its end time, or nothing.
    #[default]
    Process,
    /// A new systemd scope for the calling process and all that it starts. In a service of the caller alone, in a
    /// container and in a Slurm job: the cgroup of that, and nothing is moved.
    Scope,
    /// The cgroup that the calling process is in: of its login session, service, container or Slurm job.
    Cgroup,
}

impl BindTo {
    fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// `POST /v1/leases`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct LeaseRequest {
    /// Share of each member.
    #[serde(default)]
    pub share: LeaseShare,
    /// Selectors of the GPUs that may be used; empty for all.
    #[serde(rename = "selectors", default, skip_serializing_if = "Vec::is_empty")]
    pub gpus: Vec<String>,
    /// The MPS target or MIG device that must be granted: `0:2g.20gb@2`, a short name as in `/v1/mps`, or a UUID.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
    /// Number of MIG devices or whole GPUs: all of them are granted, or none. 1 to 64.
    #[serde(default = "one")]
    pub count: u32,
    /// Seconds from the grant to the end; without it, the lease has no end time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub duration_s: Option<u64>,
    /// Whether and how long to wait.
    #[serde(default)]
    pub wait: LeaseWait,
    /// Uid of the holder, where root or a Slurm hook requests a lease for a user.
    #[serde(rename = "holder_uid", default, skip_serializing_if = "Option::is_none")]
    pub holder: Option<u32>,
    /// Pid, in the caller's pid namespace, of the process that the lease is bound to: the lease ends when it exits. It
    /// must be a process of the holder, or the caller must be an administrator.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process: Option<u32>,
    /// What the lease is bound to. Where that is not possible, such as without systemd, it is bound as with `process`,
    /// and the answer says why.
    #[serde(default, skip_serializing_if = "BindTo::is_default")]
    pub bind_to: BindTo,
}

impl Default for LeaseRequest {
    fn default() -> Self {
        let share = LeaseShare::Default;
        Self {
            share,
            gpus: Vec::new(),
            target: None,
            count: 1,
            duration_s: None,
            wait: LeaseWait::No,
            holder: None,
            process: None,
            bind_to: BindTo::Process,
        }
    }
}

fn one() -> u32 {
    1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_json_defaults_and_unknown_field() {
        assert_eq!(serde_json::from_str::<LeaseRequest>("{}").unwrap(), LeaseRequest::default());
        let text = r#"{"share":{"kind":"mps","percentage":25,"memory_limit_mib":8192},"wait":{"seconds":30}}"#;
        let request: LeaseRequest = serde_json::from_str(text).unwrap();
        assert_eq!(request.share.kind(), Some(LeaseKind::Mps));
        assert_eq!(request.wait, LeaseWait::Seconds(30));
        assert_eq!(serde_json::from_str::<LeaseRequest>(&serde_json::to_string(&request).unwrap()).unwrap(), request);
        for bad in [
            r#"{"cuont":2}"#,
            r#"{"share":{"kind":"mps","percentage":101}}"#,
            r#"{"share":{"kind":"vgpu"}}"#,
            r#"{"share":{"kind":"mps","memory":1}}"#,
        ] {
            assert!(serde_json::from_str::<LeaseRequest>(bad).is_err(), "{bad}");
        }
    }
}
