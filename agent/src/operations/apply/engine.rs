//! The engine: the handles for queueing and beginning operations. The module `lifecycle` creates the
//! engine, and passes it to the other modules.

use std::sync::Arc;

use gpush_api::ApiError;
use gpush_host::identity::Users;
use tokio_util::sync::CancellationToken;

use super::{Executor, Planner};
use crate::{
    operations::{operation::Operations, scheduler::Scheduler},
    requests::idempotency::Idempotency,
    state::{State, lanes::Lanes, readings::Readings},
    system::{host_services::HostServices, settings::Settings, tasks::Tasks},
};

/// Queues and begins operations. Cheap to clone.
pub(crate) type Engine = Arc<EngineHandles>;

#[derive(Debug)]
pub(crate) struct EngineHandles {
    pub(crate) settings: Settings,
    /// The error with which gpushd refuses every change, because the store cannot record changes.
    /// `None` if the store works.
    pub(crate) read_only: Option<ApiError>,
    /// State of the host.
    pub(crate) state: State,
    pub(crate) readings: Readings,
    pub(crate) host_services: Arc<HostServices>,
    pub(crate) users: Users,
    /// Requests in flight that have an idempotency key.
    pub(crate) idempotency: Idempotency,
    /// The lane of each GPU.
    pub(crate) lanes: Lanes,
    /// The queue of the operations and leases that wait.
    pub(crate) scheduler: Scheduler,
    /// Operations in progress.
    pub(crate) operations: Operations,
    /// Plans changes.
    pub(crate) planner: Planner,
    /// Executes operations.
    pub(crate) executor: Executor,
    /// Tasks that must finish before gpushd exits.
    pub(crate) tasks: Tasks,
    /// Cancelled when gpushd is stopping.
    pub(crate) stopping: CancellationToken,
}
