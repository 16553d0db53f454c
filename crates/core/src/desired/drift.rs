//! Drift: how a GPU differs from what the config wants, in sentences for people.
//!
//! It is told by comparing what stands with what is wanted, not by planning: instances in use may
//! make a plan impossible, and the difference is there all the same. With MIG mode on, and to stay
//! on, a GPU has no drift exactly when a plan for it would have no step.

use gpush_api::{Gpu, GpuInstance, GpuState, Mig, Mode};

use super::Wish;
use crate::{
    geometry::Geometry,
    layout::Layout,
    plan::{Target, Wanted},
};

/// The differences, one sentence each; none when the GPU is as wanted.
#[must_use]
pub fn drift(wish: &Wish, gpu: &Gpu) -> Vec<String> {
    match wish.mode {
        Mode::Unmanaged => Vec::new(),
        Mode::Exclusive | Mode::Mps | Mode::Timeslice => whole(wish.mode, gpu),
        Mode::Mig => match (&gpu.mig, &wish.layout) {
            (None, _) => match gpu.state {
                GpuState::Ready | GpuState::Changing | GpuState::Degraded => {
                    vec![format!("{} has no MIG, the config wants mode mig", gpu.name)]
                }
                // It could not be read: what it has is not known.
                GpuState::Unknown | GpuState::Lost => Vec::new(),
            },
            (Some(_), None) => Vec::new(),
            (Some(mig), Some(layout)) => mig_drift(mig, layout),
        },
    }
}

/// What keeps a GPU from being used whole.
fn whole(mode: Mode, gpu: &Gpu) -> Vec<String> {
    let wanted = match mode {
        Mode::Unmanaged => "unmanaged",
        Mode::Exclusive => "exclusive",
        Mode::Mig => "mig",
        Mode::Mps => "mps",
        Mode::Timeslice => "timeslice",
    };
    let Some(mig) = &gpu.mig else { return Vec::new() };
    match (mig.enabled, mig.pending) {
        (true, true) => vec![format!("MIG mode is on, mode {wanted} wants the whole GPU")],
        (true, false) => vec![format!("MIG mode is on until the GPU is reset, mode {wanted} wants the whole GPU")],
        (false, true) => vec![format!("MIG mode comes on with the next reset, mode {wanted} wants the whole GPU")],
        (false, false) => Vec::new(),
    }
}

fn mig_drift(mig: &Mig, layout: &Layout) -> Vec<String> {
    let mut drift = Vec::new();
    match (mig.enabled, mig.pending) {
        (false, true) => return vec!["MIG mode is off until the GPU is reset".to_owned()],
        (false, false) => return vec![format!("MIG mode is off, the layout wants {layout}")],
        (true, false) => drift.push("MIG mode goes off with the next reset, the config wants it on".to_owned()),
        (true, true) => {}
    }
    if mig.profiles.is_empty() {
        drift.push(format!("its MIG profiles are not known, so it can't be compared with the layout {layout}"));
        return drift;
    }
    let geometry = Geometry::new(&mig.profiles, mig.memory_slices, mig.compute_slices);
    match Target::resolve(&geometry, layout) {
        Ok(target) => drift.extend(instances(&mig.instances, &target)),
        Err(_) => drift.push(format!("the layout {layout} can't be on this GPU")),
    }
    drift
}

/// Sentences about instances: those that differ in their compute instances only, then those that
/// are there and not wanted, paired with those that are wanted and not there.
fn instances(have: &[GpuInstance], target: &Target) -> Vec<String> {
    let mut have: Vec<&GpuInstance> = have.iter().collect();
    // Wanted at a fixed place first: only one instance can serve there.
    let mut want: Vec<&Wanted> = target.instances.iter().collect();
    want.sort_by_key(|wanted| wanted.at.is_none());
    want.retain(|wanted| take(&mut have, |instance| serves(wanted, instance) && computes(wanted, instance)).is_none());
    let mut sentences = Vec::new();
    want.retain(|wanted| match take(&mut have, |instance| serves(wanted, instance)) {
        Some(instance) => {
            sentences.push(format!(
                "{}@{} has {}, the layout wants {}",
                instance.profile,
                instance.placement.start,
                listed(instance.compute.iter().map(|c| c.profile.as_str())),
                listed(wanted.compute.iter().map(|c| c.profile.as_str())),
            ));
            false
        }
        None => true,
    });
    let has: Vec<String> = have.iter().map(|i| format!("{}@{}", i.profile, i.placement.start)).collect();
    let wants = counted(want.iter().map(ToString::to_string));
    match (has.is_empty(), wants.is_empty()) {
        (true, true) => {}
        (false, false) => sentences.push(format!("has {}, the layout wants {}", has.join(", "), wants.join(", "))),
        (true, false) => sentences.push(format!("lacks {}", wants.join(", "))),
        (false, true) => sentences.push(format!("has {}, which the layout does not want", has.join(", "))),
    }
    sentences
}

/// Removes and gives back the first that fits.
fn take<'a>(from: &mut Vec<&'a GpuInstance>, fits: impl Fn(&GpuInstance) -> bool) -> Option<&'a GpuInstance> {
    let at = from.iter().position(|instance| fits(instance))?;
    Some(from.remove(at))
}

fn serves(wanted: &Wanted, instance: &GpuInstance) -> bool {
    wanted.profile_id == instance.profile_id && wanted.at.is_none_or(|at| at == instance.placement)
}

fn computes(wanted: &Wanted, instance: &GpuInstance) -> bool {
    let mut wants: Vec<u32> = wanted.compute.iter().map(|c| c.profile_id).collect();
    let mut has: Vec<u32> = instance.compute.iter().map(|c| c.profile_id).collect();
    wants.sort_unstable();
    has.sort_unstable();
    wants == has
}

fn listed<'a>(profiles: impl Iterator<Item = &'a str>) -> String {
    let listed = counted(profiles.map(str::to_owned));
    if listed.is_empty() {
        "no compute instance".to_owned()
    } else {
        format!("compute instances {}", listed.join(", "))
    }
}

/// `a, a, b` as `a*2, b`, in order of first appearance.
fn counted(names: impl Iterator<Item = String>) -> Vec<String> {
    let mut counts: Vec<(String, u32)> = Vec::new();
    for name in names {
        match counts.iter_mut().find(|(known, _)| *known == name) {
            Some((_, count)) => *count += 1,
            None => counts.push((name, 1)),
        }
    }
    counts.into_iter().map(|(name, count)| if count > 1 { format!("{name}*{count}") } else { name }).collect()
}
