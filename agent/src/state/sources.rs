//! The data from which snapshots are made: the last input of each kind. The lock of [`State`](super::State) protects
//! this data.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use gpush_api::{DeviceEnforcement, GpuChange, GpuIndex, GpuUuid, MpsChange, PendingAim, TargetUuid};
use gpush_core::{config::Config, mps::MpsTargets};
use gpush_nvml::{DriverError, Identity, Listed, Reading};
use gpush_store::Lost;

use super::{Conditions, LeaseTable, Overrides, XidErrors, holder::Holder, levels::Levels, readings::LastReading};

/// The data from which snapshots are made.
#[derive(Debug)]
pub(super) struct SnapshotSources {
    pub(super) config: Arc<Config>,
    /// `false` if neither the config file nor its copy can be used, although an earlier gpushd had rules. `config` then
    /// has no rules.
    pub(super) rules_are_known: bool,
    /// For each GPU, by UUID, which rule of the config claims it: the position of the rule, or `None` if no rule does.
    pub(super) claims: BTreeMap<GpuUuid, Option<usize>>,
    pub(super) loss: Loss,
    pub(super) conditions: Conditions,
    pub(super) overrides: Overrides,
    pub(super) list: LastReading<Arc<Vec<Listed>>>,
    /// All GPUs that the driver has ever listed, by UUID.
    pub(super) sights: BTreeMap<GpuUuid, ListedGpu>,
    pub(super) nameless: Vec<(GpuIndex, DriverError)>,
    /// UUIDs of the GPUs on which a driver call may still take effect.
    pub(super) unsettled: BTreeSet<GpuUuid>,
    /// For each GPU that an operation has claimed, by UUID, that operation.
    pub(super) lanes: BTreeMap<GpuUuid, Holder>,
    /// For each GPU, by UUID, the processes that must not use it.
    pub(super) unleased: BTreeMap<GpuUuid, Vec<gpush_api::UnleasedProcess>>,
    /// For each GPU, by UUID, what prevents gpushd from applying its rule.
    pub(super) blocked_by: BTreeMap<GpuUuid, Vec<gpush_api::Holder>>,
    /// Time-slice levels as last read.
    pub(super) levels: Arc<Levels>,
    /// MPS targets, with the last reports about their daemons.
    pub(super) mps: Arc<MpsTargets>,
    /// For each MPS target, by UUID, its last event.
    pub(super) mps_events: BTreeMap<TargetUuid, MpsChange>,
    /// For each GPU, by UUID, the fields that the last event reported.
    pub(super) reported: BTreeMap<GpuUuid, GpuChange>,
    /// Leases that have not ended.
    pub(super) leases: Arc<LeaseTable>,
    /// For each GPU, by UUID, the changes that leases have delayed and that gpushd has not made since.
    pub(super) delayed: BTreeMap<GpuUuid, Vec<PendingAim>>,
    /// Xid errors that the driver has reported.
    pub(super) xids: Arc<XidErrors>,
    /// Whether the kernel denies the GPUs to login sessions.
    pub(super) enforcement: Arc<DeviceEnforcement>,
}

#[derive(Debug)]
pub(super) struct Loss {
    pub(super) lost: Option<Lost>,
    pub(super) known_since: Option<u64>,
}

/// A GPU in the driver's list, and its last reading.
#[derive(Debug, Clone)]
pub(super) struct ListedGpu {
    /// The identity of the GPU when the driver last listed it.
    pub(super) identity: Identity,
    /// Whether the driver lists the GPU now.
    pub(super) listed: bool,
    /// The driver's error, if the driver lists a GPU at this index but cannot identify the GPU.
    pub(super) list_error: Option<DriverError>,
    pub(super) last: LastReading<Arc<Reading>>,
}
