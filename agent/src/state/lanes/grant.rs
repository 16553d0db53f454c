//! Grants of leases. A grant never starts on a GPU that an operation has claimed.

use gpush_api::GpuUuid;
use std::collections::{BTreeMap, BTreeSet};

use super::Lanes;
use crate::state::Holder;

/// Shows that gpushd is recording a grant on a GPU. No operation on the GPU begins before this
/// value is dropped.
#[derive(Debug)]
pub(crate) struct Grant {
    lanes: Lanes,
    gpu: GpuUuid,
}

/// How often operations have begun or ended on each GPU, at one moment. Readings that began after this moment show the
/// present instances of a GPU, as long as [`Lanes::has_changed`] returns `false` and no operation has claimed the GPU.
#[derive(Debug, Clone, Default)]
pub(crate) struct LaneChanges(BTreeMap<GpuUuid, u64>);

impl LaneChanges {
    /// Returns how often operations have begun or ended on a GPU.
    pub(crate) fn of(&self, gpu: &GpuUuid) -> u64 {
        self.0.get(gpu).copied().unwrap_or_default()
    }

    /// Notes that an operation has begun or ended on these GPUs.
    pub(super) fn note(&mut self, gpus: &[GpuUuid]) {
        gpus.iter().for_each(|gpu| *self.0.entry(gpu.clone()).or_default() += 1);
    }
}

impl Lanes {
    /// Returns how often operations have begun or ended on each GPU. Call this before the readings for a placement begin.
    pub(crate) fn changes(&self) -> LaneChanges {
        self.states().changes.clone()
    }

    /// Returns whether an operation has begun or ended on one of these GPUs since `before`. Call this while a grant or a
    /// claim keeps operations from the GPUs.
    pub(crate) fn has_changed<'a>(&self, mut gpus: impl Iterator<Item = &'a GpuUuid>, before: &LaneChanges) -> bool {
        let known = self.states();
        gpus.any(|gpu| known.changes.0.get(gpu) != before.0.get(gpu))
    }

    /// Registers a grant on all of these GPUs. If an operation claims one of these GPUs later, the
    /// operation begins only after the grant.
    ///
    /// # Errors
    /// If an operation has claimed one of the GPUs. Returns the UUID of the GPU, and the operation.
    pub(crate) fn begin_grant(&self, gpus: &BTreeSet<GpuUuid>) -> Result<Vec<Grant>, (GpuUuid, Holder)> {
        let mut known = self.states();
        if let Some((gpu, holder)) = gpus.iter().find_map(|gpu| Some((gpu, known.claimed.get(gpu)?))) {
            return Err((gpu.clone(), holder.clone()));
        }
        let grants = gpus.iter().map(|gpu| {
            known.update_activity(gpu, |at_work| at_work.grants += 1);
            Grant { lanes: self.clone(), gpu: gpu.clone() }
        });
        Ok(grants.collect())
    }
}

impl Drop for Grant {
    fn drop(&mut self) {
        self.lanes.states().update_activity(&self.gpu, |at_work| at_work.grants -= 1);
        self.lanes.finish();
    }
}
