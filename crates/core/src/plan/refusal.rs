//! Finds the simplest reason why a target is refused.
//!
//! The checks go from the most specific reason to the least specific: a name, a placement, two
//! placements, a count, a sum. The last reason is that some entries cannot be placed together. The
//! refusal then names as few entries as possible. Instances in use are checked after all these
//! reasons, because instances in use can only block a target that fits on an empty GPU.

use gpush_api::{Blocker, GpuInstance, LeaseUse, Process, Refusal};

use crate::geometry::{ENGINES, Geometry, Profile, Slices};

use crate::nearest::{distance, fold};

use super::ProtectedInstances;
use super::arrange::{Arrangement, fits};
use super::capacity::Demand;
use super::compute;
use super::target::{RequestedInstance, Target};

/// Maximum number of suggested names.
const MOST_NAMES: usize = 3;

/// Maximum edit distance between the requested name and a suggested name with another number of
/// slices.
const MOST_EDITS: usize = 2;

/// Maximum number of entries for which all subsets are searched. No GPU has room for more instances
/// than this.
const MOST_TRIED: usize = 12;

/// Returns the refusal of a profile name that does not exist on the GPU.
pub(super) fn unknown_profile(geometry: &Geometry, name: &str) -> Refusal {
    let names = geometry.profiles.iter().map(|p| (p.profile.name.as_str(), p.profile.slices));
    Refusal::UnknownProfile { profile: name.to_owned(), nearest: nearest_names(name, names) }
}

/// Returns the refusal of a compute instance with `slices` slices, which the GPU instance profile
/// does not offer.
pub(super) fn unknown_compute_profile(profile: &Profile, slices: u8) -> Refusal {
    let name = format!("{slices}c.{}", profile.profile.name);
    let names = profile.compute.iter().map(|c| (c.profile.name.as_str(), c.profile.slices));
    Refusal::UnknownProfile { nearest: nearest_names(&name, names), profile: name }
}

/// Returns the most similar names. Returns only names with the same number of slices, if there are
/// any.
fn nearest_names<'a>(written: &str, names: impl Iterator<Item = (&'a str, u8)>) -> Vec<String> {
    let digits = written.len() - written.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let slices: Option<u8> = written[..digits].parse().ok();
    let written = fold(written);
    let mut ranked: Vec<(usize, &str, bool)> =
        names.map(|(name, count)| (distance(&written, &fold(name)), name, slices == Some(count))).collect();
    if ranked.iter().any(|(.., same_slices)| *same_slices) {
        ranked.retain(|(.., same_slices)| *same_slices);
    } else {
        ranked.retain(|(distance, ..)| *distance <= MOST_EDITS);
    }
    ranked.sort_by_key(|(distance, ..)| *distance);
    ranked.into_iter().take(MOST_NAMES).map(|(_, name, _)| name.to_owned()).collect()
}

/// Returns why the target does not fit even on an empty GPU with this geometry; `None` if the
/// target fits.
pub(super) fn impossible(geometry: &Geometry, target: &Target) -> Option<Refusal> {
    if fits(geometry, target) { None } else { Some(smallest_reason(geometry, target)) }
}

/// Returns the simplest reason why a target does not fit. Expects a target that does not fit even
/// on an empty GPU.
pub(super) fn smallest_reason(geometry: &Geometry, target: &Target) -> Refusal {
    let demand = Demand::of(geometry, target);
    compute_does_not_fit(geometry, target)
        .or_else(|| placements_overlap(target))
        .or_else(|| too_many(geometry, &demand))
        .or_else(|| too_many_slices(geometry, &demand))
        .or_else(|| no_engine(geometry, &demand))
        .unwrap_or_else(|| no_arrangement(geometry, target))
}

fn compute_does_not_fit(geometry: &Geometry, target: &Target) -> Option<Refusal> {
    let wanted = target.instances.iter().find(|w| !compute::fits(geometry.profile(w.profile_id), &w.compute))?;
    Some(Refusal::ComputeDoesNotFit {
        profile: wanted.profile.clone(),
        compute: wanted.compute.iter().map(|c| c.profile.clone()).collect(),
    })
}

fn placements_overlap(target: &Target) -> Option<Refusal> {
    let fixed = || target.instances.iter().filter_map(|w| w.at.map(|at| (w, Slices::of(at))));
    fixed().enumerate().find_map(|(n, (first, slices))| {
        let (second, _) = fixed().skip(n + 1).find(|(_, others)| others.overlaps(slices))?;
        Some(Refusal::PlacementsOverlap { first: first.to_string(), second: second.to_string() })
    })
}

/// Returns the refusal if the target has more instances of one profile than slices, engines or the
/// driver's limit allow.
fn too_many(geometry: &Geometry, demand: &Demand<'_>) -> Option<Refusal> {
    let (profile, wanted) = demand.numbers().find(|(profile, n)| *n > u32::from(profile.profile.max))?;
    let slices_suffice = profile.memory_slices() * wanted <= u32::from(geometry.memory_slices)
        && u32::from(profile.profile.slices) * wanted <= u32::from(geometry.compute_slices);
    let short = (0..ENGINES.len())
        .find(|&e| u32::from(profile.engines[e]) * wanted > u32::from(geometry.engines[e]))
        .filter(|_| slices_suffice);
    Some(match short {
        Some(e) => Refusal::NoEngine {
            engine: ENGINES[e].to_owned(),
            wanted: u32::from(profile.engines[e]) * wanted,
            have: u32::from(geometry.engines[e]),
        },
        None => {
            Refusal::TooMany { profile: profile.profile.name.clone(), wanted, most: u32::from(profile.profile.max) }
        }
    })
}

fn too_many_slices(geometry: &Geometry, demand: &Demand<'_>) -> Option<Refusal> {
    [("memory", demand.memory, geometry.memory_slices), ("compute", demand.compute, geometry.compute_slices)]
        .into_iter()
        .find(|(_, wanted, have)| *wanted > u32::from(*have))
        .map(|(kind, wanted, have)| Refusal::TooManySlices { kind: kind.to_owned(), wanted, have: u32::from(have) })
}

fn no_engine(geometry: &Geometry, demand: &Demand<'_>) -> Option<Refusal> {
    demand.insufficient_engine().map(|e| Refusal::NoEngine {
        engine: ENGINES[e].to_owned(),
        wanted: u32::from(demand.engines[e]),
        have: u32::from(geometry.engines[e]),
    })
}

/// Finds a smallest set of entries that cannot be placed together.
fn no_arrangement(geometry: &Geometry, target: &Target) -> Refusal {
    let all = &target.instances;
    let impossible = |subset: &u32| {
        let instances = members(all, *subset).cloned().collect();
        !fits(geometry, &Target { instances })
    };
    let smallest = (all.len() <= MOST_TRIED)
        .then(|| {
            let mut subsets: Vec<u32> = (1..1 << all.len()).collect();
            subsets.sort_by_key(|subset| subset.count_ones());
            subsets.into_iter().find(impossible)
        })
        .flatten();
    let entries = match smallest {
        Some(subset) => members(all, subset).map(RequestedInstance::to_string).collect(),
        None => all.iter().map(RequestedInstance::to_string).collect(),
    };
    Refusal::NoArrangement { entries }
}

fn members(all: &[RequestedInstance], subset: u32) -> impl Iterator<Item = &RequestedInstance> {
    all.iter().enumerate().filter(move |(n, _)| subset & (1 << n) != 0).map(|(_, wanted)| wanted)
}

/// Returns the instances in use that the best arrangement would destroy. No smaller set exists,
/// because the search minimizes the number of these instances first.
pub(super) fn blocked(arrangement: &Arrangement<'_>, holds: &ProtectedInstances) -> Refusal {
    let mut blockers = Vec::new();
    for instance in &arrangement.destroyed {
        blockers.extend(users(instance, 0..instance.compute.len(), holds));
        if instance.compute.is_empty() && !instance.processes.is_empty() {
            blockers.push(blocker(instance, None, instance.processes.clone(), &[]));
        }
    }
    for place in &arrangement.placed {
        let Some(instance) = place.kept else { continue };
        blockers.extend(users(instance, place.compute.destroy.iter().copied(), holds));
        let only_adds = place.compute.destroy.is_empty() && !place.compute.create.is_empty();
        if only_adds && !instance.processes.is_empty() {
            blockers.push(blocker(instance, None, instance.processes.clone(), &[]));
        }
    }
    blockers.sort_by_key(|b| (b.placement, b.ci));
    Refusal::Blocked { blockers }
}

/// Returns the compute instances at `positions` that are in use, with their processes and leases.
fn users(
    instance: &GpuInstance,
    positions: impl Iterator<Item = usize>,
    holds: &ProtectedInstances,
) -> impl Iterator<Item = Blocker> {
    positions.map(|n| &instance.compute[n]).filter(|c| compute::in_use(instance, c, holds)).map(|c| {
        let holders = c.processes.iter().chain(&instance.processes).cloned().collect();
        blocker(instance, Some(c.id), holders, holds.leases(instance.id, c.id))
    })
}

fn blocker(instance: &GpuInstance, ci: Option<u32>, holders: Vec<Process>, leases: &[LeaseUse]) -> Blocker {
    let (profile, placement) = (instance.profile.clone(), instance.placement);
    let compute = instance.compute.iter().find(|c| Some(c.id) == ci);
    let compute_profile = compute.map(|c| c.profile.clone()).filter(|name| *name != profile);
    Blocker { gi: instance.id, ci, profile, compute_profile, placement, holders, leases: leases.to_vec() }
}
