//! Placement: which targets a request gets. Pure; the same inputs give the same answer.
//!
//! ```text
//! Host (one snapshot) ─┐
//! Wanted (request) ────┼─► each GPU alone: the best way to hold 0, 1, 2 … members ──► over all GPUs ──► Assignment
//! Policy ──────────────┘
//! ```
//!
//! A gang is placed as a whole or not at all. The search is exact: when an assignment exists it is found, and it is
//! the best by this order, summed over all members:
//!
//! 1. the smallest devices: memory slices, compute slices, engines;
//! 2. fewest instances created, so existing free instances are used first;
//! 3. `pack`: fewest (profile, placement) pairs that become impossible; `spread`: the emptiest GPUs;
//! 4. fewest free GPU instances destroyed, then fewest memory slices of those;
//! 5. `pack`: the fullest GPUs; `spread`: fewest pairs that become impossible;
//! 6. lowest GPU index, lowest placement.
//!
//! Free instances count as room: they are kept for the next request and can be destroyed for another one.
//!
//! Instances that others created are used when they are free and are never destroyed. An instance that is shared
//! through MPS is not offered as a MIG device.
//!
//! MPS targets and time-slice replicas are placed by what is left of them: `pack` takes the fullest that has room,
//! `spread` the emptiest. An MPS target that serves another user is not used.
//!
//! | file | subject |
//! |---|---|
//! | `host` | what the GPUs offer, and what is occupied |
//! | `snapshot` | the offers, from the state of the host |
//! | `size` | which profiles meet a request |
//! | `cost` | the objective |
//! | `mig` | the best ways to hold members on one GPU with MIG devices |
//! | `single` | MPS, time-slicing, whole GPUs |
//! | `gang` | the best distribution over GPUs |
//! | `error` | why there is no assignment |
//! | `message` | the same as an error for the caller |
//! | `reserve` | what a waiting request keeps from later ones |
//! | `target` | the planner's target for an assignment |

use std::collections::BTreeSet;

use gpush_api::{LeaseShare, MemoryLimit, Percentage, Placement, Priority};

mod cost;
mod error;
mod gang;
mod host;
mod message;
mod mig;
mod reserve;
mod single;
mod size;
mod snapshot;
mod target;

pub use error::{LargestFree, NoAssignment, Obstacle};
pub use host::{Closed, Device, GpuOffer, Host, Instance, MigOffer, MpsOffer, TimesliceOffer, WholeOffer};
pub use size::{WantedDevice, nominal_mib};
pub use snapshot::Snapshot;
pub use target::target;

/// Where members are put when there is a choice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Policy {
    /// On full GPUs, so that others stay free for large requests.
    #[default]
    Pack,
    /// On empty GPUs, so that each member has most of the GPU's bandwidth.
    Spread,
}

/// The share that a request wants, its default resolved.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum WantedShare {
    /// A MIG device.
    Mig(WantedDevice),
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

/// A request, as placement needs it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Wanted {
    /// Share of each member.
    pub share: WantedShare,
    /// Number of members.
    pub count: usize,
    /// The user who is admitted.
    pub holder: u32,
    /// Indexes of the GPUs that may be used; `None` for all.
    pub gpus: Option<BTreeSet<u32>>,
    /// UUID of the only MPS target or MIG device that may be used; `None` for all.
    pub target: Option<String>,
}

/// One member of an assignment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Member {
    /// A MIG device that exists.
    Device {
        /// Index of the GPU.
        gpu: u32,
        /// UUID of the MIG device.
        uuid: String,
    },
    /// A GPU instance to create, with one compute instance that takes all of it.
    Create {
        /// Index of the GPU.
        gpu: u32,
        /// Profile id.
        profile_id: u32,
        /// Placement.
        placement: Placement,
    },
    /// A part of an MPS target.
    Mps {
        /// Index of the GPU.
        gpu: u32,
        /// UUID of the target.
        target: String,
        /// Active thread percentage.
        percentage: Percentage,
    },
    /// A time-slice replica.
    Timeslice {
        /// Index of the GPU.
        gpu: u32,
    },
    /// A whole GPU.
    Whole {
        /// Index of the GPU.
        gpu: u32,
    },
}

/// Targets for all members of a request.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Assignment {
    /// Members, by GPU.
    pub members: Vec<Member>,
    /// Free GPU instances to destroy before: GPU index and GPU instance id.
    pub destroys: Vec<(u32, u32)>,
}

impl Assignment {
    /// Whether the grant needs an operation: an instance is created.
    #[must_use]
    pub fn needs_operation(&self) -> bool {
        self.members.iter().any(|member| matches!(member, Member::Create { .. }))
    }

    /// Indexes of the GPUs on which an instance is created, sorted.
    #[must_use]
    pub fn creates(&self) -> BTreeSet<u32> {
        let creates = |member: &&Member| matches!(member, Member::Create { .. });
        self.members.iter().filter(creates).map(Member::gpu).collect()
    }

    /// Indexes of the GPUs, sorted.
    #[must_use]
    pub fn gpus(&self) -> BTreeSet<u32> {
        self.members.iter().map(Member::gpu).collect()
    }
}

impl Member {
    /// Index of its GPU.
    #[must_use]
    pub fn gpu(&self) -> u32 {
        match self {
            Self::Device { gpu, .. }
            | Self::Create { gpu, .. }
            | Self::Mps { gpu, .. }
            | Self::Timeslice { gpu }
            | Self::Whole { gpu } => *gpu,
        }
    }
}

impl WantedShare {
    /// The share of a request. `None` when it names none: see [`super::request::default_share`].
    #[must_use]
    pub fn of(share: &LeaseShare) -> Option<Self> {
        match share {
            LeaseShare::Default => None,
            LeaseShare::MigProfile { profile } => Some(Self::Mig(WantedDevice::Profile(profile.clone()))),
            LeaseShare::MigSize { memory_mib, slices } => Some(Self::Mig(WantedDevice::AtLeast {
                memory_mib: memory_mib.unwrap_or(0),
                slices: slices.unwrap_or(0),
            })),
            LeaseShare::Mps { percentage, memory_limit_mib, priority } => {
                let (percentage, memory_limit, priority) = (*percentage, *memory_limit_mib, *priority);
                Some(Self::Mps { percentage, memory_limit, priority })
            }
            LeaseShare::Timeslice => Some(Self::Timeslice),
            LeaseShare::Whole => Some(Self::Whole),
        }
    }
}

/// Finds targets for a request.
///
/// # Errors
/// Why there are none: the request can never be met, or not now.
pub fn place(host: &Host, wanted: &Wanted, policy: Policy) -> Result<Assignment, NoAssignment> {
    match gang::best(host, wanted, policy, Blocked::Never) {
        Some(assignment) => Ok(assignment),
        None => Err(error::explain(host, wanted, policy)),
    }
}

/// Whether capacity in use may be chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Blocked {
    /// No: the assignment is executed now.
    Never,
    /// Where there is no other way: the assignment is a reservation.
    Last,
}

#[cfg(test)]
mod tests;
#[cfg(test)]
pub(super) use tests::scene;
