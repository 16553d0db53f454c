//! What of a previous layout can stand again beside instances that must stay.
//!
//! When a change is taken back, somebody may have come into one of its new instances meanwhile.
//! That one stays as it stands, and whatever of the previous layout does not meet it comes back:
//! half a layout that people can work on is better than none.

use std::collections::BTreeSet;

use gpush_api::{Blocker, GpuInstance, Placement};

use crate::geometry::{Geometry, Slices};

use super::arrange::fits;
use super::compute;
use super::target::{Target, Wanted};

/// As much of a previous layout as can stand.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Beside {
    /// What stays, and what comes back beside it.
    pub target: Target,
    /// What stays and was not so before, with who uses it.
    pub stays: Vec<Blocker>,
    /// What does not come back.
    pub missing: Vec<Missing>,
    /// Ids of GPU instances that stay because somebody else has made them.
    pub others: BTreeSet<u32>,
}

/// An instance of the previous layout that does not come back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Missing {
    /// `3g.40gb@4`, or `1c.3g.40gb in 3g.40gb@4`.
    pub what: String,
    /// Where the GPU instances stand that are in its way.
    pub behind: Vec<Placement>,
}

/// As much of `previous` as can stand beside the instances of `now` that are in use, or that are
/// `untouchable` for another reason; those stay whole. Where a GPU instance in use was there
/// before, only its compute instances in use must stay.
#[must_use]
pub fn beside(
    geometry: &Geometry,
    now: &[GpuInstance],
    previous: &[GpuInstance],
    untouchable: impl Fn(&GpuInstance) -> bool,
) -> Beside {
    let mut found =
        Beside { target: Target::default(), stays: Vec::new(), missing: Vec::new(), others: BTreeSet::new() };
    let mut standing: Vec<&GpuInstance> = Vec::new();
    for instance in now.iter().filter(|instance| in_use(instance) || untouchable(instance)) {
        let whole = untouchable(instance) || !instance.processes.is_empty();
        found.keep(geometry, instance, previous.iter().find(|p| is_same(p, instance)), whole);
        standing.push(instance);
    }
    for instance in previous.iter().filter(|p| standing.iter().all(|i| !is_same(p, i))) {
        let slices = Slices::of(instance.placement);
        let meets = |i: &&&GpuInstance| Slices::of(i.placement).meets(slices);
        let mut behind: Vec<Placement> = standing.iter().filter(meets).map(|i| i.placement).collect();
        if behind.is_empty() {
            let mut more = found.target.clone();
            more.instances.push(wanted(geometry, instance));
            if fits(geometry, &more) {
                found.target = more;
                continue;
            }
            // Slices are free, engines are not.
            behind = standing.iter().map(|i| i.placement).collect();
        }
        found.missing.push(Missing { what: name(instance), behind });
    }
    found
}

impl Beside {
    /// Keeps an instance: as it stands, or with as many of its former compute instances as can be.
    fn keep(&mut self, geometry: &Geometry, instance: &GpuInstance, before: Option<&GpuInstance>, whole: bool) {
        let as_it_stands = wanted(geometry, instance);
        let Some(before) = before else {
            self.stays.push(blocker(instance));
            self.target.instances.push(as_it_stands);
            return;
        };
        let former = wanted(geometry, before);
        let mut kept = as_it_stands.clone();
        if !whole && instance.compute.iter().all(|c| c.placement.is_some()) {
            let users = instance.compute.iter().map(|c| !c.processes.is_empty());
            let mut users = users.chain(std::iter::repeat(true));
            kept.compute.retain(|_| users.next().unwrap_or(true));
            for compute in &former.compute {
                let free = kept.compute.iter().all(|k| match (k.at, compute.at) {
                    (Some(one), Some(other)) => !Slices::of(one).meets(Slices::of(other)),
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

fn wanted(geometry: &Geometry, instance: &GpuInstance) -> Wanted {
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
