//! The compute mode of a GPU that is shared through MPS: exclusive process, so that nobody computes there
//! past the daemon; and the one from before, put back when that is over.

use gpush_api::{ComputeMode, Mode, MpsComputeMode};
use gpush_core::sharing::Target;

use crate::{agent::Shared, shared_gpus};

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

/// Puts the compute mode back that a GPU had before it was shared.
pub(super) async fn put_back(agent: &Shared, uuid: &str) {
    match shared_gpus::put_back(agent, uuid, Mode::Mps).await {
        Ok(None) => {}
        Ok(Some(mode)) => tracing::info!(gpu = uuid, "its compute mode is {mode} again"),
        Err(why) => tracing::error!(gpu = uuid, "{why}"),
    }
}
