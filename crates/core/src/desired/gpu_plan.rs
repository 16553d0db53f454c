//! The plan of one GPU, and the states of a GPU in which no plan is possible.

use gpush_api::{
    ApiError, Code, Gpu, GpuInstance, GpuPlan, GpuState, InstanceStep, LOST_GPU_HINT, Mode, Refusal, Step,
    USERS_UNKNOWN,
};

use super::{
    DesiredState,
    gpu_label::label,
    in_use::{Scope, in_use},
    mode,
    plan_hints::{self, Change},
};
use crate::{
    geometry::Geometry,
    layout::Layout,
    plan::{self, ProtectedInstances, Target},
    refusal,
};

/// Returns whether a plan is possible and changes nothing.
pub(super) fn keeps_gpu(plan: &GpuPlan) -> bool {
    plan.error.is_none() && plan.refusal.is_none() && plan.is_empty()
}

/// Refuses a GPU whose rule has a mode other than `mig`. The hint proposes a rule with `layout`, the requested layout.
pub(super) fn check_mode(
    gpu: &Gpu,
    desired_state: &DesiredState,
    change: Change,
    layout: Option<&Layout>,
    others: Option<&str>,
) -> Result<(), ApiError> {
    let Some(rule) = &desired_state.rule else { return Ok(()) };
    let mode = match desired_state.mode {
        Mode::Mig | Mode::NoRule => return Ok(()),
        other => other.name(),
    };
    let failure = change.failure(&label(gpu));
    let message = format!("{failure}: {} of the config sets the mode `{mode}`", plan_hints::rule_name(rule));
    Err(ApiError::new(Code::Conflict, message).hint(match change {
        Change::MigOff => plan_hints::for_mig_off(rule),
        Change::DesiredState | Change::Layout | Change::MigOn => plan_hints::for_other_mode(gpu, rule, layout, others),
    }))
}

/// Returns the error for a GPU without MIG.
pub(super) fn no_mig(gpu: &Gpu, desired_state: &DesiredState, others: Option<&str>) -> ApiError {
    refusal::explain(&Refusal::NoMig, gpu.index, &label(gpu)).hint(plan_hints::without_mig(desired_state, others))
}

/// Refuses a GPU whose state does not allow a plan. If the request names no GPU, `implied` has the indexes of the GPUs
/// to which it applies.
pub(super) fn check_plannable(gpu: &Gpu, implied: Option<&str>) -> Result<(), ApiError> {
    let refuse = |code, what: &str, hint: &str| {
        let mut error = ApiError::new(code, format!("{} {what}", label(gpu)));
        error.causes.extend(gpu.reasons.iter().cloned());
        Err(error.hint(hint))
    };
    match gpu.state {
        GpuState::Ready | GpuState::Changing => Ok(()),
        // Allow this: a caller who names the GPU wants to recover it, or knows about the cordon.
        GpuState::Degraded | GpuState::Cordoned if implied.is_none() => Ok(()),
        GpuState::Cordoned => refuse(
            Code::Conflict,
            "is cordoned, so a request for all GPUs does not change it",
            &format!(
                "to include this GPU, name all GPUs of the request with `--gpu {}`, or end the cordon with \
                `gpushctl gpu uncordon {}` (administrator)",
                implied.unwrap_or_default(),
                gpu.index
            ),
        ),
        GpuState::Degraded => refuse(
            Code::Conflict,
            "is degraded: a change and its rollback failed",
            &format!(
                "run `gpushctl gpu show {0}` to check the GPU, then `gpushctl apply {0}` (administrator) to recover it",
                gpu.index
            ),
        ),
        GpuState::Held => refuse(
            Code::Conflict,
            "is held, so gpushd does not change it",
            "run `gpushctl status`: it shows what to check, and the command that releases the GPU, such as `gpushctl \
            recover` (administrator)",
        ),
        GpuState::Maintenance => refuse(
            Code::Conflict,
            "is in maintenance, so gpushd plans no change on it",
            "to end maintenance: `gpushctl maintenance leave` (administrator)",
        ),
        GpuState::Unknown => refuse(
            Code::DriverTimeout,
            "can't be read, so gpushd plans no change on it",
            "run `gpushctl status` to see why, or choose other GPUs",
        ),
        GpuState::Lost => refuse(
            Code::GpuLost,
            "is lost: it has fallen off the bus",
            &format!("{}; until then, choose other GPUs", LOST_GPU_HINT),
        ),
    }
}

/// Returns a plan without steps.
pub(super) fn empty_plan(gpu: &Gpu, layout: &Layout) -> GpuPlan {
    GpuPlan {
        gpu: gpu.index,
        gpu_uuid: gpu.uuid.clone(),
        name: gpu.name.clone(),
        layout: layout.canonical(),
        ..GpuPlan::default()
    }
}

pub(super) fn refused(gpu: &Gpu, mut answer: GpuPlan, refusal: Refusal) -> GpuPlan {
    answer.error = Some(refusal::explain(&refusal, gpu.index, &label(gpu)));
    answer.refusal = Some(refusal);
    answer
}

/// Returns the plan of one GPU. If no plan is possible, the returned value contains no steps, only
/// the reason.
pub(super) fn plan_gpu(gpu: &Gpu, layout: &Layout, explicit: bool) -> GpuPlan {
    let mut answer = empty_plan(gpu, layout);
    let refused = |answer, refusal| refused(gpu, answer, refusal);
    let Some(mig) = &gpu.mig else { return refused(answer, Refusal::NoMig) };
    // A GPU with MIG mode off has no instances, so the empty layout needs no steps.
    if explicit && layout.is_none() && mig.is_off() {
        return answer;
    }
    if mig.profiles.is_empty() {
        answer.error = Some(
            ApiError::new(Code::DriverError, format!("the MIG profiles of {} are not known", label(gpu)))
                .hint("run `gpushctl mig profiles` to read the profiles from the driver"),
        );
        return answer;
    }
    let geometry = Geometry::new(&mig.profiles, mig.memory_slices, mig.compute_slices);
    let target = match Target::resolve(&geometry, layout) {
        Ok(target) => target,
        Err(refusal) => return refused(answer, refusal),
    };
    if !mig.enabled {
        if let Some(users) = in_use(gpu, Scope::OutsideInstances, None) {
            return refused(answer, users.into());
        }
        match mode::step(gpu, mig, true) {
            Ok(step) => answer.add(Step::MigMode(step)),
            Err(refusal) => return refused(answer, refusal),
        }
    }
    answer.steps.extend(mode::cancel_disabling(gpu, mig));
    let instances = if mig.enabled { mig.instances.as_slice() } else { &[] };
    let holds = ProtectedInstances::of(gpu);
    match plan::plan_protecting(&geometry, instances, &target, &holds) {
        Ok(plan) => match unknown_users_error(gpu, !answer.is_empty(), &plan.steps) {
            None => {
                // Before the reboot, the GPU can have no instances.
                if !answer.waits_for_reboot() {
                    answer.steps.extend(plan.steps.into_iter().map(Step::Instance));
                }
                GpuPlan { keeps: plan.keeps, ..answer }
            }
            error => GpuPlan { error, ..answer.without_steps() },
        },
        Err(refusal) => refused(answer.without_steps(), refusal),
    }
}

/// Plans a GPU whose layout is `dynamic`: turns MIG mode on, and keeps every instance.
pub(super) fn plan_dynamic(gpu: &Gpu, mut answer: GpuPlan) -> GpuPlan {
    let Some(mig) = &gpu.mig else { return refused(gpu, answer, Refusal::NoMig) };
    if mig.enabled {
        let mut keeps: Vec<&GpuInstance> = mig.instances.iter().collect();
        keeps.sort_by_key(|instance| instance.placement);
        answer.keeps = keeps.into_iter().map(|instance| instance.id).collect();
        answer.steps.extend(mode::cancel_disabling(gpu, mig));
        return answer;
    }
    if let Some(users) = in_use(gpu, Scope::OutsideInstances, None) {
        return refused(gpu, answer, users.into());
    }
    match mode::step(gpu, mig, true) {
        Ok(step) => answer.add(Step::MigMode(step)),
        Err(refusal) => return refused(gpu, answer, refusal),
    }
    match unknown_users_error(gpu, true, &[]) {
        None => answer,
        error => GpuPlan { error, ..answer.without_steps() },
    }
}

/// Refuses changes while the processes on the GPU are not known. An instance without a known
/// process may be in use, so the plan destroys no instance and does not change MIG mode. The plan
/// may create instances, because new instances do not affect any process.
pub(super) fn unknown_users_error(gpu: &Gpu, changes_mode: bool, steps: &[InstanceStep]) -> Option<ApiError> {
    let destroys = steps.iter().any(|step| step.destroys().is_some());
    let spared = match (gpu.processes_known, changes_mode, destroys) {
        (true, _, _) | (false, false, false) => return None,
        (false, true, _) => "MIG mode is not changed",
        (false, false, true) => "none of its instances is destroyed",
    };
    let message = format!("{}: {USERS_UNKNOWN}, so {spared}", label(gpu));
    let mut error = ApiError::new(Code::DriverError, message);
    error.causes.extend(gpu.processes_error.clone());
    let show = format!(
        "try again when the driver lists the processes of this GPU; `nvidia-smi -q -d PIDS -i {}` shows whether it \
        does",
        gpu.uuid
    );
    Some(error.hint(show).retryable())
}
