//! `gpushctl mig add|remove|on|off`: computes the new layouts from the current ones.

use gpush_api::{
    ApiError, Code, ComputeInstance, Gpu, GpuIndex, GpuLayout, LayoutSource, MpsDaemon, PlanRequest, Plans,
};
use gpush_client::Client;
use gpush_core::layout::{Layout, edit};

use super::super::apply;
use crate::{
    args::LayoutChange,
    exit::{Failure, Outcome},
    output::Output,
    render::names::gpu_numbers,
};

/// Returns the selected GPUs, with their profiles. If none is selected, returns the only GPU with MIG.
async fn chosen(client: &mut Client, selectors: &[String]) -> Result<Vec<Gpu>, Failure> {
    let all = client.gpus(true).await?;
    if !selectors.is_empty() {
        return super::super::select_of(client, all, selectors).await;
    }
    let mut with_mig: Vec<Gpu> = all.into_iter().filter(|gpu| gpu.mig.is_some()).collect();
    if with_mig.len() > 1 {
        let error = ApiError::new(Code::BadRequest, "the command names no GPU, but several GPUs support MIG");
        return Err(error.hint(format!("name GPUs with -g, such as `-g {}`", with_mig.swap_remove(0).index)).into());
    }
    Ok(with_mig)
}

async fn edited(
    client: &mut Client,
    selectors: &[String],
    layout: impl Fn(&Gpu, &dyn Fn(&ComputeInstance) -> bool) -> Result<Layout, ApiError>,
) -> Result<Vec<GpuLayout>, Failure> {
    let gpus = chosen(client, selectors).await?;
    let daemons = client.mps().await?;
    let mut layouts = Vec::new();
    for gpu in &gpus {
        let shared = |compute: &ComputeInstance| daemons.iter().any(|daemon| serves(daemon, compute));
        let entries = layout(gpu, &shared)?.canonical();
        layouts.push(GpuLayout { gpu: gpu.uuid.to_string(), mig: true, layout: entries });
    }
    Ok(layouts)
}

fn serves(daemon: &MpsDaemon, compute: &ComputeInstance) -> bool {
    compute.uuid.as_ref() == Some(&daemon.uuid) && daemon.ends.is_none()
}

/// Adds entries to the current layouts. If a GPU has no room, the error names its instances and what to remove.
pub(super) async fn add(
    client: &mut Client,
    selectors: &[String],
    entries: &[String],
    change: &LayoutChange,
    out: &Output,
) -> Outcome {
    check(client, "add", entries, selectors).await?;
    let layouts = edited(client, selectors, |gpu, shared| edit::added(gpu, shared, entries)).await?;
    if change.execution.dry_run {
        let request = PlanRequest { gpus: Vec::new(), layout: LayoutSource::PerGpu(layouts) };
        let mut plans = client.plan(&request).await?;
        let gpus = client.gpus(true).await?;
        for plan in &mut plans.plans {
            let gpu = gpus.iter().find(|gpu| gpu.uuid == plan.gpu_uuid);
            let better = gpu.filter(|_| plan.refusal.is_some()).and_then(|gpu| super::room::explain(gpu, entries));
            plan.error = better.or(plan.error.take());
        }
        return apply::show_plan(&plans, &gpus, out);
    }
    let chosen: Vec<String> = layouts.iter().map(|one| one.gpu.clone()).collect();
    match apply::layouts(client, layouts, change, out).await {
        Err(Failure::Error(error)) if error.code == Code::LayoutImpossible => {
            let gpus = client.gpus(true).await.unwrap_or_default();
            let mut chosen = gpus.iter().filter(|gpu| chosen.iter().any(|uuid| gpu.uuid == uuid.as_str()));
            Err(chosen.find_map(|gpu| super::room::explain(gpu, entries)).unwrap_or(*error).into())
        }
        other => other,
    }
}

/// Returns the current layouts without these entries.
pub(super) async fn removed(
    client: &mut Client,
    selectors: &[String],
    entries: &[String],
) -> Result<Vec<GpuLayout>, Failure> {
    if let Some(error) = super::numbers::devices(client, entries).await {
        return Err(error.into());
    }
    check(client, "remove", entries, selectors).await?;
    edited(client, selectors, |gpu, shared| edit::removed(gpu, shared, entries)).await
}

async fn check(client: &mut Client, verb: &str, entries: &[String], selectors: &[String]) -> Result<(), ApiError> {
    let Some(error) = entries.iter().find_map(|entry| crate::args::foreign_layout::layout(entry)) else {
        return Ok(());
    };
    Err(super::numbers::explain(client, verb, entries, selectors).await.unwrap_or(error))
}

/// Enables MIG mode on the selected GPUs, without instances. Leaves out GPUs whose MIG mode is already on: for such a
/// GPU, the request would create an override, which would replace the rule of the GPU.
pub(super) async fn enable(client: &mut Client, selectors: &[String], change: &LayoutChange, out: &Output) -> Outcome {
    let gpus = chosen(client, selectors).await?;
    let (already, off): (Vec<Gpu>, Vec<Gpu>) =
        gpus.into_iter().partition(|gpu| gpu.mig.as_ref().is_some_and(|mig| mig.enabled && !mig.reset_pending));
    if !already.is_empty() {
        let indexes: Vec<GpuIndex> = already.iter().map(|gpu| gpu.index).collect();
        out.remark(&format!("{}: MIG mode is already on\n", gpu_numbers(&indexes)));
    }
    if off.is_empty() {
        return out.change(false, &Plans { plans: Vec::new() }, |_| String::new()).map(|()| 0);
    }
    // Request the present instances again, so that they are kept: a GPU with a pending change of the MIG mode may still
    // have instances.
    let off: Vec<String> = off.into_iter().map(|gpu| gpu.uuid.to_string()).collect();
    let layouts = edited(client, &off, |gpu, shared| edit::added(gpu, shared, &["none".to_owned()])).await?;
    apply::layouts(client, layouts, change, out).await
}

/// Disables MIG mode on the selected GPUs.
pub(super) async fn disable(client: &mut Client, selectors: &[String], change: &LayoutChange, out: &Output) -> Outcome {
    let gpus = chosen(client, selectors).await?;
    let layouts = gpus.into_iter().map(|gpu| GpuLayout { gpu: gpu.uuid.to_string(), mig: false, layout: Vec::new() });
    apply::layouts(client, layouts.collect(), change, out).await
}
