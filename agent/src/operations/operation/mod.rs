//! All operations, and the clients that wait for them.
//!
//! [`gpush_api::operation`] defines the states. The unfinished operations are in memory. The journal contains all
//! operations, and answers requests about ended operations. The module `apply` recovers the unfinished operations of a
//! previous gpushd.
//!
//! | file | subject |
//! |---|---|
//! | `cancel` | the cancellation of an operation |
//! | `ending` | the record of an end, and ends that could not be recorded at once |
//! | `naming` | names of GPUs in the error of an operation |
//! | `operation_handle` | one unfinished operation, for the task that executes it |
//! | `unfinished` | the operations that wait or run now |
//! | `wire` | a record of the journal in the form of the API |

mod cancel;
mod ending;
mod naming;
mod operation_handle;
mod unfinished;
mod wire;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, MutexGuard, OnceLock},
    time::Duration,
};

use gpush_api::{Actor, ApiError, Code, GpuIndex, GpuPlan, GpuUuid, Operation, OperationState, OperationSummary};
use gpush_core::quote::Quoted;
use gpush_locked::Locked;
use gpush_store::{
    Intent, IntentSummary, NewOperation, OperationId, OperationRecord, Store, StoreError, Tx, UnfinishedOperation,
};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

pub(crate) use self::{
    cancel::CancelError, ending::EndEffects, naming::once as named_once, operation_handle::OperationHandle, wire::id,
};
use crate::{
    state::{
        Events, Holder,
        lanes::{Claim, Lanes},
    },
    system::tasks::Tasks,
};

/// Kind of the operations that apply layouts when gpushd starts.
pub(crate) const START: &str = "mig.start";

/// All operations. A handle, cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Operations(Arc<OperationParts>);

#[derive(Debug)]
struct OperationParts {
    store: Store,
    events: Events,
    lanes: Lanes,
    tasks: Tasks,
    /// Operations that have not ended, and operations whose end is not recorded yet.
    live: Locked<BTreeMap<OperationId, ActiveOperation>>,
    unrecorded: ending::Unrecorded,
    /// UUIDs of the GPUs on which an operation has begun since gpushd started. Operations that gpushd itself begins at
    /// start do not count.
    requested: Locked<BTreeSet<GpuUuid>>,
    /// A new value means that an operation has begun.
    begun: watch::Sender<()>,
}

#[derive(Debug, Clone)]
struct ActiveOperation {
    watch: watch::Sender<Operation>,
    cancelled: CancellationToken,
    cancelled_by: Arc<OnceLock<Actor>>,
    blocked: Blocked,
    /// Whether a previous gpushd has begun or queued the operation.
    taken_over: bool,
}

/// Why an operation waits or did not start, with the names of processes. For administrators only.
type Blocked = Arc<Locked<Option<ApiError>>>;

/// Writes further changes in the transaction that records a new operation. gpushd may call this function more than
/// once.
pub(crate) type BeginWrites = Box<dyn FnMut(&mut Tx<'_>, &OperationRecord) -> Result<(), StoreError> + Send>;

/// A new operation.
pub(crate) struct OperationSpec {
    /// Kind, such as `mig.apply`.
    pub(crate) kind: String,
    /// The caller that requested the operation.
    pub(crate) by: Actor,
    pub(crate) reason: Option<String>,
    /// The previous state of each GPU, and its plan.
    pub(crate) intent: Intent,
    /// Writes further changes in the transaction that records the new operation.
    pub(crate) also: BeginWrites,
}

impl Operations {
    /// Creates the handle for the operations in `store`. No operation is running yet.
    pub(crate) fn new(store: Store, events: Events, lanes: Lanes, tasks: Tasks) -> Self {
        let unrecorded = ending::Unrecorded::default();
        let (live, requested, begun) = Default::default();
        Self(Arc::new(OperationParts { store, events, lanes, tasks, live, unrecorded, requested, begun }))
    }

    fn store(&self) -> &Store {
        &self.0.store
    }

    fn active(&self) -> MutexGuard<'_, BTreeMap<OperationId, ActiveOperation>> {
        self.0.live.lock()
    }

    /// Makes every attempt to begin an operation fail with the error `why`. Queued operations stay queued.
    ///
    /// # Errors
    /// If an operation is changing a GPU. Returns the UUID of the GPU, and the operation.
    pub(crate) fn close(&self, why: ApiError) -> Result<(), (GpuUuid, Holder)> {
        self.0.lanes.close(why)
    }

    /// Permits operations to begin again.
    pub(crate) fn open(&self) {
        self.0.lanes.open();
    }

    /// Returns the error for operations that try to begin; `None` if they may begin.
    pub(crate) fn closed(&self) -> Option<ApiError> {
        self.0.lanes.closed()
    }

    /// Checks that no operation is changing a GPU.
    ///
    /// # Errors
    /// If an operation is changing the GPU. The error names the operation.
    pub(crate) fn check_not_changing(&self, index: GpuIndex, uuid: &GpuUuid) -> Result<(), ApiError> {
        self.0.lanes.check_not_changing(index, uuid)
    }

    /// Refuses changes while gpushd is stopping.
    ///
    /// # Errors
    /// [`Code::Stopping`] while gpushd is stopping.
    pub(crate) fn not_stopping(&self, stopping: &CancellationToken) -> Result<(), ApiError> {
        if !stopping.is_cancelled() {
            return Ok(());
        }
        let still = self.unfinished();
        let mut error = ApiError::stopping("gpushd is stopping and accepts no changes");
        if still > 0 {
            error = error.cause(format!(
                "gpushd first finishes the running operations ({still}): `gpushctl operation list` shows them"
            ));
        }
        Err(error.hint("try again when gpushd has started again: `systemctl status gpushd` shows its state"))
    }

    /// Records that an operation has begun. gpushd may make driver calls for the operation only after this function has
    /// returned.
    ///
    /// # Errors
    /// If the operation cannot be recorded. After an error, the operation does not exist.
    pub(crate) async fn begin(&self, claim: Claim, new: OperationSpec) -> Result<Arc<OperationHandle>, ApiError> {
        #[expect(
            clippy::redundant_closure_for_method_calls,
            reason = "the method itself accepts only one lifetime of `Tx`, but the argument must accept all"
        )]
        let (record, mut intent) = self.record(new, |tx, new| tx.begin(new)).await?;
        claim.begin(&record.id.to_string());
        intent.begun = Some(record.sequence);
        let ongoing = self.insert((record, intent), Some(claim), false);
        self.note_begun(&ongoing.snapshot());
        Ok(ongoing)
    }

    /// Remembers on which GPUs an operation has begun, unless gpushd itself began it at start.
    fn note_begun(&self, operation: &Operation) {
        if operation.kind != START {
            let gpus = operation.plans.iter().map(|plan| plan.gpu_uuid.clone());
            self.0.requested.lock().extend(gpus);
        }
    }

    /// Returns whether an operation has begun on a GPU since gpushd started. This excludes GPUs that were only reset
    /// together with other GPUs.
    pub(crate) fn began_on(&self, uuid: &GpuUuid) -> bool {
        self.0.requested.lock().contains(uuid)
    }

    /// Records an operation as queued.
    ///
    /// # Errors
    /// If the operation cannot be recorded. After an error, the operation does not exist.
    pub(crate) async fn enqueue(&self, new: OperationSpec) -> Result<Arc<OperationHandle>, ApiError> {
        #[expect(
            clippy::redundant_closure_for_method_calls,
            reason = "the method itself accepts only one lifetime of `Tx`, but the argument must accept all"
        )]
        let record = self.record(new, |tx, new| tx.enqueue(new)).await?;
        Ok(self.insert(record, None, false))
    }

    async fn record(
        &self,
        new: OperationSpec,
        insert: fn(&mut Tx<'_>, NewOperation) -> Result<OperationRecord, StoreError>,
    ) -> Result<(OperationRecord, Intent), ApiError> {
        // First record the ends of earlier operations. So the new operation follows them in the journal.
        self.record_ends().await?;
        let OperationSpec { kind, by, reason, intent, mut also } = new;
        let progress = intent.gpus.iter().map(|gpu| wire::not_begun(&gpu.plan)).collect();
        let new = NewOperation { kind, by, reason, intent: intent.clone(), progress };
        let written = self.store().write(move |tx| {
            let record = insert(tx, new.clone())?;
            also(tx, &record)?;
            Ok(record)
        });
        Ok((written.await?, intent))
    }

    /// Takes over an unfinished operation of a previous gpushd. Does not claim its GPUs.
    pub(crate) fn take_over(&self, left: &UnfinishedOperation) -> Arc<OperationHandle> {
        self.insert((left.record.clone(), left.intent.clone()), None, true)
    }

    /// Returns whether an operation of a previous gpushd is still changing the GPU.
    pub(crate) fn is_being_recovered(&self, uuid: &GpuUuid) -> bool {
        let concerns = |live: &&ActiveOperation| {
            let operation = live.watch.borrow();
            let begun = !matches!(operation.state, OperationState::Queued | OperationState::Waiting);
            begun && !operation.state.is_final() && operation.plans.iter().any(|plan| plan.gpu_uuid == *uuid)
        };
        self.active().values().filter(|live| live.taken_over).any(|live| concerns(&live))
    }

    fn insert(
        &self,
        (record, intent): (OperationRecord, Intent),
        claim: Option<Claim>,
        taken_over: bool,
    ) -> Arc<OperationHandle> {
        let id = record.id;
        let operation = wire::operation(record, intent);
        self.0.events.publish(wire::event(&operation, None));
        let watch = watch::Sender::new(operation);
        let (cancelled, cancelled_by, blocked) = (CancellationToken::new(), Arc::default(), Blocked::default());
        let live = ActiveOperation {
            watch: watch.clone(),
            cancelled: cancelled.clone(),
            cancelled_by: Arc::clone(&cancelled_by),
            blocked: Arc::clone(&blocked),
            taken_over,
        };
        self.active().insert(id, live);
        self.0.begun.send_replace(());
        Arc::new(OperationHandle {
            id,
            operations: self.clone(),
            watch,
            cancelled,
            cancelled_by,
            blocked,
            claim: Locked::new(claim),
        })
    }

    /// Returns the last `limit` operations before the operation `before`, newest first.
    ///
    /// # Errors
    /// If the journal cannot be read.
    pub(crate) async fn list(
        &self,
        before: Option<OperationId>,
        limit: usize,
    ) -> Result<Vec<OperationSummary>, ApiError> {
        let read = self.store().read(move |view| {
            let records = view.latest_operations(before, limit)?;
            let oldest = records.last().map_or(OperationId(0), |record| record.id);
            Ok::<_, StoreError>((view.intent_summaries(oldest, before)?, records))
        });
        let (mut intents, records) = read.await?;
        let live = self.active();
        // If an operation is in memory, use its state in memory, because this state is newer than the journal.
        let newest = |record: OperationRecord| match live.get(&record.id) {
            Some(live) => OperationSummary::from(&*live.watch.borrow()),
            None => {
                let IntentSummary { begun, gpu_uuids } = intents.remove(&record.id).unwrap_or_default();
                let summary = OperationSummary::from(&wire::operation(record, Intent::default()));
                OperationSummary { begun, gpu_uuids, ..summary }
            }
        };
        Ok(records.into_iter().map(newest).collect())
    }

    /// Returns the current state of an operation.
    ///
    /// # Errors
    /// If the operation does not exist, or the journal cannot be read.
    pub(crate) async fn get(&self, id: &str) -> Result<Operation, ApiError> {
        let number = wire::id(id);
        if let Some(live) = number.and_then(|number| self.active().get(&number).cloned()) {
            return Ok(live.watch.borrow().clone());
        }
        let Some(number) = number else { return Err(unknown(id)) };
        let read = self.store().read(move |view| {
            let record = view.operation(number)?;
            let intent = view.intent(number)?.unwrap_or_default();
            Ok((record.map(|record| wire::operation(record, intent)), view.last_operation()))
        });
        match read.await? {
            (Some(operation), _) => Ok(operation),
            (None, last) if number.0 > 0 && number <= last => {
                Err(unknown(id).cause("gpushd keeps no record of operations that ended long ago"))
            }
            (None, _) => Err(unknown(id)),
        }
    }

    /// Returns why an operation waits or did not start, with the names of the blocking processes; `None` if the reason
    /// is not known. Only administrators may see this error.
    ///
    /// # Errors
    /// If the journal cannot be read.
    pub(crate) async fn error_in_full(&self, id: &str) -> Result<Option<ApiError>, ApiError> {
        let Some(number) = wire::id(id) else { return Ok(None) };
        let live = self.active().get(&number).cloned();
        if let Some(live) = live {
            return Ok(live.blocked.lock().clone());
        }
        let intent = self.store().read(move |view| view.intent(number)).await?;
        Ok(intent.and_then(|intent| intent.error_in_full))
    }

    /// Waits until the revision of an operation is no longer `after`, at most for `wait`. Returns the operation.
    ///
    /// # Errors
    /// As [`Operations::get`].
    pub(crate) async fn wait(&self, id: &str, after: u64, wait: Duration) -> Result<Operation, ApiError> {
        let live = wire::id(id).and_then(|number| self.active().get(&number).cloned());
        let Some(live) = live else { return self.get(id).await };
        let mut watch = live.watch.subscribe();
        let changed = watch.wait_for(|operation| operation.revision != after || operation.state.is_final());
        let _ = tokio::time::timeout(wait, changed).await.map(|found| found.is_ok());
        Ok(watch.borrow().clone())
    }

    /// Ends an operation whose task has panicked. The panic has already released the operation's GPUs.
    pub(crate) async fn abandon(&self, id: OperationId, error: ApiError) {
        let Some(live) = self.active().get(&id).cloned() else { return };
        let recorded = self.end(id, OperationState::Failed, Some(error.clone())).await;
        live.watch.send_modify(|operation| {
            operation.state = OperationState::Failed;
            operation.error = Some(error);
            operation.ended_at = Some(jiff::Timestamp::now());
            operation.revision += 1;
            self.0.events.publish(wire::event(operation, None));
        });
        if recorded.is_ok() {
            self.forget(id);
        }
    }

    /// Records the end of an operation that is in memory.
    async fn end(&self, id: OperationId, state: OperationState, error: Option<ApiError>) -> Result<(), StoreError> {
        let reported = self.active().get(&id).map_or(0, |live| live.watch.borrow().revision);
        let written = self.store().write_ending(move |tx| {
            tx.end(id, state, error.clone())?;
            tx.raise_revision(id, reported + 1).map(|_| ())
        });
        written.await
    }

    /// Removes an operation from memory. After that, the journal answers requests about the operation.
    fn forget(&self, id: OperationId) {
        self.active().remove(&id);
    }
}

/// Returns the GPUs that an operation with these plans must claim, as (index, UUID).
pub(crate) fn gpus<'a>(plans: impl IntoIterator<Item = &'a GpuPlan> + Clone) -> Vec<(GpuIndex, GpuUuid)> {
    let own = plans.clone().into_iter().map(|plan| (plan.gpu, plan.gpu_uuid.clone()));
    let mut gpus: Vec<(GpuIndex, GpuUuid)> = own.collect();
    // Add the GPUs that are reset together with the GPUs of the plans.
    for plan in plans {
        for peer in plan.reset().into_iter().flat_map(|reset| &reset.together) {
            if gpus.iter().all(|(_, known)| *known != peer.gpu_uuid) {
                gpus.push((peer.gpu, peer.gpu_uuid.clone()));
            }
        }
    }
    gpus
}

fn unknown(id: &str) -> ApiError {
    ApiError::new(Code::NotFound, format!("there is no operation {}", Quoted(id)))
        .hint("`gpushctl operation list` shows the known operations")
}
