//! Wakes the reconcilers of GPUs.

use gpush_api::GpuUuid;
use std::{collections::BTreeMap, sync::MutexGuard};

use gpush_locked::Locked;
use tokio::sync::watch;

/// One channel per GPU, by UUID. If a reconciler is woken while it runs, it runs once more.
#[derive(Debug, Default)]
pub(super) struct Wakes(Locked<BTreeMap<GpuUuid, watch::Sender<()>>>);

impl Wakes {
    fn all(&self) -> MutexGuard<'_, BTreeMap<GpuUuid, watch::Sender<()>>> {
        self.0.lock()
    }

    /// Subscribes to the wakeups of a GPU.
    pub(super) fn follow(&self, gpu: &GpuUuid) -> watch::Receiver<()> {
        self.all().entry(gpu.clone()).or_default().subscribe()
    }

    /// Wakes the reconciler of a GPU.
    pub(super) fn wake(&self, gpu: &GpuUuid) {
        self.all().entry(gpu.clone()).or_default().send_replace(());
    }

    /// Wakes the reconcilers of all GPUs.
    pub(super) fn wake_all(&self) {
        self.all().values().for_each(|wake| wake.send_replace(()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wakeup_reaches_its_gpu_and_is_kept() {
        let wakes = Wakes::default();
        let (mut one, mut other) = (wakes.follow(&"GPU-1".into()), wakes.follow(&"GPU-2".into()));
        wakes.wake(&"GPU-1".into());
        assert!(one.has_changed().unwrap() && !other.has_changed().unwrap());
        one.mark_unchanged();
        wakes.wake(&"GPU-1".into());
        wakes.wake_all();
        assert!(one.has_changed().unwrap() && other.has_changed().unwrap(), "several count once");
        other.mark_unchanged();
        assert!(!other.has_changed().unwrap());
    }
}
