//! The planner: exact, minimal plans from the current instances of a GPU to the requested ones.
//!
//! ```text
//! Layout ──resolve──► Target ─┐
//!                             ├─► arrange ──► steps      the plan
//! instances and their users ──┘       │
//!                                     └─────► refusal    the simplest reason why no plan is possible
//! ```
//!
//! Every plan satisfies these constraints:
//!
//! - Instances in use are kept.
//! - Every fixed placement is used.
//! - No step exceeds the slices, engines or counts of the GPU, so the driver has no reason to
//!   refuse a step.
//!
//! Among these plans, the planner chooses by these criteria, in this order:
//!
//! 1. fewest destroyed compute instances with an MPS daemon;
//! 2. fewest destroyed GPU instances;
//! 3. fewest destroyed compute instances in GPU instances that are kept;
//! 4. fewest destroyed memory slices;
//! 5. most room for later instances: first beside the planned instances, then if some of them end, see `room`;
//! 6. lowest placements, by start and then profile id.
//!
//! `tests/oracle` shows, by an exhaustive search, that no better plan exists.
//!
//! A compute instance is *in use* if a process runs in it, or if it is leased, even without a
//! process. If the driver reports a process for a GPU instance but for none of its compute
//! instances, all its compute instances are in use, and no compute instance is added.
//!
//! | file | subject |
//! |---|---|
//! | `target` | the instances that one GPU should have |
//! | `resolve` | the target of a layout on one geometry |
//! | `packing` | how many GPU instances a list of compute instances needs |
//! | `capacity` | the total demand of a target |
//! | `arrange` | the best arrangement of GPU instances |
//! | `compute` | the best arrangement of compute instances in one GPU instance |
//! | `search` | the exact search that `arrange` and `compute` use |
//! | `objective` | the cost of a plan |
//! | `room` | how much a GPU offers to later requests |
//! | `steps` | the ordered steps that lead to the arrangement |
//! | `refusal` | why there is no plan |
//! | `partial_restore` | the part of a previous layout that can be restored |
//! | `outcome` | the instances after a plan, and instances of other programs |

use std::collections::{BTreeMap, BTreeSet};

use gpush_api::{ComputeInstance, Gpu, GpuInstance, InstanceStep, LeaseUse, Placement, Refusal, TargetUuid};

use crate::geometry::Geometry;

mod arrange;
mod capacity;
mod compute;
mod objective;
mod outcome;
mod packing;
mod partial_restore;
mod refusal;
mod resolve;
mod room;
mod search;
mod steps;
mod target;

pub(crate) use capacity::Demand;
pub(crate) use room::{HeldInstance, Room};

pub use outcome::{exact_layout, foreign_instances, outcome};
pub use partial_restore::{Missing, PartialRestore, partial_restore};
pub use target::{RequestedCompute, RequestedInstance, Target};

/// A plan: its steps, and the instances that it keeps.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Plan {
    /// Steps, in order; empty if the GPU already has the instances of the target.
    pub steps: Vec<InstanceStep>,
    /// Ids of the GPU instances that are kept, sorted by placement.
    pub keeps: Vec<u32>,
    /// Placement of each GPU instance of the target, in the order of the target.
    pub placements: Vec<Placement>,
}

/// Leased instances, which a plan never destroys, and compute instances with an MPS daemon, which a
/// plan destroys only if no other plan is possible.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ProtectedInstances {
    /// Compute instances with an MPS daemon, by the ids of their GPU instance and compute instance.
    mps_daemons: BTreeSet<(u32, u32)>,
    /// Leases, by the ids of their GPU instance and compute instance.
    leases: BTreeMap<(u32, u32), Vec<LeaseUse>>,
}

impl ProtectedInstances {
    /// Returns the leased instances of a GPU, and the instances with an MPS daemon.
    #[must_use]
    pub fn of(gpu: &Gpu) -> Self {
        let instances = gpu.mig.as_ref().map_or(&[][..], |mig| &mig.instances);
        Self::default().with_leases(instances, &gpu.leases).with_mps_daemons(instances, &gpu.mps_daemons)
    }

    /// Adds the instances whose MIG devices have an MPS daemon. `daemons` contains the UUIDs of the
    /// targets with a daemon.
    #[must_use]
    pub fn with_mps_daemons(mut self, instances: &[GpuInstance], daemons: &BTreeSet<TargetUuid>) -> Self {
        let has_daemon = |compute: &ComputeInstance| compute.uuid.as_ref().is_some_and(|uuid| daemons.contains(uuid));
        for instance in instances {
            let own = instance.compute.iter().filter(|compute| has_daemon(compute));
            self.mps_daemons.extend(own.map(|compute| (instance.id, compute.id)));
        }
        self
    }

    /// Adds the leases on the MIG devices of these instances. Ignores leases on other targets.
    fn with_leases(mut self, instances: &[GpuInstance], leases: &[LeaseUse]) -> Self {
        for instance in instances {
            for compute in &instance.compute {
                let on_device = leases.iter().filter(|lease| Some(&lease.target) == compute.uuid.as_ref());
                let on_device: Vec<LeaseUse> = on_device.cloned().collect();
                if !on_device.is_empty() {
                    self.leases.insert((instance.id, compute.id), on_device);
                }
            }
        }
        self
    }

    /// Returns the leases on a compute instance.
    fn leases(&self, gi: u32, ci: u32) -> &[LeaseUse] {
        self.leases.get(&(gi, ci)).map_or(&[], Vec::as_slice)
    }

    fn has_mps_daemon(&self, gi: u32, ci: u32) -> bool {
        self.mps_daemons.contains(&(gi, ci))
    }
}

/// Returns a plan that changes a GPU from `instances` to `target`.
///
/// # Errors
/// The simplest reason why no plan is possible.
pub fn plan(geometry: &Geometry, instances: &[GpuInstance], target: &Target) -> Result<Plan, Refusal> {
    plan_protecting(geometry, instances, target, &ProtectedInstances::default())
}

/// Returns a plan that changes a GPU from `instances` to `target` and respects `holds`.
///
/// # Errors
/// The simplest reason why no plan is possible. Leased instances count as in use. Instances with an
/// MPS daemon are destroyed only if no other plan is possible.
pub fn plan_protecting(
    geometry: &Geometry,
    instances: &[GpuInstance],
    target: &Target,
    holds: &ProtectedInstances,
) -> Result<Plan, Refusal> {
    let Some(best) = arrange::arrange(geometry, instances, target, holds) else {
        return Err(refusal::smallest_reason(geometry, target));
    };
    if best.cost.destroys_in_use() {
        return Err(refusal::blocked(&best, holds));
    }
    let mut kept: Vec<&GpuInstance> = best.placed.iter().filter_map(|p| p.kept).collect();
    kept.sort_by_key(|i| i.placement);
    Ok(Plan {
        steps: steps::steps(&best),
        keeps: kept.iter().map(|i| i.id).collect(),
        placements: best.placed.iter().map(|p| p.placement).collect(),
    })
}
