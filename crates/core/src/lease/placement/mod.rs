//! Placement: chooses the targets of a request. It is a pure function: the same inputs give the
//! same result.
//!
//! ```text
//! Host (one snapshot) ─┐
//! PlacementRequest ────┼─► each GPU alone: the best way to hold 0, 1, 2 … members ──► over all GPUs ──► Assignment
//! PlacementPolicy ─────┘
//! ```
//!
//! A gang is placed completely or not at all. The search is exact: it finds the best assignment if
//! any assignment is possible. Assignments are compared by these criteria, in this order, summed
//! over all members. A reservation may use capacity that is in use, so first it compares what must end: the fewest shares
//! without a known end, then the earliest time at which the last one ends, then the fewest shares.
//!
//! 1. smallest devices: memory slices, compute slices, engines;
//! 2. `pack`: least room taken from later requests, see `plan::room`;
//! 3. fewest instances created, so that existing free instances are used first;
//! 4. `spread`: emptiest GPUs;
//! 5. fewest free GPU instances destroyed, then fewest memory slices of these instances;
//! 6. `pack`: fullest GPUs; `spread`: least room taken from later requests;
//! 7. lowest GPU index, lowest placement.
//!
//! A lease on a GPU with fixed instances takes no room. So `pack` fills such GPUs first, one after the other.
//!
//! Free instances count as free capacity. They are kept for later requests, but can be destroyed
//! for a request that needs other instances.
//!
//! Placement uses free instances that other programs created, but never destroys them. An instance
//! that is shared through MPS is not offered as a MIG device.
//!
//! MPS targets are chosen by their remaining capacity: `pack` takes the fullest target with enough room, and `spread` the
//! emptiest. An MPS target that serves another user is not used. Time-slice replicas share a GPU without limits, so both
//! policies take the GPU with the fewest leases.
//!
//! | file | subject |
//! |---|---|
//! | `host` | what the GPUs offer, and which capacity is occupied |
//! | `snapshot` | builds the offers from the state of the host |
//! | `size` | which profiles fulfil a request |
//! | `cost` | the objective |
//! | `ends` | when leases in the way of a reservation end |
//! | `choice` | one choice of targets on one GPU |
//! | `mig` | the best ways to place members on the MIG devices of one GPU |
//! | `single` | MPS, time-slicing, whole GPUs |
//! | `gang` | the best distribution over GPUs |
//! | `error` | why a request cannot be placed, as a type |
//! | `blockers` | the leases and processes without which a request would be granted |
//! | `message` | why a request cannot be placed, as an error for the caller |
//! | `error_context` | what an error needs to know, and which shares the quota of the user allows |
//! | `offer` | the names of requests, and smaller requests |
//! | `other_requests` | hints: the same request on other GPUs, and one for fewer members |
//! | `obstacle_text` | why a GPU does not meet a request now, in words |
//! | `reserve` | capacity that is reserved for a queued request |
//! | `target` | the planner's target for an assignment |

use std::collections::BTreeSet;

use gpush_api::{GpuIndex, LeaseShare, MemoryLimit, Percentage, Placement, Priority, TargetUuid};

mod blockers;
mod choice;
mod cost;
mod ends;
mod equal_gpus;
mod error;
mod error_context;
mod gang;
mod host;
mod message;
mod mig;
mod obstacle_text;
mod offer;
mod other_requests;
mod reserve;
mod single;
mod size;
mod snapshot;
mod target;

pub use blockers::{Blockers, blockers, instances_that_block, occupied_targets};
pub use ends::LeaseEnd;
pub use error::{FreeShare, NoAssignment, Obstacle};
pub use error_context::ErrorContext;
pub use host::{
    Closed, Device, GpuOffer, Host, Instance, KnownEnd, MigOffer, MpsOffer, TimesliceOffer, Unoffered, WholeOffer,
};
pub use offer::smaller;
pub use size::{RequestedDevice, nominal_mib};
pub use snapshot::Snapshot;
pub use target::target;

/// Which GPUs are preferred if several are possible.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum PlacementPolicy {
    /// Full GPUs, so that empty GPUs stay free for large requests.
    #[default]
    Pack,
    /// Empty GPUs, so that each member gets most of its GPU's bandwidth.
    Spread,
}

/// The requested share. A request without a kind gets the default kind before placement.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum RequestedShare {
    /// A MIG device.
    Mig(RequestedDevice),
    /// A part of an MPS target.
    Mps {
        /// Active thread percentage; `None` for the target's default.
        percentage: Option<Percentage>,
        /// Memory limit.
        memory_limit: Option<MemoryLimit>,
        /// Priority of kernels.
        priority: Option<Priority>,
    },
    /// A time-slice replica.
    Timeslice,
    /// A whole GPU.
    Whole,
}

/// A request, in the form that placement needs.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PlacementRequest {
    /// Share of each member.
    pub share: RequestedShare,
    /// Number of members.
    pub count: usize,
    /// User id of the holder.
    pub holder: u32,
    /// Indexes of the GPUs that may be used; `None` for all GPUs.
    pub gpus: Option<BTreeSet<GpuIndex>>,
    /// UUIDs of the MPS targets or MIG devices that may be used; `None` for all targets.
    pub targets: Option<BTreeSet<TargetUuid>>,
}

impl PlacementRequest {
    /// Returns the request in the form in which equal requests have equal results. Only the placement on MPS targets
    /// depends on the holder.
    #[must_use]
    pub fn key(&self) -> Self {
        let is_mps = matches!(self.share, RequestedShare::Mps { .. });
        Self { holder: if is_mps { self.holder } else { 0 }, ..self.clone() }
    }

    /// Returns whether the request may use this target.
    pub(super) fn has_target(&self, uuid: &TargetUuid) -> bool {
        self.targets.as_ref().is_none_or(|targets| targets.contains(uuid))
    }
}

/// One member of an assignment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Member {
    /// An existing MIG device.
    Device {
        /// Index of the GPU.
        gpu: GpuIndex,
        /// UUID of the MIG device.
        uuid: TargetUuid,
    },
    /// A GPU instance to create, with one compute instance that occupies the whole GPU instance.
    Create {
        /// Index of the GPU.
        gpu: GpuIndex,
        /// Profile id.
        profile_id: u32,
        /// Placement.
        placement: Placement,
    },
    /// A part of an MPS target.
    Mps {
        /// Index of the GPU.
        gpu: GpuIndex,
        /// UUID of the target.
        target: TargetUuid,
        /// Active thread percentage.
        percentage: Percentage,
    },
    /// A time-slice replica.
    Timeslice {
        /// Index of the GPU.
        gpu: GpuIndex,
    },
    /// A whole GPU.
    Whole {
        /// Index of the GPU.
        gpu: GpuIndex,
    },
}

/// Targets for all members of a request.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Assignment {
    /// Members, sorted by GPU.
    pub members: Vec<Member>,
    /// Free GPU instances to destroy before the grant: GPU index and GPU instance id.
    pub destroys: Vec<(GpuIndex, u32)>,
}

impl Assignment {
    /// Returns whether the grant creates an instance, and therefore needs an operation.
    #[must_use]
    pub fn needs_operation(&self) -> bool {
        self.members.iter().any(|member| matches!(member, Member::Create { .. }))
    }

    /// Returns the indexes of the GPUs on which the grant creates an instance, sorted.
    #[must_use]
    pub fn creates(&self) -> BTreeSet<GpuIndex> {
        let creates = |member: &&Member| matches!(member, Member::Create { .. });
        self.members.iter().filter(creates).map(Member::gpu).collect()
    }

    /// Returns the indexes of the members' GPUs, sorted.
    #[must_use]
    pub fn gpus(&self) -> BTreeSet<GpuIndex> {
        self.members.iter().map(Member::gpu).collect()
    }
}

impl Member {
    /// Returns the index of the member's GPU.
    #[must_use]
    pub fn gpu(&self) -> GpuIndex {
        match self {
            Self::Device { gpu, .. }
            | Self::Create { gpu, .. }
            | Self::Mps { gpu, .. }
            | Self::Timeslice { gpu }
            | Self::Whole { gpu } => *gpu,
        }
    }
}

impl RequestedShare {
    /// Returns the share of a request; `None` if the request does not choose a kind: see
    /// [`super::request::default_share`].
    #[must_use]
    pub fn of(share: &LeaseShare) -> Option<Self> {
        match share {
            LeaseShare::Default {} => None,
            LeaseShare::MigProfile { profile } => Some(Self::Mig(RequestedDevice::Profile(profile.clone()))),
            LeaseShare::MigSize { memory_mib, slices } => Some(Self::Mig(RequestedDevice::AtLeast {
                memory_mib: memory_mib.unwrap_or(0),
                slices: slices.unwrap_or(0),
            })),
            LeaseShare::Mps { percentage, memory_limit_mib, priority } => {
                let (percentage, memory_limit, priority) = (*percentage, *memory_limit_mib, *priority);
                Some(Self::Mps { percentage, memory_limit, priority })
            }
            LeaseShare::Timeslice {} => Some(Self::Timeslice),
            LeaseShare::Whole {} => Some(Self::Whole),
        }
    }
}

/// Chooses targets for a request.
///
/// # Errors
/// No targets are possible: the request can never be fulfilled, or cannot be fulfilled now.
pub fn place(host: &Host, wanted: &PlacementRequest, policy: PlacementPolicy) -> Result<Assignment, NoAssignment> {
    match gang::best(host, wanted, policy, UseOccupied::Never) {
        Some(assignment) => Ok(assignment),
        None => Err(error::explain(host, wanted, policy)),
    }
}

/// Does the same as [`place`], but does not look for the reason if no targets are possible.
pub(crate) fn find(host: &Host, wanted: &PlacementRequest, policy: PlacementPolicy) -> Option<Assignment> {
    gang::best(host, wanted, policy, UseOccupied::Never)
}

/// Finds the reason why a request cannot be placed.
pub(crate) fn explain(host: &Host, wanted: &PlacementRequest, policy: PlacementPolicy) -> NoAssignment {
    error::explain(host, wanted, policy)
}

/// Returns whether the GPUs could fulfil a request if all of them were empty.
pub(crate) fn is_possible(host: &Host, wanted: &PlacementRequest, policy: PlacementPolicy) -> bool {
    error::is_possible(host, wanted, policy)
}

/// Whether the search may choose capacity that is in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum UseOccupied {
    /// The search chooses only free capacity, because the assignment is executed now.
    Never,
    /// The search chooses capacity in use only if no other choice is possible. Such an assignment is a reservation.
    Last,
}

#[cfg(test)]
mod tests;
#[cfg(test)]
pub(crate) use tests::{legal, scene};
