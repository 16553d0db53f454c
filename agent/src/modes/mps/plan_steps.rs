//! Plans which MPS daemons an operation stops and starts. Refuses plans that would disturb a lease or a program.
//!
//! ```text
//! target is gone, or no longer shared after the plan ─┬─ used by a lease or a client ──► refused, with their names
//!                                                     └─ idle ─► step StopDaemon
//! target is shared after the plan, and has no daemon ─┬─ used by a lease or a process ─► refused, with their names
//!                                                     └─ idle ─► step StartDaemon
//! ```
//!
//! A whole GPU is shared if its rule has mode `mps`. A MIG device is shared if the layout after the operation has `:mps`
//! for it: the layout of an override that the operation creates, the layout of the rule if it ends the override, and
//! otherwise the desired layout.

use std::{collections::BTreeSet, sync::Arc};

use gpush_api::{ApiError, Code, Gpu, GpuPlan, InstanceStep, LeaseKind, Mig, Mode, MpsStep, Refusal, Step, TargetUuid};
use gpush_core::{
    desired::in_use::{Scope, check},
    layout::Layout,
    lease::usage,
    mps::{MpsTarget, MpsTargets},
    schedule::ClaimedTargets,
    sharing::{self, DeviceAfter},
};

use super::{Mps, uses, view};
use crate::state::{HostState, OpenLease};

/// The changes of a GPU's daemons that a plan makes.
#[derive(Debug, Default)]
struct DaemonChanges {
    /// The targets whose daemons the plan stops.
    stops: Vec<Arc<MpsTarget>>,
    /// Whether the plan starts the daemon of the whole GPU.
    starts_whole: bool,
    /// The MIG devices whose daemons the plan starts.
    starts: Vec<DeviceAfter>,
}

impl DaemonChanges {
    /// `layout` is the layout that the GPU should have after the operation.
    fn of(targets: &MpsTargets, gpu: &Gpu, plan: &GpuPlan, layout: Option<&Layout>) -> Self {
        let had: BTreeSet<TargetUuid> = targets.on_gpu(&gpu.uuid).map(|target| target.uuid.clone()).collect();
        let shared = match layout {
            Some(layout) if plan.error.is_none() => sharing::shared_after(layout, gpu, plan, &had),
            Some(_) | None => Vec::new(),
        };
        // Without a layout, it is not known which devices are shared, so those that stay keep their daemons.
        let loses_daemon = |uuid: &TargetUuid| {
            *uuid != gpu.uuid && layout.is_some() && !shared.iter().any(|one| one.uuid.as_ref() == Some(uuid))
        };
        let stops = targets.on_gpu(&gpu.uuid).filter(|target| {
            let uuid = &target.uuid;
            // Include a daemon that an administrator stopped: its record must be removed, and the compute mode restored.
            let stands = target.report.is_present() || targets.is_active(uuid);
            stands && (is_removed(gpu, plan, uuid) || loses_daemon(uuid))
        });
        let is_new = |one: &DeviceAfter| one.uuid.as_ref().is_none_or(|uuid| !had.contains(uuid));
        Self {
            stops: stops.cloned().collect(),
            starts_whole: gpu.mode == Mode::Mps && plan.leaves_whole(gpu) && !targets.is_active(gpu.uuid.as_target()),
            starts: shared.into_iter().filter(is_new).collect(),
        }
    }
}

/// Returns what a plan needs exclusively on its GPU: certain targets, or the whole GPU. While the operation waits, it
/// reserves these targets or this GPU, even if leases still use them. A refused plan reserves nothing.
pub(crate) fn claimed_by_plan(mps: &Mps, gpu: &Gpu, plan: &GpuPlan, layout: Option<&Layout>) -> ClaimedTargets {
    claimed(&mps.handles.context.state.mps(), gpu, plan, layout)
}

fn claimed(targets: &MpsTargets, gpu: &Gpu, plan: &GpuPlan, layout: Option<&Layout>) -> ClaimedTargets {
    if plan.error.is_some() {
        return ClaimedTargets::Targets(BTreeSet::new());
    }
    let changes = DaemonChanges::of(targets, gpu, plan, layout);
    let is_pending = gpu.pending.iter().any(|change| change.aim.device().is_none());
    if plan.mig_mode().is_some() || plan.reset().is_some() || changes.starts_whole || is_pending {
        return ClaimedTargets::Gpu;
    }
    let instances = gpu.mig.iter().flat_map(|mig| &mig.instances);
    let devices = instances.flat_map(|instance| &instance.compute).filter_map(|compute| compute.uuid.as_ref());
    // If MIG is on, no lease can use the whole GPU.
    let is_whole = gpu.mig.as_ref().is_none_or(Mig::is_off);
    let removed = devices.chain(is_whole.then_some(gpu.uuid.as_target())).filter(|uuid| is_removed(gpu, plan, uuid));
    let changed = changes
        .stops
        .iter()
        .map(|target| &target.uuid)
        .chain(changes.starts.iter().filter_map(|one| one.uuid.as_ref()));
    ClaimedTargets::Targets(removed.chain(changed).cloned().collect())
}

/// Adds to each plan the daemons that it stops and starts. Refuses plans that would stop a daemon in use, or start a
/// daemon on a target in use. `layouts` are the layouts that the GPUs should have after the operation.
pub(crate) fn plan(mps: &Mps, gpus: &[Gpu], plans: &mut [GpuPlan], layouts: &[Option<Layout>]) {
    let host = mps.handles.context.state.now();
    for (plan, layout) in plans.iter_mut().zip(layouts) {
        let Some(gpu) = gpus.iter().find(|gpu| gpu.uuid == plan.gpu_uuid) else { continue };
        // Replace an earlier refusal, because it may name only the MPS server. The new refusal names the clients and
        // leases.
        let held = matches!(plan.refusal, Some(Refusal::Held { .. } | Refusal::Blocked { .. }));
        if plan.error.is_some() && !held {
            continue;
        }
        let changes = DaemonChanges::of(&host.mps, gpu, plan, layout.as_ref());
        if let Some(error) = used_daemon_error(&host, gpu, &changes) {
            *plan = plan.without_steps().refused(error);
            continue;
        }
        if plan.error.is_some() {
            continue;
        }
        match starts(gpu, plan, &changes) {
            Ok(started) => {
                let stop = |target: &Arc<MpsTarget>| {
                    Step::Mps(MpsStep::StopDaemon { uuid: target.uuid.clone(), label: target.label() })
                };
                changes.stops.iter().map(stop).chain(started).for_each(|step| plan.add(step));
            }
            Err(refused) => *plan = *refused,
        }
    }
}

/// Returns the error if the plan stops a daemon in use.
fn used_daemon_error(host: &HostState, gpu: &Gpu, changes: &DaemonChanges) -> Option<ApiError> {
    let used = changes.stops.iter().map(|target| (target, uses(host, target))).filter(|(_, uses)| !uses.is_empty());
    let used: Vec<(&Arc<MpsTarget>, Vec<String>)> = used.collect();
    let name = used.first()?.0.name();
    let message = format!("GPU {} is shared through MPS, and in use", gpu.index);
    let mut error = ApiError::new(Code::Blocked, message);
    error.causes.extend(used.iter().flat_map(|(_, uses)| uses.iter().cloned()));
    let leases = changes.stops.iter().flat_map(|target| host.leases.on_target(&target.uuid)).map(OpenLease::id);
    let hint = usage::hint(leases)
        .unwrap_or_else(|| format!("see the clients with `gpushctl mps show {name}`, and try again later"));
    Some(error.hint(hint).retryable())
}

/// Returns the steps that start daemons.
///
/// # Errors
/// A target cannot be shared, or is in use. Contains the refused plan.
fn starts(gpu: &Gpu, plan: &GpuPlan, changes: &DaemonChanges) -> Result<Vec<Step>, Box<GpuPlan>> {
    let mut steps = Vec::new();
    if changes.starts_whole {
        if let Some(why) = sharing::mps_unsupported_reason(gpu) {
            let message = format!("GPU {} can't be shared through MPS", gpu.index);
            let error = ApiError::new(Code::Unsupported, message).cause(why).hint(view::OTHER_MODE);
            return Err(Box::new(plan.without_steps().refused(error)));
        }
        check(gpu, plan, Scope::Gpu, Some(LeaseKind::Mps), "start the MPS daemon")?;
        steps.push(Step::Mps(MpsStep::StartDaemon { device: None }));
    }
    for one in &changes.starts {
        if let Some(uuid) = &one.uuid {
            let change = format!("start the MPS daemon of {}", one.device);
            check(gpu, plan, Scope::Device(uuid), Some(LeaseKind::Mps), &change)?;
        }
        steps.push(Step::Mps(MpsStep::StartDaemon { device: Some(one.device.clone()) }));
    }
    Ok(steps)
}

/// Returns whether a plan removes the target `uuid` of a daemon.
fn is_removed(gpu: &Gpu, plan: &GpuPlan, uuid: &TargetUuid) -> bool {
    if plan.error.is_some() {
        // A refused plan has no steps, so they do not show whether the plan would remove the target. Assume that it
        // would.
        return true;
    }
    if *uuid == gpu.uuid {
        return plan.mig_mode().is_some() || gpu.mode != Mode::Mps;
    }
    let instances = gpu.mig.iter().flat_map(|mig| &mig.instances);
    let mut devices = instances.flat_map(|gi| gi.compute.iter().map(move |ci| (gi.id, ci.id, ci.uuid.as_ref())));
    let Some((gi, ci, _)) = devices.find(|(_, _, device)| *device == Some(uuid)) else { return false };
    let gone = |step: &InstanceStep| match step {
        InstanceStep::DestroyCompute { gi: of, ci: which, .. } => (*of, *which) == (gi, ci),
        InstanceStep::DestroyGpuInstance { gi: which, .. } => *which == gi,
        InstanceStep::CreateGpuInstance { .. } | InstanceStep::CreateCompute { .. } => false,
    };
    plan.mig_mode() == Some(false) || plan.reset().is_some() || plan.instance_steps().any(gone)
}

#[cfg(test)]
mod tests;
