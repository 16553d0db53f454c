//! `gpushctl apply --undo`: restores the layouts that GPUs had before the last operation that changed them.

use gpush_api::{
    ApiError, Code, GpuIndex, GpuLayout, GpuUuid, Operation, OperationState, OperationSummary, OverrideEnded, Plans,
};
use gpush_client::Client;
use gpush_core::layout::{DYNAMIC, equals_rule_layout};

use super::super::select_of;
use crate::{
    args::{ApplyArgs, Lasting, LayoutChange},
    exit::{Failure, Outcome},
    output::{EndedOverrides, Output},
    render::names::gpu_numbers,
};

/// Number of operations in one request.
const PAGE: usize = 200;

/// Kind of the operations that change layouts on request. Only such an operation is undone.
const KIND: &str = "mig.apply";

pub(super) async fn run(client: &mut Client, args: &ApplyArgs, out: &Output) -> Outcome {
    let selectors = args.which.selectors();
    let gpus = client.gpus(false).await?;
    let chosen = if selectors.is_empty() { None } else { Some(select_of(client, gpus, &selectors).await?) };
    let uuids = chosen.map(|gpus| gpus.into_iter().map(|gpu| gpu.uuid).collect::<Vec<_>>());
    let mut found = layouts(client, uuids.as_deref()).await?;
    let dynamic = use_rules(client, &mut found).await?;
    if found.is_empty() {
        return end_overrides(client, &dynamic, args.execution.dry_run, out).await;
    }
    let operations = found.iter().map(|(id, _)| id.as_str()).collect::<std::collections::BTreeSet<_>>();
    let ids = operations.into_iter().collect::<Vec<_>>().join(", ");
    out.remark(&format!("restoring the layout before {ids}\n"));
    let reason = args.why.reason.clone().or_else(|| Some(format!("undo of {ids}")));
    let lasting = Lasting { once: false, reason, expires: None };
    let change = LayoutChange { execution: args.execution.clone(), lasting };
    let status = super::layouts(client, found.into_iter().map(|(_, layout)| layout).collect(), &change, out).await?;
    if status == 0 && !dynamic.is_empty() {
        // The plan has only the other GPUs, so say what happens to these.
        let text = dynamic_again(&dynamic, args.execution.dry_run);
        if !args.execution.dry_run {
            end_each_override(client, &dynamic).await?;
        }
        out.remark(&(out.look.wrap("", &text).join("\n") + "\n"));
    }
    Ok(status)
}

/// A GPU whose rule has a dynamic layout: its index and its UUID.
type DynamicGpu = (GpuIndex, String);

/// Says what the end of an override means for GPUs with a dynamic layout.
fn dynamic_again(gpus: &[DynamicGpu], dry_run: bool) -> String {
    let which = gpu_numbers(&gpus.iter().map(|(index, _)| *index).collect::<Vec<_>>());
    let its = if gpus.len() == 1 { "its" } else { "their" };
    let stay = "present instances stay until leases need others";
    if dry_run {
        format!("{which}: this ends {its} override; the layout is then dynamic, and {stay}")
    } else {
        format!("{which}: {its} override has ended; the layout is dynamic again, and {stay}")
    }
}

/// Ends the overrides of GPUs with a dynamic layout, if nothing else has to be restored.
async fn end_overrides(client: &mut Client, gpus: &[DynamicGpu], dry_run: bool, out: &Output) -> Outcome {
    if dry_run {
        out.remark(&(out.look.wrap("", &dynamic_again(gpus, dry_run)).join("\n") + "\n"));
        return out.show(&Plans { plans: Vec::new() }, |_| String::new()).map(|()| 0);
    }
    let ended = end_each_override(client, gpus).await?;
    let text = dynamic_again(gpus, dry_run);
    out.change(!ended.is_empty(), &EndedOverrides { ended_overrides: &ended }, |look| {
        look.wrap("", &text).join("\n") + "\n"
    })?;
    Ok(0)
}

async fn end_each_override(client: &mut Client, gpus: &[DynamicGpu]) -> Result<Vec<OverrideEnded>, Failure> {
    let mut ended = Vec::new();
    for (_, uuid) in gpus {
        ended.push(client.end_override(uuid).await?);
    }
    Ok(ended)
}

/// If a layout equals that of the GPU's rule, uses the text of the rule, so that gpushd creates no override. Removes the GPUs
/// with a dynamic layout from `found`, and returns these GPUs. For these GPUs, the caller ends the override instead.
///
/// # Errors
/// If a GPU with a dynamic layout has no override: gpushd itself has changed its instances for leases.
async fn use_rules(client: &mut Client, found: &mut Vec<(String, GpuLayout)>) -> Result<Vec<DynamicGpu>, Failure> {
    let diff = client.config_diff().await.map_err(|mut error| {
        // To undo, the command reads the config, which the user did not ask for.
        if error.code() == Code::Denied {
            error.error.message = "cannot undo a change: only administrators may change layouts".to_owned();
        }
        error
    })?;
    let of_gpu = |uuid: &str| diff.gpus.iter().find(|gpu| gpu.gpu_uuid == uuid);
    let mut dynamic = Vec::new();
    for (_, layout) in found.iter_mut() {
        let Some((gpu, rule)) = of_gpu(&layout.gpu).and_then(|gpu| Some((gpu, gpu.in_force.layout.as_ref()?))) else {
            continue;
        };
        if *rule == [DYNAMIC] {
            if gpu.overridden.is_none() {
                let message = format!("nothing to undo on GPU {}: its layout is dynamic", gpu.gpu);
                let error = ApiError::new(Code::Conflict, message);
                return Err(error.cause("gpushd creates and destroys the MIG devices of this GPU for leases").into());
            }
            dynamic.push((gpu.gpu, layout.gpu.clone()));
        } else if layout.mig && equals_rule_layout(&layout.layout, rule) {
            layout.layout.clone_from(rule);
        }
    }
    found.retain(|(_, layout)| dynamic.iter().all(|(_, uuid)| *uuid != layout.gpu));
    Ok(dynamic)
}

/// Returns the layout to restore for each GPU, with the operation that changed it. `None` means the GPUs of the last
/// operation on request.
///
/// # Errors
/// If no operation has changed the GPUs, or the last one was not on request, or has not ended.
async fn layouts(client: &mut Client, gpus: Option<&[GpuUuid]>) -> Result<Vec<(String, GpuLayout)>, Failure> {
    let mut left: Option<Vec<GpuUuid>> = gpus.map(<[GpuUuid]>::to_vec);
    let (mut found, mut later, mut before) = (Vec::new(), Vec::new(), None);
    loop {
        let page = client.last_operations(PAGE, before.as_deref()).await?;
        for summary in page.iter().rev().filter(|one| may_have_changed(one)) {
            let concerns = |uuid: &GpuUuid| left.as_ref().is_none_or(|left| left.contains(uuid));
            if !summary.gpu_uuids.iter().any(concerns) {
                continue;
            }
            let operation = client.operation(&summary.id).await?;
            let of_operation: Vec<_> = changed(&operation).into_iter().filter(|(_, uuid)| concerns(uuid)).collect();
            if operation.kind != KIND || !operation.state.is_final() {
                match of_operation.first() {
                    Some((gpu, _)) if left.is_some() => return Err(not_on_request(&operation, *gpu).into()),
                    _ => later.extend(of_operation.into_iter().map(|(gpu, uuid)| (gpu, uuid, operation.clone()))),
                }
                continue;
            }
            for (gpu, uuid) in of_operation {
                if let Some((_, _, by)) = later.iter().find(|(_, other, _)| *other == uuid) {
                    return Err(not_on_request(by, gpu).into());
                }
                found.push((operation.id.clone(), layout_before(&operation, gpu, &uuid)?));
                if let Some(left) = &mut left {
                    left.retain(|one| *one != uuid);
                }
            }
            if !found.is_empty() && left.as_ref().is_none_or(Vec::is_empty) {
                return Ok(found);
            }
        }
        before = page.first().map(|first| first.id.clone());
        if page.len() < PAGE {
            break;
        }
    }
    let left = left.unwrap_or_default();
    let mut error = nothing(gpus.is_some());
    if !found.is_empty() {
        let names: Vec<&str> = left.iter().map(GpuUuid::as_str).collect();
        error = error.cause(format!("no change is recorded for {}", names.join(", ")));
    }
    Err(error.into())
}

/// Returns whether an operation may have changed a layout that it has not restored.
fn may_have_changed(one: &OperationSummary) -> bool {
    match one.state {
        OperationState::NotStarted | OperationState::RolledBack => false,
        OperationState::Queued
        | OperationState::Waiting
        | OperationState::Running
        | OperationState::Cancelling
        | OperationState::Interrupted
        | OperationState::Done
        | OperationState::Failed => one.begun,
    }
}

/// Returns the error for a GPU whose last change cannot be undone: no user requested it, or it still runs.
fn not_on_request(by: &Operation, gpu: GpuIndex) -> ApiError {
    let id = &by.id;
    if !by.state.is_final() {
        let error = ApiError::new(Code::Conflict, format!("cannot undo a change of GPU {gpu}: {id} is changing it"));
        return error.hint(format!("wait for its end: `gpushctl operation wait {id}`"));
    }
    ApiError::new(Code::Conflict, format!("cannot undo a change of GPU {gpu}: gpushd itself has changed it since"))
        .cause(format!("{id} ({}) has changed it last", by.kind))
        .hint(format!("see `gpushctl operation show {id}`; to apply a layout: `gpushctl mig apply LAYOUT -g {gpu}` (administrator)"))
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
    let message = format!("nothing to undo: no recorded command has changed a layout{which}");
    ApiError::new(Code::NotFound, message)
        .cause("changes that gpushd itself made cannot be undone")
        .hint("list the operations with `gpushctl operation list`")
}

#[cfg(test)]
mod tests {
    use gpush_api::Mode;

    use super::*;
    use crate::render::fixtures;

    /// Fault: after `apply --undo` of several GPUs, no line named the GPU with a dynamic layout.
    #[test]
    fn undo_names_the_gpus_with_a_dynamic_layout() {
        let gpus = |indexes: &[u32]| {
            indexes.iter().map(|index| (GpuIndex(*index), format!("GPU-{index}"))).collect::<Vec<_>>()
        };
        let done = dynamic_again(&gpus(&[2]), false);
        assert!(done.starts_with("GPU 2: its override has ended; the layout is dynamic again"), "{done}");
        let plan = dynamic_again(&gpus(&[2, 3]), true);
        assert!(plan.starts_with("GPUs 2-3: this ends their override; the layout is then dynamic"), "{plan}");
    }

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
