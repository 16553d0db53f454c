//! Operations in memory: what is being done, what was done, and who waits for it.
//!
//! The states are those of [`gpush_api::operation`]. Beginning an operation reserves its GPUs: a
//! second one on any of them is refused by name, until the first has ended. The last
//! [`HISTORY`] that ended are kept.
//!
//! ```text
//! begin ──► reserved (no id yet, nothing to see) ──► accepted: queued ──► running ──► final
//!                └─ dropped: GPUs free again
//! ```

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use gpush_api::{Actor, ApiError, Code, GpuPlan, Operation, OperationState, StepState};
use gpush_core::quote::Quoted;
use jiff::Timestamp;
use tokio::sync::watch;

/// Operations kept after they ended.
const HISTORY: usize = 200;

/// All operations. A handle, cheap to clone.
#[derive(Debug, Clone, Default)]
pub(crate) struct Operations(Arc<Mutex<Store>>);

#[derive(Debug, Default)]
struct Store {
    last: u64,
    /// By number, so that the oldest comes first.
    known: BTreeMap<u64, watch::Sender<Operation>>,
    ended: VecDeque<u64>,
    /// Which GPU (by UUID) is whose: an operation's id, or what is being prepared.
    reserved: BTreeMap<String, String>,
}

/// What a GPU is called while its operation has no id yet.
const PREPARING: &str = "an operation that is being planned";

/// GPUs kept for one operation; free again when dropped.
#[derive(Debug)]
pub(crate) struct Reservation {
    operations: Operations,
    uuids: Vec<String>,
}

/// An operation that has begun, for whoever carries it out. Its GPUs are free once it is dropped.
#[derive(Debug)]
pub(crate) struct Ongoing {
    number: u64,
    watch: watch::Sender<Operation>,
    reservation: Reservation,
}

impl Operations {
    fn store(&self) -> MutexGuard<'_, Store> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reserves GPUs, given as (index, UUID).
    ///
    /// # Errors
    /// When one of them is another operation's, which is named.
    pub(crate) fn reserve(&self, gpus: &[(u32, String)]) -> Result<Reservation, ApiError> {
        let mut store = self.store();
        for (index, uuid) in gpus {
            if let Some(holder) = store.reserved.get(uuid) {
                let error = ApiError::new(Code::Conflict, format!("GPU {index} ({uuid}) is being changed by {holder}"));
                return Err(error
                    .hint("wait until it has ended, then ask again: `gpushctl status` shows its progress")
                    .retryable());
            }
        }
        for (_, uuid) in gpus {
            store.reserved.insert(uuid.clone(), PREPARING.to_owned());
        }
        drop(store);
        let uuids = gpus.iter().map(|(_, uuid)| uuid.clone()).collect();
        Ok(Reservation { operations: self.clone(), uuids })
    }

    /// Who is changing the GPU, if somebody is.
    pub(crate) fn holder(&self, uuid: &str) -> Option<String> {
        self.store().reserved.get(uuid).cloned()
    }

    /// Number of operations that have not ended.
    pub(crate) fn unfinished(&self) -> usize {
        self.store().known.values().filter(|watch| !watch.borrow().state.is_final()).count()
    }

    /// All that are known, oldest first.
    pub(crate) fn all(&self) -> Vec<Operation> {
        self.store().known.values().map(|watch| watch.borrow().clone()).collect()
    }

    /// One as it is now.
    pub(crate) fn get(&self, id: &str) -> Result<Operation, ApiError> {
        self.watch(id).map(|watch| watch.borrow().clone())
    }

    /// One once its revision is past `after`, or as it is after `wait`.
    pub(crate) async fn wait(&self, id: &str, after: u64, wait: Duration) -> Result<Operation, ApiError> {
        let mut watch = self.watch(id)?;
        let newer = watch.wait_for(|operation| operation.revision > after || operation.state.is_final());
        // An error means that it was forgotten meanwhile; what we hold is its last state.
        let _ = tokio::time::timeout(wait, newer).await.map(|found| found.is_ok());
        Ok(watch.borrow().clone())
    }

    /// Ends an operation whose work broke off; its GPUs are free already.
    pub(crate) fn abandon(&self, id: &str, error: ApiError) {
        let mut store = self.store();
        let Some(number) = id.strip_prefix("op-").and_then(|number| number.parse().ok()) else { return };
        if let Some(watch) = store.known.get(&number) {
            end(watch, OperationState::Failed, Some(error));
            store.forget_oldest(number);
        }
    }

    fn watch(&self, id: &str) -> Result<watch::Receiver<Operation>, ApiError> {
        let store = self.store();
        let number = id.strip_prefix("op-").and_then(|number| number.parse::<u64>().ok());
        let number = number.filter(|n| id == format!("op-{n}"));
        if let Some(watch) = number.and_then(|number| store.known.get(&number)) {
            return Ok(watch.subscribe());
        }
        let error = ApiError::new(Code::NotFound, format!("there is no operation {}", Quoted(id)));
        Err(match number {
            Some(number) if number > 0 && number <= store.last => {
                error.cause(format!("only the last {HISTORY} that ended are kept"))
            }
            Some(_) | None => error.cause("operations are numbered anew each time gpushd starts"),
        }
        .hint("`gpushctl operation list` shows those that are known"))
    }
}

impl Reservation {
    /// Makes an operation of it.
    pub(crate) fn begin(self, kind: &str, by: Actor, plans: Vec<GpuPlan>) -> Ongoing {
        let mut store = self.operations.store();
        store.last += 1;
        let number = store.last;
        let id = format!("op-{number}");
        for uuid in &self.uuids {
            store.reserved.insert(uuid.clone(), format!("operation {id}"));
        }
        let progress = plans.iter().map(waiting).collect();
        let watch = watch::Sender::new(Operation {
            id,
            revision: 1,
            kind: kind.to_owned(),
            state: OperationState::Queued,
            by,
            created_at: Timestamp::now(),
            ended_at: None,
            plans,
            progress,
            error: None,
        });
        store.known.insert(number, watch.clone());
        drop(store);
        Ongoing { number, watch, reservation: self }
    }
}

fn waiting(plan: &GpuPlan) -> StepState {
    let steps = plan.steps.len() + usize::from(plan.enables_mig);
    StepState {
        gpu: plan.gpu,
        done: 0,
        total: u32::try_from(steps).unwrap_or(u32::MAX),
        doing: None,
        rolling_back: false,
        error: None,
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut store = self.operations.store();
        for uuid in &self.uuids {
            store.reserved.remove(uuid);
        }
    }
}

impl Ongoing {
    /// As it is now.
    pub(crate) fn snapshot(&self) -> Operation {
        self.watch.borrow().clone()
    }

    /// Its id.
    pub(crate) fn id(&self) -> String {
        self.watch.borrow().id.clone()
    }

    /// Changes it, and tells whoever waits.
    pub(crate) fn update(&self, change: impl FnOnce(&mut Operation)) {
        self.watch.send_modify(|operation| {
            change(operation);
            operation.revision += 1;
        });
    }

    /// Changes the progress of one GPU by its position in the plans.
    pub(crate) fn progress(&self, position: usize, change: impl FnOnce(&mut StepState)) {
        self.update(|operation| {
            if let Some(progress) = operation.progress.get_mut(position) {
                change(progress);
            }
        });
    }

    /// Ends it. Its GPUs are free before anybody is told, so that whoever waited for the end can
    /// go on with them.
    pub(crate) fn end(self, state: OperationState, error: Option<ApiError>) {
        let Self { number, watch, reservation } = self;
        let operations = reservation.operations.clone();
        drop(reservation);
        end(&watch, state, error);
        operations.store().forget_oldest(number);
    }
}

impl Store {
    /// Notes that one has ended, and forgets those that ended long ago.
    fn forget_oldest(&mut self, number: u64) {
        self.ended.push_back(number);
        while self.ended.len() > HISTORY {
            if let Some(oldest) = self.ended.pop_front() {
                self.known.remove(&oldest);
            }
        }
    }
}

fn end(watch: &watch::Sender<Operation>, state: OperationState, error: Option<ApiError>) {
    watch.send_modify(|operation| {
        operation.state = state;
        operation.error = error;
        operation.ended_at = Some(Timestamp::now());
        for progress in &mut operation.progress {
            progress.doing = None;
        }
        operation.revision += 1;
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn by() -> Actor {
        Actor { uid: 0, user: None, pid: None }
    }

    fn gpu(index: u32) -> (u32, String) {
        (index, format!("GPU-{index}"))
    }

    #[test]
    fn a_gpu_is_one_operations_at_a_time_and_the_refusal_names_it() {
        let operations = Operations::default();
        let first = operations.reserve(&[gpu(0), gpu(1)]).unwrap();
        let error = operations.reserve(&[gpu(2), gpu(1)]).unwrap_err();
        assert_eq!(error.message, "GPU 1 (GPU-1) is being changed by an operation that is being planned");
        let first = first.begin("mig.apply", by(), Vec::new());
        let error = operations.reserve(&[gpu(1)]).unwrap_err();
        assert_eq!((error.code, error.retryable), (Code::Conflict, true));
        assert_eq!(error.message, "GPU 1 (GPU-1) is being changed by operation op-1");
        // The refused one kept nothing.
        let other = operations.reserve(&[gpu(2)]).unwrap().begin("mig.apply", by(), Vec::new());
        assert_eq!((other.id().as_str(), operations.unfinished()), ("op-2", 2));
        first.end(OperationState::Done, None);
        operations.reserve(&[gpu(0), gpu(1)]).unwrap();
        assert_eq!(operations.holder("GPU-0"), None);
    }

    #[tokio::test(start_paused = true)]
    async fn waiting_returns_at_the_next_revision_or_when_time_is_up() {
        let operations = Operations::default();
        let ongoing = operations.reserve(&[gpu(0)]).unwrap().begin("mig.apply", by(), Vec::new());
        let wait = Duration::from_secs(10);
        assert_eq!(operations.wait("op-1", 0, wait).await.unwrap().revision, 1);
        assert_eq!(operations.wait("op-1", 1, wait).await.unwrap().revision, 1);
        let waiting = tokio::spawn({
            let operations = operations.clone();
            async move { operations.wait("op-1", 1, wait).await.unwrap() }
        });
        tokio::task::yield_now().await;
        ongoing.update(|operation| operation.state = OperationState::Running);
        assert_eq!(waiting.await.unwrap().state, OperationState::Running);
        ongoing.end(OperationState::Done, None);
        // Nothing more will come: no waiting.
        let done = operations.wait("op-1", 99, wait).await.unwrap();
        assert!(done.state.is_final() && done.ended_at.is_some());
    }

    #[test]
    fn history_is_bounded_and_what_is_gone_is_said() {
        let operations = Operations::default();
        for _ in 0..HISTORY + 3 {
            operations.reserve(&[gpu(0)]).unwrap().begin("mig.apply", by(), Vec::new()).end(OperationState::Done, None);
        }
        assert_eq!(operations.all().len(), HISTORY);
        assert_eq!(operations.all()[0].id, "op-4");
        assert!(operations.get("op-3").unwrap_err().causes[0].contains("last 200"));
        for never in ["op-0", "op-999", "op-04", "op-", "x", ""] {
            let error = operations.get(never).unwrap_err();
            assert_eq!(error.code, Code::NotFound, "{never}");
            assert!(!error.causes[0].contains("last 200"), "{never}: {error:?}");
        }
    }
}
