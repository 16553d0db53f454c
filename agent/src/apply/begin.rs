//! Turns a request into a recorded operation, and starts its execution.
//!
//! gpushd records the complete plan in the journal before the first driver call. A recorded operation is executed even
//! if the caller disconnects.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use gpush_api::{Actor, ApiError, Code, Gpu, GpuPlan, Mig, Operation, PlanRequest};
use gpush_core::{config::Config, desired::check_mps_entries};
use gpush_nvml::Reading;
use gpush_store::{GpuIntent, Intent, NewAudit};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::{Engine, part::Part, planner::unreadable, queue};
use crate::{
    caller::{Caller, Viewer},
    idempotency::Key,
    lanes::Claim,
    modes::mig::reset::not_resetting,
    operation::{self, BeginWrites, OperationSpec},
    overrides::{self, OverrideChange},
    tasks::TaskName,
};

/// A requested change.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Order {
    /// Kind of the operation, such as `mig.apply`.
    pub(crate) kind: String,
    /// The GPUs and their desired layouts.
    pub(crate) request: PlanRequest,
    pub(crate) reason: Option<String>,
    /// How long the operation may wait in the queue. With `None`, the operation is refused unless
    /// it can begin at once.
    pub(crate) wait: Option<Duration>,
    /// Whether the operation leaves overrides unchanged.
    #[serde(default)]
    pub(crate) once: bool,
    /// Time at which the override of this operation expires.
    #[serde(default)]
    pub(crate) expires_at: Option<Timestamp>,
    /// The generation of the desired state that the caller has seen. The request is refused if the
    /// generation has changed since.
    #[serde(skip)]
    pub(crate) expected: Option<u64>,
    #[serde(skip)]
    pub(crate) key: Option<Key>,
}

impl Order {
    /// Creates an order that has no reason and does not wait.
    pub(crate) fn new(kind: &str, request: PlanRequest) -> Self {
        Self {
            kind: kind.to_owned(),
            request,
            reason: None,
            wait: None,
            once: false,
            expires_at: None,
            expected: None,
            key: None,
        }
    }

    /// Returns the change of each GPU's override, in the order of the plans.
    fn override_changes(&self, config: &Config, gpus: &[Gpu], plans: &[GpuPlan]) -> Vec<Option<OverrideChange>> {
        if self.once {
            return plans.iter().map(|_| None).collect();
        }
        overrides::override_changes(&self.request, self.expires_at, config, gpus, plans)
    }
}

/// Begins an order. If an operation was begun for the same idempotency key, returns that operation.
/// The order is accepted or refused even if the caller disconnects meanwhile.
///
/// # Errors
/// If the order is refused. Nothing was changed.
pub(crate) async fn begin(engine: &Engine, caller: &Caller, order: Order) -> Result<Operation, ApiError> {
    let (shared, caller) = (Arc::clone(engine), caller.clone());
    let beginning = engine.tasks.once_before_exit(TaskName::Request, async move {
        let Some(key) = order.key.clone() else { return accept(&shared, &caller, order).await };
        let _lock = shared.idempotency.lock(&key).await?;
        match shared.idempotency.operation(&key).await? {
            Some(operation) => shared.operations.get(&operation.to_string()).await,
            None => accept(&shared, &caller, order).await,
        }
    });
    beginning.await.unwrap_or_else(|error| {
        Err(ApiError::new(Code::Internal, "the operation could not begin: internal error of gpushd")
            .cause(error.to_string())
            .hint("see the log of gpushd: `journalctl -u gpushd`"))
    })
}

async fn accept(engine: &Engine, caller: &Caller, order: Order) -> Result<Operation, ApiError> {
    refuse_now(engine)?;
    let config = engine.settings.config();
    // Use the last answers of the MPS daemons here. When the operation has its lanes, gpushd polls the daemons and
    // plans again.
    let gpus = engine.planner.gpus(caller.viewer).await?;
    let planned = engine.planner.planned_with_needs(&gpus, &order.request, order.once).await;
    let (meant, needs) = planned.map_err(|error| engine.state.now().explain_absent(&order.request.gpus, error))?;
    overrides::check_expiry_applies(order.expires_at, &order.override_changes(&config, &gpus, &meant))?;
    check_mps_entries(&config, &gpus, &order.request, &meant, order.once)?;
    let by = caller.actor(engine.users.user(caller.uid()).await);
    // An operation with `wait` goes to the end of the queue. Without `wait`, the operation begins at once or is
    // refused.
    let ahead = order.wait.and_then(|_| engine.lanes.would_wait_for(&needs));
    let first = ahead.map_or(Ok(()), |ahead| Err(queue::behind(engine, &ahead)));
    let free = first.and_then(|()| not_resetting(&engine.host_services));
    let claimed = match free {
        // An operation with `wait` enters the queue, so it does not wait here.
        Ok(()) if order.wait.is_some() => engine.lanes.claim(&operation::gpus(&meant)),
        Ok(()) => engine.lanes.claim_after_planning(&operation::gpus(&meant)).await,
        Err(error) => Err(error),
    };
    let ready = match claimed {
        Ok(claim) => Ready::plan_again(engine, caller.viewer, &order, &meant, claim).await,
        Err(held) => Err(held),
    };
    engine.operations.not_stopping(&engine.stopping)?;
    let ongoing = match ready {
        Ok(ready) => {
            let Ready { parts, claim } = ready;
            let new = new_operation(&order, by, &parts);
            let ongoing = engine.operations.begin(claim, new).await?;
            for part in &parts {
                for waiting in engine.queue.for_gpu(&part.plan.uuid) {
                    ongoing.note(format!(
                        "{}: {waiting} when this operation has ended; `gpushctl operation list` shows the queue",
                        part.label()
                    ));
                }
            }
            let operation = ongoing.snapshot();
            engine.executor.spawn(ongoing, parts);
            return Ok(operation);
        }
        Err(error) if order.wait.is_none() || !error.is_temporary() => return Err(error),
        Err(_) => {
            engine.queue.has_room()?;
            let parts: Vec<Part> = meant.into_iter().enumerate().map(|(at, plan)| Part::unseen(at, plan)).collect();
            engine.operations.enqueue(new_operation(&order, by, &parts)).await?
        }
    };
    let operation = ongoing.snapshot();
    engine.queue.enqueue(&engine.lanes, &ongoing, order, operation.created_at, needs);
    Ok(operation)
}

/// Returns an error if no operation may begin at the moment.
pub(super) fn refuse_now(engine: &Engine) -> Result<(), ApiError> {
    engine.operations.not_stopping(&engine.stopping)?;
    match engine.read_only.clone().or_else(|| engine.operations.closed()) {
        Some(why) => Err(why),
        None => Ok(()),
    }
}

/// An operation that can begin. It has claimed its GPUs, and its plans are based on readings made after the claim.
pub(super) struct Ready {
    pub(super) parts: Vec<Part>,
    pub(super) claim: Claim,
}

impl Ready {
    /// Reads the GPUs that were claimed for the plans `meant`, and plans these GPUs again.
    ///
    /// # Errors
    /// If a GPU cannot be read, or cannot get the planned layout. After an error, the claim is
    /// released.
    pub(super) async fn plan_again(
        engine: &Engine,
        viewer: Viewer,
        order: &Order,
        meant: &[GpuPlan],
        claim: Claim,
    ) -> Result<Self, ApiError> {
        claim.wait_until_alone().await;
        let uuids: Vec<String> = meant.iter().map(|plan| plan.uuid.clone()).collect();
        let mut readings = Vec::new();
        for ((_, outcome), plan) in engine.readings.now(&uuids).await.into_iter().zip(meant) {
            readings.push(outcome.map_err(|error| unreadable(plan, error.to_api()))?);
        }
        let gpus = engine.planner.gpus_with(viewer, &readings).await?;
        let config = engine.settings.config();
        let mut plans = engine.planner.planned(&gpus, &order.request, order.once).await?;
        // Other GPUs may be reset together with a requested GPU. If the claim does not include them all, the request is
        // refused.
        let claimed = operation::gpus(meant);
        let more = operation::gpus(&plans).iter().any(|gpu| !claimed.contains(gpu));
        if more || plans.iter().map(|plan| &plan.uuid).ne(&uuids) {
            let error =
                ApiError::new(Code::Conflict, "the set of selected GPUs changed while gpushd planned the operation");
            return Err(error.hint("repeat the request").retryable());
        }
        check_mps_entries(&config, &gpus, &order.request, &plans, order.once)?;
        engine.planner.refuse_blocked(viewer, &gpus, &mut plans).await;
        if let Some(error) = refusal(&plans) {
            return Err(error);
        }
        let mut lasting = order.override_changes(&config, &gpus, &plans).into_iter();
        let parts = std::iter::zip(plans, &readings).enumerate();
        let parts = parts.map(|(at, (plan, reading))| Part {
            lasting: lasting.next().flatten(),
            ..Part::new(at, plan, bare(reading), reading)
        });
        Ok(Self { parts: parts.collect(), claim })
    }
}

/// Returns an error if any plan is refused. One refusal is returned unchanged; several are summarized in one error.
pub(super) fn refusal(plans: &[GpuPlan]) -> Option<ApiError> {
    let refused: Vec<&GpuPlan> = plans.iter().filter(|plan| plan.error.is_some()).collect();
    let mut errors: Vec<ApiError> = refused.iter().filter_map(|plan| plan.error.clone()).collect();
    let whole = match errors.len() {
        0 => return None,
        1 => errors.remove(0),
        count => {
            let indexes: Vec<String> = refused.iter().map(|plan| plan.gpu.to_string()).collect();
            let message = format!("{count} of {} GPUs cannot be changed: GPUs {}", plans.len(), indexes.join(", "));
            ApiError::several(message, errors)
        }
    };
    Some(if plans.len() > 1 {
        whole.outcome("no GPU was changed, because gpushd changes either all selected GPUs or none")
    } else {
        whole
    })
}

/// Returns the MIG state in a reading, without the profiles, processes and memory use, which a rollback does not need.
pub(super) fn bare(reading: &Reading) -> Option<Mig> {
    let mut mig = reading.mig.clone()?;
    mig.profiles = Arc::default();
    for instance in &mut mig.instances {
        instance.processes.clear();
        instance.memory = None;
        instance.compute.iter_mut().for_each(|compute| compute.processes.clear());
    }
    Some(mig)
}

/// Data that the journal stores in addition to the plans. After a restart, gpushd reads `order` to queue the operation
/// again, and `lasting` to recover an operation that has begun.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct RecordedRequest {
    #[serde(flatten)]
    pub(super) order: Order,
    /// Changes of overrides, by UUID of the GPU.
    #[serde(default)]
    pub(super) lasting: BTreeMap<String, OverrideChange>,
}

/// Returns what the journal records about an operation: each GPU's plan and MIG state, and the request.
pub(super) fn intent(order: &Order, parts: &[Part]) -> Intent {
    let gpus = parts.iter().map(|part| GpuIntent { before: part.before.clone(), plan: part.plan.clone() });
    let lasting = parts.iter().filter_map(|part| Some((part.plan.uuid.clone(), part.lasting.clone()?)));
    let more = RecordedRequest { order: order.clone(), lasting: lasting.collect() };
    Intent { gpus: gpus.collect(), more: serde_json::to_value(more).unwrap_or_default(), ..Intent::default() }
}

fn new_operation(order: &Order, by: Actor, parts: &[Part]) -> OperationSpec {
    OperationSpec {
        kind: order.kind.clone(),
        by: by.clone(),
        reason: order.reason.clone(),
        intent: intent(order, parts),
        also: begin_writes(order, by, parts),
    }
}

/// Returns the function that writes the audit record and the response for the idempotency key. The function runs in the
/// transaction that records the operation.
fn begin_writes(order: &Order, by: Actor, parts: &[Part]) -> BeginWrites {
    let (action, reason, key) = (order.kind.clone(), order.reason.clone(), order.key.clone());
    let (once, expected) = (order.once, order.expected);
    let gpus: Vec<_> =
        parts.iter().map(|part| serde_json::json!({ "gpu_uuid": part.plan.uuid, "layout": part.plan.layout, "desired": part.plan.end_state() })).collect();
    let destroyed: Vec<String> =
        parts.iter().flat_map(|part| part.plan.destroyed_devices().map(str::to_owned)).collect();
    Box::new(move |tx, record| {
        overrides::check_generation(tx, expected)?;
        if let Some(key) = &key {
            key.record_operation(tx, record.id)?;
        }
        let audit = NewAudit {
            by: Some(by.clone()),
            action: action.clone(),
            object: record.id.to_string(),
            result: "accepted".to_owned(),
            detail: serde_json::json!({ "gpus": gpus, "targets": destroyed, "reason": reason, "once": once }),
        };
        tx.audit(audit).map(|_| ())
    })
}
