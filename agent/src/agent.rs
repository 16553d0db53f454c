//! What operations are queued and begun with. `life` builds it; only `apply` looks inside.

use std::sync::Arc;

use gpush_api::ApiError;
use gpush_host::identity::Users;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    apply::{Executor, Planner, queue::OperationQueue},
    idempotency::Idempotency,
    lanes::Lanes,
    operation::Operations,
    outside::Outside,
    settings::Settings,
    state::{State, readings::Readings},
};

/// The agent, as operations hold it.
pub(crate) type Shared = Arc<Agent>;

/// What operations are queued and begun with.
#[derive(Debug)]
pub(crate) struct Agent {
    /// The config in force.
    pub(crate) settings: Settings,
    /// Why nothing can be recorded, and so nothing be changed.
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
