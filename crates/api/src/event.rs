//! Events: what changed, as it happens. `GET /v1/events` streams them.
//!
//! An event says that something is different now, and how it is; it is never the only place that
//! says so. Whoever misses some (a [`Resync`]) asks for the state anew and goes on from there.
//!
//! In JSON each is one object: `id`, `at`, `kind`, and the fields of that kind.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::{
    compute::ComputeMode,
    error::ApiError,
    gpu::{GpuState, Placement},
    health::Driver,
    lease::{EndReason, LeaseHolder, LeaseId, LeaseKind, LeaseState},
    mps::MpsState,
    operation::{Actor, OperationSummary, StepState},
    timeslice::TimesliceView,
};

/// Something that happened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Event {
    /// `<epoch>-<number>`: the epoch is one life of the agent, numbers count up within it. It is what
    /// `Last-Event-ID` takes.
    pub id: String,
    /// When.
    #[serde(with = "crate::timestamp")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub at: Timestamp,
    /// What.
    #[serde(flatten)]
    pub what: Happening,
}

/// What happened, by kind.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum Happening {
    /// An operation was begun, came further, or ended.
    Operation(Box<OperationChange>),
    /// A GPU is not as it was last seen.
    Gpu(Box<GpuChange>),
    /// The config was read again.
    Config(ConfigChange),
    /// The driver appeared, vanished, or is another.
    Driver(DriverChange),
    /// The driver reported an error of a GPU.
    Xid(Xid),
    /// An MPS daemon is in another state.
    Mps(Box<MpsChange>),
    /// A lease changed its state, its end, or was revoked with notice.
    Lease(Box<LeaseChange>),
    /// Something was done about a process that belongs to nobody who was given a share.
    Stray(Box<StrayChange>),
    /// Somebody changed something else that the agent keeps.
    Change(Change),
    /// Events are missing here: ask for the state anew.
    Resync(Resync),
}

/// Kind of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum EventKind {
    /// [`OperationChange`].
    Operation,
    /// [`GpuChange`].
    Gpu,
    /// [`ConfigChange`].
    Config,
    /// [`DriverChange`].
    Driver,
    /// [`Xid`].
    Xid,
    /// [`MpsChange`].
    Mps,
    /// [`LeaseChange`].
    Lease,
    /// [`StrayChange`].
    Stray,
    /// [`Change`].
    Change,
    /// [`Resync`]; comes whatever kinds are asked for.
    Resync,
}

impl EventKind {
    /// All of them.
    pub const ALL: [Self; 10] = [
        Self::Operation,
        Self::Gpu,
        Self::Config,
        Self::Driver,
        Self::Xid,
        Self::Mps,
        Self::Lease,
        Self::Stray,
        Self::Change,
        Self::Resync,
    ];

    /// As it is written in JSON, in `?kinds=` and as the stream's `event:`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Operation => "operation",
            Self::Gpu => "gpu",
            Self::Config => "config",
            Self::Driver => "driver",
            Self::Xid => "xid",
            Self::Mps => "mps",
            Self::Lease => "lease",
            Self::Stray => "stray",
            Self::Change => "change",
            Self::Resync => "resync",
        }
    }
}

impl Happening {
    /// Its kind.
    #[must_use]
    pub fn kind(&self) -> EventKind {
        match self {
            Self::Operation(_) => EventKind::Operation,
            Self::Gpu(_) => EventKind::Gpu,
            Self::Config(_) => EventKind::Config,
            Self::Driver(_) => EventKind::Driver,
            Self::Xid(_) => EventKind::Xid,
            Self::Mps(_) => EventKind::Mps,
            Self::Lease(_) => EventKind::Lease,
            Self::Stray(_) => EventKind::Stray,
            Self::Change(_) => EventKind::Change,
            Self::Resync(_) => EventKind::Resync,
        }
    }
}

/// An operation as it is now.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct OperationChange {
    /// The operation in short, without its plans.
    pub operation: OperationSummary,
    /// UUIDs of its GPUs.
    pub gpu_uuids: Vec<String>,
    /// Progress, one a GPU.
    pub progress: Vec<StepState>,
    /// What was just noted of it, such as what it waits for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// A GPU as it was seen, by a reading that somebody else's question caused: events cause none.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct GpuChange {
    /// Index.
    pub gpu: u32,
    /// UUID.
    pub gpu_uuid: String,
    /// What of it is different from the event before.
    pub changed: Vec<GpuAspect>,
    /// Whether the agent works with it.
    pub state: GpuState,
    /// Why `state` is what it is.
    pub reasons: Vec<String>,
    /// Difference between wanted and real, one sentence each.
    pub drift: Vec<String>,
    /// Whether MIG mode is on; absent on GPUs without MIG.
    #[serde(default, rename = "mig_enabled", skip_serializing_if = "Option::is_none")]
    pub mig: Option<bool>,
    /// GPU instances by placement.
    #[serde(rename = "instance_summaries")]
    pub instances: Vec<InstanceSeen>,
    /// Who may make a CUDA context on it; `None` when the driver does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compute_mode: Option<ComputeMode>,
    /// How it is shared by turns.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeslice: Option<TimesliceView>,
}

/// What of a GPU can be different.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum GpuAspect {
    /// It was not seen before.
    Appeared,
    /// `state` or `reasons`.
    State,
    /// `drift`.
    Drift,
    /// `mig`.
    Mig,
    /// `instances`.
    Instances,
    /// `compute_mode`.
    ComputeMode,
    /// `timeslice`.
    Timeslice,
}

/// A GPU instance, without who uses it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct InstanceSeen {
    /// GPU instance id.
    #[serde(rename = "gi")]
    pub id: u32,
    /// Profile.
    pub profile: String,
    /// Where.
    pub placement: Placement,
    /// Ids of its compute instances.
    #[serde(rename = "compute_instance_ids")]
    pub compute: Vec<u32>,
}

/// An MPS daemon as it is now.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct MpsChange {
    /// Short name of its target.
    pub target: String,
    /// UUID of the GPU or MIG device.
    pub uuid: String,
    /// UUID of the GPU that it is, or is of.
    pub gpu_uuid: String,
    /// Index of that; `None` while it is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<u32>,
    /// Where it is in its life.
    pub state: MpsState,
    /// Why.
    pub reasons: Vec<String>,
}

/// A lease as it is now. Every user may read it, so it names no process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct LeaseChange {
    /// `L17`.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub lease_id: LeaseId,
    /// The user who is admitted.
    pub holder: LeaseHolder,
    /// How it shares GPUs.
    pub share: LeaseKind,
    /// State.
    pub state: LeaseState,
    /// Why it ends or ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<EndReason>,
    /// UUIDs of its targets.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub targets: Vec<String>,
    /// UUIDs of the GPUs that have them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gpu_uuids: Vec<String>,
    /// When it expires.
    #[serde(default, with = "crate::timestamp::optional", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, format = DateTime))]
    pub expires_at: Option<Timestamp>,
    /// When gpushd ends its processes.
    #[serde(default, with = "crate::timestamp::optional", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, format = DateTime))]
    pub processes_end_at: Option<Timestamp>,
}

/// What was done about a stray: the audit trail has it too. Who it is, for its owner and admins.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct StrayChange {
    /// Index of the GPU that it is on.
    pub gpu: u32,
    /// UUID of that.
    pub gpu_uuid: String,
    /// The MIG device in words, `2g.20gb@2`; `None` for the GPU as a whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// Its pid.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// Its user id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    /// Its user's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Its command line.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
    /// Why it is a stray.
    pub why: String,
    /// What was done.
    pub step: StrayStep,
}

/// What is done about a stray that is ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum StrayStep {
    /// It was asked to end: SIGTERM.
    Asked,
    /// It did not, and was killed: SIGKILL.
    Killed,
}

impl StrayStep {
    /// In words, as the audit trail has it.
    #[must_use]
    pub fn words(self) -> &'static str {
        match self {
            Self::Asked => "asked to end",
            Self::Killed => "killed",
        }
    }
}

/// A reload of the config.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ConfigChange {
    /// Whether it was taken; if not, the one before stays in force.
    pub taken: bool,
    /// What is wrong with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<ApiError>,
    /// Settings that take effect at the next start of gpushd: `driver.read_ms`.
    #[serde(default, rename = "pending_keys", skip_serializing_if = "Vec::is_empty")]
    pub pending_restart: Vec<String>,
}

/// The driver behind the agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct DriverChange {
    /// The one that serves; `None` when there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver: Option<Driver>,
    /// Version of the one before, if there was one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub before: Option<String>,
    /// Why there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<ApiError>,
}

/// An Xid error.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Xid {
    /// Index of the GPU, when it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<u32>,
    /// UUID of the GPU.
    pub gpu_uuid: String,
    /// Number of the error, as in NVIDIA's table of them.
    pub xid: u64,
    /// GPU instance concerned, when one is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gi: Option<u32>,
    /// Compute instance concerned, when one is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ci: Option<u32>,
}

/// A change that somebody made and that is no operation: the audit trail has it too.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Change {
    /// What was done, as the audit trail names it: `operation.cancel`.
    pub action: String,
    /// To what: a GPU's UUID, an operation, `config`.
    pub object: String,
    /// Who; `None` for the agent itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by: Option<Actor>,
    /// Why, in the words of whoever did it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// UUIDs of the GPUs that it concerns.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gpu_uuids: Vec<String>,
}

/// Events are missing here.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Resync {
    /// Why.
    pub reason: ResyncReason,
}

/// Why events are missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum ResyncReason {
    /// The id is not of this life of the agent: it was started anew.
    OtherLife,
    /// More has happened since than the agent keeps: the client was away, or slow, for too long.
    Missed,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_one_flat_object() {
        let at: Timestamp = "2026-01-02T03:04:05Z".parse().unwrap();
        let xid = Xid { gpu: Some(3), gpu_uuid: "GPU-3".to_owned(), xid: 79, gi: None, ci: None };
        let event = Event { id: "ab-7".to_owned(), at, what: Happening::Xid(xid) };
        let text = serde_json::to_string(&event).unwrap();
        assert_eq!(
            text,
            r#"{"id":"ab-7","at":"2026-01-02T03:04:05Z","kind":"xid","gpu":3,"gpu_uuid":"GPU-3","xid":79}"#
        );
        assert_eq!(serde_json::from_str::<Event>(&text).unwrap(), event);
    }

    #[test]
    fn a_kind_is_named_as_in_json() {
        for kind in EventKind::ALL {
            assert_eq!(serde_json::to_value(kind).unwrap(), kind.name());
        }
        let resync = Happening::Resync(Resync { reason: ResyncReason::OtherLife });
        assert_eq!(
            serde_json::to_value(&resync).unwrap(),
            serde_json::json!({"kind": "resync", "reason": "other_life"})
        );
        assert_eq!(resync.kind(), EventKind::Resync);
    }
}
