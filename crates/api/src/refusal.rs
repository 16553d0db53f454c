//! Refusals: why a layout cannot be planned on a GPU.

use serde::{Deserialize, Serialize};

use crate::{
    gpu::{Placement, Process},
    lease::LeaseUse,
};

/// An instance in use that a plan would have to destroy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Blocker {
    /// GPU instance id.
    pub gi: u32,
    /// Compute instance id, when only a compute instance is in use.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ci: Option<u32>,
    /// Profile of the GPU instance.
    pub profile: String,
    /// Profile of the compute instance, where it is not the whole GPU instance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compute_profile: Option<String>,
    /// Placement of the GPU instance.
    pub placement: Placement,
    /// Processes in it, as far as the caller may see them. A lease without processes has no pid, and its words as the
    /// command.
    #[serde(rename = "processes")]
    pub holders: Vec<Process>,
    /// Leases on its MIG devices.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub leases: Vec<LeaseUse>,
}

/// Why a layout was refused: the smallest sufficient reason.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "reason", rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum Refusal {
    /// The GPU has no such profile.
    UnknownProfile {
        /// As written.
        profile: String,
        /// Nearest names that the GPU has.
        nearest: Vec<String>,
    },
    /// The profile exists, the placement does not.
    NoSuchPlacement {
        /// Profile.
        profile: String,
        /// Start slice as written.
        start: u8,
        /// Start slices that it may have.
        possible: Vec<u8>,
    },
    /// Two explicit placements overlap.
    PlacementsOverlap {
        /// One entry.
        first: String,
        /// The other.
        second: String,
    },
    /// More instances of one profile than the part can hold.
    TooMany {
        /// Profile.
        profile: String,
        /// Requested.
        #[serde(rename = "requested")]
        wanted: u32,
        /// Most that fit on an empty GPU.
        most: u32,
    },
    /// Together they need more slices than there are.
    TooManySlices {
        /// `memory` or `compute`.
        kind: String,
        /// Requested.
        #[serde(rename = "requested")]
        wanted: u32,
        /// There are.
        have: u32,
    },
    /// No media engine left.
    NoEngine {
        /// `decoder`, `jpeg`, `ofa` …
        engine: String,
        /// Requested.
        #[serde(rename = "requested")]
        wanted: u32,
        /// There are.
        have: u32,
    },
    /// Slices and engines suffice, yet no arrangement of them fits.
    NoArrangement {
        /// A smallest subset of the entries that already can't be placed together.
        entries: Vec<String>,
    },
    /// Compute instances that don't fit into their GPU instance.
    ComputeDoesNotFit {
        /// GPU instance profile.
        profile: String,
        /// Compute instance entries.
        #[serde(rename = "entries")]
        compute: Vec<String>,
    },
    /// Instances in use are in the way.
    Blocked {
        /// A smallest set of them: with these idle, the plan would be feasible.
        blockers: Vec<Blocker>,
    },
    /// The MIG mode or a reset of the GPU is blocked: processes have it open, or it is leased.
    Held {
        /// All of the processes.
        holders: Vec<Holder>,
        /// All of the leases.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        leases: Vec<LeaseUse>,
    },
    /// MIG mode is off and cannot be enabled here, because the reset that it needs is not possible.
    MigOff {
        /// Whether MIG mode is pending, so that only a reset is missing.
        reset_pending: bool,
    },
    /// MIG mode is on, must be off, and cannot be disabled here, for the same reason.
    MigOn {
        /// Whether MIG mode is disabled by a reset that is due.
        reset_pending: bool,
    },
    /// The part has no MIG.
    NoMig,
}

/// A process that has a GPU open and blocks its reset.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Holder {
    /// Process id. Only callers who may see the process get it and the fields that follow, except the devices.
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
    /// systemd service that it belongs to: `nvidia-dcgm`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service: Option<String>,
    /// Device nodes that it has open.
    pub devices: Vec<String>,
}
