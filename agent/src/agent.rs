//! The agent: everything that requests and background work share.

use std::sync::Arc;

use gpush_nvml::Hardware;
use gpush_store::{Note, Store};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    conditions::Conditions, http::desk::Desk, observe::Observer, operation::Operations, outside::Outside,
    people::People, settings::Settings, startup::Startup,
};

/// The agent, as its parts hold it.
pub(crate) type Shared = Arc<Agent>;

/// What a running agent consists of.
#[derive(Debug)]
pub(crate) struct Agent {
    /// The config in force.
    pub(crate) settings: Settings,
    /// What must not be forgotten.
    pub(crate) store: Store,
    /// What was noticed when it was opened.
    pub(crate) notes: Vec<Note>,
    /// The driver, behind its worker. Only `observe` reads with it, only `apply` changes with it.
    pub(crate) hardware: Hardware,
    /// The hardware as last seen.
    pub(crate) observer: Observer,
    /// Programs that run beside, and other processes.
    pub(crate) outside: Outside,
    /// Who processes belong to.
    pub(crate) people: People,
    /// What is being done.
    pub(crate) operations: Operations,
    /// What stands against working with GPUs.
    pub(crate) conditions: Conditions,
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
