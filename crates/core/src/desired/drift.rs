//! Drift: the differences between a GPU and its desired state, as sentences for users.
//!
//! Drift is found by comparison, not by planning. A plan may be impossible while instances are in
//! use, but the difference still exists. If MIG mode is on and also desired, a GPU has drift if and
//! only if its plan has steps.

use gpush_api::{ComputeMode, Gpu, GpuInstance, GpuState, Mig, Mode};

use super::{
    DesiredState, timeslice_state,
    whole_gpu::{mode_event, whole_gpu_obstacles},
};
use crate::{
    geometry::Geometry,
    layout::Layout,
    plan::{RequestedInstance, Target},
};

/// Returns the differences, one sentence each; empty if the GPU is in its desired state.
#[must_use]
pub fn drift(desired_state: &DesiredState, gpu: &Gpu) -> Vec<String> {
    match desired_state.mode {
        Mode::NoRule | Mode::Unmanaged => Vec::new(),
        Mode::Exclusive | Mode::Mps => whole_gpu_obstacles(desired_state.mode, gpu),
        Mode::Timeslice => match whole_gpu_obstacles(desired_state.mode, gpu) {
            // Check time-slicing only if MIG mode is off, because a GPU in MIG mode has no
            // time-slice levels and only one compute mode.
            whole if whole.is_empty() => timeslice_state::drift(desired_state, gpu),
            not_whole => not_whole,
        },
        Mode::Mig => match (&gpu.mig, &desired_state.layout) {
            (None, _) => match gpu.state {
                GpuState::Ready
                | GpuState::Cordoned
                | GpuState::Degraded
                | GpuState::Changing
                | GpuState::Held
                | GpuState::Maintenance => {
                    vec![format!("{} does not support MIG, but its rule has mode `mig`", gpu.name)]
                }
                // The GPU cannot be read, so its instances are unknown.
                GpuState::Unknown | GpuState::Lost => Vec::new(),
            },
            (Some(mig), None) if desired_state.dynamic => mode_drift(gpu, mig),
            (Some(_), None) if gpu.overridden.is_some() => {
                vec!["this version of gpushd does not know the layout of the override on this GPU".to_owned()]
            }
            (Some(_), None) => Vec::new(),
            (Some(mig), Some(layout)) => mig_drift(gpu, mig, layout),
        },
    }
}

/// Returns a sentence about a compute mode that another program has set, and that does not fit the rule. gpushd itself
/// sets the compute mode for an MPS daemon and for leases under an earlier rule. So call this only for a GPU without a
/// daemon and without pending changes.
#[must_use]
pub fn compute_mode_drift(desired_state: &DesiredState, gpu: &Gpu) -> Option<String> {
    let now = gpu.compute_mode.filter(|_| whole_gpu_obstacles(desired_state.mode, gpu).is_empty())?;
    let is_own = desired_state.timeslice.as_ref().is_some_and(|policy| policy.compute_mode.is_some());
    let effect = match (now, desired_state.mode) {
        (_, Mode::Mig | Mode::NoRule | Mode::Unmanaged) | (ComputeMode::Default, _) => return None,
        // gpushd corrects the compute mode that the rule sets, and its difference is already drift.
        (_, Mode::Timeslice) if is_own => return None,
        (ComputeMode::Prohibited, Mode::Exclusive | Mode::Mps | Mode::Timeslice) => "no program can use the GPU",
        (ComputeMode::ExclusiveProcess | ComputeMode::ExclusiveThread, Mode::Exclusive) => {
            "only one process at a time can use the GPU"
        }
        // gpushd sets EXCLUSIVE_PROCESS for MPS daemons. A time-slicing rule with `compute_mode = "keep"` leaves this
        // choice to the administrator.
        (ComputeMode::ExclusiveProcess | ComputeMode::ExclusiveThread, Mode::Mps | Mode::Timeslice) => return None,
    };
    Some(format!(
        "the compute mode is `{now}`, so {effect}; to set it to DEFAULT: `nvidia-smi -i {} -c DEFAULT`",
        gpu.uuid
    ))
}

/// Returns sentences about the MIG mode of a GPU on which MIG mode is desired.
fn mode_drift(gpu: &Gpu, mig: &Mig) -> Vec<String> {
    match (mig.enabled, mig.pending_mode()) {
        (false, true) => vec![format!("MIG mode is off until the next {}", mode_event(gpu))],
        (false, false) => vec!["MIG mode is off".to_owned()],
        (true, false) => vec![format!("the next {} disables MIG mode, but the rule needs MIG mode", mode_event(gpu))],
        (true, true) => Vec::new(),
    }
}

fn mig_drift(gpu: &Gpu, mig: &Mig, layout: &Layout) -> Vec<String> {
    let mut drift = mode_drift(gpu, mig);
    if !mig.enabled {
        if !mig.pending_mode() {
            drift.push(format!("missing {layout}"));
        }
        return drift;
    }
    if mig.profiles.is_empty() {
        drift.push(format!(
            "cannot compare the GPU with the layout {layout}: the MIG profiles of the GPU are not known"
        ));
        return drift;
    }
    let geometry = Geometry::new(&mig.profiles, mig.memory_slices, mig.compute_slices);
    match Target::resolve(&geometry, layout) {
        Ok(target) => drift.extend(instance_drift(&mig.instances, &target)),
        Err(_) => drift.push(format!("the layout {layout} does not fit this GPU")),
    }
    drift
}

/// Returns sentences about instances. First come instances that differ only in their compute
/// instances, then missing instances, then extra instances. If the layout needs some of several equal
/// instances, the plan chooses which of them to destroy, so the sentence names no placement.
fn instance_drift(have: &[GpuInstance], target: &Target) -> Vec<String> {
    let mut have: Vec<&GpuInstance> = have.iter().collect();
    // Match the entries with a fixed placement first, because only one instance can match such an
    // entry.
    let mut want: Vec<&RequestedInstance> = target.instances.iter().collect();
    want.sort_by_key(|wanted| wanted.at.is_none());
    // The profiles of the instances that meet an entry without a placement.
    let mut chosen: Vec<u32> = Vec::new();
    let mut note = |wanted: &RequestedInstance| chosen.extend(wanted.at.is_none().then_some(wanted.profile_id));
    want.retain(|wanted| {
        let same = |instance: &GpuInstance| matches_placement(wanted, instance) && has_same_compute(wanted, instance);
        let taken = take_first(&mut have, same);
        taken.is_some().then(|| note(wanted)).is_none()
    });
    let mut sentences = Vec::new();
    want.retain(|wanted| match take_first(&mut have, |instance| matches_placement(wanted, instance)) {
        Some(instance) => {
            note(wanted);
            let (missing, extra) = compute_difference(wanted, instance);
            let place = format!("{}@{}: ", instance.profile, instance.placement.start);
            sentences.extend(differences(&place, " compute instances:", &missing, &extra));
            false
        }
        None => true,
    });
    let mut has: Vec<String> = Vec::new();
    for extra in &have {
        let is_same = |id: &&u32| **id == extra.profile_id;
        let name = match chosen.iter().filter(is_same).count() {
            0 => format!("{}@{}", extra.profile, extra.placement.start),
            kept => {
                let extras = have.iter().filter(|one| one.profile_id == extra.profile_id).count();
                format!("{} ({extras} of {})", extra.profile, extras + kept)
            }
        };
        if !has.contains(&name) {
            has.push(name);
        }
    }
    let wants = counted(want.iter().map(ToString::to_string));
    sentences.extend(differences("", "", &wants, &has));
    sentences
}

/// Describes missing and extra instances. Each sentence begins with `place`, and names `kind`.
fn differences(place: &str, kind: &str, missing: &[String], extra: &[String]) -> Vec<String> {
    let one =
        |word: &str, what: &[String]| (!what.is_empty()).then(|| format!("{place}{word}{kind} {}", what.join(", ")));
    [one("missing", missing), one("extra", extra)].into_iter().flatten().collect()
}

/// Removes and returns the first instance that fits.
fn take_first<'a>(from: &mut Vec<&'a GpuInstance>, fits: impl Fn(&GpuInstance) -> bool) -> Option<&'a GpuInstance> {
    let at = from.iter().position(|instance| fits(instance))?;
    Some(from.remove(at))
}

fn matches_placement(wanted: &RequestedInstance, instance: &GpuInstance) -> bool {
    wanted.profile_id == instance.profile_id && wanted.at.is_none_or(|at| at == instance.placement)
}

fn has_same_compute(wanted: &RequestedInstance, instance: &GpuInstance) -> bool {
    let mut wants: Vec<u32> = wanted.compute.iter().map(|c| c.profile_id).collect();
    let mut has: Vec<u32> = instance.compute.iter().map(|c| c.profile_id).collect();
    wants.sort_unstable();
    has.sort_unstable();
    wants == has
}

/// Returns the names of missing and of extra compute instances.
fn compute_difference(wanted: &RequestedInstance, instance: &GpuInstance) -> (Vec<String>, Vec<String>) {
    let mut extra: Vec<_> = instance.compute.iter().collect();
    let mut missing = Vec::new();
    for compute in &wanted.compute {
        match extra.iter().position(|has| has.profile_id == compute.profile_id) {
            Some(at) => drop(extra.remove(at)),
            None => missing.push(compute.profile.clone()),
        }
    }
    (counted(missing.into_iter()), counted(extra.into_iter().map(|has| has.profile.clone())))
}

/// Combines equal names: `a, a, b` becomes `a*2, b`, in order of first appearance.
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
