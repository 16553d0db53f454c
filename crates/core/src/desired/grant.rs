//! The plan of a dynamic grant. It creates the instances of an assignment, and destroys the free
//! instances that occupy the slices of the new instances.
//!
//! Placement makes the assignment from an earlier reading of the GPU. The operation makes the plan
//! after it has claimed the GPU, so the plan checks every part of the assignment again. The plan
//! destroys an instance only if the assignment names the instance, gpushd created it, and it is
//! neither leased nor in use.

use std::collections::BTreeSet;

use gpush_api::{ApiError, Code, Gpu, GpuIndex, GpuInstance, GpuPlan, InstanceStep, Placement, Refusal, Step};

use super::{
    gpu_label::label,
    gpu_plan::{check_plannable, empty_plan, refused, unknown_users_error},
};
use crate::{
    geometry::Geometry,
    layout::Layout,
    lease::placement::{Assignment, target},
    plan::{self, ProtectedInstances, exact_layout, outcome},
};

/// Plans the part of a dynamic grant on one GPU, from a reading of the GPU with its leases.
/// `created` contains the placements of the instances that gpushd created on the GPU; the plan
/// destroys no other instances. The layout of the plan lists all instances after the grant.
///
/// The function does not return errors. If no plan is possible, the result has no steps, and
/// contains the reason. [`Refusal::Blocked`] names the instances in use.
#[must_use]
pub fn plan_grant(gpu: &Gpu, assignment: &Assignment, created: &BTreeSet<Placement>) -> GpuPlan {
    let empty = empty_plan(gpu, &Layout::none());
    let fail = |error: ApiError| GpuPlan { error: Some(error), ..empty.clone() };
    if let Err(error) = check_plannable(gpu, Some(&gpu.index.to_string())) {
        return fail(error);
    }
    let Some(mig) = gpu.mig.as_ref().filter(|mig| mig.enabled) else {
        let error = ApiError::new(Code::Conflict, format!("{}: MIG mode is off", label(gpu)));
        return fail(
            error.hint(format!("to enable MIG mode: `gpushctl apply {}` (administrator)", gpu.index)).retryable(),
        );
    };
    if mig.profiles.is_empty() {
        let error = ApiError::new(Code::DriverError, format!("the MIG profiles of {} are not known", label(gpu)));
        return fail(error.hint("run `gpushctl mig profiles` to read the profiles from the driver").retryable());
    }
    if let Some(instance) = destroy_obstacle(gpu, &mig.instances, assignment, created) {
        return fail(changed(gpu, &instance));
    }
    let geometry = Geometry::new(&mig.profiles, mig.memory_slices, mig.compute_slices);
    let target = target(&geometry, &mig.instances, gpu.index, assignment);
    let holds = ProtectedInstances::of(gpu);
    match plan::plan_protecting(&geometry, &mig.instances, &target, &holds) {
        Ok(plan) => match unknown_users_error(gpu, false, &plan.steps) {
            Some(error) => fail(error),
            None => {
                let layout = exact_layout(&outcome(&mig.instances, &plan.steps));
                let steps = plan.steps.into_iter().map(Step::Instance).collect();
                GpuPlan { layout, steps, keeps: plan.keeps, ..empty }
            }
        },
        Err(refusal @ Refusal::Blocked { .. }) => refused(gpu, empty, refusal),
        // The GPU has changed since placement made the assignment, so a retry may succeed.
        Err(refusal) => {
            let plan = refused(gpu, empty, refusal);
            GpuPlan { error: plan.error.map(ApiError::retryable), ..plan }
        }
    }
}

/// The assignment lists instances to destroy. Returns why one of them must not be destroyed: the
/// instance no longer exists, or another program created it. Returns `None` if there is no
/// obstacle.
fn destroy_obstacle(
    gpu: &Gpu,
    instances: &[GpuInstance],
    assignment: &Assignment,
    created: &BTreeSet<Placement>,
) -> Option<String> {
    let on_gpu = assignment.destroys.iter().filter(|(index, _)| *index == gpu.index);
    let unfit = |(_, id): &(GpuIndex, u32)| match instances.iter().find(|instance| instance.id == *id) {
        None => Some(format!("GPU instance {id} does not exist any more")),
        Some(instance) if !created.contains(&instance.placement) => {
            let (profile, start) = (&instance.profile, instance.placement.start);
            Some(format!(
                "another program created {profile}@{start} (GPU instance {id}), so gpushd does not destroy it"
            ))
        }
        Some(_) => None,
    };
    on_gpu.filter_map(unfit).next()
}

fn changed(gpu: &Gpu, cause: &str) -> ApiError {
    ApiError::new(
        Code::Conflict,
        format!("cannot grant the lease: {} changed while gpushd placed the lease", label(gpu)),
    )
    .cause(cause)
    .hint("request the lease again")
    .retryable()
}

/// Returns the placements of the instances that gpushd created on a dynamic GPU, after the steps of
/// a grant.
#[must_use]
pub fn created_after(created: &BTreeSet<Placement>, plan: &GpuPlan) -> BTreeSet<Placement> {
    let mut after = created.clone();
    for step in plan.instance_steps() {
        match step {
            InstanceStep::DestroyGpuInstance { placement, .. } => drop(after.remove(placement)),
            InstanceStep::CreateGpuInstance { placement, .. } => drop(after.insert(*placement)),
            InstanceStep::CreateCompute { .. } | InstanceStep::DestroyCompute { .. } => {}
        }
    }
    after
}

#[cfg(test)]
mod tests;
