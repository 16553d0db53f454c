//! Errors that explain what happened to an interrupted operation.

use gpush_api::{ApiError, Code, GpuPlan};
use gpush_core::{layout::DYNAMIC, plan};
use gpush_nvml::{DriverError, Reading};
use gpush_store::{GpuIntent, OperationId};

use super::{
    grant::GRANT,
    part::{instances, outcome},
};

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

/// Returns a hint that says how to repeat the request of an operation that a reboot interrupted. `plans` are the plans
/// that the operation began with.
pub(super) fn repeat_hint(kind: &str, plans: &[GpuPlan]) -> String {
    if kind == GRANT {
        return "request the lease again".to_owned();
    }
    // A plan without steps needs no repetition.
    let commands: Vec<String> = plans.iter().filter(|plan| !plan.steps.is_empty()).map(repeat_command).collect();
    if commands.is_empty() {
        return "`gpushctl status` shows the present layout".to_owned();
    }
    format!(
        "`gpushctl status` shows the present layout; to repeat the request: {} (administrator)",
        commands.join(", ")
    )
}

/// Returns the command that repeats the request on one GPU.
fn repeat_command(plan: &GpuPlan) -> String {
    let gpu = plan.gpu;
    // Only the rule of the GPU can request such a state.
    let is_of_rule = plan.mode.is_some() || plan.layout == [DYNAMIC] || plan.starts_mps() || plan.sets_timeslice();
    if is_of_rule {
        format!("`gpushctl apply {gpu}`")
    } else if plan.mig_mode() == Some(false) {
        format!("`gpushctl mig off {gpu}`")
    } else {
        format!("`gpushctl mig apply --gpu {gpu} --layout '{}'`", plan.layout.join(","))
    }
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
    let message = format!("GPU {} ({}) was changed by another program", gpu.plan.gpu, gpu.plan.gpu_uuid);
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
    use gpush_api::{Mode, MpsStep, Step, TimesliceStep};

    use super::*;
    use crate::modes::scene::{mig_gpu, plan_layout, plan_mig_off, reading, whole_gpu};

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

    /// Fault: for every operation, the hint named `mig apply --layout`. For an operation that disables MIG mode, the layout
    /// was `none`, which enables MIG mode.
    #[test]
    fn hint_after_a_reboot_repeats_the_request() {
        let on = mig_gpu(&["3g.40gb@4"]);
        let with = |step| GpuPlan { steps: vec![step], ..plan_mig_off(&whole_gpu()) };
        for (plan, command) in [
            (plan_layout(&on, &["2g.20gb@0", "1g.10gb@2"]), "mig apply --gpu 0 --layout '2g.20gb@0,1g.10gb@2'"),
            (plan_layout(&on, &["none"]), "mig apply --gpu 0 --layout 'none'"),
            (plan_mig_off(&on), "mig off 0"),
            (GpuPlan { mode: Some(Mode::Exclusive), ..plan_mig_off(&on) }, "apply 0"),
            (with(Step::Mps(MpsStep::StartDaemon { device: None })), "apply 0"),
            (with(Step::Timeslice(TimesliceStep::Set)), "apply 0"),
            (GpuPlan { layout: vec![DYNAMIC.to_owned()], ..plan_layout(&on, &["none"]) }, "apply 0"),
        ] {
            let hint = repeat_hint("mig.apply", std::slice::from_ref(&plan));
            assert!(hint.ends_with(&format!(": `gpushctl {command}` (administrator)")), "{hint}");
            assert_eq!(repeat_hint(GRANT, &[plan]), "request the lease again");
        }
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
