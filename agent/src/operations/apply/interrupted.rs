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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::modes::scene::{mig_gpu, plan_layout, reading};

    fn error(message: &str) -> ApiError {
        ApiError::new(Code::DriverError, message)
    }

    #[test]
    fn rollback_reason_is_the_first_known_error() {
        let reason = |rolling_back, failed: Option<&str>, other: Option<&str>, refused: Option<&str>| {
            let others = other.map(error).into_iter().collect();
            rollback_reason(rolling_back, failed.map(error), others, refused.map(error))
        };
        let failed = reason(true, Some("creating failed"), Some("GPU 0 was changed"), Some("GPU 1 is in use"));
        assert_eq!(failed.sentences(), ["creating failed", "GPU 0 was changed"]);
        let cannot = "the operation cannot continue after the restart of gpushd";
        let changed = reason(false, None, Some("GPU 0 was changed"), Some("GPU 1 is in use"));
        assert_eq!(changed.message, format!("{cannot}: GPU 0 was changed"));
        assert_eq!(reason(false, None, None, Some("GPU 1 is in use")).message, format!("{cannot}: GPU 1 is in use"));
        let (cancelled, ended) = (reason(true, None, None, None), reason(false, None, None, None));
        assert_eq!(cancelled.message, "gpushd ended while it rolled the operation back");
        assert_eq!(ended.message, "gpushd ended during the operation, which cannot continue");
    }

    #[test]
    fn only_instances_of_other_programs_are_named() {
        let before = mig_gpu(&["3g.40gb@4", "1g.10gb@0"]);
        let intent = GpuIntent { before: before.mig.clone(), plan: plan_layout(&before, &["3g.40gb@4", "2g.20gb@0"]) };
        for ours in [&["3g.40gb@4", "1g.10gb@0"][..], &["3g.40gb@4", "2g.20gb@0"], &["3g.40gb@4"], &[]] {
            assert_eq!(changed_by_others(&intent, &reading(&mig_gpu(ours))), None, "{ours:?}");
        }
        let foreign = changed_by_others(&intent, &reading(&mig_gpu(&["3g.40gb@4", "1g.10gb@3"]))).unwrap();
        assert_eq!(foreign.message, "GPU 0 (GPU-0) was changed by another program");
        assert!(foreign.causes.len() == 1 && foreign.causes[0].starts_with("1g.10gb@3 (GPU instance "), "{foreign:?}");
        assert!(foreign.hint.unwrap().contains("`gpushctl gpu show 0`"));
    }
}
