//! Plans what a request would change, from readings. This module does not change any GPU.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    sync::Arc,
};

use gpush_api::{ApiError, Gpu, GpuPlan, GpuUuid, Holder, PlanRequest, Plans, Refusal};
use gpush_core::{
    config::Config,
    desired::{check_mps_entries, is_switched, layouts_after, plan_host, without_fabric_manager},
    layout::Layout,
    schedule::{ClaimedTargets, Need, Needs},
};
use gpush_host::other_managers;
use gpush_nvml::Reading;

use crate::{
    modes::{
        mig::{MigMode, holders, reset::not_resetting},
        mps::{self, Mps},
        timeslice,
    },
    operations::operation::{self, Operations},
    requests::caller::Viewer,
};

/// Plans changes. A handle, cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Planner {
    /// Reads the GPUs and checks what blocks resets.
    pub(crate) mig: MigMode,
    /// Provides the MPS daemons, which a plan may have to stop or start.
    pub(crate) mps: Mps,
    /// GPUs that operations are changing.
    pub(crate) operations: Operations,
    /// Root of the host's file system, where gpushd looks for other MIG managers.
    pub(crate) host_root: PathBuf,
}

impl Planner {
    /// Plans a request from fresh readings, but does not execute it. If a GPU cannot be read or is being changed, its
    /// plan has an error instead of steps. The other GPUs are planned anyway.
    pub(crate) async fn plan(&self, viewer: Viewer, request: &PlanRequest) -> Result<Plans, ApiError> {
        // To find the requested GPUs, the last known answers of the MPS daemons are sufficient. For the plan, gpushd
        // polls the daemons later.
        let gpus = self.gpus(viewer).await?;
        let meant = self.planned(&gpus, request, false).await;
        let meant = meant.map_err(|error| self.mig.context.state.now().explain_absent(&request.gpus, error))?;
        if self.mig.context.state.maintenance().is_some() {
            // During maintenance gpushd cannot read any GPU. Each plan already has this error.
            return Ok(Plans { plans: meant });
        }
        not_resetting(&self.mig.context.host_services)?;
        let mut fresh = Vec::new();
        let mut unread = BTreeMap::new();
        // Do not read a GPU that an operation is changing. The reading would have to wait for a step, and would show an
        // intermediate layout.
        for plan in &meant {
            unread.extend(
                self.operations
                    .check_not_changing(plan.gpu, &plan.gpu_uuid)
                    .err()
                    .map(|error| (plan.gpu_uuid.clone(), error)),
            );
        }
        let meant: Vec<GpuPlan> = meant.into_iter().filter(|plan| !unread.contains_key(&plan.gpu_uuid)).collect();
        let uuids: Vec<GpuUuid> = meant.iter().map(|plan| plan.gpu_uuid.clone()).collect();
        for ((uuid, outcome), plan) in self.mig.driver.readings.now(&uuids).await.into_iter().zip(&meant) {
            match outcome {
                Ok(reading) => fresh.push(reading),
                Err(error) => {
                    unread.insert(uuid, unreadable(plan, error.to_api()));
                }
            }
        }
        let gpus = self.gpus_with(viewer, &fresh).await?;
        let mut plans = self.planned(&gpus, request, false).await?;
        check_mps_entries(&self.mig.context.state.config(), &gpus, request, &plans, false)?;
        self.refuse_blocked(viewer, &gpus, &mut plans).await;
        for plan in &mut plans {
            // An operation may have begun meanwhile.
            let changing = || self.operations.check_not_changing(plan.gpu, &plan.gpu_uuid).err();
            if let Some(error) = unread.remove(&plan.gpu_uuid).or_else(changing) {
                *plan = plan.without_steps().refused(error);
            }
        }
        Ok(Plans { plans })
    }

    /// Returns what has these GPUs open: processes and kernel modules.
    ///
    /// # Errors
    /// If gpushd does not know one of the GPUs, or cannot search the processes of the host in time.
    pub(crate) async fn holders(&self, uuids: &[GpuUuid]) -> Result<Vec<Holder>, ApiError> {
        holders::of(&self.mig, uuids).await
    }

    /// Plans a request for `gpus`. A running fabric manager changes which GPUs on NVSwitches are reset together. So if
    /// a plan resets a GPU on an NVSwitch, gpushd checks whether a fabric manager runs.
    /// With `once`, the request changes no override.
    pub(super) async fn planned(
        &self,
        gpus: &[Gpu],
        request: &PlanRequest,
        once: bool,
    ) -> Result<Vec<GpuPlan>, ApiError> {
        self.planned_with_needs(gpus, request, once).await.map(|(plans, _)| plans)
    }

    /// Plans a request as [`Planner::planned`] does. Also returns which lanes the operation needs, and what the
    /// operation needs exclusively on each GPU, even if the plan of this GPU is refused because the GPU is in use.
    pub(super) async fn planned_with_needs(
        &self,
        gpus: &[Gpu],
        request: &PlanRequest,
        once: bool,
    ) -> Result<(Vec<GpuPlan>, Needs), ApiError> {
        let config = self.mig.context.state.config();
        let mut plans = plan_host(&config, gpus, request)?.plans;
        let on_switches = |plan: &GpuPlan| {
            plan.reset().is_some() && gpus.iter().any(|gpu| gpu.uuid == plan.gpu_uuid && is_switched(gpu))
        };
        if plans.iter().any(on_switches) && !self.mig.fabric_manager_runs().await {
            without_fabric_manager(&config, gpus, &mut plans);
        }
        let layouts = layouts_after(&config, gpus, request, &plans, once);
        let needs = self.needs(&config, gpus, request, &plans, &layouts)?;
        mps::plan(&self.mps, gpus, &mut plans, &layouts);
        timeslice::plan(gpus, &mut plans);
        Ok((plans, needs))
    }

    /// Returns what an operation with these plans needs on each GPU. Call this before MPS steps are added to the plans.
    fn needs(
        &self,
        config: &Config,
        gpus: &[Gpu],
        request: &PlanRequest,
        plans: &[GpuPlan],
        layouts: &[Option<Layout>],
    ) -> Result<Needs, ApiError> {
        // By default, reserve each GPU as a whole. GPUs without a plan keep this default: they are only reset together
        // with the planned GPUs, and gpushd must not grant a lease on a GPU during its reset.
        let all = operation::gpus(plans).into_iter();
        let mut needs: Needs = all.map(|(_, uuid)| (uuid, Need::Lane(ClaimedTargets::Gpu))).collect();
        let is_used = |plan: &GpuPlan| matches!(plan.refusal, Some(Refusal::Blocked { .. } | Refusal::Held { .. }));
        let mut once_idle = Vec::new();
        if plans.iter().any(is_used) {
            let gpus: Vec<Gpu> = gpus.iter().cloned().map(as_if_idle).collect();
            once_idle = plan_host(config, &gpus, request)?.plans;
        }
        for (plan, layout) in plans.iter().zip(layouts) {
            let Some(gpu) = gpus.iter().find(|gpu| gpu.uuid == plan.gpu_uuid) else { continue };
            // A refused plan does not show what it would need exclusively. So take the plan that was made as if all
            // GPUs were idle.
            let plan =
                once_idle.iter().find(|one| one.gpu_uuid == plan.gpu_uuid).filter(|_| is_used(plan)).unwrap_or(plan);
            needs
                .insert(plan.gpu_uuid.clone(), Need::Lane(mps::claimed_by_plan(&self.mps, gpu, plan, layout.as_ref())));
        }
        Ok(needs)
    }

    /// Refuses the plans that conflict with another MIG manager or need a reset that is blocked.
    pub(super) async fn refuse_blocked(&self, viewer: Viewer, gpus: &[Gpu], plans: &mut [GpuPlan]) {
        other_managers::refuse(&self.host_root, plans);
        self.mig.refuse_blocked_resets(viewer, gpus, &self.mps.idle(), plans).await;
    }

    /// Returns all GPUs for use in plans, without the processes that do no work for a user, such as idle MPS servers.
    /// The last answers of the MPS daemons determine which servers are idle.
    pub(super) async fn gpus(&self, viewer: Viewer) -> Result<Vec<Gpu>, ApiError> {
        let observed = self.mig.driver.readings.host().await?;
        let mut gpus = observed.gpus_for_plans(viewer, &self.mps.idle());
        self.mig.context.state.leases().mark_reservations(&mut gpus);
        Ok(gpus)
    }

    /// Returns the same as [`Planner::gpus`]. But first polls the MPS daemons of the GPUs in `asked`.
    pub(super) async fn gpus_of(&self, viewer: Viewer, asked: &BTreeSet<GpuUuid>) -> Result<Vec<Gpu>, ApiError> {
        // Read the leases after polling the daemons, to include leases that were granted during the poll.
        mps::poll(&self.mps, asked).await;
        self.gpus(viewer).await
    }

    /// Returns the same as [`Planner::gpus_of`], but with the GPUs in `readings` as these readings show them. Waits for
    /// readings of other GPUs only if a GPU in `readings` is not known yet.
    pub(super) async fn gpus_with(&self, viewer: Viewer, readings: &[Arc<Reading>]) -> Result<Vec<Gpu>, ApiError> {
        let host = self.mig.driver.readings.known();
        let is_listed =
            |reading: &Arc<Reading>| host.as_ref().is_ok_and(|host| host.gpu(&reading.identity.uuid).is_some());
        if !readings.iter().all(is_listed) {
            self.mig.driver.readings.host().await?;
        }
        let asked = readings.iter().map(|reading| reading.identity.uuid.clone()).collect();
        mps::poll(&self.mps, &asked).await;
        let mut gpus = self.mig.context.state.with(readings).gpus_for_plans(viewer, &self.mps.idle());
        self.mig.context.state.leases().mark_reservations(&mut gpus);
        Ok(gpus)
    }
}

/// Returns a GPU without processes and leases, as if it were idle.
fn as_if_idle(mut gpu: Gpu) -> Gpu {
    (gpu.processes, gpu.processes_known) = (Vec::new(), true);
    (gpu.leases, gpu.pending) = (Vec::new(), Vec::new());
    for instance in gpu.mig.iter_mut().flat_map(|mig| &mut mig.instances) {
        instance.processes.clear();
        instance.compute.iter_mut().for_each(|compute| compute.processes.clear());
    }
    gpu
}

/// Returns the error of a plan for a GPU that cannot be read.
pub(super) fn unreadable(plan: &GpuPlan, error: ApiError) -> ApiError {
    error.context(format!(
        "GPU {} ({}) can't be read, so nothing is planned and nothing was changed",
        plan.gpu, plan.gpu_uuid
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::modes::scene::{mig_gpu, plan_layout, process};

    /// gpushd uses such a plan to find out what a waiting operation reserves.
    #[test]
    fn plan_for_a_reservation_ignores_processes_on_the_gpu() {
        let mut gpu = mig_gpu(&["3g.40gb@4"]);
        gpu.mig.as_mut().unwrap().instances[0].compute[0].processes.push(process(7));
        (gpu.processes, gpu.processes_known) = (vec![process(8)], false);
        assert!(matches!(
            plan_layout(&gpu, &["7g.80gb"]).refusal,
            Some(Refusal::Blocked { .. } | Refusal::Held { .. })
        ));
        let idle = plan_layout(&as_if_idle(gpu), &["7g.80gb"]);
        assert_eq!((&idle.refusal, &idle.error), (&None, &None));
        assert_eq!(idle.destroyed_devices().collect::<Vec<_>>(), ["MIG-0"]);
    }
}
