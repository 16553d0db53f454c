//! Placement of MIG devices by an exhaustive search. The documentation of `placement` describes the
//! objective. This module is an independent implementation of that objective.

use gpush_api::{ComputeInstance, GpuIndex, GpuInstance, InstanceStep, Placement};

use super::*;
use crate::{
    geometry::{Geometry, Profile},
    plan,
};

/// The cost of an assignment. The elements are in the order of the objective, most important first.
pub(super) type OracleCost = [u64; 8];

/// Returns whether instances can exist together.
pub(crate) fn legal(geometry: &Geometry, instances: &[(u32, Placement)]) -> bool {
    let profiles: Vec<&Profile> = instances.iter().map(|(id, _)| geometry.profile(*id).unwrap()).collect();
    let apart = (0..instances.len()).all(|a| (0..a).all(|b| !instances[a].1.overlaps(instances[b].1)));
    let numbers = profiles.iter().all(|profile| {
        let same = profiles.iter().filter(|other| other.profile.id == profile.profile.id).count();
        same <= usize::from(profile.profile.max)
    });
    let compute: u32 = profiles.iter().map(|profile| u32::from(profile.profile.slices)).sum();
    let engines = (0..geometry.engines.len())
        .all(|e| profiles.iter().map(|profile| profile.engines[e]).sum::<u16>() <= geometry.engines[e]);
    apart && numbers && engines && compute <= u32::from(geometry.compute_slices) && instances.len() <= 8
}

fn all_instances(mig: &MigOffer) -> Vec<(u32, Placement)> {
    mig.instances.iter().map(|instance| (instance.profile_id, instance.placement)).collect()
}

/// Returns the room of a GPU that has these instances. The value of a pair is the square of its memory slices, divided by 4
/// for each instance in its way, and once more if the pair does not fit even without these instances.
fn room(geometry: &Geometry, instances: &[(u32, Placement)]) -> u64 {
    let value = |profile: &Profile, placement: Placement| {
        let rest: Vec<_> = instances.iter().filter(|(_, other)| !other.overlaps(placement)).copied().collect();
        let lacks = usize::from(!legal(geometry, &[&rest[..], &[(profile.profile.id, placement)]].concat()));
        let divisions = instances.len() - rest.len() + lacks;
        u64::from(profile.memory_slices()).pow(2) * 4_u64.pow(8 - divisions as u32)
    };
    geometry
        .profiles
        .iter()
        .flat_map(|profile| profile.spots.iter().map(move |spot| value(profile, spot.placement)))
        .sum()
}

/// Returns the cost of an assignment; `None` if it is not possible.
pub(super) fn cost(host: &Host, assignment: &Assignment, policy: PlacementPolicy) -> Option<OracleCost> {
    let mut cost = OracleCost::default();
    for gpu in &host.gpus {
        let mig = gpu.mig.as_ref().unwrap();
        let destroyed: Vec<&Instance> =
            mig.instances.iter().filter(|instance| assignment.destroys.contains(&(gpu.index, instance.id))).collect();
        if destroyed.iter().any(|instance| instance.foreign || !instance.is_free()) {
            return None;
        }
        let mut chosen: Vec<(u32, Placement)> = Vec::new();
        let mut created = Vec::new();
        for member in assignment.members.iter().filter(|member| member.gpu() == gpu.index) {
            match member {
                Member::Device { uuid, .. } => {
                    let instance = mig.instances.iter().find(|one| one.devices.iter().any(|d| d.uuid == *uuid))?;
                    let is_destroyed = destroyed.iter().any(|one| one.id == instance.id);
                    if !instance.is_free() || is_destroyed {
                        return None;
                    }
                    chosen.push((instance.profile_id, instance.placement));
                }
                Member::Create { profile_id, placement, .. } => {
                    created.push((*profile_id, *placement));
                    chosen.push((*profile_id, *placement));
                }
                Member::Mps { .. } | Member::Timeslice { .. } | Member::Whole { .. } => return None,
            }
        }
        let mut after = all_instances(mig);
        after.retain(|one| destroyed.iter().all(|gone| gone.placement != one.1));
        after.extend(&created);
        if !legal(&mig.geometry, &after) || !created.is_empty() && !mig.dynamic {
            return None;
        }
        let size = |(id, _): &(u32, Placement)| {
            let profile = mig.geometry.profile(*id).unwrap();
            let engines = profile.engines.iter().map(|count| usize::from(*count)).sum::<usize>();
            [usize::try_from(profile.memory_slices()).unwrap(), usize::from(profile.profile.slices), engines]
        };
        let sizes: Vec<[usize; 3]> = chosen.iter().map(size).collect();
        let fixed: Vec<(u32, Placement)> = mig
            .instances
            .iter()
            .filter(|instance| instance.foreign || !instance.is_free())
            .map(|instance| (instance.profile_id, instance.placement))
            .collect();
        let mut with: Vec<(u32, Placement)> = fixed.clone();
        with.extend(chosen.iter().filter(|one| !fixed.contains(one)));
        let occupied: usize = fixed.iter().map(|(_, placement)| usize::from(placement.size)).sum();
        let members = chosen.len();
        let lost = if mig.dynamic { room(&mig.geometry, &fixed) - room(&mig.geometry, &with) } else { 0 };
        let free = if members > 0 { usize::from(mig.geometry.memory_slices) - occupied } else { 0 };
        let own: usize = sizes.iter().map(|size| size[0]).sum();
        let load = if members > 0 { occupied * members + own / members * (members * (members - 1) / 2) } else { 0 };
        let slices: usize = destroyed.iter().map(|instance| usize::from(instance.placement.size)).sum();
        let sum = |n: usize| sizes.iter().map(|size| size[n]).sum::<usize>();
        let [memory, compute, engines, created, gone, slices, free, load] =
            [sum(0), sum(1), sum(2), created.len(), destroyed.len(), slices, free, load].map(|count| count as u64);
        let here = match policy {
            PlacementPolicy::Pack => [memory, compute, engines, lost, created, gone, slices, free],
            PlacementPolicy::Spread => [memory, compute, engines, created, load, gone, slices, lost],
        };
        for (all, here) in cost.iter_mut().zip(here) {
            *all += here;
        }
    }
    Some(cost)
}

/// Returns the least cost of all assignments that fulfil a request.
pub(super) fn least_cost(host: &Host, wanted: &PlacementRequest, policy: PlacementPolicy) -> Option<OracleCost> {
    let RequestedShare::Mig(device) = &wanted.share else { panic!() };
    let mut options = Vec::new();
    for gpu in &host.gpus {
        let mig = gpu.mig.as_ref().unwrap();
        for instance in &mig.instances {
            let profile = mig.geometry.profile(instance.profile_id).unwrap();
            if instance.is_free() && meets(device, profile) {
                options.push(Member::Device { gpu: gpu.index, uuid: instance.devices[0].uuid.clone() });
            }
        }
        for profile in mig.geometry.profiles.iter().filter(|profile| mig.dynamic && meets(device, profile)) {
            let create = |placement| Member::Create { gpu: gpu.index, profile_id: profile.profile.id, placement };
            options.extend(profile.spots.iter().map(|spot| create(spot.placement)));
        }
    }
    let mut least = None;
    choose(host, &options, wanted.count, &mut Vec::new(), policy, &mut least);
    least
}

fn meets(device: &RequestedDevice, profile: &Profile) -> bool {
    match device {
        RequestedDevice::Profile(name) => profile.profile.name == *name,
        RequestedDevice::AtLeast { memory_mib, slices } => {
            nominal_mib(&profile.profile.name).unwrap() >= *memory_mib && profile.profile.slices >= *slices
        }
    }
}

fn choose(
    host: &Host,
    options: &[Member],
    count: usize,
    chosen: &mut Vec<Member>,
    policy: PlacementPolicy,
    least: &mut Option<OracleCost>,
) {
    if chosen.len() == count {
        return destroy(host, chosen, policy, least);
    }
    for (n, option) in options.iter().enumerate() {
        let clashes = |other: &Member| match (option, other) {
            (
                Member::Create { gpu, placement, .. },
                Member::Create { gpu: other_gpu, placement: other_placement, .. },
            ) => gpu == other_gpu && placement.overlaps(*other_placement),
            _ => false,
        };
        if chosen.iter().any(clashes) {
            continue;
        }
        chosen.push(option.clone());
        choose(host, &options[n + 1..], count, chosen, policy, least);
        chosen.pop();
    }
}

/// For each set of free instances, calculates the cost of destroying this set, and keeps the least cost.
fn destroy(host: &Host, members: &[Member], policy: PlacementPolicy, least: &mut Option<OracleCost>) {
    let creates = |gpu: GpuIndex| members.iter().any(|m| matches!(m, Member::Create { .. }) && m.gpu() == gpu);
    let free: Vec<(GpuIndex, u32)> = host
        .gpus
        .iter()
        .filter(|gpu| creates(gpu.index))
        .flat_map(|gpu| gpu.mig.as_ref().unwrap().instances.iter().map(move |instance| (gpu.index, instance)))
        .filter(|(_, instance)| instance.is_free() && !instance.foreign)
        .map(|(gpu, instance)| (gpu, instance.id))
        .collect();
    for set in 0..1_u32 << free.len() {
        let destroys = free.iter().enumerate().filter(|(n, _)| set & (1 << n) != 0).map(|(_, one)| *one).collect();
        let assignment = Assignment { members: members.to_vec(), destroys };
        if let Some(cost) = cost(host, &assignment, policy)
            && least.is_none_or(|least| cost < least)
        {
            *least = Some(cost);
        }
    }
}

/// Asserts that the planner executes an assignment exactly: it creates and destroys what the
/// assignment lists.
pub(super) fn executes(host: &Host, assignment: &Assignment) {
    for gpu in &host.gpus {
        let mig = gpu.mig.as_ref().unwrap();
        let mut standing: Vec<GpuInstance> = mig.instances.iter().map(|one| standing(mig, one)).collect();
        standing.sort_by_key(|instance| instance.placement);
        let target = target(&mig.geometry, &standing, gpu.index, assignment);
        let plan = plan::plan(&mig.geometry, &standing, &target).unwrap();
        let mut created = Vec::new();
        let mut destroyed = Vec::new();
        for step in &plan.steps {
            match step {
                InstanceStep::CreateGpuInstance { profile_id, placement, .. } => {
                    created.push((*profile_id, *placement));
                }
                InstanceStep::DestroyGpuInstance { gi, .. } => destroyed.push((gpu.index, *gi)),
                _ => {}
            }
        }
        let mut expected: Vec<(u32, Placement)> = assignment
            .members
            .iter()
            .filter_map(|member| match member {
                Member::Create { gpu: on, profile_id, placement } if *on == gpu.index => {
                    Some((*profile_id, *placement))
                }
                _ => None,
            })
            .collect();
        expected.sort_by_key(|(_, placement)| *placement);
        created.sort_by_key(|(_, placement)| *placement);
        assert_eq!(created, expected);
        let mut gone: Vec<(GpuIndex, u32)> =
            assignment.destroys.iter().copied().filter(|(on, _)| *on == gpu.index).collect();
        gone.sort_unstable();
        destroyed.sort_unstable();
        assert_eq!(destroyed, gone);
    }
}

fn standing(mig: &MigOffer, instance: &Instance) -> GpuInstance {
    let profile = mig.geometry.profile(instance.profile_id).unwrap();
    let whole = profile.whole().unwrap();
    let compute = ComputeInstance {
        id: 0,
        profile_id: whole.profile.id,
        profile: whole.profile.name.clone(),
        placement: whole.spots.first().map(|spot| spot.placement),
        uuid: None,
        processes: Vec::new(),
    };
    GpuInstance {
        id: instance.id,
        profile_id: instance.profile_id,
        profile: profile.profile.name.clone(),
        placement: instance.placement,
        memory: None,
        compute: vec![compute],
        processes: Vec::new(),
    }
}
