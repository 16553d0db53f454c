//! The agent: everything that requests and background work share.

use std::{path::PathBuf, sync::Arc};

use gpush_api::ApiError;
use gpush_host::identity::Users;
use gpush_nvml::Hardware;
use gpush_store::{Note, Store};
use tokio::sync::{Mutex, Notify};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    answers::UnderWay,
    apply::line::Line,
    conditions::Conditions,
    events::Events,
    held::Held,
    http::{desk::Desk, kept::Kept},
    mps::Mps,
    observe::Observer,
    operation::Operations,
    outside::Outside,
    overrides::Overrides,
    processes::Strays,
    reload::Reloads,
    settings::Settings,
    shared_gpus::SharedGpus,
    startup::Startup,
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
    /// The driver, behind its worker. Only `observe` reads with it, only `apply` changes with it.
    pub(crate) hardware: Hardware,
    /// The hardware as last seen.
    pub(crate) observer: Observer,
    /// Programs that run beside, and other processes.
    pub(crate) outside: Outside,
    /// Who processes belong to.
    pub(crate) users: Users,
    /// What happens, for those who listen.
    pub(crate) events: Events,
    /// Requests with a key that are being answered.
    pub(crate) under_way: UnderWay,
    /// What is being done.
    pub(crate) operations: Operations,
    /// What can't begin yet.
    pub(crate) line: Line,
    /// What stands against working with GPUs.
    pub(crate) conditions: Conditions,
    /// Layouts that stand above the config's.
    pub(crate) overrides: Overrides,
    /// MPS daemons, and shares of their targets.
    pub(crate) mps: Mps,
    /// What is set on GPUs that are shared whole.
    pub(crate) shared_gpus: SharedGpus,
    /// GPUs that are shared by turns.
    pub(crate) timeslice: Timeslice,
    /// What was done about processes without a share.
    pub(crate) strays: Strays,
    /// What was lost, for which managed GPUs are held.
    pub(crate) held: Held,
    /// Of those who change the state of the host, one at a time.
    pub(crate) turn: Mutex<()>,
    /// Makes `watch` look at the GPUs now.
    pub(crate) look: Notify,
    /// Root of the host's file system, as far as others' services are looked for in it.
    pub(crate) host_root: PathBuf,
    /// How far the layouts at start are.
    pub(crate) startup: Startup,
    /// Who may make heavy answers now.
    pub(crate) desk: Desk,
    /// Answers that may be given again.
    pub(crate) kept: Kept,
    /// Work that must end before the agent does.
    pub(crate) tasks: TaskTracker,
    /// Nothing new is begun.
    pub(crate) stopping: CancellationToken,
    /// The uid that gpushd runs as.
    pub(crate) own_uid: u32,
}
