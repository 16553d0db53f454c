//! The GPUs whose time-slice settings gpushd keeps or removes.

use gpush_api::{Gpu, GpuUuid, TimesliceLevel, TimeslicePolicy};
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
    /// Returns `None` if gpushd must not change the settings now. `has_daemon` is whether the GPU has an MPS daemon.
    fn of(gpu: &Gpu, plan: &TimeslicePlan, has_daemon: bool) -> Option<Self> {
        let policy = match plan {
            TimeslicePlan::Wait => return None,
            // The MPS daemon still runs and needs the compute mode for MPS. gpushd checks the GPU again when the daemon
            // has exited.
            TimeslicePlan::Keep(_) if has_daemon => return None,
            TimeslicePlan::Keep(policy) => Some(policy.clone()),
            TimeslicePlan::Restore => None,
        };
        Some(Self { gpu: gpu.clone(), policy })
    }

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
    has_daemon: &impl Fn(&GpuUuid) -> bool,
) -> Vec<TimeslicedGpu> {
    let cares = timeslice_plan::timeslice_plans(config, gpus);
    let cared = |uuid: &GpuUuid| gpus.iter().zip(&cares).find(|(gpu, _)| gpu.uuid == *uuid);
    // If the state of a GPU is unclear, keep its data, because the GPU may return unchanged. But remove the level of a
    // GPU in MIG mode, because such a GPU has no level.
    let whole = |gpu: &Gpu| gpu.mig.as_ref().is_none_or(|mig| !mig.enabled);
    let takes_turns =
        |uuid: &GpuUuid| cared(uuid).is_some_and(|(gpu, care)| *care != TimeslicePlan::Restore && whole(gpu));
    let is_tended = |uuid: &GpuUuid| takes_turns(uuid) || timeslice.shared_gpus.has_timeslice_settings_of(uuid);
    round.retain(takes_turns);
    timeslice.retain_troubles(is_tended);
    gpus.iter().zip(&cares).filter_map(|(gpu, care)| TimeslicedGpu::of(gpu, care, has_daemon(&gpu.uuid))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::modes::scene::whole_gpu;

    #[test]
    fn mps_daemon_delays_new_timeslice_settings_but_no_removal() {
        let policy = TimeslicePolicy { level: TimesliceLevel::Long, ..TimeslicePolicy::default() };
        let keep = TimeslicePlan::Keep(policy.clone());
        for (plan, has_daemon, expected) in [
            (&keep, false, Some(Some(policy))),
            (&keep, true, None),
            (&TimeslicePlan::Restore, false, Some(None)),
            (&TimeslicePlan::Restore, true, Some(None)),
            (&TimeslicePlan::Wait, false, None),
            (&TimeslicePlan::Wait, true, None),
        ] {
            let target = TimeslicedGpu::of(&whole_gpu(), plan, has_daemon);
            assert_eq!(target.map(|target| target.policy), expected, "{plan:?} {has_daemon}");
        }
    }

    #[test]
    fn gpu_that_is_not_time_sliced_any_more_gets_the_default_level() {
        let level = |policy| TimeslicedGpu { gpu: whole_gpu(), policy }.level();
        let long = TimeslicePolicy { level: TimesliceLevel::Long, ..TimeslicePolicy::default() };
        assert_eq!((level(Some(long)), level(None)), (TimesliceLevel::Long, TimesliceLevel::Default));
    }
}
