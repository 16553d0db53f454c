//! Converts an assignment to a target of the planner. So the planner plans a dynamic grant in the
//! same way as an `apply`.

use gpush_api::{GpuIndex, GpuInstance};

use crate::{
    geometry::Geometry,
    plan::{RequestedCompute, RequestedInstance, Target},
};

use super::{Assignment, Member};

/// Returns the instances of a GPU after a grant: the remaining instances at their current
/// placements, and the instances to create.
#[must_use]
pub fn target(geometry: &Geometry, instances: &[GpuInstance], gpu: GpuIndex, assignment: &Assignment) -> Target {
    let stays = |instance: &&GpuInstance| !assignment.destroys.contains(&(gpu, instance.id));
    let stays: Vec<GpuInstance> = instances.iter().filter(stays).cloned().collect();
    let mut target = Target::of_instances(geometry, &stays);
    for member in &assignment.members {
        let Member::Create { gpu: on, profile_id, placement } = member else { continue };
        let Some(profile) = geometry.profile(*profile_id).filter(|_| *on == gpu) else { continue };
        let whole = profile.whole().map(|compute| RequestedCompute {
            profile_id: compute.profile.id,
            at: None,
            profile: compute.profile.name.clone(),
        });
        target.instances.push(RequestedInstance {
            profile_id: *profile_id,
            at: Some(*placement),
            compute: whole.into_iter().collect(),
            profile: profile.profile.name.clone(),
        });
    }
    target
}
