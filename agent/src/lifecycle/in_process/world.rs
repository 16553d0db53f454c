//! The host of an in-process test: its GPUs, its programs and its files. One gpushd after another can run on it.

use std::{sync::Arc, time::Duration};

use gpush_api::Gpu;
use gpush_core::preset;
use gpush_locked::Locked;
use tokio::runtime;

use super::{BOOT, InProcess, daemons::ScriptedMps, gpus::ScriptedGpus, smi::ScriptedSmi};

/// The parts of a host that outlive gpushd.
#[derive(Debug)]
pub(super) struct World {
    pub(super) gpus: Arc<ScriptedGpus>,
    pub(super) daemons: Arc<ScriptedMps>,
    pub(super) smi: Arc<ScriptedSmi>,
    /// Interval at which gpushd reads the time-slice levels.
    pub(super) level_interval: Locked<Duration>,
    /// The directory of the store, of the config and of the MPS daemons.
    pub(super) directory: tempfile::TempDir,
}

impl World {
    /// Creates a host with the first `count` GPUs of a preset.
    pub(super) fn new(preset: &str, count: usize) -> Arc<Self> {
        let mut gpus = preset::gpus(preset).expect("a preset");
        gpus.truncate(count);
        Self::of(&gpus)
    }

    /// Creates a host with these GPUs.
    pub(super) fn of(gpus: &[Gpu]) -> Arc<Self> {
        let directory = tempfile::tempdir().expect("a directory");
        let programs = directory.path().join("programs");
        std::fs::create_dir(&programs).expect("a directory");
        for name in ["nvidia-cuda-mps-control", "nvidia-cuda-mps-server"] {
            std::os::unix::fs::symlink("/bin/true", programs.join(name)).expect("a link");
        }
        // As in the directory of a real gpushd. It separates the leases of programs in concurrent tests.
        let mps = directory.path().join("mps");
        std::fs::create_dir(&mps).and_then(|()| std::fs::write(mps.join("agent.lock"), "")).expect("a directory");
        let smi = ScriptedSmi::new(gpus.iter().map(|gpu| gpu.uuid.clone()));
        let level_interval = Locked::new(crate::modes::timeslice::INTERVAL);
        Arc::new(Self { gpus: ScriptedGpus::new(gpus), daemons: ScriptedMps::new(), smi, level_interval, directory })
    }

    /// Runs a gpushd with this config until the end of `test`. gpushd then ends as if it was killed: what it has not
    /// recorded is lost.
    pub(super) fn run(self: &Arc<Self>, config: &str, test: impl AsyncFnOnce(&InProcess)) {
        self.run_after_boot(BOOT, config, test);
    }

    /// Does the same as [`Self::run`], on the boot with this id.
    pub(super) fn run_after_boot(self: &Arc<Self>, boot: &str, config: &str, test: impl AsyncFnOnce(&InProcess)) {
        let runtime = runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime");
        runtime.block_on(async {
            let host = InProcess::start_on(Arc::clone(self), boot, config).await;
            test(&host).await;
        });
        runtime.shutdown_timeout(Duration::from_secs(5));
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.daemons.end(&self.directory.path().join("mps"));
    }
}
