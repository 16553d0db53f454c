//! Changes of MIG mode in plans: whether they need a reset, what that disturbs, and what stands in
//! its way as far as readings tell.

use gpush_api::{ApiError, Architecture, Code, Gpu, GpuPlan, Holder, Mig, Peer, Refusal, Reset};

use super::plan::label;
use crate::config::Config;

/// Whether a change of MIG mode comes into force only with a reset of the GPU.
#[must_use]
pub fn needs_reset(architecture: Architecture) -> bool {
    match architecture {
        // Newer parts than this build knows are taken to behave as the newest it does.
        Architecture::Hopper | Architecture::Blackwell | Architecture::Unknown => false,
        Architecture::Legacy
        | Architecture::Volta
        | Architecture::Turing
        | Architecture::Ampere
        | Architecture::Ada => true,
    }
}

/// The reset that switching to `enable` needs, its particulars still to be filled in.
pub(super) fn reset(gpu: &Gpu, mig: &Mig, enable: bool) -> Option<Reset> {
    // What only waits for a reset is taken back without one.
    let changes = mig.enabled != enable;
    (changes && (needs_reset(gpu.architecture) || mig.pending != mig.enabled)).then(Reset::default)
}

/// Why the mode can't be changed now: processes on the GPU as a whole.
pub(super) fn used_whole(gpu: &Gpu) -> Option<Refusal> {
    let holder = |process: &gpush_api::Process| Holder {
        pid: process.pid,
        uid: process.uid,
        user: process.user.clone(),
        command: process.command.clone(),
        service: None,
        devices: Vec::new(),
    };
    (!gpu.processes.is_empty()).then(|| Refusal::Held { holders: gpu.processes.iter().map(holder).collect() })
}

/// Fills in what each reset disturbs, and refuses those that would take others' instances along.
pub(super) fn complete(config: &Config, gpus: &[Gpu], plans: &mut [GpuPlan]) {
    let change = &config.mode_change;
    let changing: Vec<(String, bool)> =
        plans.iter().filter(|plan| plan.reset.is_some()).map(|plan| (plan.uuid.clone(), plan.enables_mig)).collect();
    for plan in plans {
        let Some(reset) = &mut plan.reset else { continue };
        reset.services.clone_from(&change.services);
        reset.hooks = [&change.before, &change.after].into_iter().flatten().cloned().collect();
        let own = gpus.iter().position(|gpu| gpu.uuid == plan.uuid);
        let mut peers: Vec<usize> = Vec::new();
        for group in &change.reset_together {
            let group = group.matching(gpus);
            if own.is_some_and(|own| group.contains(&own)) {
                peers.extend(group.into_iter().filter(|at| Some(*at) != own));
            }
        }
        peers.sort_unstable();
        peers.dedup();
        reset.together = peers.iter().map(|at| Peer { gpu: gpus[*at].index, uuid: gpus[*at].uuid.clone() }).collect();
        let with_it = |gpu: &Gpu| changing.contains(&(gpu.uuid.clone(), plan.enables_mig));
        let in_the_way: Vec<String> =
            peers.iter().map(|at| &gpus[*at]).filter(|gpu| !with_it(gpu)).filter_map(not_to_be_reset).collect();
        if in_the_way.is_empty() {
            continue;
        }
        let label = gpus.iter().find(|gpu| gpu.uuid == plan.uuid).map(label).unwrap_or_default();
        let mut error = ApiError::new(Code::Blocked, format!("{label} can only be reset together with others"));
        error.causes.extend(in_the_way);
        let error = error.hint("free them, or change the MIG mode of all of them at once").retryable();
        *plan = GpuPlan {
            steps: Vec::new(),
            keeps: Vec::new(),
            enables_mig: false,
            disables_mig: false,
            reset: None,
            error: Some(error),
            ..plan.clone()
        };
    }
}

/// Why a GPU must not be reset; `None` when nothing is lost by it.
fn not_to_be_reset(gpu: &Gpu) -> Option<String> {
    let instances = gpu.mig.as_ref().map_or(0, |mig| mig.instances.len());
    let what = if gpu.stale {
        "can't be read".to_owned()
    } else if !gpu.processes.is_empty() {
        "is in use".to_owned()
    } else if !gpu.processes_known {
        "may be in use: the driver does not tell".to_owned()
    } else if instances > 0 {
        format!("has {instances} GPU instances, which a reset destroys")
    } else {
        return None;
    };
    Some(format!("{} {what}", label(gpu)))
}
