//! What a plan makes of a GPU, and what stands there that is none of its doing.
//!
//! Whoever comes back to a plan that was left half done finds instances of three kinds: those from
//! before, those that it made, and those that somebody else has made meanwhile. The last are
//! nobody's to destroy, idle or not.

use std::collections::BTreeSet;

use gpush_api::{ComputeInstance, GpuInstance, InstanceStep};

/// What stands once `steps` are taken where `before` stood. The ids of what is new mean nothing:
/// they are the driver's to choose.
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

/// The layout that is exactly these GPU instances, each at its place.
#[must_use]
pub fn entries(instances: &[GpuInstance]) -> Vec<String> {
    let entry = |instance: &GpuInstance, compute: &ComputeInstance| {
        let share = compute.profile.split_once("c.").map(|(slices, _)| format!("{slices}c.")).unwrap_or_default();
        format!("{share}{}@{}", instance.profile, instance.placement.start)
    };
    let all = instances.iter().flat_map(|instance| instance.compute.iter().map(move |c| entry(instance, c)));
    let all: Vec<String> = all.collect();
    if all.is_empty() { vec![crate::layout::NONE.to_owned()] } else { all }
}

/// Ids of the GPU instances of `now` that are somebody else's: neither of `before` nor of `after`,
/// or with a compute instance that is of neither.
#[must_use]
pub fn others(now: &[GpuInstance], before: &[GpuInstance], after: &[GpuInstance]) -> BTreeSet<u32> {
    let ours = |instance: &GpuInstance| {
        let is_same = |one: &&GpuInstance| (one.profile_id, one.placement) == (instance.profile_id, instance.placement);
        let known: Vec<&GpuInstance> = before.iter().chain(after).filter(is_same).collect();
        // Where in it the driver puts a compute instance may be its own choice.
        let knows = |compute: &ComputeInstance| {
            known.iter().flat_map(|one| &one.compute).any(|one| one.profile_id == compute.profile_id)
        };
        !known.is_empty() && instance.compute.iter().all(knows)
    };
    now.iter().filter(|instance| !ours(instance)).map(|instance| instance.id).collect()
}
