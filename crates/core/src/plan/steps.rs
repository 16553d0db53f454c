//! The steps of a plan, in an order that the driver can execute.
//!
//! The steps that destroy instances come first: compute instances before their GPU instances. The
//! steps that create instances follow: GPU instances before their compute instances. So at any time
//! the GPU has a subset of the old instances or a subset of the new instances. Both sets fit on the
//! GPU. Within this order, low placements come first, so that equal plans have equal text.

use gpush_api::{GpuInstance, InstanceStep};

use super::arrange::{Arrangement, Placed};

pub(super) fn steps(arrangement: &Arrangement<'_>) -> Vec<InstanceStep> {
    let mut steps = Vec::new();
    let mut placed: Vec<&Placed<'_>> = arrangement.placed.iter().collect();
    placed.sort_by_key(|p| p.placement);
    let mut destroyed = arrangement.destroyed.clone();
    destroyed.sort_by_key(|i| i.placement);

    for instance in destroyed {
        steps.extend((0..instance.compute.len()).map(|n| destroy_compute(instance, n)));
        steps.push(InstanceStep::DestroyGpuInstance {
            gi: instance.id,
            profile: instance.profile.clone(),
            placement: instance.placement,
        });
    }
    for place in &placed {
        if let Some(instance) = place.kept {
            steps.extend(place.compute.destroy.iter().map(|n| destroy_compute(instance, *n)));
        }
    }
    for place in placed {
        if place.kept.is_none() {
            steps.push(InstanceStep::CreateGpuInstance {
                profile: place.wanted.profile.clone(),
                profile_id: place.wanted.profile_id,
                placement: place.placement,
            });
        }
        for (position, placement) in &place.compute.create {
            let wanted = &place.wanted.compute[*position];
            steps.push(InstanceStep::CreateCompute {
                gi_placement: place.placement,
                profile: wanted.profile.clone(),
                profile_id: wanted.profile_id,
                placement: *placement,
            });
        }
    }
    steps
}

fn destroy_compute(instance: &GpuInstance, position: usize) -> InstanceStep {
    let compute = &instance.compute[position];
    let (profile, uuid) = (compute.profile.clone(), compute.uuid.clone());
    InstanceStep::DestroyCompute { gi: instance.id, ci: compute.id, profile, uuid }
}
