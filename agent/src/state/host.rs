//! A snapshot of the host. Only [`State`](super::State) creates snapshots.

use std::{collections::BTreeSet, sync::Arc};

use gpush_api::{DeviceEnforcement, GpuIndex, GpuUuid, Maintenance};
use gpush_core::{config::Config, mps::MpsTargets};
use gpush_nvml::DriverError;
use gpush_store::Lost;

use super::{GpuSnapshot, LeaseTable, XidErrors, levels::Levels};

/// A snapshot of the host at one moment. A snapshot never changes.
#[derive(Debug, Clone)]
pub(crate) struct HostState {
    /// The GPUs, sorted by index. GPUs that the driver no longer lists come last.
    pub(crate) gpus: Vec<Arc<GpuSnapshot>>,
    /// The GPUs that the driver lists but cannot identify: their index and the error.
    pub(crate) nameless: Vec<(GpuIndex, DriverError)>,
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
    /// MPS targets, with the last reports about their daemons.
    pub(crate) mps: Arc<MpsTargets>,
    /// Xid errors that the driver has reported since this gpushd started.
    pub(crate) xids: Arc<XidErrors>,
    /// Whether the kernel denies the GPUs to login sessions, as the last probes have shown.
    pub(crate) enforcement: Arc<DeviceEnforcement>,
    /// UUIDs of the GPUs that operations have claimed.
    pub(crate) claimed: BTreeSet<GpuUuid>,
    /// Id of the last event that was published before this snapshot.
    pub(crate) last_event: String,
    /// How many GPU events were published so far. If two snapshots have the same number, no GPU has changed in between.
    pub(crate) changes: u64,
}
