//! The lane of a GPU, locked by a reconciler.

use super::Lanes;
use crate::state::Holder;
use gpush_api::GpuUuid;

/// The lane of a GPU, locked by a reconciler. Dropping this value frees the lane.
#[derive(Debug)]
pub(crate) struct LaneLock {
    lanes: Lanes,
    uuid: GpuUuid,
}

impl Lanes {
    /// Locks the lane of a GPU for a reconciler if the lane is free.
    pub(crate) fn try_lock(&self, uuid: &GpuUuid) -> Option<LaneLock> {
        let mut known = self.states();
        let is_free =
            !known.claimed.contains_key(uuid) && known.at_work.get(uuid).is_none_or(|at_work| !at_work.reconciler);
        is_free.then(|| {
            known.update_activity(uuid, |at_work| at_work.reconciler = true);
            LaneLock { lanes: self.clone(), uuid: uuid.clone() }
        })
    }

    /// Waits until the lane of a GPU is free, and locks it. Returns `None` if an operation is changing the GPU. That
    /// operation does the reconciler's work itself, and wakes the reconcilers when it ends.
    pub(crate) async fn lock(&self, uuid: &GpuUuid) -> Option<LaneLock> {
        let (mut room, mut finished) = (self.room(), self.0.finished.subscribe());
        loop {
            // Mark changes as seen before the attempt. So a change during the attempt wakes this task.
            room.mark_unchanged();
            finished.mark_unchanged();
            if let Some(turn) = self.try_lock(uuid) {
                return Some(turn);
            }
            // Return only if the operation has begun. While the operation is still being planned, wait: it soon begins
            // or releases its claim.
            if self.states().claimed.get(uuid).is_some_and(Holder::has_begun) {
                return None;
            }
            tokio::select! {
                changed = room.changed() => changed.ok()?,
                changed = finished.changed() => changed.ok()?,
            }
        }
    }
}

impl Drop for LaneLock {
    fn drop(&mut self) {
        self.lanes.states().update_activity(&self.uuid, |at_work| at_work.reconciler = false);
        self.lanes.finish();
    }
}
