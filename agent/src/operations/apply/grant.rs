//! Operations of dynamic grants, which create the MIG devices of a lease on demand.
//!
//! ```text
//! placed, GPUs claimed ─► read again ─► planned again ─► begun: the lease is `granting`
//!                                          │ refused          │ steps, rollback and recovery as of any operation
//!                                          ▼                  ▼
//!                                    nothing recorded     its end makes the lease `active`, or ends it ([`super::lease_changes`])
//! ```

use std::sync::Arc;

use gpush_api::{Actor, ApiError, GpuIndex};
use gpush_core::{
    desired::{add_services, plan_grant},
    lease::placement::{Assignment, Member},
};
use gpush_store::{GpuIntent, Intent};

use super::{
    Engine, Executor,
    part::Part,
    ready::{bare, refusal, refuse_now},
};
use crate::{
    modes::mig::reset::not_resetting,
    operations::operation::{BeginWrites, OperationHandle, OperationSpec},
    requests::caller::Viewer,
    state::lanes::Claim,
};

/// Kind of the operations that create the MIG devices of a lease.
pub(super) const GRANT: &str = "lease.grant";

/// The operation that creates the MIG devices of a lease. It is recorded, but not executed yet. Dropping this value executes
/// it in the background. So the operation is executed even if the task of the lease fails.
#[derive(Debug)]
pub(crate) struct Creation {
    executor: Executor,
    /// `None` only while the value is being dropped.
    begun: Option<(Arc<OperationHandle>, Vec<Part>)>,
}

impl Creation {
    /// Plans the MIG instances that the lease needs on the GPUs of `claim`, and records the operation. Calls
    /// `also` in the same transaction.
    ///
    /// # Errors
    /// If an instance cannot be created any more, or the operation cannot be recorded. After an error, the operation
    /// does not exist.
    pub(crate) async fn begin(
        engine: &Engine,
        claim: Claim,
        assignment: &Assignment,
        by: Actor,
        also: BeginWrites,
    ) -> Result<Self, ApiError> {
        refuse_now(engine)?;
        not_resetting(&engine.context.host_services)?;
        claim.wait_until_alone().await;
        let host = engine.context.state.now();
        let creates = |index: GpuIndex| {
            assignment.members.iter().any(|m| matches!(m, Member::Create { gpu, .. } if *gpu == index))
        };
        let concerned = host.gpus.iter().filter(|gpu| creates(gpu.gpu.index));
        let mut readings = Vec::new();
        for (uuid, read) in
            engine.context.readings.now(&concerned.map(|gpu| gpu.gpu.uuid.clone()).collect::<Vec<_>>()).await
        {
            readings.push(read.map_err(|error| {
                let error = error.to_api();
                ApiError { message: format!("GPU {uuid} cannot be read: {}", error.message), ..error }
            })?);
        }
        let gpus = engine.planner.gpus_with(Viewer::Agent, &readings).await?;
        let created = &engine.context.state.leases().created;
        let mut plans = Vec::new();
        for reading in &readings {
            let uuid = &reading.identity.uuid;
            let none = Default::default();
            let gpu = gpus.iter().find(|gpu| gpu.uuid == *uuid);
            plans.extend(gpu.map(|gpu| plan_grant(gpu, assignment, created.get(uuid).unwrap_or(&none))));
        }
        add_services(&engine.context.settings.config(), &gpus, &mut plans);
        engine.planner.refuse_blocked(Viewer::Agent, &gpus, &mut plans).await;
        if let Some(error) = refusal(&plans) {
            return Err(error);
        }
        let parts = std::iter::zip(plans, &readings).enumerate();
        let parts: Vec<Part> = parts.map(|(at, (plan, read))| Part::new(at, plan, bare(read), read)).collect();
        let gpus = parts.iter().map(|part| GpuIntent { before: part.before.clone(), plan: part.plan.clone() });
        let intent = Intent { gpus: gpus.collect(), ..Intent::default() };
        let new = OperationSpec { kind: GRANT.to_owned(), by, reason: None, intent, also };
        let ongoing = engine.operations.begin(claim, new).await?;
        Ok(Self { executor: engine.executor.clone(), begun: Some((ongoing, parts)) })
    }
}

impl Drop for Creation {
    fn drop(&mut self) {
        if let Some((ongoing, parts)) = self.begun.take() {
            self.executor.spawn(ongoing, parts);
        }
    }
}
