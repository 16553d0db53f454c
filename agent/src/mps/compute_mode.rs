//! The compute mode of GPUs that are shared through MPS. gpushd sets EXCLUSIVE_PROCESS, so that
//! programs cannot bypass the daemon, and later restores the previous mode.
//!
//! The GPU needs EXCLUSIVE_PROCESS from just before an operation starts the daemon until all processes of the daemon
//! have exited. If the operation could not start the daemon, the GPU no longer needs the mode, even if gpushd will try
//! to start the daemon again.

use std::{collections::BTreeMap, sync::MutexGuard};

use gpush_api::{ApiError, Code, ComputeMode, Mode, MpsComputeMode};
use gpush_core::sharing::SharingTarget;
use gpush_mps::daemon::TargetDir;

use super::Mps;

impl Mps {
    fn bypass_reasons(&self) -> MutexGuard<'_, BTreeMap<String, String>> {
        self.open.lock()
    }

    /// Returns whether a whole GPU needs the compute mode EXCLUSIVE_PROCESS for a daemon.
    pub(crate) fn needs_compute_mode(&self, uuid: &str) -> bool {
        self.is_active(uuid)
            || self.all_operation_daemons().starting.contains(uuid)
            || self.has_daemon_or_leftovers(uuid)
    }

    /// Returns whether the GPU has a daemon, or leftover processes of an exited daemon.
    fn has_daemon_or_leftovers(&self, uuid: &str) -> bool {
        let Some(entry) = self.entries().get(uuid).cloned() else { return false };
        let seen = entry.daemon.last_report();
        !seen.state.is_down() || seen.pid.is_some() || TargetDir::of(&self.base, &entry.short).is_locked()
    }
}

/// Sets the compute mode of a GPU that is shared through MPS or will soon be shared. If this fails, health and the
/// daemon's findings report the reason until an attempt succeeds.
pub(super) async fn set_compute_mode(mps: &Mps, target: &SharingTarget, wanted: MpsComputeMode) {
    let gpu = &target.gpu_uuid;
    match wanted {
        MpsComputeMode::Keep => {
            mps.bypass_reasons().remove(gpu);
            return;
        }
        MpsComputeMode::ExclusiveProcess => {}
    }
    let mode = ComputeMode::ExclusiveProcess;
    match mps.handles.shared_gpus.set_compute_mode(gpu, mode, Mode::Mps, || mps.needs_compute_mode(gpu)).await {
        Ok(before) => {
            mps.bypass_reasons().remove(gpu);
            if let Some(before) = before {
                tracing::info!(gpu, "GPU {gpu}: its compute mode changed from {before} to {mode}");
            }
        }
        // During maintenance gpushd cannot access the driver. The state `maintenance` already explains why the mode is
        // not set, so do not report this error.
        Err(_) if mps.handles.state.maintenance().is_some() => {}
        Err(why) => {
            if mps.bypass_reasons().insert(gpu.clone(), why.clone()).as_ref() != Some(&why) {
                tracing::error!(gpu, "{why}");
            }
        }
    }
}

/// Returns an error if programs can bypass MPS, because the compute mode of the GPU could not be set.
pub(super) fn bypass_error(mps: &Mps, gpu_uuid: &str, label: &str) -> Option<ApiError> {
    let why = mps.bypass_reasons().get(gpu_uuid).cloned()?;
    let message = format!("programs can bypass MPS on {label}: it is not in compute mode EXCLUSIVE_PROCESS");
    Some(
        ApiError::new(Code::DriverError, message)
            .cause(why)
            .hint("gpushd tries again; to leave the compute mode unchanged, set `compute_mode = \"keep\"` in the rule")
            .retryable(),
    )
}

/// Restores the compute mode that a GPU had before it was shared. If that fails, gpushd retries later.
pub(super) async fn restore_compute_mode(mps: &Mps, uuid: &str) {
    mps.bypass_reasons().remove(uuid);
    match mps.handles.shared_gpus.restore_compute_mode(uuid, Mode::Mps).await {
        Ok(None) => {}
        Ok(Some(mode)) => tracing::info!(gpu = uuid, "GPU {uuid}: its compute mode is {mode} again"),
        Err(why) => tracing::error!(gpu = uuid, "GPU {uuid}: {why}; gpushd tries again"),
    }
    mps.handles.shared_gpus.wake_leftover_check();
}

/// Restores the compute mode if an operation could not start the daemon.
pub(super) async fn restore_after_failed_start(mps: &Mps, operation: &str, uuid: &str) {
    if let Some(moves) = mps.operation_daemons().get_mut(operation) {
        moves.starting.remove(uuid);
    }
    // If the daemon runs but has not answered in time, keep the mode, so that programs cannot bypass the daemon.
    if !mps.needs_compute_mode(uuid) {
        restore_compute_mode(mps, uuid).await;
    }
}
