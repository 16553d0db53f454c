//! Checks before the first step whether programs are missing or a reset is blocked. A process with the GPU open blocks a
//! reset if gpushd may not stop the process.

use std::collections::BTreeSet;

use gpush_api::{ApiError, Code, Gpu, GpuPlan, GpuUuid, Refusal};
use gpush_core::holders as judged;
use gpush_host::helper::Helpers;

use super::{
    MigMode,
    holders::{self, HeldBy},
};
use crate::{
    requests::caller::Viewer,
    state::{readings::Readings, redact},
};

/// Why a GPU was not reset.
#[derive(Debug)]
pub(super) enum NotReset {
    /// The operation was cancelled before the reset began.
    Cancelled(ApiError),
    /// The reset did not begin, because a GPU that it needs is in use.
    InUse(ApiError),
    /// The reset failed, or could not begin.
    Failed(ApiError),
}

impl From<ApiError> for NotReset {
    fn from(error: ApiError) -> Self {
        Self::Failed(error)
    }
}

impl MigMode {
    /// Refuses the plans whose reset is blocked now. `gpus` are all GPUs of the host. Processes in `idle` do not block
    /// a reset, because the operation ends them.
    pub(crate) async fn refuse_blocked_resets(
        &self,
        viewer: Viewer,
        gpus: &[Gpu],
        idle: &BTreeSet<u32>,
        plans: &mut [GpuPlan],
    ) {
        let config = self.context.state.config();
        for plan in plans {
            if let Err(error) = self.programs_exist(plan) {
                *plan = plan.without_steps().refused(error);
                continue;
            }
            let Some(reset) = plan.reset() else { continue };
            let label = format!("GPU {} ({})", plan.gpu, plan.gpu_uuid);
            let concerned =
                |gpu: &&Gpu| gpu.uuid == plan.gpu_uuid || reset.together.iter().any(|peer| peer.gpu_uuid == gpu.uuid);
            let minors: Vec<u32> = gpus.iter().filter(concerned).map(|gpu| gpu.minor).collect();
            let refused = match holders::scan(self, &minors).await {
                Err(error) => Some((error, None)),
                Ok(found) => {
                    let mut left = judged::obstacles(found, &config.mode_change.services);
                    left.retain(|holder| holder.pid.is_none_or(|pid| !idle.contains(&pid)));
                    let left: Vec<_> = left.into_iter().map(|holder| redact::holder(holder, viewer)).collect();
                    let held = || {
                        let error = judged::explain(&label, &left, &[]);
                        (error, Some(Refusal::Held { holders: left.clone(), leases: Vec::new() }))
                    };
                    (!left.is_empty()).then(held)
                }
            };
            if let Some((error, refusal)) = refused {
                *plan = GpuPlan { refusal, ..plan.without_steps().refused(error) };
            }
        }
    }

    /// Returns whether a trusted user runs a fabric manager on this host.
    pub(crate) async fn fabric_manager_runs(&self) -> bool {
        holders::fabric_manager_runs(&self.context.host_services).await
    }

    /// Checks that gpushd may run every program that a plan needs.
    fn programs_exist(&self, plan: &GpuPlan) -> Result<(), ApiError> {
        let change = &self.context.state.config().mode_change;
        let systemctl = (!plan.services.is_empty()).then(|| self.context.host_services.constants.systemctl.clone());
        let nvidia_smi = plan.reset().map(|_| self.context.host_services.nvidia_smi(change));
        let programs = plan.hooks.iter().cloned().chain(systemctl).chain(nvidia_smi);
        programs.into_iter().try_for_each(|program| Helpers::may_run(&program).map(|_| ()))
    }

    /// After the driver has refused a change because the GPU is in use, returns the holders of the GPU that may be the
    /// cause. The log names them, too.
    pub(crate) async fn suspects(&self, uuid: &GpuUuid) -> Vec<HeldBy> {
        let Ok(found) = holders::of(self, std::slice::from_ref(uuid)).await else { return Vec::new() };
        let found: Vec<HeldBy> = found.iter().map(HeldBy::of).collect();
        for holder in &found {
            tracing::warn!(gpu = uuid.as_str(), "{}", holder.in_full);
        }
        found
    }
}

/// Checks that the GPUs `uuids`, which are reset together with the GPUs of an operation, are free. A GPU in `changes`
/// may have a pending MIG mode, because the operation itself changes the mode of this GPU.
///
/// # Errors
/// If such a GPU is in use, has instances, has a pending MIG mode that the operation did not set, or cannot be read.
pub(super) async fn must_be_free(readings: &Readings, uuids: &[GpuUuid], changes: &[GpuUuid]) -> Result<(), NotReset> {
    for (uuid, reading) in readings.now(uuids).await {
        let why = match reading {
            Err(error) => {
                let message = format!("GPU {uuid} would be reset as well, but cannot be read");
                return Err(NotReset::Failed(error.to_api().context(message)));
            }
            Ok(reading) if !reading.processes.is_empty() || !reading.processes_known => {
                "processes use the GPU, or gpushd cannot tell whether processes use it".to_owned()
            }
            Ok(reading) if reading.mig.as_ref().is_some_and(|mig| !mig.instances.is_empty()) => {
                "the GPU has MIG instances, which a reset destroys".to_owned()
            }
            Ok(reading) if !changes.contains(&uuid) && reading.mig.as_ref().is_some_and(|mig| mig.reset_pending) => {
                "a change of the GPU's MIG mode is pending, and this reset would carry it out".to_owned()
            }
            Ok(_) => continue,
        };
        let message = format!("GPU {uuid} would be reset as well, which is not possible now");
        return Err(NotReset::InUse(ApiError::new(Code::Blocked, message).cause(why).hint(
            "try again when the GPU has no processes, no instances and no pending MIG mode: `gpushctl status` \
                shows them",
        )));
    }
    Ok(())
}
