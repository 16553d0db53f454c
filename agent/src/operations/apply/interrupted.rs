//! Errors that explain what happened to an interrupted operation.

use gpush_api::{ApiError, Code};
use gpush_core::plan;
use gpush_nvml::{DriverError, Reading};
use gpush_store::{GpuIntent, OperationId};

use super::part::{Part, instances, outcome};

/// Explains why an interrupted operation is rolled back.
pub(super) fn rollback_reason(
    rolling_back: bool,
    failed: Option<ApiError>,
    others: Vec<ApiError>,
    refused: Option<ApiError>,
) -> ApiError {
    let others = others.into_iter().next();
    if let Some(mut failed) = failed {
        failed.causes.extend(others.iter().flat_map(ApiError::sentences).map(str::to_owned));
        return failed;
    }
    match others.or(refused) {
        Some(refused) => ApiError {
            message: format!("the operation cannot continue after the restart of gpushd: {}", refused.message),
            ..refused
        },
        None if rolling_back => interrupted("gpushd ended while it rolled the operation back"),
        None => interrupted("gpushd ended during the operation, which cannot continue"),
    }
}

/// Creates the error of an operation that was interrupted.
pub(super) fn interrupted(message: &str) -> ApiError {
    ApiError::new(Code::Unavailable, message.to_owned())
}

/// Creates the error of an interrupted operation that cannot continue, because the later operation `by` has changed the
/// same GPUs.
pub(super) fn superseded_error(id: &str, by: OperationId) -> ApiError {
    ApiError::new(Code::Internal, format!("the end of operation {id} was not recorded"))
        .cause(format!(
            "gpushd does not continue operation {id}, because the later operation {by} has changed the same GPUs"
        ))
        .hint(format!("`gpushctl operation show {by}` shows the later operation"))
}

/// Returns the commands that repeat the request.
pub(super) fn repeat_commands(parts: &[Part]) -> String {
    let command = |part: &Part| {
        let layout = if part.plan.layout.is_empty() { "none".to_owned() } else { part.plan.layout.join(",") };
        format!("`gpushctl mig apply --gpu {} --layout '{layout}'`", part.plan.gpu)
    };
    parts.iter().map(command).collect::<Vec<_>>().join(", ") + " (administrator)"
}

/// Converts an error of the driver to the error for a GPU that cannot be read. `what` completes the
/// sentence "GPU 0 …".
pub(super) fn reading_error(label: &str, what: &str, error: &DriverError) -> ApiError {
    error.to_api().context(format!("{label} {what}"))
}

/// Returns an error if another program has created an instance on the GPU since the operation began. In this case, the
/// operation cannot continue.
pub(super) fn changed_by_others(gpu: &GpuIntent, reading: &Reading) -> Option<ApiError> {
    let now = reading.mig.as_ref()?;
    let others = plan::foreign_instances(&now.instances, instances(gpu.before.as_ref()), &outcome(gpu));
    if others.is_empty() {
        return None;
    }
    let message = format!("GPU {} ({}) was changed by another program", gpu.plan.gpu, gpu.plan.uuid);
    let mut error = ApiError::new(Code::Conflict, message);
    for other in now.instances.iter().filter(|instance| others.contains(&instance.id)) {
        error = error.cause(format!(
            "{}@{} (GPU instance {}) did not exist before the operation, and the operation did not create it",
            other.profile, other.placement.start, other.id
        ));
    }
    Some(error.hint(format!("see the present layout with `gpushctl gpu show {}`, then apply a layout", gpu.plan.gpu)))
}
