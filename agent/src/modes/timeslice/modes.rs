//! Compute modes of time-sliced GPUs.

use std::collections::BTreeMap;

use gpush_api::{ApiError, Code, Gpu, Mode, TimeslicePolicy};
use gpush_host::subtask;
use tokio::task::JoinSet;

use super::{Timeslice, TroubleSubject, schedule::Schedule, target::TimeslicedGpu};

/// The tasks that set compute modes. Each GPU has a separate task, so that a GPU that hangs does not delay other GPUs.
#[derive(Debug, Default)]
pub(super) struct ModeTasks {
    tasks: JoinSet<(TimeslicedGpu, Option<Result<(), String>>)>,
    /// Running tasks, by UUID of the GPU.
    running: BTreeMap<String, Running>,
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
        for aim in aims.iter().filter(|aim| differs(timeslice, aim)) {
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

/// Returns whether the compute mode of the GPU in the last reading differs from the desired mode.
fn differs(timeslice: &Timeslice, aim: &TimeslicedGpu) -> bool {
    let ours = timeslice.shared_gpus.compute_mode(&aim.gpu.uuid, Mode::Timeslice);
    match &aim.policy {
        // If the driver does not report a compute mode, it cannot set one either.
        Some(policy) => match (policy.compute_mode, aim.gpu.compute_mode) {
            (Some(wanted), Some(now)) => now != wanted || ours.is_some_and(|ours| ours.set != wanted),
            (None, _) | (_, None) => false,
        },
        None => ours.is_some(),
    }
}

/// Sets the compute mode of a GPU, or restores the previous mode if the GPU is no longer time-sliced.
async fn apply(timeslice: &Timeslice, aim: &TimeslicedGpu) -> Result<(), String> {
    if !differs(timeslice, aim) {
        return Ok(());
    }
    match &aim.policy {
        Some(policy) => match policy.compute_mode {
            Some(wanted) => set_mode(timeslice, &aim.gpu, wanted).await,
            None => Ok(()),
        },
        None => restore_mode(timeslice, &aim.gpu).await,
    }
}

async fn set_mode(timeslice: &Timeslice, gpu: &Gpu, wanted: gpush_api::ComputeMode) -> Result<(), String> {
    let ours = timeslice.shared_gpus.compute_mode(&gpu.uuid, Mode::Timeslice);
    let taken = timeslice.shared_gpus.set_compute_mode(&gpu.uuid, wanted, Mode::Timeslice, || true).await?;
    match (taken, ours) {
        (None, _) => {}
        (Some(now), Some(ours)) if ours.set == wanted => tracing::warn!(
            gpu = gpu.uuid,
            "GPU {}: its compute mode was {now}, because another program changed it or the driver lost it: gpushd has \
            set it to {wanted} again",
            gpu.uuid
        ),
        (Some(before), _) => {
            tracing::info!(gpu = gpu.uuid, "GPU {}: its compute mode changed from {before} to {wanted}", gpu.uuid);
        }
    }
    Ok(())
}

async fn restore_mode(timeslice: &Timeslice, gpu: &Gpu) -> Result<(), String> {
    if let Some(before) = timeslice.shared_gpus.restore_compute_mode(&gpu.uuid, Mode::Timeslice).await? {
        tracing::info!(gpu = gpu.uuid, "GPU {} is no longer time-sliced: restored its compute mode {before}", gpu.uuid);
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
