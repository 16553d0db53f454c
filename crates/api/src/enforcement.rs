//! Device access: whether the kernel denies the GPUs to login sessions, and what this changes on the host.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::ids::GpuIndex;

/// Whether the kernel denies the GPUs to login sessions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum EnforcementState {
    /// Every process may open the GPUs, as far as the rights of the device nodes allow.
    #[default]
    Off,
    /// The host's part is installed, but a probe has opened a GPU, or no probe was possible.
    Unverified,
    /// The host's part is installed, and every probe was denied.
    Verified,
}

impl EnforcementState {
    /// Returns the name in JSON and in messages.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Unverified => "unverified",
            Self::Verified => "verified",
        }
    }
}

/// A place from which a probe tries to open a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum ProbePlace {
    /// `user.slice`, which contains all login sessions.
    Session,
    /// The scope of a lease of another GPU; of no GPU, if the host has only one.
    OtherLease,
    /// A service of the system. No probe is denied here; it shows that a denied probe has a meaning.
    Service,
}

impl ProbePlace {
    /// Returns the place in messages.
    #[must_use]
    pub fn describe(self) -> &'static str {
        match self {
            Self::Session => "in user.slice",
            Self::OtherLease => "in the scope of another lease",
            Self::Service => "in a service",
        }
    }
}

/// The result of a probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum ProbeResult {
    /// The kernel denied the open.
    Denied,
    /// The kernel allowed the open. It may have failed for another reason, for example because there is no driver.
    Allowed,
    /// The probe could not run.
    Failed,
}

/// A probe: a program that has tried to open a GPU, as root.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct DeviceProbe {
    /// Place of the program.
    pub place: ProbePlace,
    /// Device that it tried to open, such as `/dev/nvidia0`; `195:0` if the node does not exist, and the program tried to
    /// create it.
    pub device: String,
    /// Result.
    pub result: ProbeResult,
    /// Why the probe could not run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// A systemd unit whose processes may open no GPU without a lease.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct EnforcedUnit {
    /// Unit.
    pub unit: String,
    /// Whether its `DeviceAllow=` denies the GPUs. In the scope of Slurm jobs, only the GPUs whose rules enforce leases and
    /// that do not belong to Slurm.
    pub denies_gpus: bool,
    /// Whether `gpushctl enforce on` has set this.
    pub set_by_gpush: bool,
}

/// Answer of `GET /v1/enforcement`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct DeviceEnforcement {
    /// Whether the kernel denies the GPUs to login sessions, as the last probes have shown.
    pub state: EnforcementState,
    /// Why the state is not `verified`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// GPUs whose rules enforce leases.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(value_type = Vec<u32>))]
    pub enforced_gpus: Vec<GpuIndex>,
    /// GPUs whose rules do not enforce leases, but that login sessions cannot open either: they cannot open any GPU.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(value_type = Vec<u32>))]
    pub other_gpus: Vec<GpuIndex>,
    /// Units that the host's part concerns.
    #[serde(default)]
    pub units: Vec<EnforcedUnit>,
    /// The last probes.
    #[serde(default)]
    pub probes: Vec<DeviceProbe>,
    /// Version of systemd; absent if it is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub systemd_version: Option<u32>,
    /// Time of the last check; absent if gpushd has not checked yet.
    #[serde(default, with = "crate::timestamp::optional", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, format = DateTime))]
    pub checked_at: Option<Timestamp>,
}

/// What `gpushctl enforce on` changes for a part of the host, or does not reach.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum EnforcementReach {
    /// Programs can no longer open GPUs without a lease.
    Denied,
    /// Programs can still open all GPUs.
    NotCovered,
    /// `gpushctl enforce on` refuses, unless it is forced.
    Blocks,
}

impl EnforcementReach {
    /// Returns the name in JSON and in messages.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Denied => "denied",
            Self::NotCovered => "not_covered",
            Self::Blocks => "blocks",
        }
    }
}

/// A part of the host that `gpushctl enforce on` concerns.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct EnforcementEffect {
    /// What is concerned, such as `root in login sessions`, or a unit or process.
    pub subject: String,
    /// Whether its programs can open GPUs.
    pub reach: EnforcementReach,
    /// What changes.
    pub effect: String,
    /// What an administrator can do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
}

/// Answer of `GET /v1/enforcement/plan`: what `gpushctl enforce on` changes on this host.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct EnforcementPlan {
    /// Why this host cannot enforce leases; absent if it can.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unsupported: Option<String>,
    /// Units whose `DeviceAllow=` changes; empty if they all deny the GPUs already.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub changes: Vec<String>,
    /// The parts of the host.
    pub effects: Vec<EnforcementEffect>,
}

/// Body of `POST /v1/enforcement/on` and `/off`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct EnforcementRequest {
    /// Whether to continue although graphical sessions use a GPU.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub force: bool,
    /// Reason for the audit trail.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// Answer of `POST /v1/enforcement/shell`: the scope into which the calling process was moved.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct AdministratorScope {
    /// Unit name of the scope.
    pub unit: String,
}
