//! Steps that create and destroy MIG instances.

use gpush_api::{GpuUuid, InstanceStep};
use gpush_core::step::{self, Instances, Verdict};
use gpush_nvml::{DriverError, ErrorKind, Hardware};

use crate::modes::{
    GpuName, Trouble,
    driver::{Driver, no_effect, without_effect},
};

/// Executes a step and waits until its outcome is known. Updates `instances` accordingly.
///
/// # Errors
/// If the step had no effect, the GPU is lost, or the step may still take effect.
pub(crate) async fn execute(
    driver: &Driver,
    gpu: &GpuName,
    step: &InstanceStep,
    instances: &mut Instances,
) -> Result<(), Trouble> {
    let called = call(&driver.hardware, &gpu.uuid, step, instances).await;
    // Read the GPU again in any case: even a failed call may have changed it.
    driver.readings.invalidate(&gpu.uuid);
    let Err(error) = called else { return Ok(()) };
    let what = format!("{}: {} failed", gpu.label, step::describe_instance(step));
    let reading = driver.after_failed_call(gpu, &what, &error).await?;
    match step::verify_instance(step, instances, reading.mig.as_ref()) {
        Verdict::Done => {
            *instances = reading.mig.as_ref().map(|mig| Instances::of(&mig.instances)).unwrap_or_default();
            Ok(())
        }
        Verdict::NotDone | Verdict::MayTakeEffect => Err(no_effect(&error, without_effect(&what, &error))),
    }
}

async fn call(
    hardware: &Hardware,
    uuid: &GpuUuid,
    step: &InstanceStep,
    instances: &mut Instances,
) -> Result<(), DriverError> {
    match step {
        InstanceStep::DestroyCompute { gi, ci, .. } => {
            hardware.destroy_compute_instance(uuid, *gi, *ci).await?;
            instances.destroyed_compute(*gi, *ci);
        }
        InstanceStep::DestroyGpuInstance { gi, .. } => {
            hardware.destroy_gpu_instance(uuid, *gi).await?;
            instances.destroyed(*gi);
        }
        InstanceStep::CreateGpuInstance { profile_id, placement, .. } => {
            let made = hardware.create_gpu_instance(uuid, *profile_id, *placement).await?;
            if made.placement != *placement || made.profile_id != *profile_id {
                // The driver has created another instance than requested. Destroy it, because a later plan would not
                // recognize it as created by gpushd.
                if let Err(error) = hardware.destroy_gpu_instance(uuid, made.id).await {
                    tracing::warn!(
                        gpu = uuid.as_str(),
                        %error,
                        "GPU {uuid}: the driver created another GPU instance than requested, and gpushd cannot destroy \
                        it"
                    );
                }
                let what =
                    format!("gpushd requested profile {profile_id} at {placement:?}, the driver created {made:?}");
                return Err(DriverError::new(ErrorKind::Garbled, "creating a GPU instance").on(uuid).detail(what));
            }
            instances.created(*placement, made.id);
        }
        InstanceStep::CreateCompute { gi_placement, profile_id, placement, .. } => {
            let Some(gi) = instances.at(*gi_placement) else {
                let what = format!("there is no GPU instance at {gi_placement:?}");
                return Err(DriverError::new(ErrorKind::NotFound, "creating a compute instance").on(uuid).detail(what));
            };
            let made = hardware.create_compute_instance(uuid, gi, *profile_id, *placement).await?;
            instances.created_compute(gi, made.id);
        }
    }
    Ok(())
}
