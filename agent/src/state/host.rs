//! A snapshot of the host. Only [`State`](super::State) makes snapshots; all other modules read
//! them.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
};

use axum::body::Bytes;
use gpush_api::Maintenance;
use gpush_core::config::Config;
use gpush_nvml::DriverError;
use gpush_store::Lost;

use super::{GpuSnapshot, LeaseTable};
use crate::caller::Viewer;

/// The host at one moment; immutable.
#[derive(Debug, Clone)]
pub(crate) struct HostState {
    /// GPUs by index. GPUs that the driver no longer lists come last.
    pub(crate) gpus: Vec<Arc<GpuSnapshot>>,
    /// GPUs that the driver lists but cannot identify: index and error.
    pub(crate) nameless: Vec<(u32, DriverError)>,
    /// Why no GPU can be shown: there is no driver, or it has not answered yet.
    pub(crate) driver: Option<DriverError>,
    /// Whether the GPUs were ever listed.
    pub(crate) was_listed: bool,
    /// The active config.
    pub(crate) config: Arc<Config>,
    /// Generation of the desired state.
    pub(crate) generation: u64,
    /// The current maintenance of the host.
    pub(crate) maintenance: Option<Maintenance>,
    /// A loss of the database that no administrator has accepted yet.
    pub(crate) lost: Option<Lost>,
    /// Leases that have not ended.
    pub(crate) leases: Arc<LeaseTable>,
    /// Id of the last event before this snapshot.
    pub(crate) last_event: String,
    /// Number of GPU events so far. Equal numbers mean that no GPU has changed.
    pub(crate) changes: u64,
    /// Responses about all GPUs that were made from this snapshot.
    pub(crate) answers: ResponseCache,
}

/// Responses about all GPUs, as JSON, by viewer. The responses belong to one snapshot, so they need
/// no invalidation.
#[derive(Debug, Clone, Default)]
pub(crate) struct ResponseCache(Arc<Mutex<BTreeMap<Viewer, Bytes>>>);

impl ResponseCache {
    /// Maximum number of viewers with a stored response: administrators, users without processes, some users with
    /// processes.
    const MOST: usize = 8;

    /// Returns the stored response for a viewer.
    pub(crate) fn get(&self, viewer: Viewer) -> Option<Bytes> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(&viewer).cloned()
    }

    /// Stores the response for a viewer.
    pub(crate) fn insert(&self, viewer: Viewer, json: Bytes) {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() < Self::MOST {
            kept.insert(viewer, json);
        }
    }
}
