//! One operation that has not ended, for whoever carries it out.
//!
//! What matters after a crash is in the journal before it happens: the intent before the first
//! driver call, the turn to rolling back before the first step back, the end before anybody hears
//! of it. Progress is for people: it is written without waiting.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use gpush_api::{Actor, ApiError, GpuPlan, Operation, OperationState, StepState};
use gpush_store::{Intent, OperationId, StoreError, Tx, may_become};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::{Operations, naming, wire};
use crate::lanes::Claim;

/// An event of an operation.
#[derive(Debug, Default)]
struct Told {
    /// What was just noted of it.
    note: Option<String>,
}

/// Notes that are kept.
const MOST_NOTES: usize = 16;

/// An operation that goes on. Its GPUs are free once it is dropped.
#[derive(Debug)]
pub(crate) struct Ongoing {
    pub(super) id: OperationId,
    pub(super) operations: Operations,
    pub(super) watch: watch::Sender<Operation>,
    /// Somebody wants it taken back.
    pub(super) cancelled: CancellationToken,
    /// Who does, set before `cancelled` is.
    pub(super) cancelled_by: Arc<OnceLock<Actor>>,
    pub(super) claim: Mutex<Option<Claim>>,
}

impl Ongoing {
    /// As it is now.
    pub(crate) fn snapshot(&self) -> Operation {
        self.watch.borrow().clone()
    }

    /// Its id, `op-<number>`.
    pub(crate) fn id(&self) -> String {
        self.id.to_string()
    }

    /// Its number in the journal.
    pub(crate) fn number(&self) -> OperationId {
        self.id
    }

    /// Ends when somebody wants it taken back.
    pub(crate) fn cancelled(&self) -> &CancellationToken {
        &self.cancelled
    }

    /// Why it is taken back once somebody has cancelled it, and who has, as far as this agent knows.
    pub(crate) fn why_cancelled(&self) -> ApiError {
        super::cancelled(self.id, self.cancelled_by.get())
    }

    /// Changes it and tells those who follow it, in the order of the changes. What `change` gives is
    /// told to everybody who listens to events, unless it is `None`.
    fn update(&self, change: impl FnOnce(&mut Operation) -> Option<Told>) {
        self.watch.send_modify(|operation| {
            let told = change(operation);
            operation.revision += 1;
            if let Some(Told { note }) = told {
                self.operations.0.events.publish(wire::event(operation, note));
            }
        });
    }

    /// Changes the progress of one GPU by its position in the plans.
    pub(crate) fn progress(&self, position: usize, change: impl FnOnce(&mut StepState)) {
        let mut lasting = None;
        self.update(|operation| {
            let progress = operation.progress.get_mut(position)?;
            let before = progress.clone();
            change(progress);
            // A step that landed is told with what is done next, which follows at once.
            let plan = operation.plans.get(position).map(std::slice::from_ref).unwrap_or_default();
            let told = |error| wire::bounded(naming::once(error, plan), wire::FEW_CAUSES);
            progress.error = progress.error.take().map(told);
            let begins = progress.doing.is_some() && before.doing != progress.doing;
            let turns = (before.rolling_back, &before.error) != (progress.rolling_back, &progress.error);
            if (before.done, before.rolling_back, &before.error)
                != (progress.done, progress.rolling_back, &progress.error)
            {
                lasting = Some(operation.progress.clone());
            }
            (begins || turns).then(Told::default)
        });
        if let Some(mut progress) = lasting {
            progress.iter_mut().for_each(|gpu| gpu.doing = None);
            let id = self.id;
            // For people: nothing waits for it, and its loss costs nothing.
            drop(self.operations.store().write(move |tx| tx.progress(id, progress.clone()).map(|_| ())));
        }
    }

    /// Says what else happened to it.
    pub(crate) fn note(&self, note: impl Into<String>) {
        let note = note.into();
        self.change_notes(&note.clone(), |notes| notes.push(note));
    }

    /// Says what it waits for now, in place of what it waited for before.
    pub(crate) fn waits(&self, what: &str) {
        let note = format!("{}{what}", wire::WAITS);
        self.change_notes(&note.clone(), |notes| {
            notes.retain(|earlier| !earlier.starts_with(wire::WAITS));
            notes.push(note);
        });
    }

    /// The record must stay small: an end that finds no room in it could not be recorded.
    fn change_notes(&self, news: &str, change: impl FnOnce(&mut Vec<String>)) {
        let mut kept = Vec::new();
        self.update(|operation| {
            change(&mut operation.notes);
            if let Some(last) = operation.notes.last_mut() {
                *last = wire::cut(last);
            }
            if operation.notes.len() > MOST_NOTES {
                // What it began with and what happened last say most.
                operation.notes.remove(MOST_NOTES / 4);
            }
            kept.clone_from(&operation.notes);
            Some(Told { note: Some(wire::cut(news)) })
        });
        let id = self.id;
        drop(self.operations.store().write(move |tx| tx.notes(id, kept.clone()).map(|_| ())));
    }

    /// Claims its GPUs again, for one that was begun by an agent before this one.
    ///
    /// # Errors
    /// When one of them is another operation's.
    pub(crate) fn claim_again(&self) -> Result<(), ApiError> {
        let claim = self.operations.0.lanes.claim_again(&super::gpus(&self.watch.borrow().plans))?;
        claim.begin(&self.id.to_string());
        *self.claim.lock().unwrap_or_else(PoisonError::into_inner) = Some(claim);
        Ok(())
    }

    /// Starts one that was queued or waiting: its GPUs are `claim`, its plan is as it is now. The
    /// first driver call may be made once this returns.
    ///
    /// # Errors
    /// When it can't be recorded; then it has not started.
    pub(crate) async fn start(&self, claim: Claim, intent: Intent, plans: Vec<GpuPlan>) -> Result<(), ApiError> {
        claim.begin(&self.id.to_string());
        let id = self.id;
        let progress: Vec<StepState> = plans.iter().map(wire::not_begun).collect();
        let recorded = progress.clone();
        self.operations.store().write(move |tx| tx.start(id, intent.clone(), recorded.clone())).await?;
        *self.claim.lock().unwrap_or_else(PoisonError::into_inner) = Some(claim);
        self.update(|operation| {
            operation.state = OperationState::Running;
            operation.begun = true;
            waits_no_more(operation);
            operation.plans = plans;
            operation.progress = progress;
            Some(Told::default())
        });
        Ok(())
    }

    /// Moves it to a state that is not final, durably.
    ///
    /// # Errors
    /// When it can't go there, or it can't be recorded.
    pub(crate) async fn advance(&self, to: OperationState) -> Result<(), ApiError> {
        let id = self.id;
        self.operations.store().write_ending(move |tx| tx.advance(id, to).map(|_| ())).await?;
        self.update(|operation| {
            // The record went on meanwhile, and memory with it.
            if may_become(operation.state, to) {
                operation.state = to;
            }
            Some(Told::default())
        });
        Ok(())
    }

    /// Says, durably, that it is taken back from now on, and why.
    ///
    /// # Errors
    /// When it can't be recorded.
    pub(crate) async fn turn_back(&self, why: &ApiError) -> Result<(), ApiError> {
        let why = naming::once(why.clone(), &self.snapshot().plans);
        let (id, recorded) = (self.id, why.clone());
        self.operations.store().write_ending(move |tx| tx.turn_back(id, recorded.clone()).map(|_| ())).await?;
        self.update(|operation| {
            operation.state = OperationState::Cancelling;
            operation.error = Some(why.clone());
            Some(Told::default())
        });
        Ok(())
    }

    /// Ends it, together with what `also` records, of which `then` is told once it is on record. Its
    /// GPUs are free after that and before anybody is told, so that whoever waited for the end can
    /// go on with them.
    ///
    /// An end that can't be recorded is told all the same, with that as a cause, and recorded as soon
    /// as it can be.
    pub(crate) async fn end<T: Send + 'static>(
        self: Arc<Self>,
        state: OperationState,
        error: Option<ApiError>,
        mut also: impl FnMut(&mut Tx<'_>) -> Result<T, StoreError> + Send + 'static,
        then: impl FnOnce(T),
    ) {
        let plans = self.snapshot().plans;
        let error = error.map(|error| wire::bounded(naming::once(error, &plans), wire::MOST_CAUSES));
        let (id, kept, kept_for_later) = (self.id, error.clone(), error.clone());
        let watch = self.watch.clone();
        let recorded = self
            .operations
            .store()
            .write_ending(move |tx| {
                let recorded = also(tx)?;
                match tx.end(id, state, kept.clone()) {
                    Ok(_) => {}
                    // Whoever cancelled it before it was begun has recorded that.
                    Err(StoreError::Transition { from: OperationState::RolledBack, .. })
                        if state == OperationState::RolledBack => {}
                    Err(error) => return Err(error),
                }
                // Two more than the last: that it was cancelled may be on record and not told yet.
                let told = watch.borrow().revision;
                Ok((recorded, tx.raise_revision(id, told + 2)?.revision))
            })
            .await;
        let mut error = error;
        let lost = recorded.as_ref().err().map(|cause| {
            tracing::error!(op = %id, "its end can't be recorded: {cause}");
            format!("its end could not be recorded: {cause}")
        });
        if let Some(lost) = &lost
            && let Some(error) = &mut error
        {
            error.causes.push(lost.clone());
        }
        let revision = recorded.as_ref().ok().map(|(_, revision)| *revision);
        if let Ok((recorded, _)) = recorded {
            then(recorded);
        }
        drop(self.claim.lock().unwrap_or_else(PoisonError::into_inner).take());
        self.update(|operation| {
            operation.state = state;
            waits_no_more(operation);
            operation.error = error;
            operation.ended_at = Some(jiff::Timestamp::now());
            operation.notes.extend(lost.filter(|_| operation.error.is_none()));
            for progress in &mut operation.progress {
                progress.doing = None;
            }
            // As it is recorded, this change counted: the journal answers for it in a moment.
            operation.revision = operation.revision.max(revision.map_or(0, |revision| revision - 1));
            Some(Told::default())
        });
        if revision.is_some() {
            self.operations.forget(id);
        } else {
            tokio::spawn(self.operations.clone().record_end(id, state, kept_for_later));
        }
    }
}

fn waits_no_more(operation: &mut Operation) {
    operation.notes = std::mem::take(&mut operation.notes).into_iter().map(wire::past).collect();
}
