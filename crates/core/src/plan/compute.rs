//! Compute instances of one GPU instance: which are kept, which are destroyed, and where new ones
//! are placed.
//!
//! The module uses the same exact search as for GPU instances. In a kept GPU instance, matching
//! compute instances are kept. Other existing compute instances are destroyed, and missing compute
//! instances are created. A new GPU instance has no compute instances to keep.

use std::borrow::Cow;

use gpush_api::{ComputeInstance, GpuInstance, Placement};

use crate::geometry::{Compute, MOST_INSTANCES, Profile, Slices, Spot};

use super::ProtectedInstances;
use super::objective::Cost;
use super::room::Room;
use super::search::{Candidate, ItemGroup, SearchProblem, rank};
use super::target::RequestedCompute;

/// The changes that give a GPU instance its requested compute instances.
#[derive(Debug, Default)]
pub(super) struct Adaptation {
    /// Cost of the destroyed instances.
    pub(super) cost: Cost,
    /// Compute instances to destroy, as positions in the GPU instance.
    pub(super) destroy: Vec<usize>,
    /// Compute instances to create: the position in the request, and the placement; `None` if the
    /// driver chooses the placement.
    pub(super) create: Vec<(usize, Option<Placement>)>,
}

/// Returns whether a compute instance must be kept: it is leased, a process runs in it, or the
/// driver reports a process only for its GPU instance.
pub(super) fn in_use(instance: &GpuInstance, compute: &ComputeInstance, holds: &ProtectedInstances) -> bool {
    let is_leased = !holds.leases(instance.id, compute.id).is_empty();
    is_leased || !compute.processes.is_empty() || !instance.processes.is_empty()
}

/// Returns the cost of destroying one compute instance alone.
fn cost_of(instance: &GpuInstance, compute: &ComputeInstance, holds: &ProtectedInstances) -> Cost {
    Cost::in_use(usize::from(in_use(instance, compute, holds)))
        + Cost::with_mps_daemon(usize::from(holds.has_mps_daemon(instance.id, compute.id)))
}

/// Returns the cost of destroying a GPU instance with its compute instances.
pub(super) fn cost_of_all(instance: &GpuInstance, holds: &ProtectedInstances) -> Cost {
    let mut cost = Cost::gpu_instances(1) + Cost::slices(usize::from(instance.placement.size));
    if instance.compute.is_empty() {
        cost += Cost::in_use(usize::from(!instance.processes.is_empty()));
    }
    for compute in &instance.compute {
        cost += cost_of(instance, compute, holds);
    }
    cost
}

/// Returns the cost of only adding compute instances. If the driver reports a process for the GPU
/// instance itself, an addition costs as much as destroying an instance in use: the new compute
/// instance could not be removed again while that process runs.
fn cost_of_adding(instance: Option<&GpuInstance>, create: &[(usize, Option<Placement>)]) -> Cost {
    let charged = instance.is_some_and(|i| !i.processes.is_empty());
    Cost::in_use(usize::from(charged && !create.is_empty()))
}

/// Returns whether the compute instances fit together into one GPU instance of the profile.
pub(super) fn fits(profile: Option<&Profile>, wanted: &[RequestedCompute]) -> bool {
    adapt(profile, wanted, None, &ProtectedInstances::default()).is_some()
}

/// Returns the best changes from the compute instances of `instance` to `wanted`. For a new GPU
/// instance, `instance` is `None`. Returns `None` if `wanted` does not fit into one GPU instance.
pub(super) fn adapt(
    profile: Option<&Profile>,
    wanted: &[RequestedCompute],
    instance: Option<&GpuInstance>,
    holds: &ProtectedInstances,
) -> Option<Adaptation> {
    if let Some(simple) = trivial_adaptation(profile, wanted, instance) {
        return Some(simple);
    }
    if !within_capacity(profile, wanted) {
        return None;
    }
    let standing = instance.map_or_else(Vec::new, |i| PresentCompute::of(profile, i, holds));
    let (groups, members) = group_equal(profile, wanted, &standing);
    let mut destroy_all = Cost::NONE;
    for compute in &standing {
        destroy_all += compute.saving;
    }
    let answer = SearchProblem { groups: &groups, destroy_all, room: &|_| Room::default() }.solve()?;

    // A driver that does not report placements does not accept placements in requests either.
    let reported = instance.is_none_or(|i| i.compute.iter().all(|c| c.placement.is_some()));
    let mut stays = vec![false; standing.len()];
    let mut create = Vec::new();
    for (thing, &position) in members.iter().flatten().enumerate() {
        let choice = answer.candidate(thing);
        let want = &wanted[position];
        let spot = spots(profile, want)[choice];
        match standing.iter().position(|s| s.matches(want, spot)) {
            Some(kept) => stays[kept] = true,
            None => {
                let placed = reported && is_placed_by_gpush(profile, want);
                create.push((position, placed.then_some(spot.placement)));
            }
        }
    }
    let destroy: Vec<usize> = (0..standing.len()).filter(|n| !stays[*n]).collect();
    let mut cost = answer.cost;
    if destroy.is_empty() {
        cost += cost_of_adding(instance, &create);
    }
    Some(Adaptation { cost, destroy, create })
}

/// Handles the common case without a search. The request is one compute instance that occupies the
/// whole GPU instance. The existing GPU instance, if any, has no compute instance or exactly this
/// compute instance.
fn trivial_adaptation(
    profile: Option<&Profile>,
    wanted: &[RequestedCompute],
    instance: Option<&GpuInstance>,
) -> Option<Adaptation> {
    let ([want], Some(whole)) = (wanted, profile?.whole()) else { return None };
    if want.profile_id != whole.profile.id || want.at.is_some() {
        return None;
    }
    match instance.map(|i| i.compute.as_slice()) {
        None | Some([]) => {
            let create = vec![(0, None)];
            Some(Adaptation { cost: cost_of_adding(instance, &create), create, ..Adaptation::default() })
        }
        Some([there]) if there.profile_id == want.profile_id => Some(Adaptation::default()),
        Some(_) => None,
    }
}

/// Checks only slices and counts, because the search checks placements.
fn within_capacity(profile: Option<&Profile>, wanted: &[RequestedCompute]) -> bool {
    let Some(profile) = profile else { return wanted.len() <= MOST_INSTANCES };
    let known = || wanted.iter().filter_map(|w| profile.compute(w.profile_id));
    let slices: u32 = known().map(|c| u32::from(c.profile.slices)).sum();
    wanted.len() <= MOST_INSTANCES
        && slices <= u32::from(profile.profile.slices)
        && known()
            .all(|c| known().filter(|other| other.profile.id == c.profile.id).count() <= usize::from(c.profile.max))
}

/// An existing compute instance.
struct PresentCompute {
    profile_id: u32,
    spot: Spot,
    /// The cost of destroying the instance, which is saved if the instance is kept.
    saving: Cost,
}

impl PresentCompute {
    fn of(profile: Option<&Profile>, instance: &GpuInstance, holds: &ProtectedInstances) -> Vec<Self> {
        let mut taken = Slices::NONE;
        for compute in &instance.compute {
            taken = taken.union(compute.placement.map_or(Slices::NONE, Slices::of));
        }
        let known = |compute: &ComputeInstance| profile.and_then(|p| p.compute(compute.profile_id));
        let mut standing: Vec<Self> = instance
            .compute
            .iter()
            .map(|compute| Self {
                profile_id: compute.profile_id,
                spot: compute.placement.map_or(UNKNOWN_SPOT, Spot::from_placement),
                saving: Cost::compute_instances(1) + cost_of(instance, compute, holds),
            })
            .collect();
        // Begin with the instances that have the fewest spots. Otherwise a small instance could take the only spot of a
        // large one.
        let mut unplaced: Vec<usize> =
            (0..standing.len()).filter(|n| instance.compute[*n].placement.is_none()).collect();
        unplaced.sort_by_key(|n| known(&instance.compute[*n]).map_or(usize::MAX, |compute| compute.spots.len()));
        for n in unplaced {
            let guess = guess(known(&instance.compute[n]), taken);
            taken = taken.union(guess.slices);
            standing[n].spot = guess;
        }
        standing
    }

    fn matches(&self, want: &RequestedCompute, spot: Spot) -> bool {
        // The start and the profile identify the instance. The size may differ from the planned
        // size, because the driver may reserve more slots than planned.
        self.profile_id == want.profile_id && self.spot.placement.start == spot.placement.start
    }
}

/// Returns a guess for a compute instance whose placement the driver does not report: the lowest
/// free spot.
fn guess(profile: Option<&Compute>, taken: Slices) -> Spot {
    profile
        .and_then(|p| p.spots.iter().find(|s| !s.slices.overlaps(taken)).or_else(|| p.spots.first()))
        .copied()
        .unwrap_or(UNKNOWN_SPOT)
}

/// The spot of a compute instance whose profile and placement are unknown. This spot occupies all
/// slices.
const UNKNOWN_SPOT: Spot = Spot { placement: Placement { start: 0, size: u8::MAX }, slices: Slices::ALL };

/// Returns the possible spots for a requested compute instance.
fn spots<'a>(profile: Option<&'a Profile>, want: &RequestedCompute) -> Cow<'a, [Spot]> {
    match (want.at, profile.and_then(|p| p.compute(want.profile_id))) {
        (Some(at), _) => Cow::Owned(vec![Spot::from_placement(at)]),
        (None, Some(compute)) => Cow::Borrowed(&compute.spots),
        (None, None) => Cow::Owned(vec![UNKNOWN_SPOT]),
    }
}

/// Returns whether gpush chooses the placement: several placements are possible, and the driver
/// reports placements.
fn is_placed_by_gpush(profile: Option<&Profile>, want: &RequestedCompute) -> bool {
    match profile.and_then(|p| p.compute(want.profile_id)) {
        Some(compute) => compute.placeable && compute.spots.len() > 1,
        None => want.at.is_some(),
    }
}

/// Groups equal requested compute instances. The groups that are hardest to place come first. Also
/// returns, for each group, the positions of its members in the request.
fn group_equal(
    profile: Option<&Profile>,
    wanted: &[RequestedCompute],
    standing: &[PresentCompute],
) -> (Vec<ItemGroup>, Vec<Vec<usize>>) {
    let mut members: Vec<Vec<usize>> = Vec::with_capacity(wanted.len());
    for (position, want) in wanted.iter().enumerate() {
        match members.iter_mut().find(|alike| wanted[alike[0]] == *want) {
            Some(alike) => alike.push(position),
            None => members.push(vec![position]),
        }
    }
    members.sort_by_cached_key(|alike| (spots(profile, &wanted[alike[0]]).len(), wanted[alike[0]].profile_id));
    let groups = members
        .iter()
        .map(|alike| {
            let want = &wanted[alike[0]];
            let candidate = |spot: &Spot| {
                let there = standing.iter().find(|s| s.matches(want, *spot));
                Candidate {
                    slices: there.map_or(spot.slices, |s| s.spot.slices),
                    rank: rank(spot.placement.start, want.profile_id),
                    saving: there.map_or(Cost::NONE, |s| s.saving),
                }
            };
            ItemGroup { count: alike.len(), candidates: spots(profile, want).iter().map(candidate).collect() }
        })
        .collect();
    (groups, members)
}
