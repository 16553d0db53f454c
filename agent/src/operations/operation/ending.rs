//! Records how operations end. If the record fails, tries again.
//!
//! ```text
//! operation ends ─► record ─┬─ recorded ─► its effects are applied, later requests are served from the journal
//!                           └─ failed ──► unrecorded ─┬─ recorded by a later attempt
//!                                                     ├─ recorded before the next operation begins
//!                                                     └─ gpushd exits: the next gpushd recovers the operation
//! ```
//!
//! The end of an operation and all resulting changes are one transaction: overrides, conditions, MPS targets, the audit
//! trail. gpushd repeats this transaction until it succeeds. It records ends in the order in which the operations
//! ended, and before any later operation begins. So a late record never overwrites what a later operation changed.

use std::{fmt, sync::Arc, time::Duration};

use gpush_api::{ApiError, OperationState};
use gpush_locked::Locked;
use gpush_store::{OperationId, StoreError, Tx};
use tokio::sync::Mutex;

use super::Operations;
use crate::{
    state::{OperationLeaseEffects, OverrideEffect},
    system::{backoff::backoff, tasks::TaskName},
};

/// First and longest pause between two attempts to record the end of an operation.
const RECORD: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));

/// Writes further changes in the transaction that ends an operation. gpushd may call this function again if the
/// transaction fails.
pub(crate) type EndWrites = Box<dyn FnMut(&mut Tx<'_>) -> Result<EndEffects, StoreError> + Send>;

/// Applies the changes that were recorded with the end of an operation.
pub(crate) type ApplyEffects = Box<dyn FnOnce(&EndEffects) + Send + Sync>;

/// The changes that were recorded with the end of an operation.
#[derive(Debug, Clone, Default)]
pub(crate) struct EndEffects {
    pub(crate) overrides: Vec<OverrideEffect>,
    pub(crate) leases: OperationLeaseEffects,
}

/// Ended operations whose end is not recorded yet, oldest first.
pub(super) type Unrecorded = Mutex<Vec<Ending>>;

/// The end of an operation.
pub(super) struct Ending {
    pub(super) id: OperationId,
    pub(super) state: OperationState,
    pub(super) error: Option<ApiError>,
    pub(super) also: Arc<Locked<EndWrites>>,
    pub(super) then: ApplyEffects,
}

impl fmt::Debug for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ending").field("id", &self.id).field("state", &self.state).finish_non_exhaustive()
    }
}

impl Operations {
    /// Records the end of an operation. Returns the changes that were recorded with the end, and the revision of the
    /// record.
    pub(super) async fn record_end(&self, ending: &Ending) -> Result<(EndEffects, u64), StoreError> {
        let (id, state, error, also) = (ending.id, ending.state, ending.error.clone(), ending.also.clone());
        let watch = self.active().get(&id).map(|live| live.watch.clone());
        let written = self.store().write_ending(move |tx| {
            let effects = also.lock()(tx)?;
            match tx.end(id, state, error.clone()) {
                Ok(_) => {}
                // The operation was cancelled before it began. The record of the cancellation already contains the end
                // of the operation.
                Err(StoreError::Transition { from: OperationState::NotStarted, .. })
                    if state == OperationState::NotStarted => {}
                Err(error) => return Err(error),
            }
            // Raise the revision by two, because one revision may be missing: a recorded cancellation may not be
            // published yet.
            let published = watch.as_ref().map_or(0, |watch| watch.borrow().revision);
            Ok((effects, tx.raise_revision(id, published + 2)?.revision))
        });
        written.await
    }

    /// Keeps the end of an operation that could not be recorded. Tries again in the background until the end is
    /// recorded.
    pub(super) async fn record_later(&self, ending: Ending) {
        let number = ending.id;
        self.0.unrecorded.lock().await.push(ending);
        let operations = self.clone();
        self.0.tasks.spawn_for(TaskName::OperationRecord, format!("operation {number}"), move || {
            let operations = operations.clone();
            async move {
                for pause in backoff(RECORD) {
                    tokio::time::sleep(pause).await;
                    match operations.record_ends().await {
                        Ok(()) | Err(StoreError::Closed) => return,
                        Err(_) => {}
                    }
                }
            }
        });
    }

    /// Records all ends that are not recorded yet, oldest first.
    ///
    /// # Errors
    /// If an end still cannot be recorded.
    pub(super) async fn record_ends(&self) -> Result<(), StoreError> {
        let mut unrecorded = self.0.unrecorded.lock().await;
        while let Some(ending) = unrecorded.first() {
            match self.record_end(ending).await {
                Ok((effects, _)) => {
                    let ending = unrecorded.remove(0);
                    (ending.then)(&effects);
                    tracing::info!(operation = %ending.id, "the end of operation {} is recorded now", ending.id);
                    self.forget(ending.id);
                }
                Err(error) if may_succeed_later(&error) => return Err(error),
                Err(error) => {
                    // Give up this record, so that it does not block later operations. The next gpushd recovers the
                    // operation.
                    tracing::error!(
                        operation = %ending.id,
                        "the end of operation {} cannot be recorded: {error}",
                        ending.id
                    );
                    unrecorded.remove(0);
                }
            }
        }
        Ok(())
    }
}

/// Returns whether a later attempt to record the end may succeed. This is also true for errors that affect every write,
/// such as a full disk.
fn may_succeed_later(error: &StoreError) -> bool {
    match error {
        StoreError::Full { .. }
        | StoreError::Busy { .. }
        | StoreError::ReadOnly { .. }
        | StoreError::Gone { .. }
        | StoreError::Uncertain { .. }
        | StoreError::Broken { .. }
        | StoreError::Corrupt { .. }
        | StoreError::DamagedUse { .. }
        | StoreError::Closed => true,
        StoreError::Transition { .. }
        | StoreError::NoSuchOperation(_)
        | StoreError::LeaseTransition { .. }
        | StoreError::NoSuchLease(_)
        | StoreError::TooLarge { .. }
        | StoreError::Unreadable { .. }
        | StoreError::Internal(_)
        | StoreError::Refused(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

    use gpush_api::{Actor, Code, GpuIndex, GpuPlan};
    use gpush_store::{AuditQuery, GpuIntent, Intent, NewAudit, Options, Store};
    use tokio::sync::oneshot;

    use super::*;
    use crate::{
        operations::operation::{OperationHandle, OperationSpec, START},
        state::{Events, State, lanes::Lanes},
        system::tasks::Tasks,
    };

    fn new(gpu: u32) -> OperationSpec {
        let plan = GpuPlan { gpu: GpuIndex(gpu), gpu_uuid: format!("GPU-{gpu}").into(), ..GpuPlan::default() };
        OperationSpec {
            kind: "mig.apply".to_owned(),
            by: Actor { uid: 0, user: None, pid: None },
            reason: None,
            intent: Intent { gpus: vec![GpuIntent { before: None, plan }], ..Intent::default() },
            also: Box::new(|_, _| Ok(())),
        }
    }

    /// Returns a function that writes one audit record. It fails while `is_full` is set, as on a full disk.
    fn writes(is_full: &Arc<AtomicBool>) -> EndWrites {
        let is_full = is_full.clone();
        Box::new(move |tx| {
            if is_full.load(Relaxed) {
                return Err(StoreError::Full { path: "/full".into() });
            }
            let (action, object, result) = ("mig.apply".to_owned(), "op-1".to_owned(), "done".to_owned());
            tx.audit(NewAudit { by: None, action, object, result, detail: serde_json::Value::Null })?;
            Ok(EndEffects::default())
        })
    }

    struct Scene {
        operations: Operations,
        _directory: tempfile::TempDir,
    }

    impl Scene {
        fn new() -> Self {
            let directory = tempfile::tempdir().unwrap();
            let store = Store::open(directory.path(), Options::default()).unwrap().store;
            let operations =
                Operations::new(store, Events::new("test"), Lanes::new(State::empty()), Tasks::for_tests());
            Self { operations, _directory: directory }
        }

        async fn begin(&self, gpu: u32) -> Result<Arc<OperationHandle>, ApiError> {
            let claim = self.operations.0.lanes.claim(&[(GpuIndex(gpu), format!("GPU-{gpu}").into())]).unwrap();
            self.operations.begin(claim, new(gpu)).await
        }

        async fn audit_records(&self) -> usize {
            self.operations.store().read(|view| view.audit(&AuditQuery::default())).await.unwrap().len()
        }
    }

    #[tokio::test]
    async fn only_requested_operations_mark_their_gpus() {
        let scene = Scene::new();
        let claim = |gpu: u32| scene.operations.0.lanes.claim(&[(GpuIndex(gpu), format!("GPU-{gpu}").into())]).unwrap();
        let at_start = OperationSpec { kind: START.to_owned(), ..new(0) };
        let _at_start = scene.operations.begin(claim(0), at_start).await.unwrap();
        assert!(!scene.operations.began_on(&"GPU-0".into()));
        let _planned = claim(1);
        assert!(!scene.operations.began_on(&"GPU-1".into()), "a claim alone changes nothing");
        let _requested = scene.begin(2).await.unwrap();
        assert!(scene.operations.began_on(&"GPU-2".into()));
    }

    /// Case: a request is just beginning an operation when SIGTERM arrives.
    #[tokio::test]
    async fn operation_that_begins_while_gpushd_stops_is_counted() {
        let scene = Scene::new();
        let operations = scene.operations.clone();
        let waiting = tokio::spawn(async move { operations.wait_for_unfinished().await });
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished(), "no operation is running yet");
        let _ongoing = scene.begin(0).await.unwrap();
        assert_eq!(waiting.await.unwrap(), 1);
        assert_eq!(scene.operations.wait_for_unfinished().await, 1, "an operation that runs already");
    }

    #[tokio::test(start_paused = true)]
    async fn end_on_a_full_disk_is_recorded_later() {
        let scene = Scene::new();
        let ongoing = scene.begin(0).await.unwrap();
        let id = ongoing.id();
        let is_full = Arc::new(AtomicBool::new(true));
        let (shown, was_shown) = oneshot::channel();
        ongoing.end(OperationState::Done, None, writes(&is_full), Box::new(|_| shown.send(()).unwrap())).await;
        let published = scene.operations.get(&id).await.unwrap();
        assert_eq!(published.state, OperationState::Done);
        assert!(
            published.notes[0].starts_with("the end of the operation could not be recorded: no space left"),
            "{published:?}"
        );
        assert_eq!(scene.audit_records().await, 0);
        is_full.store(false, Relaxed);
        was_shown.await.unwrap();
        assert_eq!(scene.audit_records().await, 1);
    }

    #[tokio::test(start_paused = true)]
    async fn missed_end_is_recorded_before_the_next_operation() {
        let scene = Scene::new();
        let ongoing = scene.begin(0).await.unwrap();
        let is_full = Arc::new(AtomicBool::new(true));
        ongoing.end(OperationState::Done, None, writes(&is_full), Box::new(|_| ())).await;
        assert_eq!(scene.begin(1).await.unwrap_err().code, Code::Unavailable);
        is_full.store(false, Relaxed);
        let begun_after = scene.begin(0).await.unwrap();
        assert_eq!(scene.audit_records().await, 1);
        begun_after.end(OperationState::Done, None, writes(&is_full), Box::new(|_| ())).await;
        assert_eq!(scene.audit_records().await, 2);
    }

    #[tokio::test(start_paused = true)]
    async fn end_that_the_store_refuses_does_not_block_later_operations() {
        let scene = Scene::new();
        let refused = || StoreError::Refused(Box::new(ApiError::new(Code::Internal, "damaged")));
        let ongoing = scene.begin(0).await.unwrap();
        ongoing.end(OperationState::Done, None, Box::new(move |_| Err(refused())), Box::new(|_| ())).await;
        scene.begin(0).await.unwrap();
        assert_eq!(scene.audit_records().await, 0);
    }
}
