//! What operations are carried out with. `life` builds it; only `apply` looks inside.

use std::{path::PathBuf, sync::Arc};

use gpush_api::ApiError;
use gpush_host::identity::Users;
use gpush_nvml::Hardware;
use gpush_store::Store;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    apply::line::Line,
    idempotency::Idempotency,
    mps::Mps,
    operation::Operations,
    outside::Outside,
    settings::Settings,
    shared_gpus::SharedGpus,
    state::{State, readings::Readings},
    timeslice::Timeslice,
};

/// The agent, as operations hold it.
pub(crate) type Shared = Arc<Agent>;

/// What operations are carried out with.
#[derive(Debug)]
pub(crate) struct Agent {
    /// The config in force.
    pub(crate) settings: Settings,
    /// Persistent state.
    pub(crate) store: Store,
    /// Why nothing can be recorded, and so nothing be changed.
    pub(crate) read_only: Option<ApiError>,
    /// The driver, behind its worker. Only `state::readings` reads with it, only operations change with it.
    pub(crate) hardware: Hardware,
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
    /// Operations in progress.
    pub(crate) operations: Operations,
    /// Operations that wait for their GPUs.
    pub(crate) line: Line,
    /// MPS daemons, and shares of their targets.
    pub(crate) mps: Mps,
    /// What is set on GPUs that are shared whole.
    pub(crate) shared_gpus: SharedGpus,
    /// Time-sliced GPUs.
    pub(crate) timeslice: Timeslice,
    /// Root of the host's file system, where other managers are looked for.
    pub(crate) host_root: PathBuf,
    /// Work that must end before gpushd does.
    pub(crate) tasks: TaskTracker,
    /// Cancelled when gpushd stops.
    pub(crate) stopping: CancellationToken,
}
