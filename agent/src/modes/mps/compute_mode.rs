//! The compute mode of GPUs that are shared through MPS. gpushd sets EXCLUSIVE_PROCESS, so that
//! programs cannot bypass the daemon, and later restores the previous mode.
//!
//! The GPU needs EXCLUSIVE_PROCESS from just before an operation starts the daemon until all processes of the daemon
//! have exited. If the operation could not start the daemon, the GPU no longer needs the mode, even if gpushd will try
//! to start the daemon again.

use gpush_api::{ComputeMode, GpuUuid, Mode, MpsComputeMode, TargetUuid};
use gpush_core::{mps::MpsTarget, sharing::SharingTarget};
use gpush_mps::daemon::TargetDir;

use super::Mps;

impl Mps {
    /// Returns whether a whole GPU needs the compute mode EXCLUSIVE_PROCESS for a daemon.
    pub(crate) fn needs_compute_mode(&self, uuid: &GpuUuid) -> bool {
        let targets = self.handles.context.state.mps();
        targets.is_active(uuid.as_target())
            || targets.is_starting(uuid)
            || targets.get(uuid.as_target()).is_some_and(|target| self.has_daemon_or_leftovers(target))
    }

    /// Returns whether a target has a daemon, or leftover processes of an exited daemon.
    fn has_daemon_or_leftovers(&self, target: &MpsTarget) -> bool {
        let seen = &target.report;
        !seen.state.is_down() || seen.pid.is_some() || TargetDir::of(&self.base, &target.short).is_locked()
    }

    /// Stores why gpushd could not set the compute mode of a GPU. Returns whether it has changed.
    fn set_bypass_reason(&self, gpu: &GpuUuid, why: Option<&str>) -> bool {
        self.handles.context.state.change_mps(|targets| targets.set_bypass_reason(gpu, why))
    }
}

/// Sets the compute mode of a GPU that is shared through MPS or will soon be shared. If this fails, health and the
/// daemon's findings report the reason until an attempt succeeds.
pub(super) async fn set_compute_mode(mps: &Mps, target: &SharingTarget, wanted: MpsComputeMode) {
    let gpu = &target.gpu_uuid;
    match wanted {
        MpsComputeMode::Keep => {
            mps.set_bypass_reason(gpu, None);
            return;
        }
        MpsComputeMode::ExclusiveProcess => {}
    }
    let mode = ComputeMode::ExclusiveProcess;
    match mps.handles.shared_gpus.set_compute_mode(gpu, mode, Mode::Mps, || mps.needs_compute_mode(gpu)).await {
        Ok(before) => {
            mps.set_bypass_reason(gpu, None);
            if let Some(before) = before {
                tracing::info!(gpu = gpu.as_str(), "GPU {gpu}: its compute mode changed from {before} to {mode}");
            }
        }
        // During maintenance gpushd cannot access the driver. The state `maintenance` already explains why the mode is
        // not set, so do not report this error.
        Err(_) if mps.handles.context.state.maintenance().is_some() => {}
        Err(why) => {
            if mps.set_bypass_reason(gpu, Some(&why)) {
                tracing::error!(gpu = gpu.as_str(), "{why}");
            }
        }
    }
}

/// Restores the compute mode that a whole GPU had before it was shared. If that fails, gpushd retries later. A MIG device
/// has no compute mode.
pub(super) async fn restore_compute_mode(mps: &Mps, target: &TargetUuid) {
    if let Some(uuid) = target.to_gpu() {
        mps.set_bypass_reason(&uuid, None);
        match mps.handles.shared_gpus.restore_compute_mode(&uuid, Mode::Mps).await {
            Ok(None) => {}
            Ok(Some(mode)) => tracing::info!(gpu = uuid.as_str(), "GPU {uuid}: its compute mode is {mode} again"),
            Err(why) => tracing::error!(gpu = uuid.as_str(), "GPU {uuid}: {why}; gpushd tries again"),
        }
    }
    mps.handles.shared_gpus.wake_leftover_check();
}

/// Restores the compute mode if an operation could not start the daemon.
pub(super) async fn restore_after_failed_start(mps: &Mps, operation: &str, uuid: &GpuUuid) {
    mps.handles.context.state.change_mps(|targets| {
        if let Some(daemons) = targets.operations.get_mut(operation) {
            daemons.starting.remove(uuid);
        }
    });
    // If the daemon runs but has not answered in time, keep the mode, so that programs cannot bypass the daemon.
    if !mps.needs_compute_mode(uuid) {
        restore_compute_mode(mps, uuid.as_target()).await;
    }
}
