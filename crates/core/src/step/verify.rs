//! Checks whether a reading shows that a step, or a whole plan, is done.

use std::collections::BTreeSet;

use gpush_api::{ApiError, GpuInstance, GpuPlan, InstanceStep, Mig, Placement};

use super::describe_instance;
use crate::{
    geometry::Geometry,
    layout::{DYNAMIC, Layout},
    plan, refusal,
};

/// The result of the check of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The reading shows the effect of the step.
    Done,
    /// The reading does not show the effect of the step.
    NotDone,
    /// The driver has accepted the step, but its effect waits for a GPU reset.
    MayTakeEffect,
}

/// The instances of a GPU after the steps so far, with the ids that the driver assigned.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Instances {
    /// Placement and id of each GPU instance.
    gpu_instances: Vec<(Placement, u32)>,
    /// Ids of each compute instance: (GPU instance id, compute instance id).
    compute: BTreeSet<(u32, u32)>,
}

impl Instances {
    /// Returns the instances of a reading.
    #[must_use]
    pub fn of(instances: &[GpuInstance]) -> Self {
        Self {
            gpu_instances: instances.iter().map(|instance| (instance.placement, instance.id)).collect(),
            compute: instances.iter().flat_map(|i| i.compute.iter().map(|c| (i.id, c.id))).collect(),
        }
    }

    /// Returns the id of the GPU instance at a placement.
    #[must_use]
    pub fn at(&self, placement: Placement) -> Option<u32> {
        self.gpu_instances.iter().find(|(at, _)| *at == placement).map(|(_, id)| *id)
    }

    /// Records a GPU instance that was created.
    pub fn created(&mut self, placement: Placement, id: u32) {
        self.gpu_instances.push((placement, id));
    }

    /// Records a GPU instance that was destroyed.
    pub fn destroyed(&mut self, id: u32) {
        self.gpu_instances.retain(|(_, known)| *known != id);
    }

    /// Records a compute instance that was created.
    pub fn created_compute(&mut self, gi: u32, ci: u32) {
        self.compute.insert((gi, ci));
    }

    /// Records a compute instance that was destroyed.
    pub fn destroyed_compute(&mut self, gi: u32, ci: u32) {
        self.compute.remove(&(gi, ci));
    }
}

/// Checks whether a step on an instance is done. `before` contains the instances before the step.
#[must_use]
pub fn verify_instance(step: &InstanceStep, before: &Instances, now: Option<&Mig>) -> Verdict {
    let Some(mig) = now else { return Verdict::NotDone };
    let instance = |id: u32| mig.instances.iter().find(|instance| instance.id == id);
    let done = match step {
        InstanceStep::DestroyCompute { gi, ci, .. } => {
            instance(*gi).is_none_or(|instance| instance.compute.iter().all(|compute| compute.id != *ci))
        }
        InstanceStep::DestroyGpuInstance { gi, .. } => instance(*gi).is_none(),
        InstanceStep::CreateGpuInstance { profile_id, placement, .. } => {
            mig.instances.iter().any(|i| i.profile_id == *profile_id && i.placement == *placement)
        }
        InstanceStep::CreateCompute { gi_placement, profile_id, placement, .. } => {
            mig.instances.iter().filter(|i| i.placement == *gi_placement).any(|i| {
                i.compute.iter().any(|c| {
                    c.profile_id == *profile_id
                        && (placement.is_none() || c.placement.is_none() || c.placement == *placement)
                        && !before.compute.contains(&(i.id, c.id))
                })
            })
        }
    };
    if done { Verdict::Done } else { Verdict::NotDone }
}

/// Checks whether a change of MIG mode is done. A mode that is only pending may still take effect.
#[must_use]
pub fn verify_mode(enable: bool, now: Option<&Mig>) -> Verdict {
    match now.map(|mig| (mig.enabled == enable, mig.pending_mode() == enable)) {
        Some((true, true)) => Verdict::Done,
        Some((false, true)) => Verdict::MayTakeEffect,
        Some((_, false)) | None => Verdict::NotDone,
    }
}

/// Describes how a reading differs from the state at the end of a plan; `None` if the reading
/// matches. A reading matches if a new plan for the same layout has no steps. `label` is the name
/// of the GPU.
#[must_use]
pub fn difference(plan: &GpuPlan, label: &str, now: Option<&Mig>) -> Option<String> {
    if !plan.changes_mig() && now.is_none_or(|mig| !mig.enabled) {
        return None;
    }
    let Some(mig) = now else { return Some("the GPU does not support MIG any more".to_owned()) };
    if let Some(step) = plan.mig_mode_step().filter(|step| step.at_reboot()) {
        let is_set = mig.pending_mode() == step.enables();
        return (!is_set).then(|| "the MIG mode after the next reboot is not set".to_owned());
    }
    if plan.mig_mode() == Some(false) {
        return (mig.enabled || mig.pending_mode()).then(|| "MIG mode is on".to_owned());
    }
    if !mig.enabled {
        return Some("MIG mode is off".to_owned());
    }
    // For a dynamic layout, any instances are correct, because leases create and destroy them.
    if plan.layout == [DYNAMIC] {
        return None;
    }
    let layout = match Layout::parse_list(&plan.layout) {
        Ok(layout) => layout,
        Err(error) => return Some(ApiError::from(error).message),
    };
    let geometry = Geometry::new(&mig.profiles, mig.memory_slices, mig.compute_slices);
    let target = plan::Target::resolve(&geometry, &layout);
    match target.and_then(|target| plan::plan(&geometry, &mig.instances, &target)) {
        Ok(rest) if rest.steps.is_empty() => None,
        Ok(rest) => {
            let steps: Vec<String> = rest.steps.iter().map(describe_instance).collect();
            Some(format!("the operation did not complete these steps: {}", steps.join(", ")))
        }
        Err(refused) => Some(refusal::explain(&refused, plan.gpu, label).message),
    }
}

/// Returns whether two readings show the same MIG mode and the same instances. The ids of the
/// instances may differ.
#[must_use]
pub fn same_layout(one: Option<&Mig>, other: Option<&Mig>) -> bool {
    match (one, other) {
        (None, None) => true,
        (Some(one), Some(other)) => {
            (one.enabled, one.pending_mode()) == (other.enabled, other.pending_mode())
                && shape(&one.instances) == shape(&other.instances)
        }
        (None, Some(_)) | (Some(_), None) => false,
    }
}

/// The placement and profile of each instance, with its compute instances.
type Shape = Vec<(Placement, u32, Vec<(Option<Placement>, u32)>)>;

fn shape(instances: &[GpuInstance]) -> Shape {
    let mut shape: Shape = instances
        .iter()
        .map(|instance| {
            let mut compute: Vec<_> = instance.compute.iter().map(|c| (c.placement, c.profile_id)).collect();
            compute.sort_unstable();
            (instance.placement, instance.profile_id, compute)
        })
        .collect();
    shape.sort_unstable();
    shape
}
