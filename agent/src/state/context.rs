//! The context of the host: the handles that all layers above `state` use.

use std::sync::Arc;

use gpush_api::ApiError;
use gpush_host::identity::Users;
use gpush_nvml::Hardware;
use gpush_store::Store;
use tokio_util::sync::CancellationToken;

use super::{
    State, lanes::Lanes, readings::Readings, refused_requests::RefusedRequests, request_counts::RequestCounts,
};
use crate::system::{host_services::HostServices, settings::Settings, tasks::Tasks};

/// The handles of the host. Created once, when gpushd starts.
#[derive(Debug)]
pub(crate) struct HostContext {
    /// The active config.
    pub(crate) settings: Settings,
    /// What gpushd knows about the host, including the open leases.
    pub(crate) state: State,
    /// Reads the hardware.
    pub(crate) readings: Readings,
    /// The lane of each GPU: only its owner changes the GPU.
    pub(crate) lanes: Lanes,
    /// What lasts: journal, leases, audit.
    pub(crate) store: Store,
    /// How many requests for leases were granted and refused.
    pub(crate) requests: RequestCounts,
    /// The refused requests of each user.
    pub(crate) refused: RefusedRequests,
    /// The error with which gpushd refuses every change, because the store cannot record changes. `None` if the store
    /// works.
    pub(crate) read_only: Option<ApiError>,
    /// Looks up users and groups.
    pub(crate) users: Users,
    /// Calls the driver, through a worker process.
    pub(crate) hardware: Hardware,
    /// Helper units, and other processes of the host.
    pub(crate) host_services: Arc<HostServices>,
    /// Starts and supervises background tasks. Some must finish before gpushd exits.
    pub(crate) tasks: Tasks,
    /// Cancelled when gpushd stops.
    pub(crate) stopping: CancellationToken,
}
