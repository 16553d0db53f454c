//! Events: changes as they happen. `GET /v1/events` streams them.
//!
//! An event reports a change and the state after it. A client that missed events receives a
//! [`Resync`]. The client then reads the whole state again and continues to listen.
//!
//! In JSON, an event is one object: `id`, `at`, `kind`, and the fields of its kind.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::{
    actor::Actor,
    compute::ComputeMode,
    error::ApiError,
    gpu::GpuState,
    health::Driver,
    ids::{GpuIndex, GpuUuid, TargetUuid},
    lease::{EndReason, LeaseHolder, LeaseId, LeaseKind, LeaseState, NoticeChange},
    mps::MpsState,
    operation::{OperationSummary, StepState},
    pending::PendingChange,
    placement::Placement,
    process::UnleasedStep,
    timeslice::TimesliceView,
};

/// One event.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Event {
    /// Event id, `<epoch>-<number>`, for the header `Last-Event-ID`. The epoch identifies one run
    /// of gpushd. Within a run, numbers increase.
    pub id: String,
    /// Time of the event.
    #[serde(with = "crate::timestamp")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub at: Timestamp,
    /// Kind of the event, and its fields.
    #[serde(flatten)]
    pub what: EventPayload,
}

/// Declares the kinds of events. Each row has the payload and the name of a kind.
macro_rules! kinds {
    ($($(#[$doc:meta])* $kind:ident($payload:ty) = $name:literal,)*) => {
        /// Kind of an event, with its fields.
        #[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(tag = "kind", rename_all = "snake_case")]
        #[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
        pub enum EventPayload {
            $($(#[$doc])* $kind($payload),)*
        }

        /// Name of an event kind.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(rename_all = "snake_case")]
        pub enum EventKind {
            $($(#[$doc])* $kind,)*
        }

        impl EventKind {
            /// All kinds.
            pub const ALL: &[Self] = &[$(Self::$kind),*];

            /// Returns the name in JSON, in `?kinds=`, and in the `event:` line of the stream.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$kind => $name,)*
                }
            }
        }

        impl EventPayload {
            /// Returns the kind of the event.
            #[must_use]
            pub fn kind(&self) -> EventKind {
                match self {
                    $(Self::$kind(_) => EventKind::$kind,)*
                }
            }
        }
    };
}

kinds! {
    /// An operation began, advanced, or ended.
    Operation(Box<OperationChange>) = "operation",
    /// A GPU changed since the last reading.
    Gpu(Box<GpuChange>) = "gpu",
    /// The config was reloaded, or the reload failed.
    Config(ConfigChange) = "config",
    /// The driver appeared or disappeared, or its version changed.
    Driver(DriverChange) = "driver",
    /// The driver reported an Xid error on a GPU.
    Xid(Xid) = "xid",
    /// The state of an MPS daemon changed.
    Mps(Box<MpsChange>) = "mps",
    /// The state or the end time of a lease changed, or the lease was revoked with notice.
    Lease(Box<LeaseChange>) = "lease",
    /// gpushd sent a notice to the holder of a lease.
    Notice(Box<NoticeChange>) = "notice",
    /// gpushd asked an unleased process to end, or killed it.
    Unleased(Box<UnleasedChange>) = "unleased",
    /// Another change. The audit trail contains it too.
    Change(Change) = "change",
    /// Events are missing. Clients must read the state again.
    Resync(Resync) = "resync",
}

impl EventKind {
    /// Returns the names of all kinds, separated by commas.
    #[must_use]
    pub fn names() -> String {
        Self::ALL.iter().map(|kind| kind.name()).collect::<Vec<_>>().join(", ")
    }

    /// Finds a kind by its name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|kind| kind.name() == name)
    }
}

impl EventPayload {
    /// Returns the UUIDs of the GPUs that the event is about. Empty for an event about gpushd or the host.
    #[must_use]
    pub fn gpu_uuids(&self) -> &[GpuUuid] {
        match self {
            Self::Operation(change) => &change.operation.gpu_uuids,
            Self::Gpu(change) => std::slice::from_ref(&change.gpu_uuid),
            Self::Xid(xid) => std::slice::from_ref(&xid.gpu_uuid),
            Self::Mps(change) => std::slice::from_ref(&change.gpu_uuid),
            Self::Lease(change) => &change.gpu_uuids,
            Self::Notice(change) => &change.gpu_uuids,
            Self::Unleased(change) => std::slice::from_ref(&change.gpu_uuid),
            Self::Change(change) => &change.gpu_uuids,
            Self::Config(_) | Self::Driver(_) | Self::Resync(_) => &[],
        }
    }
}

/// The state of an operation after a change.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct OperationChange {
    /// Operation, without its plans.
    pub operation: OperationSummary,
    /// Progress, one entry for each GPU.
    pub progress: Vec<StepState>,
    /// New note of the operation, such as the reason why it waits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// The state of a GPU after a change. gpushd does not read a GPU because a client listens to
/// events. It found this change in a reading for another request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct GpuChange {
    /// Index of the GPU.
    #[cfg_attr(feature = "openapi", schema(value_type = u32))]
    pub gpu: GpuIndex,
    /// UUID of the GPU.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub gpu_uuid: GpuUuid,
    /// Parts of the GPU that differ from the previous event.
    pub changed: Vec<GpuAspect>,
    /// State of the GPU.
    pub state: GpuState,
    /// Reasons for `state`.
    pub reasons: Vec<String>,
    /// Differences between the desired and the actual state, one sentence each.
    pub drift: Vec<String>,
    /// Whether MIG mode is on; absent on GPUs without MIG.
    #[serde(default, rename = "mig_enabled", skip_serializing_if = "Option::is_none")]
    pub mig: Option<bool>,
    /// Changes that a new rule requires, but that gpushd does not make yet because of leases.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pending: Vec<PendingChange>,
    /// GPU instances, in the order of their placements.
    #[serde(rename = "instance_summaries")]
    pub instances: Vec<InstanceSummary>,
    /// UUIDs of the MIG devices that existed at the previous event of this GPU, and that do not exist now.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "openapi", schema(value_type = Vec<String>))]
    pub destroyed_device_uuids: Vec<TargetUuid>,
    /// Which processes may create a CUDA context; absent if the driver does not report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compute_mode: Option<ComputeMode>,
    /// Time-slicing of the GPU; absent unless its rule has mode `timeslice`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeslice: Option<TimesliceView>,
}

/// A part of a GPU that can change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum GpuAspect {
    /// The GPU was not listed before.
    Appeared,
    /// `state` or `reasons`.
    State,
    /// `drift`.
    Drift,
    /// `pending`.
    Pending,
    /// `mig_enabled`.
    Mig,
    /// `instance_summaries`.
    Instances,
    /// `compute_mode`.
    ComputeMode,
    /// `timeslice`.
    Timeslice,
}

/// A GPU instance, without its processes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct InstanceSummary {
    /// GPU instance id.
    #[serde(rename = "gi")]
    pub id: u32,
    /// Profile name.
    pub profile: String,
    /// Placement in memory slices.
    pub placement: Placement,
    /// Ids of its compute instances.
    #[serde(rename = "compute_instance_ids")]
    pub compute: Vec<u32>,
    /// UUIDs of its MIG devices.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "openapi", schema(value_type = Vec<String>))]
    pub device_uuids: Vec<TargetUuid>,
}

/// The state of an MPS daemon after a change.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct MpsChange {
    /// Short name of the daemon's target.
    pub target: String,
    /// UUID of the GPU or MIG device.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub uuid: TargetUuid,
    /// UUID of the GPU that is the target, or that contains the MIG device.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub gpu_uuid: GpuUuid,
    /// Index of that GPU; absent while it is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<u32>))]
    pub gpu: Option<GpuIndex>,
    /// State of the daemon.
    pub state: MpsState,
    /// Reasons for the state.
    pub reasons: Vec<String>,
}

/// The state of a lease after a change. Every user may read this event, so the event names no process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct LeaseChange {
    /// Lease id, such as `L17`.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub lease_id: LeaseId,
    /// User who may use the targets.
    pub holder: LeaseHolder,
    /// Kind of the lease: how it shares GPUs.
    #[serde(rename = "lease_kind")]
    pub share: LeaseKind,
    /// State of the lease.
    pub state: LeaseState,
    /// Reason for the end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<EndReason>,
    /// UUIDs of the lease's targets.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "openapi", schema(value_type = Vec<String>))]
    pub targets: Vec<TargetUuid>,
    /// UUIDs of the GPUs of these targets.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "openapi", schema(value_type = Vec<String>))]
    pub gpu_uuids: Vec<GpuUuid>,
    /// Time of expiry.
    #[serde(default, with = "crate::timestamp::optional", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, format = DateTime))]
    pub expires_at: Option<Timestamp>,
    /// Time at which gpushd ends the processes of the lease.
    #[serde(default, with = "crate::timestamp::optional", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, format = DateTime))]
    pub processes_end_at: Option<Timestamp>,
}

/// What gpushd did about an unleased process. The audit trail contains the same record. Only the
/// owner of the process and administrators see `pid`, `uid`, `user` and `command`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct UnleasedChange {
    /// Index of the process's GPU.
    #[cfg_attr(feature = "openapi", schema(value_type = u32))]
    pub gpu: GpuIndex,
    /// UUID of that GPU.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub gpu_uuid: GpuUuid,
    /// MIG device, such as `2g.20gb@2`; absent for the whole GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// Process id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// User id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    /// User name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Command line.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
    /// Why the process is unleased.
    pub why: String,
    /// What gpushd did.
    pub step: UnleasedStep,
}

/// A reload of the config.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ConfigChange {
    /// Whether the new config is in effect. If false, the previous config stays in effect.
    pub taken: bool,
    /// Why the reload failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<ApiError>,
    /// Changed settings that take effect at the next start of gpushd, such as `driver.library`.
    #[serde(default, rename = "pending_keys", skip_serializing_if = "Vec::is_empty")]
    pub pending_restart: Vec<String>,
}

/// gpushd now uses another driver, or none.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct DriverChange {
    /// Driver that gpushd uses; absent if there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver: Option<Driver>,
    /// Version of the previous driver, if there was one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub before: Option<String>,
    /// Why there is no driver.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<ApiError>,
}

/// An Xid error.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Xid {
    /// Index of the GPU; absent if it is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<u32>))]
    pub gpu: Option<GpuIndex>,
    /// UUID of the GPU.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub gpu_uuid: GpuUuid,
    /// Xid number, as in NVIDIA's documentation of Xid errors.
    pub xid: u64,
    /// Id of the affected GPU instance, if the driver reports one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gi: Option<u32>,
    /// Id of the affected compute instance, if the driver reports one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ci: Option<u32>,
    /// Process that caused the error, if the kernel log names it. Only its user and administrators see it.
    #[serde(default, rename = "faulting_process", skip_serializing_if = "Option::is_none")]
    pub process: Option<XidProcess>,
}

/// The process that caused an Xid error.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct XidProcess {
    /// Process id.
    pub pid: u32,
    /// Name of the process, at most 15 characters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
    /// User id; absent if the process had ended before gpushd could examine it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    /// Lease of the process; absent if it has none, or if the lease is not certain.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>))]
    pub lease_id: Option<LeaseId>,
}

/// A change that is not an operation. The audit trail contains it too.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Change {
    /// Action, as the audit trail names it, such as `operation.cancel`.
    pub action: String,
    /// Object of the action: a GPU's UUID, an operation, `config`.
    pub object: String,
    /// User who made the change; absent for gpushd itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by: Option<Actor>,
    /// Reason that the user gave.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// UUIDs of the affected GPUs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "openapi", schema(value_type = Vec<String>))]
    pub gpu_uuids: Vec<GpuUuid>,
}

/// Notice that events are missing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Resync {
    /// Why events are missing.
    pub reason: ResyncReason,
}

/// Why events are missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum ResyncReason {
    /// The event id is from another run of gpushd.
    OtherRun,
    /// gpushd no longer has the next events, because the client was disconnected or slow for too long.
    Missed,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lease::{LeaseNotice, NoticeKind};

    #[test]
    fn an_event_is_one_flat_object() {
        let at: Timestamp = "2026-01-02T03:04:05Z".parse().unwrap();
        let xid =
            Xid { gpu: Some(crate::GpuIndex(3)), gpu_uuid: "GPU-3".into(), xid: 79, gi: None, ci: None, process: None };
        let event = Event { id: "ab-7".to_owned(), at, what: EventPayload::Xid(xid) };
        let text = serde_json::to_string(&event).unwrap();
        assert_eq!(
            text,
            r#"{"id":"ab-7","at":"2026-01-02T03:04:05Z","kind":"xid","gpu":3,"gpu_uuid":"GPU-3","xid":79}"#
        );
        assert_eq!(serde_json::from_str::<Event>(&text).unwrap(), event);
    }

    /// Fault: the notice had an `at` of its own beside the one of the event, so no client could read the event.
    #[test]
    fn event_about_a_notice_can_be_read_again() {
        let at: Timestamp = "2026-01-02T03:04:05Z".parse().unwrap();
        let notice = LeaseNotice {
            at,
            kind: NoticeKind::Revoked,
            text: "lease L1 was revoked".to_owned(),
            ends_at: Some(at),
            terminals: Some(1),
        };
        let holder = LeaseHolder { uid: 1000, user: None };
        let change = NoticeChange { lease_id: LeaseId(1), holder, gpu_uuids: vec!["GPU-0".into()], notice };
        let event = Event { id: "ab-8".to_owned(), at, what: EventPayload::Notice(Box::new(change)) };
        let text = serde_json::to_string(&event).unwrap();
        assert_eq!(serde_json::from_str::<Event>(&text).unwrap(), event, "{text}");
    }

    #[test]
    fn a_kind_is_named_as_in_json() {
        for kind in EventKind::ALL {
            assert_eq!(serde_json::to_value(kind).unwrap(), kind.name());
        }
        let resync = EventPayload::Resync(Resync { reason: ResyncReason::OtherRun });
        assert_eq!(
            serde_json::to_value(&resync).unwrap(),
            serde_json::json!({"kind": "resync", "reason": "other_run"})
        );
        assert_eq!(resync.kind(), EventKind::Resync);
    }

    /// Fault: the page named a reason that no event has.
    #[test]
    fn api_page_names_each_reason_of_a_resync() {
        let page = include_str!("../../../docs/api.md");
        for reason in [ResyncReason::OtherRun, ResyncReason::Missed] {
            let name = serde_json::to_value(reason).unwrap();
            assert!(page.contains(&format!("With `{}`", name.as_str().unwrap())), "{name}");
        }
    }
}
