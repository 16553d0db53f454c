//! Determines which GPUs need time-slicing settings, and how their level must change.
//!
//! ```text
//! rule of mode timeslice, GPU without MIG, usable ────► Keep: gpushd maintains its level and compute mode
//!    …, MIG mode on or pending ───────────────────────► Wait: drift names the obstacle
//! any other rule, or none ────────────────────────────► Restore: gpushd restores the earlier settings
//! a change of the GPU is pending because of leases ───► Keep what the leases were promised, else Wait
//! lost, unknown, held, changing, maintenance, stale ──► Wait: the state is unknown, or another change runs
//! ```
//!
//! A cordon has no effect on this decision. The level and the compute mode affect only programs that start later, so
//! changing them during a cordon disturbs no running program.

use gpush_api::{Gpu, GpuState, Mode, TimesliceLevel, TimeslicePolicy};

use crate::{
    compute_policy::LevelReport,
    config::Config,
    desired::{self, DesiredState},
};

/// How gpushd treats the time-slicing settings of a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TimeslicePlan {
    /// gpushd maintains the settings of the policy.
    Keep(TimeslicePolicy),
    /// gpushd changes nothing for now.
    Wait,
    /// The GPU is not time-sliced, or is no longer time-sliced: gpushd restores the earlier settings of the GPU.
    Restore,
}

/// Returns how gpushd treats the settings of each GPU, in order.
#[must_use]
pub fn timeslice_plans(config: &Config, gpus: &[Gpu]) -> Vec<TimeslicePlan> {
    desired::desired_states(config, gpus)
        .into_iter()
        .zip(gpus)
        .map(|(desired_state, gpu)| plan_for(desired_state, gpu))
        .collect()
}

fn plan_for(desired_state: DesiredState, gpu: &Gpu) -> TimeslicePlan {
    let at_hand = match gpu.state {
        GpuState::Ready | GpuState::Cordoned | GpuState::Degraded => !gpu.stale,
        GpuState::Changing | GpuState::Held | GpuState::Unknown | GpuState::Lost | GpuState::Maintenance => false,
    };
    if at_hand && gpu.pending.iter().any(|change| change.aim.device().is_none()) {
        let promised = desired::promised_timeslice(gpu);
        let is_whole = desired::whole_gpu_obstacles(Mode::Timeslice, gpu).is_empty();
        return promised.filter(|_| is_whole).map_or(TimeslicePlan::Wait, TimeslicePlan::Keep);
    }
    match (at_hand, desired_state.mode, desired_state.timeslice) {
        (false, ..) => TimeslicePlan::Wait,
        (true, Mode::Timeslice, Some(policy)) if desired::whole_gpu_obstacles(Mode::Timeslice, gpu).is_empty() => {
            TimeslicePlan::Keep(policy)
        }
        (true, Mode::Timeslice, _) => TimeslicePlan::Wait,
        (true, _, _) => TimeslicePlan::Restore,
    }
}

/// The next action for the time-slice level of a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LevelAction {
    /// The level is as desired.
    Nothing,
    /// The level must be set. Contains the level that the GPU has now.
    Set(TimesliceLevel),
    /// The GPU does not support levels.
    Unsupported,
    /// The level is unknown. Contains the reason.
    Unknown(String),
}

/// Returns the next action for a GPU. `reported` is what nvidia-smi's output says about the GPU.
#[must_use]
pub fn level_action(wanted: TimesliceLevel, reported: Option<&LevelReport>) -> LevelAction {
    match reported {
        Some(LevelReport::Level(level)) if *level == wanted => LevelAction::Nothing,
        Some(LevelReport::Level(level)) => LevelAction::Set(*level),
        Some(LevelReport::Unsupported) => LevelAction::Unsupported,
        Some(LevelReport::Failed(why)) => LevelAction::Unknown(format!("nvidia-smi reports: {why}")),
        None => LevelAction::Unknown("nvidia-smi does not report the time-slice level".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use gpush_api::{ComputeMode, TimesliceState, TimesliceView};

    use super::*;
    use crate::preset;

    fn config(rules: &str) -> Config {
        Config::parse(rules, "gpushd.toml").unwrap()
    }

    const TIMESLICE_RULES: &str = "[[gpu]]\nmatch = [\"0-3\"]\nmode = \"timeslice\"\n\
        timeslice = { replicas = 1, level = \"long\", compute_mode = \"exclusive_process\" }\n\
        [[gpu]]\nmatch = [\"4\"]\nmode = \"exclusive\"\n";

    /// Returns eight GPUs with MIG mode off.
    fn whole() -> Vec<Gpu> {
        let mut gpus = preset::gpus("dgx-a100").unwrap();
        for mig in gpus.iter_mut().filter_map(|gpu| gpu.mig.as_mut()) {
            mig.set_mode(false, false);
        }
        gpus
    }

    #[test]
    fn settings_are_kept_on_usable_gpus_without_mig_only() {
        let config = config(TIMESLICE_RULES);
        let policy = TimeslicePolicy {
            replicas: 1,
            level: TimesliceLevel::Long,
            compute_mode: Some(ComputeMode::ExclusiveProcess),
        };
        let mut gpus = whole();
        let cares = timeslice_plans(&config, &gpus);
        assert!(cares[..4].iter().all(|care| *care == TimeslicePlan::Keep(policy.clone())));
        assert!(cares[4..].iter().all(|care| *care == TimeslicePlan::Restore), "of another rule, and of none");
        for (enabled, pending) in [(true, true), (true, false), (false, true)] {
            let mig = gpus[0].mig.as_mut().unwrap();
            mig.set_mode(enabled, pending);
            assert_eq!(timeslice_plans(&config, &gpus)[0], TimeslicePlan::Wait);
        }
        for (state, at_hand) in [
            (GpuState::Ready, true),
            (GpuState::Cordoned, true),
            (GpuState::Degraded, true),
            (GpuState::Changing, false),
            (GpuState::Held, false),
            (GpuState::Unknown, false),
            (GpuState::Lost, false),
            (GpuState::Maintenance, false),
        ] {
            gpus[1].state = state;
            gpus[4].state = state;
            let cares = timeslice_plans(&config, &gpus);
            let expected = if at_hand {
                (TimeslicePlan::Keep(policy.clone()), TimeslicePlan::Restore)
            } else {
                (TimeslicePlan::Wait, TimeslicePlan::Wait)
            };
            assert_eq!((cares[1].clone(), cares[4].clone()), expected, "{state:?}");
        }
        (gpus[1].state, gpus[1].stale) = (GpuState::Ready, true);
        assert_eq!(timeslice_plans(&config, &gpus)[1], TimeslicePlan::Wait);
    }

    #[test]
    fn only_differing_levels_are_set() {
        let wanted = TimesliceLevel::Short;
        let next = |reported: Option<LevelReport>| level_action(wanted, reported.as_ref());
        assert_eq!(next(Some(LevelReport::Level(wanted))), LevelAction::Nothing);
        assert_eq!(next(Some(LevelReport::Level(TimesliceLevel::Long))), LevelAction::Set(TimesliceLevel::Long));
        assert_eq!(next(Some(LevelReport::Unsupported)), LevelAction::Unsupported);
        let LevelAction::Unknown(why) = next(Some(LevelReport::Failed("GPU is lost".to_owned()))) else { panic!() };
        assert!(why.contains("GPU is lost"), "{why}");
        assert!(matches!(next(None), LevelAction::Unknown(_)));
    }

    #[test]
    fn drift_names_level_and_compute_mode_or_only_mig() {
        let config = config(TIMESLICE_RULES);
        let mut gpus = whole();
        let seen = |state, level| {
            let (reason, since, read_at) = (None, None, None);
            Some(TimesliceView { replicas: 0, wanted: TimesliceLevel::Default, state, level, reason, since, read_at })
        };
        gpus[0].timeslice = seen(TimesliceState::Known, Some(TimesliceLevel::Default));
        gpus[0].compute_mode = Some(ComputeMode::Default);
        gpus[1].timeslice = seen(TimesliceState::Known, Some(TimesliceLevel::Long));
        gpus[1].compute_mode = Some(ComputeMode::ExclusiveProcess);
        gpus[2].timeslice = seen(TimesliceState::Unsupported, None);
        gpus[4].timeslice = seen(TimesliceState::Known, Some(TimesliceLevel::Long));
        desired::describe_all(&config, &mut gpus);
        assert_eq!(
            gpus[0].drift,
            [
                "the time-slice level is `default`, but the config says `long`",
                "the compute mode is `DEFAULT`, but the config says `EXCLUSIVE_PROCESS`"
            ]
        );
        assert!(gpus[1].drift.is_empty());
        assert_eq!(gpus[2].drift, ["the GPU has no time-slice levels, but the config has level `long`"]);
        assert!(gpus[3].drift.is_empty(), "what is not known does not differ");
        let unread = gpus[3].timeslice.as_ref().unwrap();
        assert_eq!((unread.state, unread.replicas, unread.wanted), (TimesliceState::Unknown, 1, TimesliceLevel::Long));
        assert_eq!((&gpus[4].timeslice, &gpus[5].timeslice), (&None, &None));
        let mig = gpus[0].mig.as_mut().unwrap();
        mig.set_mode(true, true);
        desired::describe_all(&config, &mut gpus);
        assert_eq!(gpus[0].drift, ["MIG mode is on, but mode `timeslice` needs the whole GPU"]);
        let cut = gpus[0].timeslice.as_ref().unwrap();
        assert_eq!((cut.state, cut.level), (TimesliceState::Unknown, None));
        assert!(cut.reason.as_ref().unwrap().contains("MIG mode is on"));
    }
}
