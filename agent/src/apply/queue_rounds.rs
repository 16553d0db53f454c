//! The queue of operations that cannot begin yet, because another operation has claimed their GPUs,
//! or because instances are in use.
//!
//! ```text
//!              ┌─────────── one second later, or when an earlier entry makes room ────────┐
//!              ▼                                                                          │
//! queued ─► one reading of the host, then each operation that is first on its GPUs: ──────┤
//!              ├─ its plan is possible ───────────► claim, read again ─┬─► running        │
//!              │                                                       └─► waiting ───────┤
//!              ├─ blocked, or its GPUs are taken ─► waiting ──────────────────────────────┘
//!              └─ cancelled, timed out, or a final refusal ──► not started
//! ```
//!
//! [`crate::lanes`] keeps the order of arrival of operations and lease requests. An operation that is first in the
//! queue of each of its GPUs reserves the targets or GPUs that its last plan needs exclusively. gpushd grants no lease
//! on a reserved target or GPU until the operation has ended or left the queue. Existing uses of the GPUs continue.
//! Operations without `--wait` never queue, and ignore the reservation.
//!
//! One task serves the whole queue with one reading of the host, so more operations do not cause more driver calls.
//! When an operation has claimed its GPUs, a separate task reads these GPUs again. So a GPU that does not answer delays
//! only the operations on that GPU.
//!
//! Queued operations survive a restart of gpushd. A queued operation has changed nothing yet, so no rollback is needed
//! if it is cancelled.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use gpush_api::{ApiError, Code, Gpu, GpuPlan, OperationState};
use gpush_core::duration;
use tokio::time::{Instant, sleep, timeout};

use super::{
    Engine,
    order::intent,
    queue::{QueuedOperation, READ},
    ready::{Ready, refusal},
};
use crate::{
    caller::Viewer,
    lanes::{Ahead, Claim},
    modes::mig::reset::not_resetting,
    operation,
    tasks::TaskName,
};

/// Serves the queue until gpushd stops. When gpushd stops, waiting operations stay recorded, and the next gpushd
/// queues them again.
pub(crate) async fn run(engine: Engine) {
    let mut room = engine.lanes.room();
    let mut changes = engine.queue.changes.subscribe();
    // The queue may already have operations that the previous gpushd had queued.
    changes.mark_changed();
    loop {
        let pause = async {
            if engine.queue.is_empty() {
                std::future::pending::<()>().await;
            }
            sleep(READ).await;
        };
        tokio::select! {
            biased;
            () = engine.stopping.cancelled() => return,
            _ = changes.changed() => {}
            _ = room.changed() => {}
            () = pause => {}
        }
        round(&engine).await;
    }
}

/// Tries to begin each waiting operation once.
async fn round(engine: &Engine) {
    let mut all: Vec<QueuedOperation> =
        engine.queue.waiting().values().filter(|one| !one.is_reading).cloned().collect();
    if all.is_empty() {
        return;
    }
    all.retain(|one| {
        let id = one.ongoing.id();
        let over = if one.ongoing.cancelled().is_cancelled() {
            Some(one.ongoing.why_cancelled())
        } else if one.until <= Instant::now() {
            Some(too_long(&id, one.order.wait.unwrap_or_default()))
        } else {
            None
        };
        let Some(error) = over else { return true };
        end_waiting(engine, one, error);
        false
    });
    all.retain(|one| one.again <= Instant::now());
    if all.is_empty() {
        return;
    }
    let concerned: BTreeSet<String> =
        all.iter().flat_map(|one| one.ongoing.snapshot().plans).map(|plan| plan.uuid).collect();
    // Every user may read the reasons for waiting, so the view must not contain private details.
    let gpus = match engine.planner.gpus_of(Viewer::Agent, &concerned).await {
        Ok(gpus) => gpus,
        Err(error) => {
            for one in &all {
                one.ongoing.set_error_in_full(None);
                keep_waiting(engine, one, &error);
            }
            return;
        }
    };
    for one in all {
        if engine.stopping.is_cancelled() {
            return;
        }
        match claim(engine, &one, &gpus).await {
            Ok((meant, claim)) => read(engine, one, meant, claim),
            Err(error) => {
                report_in_full(engine, &one, &error).await;
                cannot_begin(engine, &one, error);
            }
        }
    }
}

/// Tells administrators which processes and leases block an operation. Every user may read `why`, so `why` does not
/// name processes.
async fn report_in_full(engine: &Engine, one: &QueuedOperation, why: &ApiError) {
    let in_full = if why.code == Code::Blocked { blocked_in_full(engine, one).await } else { None };
    one.ongoing.set_error_in_full(Some(in_full.unwrap_or_else(|| why.clone())));
}

/// Returns what blocks an operation, with the details for administrators; `None` if nothing blocks the operation any
/// more.
async fn blocked_in_full(engine: &Engine, one: &QueuedOperation) -> Option<ApiError> {
    // The attempt has just polled the MPS daemons, so do not poll them again.
    let gpus = engine.planner.gpus(Viewer::Log).await.ok()?;
    let mut plans = engine.planner.planned(&gpus, &one.order.request, one.order.once).await.ok()?;
    engine.planner.refuse_blocked(Viewer::Log, &gpus, &mut plans).await;
    refusal(&plans)
}

/// Reads the claimed GPUs of an operation in a separate task. Starts the operation if the readings still permit its
/// plan.
fn read(engine: &Engine, one: QueuedOperation, meant: Vec<GpuPlan>, claim: Claim) {
    engine.queue.mark_reading(one.ongoing.number());
    let (failing, failed) = (Arc::clone(engine), one.clone());
    let reading = read_and_start(Arc::clone(engine), one, meant, claim);
    engine.tasks.execute(format!("operation {}", failed.ongoing.id()), reading, move || {
        let (engine, one) = (Arc::clone(&failing), failed.clone());
        async move {
            let error = ApiError::internal("the operation could not begin: internal error of gpushd");
            end_waiting(&engine, &one, error);
        }
    });
}

async fn read_and_start(engine: Engine, one: QueuedOperation, meant: Vec<GpuPlan>, claim: Claim) {
    let ready = tokio::select! {
        biased;
        () = engine.stopping.cancelled() => return,
        ready = Ready::plan_again(&engine, Viewer::Agent, &one.order, &meant, claim) => ready,
    };
    match ready {
        Ok(ready) => start(&engine, one, ready),
        Err(error) => {
            // Report before `attempt_failed`: after it, another task may end the operation.
            report_in_full(&engine, &one, &error).await;
            engine.queue.attempt_failed(one.ongoing.number());
            cannot_begin(&engine, &one, error);
        }
    }
}

/// Keeps an operation in the queue if it may be able to begin later. Otherwise ends the operation.
fn cannot_begin(engine: &Engine, one: &QueuedOperation, error: ApiError) {
    if is_retryable(&error) { keep_waiting(engine, one, &error) } else { end_waiting(engine, one, error) }
}

/// Returns whether the operation may be able to begin later: after another operation has ended, an instance has become
/// idle, or the driver answers again.
fn is_retryable(error: &ApiError) -> bool {
    error.is_temporary()
        || matches!(error.code, Code::DriverUnavailable | Code::DriverTimeout)
        || matches!(error.code, Code::Unavailable | Code::Stopping) && error.retryable
}

/// Claims the GPUs of an operation if, according to the last readings, its plan is possible.
async fn claim(engine: &Engine, one: &QueuedOperation, gpus: &[Gpu]) -> Result<(Vec<GpuPlan>, Claim), ApiError> {
    not_resetting(&engine.host_services)?;
    let (meant, needs) = engine.planner.planned_with_needs(gpus, &one.order.request, one.order.once).await?;
    one.place.set_needs(needs);
    if let Some(ahead) = one.place.ahead() {
        return Err(behind(engine, &ahead));
    }
    // Check the plan with the last readings first, because a claim and new readings are expensive.
    if let Some(error) = refusal(&meant) {
        return Err(error);
    }
    let claim = engine.lanes.claim(&operation::gpus(&meant))?;
    Ok((meant, claim))
}

/// Creates the error of an operation that waits for an earlier entry in the queue.
pub(super) fn behind(engine: &Engine, ahead: &Ahead) -> ApiError {
    let index = engine.state.index_of(&ahead.gpu);
    let gpu = index.map_or_else(|| format!("GPU {}", ahead.gpu), |index| format!("GPU {index} ({})", ahead.gpu));
    ApiError::new(Code::Conflict, format!("{} is ahead of this request in the queue of {gpu}", ahead.waiter))
        .hint("`gpushctl operation list` shows the queue")
        .retryable()
}

fn start(engine: &Engine, one: QueuedOperation, ready: Ready) {
    engine.queue.waiting().remove(&one.ongoing.number());
    let QueuedOperation { ongoing, order, place, .. } = one;
    // Remove the earlier reason for the wait, because it would not explain an error of this start.
    ongoing.set_error_in_full(None);
    let engine = Arc::clone(engine);
    engine.executor.clone().in_background(ongoing, move |executor, ongoing| async move {
        let Ready { parts, claim } = ready;
        let plans = parts.iter().map(|part| part.plan.clone()).collect();
        let error = match ongoing.start(claim, intent(&order, &parts), plans).await {
            Ok(()) => {
                // Leave the queue, because the operation has its lanes now.
                drop(place);
                return executor.run(ongoing, &parts).await;
            }
            Err(_) if ongoing.cancelled().is_cancelled() => ongoing.why_cancelled(),
            // A conflict means that a cancellation of this operation is already recorded. Wait until the cancellation
            // arrives.
            Err(error) if error.code == Code::Conflict => match timeout(READ, ongoing.cancelled().cancelled()).await {
                Ok(()) => ongoing.why_cancelled(),
                Err(_) => error,
            },
            // If the error is temporary, such as a full disk, keep the operation in the queue: it may have waited for
            // hours.
            Err(error) if error.retryable => {
                tracing::warn!(operation = ongoing.id(), "operation {} cannot begin yet: {error}", ongoing.id());
                let since = ongoing.snapshot().created_at;
                return engine.queue.insert(&ongoing, order, since, place, Instant::now() + READ);
            }
            Err(error) => error,
        };
        drop(place);
        let error = error.outcome("nothing was changed");
        executor.finish(ongoing, &[], OperationState::NotStarted, Some(error)).await;
    });
}

fn keep_waiting(engine: &Engine, one: &QueuedOperation, why: &ApiError) {
    let mut waiting = engine.queue.waiting();
    let Some(kept) = waiting.get_mut(&one.ongoing.number()) else { return };
    let news = kept.last.as_ref().is_none_or(|last| last.sentences() != why.sentences());
    kept.last = Some(why.clone());
    drop(waiting);
    if !news {
        return;
    }
    let reasons: Vec<String> = why.sentences().into_iter().map(str::to_owned).collect();
    one.ongoing.set_wait_reasons(&reasons);
    if one.ongoing.snapshot().state == OperationState::Queued {
        let ongoing = Arc::clone(&one.ongoing);
        engine.tasks.once(TaskName::Operation, async move {
            if let Err(error) = ongoing.advance(OperationState::Waiting).await {
                tracing::debug!(
                    operation = ongoing.id(),
                    "cannot record that operation {} waits: {error}",
                    ongoing.id()
                );
            }
        });
    }
}

/// Ends an operation that is cancelled or cannot begin. Does nothing if the operation has already left the queue.
fn end_waiting(engine: &Engine, one: &QueuedOperation, error: ApiError) {
    let Some(kept) = engine.queue.waiting().remove(&one.ongoing.number()) else { return };
    let mut error = error.outcome("nothing was changed");
    let mut in_full = None;
    if let Some(last) = kept.last {
        let last_in_full = one.ongoing.error_in_full().unwrap_or_else(|| last.clone());
        in_full = Some(because_of(error.clone(), last_in_full));
        error = because_of(error, last);
    }
    one.ongoing.set_error_in_full(in_full);
    engine.executor.in_background(Arc::clone(&one.ongoing), move |executor, ongoing| async move {
        executor.finish(ongoing, &[], OperationState::NotStarted, Some(error)).await;
    });
}

/// Adds the reason for the wait to the error of an operation that did not start.
fn because_of(mut error: ApiError, last: ApiError) -> ApiError {
    // If the last attempt failed with this same error, there is no different reason to add.
    if error.message != last.message {
        error.causes.push(last.message);
        error.causes.extend(last.causes);
        error.errors = last.errors;
    }
    error
}

fn too_long(id: &str, patience: Duration) -> ApiError {
    ApiError::new(Code::TimedOut, format!("operation {id} could not begin within {}", duration::format(patience)))
        .hint("end the processes that block it, or repeat the command with a longer --wait")
        .retryable()
}
