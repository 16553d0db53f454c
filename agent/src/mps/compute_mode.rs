//! The compute mode of a GPU that is shared through MPS: exclusive process, so that nobody computes there
//! past the daemon; and the one from before, put back when that is over.
//!
//! It is needed from when an operation is about to bring up the daemon until nothing of that is left. A
//! daemon that never came up needs none: what tries to start it goes on without.

use gpush_api::{ComputeMode, Mode, MpsComputeMode};
use gpush_core::sharing::Target;

use super::{Mps, place::Place};
use crate::{agent::Shared, shared_gpus};

impl Mps {
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

/// Sees to the compute mode of a GPU that is about to be shared, or is.
pub(super) async fn take(agent: &Shared, target: &Target, wanted: MpsComputeMode) {
    match wanted {
        MpsComputeMode::Keep => return,
        MpsComputeMode::ExclusiveProcess => {}
    }
    let mode = ComputeMode::ExclusiveProcess;
    match shared_gpus::take(agent, &target.gpu_uuid, mode, Mode::Mps).await {
        Ok(None) => {}
        Ok(Some(before)) => tracing::info!(gpu = target.gpu_uuid, "its compute mode is {mode}, it was {before}"),
        Err(why) => tracing::error!(gpu = target.gpu_uuid, "{why}"),
    }
}

/// Puts the compute mode back that a GPU had before it was shared; what can't be done now is done later.
pub(super) async fn put_back(agent: &Shared, uuid: &str) {
    match shared_gpus::put_back(agent, uuid, Mode::Mps).await {
        Ok(None) => {}
        Ok(Some(mode)) => tracing::info!(gpu = uuid, "its compute mode is {mode} again"),
        Err(why) => tracing::error!(gpu = uuid, "{why}; tried again"),
    }
    agent.shared_gpus.look();
}

/// Puts it back after an operation could not bring up the daemon, as that ends with the GPU as it was.
pub(super) async fn not_come(agent: &Shared, operation: &str, uuid: &str) {
    if let Some(moves) = agent.mps.moves().get_mut(operation) {
        moves.coming.remove(uuid);
    }
    // One that is there and does not answer in time keeps it: somebody could get past it otherwise.
    if !agent.mps.needs_compute_mode(uuid) {
        put_back(agent, uuid).await;
    }
}
