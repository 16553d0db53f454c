//! Compute modes of time-sliced GPUs.

use std::collections::BTreeMap;

use gpush_api::{ApiError, Code, ComputeMode, Gpu, GpuUuid, Mode, TimeslicePolicy};
use gpush_host::subtask;
use gpush_store::ComputeModeSet;
use tokio::task::JoinSet;

use super::{Timeslice, TroubleSubject, schedule::Schedule, target::TimeslicedGpu};

/// The tasks that set compute modes. Each GPU has a separate task, so that a GPU that hangs does not delay other GPUs.
#[derive(Debug, Default)]
pub(super) struct ModeTasks {
    tasks: JoinSet<(TimeslicedGpu, Option<Result<(), String>>)>,
    /// Running tasks, by UUID of the GPU.
    running: BTreeMap<GpuUuid, Running>,
}

/// A task that has not ended yet.
#[derive(Debug)]
struct Running {
    /// The policy that the task sets.
    policy: Option<TimeslicePolicy>,
    /// Whether to ignore a failure of the task, because another policy is now desired, or gpushd must try again at
    /// once.
    outdated: bool,
}

impl ModeTasks {
    /// Starts a task for each GPU that does not have its desired compute mode. The task locks the lane of the GPU.
    pub(super) fn start(&mut self, timeslice: &Timeslice, pace: &Schedule, aims: &[TimeslicedGpu]) {
        for aim in aims.iter().filter(|aim| ModeAction::on(timeslice, aim) != ModeAction::Nothing) {
            if !pace.may_try(&TroubleSubject::ComputeMode(aim.gpu.uuid.clone())) {
                continue;
            }
            if let Some(running) = self.running.get_mut(&aim.gpu.uuid) {
                running.outdated |= running.policy != aim.policy;
                continue;
            }
            self.running.insert(aim.gpu.uuid.clone(), Running { policy: aim.policy.clone(), outdated: false });
            let (timeslice, aim) = (timeslice.clone(), aim.clone());
            self.tasks.spawn(async move {
                let done = match timeslice.context.lanes.lock(&aim.gpu.uuid).await {
                    Some(_turn) => Some(apply(&timeslice, &aim).await),
                    // An operation is changing the GPU. When the operation ends, it wakes this reconciler.
                    None => None,
                };
                (aim, done)
            });
        }
    }

    /// Makes gpushd ignore failures of running tasks, so that it tries again at once.
    pub(super) fn outdate(&mut self) {
        self.running.values_mut().for_each(|running| running.outdated = true);
    }

    /// Waits until a task ends, and stores its result. Never returns if no task runs. Returns whether gpushd must check
    /// the GPU again.
    pub(super) async fn ended(&mut self, timeslice: &Timeslice, pace: &mut Schedule) -> bool {
        let Some((aim, done)) = subtask::next(&mut self.tasks).await else {
            return std::future::pending().await;
        };
        let outdated = self.running.remove(&aim.gpu.uuid).is_some_and(|running| running.outdated);
        match done {
            // Do not store this failure: it would delay the policy that is desired now.
            Some(Err(_)) if outdated => {}
            Some(done) => note(timeslice, pace, &aim, done),
            None => {}
        }
        outdated
    }
}

/// Sets the compute modes of these GPUs. The caller must hold their lanes.
pub(super) async fn reconcile_owned(timeslice: &Timeslice, pace: &mut Schedule, aims: &[TimeslicedGpu]) {
    let tasks = aims.iter().map(|aim| {
        let (timeslice, aim) = (timeslice.clone(), aim.clone());
        async move {
            let done = apply(&timeslice, &aim).await;
            (aim, done)
        }
    });
    for (aim, done) in tasks.collect::<JoinSet<_>>().join_all().await {
        note(timeslice, pace, &aim, done);
    }
}

fn note(timeslice: &Timeslice, pace: &mut Schedule, aim: &TimeslicedGpu, done: Result<(), String>) {
    let subject = TroubleSubject::ComputeMode(aim.gpu.uuid.clone());
    match done {
        Ok(()) => {
            pace.mark_ok(&subject);
            timeslice.clear_error(&subject);
        }
        Err(why) => {
            pace.failed(subject.clone());
            timeslice.note(subject, &error(&aim.gpu, &why));
        }
    }
}

/// What gpushd must do with the compute mode of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ModeAction {
    /// The compute mode is as desired.
    Nothing,
    /// Set this compute mode.
    Set(ComputeMode),
    /// Restore the mode from before gpushd set one.
    Restore,
}

impl ModeAction {
    /// `now` is the compute mode in the last reading, and `ours` what gpushd has set for time-slicing.
    fn of(policy: Option<&TimeslicePolicy>, now: Option<ComputeMode>, ours: Option<ComputeModeSet>) -> Self {
        match (policy.map(|policy| policy.compute_mode), now, ours) {
            (Some(Some(wanted)), Some(now), ours) if now != wanted || ours.is_some_and(|ours| ours.set != wanted) => {
                Self::Set(wanted)
            }
            // If the driver does not report a compute mode, it cannot set one either.
            (Some(Some(_)), Some(_) | None, _) | (Some(None) | None, _, None) => Self::Nothing,
            // With `keep`, the rule sets no compute mode, so an earlier rule has set it.
            (Some(None) | None, _, Some(_)) => Self::Restore,
        }
    }

    /// Returns the action for a GPU, according to its last reading.
    fn on(timeslice: &Timeslice, aim: &TimeslicedGpu) -> Self {
        let ours = timeslice.shared_gpus.compute_mode(&aim.gpu.uuid, Mode::Timeslice);
        Self::of(aim.policy.as_ref(), aim.gpu.compute_mode, ours)
    }
}

/// Sets the compute mode of a GPU, or restores the previous mode if no rule sets one any more.
async fn apply(timeslice: &Timeslice, aim: &TimeslicedGpu) -> Result<(), String> {
    match ModeAction::on(timeslice, aim) {
        ModeAction::Nothing => Ok(()),
        ModeAction::Set(wanted) => set_mode(timeslice, &aim.gpu, wanted).await,
        ModeAction::Restore => restore_mode(timeslice, &aim.gpu).await,
    }
}

async fn set_mode(timeslice: &Timeslice, gpu: &Gpu, wanted: ComputeMode) -> Result<(), String> {
    let ours = timeslice.shared_gpus.compute_mode(&gpu.uuid, Mode::Timeslice);
    let taken = timeslice.shared_gpus.set_compute_mode(&gpu.uuid, wanted, Mode::Timeslice, || true).await?;
    match (taken, ours) {
        (None, _) => {}
        (Some(now), Some(ours)) if ours.set == wanted => tracing::warn!(
            gpu = gpu.uuid.as_str(),
            "GPU {}: its compute mode was {now}, because another program changed it or the driver lost it: gpushd has \
            set it to {wanted} again",
            gpu.uuid
        ),
        (Some(before), _) => {
            tracing::info!(
                gpu = gpu.uuid.as_str(),
                "GPU {}: its compute mode changed from {before} to {wanted}",
                gpu.uuid
            );
        }
    }
    Ok(())
}

async fn restore_mode(timeslice: &Timeslice, gpu: &Gpu) -> Result<(), String> {
    if let Some(before) = timeslice.shared_gpus.restore_compute_mode(&gpu.uuid, Mode::Timeslice).await? {
        tracing::info!(
            gpu = gpu.uuid.as_str(),
            "GPU {}: its rule sets no compute mode any more: restored {before}",
            gpu.uuid
        );
    }
    Ok(())
}

fn error(gpu: &Gpu, why: &str) -> ApiError {
    let message = format!("GPU {} ({}) does not have the desired compute mode", gpu.index, gpu.uuid);
    ApiError::new(Code::DriverError, message)
        .cause(why.to_owned())
        .hint("gpushd tries again; to try now: `gpushctl config reload` (administrator)")
        .retryable()
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEFAULT: ComputeMode = ComputeMode::Default;
    const EXCLUSIVE: ComputeMode = ComputeMode::ExclusiveProcess;

    fn action(wanted: Option<ComputeMode>, now: Option<ComputeMode>, set: Option<ComputeMode>) -> ModeAction {
        let policy = TimeslicePolicy { compute_mode: wanted, ..TimeslicePolicy::default() };
        ModeAction::of(Some(&policy), now, set.map(ours))
    }

    fn ours(set: ComputeMode) -> ComputeModeSet {
        ComputeModeSet { before: DEFAULT, set, last: None, by: Mode::Timeslice }
    }

    #[test]
    fn compute_mode_of_the_rule_is_set_if_another_one_is_effective() {
        assert_eq!(action(Some(EXCLUSIVE), Some(DEFAULT), None), ModeAction::Set(EXCLUSIVE));
        assert_eq!(action(Some(EXCLUSIVE), Some(DEFAULT), Some(EXCLUSIVE)), ModeAction::Set(EXCLUSIVE), "it was lost");
        assert_eq!(action(Some(EXCLUSIVE), Some(EXCLUSIVE), None), ModeAction::Nothing);
        assert_eq!(action(Some(EXCLUSIVE), Some(EXCLUSIVE), Some(EXCLUSIVE)), ModeAction::Nothing);
        // The GPU has the mode, but gpushd must still update its record.
        assert_eq!(action(Some(DEFAULT), Some(DEFAULT), Some(EXCLUSIVE)), ModeAction::Set(DEFAULT));
    }

    #[test]
    fn gpu_without_compute_modes_gets_none() {
        for set in [None, Some(EXCLUSIVE)] {
            assert_eq!(action(Some(EXCLUSIVE), None, set), ModeAction::Nothing);
        }
    }

    #[test]
    fn gpu_that_is_not_time_sliced_any_more_gets_its_mode_back() {
        assert_eq!(ModeAction::of(None, Some(EXCLUSIVE), Some(ours(EXCLUSIVE))), ModeAction::Restore);
        // gpushd removes its record, although the driver does not report a mode.
        assert_eq!(ModeAction::of(None, None, Some(ours(EXCLUSIVE))), ModeAction::Restore);
        assert_eq!(ModeAction::of(None, Some(EXCLUSIVE), None), ModeAction::Nothing, "another program has set it");
    }

    /// Fault: if a rule was changed to `compute_mode = "keep"`, the GPU kept the mode that gpushd had set for the earlier
    /// rule.
    #[test]
    fn rule_that_keeps_the_mode_ends_the_mode_of_an_earlier_rule() {
        assert_eq!(action(None, Some(EXCLUSIVE), Some(EXCLUSIVE)), ModeAction::Restore);
        for now in [DEFAULT, EXCLUSIVE] {
            assert_eq!(action(None, Some(now), None), ModeAction::Nothing, "gpushd has not set it");
        }
    }
}
