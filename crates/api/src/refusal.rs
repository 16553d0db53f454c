//! Refusals: why a layout cannot be planned on a GPU.

use serde::{Deserialize, Serialize};

use crate::{holder::Holder, lease::LeaseUse, placement::Placement, process::Process};

/// An instance that is in use and that a plan would have to destroy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Blocker {
    /// GPU instance id.
    pub gi: u32,
    /// Compute instance id, if only a compute instance is in use.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ci: Option<u32>,
    /// Profile of the GPU instance.
    pub profile: String,
    /// Profile of the compute instance, if it differs from that of the GPU instance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compute_profile: Option<String>,
    /// Placement of the GPU instance.
    pub placement: Placement,
    /// Processes in the instance. Fields that the caller may not see are absent.
    #[serde(rename = "processes")]
    pub holders: Vec<Process>,
    /// Leases on the MIG device.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub leases: Vec<LeaseUse>,
}

/// Why a layout was refused. If several reasons apply, gpushd reports the simplest one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "reason", rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum Refusal {
    /// The GPU has no such profile.
    UnknownProfile {
        /// Profile as written in the request.
        profile: String,
        /// Profiles of the GPU with the most similar names.
        nearest: Vec<String>,
    },
    /// The profile exists, but not at the requested placement.
    NoSuchPlacement {
        /// Profile.
        profile: String,
        /// First memory slice, as written in the request.
        start: u8,
        /// First memory slices that the profile allows.
        possible: Vec<u8>,
    },
    /// Two explicit placements overlap.
    PlacementsOverlap {
        /// First entry.
        first: String,
        /// Second entry.
        second: String,
    },
    /// More instances of one profile than fit on the GPU.
    TooMany {
        /// Profile.
        profile: String,
        /// Requested number.
        #[serde(rename = "requested")]
        wanted: u32,
        /// Maximum number of instances of this profile on an empty GPU.
        most: u32,
    },
    /// The entries together need more slices than the GPU has.
    TooManySlices {
        /// Kind of slices: `memory` or `compute`.
        kind: String,
        /// Requested number.
        #[serde(rename = "requested")]
        wanted: u32,
        /// Number that the GPU has.
        have: u32,
    },
    /// The entries together need more media engines than the GPU has.
    NoEngine {
        /// Kind of engine: `decoder`, `jpeg`, `ofa` …
        engine: String,
        /// Requested number.
        #[serde(rename = "requested")]
        wanted: u32,
        /// Number that the GPU has.
        have: u32,
    },
    /// The GPU has enough slices and engines, but no arrangement of the entries fits.
    NoArrangement {
        /// Smallest set of entries that cannot be placed together.
        entries: Vec<String>,
    },
    /// The compute instances do not fit into their GPU instance.
    ComputeDoesNotFit {
        /// GPU instance profile.
        profile: String,
        /// Entries of the compute instances.
        #[serde(rename = "entries")]
        compute: Vec<String>,
    },
    /// Instances in use block the layout.
    Blocked {
        /// Smallest set of instances that block the layout. If they were idle, the layout would be
        /// possible.
        blockers: Vec<Blocker>,
    },
    /// A change of MIG mode, or the reset that the change needs, is blocked: processes have the GPU
    /// open, or the GPU is leased.
    Held {
        /// All processes that have the GPU open.
        holders: Vec<Holder>,
        /// All leases on the GPU.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        leases: Vec<LeaseUse>,
    },
    /// The MIG mode is already set, but is effective only after a reboot of the host. The host is a virtual machine, which
    /// cannot reset the GPU.
    Reboot {
        /// Whether the reboot enables MIG mode. Otherwise, it disables MIG mode.
        enables: bool,
    },
    /// The GPU does not support MIG.
    NoMig,
}
