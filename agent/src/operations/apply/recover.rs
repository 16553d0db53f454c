//! Recovery of operations that a previous gpushd left unfinished.
//!
//! The journal has the previous and the planned state of each GPU, and a reading shows the current
//! state. So the journal need not record single steps ([decision
//! 11](../../../docs/decisions/0011-recovery-from-intent.md)):
//!
//! ```text
//! queued ─► queued again
//! begun, but a later operation has begun on one of its GPUs ─► failed
//! begun ─► wait for the driver ─► read each GPU ─► plan what remains ─► what to do (`recovery_action`) ─► end, forward or back
//! ```
//!
//! The plan for the remaining steps uses the placements in the journal. So recovery recognizes instances that another
//! program has created since the operation began, and never destroys them.
//!
//! gpushd serves the API during recovery. The operation keeps its GPUs until recovery has finished.
//! If gpushd dies during recovery, the next gpushd repeats the recovery.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use gpush_api::{ApiError, Code, Gpu, GpuLayout, GpuPlan, GpuUuid, LayoutSource, OperationState, PlanRequest};
use gpush_core::{
    config::Config,
    desired::plan_host,
    plan,
    step::{done_before, remaining, same_layout},
};
use gpush_locked::Locked;
use gpush_nvml::{DriverError, ErrorKind, Reading};
use gpush_store::{GpuIntent, OperationId, UnfinishedOperation};
use jiff::Timestamp;
use tokio_util::sync::CancellationToken;

use super::{
    Executor,
    interrupted::{changed_by_others, interrupted, reading_error, repeat_hint, rollback_reason, superseded_error},
    order::{Order, RecordedRequest},
    part::{Part, outcome},
    phases::PartOutcome,
    planner::Planner,
    recovery_action::{RecoveryAction, RecoveryFacts},
};
use crate::{
    modes::{Trouble, mig::reset::RESET},
    operations::operation::{self, OperationHandle},
    requests::caller::Viewer,
    system::{backoff::backoff, tasks::TaskName},
};

/// First and longest pause between two attempts to read a GPU.
const PAUSE: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(15));

/// Maximum number of failed attempts to read a GPU while the driver is available.
const ATTEMPTS: u32 = 6;

/// Recovers operations that a previous gpushd left unfinished. A handle, cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Recovery {
    pub(crate) executor: Executor,
    pub(crate) planner: Planner,
    /// Cancelled when gpushd is stopping. The next gpushd continues the recovery.
    pub(crate) stopping: CancellationToken,
}

impl Recovery {
    /// Takes over unfinished operations. Passes queued operations to `enqueue`, with the time of their request.
    /// Recovers all other operations in the background. Returns the UUIDs of the GPUs that an operation on this boot
    /// may have changed. Operations that a gpushd began at its own start do not count.
    ///
    /// Call this before gpushd serves any request. On return, the GPUs of the operations are claimed.
    pub(crate) async fn take_over(
        &self,
        unfinished: Vec<UnfinishedOperation>,
        superseded: &BTreeMap<OperationId, OperationId>,
        boot_id: &str,
        mut enqueue: impl FnMut(&Arc<OperationHandle>, Order, Timestamp),
    ) -> Vec<GpuUuid> {
        let mut changed = Vec::new();
        self.wait_for_resets(&unfinished).await;
        for left in unfinished {
            if left.record.stage.is_final() {
                self.undo_brackets(left.record.id, left.record.stage);
                continue;
            }
            let same_boot = left.record.boot_id == boot_id;
            let ongoing = self.executor.operations.take_over(&left);
            tracing::warn!(
                operation = ongoing.id(),
                "operation {} ({}) was {} when gpushd ended",
                ongoing.id(),
                left.record.kind,
                left.record.stage
            );
            if left.intent.begun.is_none() {
                self.queue_again(&ongoing, left, &mut enqueue);
                continue;
            }
            if same_boot && left.record.kind != operation::START {
                // Return the GPUs even if the operation fails. A caller has requested a change of these GPUs on this
                // boot, so gpushd must not apply their layouts at start.
                changed.extend(left.intent.gpus.iter().map(|gpu| gpu.plan.gpu_uuid.clone()));
            }
            let lost = match superseded.get(&left.record.id) {
                Some(by) => Some(superseded_error(&ongoing.id(), *by)),
                None => ongoing.claim_again().err(),
            };
            let recovery = self.clone();
            self.executor.in_background(ongoing, move |executor, ongoing| async move {
                match lost {
                    Some(error) => executor.finish(ongoing, &[], OperationState::Failed, Some(error)).await,
                    None => recovery.recover(ongoing, left, same_boot).await,
                }
            });
        }
        changed
    }

    /// Starts the services that an ended operation stopped, and runs the hook `after` of the operation.
    fn undo_brackets(&self, id: OperationId, stage: OperationState) {
        let recovery = self.clone();
        self.executor.tasks.spawn_for_before_exit(TaskName::OperationCleanup, format!("operation {id}"), move || {
            recovery.clone().close(id, stage)
        });
    }

    async fn close(self, id: OperationId, stage: OperationState) {
        let Self { executor, stopping, .. } = self;
        let helpers = &executor.mig.context.host_services.helpers;
        helpers.adopt(&id.to_string()).await;
        // During maintenance, do not start services, because a service may open the GPUs.
        let mut snapshots = executor.mig.context.state.watch();
        tokio::select! {
            () = stopping.cancelled() => return,
            _ = snapshots.wait_for(|host| host.maintenance.is_none()) => {}
        }
        executor.close(id, stage).await;
        helpers.forget(&id.to_string());
    }

    /// Puts an operation that has not begun yet back into the queue.
    fn queue_again(
        &self,
        ongoing: &Arc<OperationHandle>,
        left: UnfinishedOperation,
        enqueue: &mut impl FnMut(&Arc<OperationHandle>, Order, Timestamp),
    ) {
        note_the_gap(ongoing, &left);
        match serde_json::from_value::<RecordedRequest>(left.intent.more) {
            Ok(RecordedRequest { order, .. }) => enqueue(ongoing, order, left.record.created_at),
            Err(error) => {
                let error = ApiError::new(Code::Internal, "gpushd cannot read the recorded request of the operation")
                    .cause(error.to_string())
                    .hint("repeat the request")
                    .outcome("nothing was changed");
                self.executor.in_background(Arc::clone(ongoing), move |executor, ongoing| async move {
                    executor.finish(ongoing, &[], OperationState::NotStarted, Some(error)).await;
                });
            }
        }
    }

    /// If resets that the previous gpushd started still run, pauses driver calls, and waits in the background until the
    /// resets have ended. No process may open a GPU during a reset, not even to read it.
    async fn wait_for_resets(&self, unfinished: &[UnfinishedOperation]) {
        let mig = &self.executor.mig;
        let ids: Vec<String> = unfinished.iter().map(|left| left.record.id.to_string()).collect();
        mig.context.host_services.helpers.forget_others(&ids);
        let resets = |id: &&String| mig.context.host_services.helpers.running(id).iter().any(|step| step == RESET);
        let resetting: Vec<String> = ids.iter().filter(resets).cloned().collect();
        if resetting.is_empty() {
            return;
        }
        let gate = Arc::clone(&mig.context.host_services.driverless).write_owned().await;
        if let Err(error) = mig.driver.hardware.pause().await {
            tracing::warn!("cannot pause the driver calls during a GPU reset: {error}");
        }
        let shared = Arc::new((mig.clone(), resetting, Locked::new(Some(gate))));
        self.executor.tasks.spawn_for_before_exit(TaskName::OperationCleanup, "a GPU reset", move || {
            let shared = Arc::clone(&shared);
            async move {
                let (mig, resetting, gate) = &*shared;
                for id in resetting {
                    mig.context.host_services.helpers.adopt(id).await;
                }
                mig.driver.hardware.unpause();
                drop(gate.lock().take());
            }
        });
    }

    /// Recovers one operation.
    async fn recover(&self, ongoing: Arc<OperationHandle>, left: UnfinishedOperation, same_boot: bool) {
        note_the_gap(&ongoing, &left);
        if left.record.stage == OperationState::Running
            && let Err(error) = ongoing.advance(OperationState::Interrupted).await
        {
            let id = ongoing.id();
            tracing::warn!(operation = id, "cannot record that operation {id} was interrupted: {error}");
        }
        for reported in self.executor.mig.context.host_services.helpers.adopt(&ongoing.id()).await {
            ongoing.note(reported);
        }
        let Some(read) = self.read(&left.intent.gpus).await else { return };
        let whole: Option<Vec<Arc<Reading>>> = read.iter().map(|read| read.as_ref().ok().cloned()).collect();
        let plans = match &whole {
            Some(readings) => match self.remaining(&left.intent.gpus, readings).await {
                Some(plans) => Some(plans),
                None => return,
            },
            None => None,
        };
        let mut lasting =
            serde_json::from_value::<RecordedRequest>(left.intent.more).map(|more| more.lasting).unwrap_or_default();
        let mut parts = Vec::new();
        let mut others = Vec::new();
        for (position, (intent, read)) in std::iter::zip(&left.intent.gpus, &read).enumerate() {
            let plan = plans.as_ref().map_or(&intent.plan, |plans| &plans[position]).clone();
            if plans.is_some() {
                let done = done_before(&intent.plan, &plan);
                ongoing.progress(position, |progress| progress.done = done);
            }
            let reading = read.as_deref().ok();
            others.extend(reading.and_then(|reading| changed_by_others(intent, reading)));
            let lasting = lasting.remove(&intent.plan.gpu_uuid);
            parts.push(Part::interrupted(position, intent, plan, reading, lasting));
        }
        let as_before = std::iter::zip(&parts, &read).all(|(part, read)| {
            read.as_ref().is_ok_and(|reading| same_layout(part.before.as_ref(), reading.mig.as_ref()))
        });
        let facts = RecoveryFacts {
            same_boot,
            rolling_back: left.record.stage == OperationState::Cancelling || ongoing.cancelled().is_cancelled(),
            has_failed: left.record.error.is_some(),
            plannable: plans.as_ref().is_some_and(|plans| plans.iter().all(|plan| plan.error.is_none())),
            nothing_remains: parts.iter().all(Part::is_empty),
            as_before,
            changed_by_others: !others.is_empty(),
        };
        let ends =
            read.into_iter().map(|read| read.map_or_else(PartOutcome::Troubled, |_| PartOutcome::Stopped)).collect();
        let failed = left.record.error.filter(|_| facts.rolling_back);
        let left = InterruptedOperation { parts, ends, others, rolling_back: facts.rolling_back, failed };
        self.take_action(facts.action(), ongoing, left).await;
    }

    async fn take_action(&self, action: RecoveryAction, ongoing: Arc<OperationHandle>, left: InterruptedOperation) {
        let executor = &self.executor;
        let InterruptedOperation { parts, ends, others, rolling_back, failed } = left;
        let failed = failed.map(|error| error.cause("gpushd ended while it handled this error"));
        match action {
            RecoveryAction::Done => executor.finish(ongoing, &parts, OperationState::Done, None).await,
            RecoveryAction::Forward => match ongoing.advance(OperationState::Running).await {
                Ok(()) => executor.run(ongoing, &parts).await,
                Err(_) if ongoing.cancelled().is_cancelled() => {
                    let why = ongoing.why_cancelled();
                    executor.roll_back(ongoing, &parts, &ends, why, &[]).await;
                }
                // While the journal cannot be written, gpushd must not continue an operation.
                Err(error) => self.fail_unrecoverable(ongoing, &parts, error).await,
            },
            RecoveryAction::RolledBack => {
                let error = failed.unwrap_or_else(|| {
                    interrupted("gpushd ended before it changed anything, or after it rolled everything back")
                        .hint("repeat the request")
                });
                let error = error.outcome("the previous layout is unchanged: gpushd has read it back");
                executor.finish(ongoing, &parts, OperationState::RolledBack, Some(error)).await;
            }
            RecoveryAction::Rebooted => {
                let operation = ongoing.snapshot();
                let error = interrupted("the host was restarted during the operation")
                    .cause("MIG instances do not survive a restart: the GPU has neither the new layout nor the previous one")
                    .hint(repeat_hint(&operation.kind, &operation.plans));
                executor.finish(ongoing, &parts, OperationState::Failed, Some(error)).await;
            }
            RecoveryAction::Back => {
                let refused = parts.iter().find_map(|part| part.plan.error.clone());
                let why = rollback_reason(rolling_back, failed, others, refused);
                executor.roll_back(ongoing, &parts, &ends, why, &[]).await;
            }
        }
    }

    /// Ends an operation that cannot continue because the journal cannot be written. Records the end in
    /// memory even if the journal cannot record it.
    async fn fail_unrecoverable(&self, ongoing: Arc<OperationHandle>, parts: &[Part], why: ApiError) {
        let id = ongoing.id();
        let error = why.context(format!("operation {id} was not finished when gpushd ended, and cannot continue"));
        for part in parts {
            self.executor.mig.context.state.apply(&[part.degrade(&id, &error)]);
        }
        self.executor.finish(ongoing, parts, OperationState::Failed, Some(error)).await;
    }

    /// Reads each GPU, and waits for the driver if necessary. Returns `None` if gpushd is stopping.
    async fn read(&self, gpus: &[GpuIntent]) -> Option<Vec<Result<Arc<Reading>, Trouble>>> {
        let mut readings = Vec::new();
        for gpu in gpus {
            let label = format!("GPU {} ({})", gpu.plan.gpu, gpu.plan.gpu_uuid);
            let (mut pauses, mut attempts) = (backoff(PAUSE), 0);
            readings.push(loop {
                match self.executor.mig.driver.readings.read_now(&gpu.plan.gpu_uuid).await {
                    Ok(reading) => break Ok(reading),
                    Err(error) if is_gone(&error) => {
                        break Err(Trouble::Lost(reading_error(&label, "does not exist any more", &error)));
                    }
                    Err(error) if !error.is_driver_unavailable() && attempts >= ATTEMPTS => {
                        break Err(Trouble::Unknown(reading_error(&label, "can't be read", &error)));
                    }
                    Err(error) => {
                        attempts += u32::from(!error.is_driver_unavailable());
                        tracing::info!("{label} can't be read yet: {error}");
                    }
                }
                tokio::select! {
                    () = tokio::time::sleep(pauses.next().unwrap_or(PAUSE.1)) => {}
                    () = self.stopping.cancelled() => return None,
                }
            });
        }
        Some(readings)
    }

    /// Plans the remaining steps on each GPU. Returns `None` if gpushd is stopping.
    async fn remaining(&self, gpus: &[GpuIntent], readings: &[Arc<Reading>]) -> Option<Vec<GpuPlan>> {
        let host = loop {
            match self.planner.gpus_with(Viewer::Agent, readings).await {
                Ok(host) => break host,
                // gpushd has just read the GPUs of the operation, so this error is temporary.
                Err(error) => tracing::info!("cannot read the GPUs of the host yet: {error}"),
            }
            tokio::select! {
                () = tokio::time::sleep(PAUSE.0) => {}
                () = self.stopping.cancelled() => return None,
            }
        };
        Some(gpus.iter().map(|gpu| remaining_plan(&host, gpu)).collect())
    }
}

/// Plans the remaining steps on a GPU of an interrupted operation. `host` contains all GPUs as they are now.
fn remaining_plan(host: &[Gpu], gpu: &GpuIntent) -> GpuPlan {
    // The operation continues with its recorded plan, so the current config file does not matter.
    let config = Config::default();
    let was_on = gpu.before.as_ref().is_some_and(|before| before.enabled);
    let mig = gpu.plan.mig_mode().unwrap_or(was_on);
    if !mig && gpu.plan.mig_mode().is_none() {
        // The operation does not change MIG on this GPU, so keep the recorded plan.
        return gpu.plan.clone();
    }
    let layout = if mig { plan::exact_layout(&outcome(gpu)) } else { Vec::new() };
    let wanted = GpuLayout { gpu: gpu.plan.gpu_uuid.to_string(), mig, layout };
    let request = PlanRequest { gpus: Vec::new(), layout: LayoutSource::PerGpu(vec![wanted]) };
    match plan_host(&config, host, &request) {
        Ok(mut plans) if plans.plans.len() == 1 => remaining(&gpu.plan, plans.plans.remove(0)),
        Ok(_) => {
            let error = ApiError::new(Code::NotFound, "the GPU does not exist any more");
            GpuPlan { error: Some(error), ..gpu.plan.clone() }
        }
        Err(error) => GpuPlan { error: Some(error), ..gpu.plan.clone() },
    }
}

/// The data of an interrupted operation.
struct InterruptedOperation {
    parts: Vec<Part>,
    /// The outcome on each GPU, for the rollback.
    ends: Vec<PartOutcome>,
    /// One error for each GPU that another program has changed.
    others: Vec<ApiError>,
    /// Whether the operation was cancelled, or was being rolled back when gpushd ended.
    rolling_back: bool,
    /// The error that caused the rollback.
    failed: Option<ApiError>,
}

fn note_the_gap(ongoing: &OperationHandle, left: &UnfinishedOperation) {
    ongoing.note(format!(
        "gpushd ended while the operation was {}; the next gpushd took the operation over",
        left.record.stage
    ));
}

fn is_gone(error: &DriverError) -> bool {
    matches!(error.kind, ErrorKind::GpuIsLost | ErrorKind::NotFound)
}

#[cfg(test)]
mod tests;
