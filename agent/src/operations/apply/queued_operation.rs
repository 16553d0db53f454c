//! An operation that cannot begin yet, because an earlier entry of the queue or another operation needs its GPUs, or
//! because instances are in use.
//!
//! ```text
//!              ┌── the scheduler says that it is first ── behind an earlier entry ◄┐
//!              ▼                                                                   │
//! queued ─► planned with the last readings ─► first in the queue? ── no ───────────┘
//!              ▲                                │ yes
//!              │                                ├─ its plan is possible ─► claim, read again ─┬─► running
//!              │                                ▼                                             │
//!              └──── room, or one second ◄── waiting ◄── blocked ◄────────────────────────────┘
//!
//! cancelled, timed out, or a final refusal ──► not started
//! ```
//!
//! [`crate::operations::scheduler`] keeps the order of arrival of operations and leases. An operation that is first reserves the
//! targets or GPUs that its last plan needs exclusively. gpushd grants no lease on a reserved target or GPU until the
//! operation has ended or left the queue. Existing uses of the GPUs continue. Operations without `--wait` never queue, and
//! ignore the reservation.
//!
//! Each queued operation has a task. Operations that are first have no GPU in common. So these tasks read no GPU twice. A GPU
//! that does not answer delays only the operations on that GPU.
//!
//! Queued operations survive a restart of gpushd. A queued operation has changed nothing yet, so no rollback is needed
//! if it is cancelled.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use gpush_api::{ApiError, Code, Gpu, GpuUuid, OperationState};
use gpush_core::{
    duration,
    schedule::{Ahead, ClaimedTargets, Need, Needs},
};
use gpush_store::StoreError;
use jiff::Timestamp;
use tokio::{
    sync::watch,
    time::{Instant, sleep, sleep_until, timeout},
};

use super::{
    Engine,
    order::{Order, intent},
    ready::{Ready, refusal},
};
use crate::{
    modes::mig::reset::not_resetting,
    operations::{
        operation::{self, OperationHandle},
        scheduler::OperationPlace,
    },
    requests::caller::Viewer,
    system::tasks::TaskName,
};

/// Interval between readings of GPUs whose instances are in use. gpushd must poll, because the driver does not report
/// when an instance becomes idle.
const READ: Duration = Duration::from_secs(1);

/// Minimum time between two attempts to begin an operation.
const PAUSE: Duration = Duration::from_millis(100);

/// Maximum number of waiting operations.
const MOST: usize = 256;

/// An operation in the queue.
#[derive(Debug)]
pub(crate) struct QueuedOperation {
    ongoing: Arc<OperationHandle>,
    order: Order,
    place: OperationPlace,
    until: Instant,
    /// Earliest time of the next attempt. Without this delay, the operation would wake itself: a failed attempt
    /// releases its claim, and each release wakes all waiting operations.
    again: Instant,
    /// Why the last attempt failed.
    last: Option<ApiError>,
    /// The generation of the desired state for which the operation was last planned; `None` if this gpushd has not planned
    /// it yet.
    planned: Option<u64>,
}

/// The result of an attempt to begin.
enum Attempt {
    Ready(Ready),
    /// The operation may be able to begin later.
    Waits(ApiError),
    /// The operation can never begin.
    Refused(ApiError),
}

/// Checks that one more operation may wait.
///
/// # Errors
/// If the queue is full.
pub(super) fn has_room(engine: &Engine) -> Result<(), ApiError> {
    let waiting = engine.operations.count_waiting();
    if waiting < MOST {
        return Ok(());
    }
    Err(ApiError::new(Code::Unavailable, format!("the queue is full: {waiting} operations wait"))
        .hint(
            "`gpushctl operation list` shows them; cancel one with `gpushctl operation cancel op-N` \
            (administrator)",
        )
        .retryable())
}

/// Creates the error of an operation that waits for an earlier entry in the queue.
pub(super) fn behind(engine: &Engine, ahead: &Ahead) -> ApiError {
    let index = engine.context.state.index_of(&ahead.gpu_uuid);
    let gpu =
        index.map_or_else(|| format!("GPU {}", ahead.gpu_uuid), |index| format!("GPU {index} ({})", ahead.gpu_uuid));
    ApiError::new(Code::Conflict, format!("{} is ahead of this request in the queue of {gpu}", ahead.waiter))
        .hint("`gpushctl operation list` shows the queue")
        .retryable()
}

impl QueuedOperation {
    /// Adds an operation that is recorded as queued to the queue. `since` is the time of its request, and `needs` are those
    /// of its plan.
    pub(super) fn new(
        engine: &Engine,
        ongoing: &Arc<OperationHandle>,
        order: Order,
        since: Timestamp,
        needs: Needs,
    ) -> Self {
        let place = engine.scheduler.enter_operation(ongoing.id(), needs);
        let spent = Duration::try_from(Timestamp::now().duration_since(since)).unwrap_or_default();
        let until = Instant::now() + order.wait.unwrap_or_default().saturating_sub(spent);
        let (ongoing, again) = (Arc::clone(ongoing), Instant::now());
        Self { ongoing, order, place, until, again, last: None, planned: None }
    }

    /// Adds an operation that was queued when the previous gpushd ended. Reserves all GPUs of the operation until the
    /// operation is planned again.
    pub(crate) fn recovered(engine: &Engine, ongoing: &Arc<OperationHandle>, order: Order, since: Timestamp) -> Self {
        let plans = ongoing.snapshot().plans;
        let needs = plans.into_iter().map(|plan| (plan.gpu_uuid, Need::Lane(ClaimedTargets::Gpu))).collect();
        Self::new(engine, ongoing, order, since, needs)
    }

    /// Starts the task that begins the operation as soon as possible. When gpushd stops, the operation stays recorded, and
    /// the next gpushd queues it again.
    pub(crate) fn serve(self, engine: &Engine) {
        let (executor, ongoing) = (engine.executor.clone(), Arc::clone(&self.ongoing));
        engine.context.tasks.execute(format!("operation {}", ongoing.id()), self.wait(Arc::clone(engine)), move || {
            let error = ApiError::internal("the operation could not begin: internal error of gpushd");
            let (executor, ongoing) = (executor.clone(), Arc::clone(&ongoing));
            async move {
                let error = Some(error.outcome("nothing was changed"));
                executor.finish(ongoing, &[], OperationState::NotStarted, error).await;
            }
        });
    }

    async fn wait(mut self, engine: Engine) {
        let (cancelled, stopping) = (self.ongoing.cancelled().clone(), engine.context.stopping.clone());
        let until = self.until;
        let over = tokio::select! {
            biased;
            () = stopping.cancelled() => return,
            () = cancelled.cancelled() => self.ongoing.why_cancelled(),
            () = sleep_until(until) => too_long(&self.ongoing.id(), self.order.wait.unwrap_or_default()),
            result = self.attempts(&engine) => match result {
                Ok(ready) => return self.start(&engine, ready),
                Err(error) => error,
            },
        };
        self.end(&engine, over);
    }

    /// Tries to begin until this is possible.
    ///
    /// # Errors
    /// If the operation can never begin.
    async fn attempts(&mut self, engine: &Engine) -> Result<Ready, ApiError> {
        let mut room = engine.context.lanes.room();
        loop {
            // Mark changes as seen before the attempt, so that a change during the attempt causes another one.
            room.mark_unchanged();
            let ahead = self.place.ahead();
            let error = match ahead.filter(|_| self.is_planned(engine)) {
                Some(ahead) => {
                    let error = behind(engine, &ahead);
                    self.ongoing.set_error_in_full(Some(error.clone()));
                    error
                }
                None => {
                    sleep_until(self.again).await;
                    match self.attempt(engine).await {
                        Attempt::Ready(ready) => return Ok(ready),
                        Attempt::Waits(error) => error,
                        Attempt::Refused(error) => return Err(error),
                    }
                }
            };
            self.keep_waiting(engine, error);
            self.again = self.again.max(Instant::now() + PAUSE);
            self.wait_for_change(engine, &mut room).await;
        }
    }

    /// Returns whether the operation is planned for the present desired state.
    fn is_planned(&self, engine: &Engine) -> bool {
        self.planned == Some(engine.context.state.now().generation)
    }

    /// Waits until another attempt may succeed.
    async fn wait_for_change(&mut self, engine: &Engine, room: &mut watch::Receiver<()>) {
        // The plan of an operation that waits for an earlier entry does not matter, except for what it needs.
        let polls = self.place.is_first() || !self.is_planned(engine);
        tokio::select! {
            () = self.place.changed() => {}
            // Cannot fail: the engine keeps the sender.
            _room = room.changed() => {}
            () = sleep(READ), if polls => {}
        }
    }

    async fn attempt(&mut self, engine: &Engine) -> Attempt {
        let concerned: BTreeSet<GpuUuid> =
            self.ongoing.snapshot().plans.into_iter().map(|plan| plan.gpu_uuid).collect();
        // Every user may read the reasons for waiting, so the view must not contain private details.
        let gpus = match engine.planner.gpus_of(Viewer::Agent, &concerned).await {
            Ok(gpus) => gpus,
            Err(error) => {
                self.ongoing.set_error_in_full(None);
                return Attempt::Waits(error);
            }
        };
        match self.claim_and_read(engine, &gpus).await {
            Ok(ready) => Attempt::Ready(ready),
            Err(error) => {
                self.report_in_full(engine, &error).await;
                if is_retryable(&error) { Attempt::Waits(error) } else { Attempt::Refused(error) }
            }
        }
    }

    /// Claims the GPUs of the operation if, according to the last readings, its plan is possible. Then reads the GPUs
    /// again.
    async fn claim_and_read(&mut self, engine: &Engine, gpus: &[Gpu]) -> Result<Ready, ApiError> {
        not_resetting(&engine.context.host_services)?;
        let generation = engine.context.state.now().generation;
        let (meant, needs) = engine.planner.planned_with_needs(gpus, &self.order.request, self.order.once).await?;
        self.place.set_needs(needs);
        self.planned = Some(generation);
        if let Some(ahead) = self.place.ahead() {
            return Err(behind(engine, &ahead));
        }
        // Check the plan with the last readings first, because a claim and new readings are expensive.
        if let Some(error) = refusal(&meant) {
            return Err(error);
        }
        let claim = engine.context.lanes.claim(&operation::gpus(&meant))?;
        let ready = Ready::plan_again(engine, Viewer::Agent, &self.order, &meant, claim).await;
        ready.inspect_err(|_| self.again = Instant::now() + READ)
    }

    /// Tells administrators which processes and leases block the operation. Every user may read `why`, so `why` does not
    /// name processes.
    async fn report_in_full(&self, engine: &Engine, why: &ApiError) {
        let in_full = if why.code == Code::Blocked { self.blocked_in_full(engine).await } else { None };
        self.ongoing.set_error_in_full(Some(in_full.unwrap_or_else(|| why.clone())));
    }

    /// Returns what blocks the operation, with the details for administrators; `None` if nothing blocks the operation any
    /// more.
    async fn blocked_in_full(&self, engine: &Engine) -> Option<ApiError> {
        // The attempt has just polled the MPS daemons, so do not poll them again.
        let gpus = engine.planner.gpus(Viewer::Log).await.ok()?;
        let mut plans = engine.planner.planned(&gpus, &self.order.request, self.order.once).await.ok()?;
        engine.planner.refuse_blocked(Viewer::Log, &gpus, &mut plans).await;
        refusal(&plans)
    }

    /// Shows why the operation waits, if this is news.
    fn keep_waiting(&mut self, engine: &Engine, why: ApiError) {
        let is_news = self.last.as_ref().is_none_or(|last| last.sentences() != why.sentences());
        let reasons: Vec<String> = why.sentences().into_iter().map(str::to_owned).collect();
        self.last = Some(why);
        if !is_news {
            return;
        }
        self.ongoing.set_wait_reasons(&reasons);
        if self.ongoing.snapshot().state == OperationState::Queued {
            let ongoing = Arc::clone(&self.ongoing);
            engine.context.tasks.once(TaskName::Operation, async move {
                if let Err(error) = ongoing.advance(OperationState::Waiting).await {
                    let id = ongoing.id();
                    tracing::debug!(operation = id, "cannot record that operation {id} waits: {error}");
                }
            });
        }
    }

    fn start(self, engine: &Engine, ready: Ready) {
        // Remove the earlier reason for the wait, because it would not explain an error of this start.
        self.ongoing.set_error_in_full(None);
        let (engine, ongoing) = (Arc::clone(engine), Arc::clone(&self.ongoing));
        engine.executor.clone().in_background(ongoing, move |executor, ongoing| async move {
            let Ready { parts, claim } = ready;
            let plans = parts.iter().map(|part| part.plan.clone()).collect();
            let error = match ongoing.start(claim, intent(&self.order, &parts), plans).await {
                Ok(()) => {
                    // Leave the queue, because the operation has its lanes now.
                    drop(self);
                    return executor.run(ongoing, &parts).await;
                }
                Err(_) if ongoing.cancelled().is_cancelled() => ongoing.why_cancelled(),
                // A cancellation of this operation is already recorded. Wait until the cancellation arrives.
                Err(error @ StoreError::Transition { .. }) => {
                    match timeout(READ, ongoing.cancelled().cancelled()).await {
                        Ok(()) => ongoing.why_cancelled(),
                        Err(_) => error.into(),
                    }
                }
                // If the error is temporary, such as a full disk, keep the operation in the queue: it may have waited for
                // hours.
                Err(error) if error.is_temporary() => {
                    tracing::warn!(operation = ongoing.id(), "operation {} cannot begin yet: {error}", ongoing.id());
                    return Self { again: Instant::now() + READ, last: None, ..self }.serve(&engine);
                }
                Err(error) => error.into(),
            };
            drop(self);
            let error = error.outcome("nothing was changed");
            executor.finish(ongoing, &[], OperationState::NotStarted, Some(error)).await;
        });
    }

    /// Ends an operation that is cancelled or cannot begin.
    fn end(self, engine: &Engine, error: ApiError) {
        let mut error = error.outcome("nothing was changed");
        let mut in_full = None;
        if let Some(last) = self.last {
            let last_in_full = self.ongoing.error_in_full().unwrap_or_else(|| last.clone());
            in_full = Some(because_of(error.clone(), last_in_full));
            error = because_of(error, last);
        }
        self.ongoing.set_error_in_full(in_full);
        drop(self.place);
        engine.executor.in_background(self.ongoing, move |executor, ongoing| async move {
            executor.finish(ongoing, &[], OperationState::NotStarted, Some(error)).await;
        });
    }
}

/// Returns whether the operation may be able to begin later: after another operation has ended, an instance has become
/// idle, or the driver answers again.
fn is_retryable(error: &ApiError) -> bool {
    match error.code {
        Code::DriverUnavailable | Code::DriverTimeout => true,
        Code::Blocked | Code::Conflict | Code::Resetting | Code::Unavailable | Code::Stopping => error.retryable,
        Code::BadRequest
        | Code::NotFound
        | Code::Denied
        | Code::UnknownProfile
        | Code::LayoutImpossible
        | Code::Cancelled
        | Code::Unsupported
        | Code::DriverError
        | Code::GpuLost
        | Code::ConfigInvalid
        | Code::Unreachable
        | Code::TimedOut
        | Code::Internal => false,
    }
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

#[cfg(test)]
mod tests;
