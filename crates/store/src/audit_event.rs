//! The events of the audit trail, and the details of each. gpushd records no other events.
//!
//! | events | object of the record | result |
//! |---|---|---|
//! | `AccessDenied` | `host` | `refused` |
//! | `ConfigReload` | `config` | `done` |
//! | `Recover`, `Maintenance*` | `host` | `done` |
//! | `Gpu*`, `Override*` | UUID of the GPU | `done` |
//! | `LeaseQueue`, `LeaseCreate`, `LeaseGrant` | id of the lease | `queued`, `accepted`, `granted` |
//! | `LeaseRelease`, `LeaseEnd` | id of the lease | `done`, or why the lease ends |
//! | `LeaseRenew`, `LeaseKeep`, `LeaseRevoke` | id of the lease | `done` |
//! | `Mps*` | short name of the target; for `MpsKill` its UUID | `done` |
//! | `OperationBegin`, `OperationCancel` | id of the operation | `accepted` |
//! | `OperationEnd` | id of the operation | state at the end |
//! | `ProcessEnd` | UUID of the GPU | what gpushd does with the process |
//! | `SlurmStart` | the job | `refused` |

use std::collections::BTreeSet;

use gpush_api::{Actor, GpuIndex, GpuUuid, LeaseHolder, LeaseMember, MemoryLimit, Percentage, Priority, TargetUuid};
use jiff::Timestamp;
use serde::{Serialize, Serializer};
use serde_json::Value;

use crate::audit::{DENIED, NewAudit, PROCESS_END};

/// Result of a record about a change that is complete.
pub const DONE: &str = "done";

/// An event of the audit trail. The fields are the details of its record, under the same names.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
#[expect(missing_docs, reason = "the comment of each event explains its fields")]
pub enum AuditEvent {
    /// A user tried an action of administrators.
    AccessDenied { attempt: &'static str },
    /// The config file was loaded again.
    ConfigReload { path: String, config_changed: bool, overrides_ended: Vec<GpuUuid> },
    /// An administrator made the kernel deny the GPUs to login sessions. `units` are the units that were changed.
    EnforceOn { units: Vec<String>, forced: bool, reason: Option<String> },
    /// An administrator let login sessions open the GPUs again.
    EnforceOff { units: Vec<String>, reason: Option<String> },
    /// An administrator's process was moved out of its login session.
    EnforceShell { pid: Option<u32> },
    /// A GPU got a cordon: from an administrator, or from gpushd because of a fault.
    GpuCordon {
        #[serde(skip_serializing_if = "Option::is_none")]
        cause: Option<String>,
        reason: Option<String>,
    },
    /// An administrator removed the cordons of a GPU.
    GpuUncordon { reason: Option<String> },
    /// A request for a lease waits in the queue.
    LeaseQueue {
        request_spec: String,
        #[serde(flatten)]
        holder: LeaseHolder,
    },
    /// An operation creates the MIG devices of a lease.
    LeaseCreate {
        operation_id: String,
        request_spec: String,
        #[serde(flatten)]
        holder: LeaseHolder,
    },
    /// A lease was granted.
    LeaseGrant {
        #[serde(flatten)]
        devices: AuditedDevices,
        request_spec: String,
        #[serde(flatten)]
        holder: LeaseHolder,
    },
    /// A lease is about to end.
    LeaseRelease {
        #[serde(flatten)]
        holder: LeaseHolder,
    },
    /// A lease has ended. Has devices if the lease ended because the operation that creates its devices did not succeed.
    LeaseEnd {
        #[serde(flatten, skip_serializing_if = "Option::is_none")]
        devices: Option<AuditedDevices>,
        #[serde(skip_serializing_if = "Option::is_none")]
        request_spec: Option<String>,
        #[serde(flatten)]
        holder: LeaseHolder,
    },
    /// The end time of a lease has changed.
    LeaseRenew {
        #[serde(serialize_with = "whole_second")]
        expires_at: Option<Timestamp>,
    },
    /// A lease is kept until a time, although it is unused.
    LeaseKeep {
        reason: String,
        #[serde(serialize_with = "whole_second")]
        until: Option<Timestamp>,
    },
    /// An administrator ends a lease, or gpushd ends it because it is unused. `end` is whether gpushd ends the processes of the lease.
    LeaseRevoke {
        reason: Option<String>,
        end: bool,
        #[serde(serialize_with = "whole_second")]
        processes_end_at: Option<Timestamp>,
    },
    /// Maintenance begins. `gpu_uuids` are the GPUs that the caller resets.
    MaintenanceEnter {
        #[serde(skip_serializing_if = "Vec::is_empty")]
        gpu_uuids: Vec<GpuUuid>,
        reason: Option<String>,
    },
    /// Maintenance ends.
    MaintenanceLeave {
        #[serde(skip_serializing_if = "Vec::is_empty")]
        gpu_uuids: Vec<GpuUuid>,
        reason: Option<String>,
    },
    /// An administrator starts, stops, restarts or drains an MPS daemon.
    MpsAction {
        #[serde(skip)]
        action: &'static str,
        #[serde(flatten)]
        target: AuditedTarget,
        reason: Option<String>,
    },
    /// gpushd killed an MPS daemon.
    MpsKill { gpu_uuid: GpuUuid, reason: String },
    /// An administrator changed settings of an MPS daemon. Only the changed settings have values.
    MpsSet {
        #[serde(flatten)]
        target: AuditedTarget,
        #[serde(skip_serializing_if = "Option::is_none")]
        percentage: Option<Percentage>,
        #[serde(skip_serializing_if = "Option::is_none")]
        memory_limit_mib: Option<MemoryLimit>,
        #[serde(skip_serializing_if = "Option::is_none")]
        priority: Option<Priority>,
        #[serde(skip_serializing_if = "is_false")]
        from_rule: bool,
        reason: Option<String>,
    },
    /// An operation was accepted. `targets` are the UUIDs of the MIG devices that it destroys.
    OperationBegin {
        #[serde(skip)]
        kind: String,
        gpus: Vec<AuditedPlan>,
        targets: Vec<TargetUuid>,
        reason: Option<String>,
        once: bool,
    },
    /// A user cancelled an operation.
    OperationCancel {},
    /// An operation has ended.
    OperationEnd {
        #[serde(skip)]
        kind: String,
        #[serde(skip_serializing_if = "Option::is_none")]
        why: Option<String>,
    },
    /// An operation has set an override.
    OverrideMake {
        operation_id: String,
        rule: Option<String>,
        layout: Vec<String>,
        reason: String,
        #[serde(serialize_with = "whole_second")]
        expires_at: Option<Timestamp>,
    },
    /// An override was removed by an administrator, by an operation, or because a reload changed its rule.
    OverrideClear {
        #[serde(flatten)]
        ended: EndedOverride,
        #[serde(skip_serializing_if = "Option::is_none")]
        operation_id: Option<String>,
        #[serde(skip_serializing_if = "Option::is_none")]
        reload: Option<String>,
    },
    /// An override has expired.
    OverrideExpire {
        #[serde(flatten)]
        ended: EndedOverride,
        #[serde(serialize_with = "whole_second")]
        expires_at: Option<Timestamp>,
    },
    /// gpushd ends a process that uses a GPU without a lease.
    ProcessEnd {
        gpu: GpuIndex,
        device: Option<String>,
        pid: Option<u32>,
        uid: Option<u32>,
        user: Option<String>,
        command: Option<String>,
        reason: Option<String>,
    },
    /// A lost database was accepted, or a database of another host was renamed to `kept`.
    Recover {
        #[serde(skip_serializing_if = "Option::is_none")]
        cause: Option<String>,
        #[serde(skip_serializing_if = "Option::is_none")]
        kept: Option<String>,
        #[serde(skip_serializing_if = "Option::is_none")]
        reason: Option<String>,
    },
    /// A Slurm job was refused in Prolog.
    SlurmStart { cluster: String, uid: u32, request_spec: Option<String>, why: String },
}

/// The devices of a lease.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct AuditedDevices {
    /// UUIDs of the GPUs and MIG devices.
    pub targets: Vec<TargetUuid>,
    /// GPUs of the devices.
    pub gpus: Vec<AuditedGpu>,
}

/// A GPU in the details of a record.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct AuditedGpu {
    /// UUID of the GPU.
    pub gpu_uuid: GpuUuid,
}

/// What an operation does to a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct AuditedPlan {
    /// UUID of the GPU.
    pub gpu_uuid: GpuUuid,
    /// Planned layout.
    pub layout: Vec<String>,
    /// Planned state, in words.
    pub desired: String,
}

/// An MPS target. A search for either UUID finds the record, even if the MIG device no longer exists.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct AuditedTarget {
    /// UUID of the target.
    pub uuid: TargetUuid,
    /// UUID of its GPU.
    pub gpu_uuid: GpuUuid,
}

/// An override that has ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct EndedOverride {
    /// Its layout.
    pub layout: Vec<String>,
    /// Who set it.
    pub author: Actor,
    /// Why it was set.
    pub reason: String,
}

impl AuditedDevices {
    /// Returns the devices of a lease with these members.
    #[must_use]
    pub fn of(members: &[LeaseMember]) -> Self {
        let gpus: BTreeSet<&GpuUuid> = members.iter().map(|member| &member.gpu_uuid).collect();
        Self {
            targets: members.iter().map(|member| member.target.clone()).collect(),
            gpus: gpus.into_iter().map(|gpu| AuditedGpu { gpu_uuid: gpu.clone() }).collect(),
        }
    }
}

impl AuditEvent {
    /// Returns the action, as the audit trail and events name it.
    #[must_use]
    pub fn action(&self) -> &str {
        match self {
            Self::AccessDenied { .. } => DENIED,
            Self::ConfigReload { .. } => "config.reload",
            Self::EnforceOn { .. } => "enforce.on",
            Self::EnforceOff { .. } => "enforce.off",
            Self::EnforceShell { .. } => "enforce.shell",
            Self::GpuCordon { .. } => "gpu.cordon",
            Self::GpuUncordon { .. } => "gpu.uncordon",
            Self::LeaseQueue { .. } => "lease.queue",
            Self::LeaseCreate { .. } => "lease.create",
            Self::LeaseGrant { .. } => "lease.grant",
            Self::LeaseRelease { .. } => "lease.release",
            Self::LeaseEnd { .. } => "lease.end",
            Self::LeaseRenew { .. } => "lease.renew",
            Self::LeaseKeep { .. } => "lease.keep",
            Self::LeaseRevoke { .. } => "lease.revoke",
            Self::MaintenanceEnter { .. } => "maintenance.enter",
            Self::MaintenanceLeave { .. } => "maintenance.leave",
            Self::MpsAction { action, .. } => action,
            Self::MpsKill { .. } => "mps.kill",
            Self::MpsSet { .. } => "mps.set",
            Self::OperationBegin { kind, .. } | Self::OperationEnd { kind, .. } => kind,
            Self::OperationCancel {} => "operation.cancel",
            Self::OverrideMake { .. } => "override.make",
            Self::OverrideClear { .. } => "override.clear",
            Self::OverrideExpire { .. } => "override.expire",
            Self::ProcessEnd { .. } => PROCESS_END,
            Self::Recover { .. } => "recover",
            Self::SlurmStart { .. } => "slurm.start",
        }
    }

    /// Returns the record of the event. `by` is `None` for gpushd itself.
    #[must_use]
    pub fn record(&self, by: Option<Actor>, object: impl std::fmt::Display, result: impl Into<String>) -> NewAudit {
        let detail = match serde_json::to_value(self).unwrap_or_default() {
            Value::Object(fields) if fields.is_empty() => Value::Null,
            detail => detail,
        };
        NewAudit { by, action: self.action().to_owned(), object: object.to_string(), result: result.into(), detail }
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_false(value: &bool) -> bool {
    !*value
}

#[expect(clippy::ref_option, reason = "the signature that serde calls")]
fn whole_second<S: Serializer>(at: &Option<Timestamp>, to: S) -> Result<S::Ok, S::Error> {
    at.map(gpush_api::whole_second).serialize(to)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn detail(event: &AuditEvent) -> Value {
        event.record(None, "object", DONE).detail
    }

    #[test]
    fn fields_of_an_event_are_the_details_of_its_record() {
        let holder = LeaseHolder { uid: 7, user: None };
        let devices =
            AuditedDevices { targets: vec!["MIG-1".into()], gpus: vec![AuditedGpu { gpu_uuid: "GPU-0".into() }] };
        let request_spec = "mig=1g.10gb".to_owned();
        let granted = AuditEvent::LeaseGrant { devices, request_spec, holder: holder.clone() };
        let record = granted.record(None, "L1", "granted");
        assert_eq!((record.action.as_str(), record.object.as_str()), ("lease.grant", "L1"));
        assert_eq!(
            record.detail,
            json!({ "targets": ["MIG-1"], "gpus": [{ "gpu_uuid": "GPU-0" }], "request_spec": "mig=1g.10gb", "uid": 7 })
        );
        let ended = AuditEvent::LeaseEnd { devices: None, request_spec: None, holder };
        assert_eq!(detail(&ended), json!({ "uid": 7 }));
    }

    #[test]
    fn record_of_maintenance_has_the_reset_gpus() {
        let entered = |gpu_uuids| AuditEvent::MaintenanceEnter { gpu_uuids, reason: None };
        assert_eq!(detail(&entered(Vec::new())), json!({ "reason": null }));
        assert_eq!(detail(&entered(vec!["GPU-6".into()]))["gpu_uuids"], json!(["GPU-6"]));
    }

    #[test]
    fn times_of_a_record_have_whole_seconds() {
        let renewed = AuditEvent::LeaseRenew { expires_at: Some("2026-12-01T08:00:00.5Z".parse().unwrap()) };
        assert_eq!(detail(&renewed), json!({ "expires_at": "2026-12-01T08:00:00Z" }));
    }

    #[test]
    fn kind_of_an_operation_is_the_action_and_no_detail() {
        let ended = AuditEvent::OperationEnd { kind: "mig.apply".to_owned(), why: None };
        assert_eq!((ended.action(), detail(&ended)), ("mig.apply", Value::Null));
        assert_eq!(detail(&AuditEvent::OperationCancel {}), Value::Null);
    }
}
