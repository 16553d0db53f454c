//! What lies outside of gpushd and its driver worker: programs that run beside, other processes.

use std::{collections::BTreeMap, path::PathBuf, sync::Arc};

use gpush_core::config::ModeChange;
use gpush_host::helper::Helpers;
use gpush_store::OperationId;
use tokio::sync::{Mutex, RwLock};

/// The outside.
#[derive(Debug)]
pub(crate) struct Outside {
    /// Programs that run beside.
    pub(crate) helpers: Helpers,
    /// Where processes are looked for.
    pub(crate) proc: PathBuf,
    /// `nvidia-smi`, when the command line names another than the config's default.
    pub(crate) nvidia_smi: Option<PathBuf>,
    /// Written while the driver worker is ended for the sake of a reset.
    pub(crate) driverless: Arc<RwLock<()>>,
    /// Services that are to be started again and can't be, by the operation that they were stopped for.
    pub(crate) not_started: std::sync::Mutex<BTreeMap<OperationId, Vec<String>>>,
    /// Held while services are stopped or started around a reset.
    pub(crate) services: Mutex<()>,
}

impl Outside {
    /// The program that resets GPUs.
    pub(crate) fn nvidia_smi(&self, config: &ModeChange) -> String {
        let named = self.nvidia_smi.as_ref().filter(|_| config.nvidia_smi == ModeChange::default().nvidia_smi);
        named.map_or_else(|| config.nvidia_smi.clone(), |path| path.to_string_lossy().into_owned())
    }
}
