//! The data from which snapshots are made: the last input of each kind. The lock of [`State`](super::State) protects
//! this data.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::Arc,
};

use gpush_api::{Gpu, GpuAspect, GpuChange, PendingAim, TimesliceView};
use gpush_core::{config::Config, desired};
use gpush_nvml::{DriverError, ErrorKind, Listed};
use gpush_store::Lost;

use super::{
    Conditions, GpuSnapshot, HostState, LeaseTable, Overrides,
    gpu::ListedGpu,
    host::ResponseCache,
    readings::{LastReading, Moment},
};

/// The operation that has claimed a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Holder {
    /// An operation that gpushd is still planning. It has no id yet and changes nothing.
    Planning,
    /// The operation with this id, which has begun to change the GPU.
    Operation(String),
}

impl Holder {
    /// Returns whether the operation has begun to change the GPU.
    pub(crate) fn has_begun(&self) -> bool {
        match self {
            Self::Planning => false,
            Self::Operation(_) => true,
        }
    }
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Planning => f.write_str("an operation that is being planned"),
            Self::Operation(id) => write!(f, "operation {id}"),
        }
    }
}

/// The data from which snapshots are made.
#[derive(Debug)]
pub(super) struct SnapshotSources {
    pub(super) config: Arc<Config>,
    /// `false` if neither the config file nor its copy can be used, although an earlier gpushd had rules. `config` then
    /// has no rules.
    pub(super) rules_are_known: bool,
    /// For each GPU, by UUID, which rule of the config claims it: the position of the rule, or `None` if no rule does.
    pub(super) claims: BTreeMap<String, Option<usize>>,
    pub(super) loss: Loss,
    pub(super) conditions: Conditions,
    pub(super) overrides: Overrides,
    pub(super) list: LastReading<Arc<Vec<Listed>>>,
    /// All GPUs that the driver has ever listed, by UUID.
    pub(super) sights: BTreeMap<String, ListedGpu>,
    pub(super) nameless: Vec<(u32, DriverError)>,
    /// UUIDs of the GPUs on which a driver call may still take effect.
    pub(super) unsettled: BTreeSet<String>,
    /// For each GPU that an operation has claimed, by UUID, that operation.
    pub(super) lanes: BTreeMap<String, Holder>,
    /// UUIDs of the GPUs on which an MPS daemon for the whole GPU is in force.
    pub(super) shared: BTreeSet<String>,
    /// For each GPU, by UUID, the processes that must not use it.
    pub(super) unleased: BTreeMap<String, Vec<gpush_api::UnleasedProcess>>,
    /// For each GPU, by UUID, what prevents gpushd from applying its rule.
    pub(super) blocked_by: BTreeMap<String, Vec<gpush_api::Holder>>,
    /// Time-slice levels as last read.
    pub(super) levels: BTreeMap<String, TimesliceView>,
    /// For each GPU, by UUID, the fields that the last event reported.
    pub(super) reported: BTreeMap<String, GpuChange>,
    /// Leases that have not ended.
    pub(super) leases: Arc<LeaseTable>,
    /// For each GPU, by UUID, the changes that leases have delayed and that gpushd has not made since.
    pub(super) delayed: BTreeMap<String, Vec<PendingAim>>,
}

#[derive(Debug)]
pub(super) struct Loss {
    pub(super) lost: Option<Lost>,
    pub(super) known_since: Option<u64>,
}

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
            last_event,
            changes,
            answers: ResponseCache::default(),
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
fn destroyed_device_uuids(before: &GpuChange, now: &GpuChange) -> Vec<String> {
    // Without a reading, it is not known which devices exist.
    if now.mig.is_none() {
        return Vec::new();
    }
    let now: BTreeSet<&String> = now.instances.iter().flat_map(|instance| &instance.device_uuids).collect();
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
