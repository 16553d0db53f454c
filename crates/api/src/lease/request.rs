//! The body of `POST /v1/leases`.

use serde::{Deserialize, Serialize};

use super::{LeaseKind, NoticeSignal};
use crate::mps::{MemoryLimit, Percentage, Priority};

/// Maximum number of members of one lease.
pub const MOST_MEMBERS: u32 = 64;

/// Maximum duration of a lease in seconds: 52 weeks.
pub const LONGEST_LEASE_S: u64 = 52 * 7 * 86_400;

/// The share that a lease request asks for on each target.
//
// The kinds without fields have braces, because serde accepts unknown fields for a unit variant.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum LeaseShare {
    /// The kind of share that the GPUs offer. The request is refused if they offer several kinds.
    Default {},
    /// A MIG device of one profile.
    MigProfile {
        /// Profile name, such as `1g.10gb` or `1c.3g.40gb`.
        profile: String,
    },
    /// The smallest MIG device that has at least this memory and this many compute slices.
    MigSize {
        /// Minimum memory in MiB. gpushd compares it with the nominal size of profiles: `1g.10gb`
        /// has 10 GiB.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        memory_mib: Option<u64>,
        /// Minimum number of compute slices.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        slices: Option<u8>,
    },
    /// A part of a target that is shared through MPS.
    Mps {
        /// Active thread percentage; if absent, the percentage of the rule.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[cfg_attr(feature = "openapi", schema(value_type = Option<f64>))]
        percentage: Option<Percentage>,
        /// Maximum device memory that one client process may pin, in MiB; if absent, the limit of
        /// the rule.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[cfg_attr(feature = "openapi", schema(value_type = Option<u64>))]
        memory_limit_mib: Option<MemoryLimit>,
        /// Priority of kernels; if absent, the priority of the rule.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        priority: Option<Priority>,
    },
    /// A time-slice replica.
    Timeslice {},
    /// A whole GPU.
    Whole {},
}

impl Default for LeaseShare {
    fn default() -> Self {
        Self::Default {}
    }
}

impl LeaseShare {
    /// Returns the kind of share; `None` if the request leaves the choice to gpushd.
    #[must_use]
    pub fn kind(&self) -> Option<LeaseKind> {
        match self {
            Self::Default {} => None,
            Self::MigProfile { .. } | Self::MigSize { .. } => Some(LeaseKind::Mig),
            Self::Mps { .. } => Some(LeaseKind::Mps),
            Self::Timeslice {} => Some(LeaseKind::Timeslice),
            Self::Whole {} => Some(LeaseKind::Whole),
        }
    }
}

/// How long a request may wait in the queue. In JSON, it is a string: `no`, `unlimited`, or a number
/// of seconds, such as `60s`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum LeaseWait {
    /// The request does not wait: it is refused if the capacity is not free.
    #[default]
    No,
    /// At most this number of seconds.
    Seconds(u64),
    /// No limit.
    Unlimited,
}

impl From<LeaseWait> for String {
    fn from(wait: LeaseWait) -> Self {
        match wait {
            LeaseWait::No => "no".to_owned(),
            LeaseWait::Seconds(seconds) => format!("{seconds}s"),
            LeaseWait::Unlimited => "unlimited".to_owned(),
        }
    }
}

impl TryFrom<String> for LeaseWait {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let seconds = || text.strip_suffix('s').filter(|number| !number.starts_with('+'))?.parse().ok();
        match text.as_str() {
            "no" => Ok(Self::No),
            "unlimited" => Ok(Self::Unlimited),
            _ => seconds().map(Self::Seconds).ok_or_else(|| {
                format!(
                    "`{text}` is not a time to wait: write `no`, `unlimited`, or a number of seconds, such as `60s`"
                )
            }),
        }
    }
}

#[cfg(feature = "openapi")]
impl utoipa::ToSchema for LeaseWait {}

#[cfg(feature = "openapi")]
impl utoipa::PartialSchema for LeaseWait {
    fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::Schema> {
        utoipa::openapi::ObjectBuilder::new()
            .schema_type(utoipa::openapi::schema::Type::String)
            .description(Some(
                "How long a request may wait in the queue: `no`, `unlimited`, or a number of seconds, such as `60s`.",
            ))
            .pattern(Some("^(no|unlimited|[0-9]+s)$"))
            .examples(["60s"])
            .into()
    }
}

/// What a request asks gpushd to bind the lease to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum BindTo {
    /// The process in the field `process`. If that field is absent, only the end time, if any, ends
    /// the lease.
    #[default]
    Process,
    /// A new systemd scope for the calling process and its descendants. In a container, in a Slurm
    /// job, or in a service that only the caller uses, the lease is bound to the existing cgroup
    /// instead, and no process is moved.
    Scope,
    /// The cgroup of the calling process: its login session, service, container or Slurm job. If
    /// gpushd cannot bind the lease to a cgroup, the request must name a process or a duration.
    Cgroup,
}

impl BindTo {
    fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// Body of `POST /v1/leases`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct LeaseRequest {
    /// Share on each target.
    #[serde(default)]
    pub share: LeaseShare,
    /// Selectors of the GPUs that gpushd may choose from; empty for all GPUs.
    #[serde(rename = "selectors", default, skip_serializing_if = "Vec::is_empty")]
    pub gpus: Vec<String>,
    /// MPS target or MIG device that gpushd must grant: `0:2g.20gb@2`, a short name as in
    /// `/v1/mps`, or a UUID.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
    /// Number of MIG devices or whole GPUs, 1 to 64. gpushd grants all of them or none.
    #[serde(default = "one")]
    pub count: u32,
    /// Seconds from the grant to the end of the lease; if absent, the lease has no end time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub duration_s: Option<u64>,
    /// How long the request may wait for capacity.
    #[serde(default)]
    pub wait: LeaseWait,
    /// User id of the holder; if absent, the caller. Only administrators may request leases for
    /// other users.
    #[serde(rename = "holder_uid", default, skip_serializing_if = "Option::is_none")]
    pub holder: Option<u32>,
    /// Process to which the lease is bound, as a pid in the caller's pid namespace. The lease ends when the process
    /// exits. The process must belong to the holder, unless the caller is an administrator.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process: Option<u32>,
    /// What to bind the lease to. If that is not possible, for example because the host has no systemd, gpushd binds
    /// the lease as if `bind_to` were `process`, and the answer says why.
    #[serde(default, skip_serializing_if = "BindTo::is_default")]
    pub bind_to: BindTo,
    /// Signal that announces each notice to those processes of the lease that have a handler for it; if absent, gpushd
    /// sends none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub notice_signal: Option<NoticeSignal>,
}

impl Default for LeaseRequest {
    fn default() -> Self {
        let share = LeaseShare::default();
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
            notice_signal: None,
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
        let text = r#"{"share":{"kind":"mps","percentage":25,"memory_limit_mib":8192},"wait":"30s"}"#;
        let request: LeaseRequest = serde_json::from_str(text).unwrap();
        assert_eq!(request.share.kind(), Some(LeaseKind::Mps));
        assert_eq!(request.wait, LeaseWait::Seconds(30));
        assert_eq!(serde_json::from_str::<LeaseRequest>(&serde_json::to_string(&request).unwrap()).unwrap(), request);
        for bad in [
            r#"{"cuont":2}"#,
            r#"{"share":{"kind":"mps","percentage":101}}"#,
            r#"{"share":{"kind":"vgpu"}}"#,
            r#"{"share":{"kind":"mps","memory":1}}"#,
            r#"{"wait":"soon"}"#,
            r#"{"wait":"-5s"}"#,
            r#"{"wait":30}"#,
        ] {
            assert!(serde_json::from_str::<LeaseRequest>(bad).is_err(), "{bad}");
        }
    }
}
