//! A snapshot of the host. Only [`State`](super::State) creates snapshots.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use axum::body::Bytes;
use gpush_api::Maintenance;
use gpush_core::config::Config;
use gpush_locked::Locked;
use gpush_nvml::DriverError;
use gpush_store::Lost;

use super::{GpuSnapshot, LeaseTable, levels::Levels};
use crate::caller::Viewer;

/// A snapshot of the host at one moment. A snapshot never changes.
#[derive(Debug, Clone)]
pub(crate) struct HostState {
    /// The GPUs, sorted by index. GPUs that the driver no longer lists come last.
    pub(crate) gpus: Vec<Arc<GpuSnapshot>>,
    /// The GPUs that the driver lists but cannot identify: their index and the error.
    pub(crate) nameless: Vec<(u32, DriverError)>,
    /// Why gpushd cannot show any GPU: there is no driver, or it has not answered yet.
    pub(crate) driver: Option<DriverError>,
    /// Whether the driver has ever listed the GPUs.
    pub(crate) was_listed: bool,
    /// The active config.
    pub(crate) config: Arc<Config>,
    /// `false` if neither the config file nor its copy can be used, although an earlier gpushd had rules. All GPUs are
    /// then held, because the earlier config may have shared them.
    pub(crate) rules_are_known: bool,
    /// Generation of the desired state.
    pub(crate) generation: u64,
    /// The current maintenance of the host.
    pub(crate) maintenance: Option<Maintenance>,
    /// The loss of the database, if no administrator has accepted it yet.
    pub(crate) lost: Option<Lost>,
    /// Leases that have not ended.
    pub(crate) leases: Arc<LeaseTable>,
    /// Time-slice levels as last read.
    pub(crate) levels: Arc<Levels>,
    /// Id of the last event that was published before this snapshot.
    pub(crate) last_event: String,
    /// How many GPU events were published so far. If two snapshots have the same number, no GPU has changed in between.
    pub(crate) changes: u64,
    /// The responses about all GPUs that gpushd has made from this snapshot.
    pub(crate) answers: ResponseCache,
}

/// The responses about all GPUs as JSON, by viewer and by the UUIDs of the GPUs that gpushd is still reading. The cache
/// belongs to one snapshot, so its responses never become outdated.
#[derive(Debug, Clone, Default)]
pub(crate) struct ResponseCache(Arc<Locked<BTreeMap<ResponseKey, Bytes>>>);

type ResponseKey = (Viewer, BTreeSet<String>);

impl ResponseCache {
    /// Maximum number of stored responses: for administrators, users without processes, and some users with processes.
    const MOST: usize = 8;

    /// Returns the stored response for a viewer. `late` has the UUIDs of the GPUs that gpushd is still reading.
    pub(crate) fn get(&self, viewer: Viewer, late: &BTreeSet<String>) -> Option<Bytes> {
        self.0.lock().get(&(viewer, late.clone())).cloned()
    }

    /// Stores the response for a viewer.
    pub(crate) fn insert(&self, viewer: Viewer, late: &BTreeSet<String>, json: Bytes) {
        let mut kept = self.0.lock();
        if kept.len() < Self::MOST {
            kept.insert((viewer, late.clone()), json);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn response_is_stored_for_its_viewer_and_its_late_gpus() {
        let cache = ResponseCache::default();
        let (none, late) = (BTreeSet::new(), BTreeSet::from(["GPU-1".to_owned()]));
        cache.insert(Viewer::Admin, &none, Bytes::from_static(b"[]"));
        assert!(cache.get(Viewer::Admin, &none).is_some());
        assert!(cache.get(Viewer::Admin, &late).is_none());
        assert!(cache.get(Viewer::Agent, &none).is_none());
    }
}
