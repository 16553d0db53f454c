//! `gpushctl apply --undo`: restores the layouts that GPUs had before the last operation that changed them.

use gpush_api::{ApiError, Code, GpuIndex, GpuLayout, GpuUuid, Operation, OperationState};
use gpush_client::Client;
use gpush_core::layout::is_of_rule;

use super::super::select_of;
use crate::{
    args::{ApplyArgs, Lasting, LayoutChange},
    exit::{Failure, Outcome},
    output::Output,
};

/// Number of operations that the command looks through.
const MOST: usize = 200;

/// Kind of the operations that change layouts on request or by gpushd itself. Operations that create devices for leases
/// have other kinds: they change a dynamic layout, which has nothing to restore.
const KIND: &str = "mig.apply";

pub(super) async fn run(client: &mut Client, args: &ApplyArgs, out: &Output) -> Outcome {
    let selectors = args.which.selectors();
    let gpus = client.gpus(false).await?;
    let chosen = if selectors.is_empty() { None } else { Some(select_of(client, gpus, &selectors).await?) };
    let uuids = chosen.map(|gpus| gpus.into_iter().map(|gpu| gpu.uuid).collect::<Vec<_>>());
    let mut found = layouts(client, uuids.as_deref()).await?;
    use_rules(client, &mut found).await?;
    let operations = found.iter().map(|(id, _)| id.as_str()).collect::<std::collections::BTreeSet<_>>();
    let ids = operations.into_iter().collect::<Vec<_>>().join(", ");
    out.remark(&format!("restoring the layout before {ids}\n"));
    let reason = args.why.reason.clone().or_else(|| Some(format!("undo of {ids}")));
    let lasting = Lasting { once: false, reason, expires: None };
    let change = LayoutChange { execution: args.execution.clone(), lasting };
    super::layouts(client, found.into_iter().map(|(_, layout)| layout).collect(), &change, out).await
}

/// Replaces layouts by those of the rules where they are the same. So gpushd creates no override for them.
async fn use_rules(client: &mut Client, found: &mut [(String, GpuLayout)]) -> Result<(), Failure> {
    let diff = client.config_diff().await?;
    for (_, layout) in found {
        let of_gpu = diff.gpus.iter().find(|gpu| gpu.gpu_uuid == layout.gpu.as_str());
        let rule = of_gpu.and_then(|gpu| gpu.in_force.layout.as_ref());
        if let Some(rule) = rule.filter(|rule| layout.mig && is_of_rule(&layout.layout, rule)) {
            layout.layout.clone_from(rule);
        }
    }
    Ok(())
}

/// Returns the layout to restore for each GPU, with the operation that changed it. `None` means the GPUs of the last
/// operation.
async fn layouts(client: &mut Client, gpus: Option<&[GpuUuid]>) -> Result<Vec<(String, GpuLayout)>, Failure> {
    let mut operations = client.last_operations(MOST, None).await?;
    operations.retain(|one| one.kind == KIND && one.begun && one.state == OperationState::Done);
    let mut left: Vec<GpuUuid> = gpus.map(<[GpuUuid]>::to_vec).unwrap_or_default();
    let mut found = Vec::new();
    for summary in operations.iter().rev() {
        if gpus.is_some() && !summary.gpu_uuids.iter().any(|uuid| left.contains(uuid)) {
            continue;
        }
        let operation = client.operation(&summary.id).await?;
        for (gpu, uuid) in changed(&operation) {
            if gpus.is_some() && !left.contains(&uuid) {
                continue;
            }
            left.retain(|one| *one != uuid);
            found.push((operation.id.clone(), layout_before(&operation, gpu, &uuid)?));
        }
        if left.is_empty() && !found.is_empty() {
            break;
        }
    }
    match (left.is_empty(), found.is_empty()) {
        (true, false) => Ok(found),
        (_, true) => Err(nothing(gpus.is_some()).into()),
        (false, false) => {
            let names: Vec<&str> = left.iter().map(GpuUuid::as_str).collect();
            let error = nothing(true).cause(format!("no change is recorded for {}", names.join(", ")));
            Err(error.into())
        }
    }
}

/// Returns index and UUID of the GPUs that an operation changed.
fn changed(operation: &Operation) -> Vec<(GpuIndex, GpuUuid)> {
    operation.plans.iter().filter(|plan| !plan.is_empty()).map(|plan| (plan.gpu, plan.gpu_uuid.clone())).collect()
}

/// Returns the layout of a GPU before an operation.
fn layout_before(operation: &Operation, gpu: GpuIndex, uuid: &GpuUuid) -> Result<GpuLayout, ApiError> {
    let plan = operation.plans.iter().find(|plan| plan.gpu_uuid == *uuid);
    if plan.is_some_and(|plan| plan.mode.is_some()) {
        let message = format!("cannot undo {}: it changed the mode of GPU {gpu}, which the config sets", operation.id);
        let hint = format!("change the rule of the GPU in the config, then run `gpushctl apply {gpu}` (administrator)");
        return Err(ApiError::new(Code::Conflict, message).hint(hint));
    }
    let layout = operation.layouts_before.iter().find(|layout| layout.gpu == uuid.as_str()).cloned();
    layout.ok_or_else(|| {
        let message =
            format!("cannot undo {}: gpushd has no record of the layout of GPU {gpu} before it", operation.id);
        ApiError::new(Code::NotFound, message)
            .hint("apply a layout with `gpushctl mig apply LAYOUT -g GPU` (administrator)")
    })
}

fn nothing(of_named: bool) -> ApiError {
    let which = if of_named { " of these GPUs" } else { "" };
    let message = format!("nothing to undo: no recorded operation has changed a layout{which}");
    ApiError::new(Code::NotFound, message).hint("list the operations with `gpushctl operation list`")
}

#[cfg(test)]
mod tests {
    use gpush_api::Mode;

    use super::*;
    use crate::render::fixtures;

    #[test]
    fn layout_comes_from_the_operation_and_a_mode_change_is_refused() {
        let mut operation = fixtures::operation(OperationState::Done);
        let uuid = operation.plans[0].gpu_uuid.clone();
        assert_eq!(changed(&operation), [(operation.plans[0].gpu, uuid.clone())], "GPU 2 did not change");
        let error = layout_before(&operation, GpuIndex(0), &uuid).unwrap_err();
        assert!(error.message.contains("no record of the layout of GPU 0"), "{error:?}");
        let before = GpuLayout { gpu: uuid.to_string(), mig: true, layout: vec!["7g.80gb@0".to_owned()] };
        operation.layouts_before.push(before.clone());
        assert_eq!(layout_before(&operation, GpuIndex(0), &uuid), Ok(before));
        operation.plans[0].mode = Some(Mode::Exclusive);
        let error = layout_before(&operation, GpuIndex(0), &uuid).unwrap_err();
        assert!(error.message.contains("changed the mode of GPU 0"), "{error:?}");
    }
}
