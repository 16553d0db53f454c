//! The compute mode of a GPU that is shared through MPS: exclusive process, so that nobody computes there
//! past the daemon; and the one from before, put back when that is over.
//!
//! It is needed from when an operation is about to bring up the daemon until nothing of that is left. A
//! daemon that never came up needs none: what tries to start it goes on without.

use std::{
    collections::BTreeMap,
    sync::{MutexGuard, PoisonError},
};

use gpush_api::{ApiError, Code, ComputeMode, Mode, MpsComputeMode};
use gpush_core::sharing::Target;
use gpush_mps::daemon::TargetDir as Place;

use super::Mps;

impl Mps {
    fn open(&self) -> MutexGuard<'_, BTreeMap<String, String>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a full GPU needs its compute mode for a daemon.
    pub(crate) fn needs_compute_mode(&self, uuid: &str) -> bool {
        self.is_in_force(uuid) || self.moving().coming.contains(uuid) || self.has_something_of(uuid)
    }

    /// Whether a daemon, or a server that one left behind, is there.
    fn has_something_of(&self, uuid: &str) -> bool {
        let Some(entry) = self.entries().get(uuid).cloned() else { return false };
        let seen = entry.daemon.seen();
        !seen.state.is_down() || seen.pid.is_some() || Place::of(&self.base, &entry.short).is_taken()
    }
}

/// Sees to the compute mode of a GPU that is about to be shared, or is. Why it has not the one that it shall have is
/// told of its daemon, and in health, until it has.
pub(super) async fn take(mps: &Mps, target: &Target, wanted: MpsComputeMode) {
    let gpu = &target.gpu_uuid;
    match wanted {
        MpsComputeMode::Keep => {
            mps.open().remove(gpu);
            return;
        }
        MpsComputeMode::ExclusiveProcess => {}
    }
    let mode = ComputeMode::ExclusiveProcess;
    match mps.handles.shared_gpus.take(gpu, mode, Mode::Mps, || mps.needs_compute_mode(gpu)).await {
        Ok(before) => {
            mps.open().remove(gpu);
            if let Some(before) = before {
                tracing::info!(gpu, "its compute mode is {mode}, it was {before}");
            }
        }
        Err(why) => {
            if mps.open().insert(gpu.clone(), why.clone()).as_ref() != Some(&why) {
                tracing::error!(gpu, "{why}");
            }
        }
    }
}

/// That programs can get past MPS on a GPU, where they can and are not to.
pub(super) fn gets_past(mps: &Mps, gpu_uuid: &str, label: &str) -> Option<ApiError> {
    let why = mps.open().get(gpu_uuid).cloned()?;
    let message = format!("programs can get past MPS on {label}: it is not in compute mode EXCLUSIVE_PROCESS");
    Some(
        ApiError::new(Code::DriverError, message)
            .cause(why)
            .hint("gpushd tries again by itself; a rule with `compute_mode = \"keep\"` goes without")
            .retryable(),
    )
}

/// Puts the compute mode back that a GPU had before it was shared; what can't be done now is done later.
pub(super) async fn put_back(mps: &Mps, uuid: &str) {
    mps.open().remove(uuid);
    match mps.handles.shared_gpus.put_back(uuid, Mode::Mps).await {
        Ok(None) => {}
        Ok(Some(mode)) => tracing::info!(gpu = uuid, "its compute mode is {mode} again"),
        Err(why) => tracing::error!(gpu = uuid, "{why}; tried again"),
    }
    mps.handles.shared_gpus.look();
}

/// Puts it back after an operation could not bring up the daemon, as that ends with the GPU as it was.
pub(super) async fn not_come(mps: &Mps, operation: &str, uuid: &str) {
    if let Some(moves) = mps.moves().get_mut(operation) {
        moves.coming.remove(uuid);
    }
    // One that is there and does not answer in time keeps it: somebody could get past it otherwise.
    if !mps.needs_compute_mode(uuid) {
        put_back(mps, uuid).await;
    }
}
