//! Turns a request into a recorded operation, and starts its execution.
//!
//! gpushd records the complete plan in the journal before the first driver call. A recorded operation is executed even
//! if the caller disconnects.

use std::sync::Arc;

use gpush_api::{Actor, ApiError, Operation};
use gpush_core::desired::check_mps_entries;
use gpush_store::{AuditEvent, AuditedPlan};

use super::{
    Engine,
    order::{Order, intent},
    part::Part,
    progress::waiting_for,
    queued_operation::{QueuedOperation, behind, has_room},
    ready::{Ready, refuse_now},
};
use crate::{
    modes::mig::reset::not_resetting,
    operations::{
        operation::{self, BeginWrites, OperationSpec},
        overrides,
    },
    requests::caller::Caller,
    system::tasks::TaskName,
};

/// Begins an order. If an operation was begun for the same idempotency key, returns that operation.
/// The order is accepted or refused even if the caller disconnects meanwhile.
///
/// # Errors
/// If the order is refused. Nothing was changed.
pub(crate) async fn begin(engine: &Engine, caller: &Caller, order: Order) -> Result<Operation, ApiError> {
    let (shared, caller) = (Arc::clone(engine), caller.clone());
    let beginning = engine.context.tasks.once_before_exit(TaskName::Request, async move {
        let Some(key) = order.key.clone() else { return accept(&shared, &caller, order).await };
        let _lock = shared.idempotency.lock(&key).await?;
        match shared.idempotency.operation(&key).await? {
            Some(operation) => shared.operations.get(&operation.to_string()).await,
            None => accept(&shared, &caller, order).await,
        }
    });
    beginning.await.unwrap_or_else(|error| {
        Err(ApiError::internal("the operation could not begin: internal error of gpushd").cause(error.to_string()))
    })
}

async fn accept(engine: &Engine, caller: &Caller, order: Order) -> Result<Operation, ApiError> {
    refuse_now(engine)?;
    let config = engine.context.settings.config();
    // Use the last answers of the MPS daemons here. When the operation has its lanes, gpushd polls the daemons and
    // plans again.
    let gpus = engine.planner.gpus(caller.viewer).await?;
    let planned = engine.planner.planned_with_needs(&gpus, &order.request, order.once).await;
    let (meant, needs) =
        planned.map_err(|error| engine.context.state.now().explain_absent(&order.request.gpus, error))?;
    overrides::check_expiry_applies(order.expires_at, &order.override_changes(&config, &gpus, &meant))?;
    check_mps_entries(&config, &gpus, &order.request, &meant, order.once)?;
    let by = caller.actor(engine.context.users.user(caller.uid()).await);
    // An operation with `wait` goes to the end of the queue. Without `wait`, the operation begins at once or is
    // refused.
    let ahead = order.wait.and_then(|_| engine.scheduler.would_wait_for(&needs));
    let first = ahead.map_or(Ok(()), |ahead| Err(behind(engine, &ahead)));
    let free = first.and_then(|()| not_resetting(&engine.context.host_services));
    let claimed = match free {
        // An operation with `wait` enters the queue, so it does not wait here.
        Ok(()) if order.wait.is_some() => engine.context.lanes.claim(&operation::gpus(&meant)),
        Ok(()) => engine.context.lanes.claim_after_planning(&operation::gpus(&meant)).await,
        Err(error) => Err(error),
    };
    let ready = match claimed {
        Ok(claim) => Ready::plan_again(engine, caller.viewer, &order, &meant, claim).await,
        Err(held) => Err(held),
    };
    engine.operations.not_stopping(&engine.context.stopping)?;
    let ongoing = match ready {
        Ok(ready) => {
            let Ready { parts, claim } = ready;
            let new = new_operation(&order, by, &parts);
            let ongoing = engine.operations.begin(claim, new).await?;
            for part in &parts {
                for waiting in waiting_for(engine, &part.plan.gpu_uuid) {
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
            has_room(engine)?;
            let parts: Vec<Part> = meant.into_iter().enumerate().map(|(at, plan)| Part::unseen(at, plan)).collect();
            engine.operations.enqueue(new_operation(&order, by, &parts)).await?
        }
    };
    let operation = ongoing.snapshot();
    QueuedOperation::new(engine, &ongoing, order, operation.created_at, needs).serve(engine);
    Ok(operation)
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
    let (expected, key) = (order.expected, order.key.clone());
    let audited = |part: &Part| AuditedPlan {
        gpu_uuid: part.plan.gpu_uuid.clone(),
        layout: part.plan.layout.clone(),
        desired: part.plan.end_state(),
    };
    let event = AuditEvent::OperationBegin {
        kind: order.kind.clone(),
        gpus: parts.iter().map(audited).collect(),
        targets: parts.iter().flat_map(|part| part.plan.destroyed_devices().cloned()).collect(),
        reason: order.reason.clone(),
        once: order.once,
    };
    Box::new(move |tx, record| {
        overrides::check_generation(tx, expected)?;
        if let Some(key) = &key {
            key.record_operation(tx, record.id)?;
        }
        tx.audit(event.record(Some(by.clone()), record.id.to_string(), "accepted")).map(|_| ())
    })
}
