//! The planner: exact, minimal plans from the current instances of a GPU to the requested ones.
//!
//! ```text
//! Layout ──resolve──► Target ─┐
//!                             ├─► arrange ──► steps      the plan
//! instances and their users ──┘       │
//!                                     └─────► refusal    the smallest reason why not
//! ```
//!
//! Every plan satisfies these constraints:
//!
//! - Instances in use stay.
//! - Fixed placements are used.
//! - No step exceeds slices, engines or counts, so the driver has no reason to refuse one.
//!
//! Among these plans, the planner chooses by these criteria, in this order:
//!
//! 1. fewest destroyed instances with an MPS daemon;
//! 2. fewest destroyed GPU instances;
//! 3. fewest destroyed compute instances in GPU instances that stay;
//! 4. fewest destroyed memory slices;
//! 5. most (profile, placement) pairs that remain possible;
//! 6. lowest placements, by start and then profile id.
//!
//! `tests/oracle` shows by exhaustive search that there is no better plan.
//!
//! A compute instance is *in use* if a process runs in it, or if it is leased, even if it is idle. If the driver
//! assigns a process to a GPU instance without the compute instance, all its compute instances count as in use, and
//! none is added.
//!
//! | file | subject |
//! |---|---|
//! | `target` | a layout resolved against one geometry |
//! | `packing` | how many GPU instances a list of compute instances needs |
//! | `capacity` | the total demand of a target |
//! | `arrange` | the best arrangement of GPU instances |
//! | `compute` | the same within one GPU instance |
//! | `search` | the exact search that both use |
//! | `objective` | the cost of a plan |
//! | `steps` | the arrangement as ordered steps |
//! | `refusal` | why there is no plan |
//! | `partial_restore` | the part of a previous layout that can be restored |
//! | `outcome` | the instances after a plan, and foreign instances |

use std::collections::{BTreeMap, BTreeSet};

use gpush_api::{GpuInstance, InstanceStep, LeaseUse, Placement, Refusal};

use crate::geometry::Geometry;

mod arrange;
mod capacity;
mod compute;
mod objective;
mod outcome;
mod packing;
mod partial_restore;
mod refusal;
mod search;
mod steps;
mod target;

pub(crate) use capacity::Demand;

pub use outcome::{entries, others, outcome};
pub use partial_restore::{Missing, PartialRestore, partial_restore};
pub use target::{Target, Wanted, WantedCompute};

/// A plan: its steps, and the instances that stay.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Plan {
    /// Steps in order; empty if the GPU already has the target.
    pub steps: Vec<InstanceStep>,
    /// Ids of the GPU instances that stay, sorted by placement.
    pub keeps: Vec<u32>,
    /// Placement of each GPU instance of the target, in the target's order.
    pub placements: Vec<Placement>,
}

/// Leased instances, which are never destroyed, and instances with an MPS daemon, which are destroyed only if there is
/// no other way.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Holds {
    gpu_instances: BTreeSet<u32>,
    compute_instances: BTreeSet<(u32, u32)>,
    /// Leases by the ids of GPU instance and compute instance.
    leases: BTreeMap<(u32, u32), Vec<LeaseUse>>,
}

impl Holds {
    /// Adds a GPU instance by id.
    pub fn add_gpu_instance(&mut self, gi: u32) {
        self.gpu_instances.insert(gi);
    }

    /// Adds a compute instance by the id of its GPU instance and its own id.
    pub fn add_compute_instance(&mut self, gi: u32, ci: u32) {
        self.compute_instances.insert((gi, ci));
    }

    /// Adds the leases on MIG devices of these instances. Leases on other targets are ignored.
    #[must_use]
    pub fn with_leases(mut self, instances: &[GpuInstance], leases: &[LeaseUse]) -> Self {
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

    fn has_gpu_instance(&self, gi: u32) -> bool {
        self.gpu_instances.contains(&gi)
    }

    fn has_compute_instance(&self, gi: u32, ci: u32) -> bool {
        self.compute_instances.contains(&(gi, ci))
    }
}

/// Returns a plan that changes a GPU from `instances` to `target`.
///
/// # Errors
/// The smallest reason why there is no plan.
pub fn plan(geometry: &Geometry, instances: &[GpuInstance], target: &Target) -> Result<Plan, Refusal> {
    plan_around(geometry, instances, target, &Holds::default())
}

/// Returns a plan that changes a GPU from `instances` to `target`, and destroys instances of `holds` only if necessary.
///
/// # Errors
/// The smallest reason why there is no plan. Leased instances count as in use. Instances with an MPS daemon are
/// destroyed only if there is no other plan.
pub fn plan_around(
    geometry: &Geometry,
    instances: &[GpuInstance],
    target: &Target,
    holds: &Holds,
) -> Result<Plan, Refusal> {
    let Some(best) = arrange::arrange(geometry, instances, target, holds) else {
        return Err(refusal::smallest_reason(geometry, target));
    };
    if best.cost.touches_use() {
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
