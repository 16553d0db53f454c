//! Determines which GPUs need time-slicing settings, and how their level must change.
//!
//! ```text
//! rule of mode timeslice, GPU without MIG, usable ────► Keep: gpushd maintains its level and compute mode
//!    …, MIG mode on or pending ───────────────────────► Wait: drift names the obstacle
//! any other rule, or none ────────────────────────────► LetGo: gpushd restores the earlier settings
//! lost, unknown, held, changing, maintenance, stale ──► Wait: the state is unknown, or another change runs
//! ```
//!
//! A cordon has no effect here. It blocks new work, and both settings affect only programs
//! that start later.

use gpush_api::{Gpu, GpuState, Mode, TimesliceLevel, TimeslicePolicy};

use crate::{
    compute_policy::Told,
    config::Config,
    desired::{self, Wish},
};

/// How gpushd treats the time-slicing settings of a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Care {
    /// gpushd maintains the settings of the policy.
    Keep(TimeslicePolicy),
    /// gpushd changes nothing for now.
    Wait,
    /// The GPU is not time-sliced, or is no longer time-sliced: gpushd restores its earlier
    /// settings.
    LetGo,
}

/// Returns how gpushd treats the settings of each GPU, in order.
#[must_use]
pub fn care(config: &Config, gpus: &[Gpu]) -> Vec<Care> {
    desired::wishes(config, gpus).into_iter().zip(gpus).map(|(wish, gpu)| of(wish, gpu)).collect()
}

fn of(wish: Wish, gpu: &Gpu) -> Care {
    let at_hand = match gpu.state {
        GpuState::Ready | GpuState::Cordoned | GpuState::Degraded => !gpu.stale,
        GpuState::Changing | GpuState::Held | GpuState::Unknown | GpuState::Lost | GpuState::Maintenance => false,
    };
    match (at_hand, wish.mode, wish.timeslice) {
        (false, ..) => Care::Wait,
        (true, Mode::Timeslice, Some(policy)) if desired::not_whole(Mode::Timeslice, gpu).is_empty() => {
            Care::Keep(policy)
        }
        (true, Mode::Timeslice, _) => Care::Wait,
        (true, Mode::Unmanaged | Mode::Exclusive | Mode::Mig | Mode::Mps, _) => Care::LetGo,
    }
}

/// The next action for the time-slice level of a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Next {
    /// The level is as desired.
    Nothing,
    /// The level must be set. Contains the level that the GPU has now.
    Set(TimesliceLevel),
    /// The GPU does not support levels.
    Unsupported,
    /// The level is unknown. Contains the reason.
    Unknown(String),
}

/// Returns the next action for a GPU. `told` is what nvidia-smi's output says about the GPU.
#[must_use]
pub fn next(wanted: TimesliceLevel, told: Option<&Told>) -> Next {
    match told {
        Some(Told::Level(level)) if *level == wanted => Next::Nothing,
        Some(Told::Level(level)) => Next::Set(*level),
        Some(Told::Unsupported) => Next::Unsupported,
        Some(Told::Failed(why)) => Next::Unknown(format!("nvidia-smi reports: {why}")),
        None => Next::Unknown("nvidia-smi does not report it".to_owned()),
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

    const TURNS: &str = "[[gpu]]\nmatch = [\"0-3\"]\nmode = \"timeslice\"\n\
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
        let config = config(TURNS);
        let policy = TimeslicePolicy {
            replicas: 1,
            level: TimesliceLevel::Long,
            compute_mode: Some(ComputeMode::ExclusiveProcess),
        };
        let mut gpus = whole();
        let cares = care(&config, &gpus);
        assert!(cares[..4].iter().all(|care| *care == Care::Keep(policy.clone())));
        assert!(cares[4..].iter().all(|care| *care == Care::LetGo), "of another rule, and of none");
        for (enabled, pending) in [(true, true), (true, false), (false, true)] {
            let mig = gpus[0].mig.as_mut().unwrap();
            mig.set_mode(enabled, pending);
            assert_eq!(care(&config, &gpus)[0], Care::Wait);
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
            let cares = care(&config, &gpus);
            let expected = if at_hand { (Care::Keep(policy.clone()), Care::LetGo) } else { (Care::Wait, Care::Wait) };
            assert_eq!((cares[1].clone(), cares[4].clone()), expected, "{state:?}");
        }
        (gpus[1].state, gpus[1].stale) = (GpuState::Ready, true);
        assert_eq!(care(&config, &gpus)[1], Care::Wait);
    }

    #[test]
    fn only_differing_levels_are_set() {
        let wanted = TimesliceLevel::Short;
        let next = |told: Option<Told>| next(wanted, told.as_ref());
        assert_eq!(next(Some(Told::Level(wanted))), Next::Nothing);
        assert_eq!(next(Some(Told::Level(TimesliceLevel::Long))), Next::Set(TimesliceLevel::Long));
        assert_eq!(next(Some(Told::Unsupported)), Next::Unsupported);
        let Next::Unknown(why) = next(Some(Told::Failed("GPU is lost".to_owned()))) else { panic!() };
        assert!(why.contains("GPU is lost"), "{why}");
        assert!(matches!(next(None), Next::Unknown(_)));
    }

    #[test]
    fn drift_names_level_and_compute_mode_or_only_mig() {
        let config = config(TURNS);
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
                "time-slice level is default, but the config says long",
                "compute mode is DEFAULT, but the config says EXCLUSIVE_PROCESS"
            ]
        );
        assert!(gpus[1].drift.is_empty());
        assert_eq!(gpus[2].drift, ["the GPU has no time-slice levels, but the config says long"]);
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
