//! Finds the best arrangement of a target on a GPU: which GPU instances are kept, and where new GPU
//! instances are placed.

use std::borrow::Cow;

use gpush_api::{GpuInstance, Placement};

use crate::geometry::{Geometry, Slices, Spot};

use super::ProtectedInstances;
use super::capacity::Demand;
use super::compute::{self, Adaptation};
use super::objective::Cost;
use super::room::{HeldInstance, Room};
use super::search::{Candidate, ItemGroup, SearchProblem, rank};
use super::target::{RequestedInstance, Target};

/// A requested GPU instance with its placement.
#[derive(Debug)]
pub(super) struct Placed<'a> {
    pub(super) wanted: &'a RequestedInstance,
    pub(super) placement: Placement,
    /// The existing GPU instance that is kept; `None` for a new GPU instance.
    pub(super) kept: Option<&'a GpuInstance>,
    /// The changes to the compute instances of the GPU instance.
    pub(super) compute: Adaptation,
}

/// The arrangement of the whole GPU.
#[derive(Debug)]
pub(super) struct Arrangement<'a> {
    /// Cost of the destroyed instances.
    pub(super) cost: Cost,
    /// The requested GPU instances, in the order of the target.
    pub(super) placed: Vec<Placed<'a>>,
    pub(super) destroyed: Vec<&'a GpuInstance>,
}

/// Returns whether the target fits on an empty GPU.
pub(super) fn fits(geometry: &Geometry, target: &Target) -> bool {
    arrange(geometry, &[], target, &ProtectedInstances::default()).is_some()
}

/// Returns the best arrangement. This arrangement destroys an instance in use only if every
/// possible arrangement destroys an instance in use. Returns `None` if the target does not fit even
/// on an empty GPU with this geometry.
pub(super) fn arrange<'a>(
    geometry: &Geometry,
    instances: &'a [GpuInstance],
    target: &'a Target,
    holds: &ProtectedInstances,
) -> Option<Arrangement<'a>> {
    let demand = Demand::of(geometry, target);
    if !demand.is_met() {
        return None;
    }
    let kinds = kinds(geometry, instances, target, holds)?;
    let mut destroy_all = Cost::NONE;
    for instance in instances {
        destroy_all += compute::cost_of_all(instance, holds);
    }
    let (groups, members): (Vec<ItemGroup>, Vec<Vec<usize>>) = kinds.into_iter().map(|k| (k.group, k.members)).unzip();
    let profiles: Vec<u32> = members.iter().flatten().map(|position| target.instances[*position].profile_id).collect();
    let room_at = |spots: &[Slices]| {
        let instance = |(profile_id, slices): (&u32, &Slices)| HeldInstance::new(geometry, *profile_id, *slices);
        let held: Vec<HeldInstance<'_>> = profiles.iter().zip(spots).map(instance).collect();
        Room::of(geometry, &held)
    };
    let answer = SearchProblem { groups: &groups, destroy_all, room: &room_at }.solve()?;

    let mut placed: Vec<Option<Placed<'a>>> = target.instances.iter().map(|_| None).collect();
    for (thing, &position) in members.iter().flatten().enumerate() {
        let wanted = &target.instances[position];
        let placement = spots(geometry, wanted)[answer.candidate(thing)].placement;
        let kept = existing_instance(instances, wanted, placement);
        let compute = compute::adapt(geometry.profile(wanted.profile_id), &wanted.compute, kept, holds)?;
        placed[position] = Some(Placed { wanted, placement, kept, compute });
    }
    let placed: Vec<Placed<'a>> = placed.into_iter().flatten().collect();
    let stays = |instance: &GpuInstance| placed.iter().any(|p| p.kept.is_some_and(|kept| std::ptr::eq(kept, instance)));
    let destroyed = instances.iter().filter(|i| !stays(i)).collect();
    Some(Arrangement { cost: answer.cost, placed, destroyed })
}

/// Equal requested GPU instances: they have the same profile, the same fixed placement (or none),
/// and the same compute instances.
struct ProfileKind {
    /// Positions of the members in the target.
    members: Vec<usize>,
    group: ItemGroup,
}

/// Returns the groups of equal GPU instances in a target, hardest to place first. Returns `None` if
/// the compute instances of a GPU instance do not fit into it.
fn kinds(
    geometry: &Geometry,
    instances: &[GpuInstance],
    target: &Target,
    holds: &ProtectedInstances,
) -> Option<Vec<ProfileKind>> {
    let mut kinds: Vec<ProfileKind> = Vec::with_capacity(target.instances.len());
    for (position, wanted) in target.instances.iter().enumerate() {
        if let Some(kind) = kinds.iter_mut().find(|k| target.instances[k.members[0]] == *wanted) {
            kind.members.push(position);
            kind.group.count += 1;
            continue;
        }
        let profile = geometry.profile(wanted.profile_id);
        if !compute::fits(profile, &wanted.compute) {
            return None;
        }
        let mut candidates = Vec::new();
        for spot in spots(geometry, wanted).iter() {
            let saving = match existing_instance(instances, wanted, spot.placement) {
                Some(instance) => {
                    compute::cost_of_all(instance, holds)
                        - compute::adapt(profile, &wanted.compute, Some(instance), holds)?.cost
                }
                None => Cost::NONE,
            };
            let rank = rank(spot.placement.start, wanted.profile_id);
            candidates.push(Candidate { slices: spot.slices, rank, saving });
        }
        kinds.push(ProfileKind { members: vec![position], group: ItemGroup { count: 1, candidates } });
    }
    kinds.sort_by_key(|k| (k.group.candidates.len(), target.instances[k.members[0]].profile_id));
    Some(kinds)
}

/// Returns the possible spots for a requested GPU instance.
fn spots<'a>(geometry: &'a Geometry, wanted: &RequestedInstance) -> Cow<'a, [Spot]> {
    match (wanted.at, geometry.profile(wanted.profile_id)) {
        (Some(at), _) => Cow::Owned(vec![Spot::from_placement(at)]),
        (None, Some(profile)) => Cow::Borrowed(&profile.spots),
        (None, None) => Cow::Borrowed(&[]),
    }
}

/// Returns the existing GPU instance that has the requested profile at this placement.
fn existing_instance<'a>(
    instances: &'a [GpuInstance],
    wanted: &RequestedInstance,
    placement: Placement,
) -> Option<&'a GpuInstance> {
    instances.iter().find(|i| i.profile_id == wanted.profile_id && i.placement == placement)
}
