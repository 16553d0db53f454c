//! The agent: everything that requests and background work share.

use std::{path::PathBuf, sync::Arc};

use gpush_api::ApiError;
use gpush_host::identity::Users;
use gpush_nvml::Hardware;
use gpush_store::{Note, Store};
use tokio::sync::Mutex;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    apply::{Executor, Planner, queue::OperationQueue},
    http::desk::Desk,
    idempotency::Idempotency,
    lanes::Lanes,
    mps::Mps,
    operation::Operations,
    outside::Outside,
    processes::Strays,
    reload::Reloads,
    settings::Settings,
    shared_gpus::SharedGpus,
    startup::Startup,
    state::{Commits, State, readings::Readings},
    timeslice::Timeslice,
};

/// The agent, as its parts hold it.
pub(crate) type Shared = Arc<Agent>;

/// What a running agent consists of.
#[derive(Debug)]
pub(crate) struct Agent {
    /// The config in force.
    pub(crate) settings: Settings,
    /// Asks for the config to be read again.
    pub(crate) reloads: Reloads,
    /// What must not be forgotten.
    pub(crate) store: Store,
    /// What was noticed when it was opened.
    pub(crate) notes: Vec<Note>,
    /// Why nothing can be recorded, and so nothing be changed.
    pub(crate) read_only: Option<ApiError>,
    /// The driver, behind its worker. Only `state::readings` reads with it, only `apply` changes with it.
    pub(crate) hardware: Hardware,
    /// What is known about the host.
    pub(crate) state: State,
    /// Reads the hardware into the state.
    pub(crate) readings: Readings,
    /// Commits changes of conditions.
    pub(crate) commits: Commits,
    /// Programs that run beside, and other processes.
    pub(crate) outside: Arc<Outside>,
    /// Who processes belong to.
    pub(crate) users: Users,
    /// Requests with a key that are being answered.
    pub(crate) idempotency: Idempotency,
    /// The lanes and the queue of each GPU.
    pub(crate) lanes: Lanes,
    /// What is being done.
    pub(crate) operations: Operations,
    /// Plans changes.
    pub(crate) planner: Planner,
    /// Executes operations.
    pub(crate) executor: Executor,
    /// Operations that wait for their GPUs.
    pub(crate) queue: OperationQueue,
    /// MPS daemons, and shares of their targets.
    pub(crate) mps: Mps,
    /// What is set on GPUs that are shared whole.
    pub(crate) shared_gpus: SharedGpus,
    /// GPUs that are shared by turns.
    pub(crate) timeslice: Timeslice,
    /// What was done about processes without a share.
    pub(crate) strays: Strays,
    /// Of those who change the state of the host, one at a time.
    pub(crate) turn: Mutex<()>,
    /// Root of the host's file system, as far as others' services are looked for in it.
    pub(crate) host_root: PathBuf,
    /// How far the layouts at start are.
    pub(crate) startup: Startup,
    /// Who may make heavy answers now.
    pub(crate) desk: Desk,
    /// Work that must end before the agent does.
    pub(crate) tasks: TaskTracker,
    /// Nothing new is begun.
    pub(crate) stopping: CancellationToken,
    /// The uid that gpushd runs as.
    pub(crate) own_uid: u32,
}
