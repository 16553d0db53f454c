//! The instances after a plan, and the instances that belong to other programs.
//!
//! After an interruption, a GPU may have instances from before the plan, instances of the plan, and
//! instances that another program has created since. gpush never destroys instances of the last
//! kind, not even idle ones.

use std::collections::BTreeSet;

use gpush_api::{ComputeInstance, GpuInstance, InstanceStep};

/// Returns the instances after `steps` have been executed on `before`. The ids of new instances are
/// placeholders, because the driver chooses the real ids.
#[must_use]
pub fn outcome<'a>(before: &[GpuInstance], steps: impl IntoIterator<Item = &'a InstanceStep>) -> Vec<GpuInstance> {
    let mut after = before.to_vec();
    for step in steps {
        match step {
            InstanceStep::DestroyCompute { gi, ci, .. } => {
                for instance in after.iter_mut().filter(|instance| instance.id == *gi) {
                    instance.compute.retain(|compute| compute.id != *ci);
                }
            }
            InstanceStep::DestroyGpuInstance { gi, placement, .. } => {
                after.retain(|instance| (instance.id, instance.placement) != (*gi, *placement));
            }
            InstanceStep::CreateGpuInstance { profile, profile_id, placement } => after.push(GpuInstance {
                id: u32::MAX,
                profile_id: *profile_id,
                profile: profile.clone(),
                placement: *placement,
                memory: None,
                compute: Vec::new(),
                processes: Vec::new(),
            }),
            InstanceStep::CreateCompute { gi_placement, profile, profile_id, placement } => {
                for instance in after.iter_mut().filter(|instance| instance.placement == *gi_placement) {
                    instance.compute.push(ComputeInstance {
                        id: u32::MAX,
                        profile_id: *profile_id,
                        profile: profile.clone(),
                        placement: *placement,
                        uuid: None,
                        processes: Vec::new(),
                    });
                }
            }
        }
    }
    after
}

/// Returns a layout that describes exactly these GPU instances, with their placements.
#[must_use]
pub fn exact_layout(instances: &[GpuInstance]) -> Vec<String> {
    let entry = |instance: &GpuInstance, compute: &ComputeInstance| {
        let share = compute.profile.split_once("c.").map(|(slices, _)| format!("{slices}c.")).unwrap_or_default();
        format!("{share}{}@{}", instance.profile, instance.placement.start)
    };
    let all = instances.iter().flat_map(|instance| instance.compute.iter().map(move |c| entry(instance, c)));
    let all: Vec<String> = all.collect();
    if all.is_empty() { vec![crate::layout::NONE.to_owned()] } else { all }
}

/// Returns the ids of the GPU instances in `now` that belong to other programs. A GPU instance
/// belongs to another program if the instance, or one of its compute instances, is neither in
/// `before` nor in `after`.
#[must_use]
pub fn foreign_instances(now: &[GpuInstance], before: &[GpuInstance], after: &[GpuInstance]) -> BTreeSet<u32> {
    let ours = |instance: &GpuInstance| {
        let is_same = |one: &&GpuInstance| (one.profile_id, one.placement) == (instance.profile_id, instance.placement);
        let known: Vec<&GpuInstance> = before.iter().chain(after).filter(is_same).collect();
        // The driver may have chosen the placement of the compute instance, so placements are not
        // compared.
        let knows = |compute: &ComputeInstance| {
            known.iter().flat_map(|one| &one.compute).any(|one| one.profile_id == compute.profile_id)
        };
        !known.is_empty() && instance.compute.iter().all(knows)
    };
    now.iter().filter(|instance| !ours(instance)).map(|instance| instance.id).collect()
}
