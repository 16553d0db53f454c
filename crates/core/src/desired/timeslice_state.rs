//! Time-sliced GPUs: compares the actual level with the desired level.

use gpush_api::{ComputeMode, Gpu, TimesliceLevel, TimesliceState, TimesliceView};

use super::{DesiredState, whole_gpu::whole_gpu_obstacles};

/// Returns sentences about the time-slice level and the compute mode of a GPU with MIG mode off.
pub(super) fn drift(desired_state: &DesiredState, gpu: &Gpu) -> Vec<String> {
    let Some(policy) = &desired_state.timeslice else { return Vec::new() };
    let level = gpu.timeslice.as_ref().and_then(|seen| level_drift(seen, policy.level));
    let mode = gpu.compute_mode.zip(policy.compute_mode).and_then(|(now, wanted)| compute_mode_drift(now, wanted));
    [level, mode].into_iter().flatten().collect()
}

fn level_drift(seen: &TimesliceView, wanted: TimesliceLevel) -> Option<String> {
    match (seen.state, seen.level) {
        (TimesliceState::Known, Some(level)) if level != wanted => {
            Some(format!("the time-slice level is `{level}`, but the config says `{wanted}`"))
        }
        // A GPU without levels behaves as at the level `default`, so it has no drift if the desired
        // level is `default`.
        (TimesliceState::Unsupported, _) if wanted != TimesliceLevel::Default => {
            Some(format!("the GPU has no time-slice levels, but the config has level `{wanted}`"))
        }
        (TimesliceState::Known | TimesliceState::Unsupported | TimesliceState::Unknown, _) => None,
    }
}

fn compute_mode_drift(now: ComputeMode, wanted: ComputeMode) -> Option<String> {
    (now != wanted).then(|| format!("the compute mode is `{now}`, but the config says `{wanted}`"))
}

/// Returns the actual and the desired time-slicing state of a GPU.
pub(super) fn view(desired_state: &DesiredState, gpu: &Gpu) -> Option<TimesliceView> {
    let policy = desired_state.timeslice.as_ref()?;
    let (replicas, wanted) = (policy.replicas, policy.level);
    let unknown = |reason: String| TimesliceView {
        replicas,
        wanted,
        state: TimesliceState::Unknown,
        level: None,
        reason: Some(reason),
        since: None,
        read_at: None,
    };
    let not_whole = whole_gpu_obstacles(desired_state.mode, gpu);
    Some(match (&gpu.timeslice, not_whole.is_empty()) {
        (_, false) => unknown(not_whole.join("; ")),
        (Some(seen), true) => TimesliceView { replicas, wanted, ..seen.clone() },
        (None, true) => unknown("gpushd has not read the time-slicing state yet".to_owned()),
    })
}
