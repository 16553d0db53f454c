//! Samples of free GPUs from which gpushd learns their power without work. Without this level, gpushd could not tell whether
//! the first lease of a GPU is idle: without leases, nothing else needs samples.

use std::collections::{BTreeMap, BTreeSet};

use gpush_api::GpuUuid;

/// Maximum number of samples of a free GPU. The driver of some GPUs reports no power.
const MOST: u32 = 4;

/// The free GPUs whose power without work is not known, each with the number of its samples.
#[derive(Debug, Default)]
pub(super) struct PowerLearning(BTreeMap<GpuUuid, u32>);

impl PowerLearning {
    /// Notes which GPUs are free, and for which ones the power is known. Returns whether samples are needed.
    pub(super) fn needs_samples<'a>(
        &mut self,
        free: impl Iterator<Item = &'a GpuUuid>,
        known: &BTreeSet<GpuUuid>,
    ) -> bool {
        let unknown = free.filter(|gpu| !known.contains(*gpu));
        self.0 = unknown.map(|gpu| (gpu.clone(), self.0.get(gpu).copied().unwrap_or(0))).collect();
        self.0.values().any(|samples| *samples < MOST)
    }

    /// Notes that all GPUs are sampled.
    pub(super) fn sampled(&mut self) {
        self.0.values_mut().for_each(|samples| *samples += 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fault: on a host without earlier leases, the use of the first lease was never known.
    #[test]
    fn free_gpu_is_sampled_until_its_power_is_known() {
        let gpus: [GpuUuid; 2] = ["GPU-0".into(), "GPU-1".into()];
        let mut learning = PowerLearning::default();
        assert!(learning.needs_samples(gpus.iter(), &BTreeSet::new()));
        learning.sampled();
        let known: BTreeSet<GpuUuid> = [gpus[0].clone()].into();
        assert!(learning.needs_samples(gpus.iter(), &known));
        for _ in 1..MOST {
            assert!(learning.needs_samples(gpus.iter(), &known));
            learning.sampled();
        }
        assert!(!learning.needs_samples(gpus.iter(), &known), "this GPU reports no power");
        assert!(!learning.needs_samples(std::iter::empty(), &known), "a lease has it");
        assert!(learning.needs_samples(gpus.iter(), &known), "it is free again");
    }
}
