//! Finds by exhaustive search the minimum number of instances that must be destroyed and created
//! for a layout.
//!
//! The module tries every subset of the existing instances as the instances to keep, and every
//! placement of the missing instances. It shares no code and no optimisation with the planner, only
//! the geometry data of GPU models.

use gpush_geometry::{GpuProfile, Model};

/// An existing or requested instance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Instance {
    /// Profile name.
    pub(crate) profile: String,
    /// First memory slice.
    pub(crate) start: u8,
    /// Whether the instance is in use and must be kept.
    pub(crate) busy: bool,
}

/// Number of GPU instances to destroy and to create. In this bench, each GPU instance has one
/// compute instance, so these are also the numbers of compute instances.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Minimum {
    /// GPU instances to destroy.
    pub(crate) destroys: usize,
    /// GPU instances to create.
    pub(crate) creates: usize,
}

/// Returns the minimum. Returns `None` if an instance in use would have to be destroyed.
pub(crate) fn minimum(model: &Model, standing: &[Instance], wanted: &[&str]) -> Option<Minimum> {
    let mut best: Option<usize> = None;
    for keep in 0..1_u32 << standing.len() {
        let kept: Vec<&Instance> =
            standing.iter().enumerate().filter(|(i, _)| keep & (1 << i) != 0).map(|(_, instance)| instance).collect();
        let all_busy_kept = standing.iter().enumerate().all(|(i, instance)| !instance.busy || keep & (1 << i) != 0);
        if !all_busy_kept || best.is_some_and(|best| best >= kept.len()) {
            continue;
        }
        let Some(missing) = without(wanted, &kept) else { continue };
        let mut placed: Vec<(&GpuProfile, u8)> =
            kept.iter().filter_map(|instance| Some((profile(model, &instance.profile)?, instance.start))).collect();
        if place(model, &mut placed, &missing) {
            best = Some(kept.len());
        }
    }
    best.map(|kept| Minimum { destroys: standing.len() - kept, creates: wanted.len() - kept })
}

/// Returns the requested profiles that `kept` does not have. Returns `None` if `kept` has a profile
/// that was not requested.
fn without<'a>(wanted: &[&'a str], kept: &[&Instance]) -> Option<Vec<&'a str>> {
    let mut missing = wanted.to_vec();
    for instance in kept {
        let at = missing.iter().position(|name| *name == instance.profile)?;
        missing.remove(at);
    }
    Some(missing)
}

fn profile<'a>(model: &'a Model, name: &str) -> Option<&'a GpuProfile> {
    model.gi_profiles.iter().find(|profile| profile.name == name)
}

/// Returns whether the missing profiles can be placed.
fn place<'a>(model: &'a Model, placed: &mut Vec<(&'a GpuProfile, u8)>, missing: &[&str]) -> bool {
    let Some((first, rest)) = missing.split_first() else { return true };
    let Some(profile) = profile(model, first) else { return false };
    for &(start, size) in &profile.placements {
        placed.push((profile, start));
        let good = stands(model, placed, start, size) && place(model, placed, rest);
        placed.pop();
        if good {
            return true;
        }
    }
    false
}

/// Returns whether an instance at this place is compatible with all other placed instances.
fn stands(model: &Model, placed: &[(&GpuProfile, u8)], start: u8, size: u8) -> bool {
    let Some(((newest, _), others)) = placed.split_last() else { return true };
    let apart = others.iter().all(|(other, at)| {
        let length = other.placements.iter().find(|(s, _)| s == at).map_or(0, |(_, size)| *size);
        start + size <= *at || at + length <= start
    });
    let slices: u8 = placed.iter().map(|(profile, _)| profile.slices).sum();
    let alike = placed.iter().filter(|(profile, _)| profile.name == newest.name).count();
    apart && slices <= model.compute_slices && alike <= usize::from(newest.max)
}
