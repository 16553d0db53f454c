//! The planner: from what a GPU holds to what it shall hold, exactly and at the least cost.
//!
//! ```text
//! Layout ──resolve──► Target ─┐
//!                             ├─► arrange ──► steps      the plan
//! what stands, who uses it ───┘       │
//!                                     └─────► refusal    the smallest reason why not
//! ```
//!
//! What holds of every plan: instances in use stay, fixed placements are met, and at no step are
//! slices, engines or numbers exceeded, so that the driver has no cause to refuse one. Among all
//! such plans it is one that destroys, in this order, fewest instances that hold an MPS
//! daemon, fewest GPU instances, fewest compute instances in GPU instances that stay, and fewest
//! memory slices; that leaves the most (profile, placement) pairs to be made later; and that
//! stands lowest, by start and then profile id. There is no better one, which `tests/oracle.rs`
//! shows by trying them all.
//!
//! A compute instance is *in use* when a process runs in it, or when it is leased, idle or not. When the driver
//! charges a process to a GPU instance without saying in which compute instance, all its compute instances are taken
//! to be in use, and none is added.
//!
//! | file | subject |
//! |---|---|
//! | `target` | what is wanted, resolved against one geometry |
//! | `packing` | how many GPU instances a list of compute instances needs |
//! | `capacity` | what a target takes in all |
//! | `arrange` | the best arrangement of GPU instances |
//! | `compute` | the same within one GPU instance |
//! | `search` | the exact search that both use |
//! | `objective` | what it minimises |
//! | `steps` | the arrangement as ordered steps |
//! | `refusal` | why there is none |
//! | `beside` | what of a previous layout can stand beside what must stay |
//! | `outcome` | what stands after a plan, and what is none of its doing |

use std::collections::{BTreeMap, BTreeSet};

use gpush_api::{GpuInstance, InstanceStep, LeaseUse, Placement, Refusal};

use crate::geometry::Geometry;

mod arrange;
mod beside;
mod capacity;
mod compute;
mod objective;
mod outcome;
mod packing;
mod refusal;
mod search;
mod steps;
mod target;

pub(crate) use capacity::Demand;

pub use beside::{Beside, Missing, beside};
pub use outcome::{entries, others, outcome};
pub use target::{Target, Wanted, WantedCompute};

/// What is to be done, and what stays.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Plan {
    /// Steps in order; empty when the GPU is as wanted.
    pub steps: Vec<InstanceStep>,
    /// Ids of the GPU instances that stay, by placement.
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

    /// Adds a compute instance by the ids of its GPU instance and itself.
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

    /// The leases on a compute instance.
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

/// The plan that takes a GPU from `instances` to `target`.
///
/// # Errors
/// The smallest reason why there is none.
pub fn plan(geometry: &Geometry, instances: &[GpuInstance], target: &Target) -> Result<Plan, Refusal> {
    plan_around(geometry, instances, target, &Holds::default())
}

/// The plan that takes a GPU from `instances` to `target` and spares what is held.
///
/// # Errors
/// The smallest reason why there is none. Leased instances are in use; MPS daemons are spared where possible.
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
