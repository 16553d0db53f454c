//! Executes an operation on all its GPUs. If the operation fails on one GPU, restores all GPUs of
//! the operation.
//!
//! Before the steps, an operation may stop services and run a hook. Each such action is called a bracket. gpushd undoes
//! each bracket after the steps.
//!
//! ```text
//! brackets opened ─► phases on every GPU ──► all done ─────────────────────────────► done
//!        │                  │
//!        └── one fails ─────┴─ the others stop before their next step
//!                                  └─► back on each changed GPU ─┬─ all restored ──► rolled back
//!                                                                └─ some not ──────► failed
//! at each end: the brackets are undone
//! ```

use std::sync::Arc;

use gpush_api::{ApiError, GpuPlan, GpuUuid, OperationState};
use gpush_store::{AuditEvent, OperationId, Tx};

use super::{
    Executor,
    lease_changes::{self, LeaseChanges},
    part::Part,
    phases::{Executed, PartOutcome, execute, running_hook},
    rollback,
};
use crate::{
    modes::{mig::holders::HeldBy, mps},
    operations::{
        operation::{EndEffects, OperationHandle},
        overrides,
    },
    state::Change,
};

impl Executor {
    /// Executes an operation in the background. The operation is already recorded as running. gpushd does not exit
    /// before the operation has ended.
    pub(super) fn spawn(&self, ongoing: Arc<OperationHandle>, parts: Vec<Part>) {
        self.in_background(ongoing, move |executor, ongoing| async move { executor.run(ongoing, &parts).await });
    }

    /// Runs the work of an operation in the background. If the work panics, the operation ends as failed.
    pub(super) fn in_background<F>(
        &self,
        ongoing: Arc<OperationHandle>,
        work: impl FnOnce(Self, Arc<OperationHandle>) -> F + Send + 'static,
    ) where
        F: Future<Output = ()> + Send + 'static,
    {
        let (executor, number) = (self.clone(), ongoing.number());
        let cleanup = move || executor.clone().abandon(number);
        self.tasks.execute(format!("operation {number}"), work(self.clone(), ongoing), cleanup);
    }

    /// Ends an operation whose work has panicked.
    async fn abandon(self, number: OperationId) {
        let message = format!("operation {number} ended with an internal error of gpushd");
        tracing::error!(operation = %number, "{message}");
        let error = ApiError::internal(message);
        // Do not use the returned failures: they are already logged, and the operation no longer accepts notes.
        let _failures = self.close(number, OperationState::Failed).await;
        self.operations.abandon(number, error).await;
        lease_changes::abandon(&self.mig.context.state, &self.services.context.store, number).await;
        self.mps.forget_operation(&number.to_string());
    }

    /// Executes an operation that is recorded as running.
    pub(super) async fn run(&self, ongoing: Arc<OperationHandle>, parts: &[Part]) {
        let operation = ongoing.snapshot();
        let aims: Vec<String> =
            parts.iter().map(|part| format!("GPU {}: {}", part.plan.gpu, part.plan.end_state())).collect();
        tracing::info!(
            operation = operation.id,
            uid = operation.by.uid,
            "{} begins: {}",
            operation.kind,
            aims.join("; ")
        );
        let Executed { ends, held_by } = execute(self, &ongoing, parts).await;
        let failed = ends.iter().find_map(|end| match end {
            PartOutcome::Troubled(trouble) => Some(trouble.error().clone()),
            PartOutcome::Done | PartOutcome::Stopped => None,
        });
        let stopped = ends.iter().any(|end| matches!(end, PartOutcome::Stopped));
        match failed.or_else(|| stopped.then(|| ongoing.why_cancelled())) {
            None => self.finish(ongoing, parts, OperationState::Done, None).await,
            Some(why) => self.roll_back(ongoing, parts, &ends, why, &held_by).await,
        }
    }

    /// Rolls back the GPUs of an operation because of the error `why`, and ends the operation. Administrators see
    /// `held_by` in full.
    pub(super) async fn roll_back(
        &self,
        ongoing: Arc<OperationHandle>,
        parts: &[Part],
        ends: &[PartOutcome],
        why: ApiError,
        held_by: &[HeldBy],
    ) {
        if let Err(error) = ongoing.begin_rollback(&why).await {
            // The rollback continues even if its start cannot be recorded. But if gpushd crashes now, the next gpushd
            // continues the operation instead of rolling it back.
            let id = ongoing.id();
            tracing::warn!(operation = id, "cannot record that operation {id} is being rolled back: {error}");
        }
        let (state, error, changes) = rollback::all(&self.mig, &ongoing, parts, ends, why.clone()).await;
        ongoing.set_error_in_full((!held_by.is_empty()).then(|| in_full(error.clone(), held_by)));
        self.end(Arc::clone(&ongoing), parts, state, Some(error), changes).await;
        log_end(&ongoing, state, Some(&why));
    }

    /// Ends an operation without a rollback.
    pub(super) async fn finish(
        &self,
        ongoing: Arc<OperationHandle>,
        parts: &[Part],
        state: OperationState,
        error: Option<ApiError>,
    ) {
        self.end(Arc::clone(&ongoing), parts, state, error.clone(), Vec::new()).await;
        log_end(&ongoing, state, error.as_ref());
    }

    /// Undoes the brackets (stopped services, hooks) of an operation that ends in `state`. Returns one sentence for
    /// each failure.
    pub(super) async fn close(&self, operation: OperationId, state: OperationState) -> Vec<String> {
        let failures = self.services.undo_brackets(operation, state).await;
        self.services.retry_failed_starts(operation, state).await;
        failures
    }

    /// Undoes the brackets (stopped services, hooks), and records the end of an operation together with the changes
    /// that result from the operation.
    async fn end(
        &self,
        ongoing: Arc<OperationHandle>,
        parts: &[Part],
        state: OperationState,
        error: Option<ApiError>,
        mut changes: Vec<Change>,
    ) {
        let operation = ongoing.snapshot();
        let id = ongoing.id();
        let is_done = state == OperationState::Done;
        if is_done {
            // Only a successful operation ends the degraded state of a GPU.
            changes.extend(parts.iter().map(|part| Change::clear_degraded(&part.plan.gpu_uuid)));
        }
        parts.iter().for_each(|part| self.mig.driver.readings.invalidate(&part.plan.gpu_uuid));
        self.mig.context.state.apply(&changes);
        let plans: Vec<GpuPlan> = parts.iter().map(|part| part.plan.clone()).collect();
        let hook = self.mig.context.state.config().mode_change.after.clone();
        let hooked = parts.iter().find(|part| !part.plan.hooks.is_empty()).map(|part| part.position);
        if let (Some(program), Some(position)) = (&hook, hooked) {
            ongoing.progress(position, |progress| progress.doing = Some(running_hook(program)));
        }
        for failure in self.close(ongoing.number(), state).await {
            ongoing.note(failure);
        }
        hooked.into_iter().for_each(|position| ongoing.progress(position, |progress| progress.doing = None));
        let why = error.as_ref().map(|error| error.message.clone());
        let event = AuditEvent::OperationEnd { kind: operation.kind.clone(), why };
        let audit = event.record(None, &operation.id, state.name());
        // Overrides and the modes of MPS targets change only if the operation succeeded.
        let lasting: Vec<_> = if is_done {
            parts.iter().filter_map(|part| Some((part.plan.gpu_uuid.clone(), part.lasting.clone()?))).collect()
        } else {
            Vec::new()
        };
        let shared =
            if is_done { mps::RecordedSettings::of(&self.mps, &plans) } else { mps::RecordedSettings::default() };
        let recorded = shared.clone();
        let in_full = ongoing.error_in_full().filter(|_| !is_done);
        let leased = LeaseChanges::of(&self.mig, ongoing.number(), &operation.plans, state).await;
        let number = ongoing.number();
        let also = move |tx: &mut Tx<'_>| {
            recorded.record(tx)?;
            changes.iter().try_for_each(|change| change.record(tx))?;
            tx.audit(audit.clone())?;
            in_full.iter().try_for_each(|error| tx.error_in_full(number, error.clone()))?;
            let leases = leased.record(tx)?;
            Ok(EndEffects { overrides: overrides::record_changes(tx, &operation, &lasting)?, leases })
        };
        shared.apply(&self.mps);
        let host = self.mig.context.state.clone();
        let applied: Vec<GpuUuid> = parts.iter().map(|part| part.plan.gpu_uuid.clone()).collect();
        let then = move |effects: &EndEffects| {
            host.override_effects(&effects.overrides);
            host.change_leases(|table| table.apply_operation_end(&effects.leases));
            if is_done {
                host.rules_applied(applied.into_iter());
            }
        };
        ongoing.end(state, error, Box::new(also), Box::new(then)).await;
        self.mps.forget_operation(&id);
        self.mig.context.host_services.helpers.forget(&id);
    }
}

/// Returns the error of an operation with all details of the holders in `held_by`.
fn in_full(mut error: ApiError, held_by: &[HeldBy]) -> ApiError {
    error.causes.retain(|cause| held_by.iter().all(|holder| holder.public != *cause));
    error.causes.extend(held_by.iter().map(|holder| holder.in_full.clone()));
    error
}

/// Logs how an operation ended. Call this only when the API also shows the end, so that the log and the API never
/// disagree. The logged error does not name processes, because every user may read the error of an
/// operation.
fn log_end(ongoing: &OperationHandle, state: OperationState, error: Option<&ApiError>) {
    let operation = ongoing.snapshot();
    match error {
        None => tracing::info!(operation = operation.id, "operation {} ({}) is done", operation.id, operation.kind),
        Some(error) => tracing::error!(
            operation = operation.id,
            "operation {} ({}) ended with state `{state}`: {}",
            operation.id,
            operation.kind,
            error.sentences().into_iter().chain(error.outcome.as_deref()).collect::<Vec<_>>().join("; ")
        ),
    }
}

#[cfg(test)]
mod tests {
    use gpush_api::Code;

    use super::*;

    #[test]
    fn full_error_names_each_holder_instead_of_its_public_text() {
        let holder =
            |number: u32| HeldBy { public: format!("holder {number}"), in_full: format!("pid {number} of alice") };
        let public = ApiError::new(Code::Blocked, "GPU 0 is in use").cause("held by a process").cause("holder 1");
        assert_eq!(in_full(public.clone(), &[holder(1)]).causes, ["held by a process", "pid 1 of alice"]);
        let two = in_full(public.clone().cause("holder 2"), &[holder(1), holder(2)]);
        assert_eq!(two.causes, ["held by a process", "pid 1 of alice", "pid 2 of alice"]);
        assert_eq!(in_full(public.clone(), &[]), public);
    }
}
