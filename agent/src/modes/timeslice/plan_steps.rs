//! Time-slicing steps of operations. An operation holds the lanes of its GPUs, so it executes these steps itself.
//!
//! gpushd shows a GPU as time-sliced only after gpushd has read back the GPU's level and compute mode. If an operation
//! ends the time-slicing of a GPU, gpushd removes these settings before the other steps.
//!
//! ```text
//! plan  ─► leaves the GPU whole, and its rule says timeslice ─► step Set
//!       ─► a change to another mode was pending              ─► step Clear
//! begin ─► settings for time-slicing that no rule requires ─► removed ─► steps
//! done  ─► step Set ─► set and read back ─► failures are noted with the operation
//! ```
//!
//! If a level cannot be set, the operation is not rolled back, because the reconciler tries again later.

use std::time::Duration;

use gpush_api::{Gpu, GpuPlan, GpuState, GpuUuid, Mode, Step, TimesliceStep};
use gpush_core::desired::in_use::{Scope, check};

use super::{
    Timeslice, TroubleSubject,
    levels::{self, Setter},
    modes,
    schedule::Schedule,
    target,
};
use crate::{requests::caller::Viewer, state::LevelRound};

/// Maximum time that an operation waits for `nvidia-smi`. It is long because `nvidia-smi` may have to initialize the
/// GPUs.
const PATIENCE: Duration = Duration::from_secs(20);

/// Adds a step to each plan after which the GPU is time-sliced, or no longer time-sliced. Refuses a plan whose step would
/// change a GPU in use.
///
/// Without a pending change, the reconciler sets the level and the compute mode at once, so a plan without other steps
/// stays empty. A pending change is not made before an operation.
pub(crate) fn plan(gpus: &[Gpu], plans: &mut [GpuPlan]) {
    for plan in plans.iter_mut().filter(|plan| plan.error.is_none()) {
        let Some(gpu) = gpus.iter().find(|gpu| gpu.uuid == plan.gpu_uuid) else { continue };
        let is_pending = gpu.pending.iter().any(|change| change.aim.device().is_none());
        let (step, change) = match gpu.mode {
            Mode::Timeslice => (TimesliceStep::Set, "change the time-slicing"),
            Mode::Exclusive => (TimesliceStep::Clear, "end the sharing"),
            Mode::NoRule | Mode::Unmanaged | Mode::Mig | Mode::Mps => continue,
        };
        let is_due = match step {
            TimesliceStep::Set => is_pending || !plan.is_empty(),
            TimesliceStep::Clear => is_pending,
        };
        if !plan.leaves_whole(gpu) || !is_due {
            continue;
        }
        // A GPU that was shared through MPS was not time-sliced. The step that stops its daemon ends the sharing.
        let stops_daemon = plan.stopped_daemons().any(|uuid| *uuid == gpu.uuid);
        match check(gpu, plan, Scope::Gpu, None, change) {
            Ok(()) if step == TimesliceStep::Clear && stops_daemon => {}
            Ok(()) => plan.add(Step::Timeslice(step)),
            Err(refused) => *plan = *refused,
        }
    }
}

/// Sets the time-slice level and the compute mode of GPUs, as their rules require. The operation that calls this must
/// hold the lanes of these GPUs. Returns one sentence for each failure.
pub(crate) async fn apply_and_read_back(timeslice: &Timeslice, uuids: &[GpuUuid]) -> Vec<String> {
    if uuids.is_empty() {
        return Vec::new();
    }
    let mut round = timeslice.context.state.begin_level_round();
    let work = tokio::time::timeout(PATIENCE, apply_now(timeslice, &mut round, uuids));
    let is_done = timeslice.context.stopping.run_until_cancelled(work).await.is_some_and(|done| done.unwrap_or(false));
    timeslice.context.state.report_levels(round);
    if !is_done {
        let late = |uuid| format!("the time-slice level and compute mode of GPU {uuid} are set after the operation");
        return uuids.iter().map(late).collect();
    }
    let troubles = timeslice.all_troubles();
    let subjects =
        uuids.iter().flat_map(|uuid| [TroubleSubject::Level(uuid.clone()), TroubleSubject::ComputeMode(uuid.clone())]);
    let found =
        std::iter::once(TroubleSubject::Program).chain(subjects).filter_map(|subject| troubles.get(&subject).cloned());
    found.flat_map(|error| error.sentences().into_iter().map(str::to_owned).collect::<Vec<_>>()).collect()
}

/// Sets the level and compute mode of GPUs. Returns whether all of these GPUs could be read.
async fn apply_now(timeslice: &Timeslice, round: &mut LevelRound, uuids: &[GpuUuid]) -> bool {
    // Read the GPUs again, because the last readings may be from before the operation's last step.
    let _read = timeslice.context.readings.now(uuids).await;
    let Ok(host) = timeslice.context.readings.known() else { return false };
    let mut gpus = host.gpus(Viewer::Agent);
    for gpu in gpus.iter_mut().filter(|gpu| uuids.contains(&gpu.uuid)) {
        if gpu.state == GpuState::Changing {
            gpu.state = GpuState::Ready;
        }
        // The plan has checked that no lease delays the change any more, and no lease is granted during the operation.
        gpu.pending.clear();
    }
    // `|_| false`: the operation has already stopped the MPS daemons, which would prevent time-slicing.
    let mut aims = target::targets(timeslice, round, &timeslice.context.state.config(), &gpus, &|_| false);
    aims.retain(|aim| uuids.contains(&aim.gpu.uuid));
    let are_seen = uuids.iter().all(|uuid| aims.iter().any(|aim| aim.gpu.uuid == *uuid));
    let mut pace = Schedule::new(timeslice.context.host_services.level_interval);
    modes::reconcile_owned(timeslice, &mut pace, &aims).await;
    // Leave out GPUs on which there is neither a level to set nor one to remove.
    aims.retain(|aim| aim.policy.is_some() || timeslice.shared_gpus.level(&aim.gpu.uuid).is_some());
    if !aims.is_empty() {
        let _none_is_busy = levels::reconcile(timeslice, &mut pace, round, &aims, Setter::Operation).await;
    }
    are_seen
}

/// Returns the UUIDs of GPUs from which an operation must remove the settings for time-slicing.
pub(crate) fn gpus_to_release(timeslice: &Timeslice, plans: &[GpuPlan]) -> Vec<GpuUuid> {
    let ours = plans
        .iter()
        .filter(|plan| !plan.sets_timeslice() && timeslice.shared_gpus.has_timeslice_settings_of(&plan.gpu_uuid));
    ours.map(|plan| plan.gpu_uuid.clone()).collect()
}

#[cfg(test)]
mod tests {
    use gpush_api::{ApiError, Code, PendingAim, PendingChange, TimesliceLevel};

    use super::*;
    use crate::modes::scene::{mig_gpu, plan_layout, plan_mig_off, process, whole_gpu};

    fn pending() -> PendingChange {
        PendingChange {
            aim: PendingAim::Timeslice { level: TimesliceLevel::Long, compute_mode: None },
            leases: Vec::new(),
        }
    }

    /// Returns the plan with the step for time-slicing.
    fn planned(gpu: &Gpu, plan: GpuPlan) -> GpuPlan {
        let mut plans = [plan];
        super::plan(std::slice::from_ref(gpu), &mut plans);
        let [plan] = plans;
        plan
    }

    fn step(gpu: &Gpu, plan: GpuPlan) -> Option<TimesliceStep> {
        let plan = planned(gpu, plan);
        assert_eq!(plan.error, None);
        plan.steps.iter().find_map(|step| if let Step::Timeslice(step) = step { Some(step.clone()) } else { None })
    }

    /// The reconciler sets the level of a GPU whose plan has no steps.
    #[test]
    fn time_slicing_begins_after_other_steps_or_a_pending_change() {
        let whole = Gpu { mode: Mode::Timeslice, ..whole_gpu() };
        let mig = Gpu { mode: Mode::Timeslice, ..mig_gpu(&["3g.40gb@4"]) };
        assert_eq!(step(&whole, plan_mig_off(&whole)), None);
        assert_eq!(step(&mig, plan_mig_off(&mig)), Some(TimesliceStep::Set));
        let waited = Gpu { pending: vec![pending()], ..whole };
        assert_eq!(step(&waited, plan_mig_off(&waited)), Some(TimesliceStep::Set));
        // The request keeps MIG mode on.
        assert_eq!(step(&mig, plan_layout(&mig, &["2g.20gb"])), None);
    }

    #[test]
    fn time_slicing_ends_with_a_pending_change_to_exclusive() {
        for mode in [Mode::Exclusive, Mode::NoRule, Mode::Unmanaged, Mode::Mig, Mode::Mps] {
            let gpu = Gpu { mode, ..whole_gpu() };
            assert_eq!(step(&gpu, plan_mig_off(&gpu)), None, "{mode:?}");
            let waited = Gpu { pending: vec![pending()], ..gpu };
            let expected = (mode == Mode::Exclusive).then_some(TimesliceStep::Clear);
            assert_eq!(step(&waited, plan_mig_off(&waited)), expected, "{mode:?}");
        }
    }

    #[test]
    fn stopped_mps_daemon_needs_no_end_of_time_slicing() {
        let gpu = Gpu { mode: Mode::Exclusive, pending: vec![pending()], ..whole_gpu() };
        let stop =
            Step::Mps(gpush_api::MpsStep::StopDaemon { uuid: gpu.uuid.clone().into(), label: "GPU 0".to_owned() });
        let plan = GpuPlan { steps: vec![stop], ..plan_mig_off(&gpu) };
        assert_eq!(step(&gpu, plan), None);
    }

    #[test]
    fn gpu_in_use_and_refused_plan_get_no_step() {
        let gpu = Gpu { mode: Mode::Timeslice, pending: vec![pending()], processes: vec![process(7)], ..whole_gpu() };
        let refused = planned(&gpu, plan_mig_off(&gpu));
        assert!(refused.error.is_some() && refused.is_empty(), "{refused:?}");
        let earlier = plan_mig_off(&gpu).refused(ApiError::new(Code::Conflict, "cordoned"));
        assert_eq!(planned(&gpu, earlier.clone()), earlier);
    }
}
