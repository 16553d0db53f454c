//! The engine: the handles for queueing and beginning operations. The module `lifecycle` creates the
//! engine, and passes it to the other modules.

use std::sync::Arc;

use super::{Executor, Planner};
use crate::{
    operations::{operation::Operations, scheduler::Scheduler},
    requests::idempotency::Idempotency,
    state::context::HostContext,
};

/// Queues and begins operations. Cheap to clone.
pub(crate) type Engine = Arc<EngineHandles>;

#[derive(Debug)]
pub(crate) struct EngineHandles {
    pub(crate) context: Arc<HostContext>,
    /// Requests in flight that have an idempotency key.
    pub(crate) idempotency: Idempotency,
    /// The queue of the operations and leases that wait.
    pub(crate) scheduler: Scheduler,
    /// Operations in progress.
    pub(crate) operations: Operations,
    /// Plans changes.
    pub(crate) planner: Planner,
    /// Executes operations.
    pub(crate) executor: Executor,
}
