//! Leases: the right of a user to a share of one or more targets.
//!
//! The holder and the caller who requested the lease may be different users. An administrator or a Slurm hook can
//! request a lease for a user. The holder may use the targets.
//!
//! Other callers get a lease only after [`Lease::redact`] has removed private fields. They see user name, kind, members
//! and end time, but no process id, cgroup, command or request.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::actor::Actor;

mod access;
mod id;
mod idle;
mod member;
mod notice;
mod over_limit;
mod queue;
mod request;
mod signal;
mod state;
mod terms;
mod usage;

pub use access::LeaseAccess;
pub use id::{LeaseId, NotALeaseId};
pub use idle::{IdleAction, IdleReport, LeaseIdle, LeaseKeep, LeaseKeepRequest, UnusedLease};
pub use member::{LeaseBinding, LeaseMember, MemberShare};
pub use notice::{LeaseNotice, NoticeChange, NoticeKind};
pub use over_limit::{LeaseOverLimit, OverLimitAction};
pub use queue::{LeaseQueuePosition, LeaseQueueReservation};
pub use request::{BindTo, LONGEST_LEASE_S, LeaseRequest, LeaseShare, LeaseWait, MOST_MEMBERS};
pub use signal::NoticeSignal;
pub use state::{DeviceAccess, EndReason, Enforcement, LeaseKind, LeaseState};
pub use terms::{AtLeaseEnd, EnforceMissing, LeaseOwner, LeaseRequirement, LeaseTerms};
pub use usage::LeaseUse;

/// The user who holds a lease.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct LeaseHolder {
    /// User id.
    pub uid: u32,
    /// User name; absent if the uid has no name, and for root of a container.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
}

/// Revocation of a lease by an administrator.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct LeaseRevocation {
    /// Administrator who revoked the lease.
    pub by: Actor,
    /// Reason that the administrator gave.
    pub reason: String,
    /// Time of the revocation.
    #[serde(with = "crate::timestamp")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub at: Timestamp,
    /// Time at which gpushd ends the processes of the lease; absent if they may finish.
    #[serde(default, with = "crate::timestamp::optional", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, format = DateTime))]
    pub processes_end_at: Option<Timestamp>,
}

/// A lease.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Lease {
    /// Lease id, such as `L17`.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub id: LeaseId,
    /// User who may use the targets.
    pub holder: LeaseHolder,
    /// If the uid of the holder is a subordinate uid: the user who owns it. Only `GET /v1/leases` and
    /// `GET /v1/leases/{id}` report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub account: Option<String>,
    /// Caller who requested the lease; absent if the caller of the present request may not see it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub asked_by: Option<Actor>,
    /// Kind of the lease: how it shares GPUs.
    pub kind: LeaseKind,
    /// What prevents the holder from using more than the share.
    pub enforcement: Enforcement,
    /// Whether only the processes of the lease can open its devices; absent if the scope of the lease has no list of
    /// devices. Only `GET /v1/leases` and `GET /v1/leases/{id}` report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_access: Option<DeviceAccess>,
    /// State of the lease.
    pub state: LeaseState,
    /// Reason for the end; present in the states `releasing` and `ended`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<EndReason>,
    /// Request for the lease; absent if the caller may not see it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request: Option<LeaseRequest>,
    /// Targets with their shares; empty while the lease is queued.
    #[serde(default)]
    pub members: Vec<LeaseMember>,
    /// What the lease is bound to.
    pub binding: LeaseBinding,
    /// Operation that creates MIG devices for the lease, such as `op-7`.
    #[serde(rename = "operation_id", default, skip_serializing_if = "Option::is_none")]
    pub operation: Option<String>,
    /// Time of the request.
    #[serde(with = "crate::timestamp")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub created_at: Timestamp,
    /// Time of the grant.
    #[serde(default, with = "crate::timestamp::optional", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, format = DateTime))]
    pub granted_at: Option<Timestamp>,
    /// Time of expiry, by the system clock; absent if the lease has no end time.
    #[serde(default, with = "crate::timestamp::optional", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, format = DateTime))]
    pub expires_at: Option<Timestamp>,
    /// Time of the end.
    #[serde(default, with = "crate::timestamp::optional", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, format = DateTime))]
    pub ended_at: Option<Timestamp>,
    /// Position in the queue; present while the lease is queued.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue: Option<LeaseQueuePosition>,
    /// What must end before the state `releasing` ends, one sentence each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub waits_for: Vec<String>,
    /// Revocation by an administrator.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revocation: Option<LeaseRevocation>,
    /// The last notice to the holder; absent if there was none, or if the caller may not see it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub notice: Option<LeaseNotice>,
    /// What the lease is or was used for; absent if gpushd does not know it, or if the caller may not see it. Only
    /// `GET /v1/leases` and `GET /v1/leases/{id}` report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub usage: Option<crate::LeaseUsageSummary>,
    /// The last keep of the lease, which may have ended; absent if there was none, or if the caller may not see it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep: Option<LeaseKeep>,
    /// What gpushd does with the lease because it is unused; absent if it is used, kept or exempt, or if the caller may not
    /// see it. Only `GET /v1/leases` and `GET /v1/leases/{id}` report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle: Option<LeaseIdle>,
    /// The memory of the lease above its limit, and what gpushd does about it; absent if the lease is within its limit, if
    /// its memory is not known, or if the caller may not see it. Only `GET /v1/leases` and `GET /v1/leases/{id}` report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub over_limit: Option<LeaseOverLimit>,
}

impl Lease {
    /// Returns whether a user holds the lease, also with a subordinate uid.
    #[must_use]
    pub fn belongs_to(&self, uid: u32, user: &str) -> bool {
        self.holder.uid == uid || self.account.as_deref() == Some(user)
    }

    /// Removes the data that only the holder and administrators may see: process ids, cgroups, the
    /// request, and the sentences that can name processes.
    pub fn redact(&mut self) {
        self.asked_by = None;
        self.request = None;
        self.notice = None;
        self.usage = None;
        self.keep = None;
        self.idle = None;
        self.over_limit = None;
        self.binding.redact();
        self.waits_for.clear();
        if let Some(queue) = &mut self.queue {
            queue.redact();
        }
        if let Some(revocation) = &mut self.revocation {
            revocation.by.pid = None;
            revocation.reason.clear();
        }
    }
}

/// A granted lease, and the environment for its processes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct LeaseGrant {
    /// Lease, in the state `active`.
    pub lease: Lease,
    /// Environment variables for processes of the lease, as ordered pairs of name and value.
    pub environment: Vec<(String, String)>,
    /// Warnings for the holder, one sentence each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
    /// What the quota of the holder has added to the request, one sentence each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub quota_notes: Vec<String>,
    /// Why gpushd could not bind the lease as requested, one clause.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub binding_reason: Option<String>,
}

/// Body of `POST /v1/leases/{id}/renew`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct LeaseRenewRequest {
    /// Seconds from now to the new end, 1 to 31449600 (52 weeks).
    pub duration_s: u64,
}

/// Body of `POST /v1/leases/{id}/revoke`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct LeaseRevokeRequest {
    /// Reason, shown to the holder.
    pub reason: String,
    /// Whether gpushd ends the processes of the lease. If false, they may run until they finish,
    /// unless the rule has `at_end = "end"`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub end: bool,
    /// Seconds until SIGTERM; 60 if absent. Allowed only with `end`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub notice_s: Option<u64>,
    /// Seconds from SIGTERM to SIGKILL; `processes.grace` of the config if absent. Allowed only with `end`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grace_s: Option<u64>,
}

/// Answer of `POST /v1/leases/{id}/enter`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct EnteredLease {
    /// Unit name of the scope into which the process was moved; absent if it was not moved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unit: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lease(binding: LeaseBinding) -> Lease {
        let actor = Actor { uid: 1000, user: Some("alice".to_owned()), pid: Some(471_147) };
        Lease {
            id: LeaseId(17),
            holder: LeaseHolder { uid: 1000, user: Some("alice".to_owned()) },
            account: None,
            asked_by: Some(actor.clone()),
            kind: LeaseKind::Mps,
            enforcement: LeaseKind::Mps.enforcement(),
            device_access: None,
            state: LeaseState::Releasing,
            reason: Some(EndReason::Revoked),
            request: Some(LeaseRequest { gpus: vec!["secret-selector".to_owned()], ..LeaseRequest::default() }),
            members: Vec::new(),
            binding,
            operation: None,
            created_at: Timestamp::UNIX_EPOCH,
            granted_at: None,
            expires_at: Some(Timestamp::UNIX_EPOCH),
            ended_at: None,
            queue: Some(LeaseQueuePosition {
                position: 1,
                behind: vec!["L16".to_owned()],
                reasons: vec!["secret-reason".to_owned()],
                reserves: None,
            }),
            waits_for: vec!["pid 471147 (secret-command) runs".to_owned()],
            revocation: Some(LeaseRevocation {
                by: actor,
                reason: "secret-words".to_owned(),
                at: Timestamp::UNIX_EPOCH,
                processes_end_at: None,
            }),
            notice: Some(LeaseNotice {
                at: Timestamp::UNIX_EPOCH,
                kind: NoticeKind::Revoked,
                text: "secret-notice".to_owned(),
                ends_at: None,
                terminals: Some(1),
            }),
            usage: None,
            keep: Some(LeaseKeep {
                by: Actor { uid: 1000, user: None, pid: Some(471_147) },
                reason: "secret-keep".to_owned(),
                at: Timestamp::UNIX_EPOCH,
                until: Timestamp::UNIX_EPOCH,
            }),
            idle: None,
            over_limit: None,
        }
    }

    #[test]
    fn redacted_lease_shows_user_kind_and_end_only() {
        let secret = || Some("/secret.slice/secret.scope".to_owned());
        for binding in [
            LeaseBinding::Scope { unit: secret(), cgroup: secret() },
            LeaseBinding::Cgroup { cgroup: secret(), pid: Some(471_147), start: Some(471_147) },
            LeaseBinding::Process { pid: Some(471_147), start: Some(471_147) },
            LeaseBinding::Job {
                cluster: "ci".to_owned(),
                job: 7,
                node: "n1".to_owned(),
                restart: 0,
                leader: None,
                cgroup: secret(),
                name: secret(),
                account: secret(),
            },
            LeaseBinding::Time,
            LeaseBinding::None,
        ] {
            let mut lease = lease(binding);
            let whole = serde_json::to_string(&lease).unwrap();
            assert_eq!(serde_json::from_str::<Lease>(&whole).unwrap(), lease);
            lease.redact();
            let text = serde_json::to_string(&lease).unwrap();
            assert!(!text.contains("secret") && !text.contains("471147"), "{text}");
            assert!(text.contains("alice") && text.contains("\"mps\"") && text.contains("expires_at"), "{text}");
            assert_eq!(serde_json::from_str::<Lease>(&text).unwrap(), lease);
        }
    }
}
