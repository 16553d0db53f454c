//! Composes the snapshot of the host from its sources.

use std::{collections::BTreeSet, sync::Arc};

use gpush_api::{Gpu, GpuAspect, GpuChange, TargetUuid};
use gpush_core::desired;
use gpush_nvml::{DriverError, ErrorKind};

use super::{
    GpuSnapshot, HostState,
    readings::{LastReading, Moment},
    sources::{ListedGpu, SnapshotSources},
};

impl SnapshotSources {
    /// Makes a snapshot with these GPUs.
    pub(super) fn snapshot(&self, mut gpus: Vec<Arc<GpuSnapshot>>, last_event: String, changes: u64) -> HostState {
        let listed = |gpu: &GpuSnapshot| self.sights.get(&gpu.gpu.uuid).is_some_and(|sight| sight.listed);
        gpus.sort_by_key(|gpu| (!listed(gpu), gpu.gpu.index));
        let maintenance = self.conditions.maintenance();
        HostState {
            gpus,
            nameless: self.nameless.clone(),
            driver: self.driver_error().filter(|_| maintenance.is_none()),
            was_listed: self.list.good.is_some(),
            config: Arc::clone(&self.config),
            rules_are_known: self.rules_are_known,
            generation: self.overrides.generation(),
            maintenance,
            lost: self.loss.lost.clone(),
            leases: Arc::clone(&self.leases),
            levels: Arc::clone(&self.levels),
            mps: Arc::clone(&self.mps),
            xids: Arc::clone(&self.xids),
            enforcement: Arc::clone(&self.enforcement),
            claimed: self.lanes.keys().cloned().collect(),
            last_event,
            changes,
        }
    }

    pub(super) fn compose(&self, sight: &ListedGpu) -> Arc<GpuSnapshot> {
        let listed_at = self.list.good.as_ref().map_or_else(Moment::now, |(_, at)| *at);
        Arc::new(GpuSnapshot::compose(self, sight, listed_at))
    }

    /// Returns why no GPU can be shown; `None` if the GPUs can be shown.
    fn driver_error(&self) -> Option<DriverError> {
        if let Some(error) = &self.list.error
            && (error.is_driver_unavailable() || self.list.good.is_none())
        {
            return Some(error.clone());
        }
        self.list.good.is_none().then(|| {
            DriverError::new(ErrorKind::WorkerUnavailable, "listing the GPUs").detail("the driver is still starting")
        })
    }

    /// Matches the driver's list with the known GPUs. If the driver lists a GPU but cannot identify it, gpushd assumes
    /// that it is the GPU that last had this index, unless that GPU now has another index.
    pub(super) fn match_list(&mut self) {
        let Some((listed, _)) = self.list.good.clone() else { return };
        for sight in self.sights.values_mut() {
            (sight.listed, sight.list_error) = (false, None);
        }
        let before = self.sights.len();
        let mut moved = false;
        for identity in listed.iter().filter_map(|listed| listed.identity.as_ref().ok()) {
            let sight = self.sights.entry(identity.uuid.clone()).or_insert_with(|| ListedGpu {
                identity: identity.clone(),
                listed: true,
                list_error: None,
                last: LastReading::default(),
            });
            sight.listed = true;
            moved |= sight.identity != *identity;
            sight.identity.clone_from(identity);
        }
        self.nameless.clear();
        for (index, error) in listed.iter().filter_map(|l| l.identity.as_ref().err().map(|error| (l.index, error))) {
            match self.sights.values_mut().find(|sight| !sight.listed && sight.identity.index == index) {
                Some(sight) => {
                    sight.listed = true;
                    // Because of an earlier driver call, the worker did not identify this GPU. Show no error here,
                    // because `unsettled` already shows the reason.
                    sight.list_error = Some(error.clone()).filter(|error| error.kind != ErrorKind::Unsettled);
                }
                None => self.nameless.push((index, error.clone())),
            }
        }
        for sight in self.sights.values_mut().filter(|sight| self.unsettled.contains(&sight.identity.uuid)) {
            sight.listed = true;
        }
        if moved || before != self.sights.len() || self.claims.len() != self.sights.len() {
            self.claim();
        }
    }

    /// Matches the rules of the config with the GPUs.
    pub(super) fn claim(&mut self) {
        let mut identities: Vec<Gpu> =
            self.sights.values().map(|sight| GpuSnapshot::outline(&sight.identity)).collect();
        identities.sort_by_key(|gpu| gpu.index);
        let claims = desired::claims(&self.config, &identities);
        self.claims = identities.into_iter().map(|gpu| gpu.uuid).zip(claims).collect();
    }
}

/// Returns what has changed on a GPU since its last event.
pub(super) fn difference(before: Option<&GpuChange>, now: &GpuChange) -> Option<GpuChange> {
    let changed = match before {
        None => vec![GpuAspect::Appeared],
        Some(before) => aspects(before, now),
    };
    let destroyed_device_uuids = before.map_or_else(Vec::new, |before| destroyed_device_uuids(before, now));
    (!changed.is_empty()).then(|| GpuChange { changed, destroyed_device_uuids, ..now.clone() })
}

/// Returns the UUIDs of the MIG devices that existed before, and do not exist now.
fn destroyed_device_uuids(before: &GpuChange, now: &GpuChange) -> Vec<TargetUuid> {
    // Without a reading, it is not known which devices exist.
    if now.mig.is_none() {
        return Vec::new();
    }
    let now: BTreeSet<&TargetUuid> = now.instances.iter().flat_map(|instance| &instance.device_uuids).collect();
    let before = before.instances.iter().flat_map(|instance| &instance.device_uuids);
    before.filter(|uuid| !now.contains(uuid)).cloned().collect()
}

fn aspects(before: &GpuChange, now: &GpuChange) -> Vec<GpuAspect> {
    let different = [
        (GpuAspect::State, (before.state, &before.reasons) != (now.state, &now.reasons)),
        (GpuAspect::Drift, before.drift != now.drift),
        (GpuAspect::Pending, before.pending != now.pending),
        (GpuAspect::Mig, before.mig != now.mig),
        (GpuAspect::Instances, before.instances != now.instances),
        (GpuAspect::ComputeMode, before.compute_mode != now.compute_mode),
        (GpuAspect::Timeslice, before.timeslice != now.timeslice),
    ];
    different.into_iter().filter(|(_, different)| *different).map(|(aspect, _)| aspect).collect()
}
