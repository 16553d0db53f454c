//! The previous layout on one GPU: restored to the placement, read back.
//!
//! It is planned like any other change, from a fresh reading to what stood before, so it does not
//! matter how far the change came. A failed step is tried again from another fresh reading: what
//! broke the change may be over.

use gpush_api::{ApiError, Code, GpuInstance, Mig};
use gpush_core::{geometry::Geometry, plan, refusal};

use super::{
    Part,
    step::{self, Ground, Trouble},
};
use crate::{agent::Shared, redact};

/// Attempts to restore the previous layout.
const ATTEMPTS: u32 = 3;

/// Restores what stood before.
///
/// # Errors
/// When it can't; the GPU is then neither as planned nor as before.
pub(super) async fn back(agent: &Shared, part: &Part) -> Result<(), Trouble> {
    let mut last = None;
    for attempt in 1..=ATTEMPTS {
        match once(agent, part).await {
            Ok(()) => return Ok(()),
            Err(trouble @ (Trouble::Lost(_) | Trouble::Unknown(_))) => return Err(trouble),
            Err(trouble @ Trouble::Failed(_)) => {
                tracing::warn!(
                    gpu = part.plan.uuid,
                    "restoring the previous layout, attempt {attempt} of {ATTEMPTS}: {}",
                    trouble.error().causes.first().unwrap_or(&trouble.error().message)
                );
                last = Some(trouble);
            }
        }
    }
    Err(last.unwrap_or_else(|| Trouble::Failed(ApiError::new(Code::Internal, "no attempt was made"))))
}

async fn once(agent: &Shared, part: &Part) -> Result<(), Trouble> {
    let reading = step::read(agent, part).await?;
    if same(part.before.as_ref(), reading.mig.as_ref()) {
        return Ok(());
    }
    let (Some(before), Some(now)) = (&part.before, &reading.mig) else {
        let message = format!("{}: it has no MIG any more", part.label());
        return Err(Trouble::Failed(ApiError::new(Code::DriverError, message)));
    };
    if now.enabled {
        let geometry = Geometry::new(&now.profiles, now.memory_slices, now.compute_slices);
        let previous: &[GpuInstance] = if before.enabled { &before.instances } else { &[] };
        let target = plan::Target::of_instances(&geometry, previous);
        let plan = plan::plan(&geometry, &now.instances, &target).map_err(|mut refused| {
            // It is shown with the operation and as the GPU's condition: to everybody.
            redact::refusal(&mut refused);
            let mut error = refusal::explain(&refused, part.plan.gpu, &part.label());
            error.causes.insert(0, error.message);
            error.message = format!("{}: the previous layout can't be restored", part.label());
            Trouble::Failed(error)
        })?;
        let mut ground = Ground::of(&now.instances);
        for step in &plan.steps {
            step::take(agent, part, step, &mut ground).await?;
        }
    }
    if (now.enabled, now.pending) != (before.enabled, before.pending) {
        step::set_mode(agent, part, before.enabled).await?;
    }
    let reading = step::read(agent, part).await?;
    if same(part.before.as_ref(), reading.mig.as_ref()) {
        return Ok(());
    }
    let message = format!("{}: the driver reported success, but the previous layout is not back", part.label());
    Err(Trouble::Failed(ApiError::new(Code::DriverError, message)))
}

/// Whether the same layout stands in both. Ids of instances are the driver's and may differ.
pub(super) fn same(one: Option<&Mig>, other: Option<&Mig>) -> bool {
    match (one, other) {
        (None, None) => true,
        (Some(one), Some(other)) => {
            (one.enabled, one.pending) == (other.enabled, other.pending)
                && shape(&one.instances) == shape(&other.instances)
        }
        (None, Some(_)) | (Some(_), None) => false,
    }
}

/// Instances by where they are and what they are.
pub(super) type Shape = Vec<(gpush_api::Placement, u32, Vec<(Option<gpush_api::Placement>, u32)>)>;

/// What stands, without the ids.
pub(super) fn shape(instances: &[GpuInstance]) -> Shape {
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
