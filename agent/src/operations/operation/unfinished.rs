//! The operations that wait or run now.

use gpush_api::{GpuUuid, Operation, OperationState, StepState};

use super::{ActiveOperation, Operations};

impl Operations {
    /// Returns the progress of the operation that is changing the GPU.
    pub(crate) fn progress(&self, uuid: &GpuUuid) -> Option<StepState> {
        self.active().values().find_map(|live| {
            let operation = live.watch.borrow();
            let begun = !matches!(operation.state, OperationState::Queued | OperationState::Waiting);
            let at = operation.plans.iter().position(|plan| plan.gpu_uuid == *uuid);
            at.filter(|_| begun && !operation.state.is_final()).and_then(|at| operation.progress.get(at).cloned())
        })
    }

    /// Reads the operations that wait in the queue, in the order of their ids.
    pub(crate) fn waiting<T>(&self, read: impl Fn(&Operation) -> Option<T>) -> Vec<T> {
        let active = self.active();
        let waiting = active.values().map(|live| live.watch.borrow());
        let waiting = waiting.filter(|one| matches!(one.state, OperationState::Queued | OperationState::Waiting));
        waiting.filter_map(|one| read(&one)).collect()
    }

    /// Returns the number of operations that wait in the queue.
    pub(crate) fn count_waiting(&self) -> usize {
        self.waiting(|_| Some(())).len()
    }

    /// Returns the number of operations that are running or being rolled back.
    pub(crate) fn unfinished(&self) -> usize {
        let goes_on = |live: &&ActiveOperation| match live.watch.borrow().state {
            OperationState::Running | OperationState::Cancelling => true,
            OperationState::Queued
            | OperationState::Waiting
            | OperationState::Interrupted
            | OperationState::Done
            | OperationState::NotStarted
            | OperationState::RolledBack
            | OperationState::Failed => false,
        };
        self.active().values().filter(goes_on).count()
    }

    /// Waits until at least one operation is running or being rolled back. Returns their number.
    pub(crate) async fn wait_for_unfinished(&self) -> usize {
        let mut begun = self.0.begun.subscribe();
        loop {
            match self.unfinished() {
                0 => drop(begun.changed().await),
                unfinished => return unfinished,
            }
        }
    }
}
