//! One unfinished operation, for the task that executes it.
//!
//! For recovery, gpushd writes these records in advance: the plan before the first driver call, the start of a rollback
//! before the first step of the rollback, and the end before clients see the end. Progress is only informative, so
//! gpushd does not wait until it is recorded.

use std::sync::{Arc, OnceLock};

use gpush_api::{Actor, ApiError, GpuPlan, Operation, OperationState, StepState};
use gpush_locked::Locked;
use gpush_store::{Intent, OperationId, StoreError, may_become};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::{
    Operations,
    cancel::cancelled,
    ending::{ApplyEffects, EndWrites, Ending},
    naming, wire,
};
use crate::state::lanes::Claim;

/// Content of an event about the operation.
#[derive(Debug, Default)]
struct EventNote {
    /// The note that was just added, if any.
    note: Option<String>,
}

/// Maximum number of notes that an operation keeps.
const MOST_NOTES: usize = 16;

/// An unfinished operation. Dropping this value releases the GPUs of the operation.
#[derive(Debug)]
pub(crate) struct OperationHandle {
    pub(super) id: OperationId,
    pub(super) operations: Operations,
    pub(super) watch: watch::Sender<Operation>,
    /// Cancelled when a caller cancels the operation.
    pub(super) cancelled: CancellationToken,
    /// The user who cancelled the operation. Set before `cancelled`.
    pub(super) cancelled_by: Arc<OnceLock<Actor>>,
    pub(super) blocked: super::Blocked,
    pub(super) claim: Locked<Option<Claim>>,
}

impl OperationHandle {
    /// Returns the current state.
    pub(crate) fn snapshot(&self) -> Operation {
        self.watch.borrow().clone()
    }

    /// Returns the id, `op-<number>`.
    pub(crate) fn id(&self) -> String {
        self.id.to_string()
    }

    /// Returns the number in the journal.
    pub(crate) fn number(&self) -> OperationId {
        self.id
    }

    /// Returns the token that a cancellation cancels.
    pub(crate) fn cancelled(&self) -> &CancellationToken {
        &self.cancelled
    }

    /// Returns the error of a cancelled operation. The error names the user who cancelled the operation, if this gpushd
    /// knows that user.
    pub(crate) fn why_cancelled(&self) -> ApiError {
        cancelled(self.id, self.cancelled_by.get())
    }

    /// Changes the operation and notifies its watchers. If `change` returns `Some`, also publishes an event.
    fn update(&self, change: impl FnOnce(&mut Operation) -> Option<EventNote>) {
        self.watch.send_modify(|operation| {
            let reported = change(operation);
            operation.revision += 1;
            if let Some(EventNote { note }) = reported {
                self.operations.0.events.publish(wire::event(operation, note));
            }
        });
    }

    /// Changes the progress of the GPU at `position` in the plans.
    pub(crate) fn progress(&self, position: usize, change: impl FnOnce(&mut StepState)) {
        let mut lasting = None;
        self.update(|operation| {
            let progress = operation.progress.get_mut(position)?;
            let before = progress.clone();
            change(progress);
            // Publish no event when a step ends, because the next step begins at once and publishes an event.
            let plan = operation.plans.get(position).map(std::slice::from_ref).unwrap_or_default();
            let reported = |error| wire::bounded(naming::once(error, plan), wire::FEW_CAUSES);
            progress.error = progress.error.take().map(reported);
            let begins = progress.doing.is_some() && before.doing != progress.doing;
            let turns = (before.rolling_back, &before.error) != (progress.rolling_back, &progress.error);
            if (before.done, before.rolling_back, before.restored, &before.error)
                != (progress.done, progress.rolling_back, progress.restored, &progress.error)
            {
                lasting = Some(operation.progress.clone());
            }
            (begins || turns).then(EventNote::default)
        });
        if let Some(mut progress) = lasting {
            progress.iter_mut().for_each(|gpu| gpu.doing = None);
            let id = self.id;
            // Do not wait for this record. Progress is only informative, so the record may be lost.
            drop(self.operations.store().write(move |tx| tx.progress(id, progress.clone()).map(|_| ())));
        }
    }

    /// Adds a note.
    pub(crate) fn note(&self, note: impl Into<String>) {
        let note = note.into();
        self.change_notes(&note.clone(), |notes| notes.push(note));
    }

    /// Replaces the error that only administrators see: why the operation waits or did not start.
    pub(crate) fn set_error_in_full(&self, error: Option<ApiError>) {
        let reported = |error| wire::bounded(naming::once(error, &self.snapshot().plans), wire::MOST_CAUSES);
        *self.blocked.lock() = error.map(reported);
    }

    /// Returns the error that only administrators see.
    pub(crate) fn error_in_full(&self) -> Option<ApiError> {
        self.blocked.lock().clone()
    }

    /// Replaces the reasons why the operation waits, one sentence each.
    pub(crate) fn set_wait_reasons(&self, reasons: &[String]) {
        let reasons: Vec<String> = reasons.iter().map(|reason| wire::cut(reason)).collect();
        self.update(|operation| {
            // The event is one line. The operation itself has all reasons.
            let note = format!("waits: {}", reasons.first().map_or("", String::as_str));
            operation.waits_for = reasons;
            Some(EventNote { note: Some(wire::cut(&note)) })
        });
    }

    /// Changes the notes, and limits their number and length. If they were too large, gpushd could not record the end
    /// of the operation.
    fn change_notes(&self, news: &str, change: impl FnOnce(&mut Vec<String>)) {
        let mut kept = Vec::new();
        self.update(|operation| {
            change(&mut operation.notes);
            if let Some(last) = operation.notes.last_mut() {
                *last = wire::cut(last);
            }
            if operation.notes.len() > MOST_NOTES {
                // Remove a note from the middle, because the first and the last notes are the most useful.
                operation.notes.remove(MOST_NOTES / 4);
            }
            kept.clone_from(&operation.notes);
            Some(EventNote { note: Some(wire::cut(news)) })
        });
        let id = self.id;
        drop(self.operations.store().write(move |tx| tx.notes(id, kept.clone()).map(|_| ())));
    }

    /// Claims the GPUs of an operation that a previous gpushd began.
    ///
    /// # Errors
    /// If another operation has claimed one of the GPUs.
    pub(crate) fn claim_again(&self) -> Result<(), ApiError> {
        let claim = self.operations.0.lanes.claim_again(&super::gpus(&self.watch.borrow().plans))?;
        claim.begin(&self.id.to_string());
        *self.claim.lock() = Some(claim);
        Ok(())
    }

    /// Starts an operation that waited in the queue. `claim` contains the GPUs of the operation, and `plans` its
    /// current plans. gpushd may make driver calls for the operation only after this function has returned.
    ///
    /// # Errors
    /// If the start cannot be recorded. After an error, the operation has not started.
    pub(crate) async fn start(&self, claim: Claim, intent: Intent, plans: Vec<GpuPlan>) -> Result<(), StoreError> {
        claim.begin(&self.id.to_string());
        self.operations.record_ends().await?;
        let id = self.id;
        let progress: Vec<StepState> = plans.iter().map(wire::not_begun).collect();
        let recorded = progress.clone();
        let before = wire::layouts_before(&intent.gpus);
        self.operations.store().write(move |tx| tx.start(id, intent.clone(), recorded.clone())).await?;
        *self.claim.lock() = Some(claim);
        let mut reasons = Vec::new();
        self.update(|operation| {
            operation.state = OperationState::Running;
            operation.begun = true;
            operation.layouts_before = before;
            operation.plans = plans;
            operation.progress = progress;
            reasons = std::mem::take(&mut operation.waits_for);
            Some(EventNote::default())
        });
        self.operations.0.begun.send_replace(());
        self.operations.note_begun(&self.snapshot());
        if let Some(reason) = reasons.first() {
            self.note(format!("it waited: {reason}"));
        }
        Ok(())
    }

    /// Changes the state of the operation, first in the journal and then in memory. The new state must not be final.
    ///
    /// # Errors
    /// If the operation may not change to this state, or the change cannot be recorded.
    pub(crate) async fn advance(&self, to: OperationState) -> Result<(), ApiError> {
        let id = self.id;
        self.operations.store().write_ending(move |tx| tx.advance(id, to).map(|_| ())).await?;
        self.update(|operation| {
            // Check the state again, because a cancellation may have changed it since the record was written.
            if may_become(operation.state, to) {
                operation.state = to;
            }
            Some(EventNote::default())
        });
        Ok(())
    }

    /// Records that the operation is being rolled back, with the reason.
    ///
    /// # Errors
    /// If the rollback cannot be recorded.
    pub(crate) async fn begin_rollback(&self, why: &ApiError) -> Result<(), ApiError> {
        let why = naming::once(why.clone(), &self.snapshot().plans);
        let (id, recorded) = (self.id, why.clone());
        self.operations.store().write_ending(move |tx| tx.begin_rollback(id, recorded.clone()).map(|_| ())).await?;
        self.update(|operation| {
            operation.state = OperationState::Cancelling;
            operation.error = Some(why.clone());
            Some(EventNote::default())
        });
        Ok(())
    }

    /// Ends the operation. `also` writes further changes in the transaction that records the end. After the
    /// transaction, `then` applies these changes in memory. Releases the GPUs before clients see the end, so that a
    /// client that waited for the end can use the GPUs.
    ///
    /// If the end cannot be recorded, gpushd shows the end to clients anyway, with the failure as a cause or a note.
    /// gpushd tries again until the end is recorded.
    pub(crate) async fn end(
        self: Arc<Self>,
        state: OperationState,
        error: Option<ApiError>,
        also: EndWrites,
        then: ApplyEffects,
    ) {
        let plans = self.snapshot().plans;
        let mut error = error.map(|error| wire::bounded(naming::once(error, &plans), wire::MOST_CAUSES));
        let also = Arc::new(Locked::new(also));
        let ending = Ending { id: self.id, state, error: error.clone(), also, then };
        // First record the ends of earlier operations that are not recorded yet.
        let recorded = match self.operations.record_ends().await {
            Ok(()) => self.operations.record_end(&ending).await,
            Err(error) => Err(error),
        };
        let (revision, lost) = match recorded {
            Ok((effects, revision)) => {
                (ending.then)(&effects);
                (Some(revision), None)
            }
            Err(cause) => {
                tracing::error!(operation = %self.id, "the end of operation {} cannot be recorded: {cause}", self.id);
                self.operations.record_later(ending).await;
                (None, Some(format!("the end of the operation could not be recorded: {cause}")))
            }
        };
        if let Some(lost) = &lost
            && let Some(error) = &mut error
        {
            error.causes.push(lost.clone());
        }
        drop(self.claim.lock().take());
        self.update(|operation| {
            operation.state = state;
            operation.waits_for.clear();
            operation.error = error;
            operation.ended_at = Some(jiff::Timestamp::now());
            operation.notes.extend(lost.filter(|_| operation.error.is_none()));
            for progress in &mut operation.progress {
                progress.doing = None;
            }
            // `update` adds 1 to the revision. The revision then equals the revision in the journal, which answers
            // later requests.
            operation.revision = operation.revision.max(revision.map_or(0, |revision| revision - 1));
            Some(EventNote::default())
        });
        if revision.is_some() {
            self.operations.forget(self.id);
        }
    }
}
