//! The engine: the handles with which operations are queued and begun. `life` builds it; other modules pass it on.

use std::sync::Arc;

use gpush_api::ApiError;
use gpush_host::identity::Users;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{Executor, Planner, queue::OperationQueue};
use crate::{
    idempotency::Idempotency,
    lanes::Lanes,
    operation::Operations,
    outside::Outside,
    settings::Settings,
    state::{State, readings::Readings},
};

/// Queues and begins operations. Cheap to clone.
pub(crate) type Engine = Arc<EngineHandles>;

/// The handles of an [`Engine`].
#[derive(Debug)]
pub(crate) struct EngineHandles {
    /// The config in force.
    pub(crate) settings: Settings,
    /// Why nothing can be recorded, and so nothing can be changed.
    pub(crate) read_only: Option<ApiError>,
    /// What is known about the host.
    pub(crate) state: State,
    /// Reads the hardware into the state.
    pub(crate) readings: Readings,
    /// Helper programs, and other processes.
    pub(crate) outside: Arc<Outside>,
    /// Users of processes.
    pub(crate) users: Users,
    /// Requests with an idempotency key that are in flight.
    pub(crate) idempotency: Idempotency,
    /// The lanes and the queue of each GPU.
    pub(crate) lanes: Lanes,
    /// Operations in progress.
    pub(crate) operations: Operations,
    /// Plans changes.
    pub(crate) planner: Planner,
    /// Executes operations.
    pub(crate) executor: Executor,
    /// Operations that wait for their GPUs.
    pub(crate) queue: OperationQueue,
    /// Work that must end before gpushd does.
    pub(crate) tasks: TaskTracker,
    /// Cancelled when gpushd stops.
    pub(crate) stopping: CancellationToken,
}
