//! Grants of leases. A grant never starts on a GPU that an operation has claimed.

use std::collections::BTreeSet;

use super::Lanes;
use crate::state::Holder;

/// Shows that gpushd is recording a grant on a GPU. No operation on the GPU begins before this
/// value is dropped.
#[derive(Debug)]
pub(crate) struct Grant {
    lanes: Lanes,
    gpu: String,
}

impl Lanes {
    /// Returns the UUIDs of the GPUs that operations have claimed.
    pub(crate) fn claimed(&self) -> BTreeSet<String> {
        self.states().claimed.keys().cloned().collect()
    }

    /// Registers a grant on all of these GPUs. If an operation claims one of these GPUs later, the
    /// operation begins only after the grant.
    ///
    /// # Errors
    /// If an operation has claimed one of the GPUs. Returns the UUID of the GPU, and the operation.
    pub(crate) fn begin_grant(&self, gpus: &BTreeSet<String>) -> Result<Vec<Grant>, (String, Holder)> {
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
