//! The GPUs whose time-slice settings gpushd keeps or removes.

use gpush_api::{Gpu, TimesliceLevel, TimeslicePolicy};
use gpush_core::{
    config::Config,
    timeslice_plan::{self, TimeslicePlan},
};

use super::Timeslice;
use crate::state::LevelRound;

/// A GPU and its desired settings.
#[derive(Debug, Clone)]
pub(super) struct TimeslicedGpu {
    pub(super) gpu: Gpu,
    /// The desired settings; `None` if the GPU is not time-sliced any more, so that gpushd must remove its settings.
    pub(super) policy: Option<TimeslicePolicy>,
}

impl TimeslicedGpu {
    /// Returns the desired level. Without a policy, this is the driver's default.
    pub(super) fn level(&self) -> TimesliceLevel {
        self.policy.as_ref().map_or(TimesliceLevel::Default, |policy| policy.level)
    }
}

/// Returns the GPUs whose settings gpushd must keep or remove. Forgets the levels of all other GPUs.
pub(super) fn targets(
    timeslice: &Timeslice,
    round: &mut LevelRound,
    config: &Config,
    gpus: &[Gpu],
    has_daemon: &impl Fn(&str) -> bool,
) -> Vec<TimeslicedGpu> {
    let cares = timeslice_plan::timeslice_plans(config, gpus);
    let cared = |uuid: &str| gpus.iter().zip(&cares).find(|(gpu, _)| gpu.uuid == uuid);
    // If the state of a GPU is unclear, keep its data, because the GPU may return unchanged. But remove the level of a
    // GPU in MIG mode, because such a GPU has no level.
    let whole = |gpu: &Gpu| gpu.mig.as_ref().is_none_or(|mig| !mig.enabled);
    let takes_turns = |uuid: &str| cared(uuid).is_some_and(|(gpu, care)| *care != TimeslicePlan::Restore && whole(gpu));
    let is_tended = |uuid: &str| takes_turns(uuid) || timeslice.shared_gpus.has_timeslice_settings_of(uuid);
    round.retain(takes_turns);
    timeslice.retain_troubles(is_tended);
    let aim = |(gpu, care): (&Gpu, &TimeslicePlan)| {
        let policy = match care {
            TimeslicePlan::Wait => return None,
            // The MPS daemon still runs and needs the compute mode for MPS. gpushd checks the GPU again when the daemon
            // has exited.
            TimeslicePlan::Keep(_) if has_daemon(&gpu.uuid) => return None,
            TimeslicePlan::Keep(policy) => Some(policy.clone()),
            TimeslicePlan::Restore => None,
        };
        Some(TimeslicedGpu { gpu: gpu.clone(), policy })
    };
    gpus.iter().zip(&cares).filter_map(aim).collect()
}
