//! The engine: the handles for queueing and beginning operations. `life` creates the engine; other
//! modules pass the engine on.

use std::sync::Arc;

use gpush_api::ApiError;
use gpush_host::identity::Users;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::{Executor, Planner, queue::OperationQueue};
use crate::{
    host_services::HostServices,
    idempotency::Idempotency,
    lanes::Lanes,
    operation::Operations,
    settings::Settings,
    state::{State, readings::Readings},
};

/// Queues and begins operations. Cheap to clone.
pub(crate) type Engine = Arc<EngineHandles>;

/// The handles of an [`Engine`].
#[derive(Debug)]
pub(crate) struct EngineHandles {
    /// The active config.
    pub(crate) settings: Settings,
    /// Why the store cannot record anything; `None` if it can. If set, every change is refused.
    pub(crate) read_only: Option<ApiError>,
    /// State of the host.
    pub(crate) state: State,
    /// Reads the hardware into the state.
    pub(crate) readings: Readings,
    /// Access to helper units and other processes.
    pub(crate) host_services: Arc<HostServices>,
    /// Looks up the users of processes.
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
    /// Tasks that must finish before gpushd exits.
    pub(crate) tasks: TaskTracker,
    /// Cancelled when gpushd is stopping.
    pub(crate) stopping: CancellationToken,
}
