//! Changes of MIG mode in plans: whether a change needs a reset, what the reset affects, and what
//! blocks the reset according to the readings.

use gpush_api::{
    ApiError, Architecture, Code, Gpu, GpuPlan, GpuUuid, InstanceStep, Mig, MigModeStep, Peer, Refusal, Reset, Step,
};

use super::gpu_label::label;
use crate::{config::Config, holders};

/// Returns whether a change of MIG mode needs a reset of the GPU.
#[must_use]
pub fn needs_reset(architecture: Architecture) -> bool {
    match architecture {
        // A GPU that is newer than this build probably behaves like the newest GPUs that this build
        // knows.
        Architecture::Hopper | Architecture::Blackwell | Architecture::Unknown => false,
        Architecture::Legacy
        | Architecture::Volta
        | Architecture::Turing
        | Architecture::Ampere
        | Architecture::Ada => true,
    }
}

/// Returns the step that sets MIG mode to `enable`. Its reset lacks the details that [`complete`] adds. If the change
/// needs a reset, and the GPU is passed through to a virtual machine, the new mode is effective after the next reboot.
///
/// # Errors
/// [`Refusal::Reboot`] if the mode is set already, and waits for the reboot.
pub(super) fn step(gpu: &Gpu, mig: &Mig, enable: bool) -> Result<MigModeStep, Refusal> {
    // If a mode change is only pending, cancelling it needs no reset.
    let changes = mig.enabled != enable;
    let needs_reset = changes && (needs_reset(gpu.architecture) || mig.reset_pending);
    let at_reboot = needs_reset && gpu.passed_through;
    if at_reboot && mig.pending_mode() == enable {
        return Err(Refusal::Reboot { enables: enable });
    }
    let reset = (needs_reset && !at_reboot).then(Reset::default);
    Ok(if enable { MigModeStep::Enable { reset, at_reboot } } else { MigModeStep::Disable { reset, at_reboot } })
}

/// Returns the step that keeps MIG mode on, if the next reset or reboot would turn it off. The step changes nothing now.
pub(super) fn cancel_disabling(gpu: &Gpu, mig: &Mig) -> Option<Step> {
    let is_pending = mig.enabled && !mig.pending_mode();
    step(gpu, mig, true).ok().filter(|_| is_pending).map(Step::MigMode)
}

/// Whether a fabric manager manages the NVSwitches of the host. Without a fabric manager, all GPUs
/// on NVSwitches must be reset together (nvidia-smi's manual, `--gpu-reset`). GPUs that are
/// connected directly can always be reset separately.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fabric {
    /// A fabric manager is running, or the host has no NVSwitches.
    Managed,
    /// No fabric manager is running, or the fabric manager will not run during the reset.
    Unmanaged,
}

/// Completes the resets of plans: adds what each reset affects, and refuses resets that would
/// destroy instances of other GPUs. This function cannot check whether a fabric manager is running.
/// On a host with NVSwitches, it assumes a running fabric manager, unless the config lists the
/// fabric manager among the services to stop before a reset.
pub(super) fn complete(config: &Config, gpus: &[Gpu], plans: &mut [GpuPlan]) {
    let stopped = holders::contains_service(&config.mode_change.services, holders::FABRIC_MANAGER);
    complete_resets(config, gpus, plans, if stopped { Fabric::Unmanaged } else { Fabric::Managed });
    add_services(config, gpus, plans);
}

/// Adds the services and hooks of the config to the plans that the driver refuses while a program has the GPU open.
/// These plans change MIG mode at once, or create the first instance of a GPU whose MIG mode changes without a reset. For
/// such a GPU, the driver checks open handles when it creates the first instance. A change of MIG
/// mode that waits for a reboot needs neither.
pub fn add_services(config: &Config, gpus: &[Gpu], plans: &mut [GpuPlan]) {
    let change = &config.mode_change;
    for plan in plans {
        let Some(gpu) = gpus.iter().find(|gpu| gpu.uuid == plan.gpu_uuid) else { continue };
        let is_changed = |enable: bool| gpu.mig.as_ref().is_none_or(|mig| mig.enabled != enable);
        let changes_mode = plan.mig_mode().is_some_and(is_changed) && !plan.waits_for_reboot();
        if changes_mode || (!needs_reset(gpu.architecture) && creates_first_instance(gpu, plan)) {
            plan.services.clone_from(&change.services);
            plan.hooks = [&change.before, &change.after].into_iter().flatten().cloned().collect();
        }
    }
}

/// Returns whether a plan creates a GPU instance while the GPU has no other.
fn creates_first_instance(gpu: &Gpu, plan: &GpuPlan) -> bool {
    let creates = plan.instance_steps().any(|step| matches!(step, InstanceStep::CreateGpuInstance { .. }));
    let is_destroyed = |id: u32| {
        let destroys = |step: &InstanceStep| matches!(step, InstanceStep::DestroyGpuInstance { gi, .. } if *gi == id);
        plan.instance_steps().any(destroys)
    };
    let mut instances = gpu.mig.iter().flat_map(|mig| &mig.instances);
    creates && instances.all(|instance| is_destroyed(instance.id))
}

/// Completes the resets again, for a host without a running fabric manager.
pub fn without_fabric_manager(config: &Config, gpus: &[Gpu], plans: &mut [GpuPlan]) {
    complete_resets(config, gpus, plans, Fabric::Unmanaged);
}

fn complete_resets(config: &Config, gpus: &[Gpu], plans: &mut [GpuPlan], fabric: Fabric) {
    let changing: Vec<(GpuUuid, Option<bool>)> = plans
        .iter()
        .filter(|plan| plan.reset().is_some())
        .map(|plan| (plan.gpu_uuid.clone(), plan.mig_mode()))
        .collect();
    let whole: Vec<GpuPlan> = plans.to_vec();
    for plan in plans {
        let sets = plan.mig_mode();
        let own = gpus.iter().position(|gpu| gpu.uuid == plan.gpu_uuid);
        let Some(reset) = plan.reset_mut() else { continue };
        let peers = own.map(|own| reset_peers(config, gpus, own, fabric)).unwrap_or_default();
        reset.together =
            peers.iter().map(|at| Peer { gpu: gpus[*at].index, gpu_uuid: gpus[*at].uuid.clone() }).collect();
        let with_it = |gpu: &Gpu| changing.contains(&(gpu.uuid.clone(), sets));
        let in_the_way: Vec<String> =
            peers.iter().map(|at| &gpus[*at]).filter(|gpu| !with_it(gpu)).filter_map(reset_obstacle).collect();
        let in_the_way: Vec<String> =
            in_the_way.into_iter().chain(blocked_by_same_request(plan, gpus, &peers, &whole)).collect();
        if in_the_way.is_empty() {
            continue;
        }
        let label = gpus.iter().find(|gpu| gpu.uuid == plan.gpu_uuid).map(label).unwrap_or_default();
        let mut error = ApiError::new(Code::Blocked, format!("{label} can be reset only together with other GPUs"));
        error.causes.extend(in_the_way);
        let by_switch = fabric == Fabric::Unmanaged && own.is_some_and(|own| is_switched(&gpus[own]));
        let error = error.hint(match by_switch {
            false => "free the other GPUs, or change the MIG mode of all these GPUs in one command",
            true => {
                "while no fabric manager runs, all GPUs on NVSwitches are reset together: run `systemctl start \
                nvidia-fabricmanager`, free the other GPUs, or change the MIG mode of all these GPUs in one command"
            }
        });
        let error = error.retryable();
        *plan = plan.without_steps().refused(error);
    }
}

/// Returns why other GPUs of the same request prevent this reset. The operation creates instances
/// on these GPUs, and the later reset would destroy these instances.
fn blocked_by_same_request(plan: &GpuPlan, gpus: &[Gpu], peers: &[usize], own: &[GpuPlan]) -> Vec<String> {
    if plan.mig_mode() == Some(true) {
        return Vec::new();
    }
    let creates = |step: &InstanceStep| {
        matches!(step, InstanceStep::CreateGpuInstance { .. } | InstanceStep::CreateCompute { .. })
    };
    let filled = |gpu: &Gpu| {
        let peer = own.iter().find(|one| one.gpu_uuid == gpu.uuid)?;
        let text = || format!("{} gets instances in the same operation, and the reset would destroy them", label(gpu));
        peer.instance_steps().any(creates).then(text)
    };
    peers.iter().filter_map(|at| filled(&gpus[*at])).collect()
}

/// Returns the positions of the GPUs that are reset together with the GPU at `own`. These are the
/// other GPUs of its group in the config. If no fabric manager is running, these are also the other
/// GPUs on NVSwitches.
fn reset_peers(config: &Config, gpus: &[Gpu], own: usize, fabric: Fabric) -> Vec<usize> {
    let groups = config.mode_change.reset_together.iter().map(|group| group.matching(gpus));
    let mut peers: Vec<usize> = groups.filter(|group| group.contains(&own)).flatten().collect();
    if fabric == Fabric::Unmanaged && is_switched(&gpus[own]) {
        peers.extend((0..gpus.len()).filter(|at| is_switched(&gpus[*at])));
    }
    peers.retain(|at| *at != own);
    peers.sort_unstable();
    peers.dedup();
    peers
}

/// Returns whether a GPU is connected to NVSwitches.
pub fn is_switched(gpu: &Gpu) -> bool {
    gpu.nvlink.as_ref().is_some_and(|nvlink| nvlink.switched)
}

/// Returns why a GPU must not be reset; `None` if a reset would destroy nothing.
fn reset_obstacle(gpu: &Gpu) -> Option<String> {
    let instances = gpu.mig.as_ref().map_or(0, |mig| mig.instances.len());
    let what = if gpu.stale {
        "can't be read".to_owned()
    } else if !gpu.processes.is_empty() {
        "is in use".to_owned()
    } else if let Some(lease) = gpu.leases.first() {
        format!("is leased: {lease}")
    } else if !gpu.processes_known {
        "may be in use: the driver does not list its processes".to_owned()
    } else if instances > 0 {
        "has GPU instances, which a reset destroys".to_owned()
    } else if let Some(mig) = gpu.mig.as_ref().filter(|mig| mig.reset_pending) {
        format!(
            "has a pending MIG mode ({}), which takes effect with a \
            reset",
            if mig.pending_mode() { "on" } else { "off" }
        )
    } else {
        return None;
    };
    Some(format!("{} {what}", label(gpu)))
}
