//! Finds the part of a previous layout that can be restored when some instances cannot be
//! destroyed.
//!
//! During a change, a process may start in one of the new instances. If the change then fails, that
//! instance cannot be destroyed. So gpush keeps the new instance, and restores every previous
//! instance that does not overlap it. A part of the layout is better than nothing.

use std::collections::BTreeSet;

use gpush_api::{Blocker, GpuInstance, Placement};

use crate::geometry::{Geometry, Slices};

use super::arrange::fits;
use super::compute;
use super::target::{RequestedInstance, Target};

/// The part of a previous layout that can be restored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PartialRestore {
    /// All instances after the restore: the kept instances and the restored instances.
    pub target: Target,
    /// New instances that are kept, with their processes.
    pub stays: Vec<Blocker>,
    /// The previous instances that are not restored.
    pub missing: Vec<Missing>,
    /// Ids of GPU instances that are kept because another program created them.
    pub others: BTreeSet<u32>,
}

/// An instance of the previous layout that is not restored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Missing {
    /// Name of the instance: `3g.40gb@4`, or `1c.3g.40gb in 3g.40gb@4`.
    pub what: String,
    /// Placements of the GPU instances that prevent the restore.
    pub behind: Vec<Placement>,
}

/// Returns the part of `previous` that can be restored. An instance of `now` is kept if it is in
/// use or if `untouchable` returns true for it. If a GPU instance existed before the change, only
/// its compute instances in use are kept.
#[must_use]
pub fn partial_restore(
    geometry: &Geometry,
    now: &[GpuInstance],
    previous: &[GpuInstance],
    untouchable: impl Fn(&GpuInstance) -> bool,
) -> PartialRestore {
    let mut found =
        PartialRestore { target: Target::default(), stays: Vec::new(), missing: Vec::new(), others: BTreeSet::new() };
    let mut standing: Vec<&GpuInstance> = Vec::new();
    for instance in now.iter().filter(|instance| in_use(instance) || untouchable(instance)) {
        let whole = untouchable(instance) || !instance.processes.is_empty();
        found.keep(geometry, instance, previous.iter().find(|p| is_same(p, instance)), whole);
        standing.push(instance);
    }
    for instance in previous.iter().filter(|p| standing.iter().all(|i| !is_same(p, i))) {
        let slices = Slices::of(instance.placement);
        let meets = |i: &&&GpuInstance| Slices::of(i.placement).overlaps(slices);
        let mut behind: Vec<Placement> = standing.iter().filter(meets).map(|i| i.placement).collect();
        if behind.is_empty() {
            let mut more = found.target.clone();
            more.instances.push(requested_instance(geometry, instance));
            if fits(geometry, &more) {
                found.target = more;
                continue;
            }
            // Enough slices are free, but not enough engines. So every remaining instance counts as
            // an obstacle.
            behind = standing.iter().map(|i| i.placement).collect();
        }
        found.missing.push(Missing { what: name(instance), behind });
    }
    found
}

impl PartialRestore {
    /// Keeps an instance. The instance either does not change, or gets back as many of its previous
    /// compute instances as possible.
    fn keep(&mut self, geometry: &Geometry, instance: &GpuInstance, before: Option<&GpuInstance>, whole: bool) {
        let as_it_stands = requested_instance(geometry, instance);
        let Some(before) = before else {
            self.stays.push(blocker(instance));
            self.target.instances.push(as_it_stands);
            return;
        };
        let former = requested_instance(geometry, before);
        let mut kept = as_it_stands.clone();
        if !whole && instance.compute.iter().all(|c| c.placement.is_some()) {
            let users = instance.compute.iter().map(|c| !c.processes.is_empty());
            let mut users = users.chain(std::iter::repeat(true));
            kept.compute.retain(|_| users.next().unwrap_or(true));
            for compute in &former.compute {
                let free = kept.compute.iter().all(|k| match (k.at, compute.at) {
                    (Some(one), Some(other)) => !Slices::of(one).overlaps(Slices::of(other)),
                    (None, _) | (_, None) => false,
                });
                if free {
                    kept.compute.push(compute.clone());
                    if !compute::fits(geometry.profile(instance.profile_id), &kept.compute) {
                        kept.compute.pop();
                    }
                }
            }
        }
        let lost: Vec<_> = former.compute.iter().filter(|c| !kept.compute.contains(c)).collect();
        if !lost.is_empty() || kept.compute.iter().any(|c| !former.compute.contains(c)) {
            self.stays.push(blocker(instance));
        }
        self.missing.extend(lost.iter().map(|compute| Missing {
            what: format!("{} in {}", compute.profile, name(instance)),
            behind: vec![instance.placement],
        }));
        self.target.instances.push(kept);
    }
}

fn in_use(instance: &GpuInstance) -> bool {
    !instance.processes.is_empty() || instance.compute.iter().any(|c| !c.processes.is_empty())
}

fn is_same(one: &GpuInstance, other: &GpuInstance) -> bool {
    (one.profile_id, one.placement) == (other.profile_id, other.placement)
}

fn requested_instance(geometry: &Geometry, instance: &GpuInstance) -> RequestedInstance {
    let mut target = Target::of_instances(geometry, std::slice::from_ref(instance));
    target.instances.remove(0)
}

fn name(instance: &GpuInstance) -> String {
    format!("{}@{}", instance.profile, instance.placement.start)
}

fn blocker(instance: &GpuInstance) -> Blocker {
    let holders = instance.compute.iter().flat_map(|c| &c.processes).chain(&instance.processes).cloned().collect();
    let (profile, placement) = (instance.profile.clone(), instance.placement);
    Blocker { gi: instance.id, ci: None, profile, compute_profile: None, placement, holders, leases: Vec::new() }
}
