//! Host services that gpushd uses in addition to its driver worker.

use std::{collections::BTreeMap, path::PathBuf, sync::Arc, time::Duration};

use gpush_core::config::ModeChange;
use gpush_host::{helper::Helpers, systemd::Manager};
use gpush_locked::Locked;
use gpush_store::OperationId;
use tokio::sync::{Mutex, RwLock};

use super::constants::Constants;

#[derive(Debug)]
pub(crate) struct HostServices {
    /// Runs helper units, such as the units of hooks.
    pub(crate) helpers: Helpers,
    /// The `/proc` of this host or of a simulated host.
    pub(crate) proc: PathBuf,
    /// Path of `nvidia-smi` from the command line. Used if the config does not name another path.
    pub(crate) nvidia_smi: Option<PathBuf>,
    /// systemd in a script; `None` for the one of this host.
    pub(crate) systemd: Option<Arc<Manager>>,
    /// Interval at which gpushd reads time-slice levels if nothing changes.
    pub(crate) level_interval: Duration,
    /// Time limits and other values that the config does not set.
    pub(crate) constants: Constants,
    /// The lock for use of the driver. Locked for writing while the driver worker is stopped for a
    /// reset.
    pub(crate) driverless: Arc<RwLock<()>>,
    /// Services that gpushd cannot start again. The key is the operation that stopped them.
    pub(crate) not_started: Locked<BTreeMap<OperationId, Vec<String>>>,
    /// Locked while services are stopped or started around an operation.
    pub(crate) services: Mutex<()>,
}

impl HostServices {
    /// Returns the path of the program that resets GPUs.
    pub(crate) fn nvidia_smi(&self, config: &ModeChange) -> String {
        let named = self.nvidia_smi.as_ref().filter(|_| config.nvidia_smi == ModeChange::default().nvidia_smi);
        named.map_or_else(|| config.nvidia_smi.clone(), |path| path.to_string_lossy().into_owned())
    }
}
