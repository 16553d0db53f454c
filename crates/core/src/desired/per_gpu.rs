//! Plans a request that gives a separate layout for each GPU, as one operation. For the named GPUs,
//! the request replaces the config. Other GPUs are not affected.

use gpush_api::{ApiError, Code, Gpu, GpuLayout, GpuPlan, Mode, Plans, Step};

use super::{
    DesiredState,
    gpu_label::label,
    gpu_plan::{check_mode, check_plannable, empty_plan, keeps_gpu, plan_gpu, refused, unknown_users_error},
    in_use::{Scope, in_use},
    mode,
    plan_hints::{self, Change},
};
use crate::{
    geometry::Geometry,
    layout::Layout,
    plan::{self, ProtectedInstances, Target},
    refusal,
    selector::Selector,
};

/// The requested state of one GPU.
enum RequestedMode {
    /// MIG mode off.
    Off,
    /// MIG mode on, with these instances.
    On(Layout),
}

/// Returns a plan for each named GPU, in the order of the host's GPUs.
pub(super) fn plan(
    gpus: &[Gpu],
    desired_states: &[DesiredState],
    selectors: &[String],
    each: &[GpuLayout],
) -> Result<Plans, ApiError> {
    let bad = |message: String, hint: &str| Err(ApiError::new(Code::BadRequest, message).hint(hint));
    if !selectors.is_empty() {
        return bad("the request names GPUs twice: in `gpus` and with their layouts".to_owned(), "leave `gpus` empty");
    }
    if each.is_empty() {
        return bad("the request names no GPU".to_owned(), "name each GPU with its layout");
    }
    if each.len() > gpus.len() {
        let message = format!("the request names {} GPUs, but the host has {}", each.len(), gpus.len());
        return bad(message, "name each GPU once, by its UUID");
    }
    let mut wanted: Vec<(usize, RequestedMode)> = Vec::new();
    for one in each {
        let at = match Selector::resolve(std::slice::from_ref(&one.gpu), gpus)?.as_slice() {
            [at] => *at,
            _ => return bad(format!("`{}` does not name exactly one GPU", one.gpu), "name each GPU by its UUID"),
        };
        if wanted.iter().any(|(other, _)| *other == at) {
            return bad(format!("{} is named twice", label(&gpus[at])), "name each GPU once, by its UUID");
        }
        wanted.push((at, requested_mode(&gpus[at], one)?));
    }
    wanted.sort_by_key(|(at, _)| *at);
    let chosen: Vec<usize> = wanted.iter().map(|(at, _)| *at).collect();
    let mut plans = Vec::new();
    for (at, want) in &wanted {
        let (gpu, desired_state) = (&gpus[*at], &desired_states[*at]);
        let plan = plan_for(gpu, want);
        // A request may disable MIG mode on a GPU whose rule has any mode except `unmanaged`. A request that changes
        // nothing is allowed, because an exported file names every GPU.
        let allowed = matches!(want, RequestedMode::Off) && desired_state.mode != Mode::Unmanaged;
        if !allowed && !keeps_gpu(&plan) {
            let change = want.change(gpu);
            let others = plan_hints::alternatives_per_gpu(gpus, desired_states, change, &chosen);
            let layout = match want {
                RequestedMode::On(layout) => Some(layout),
                RequestedMode::Off => None,
            };
            check_mode(gpu, desired_state, change, layout, others.as_deref())?;
        }
        plans.push(plan);
    }
    Ok(Plans { plans })
}

impl RequestedMode {
    /// Returns the kind of change on a GPU, for messages.
    fn change(&self, gpu: &Gpu) -> Change {
        let is_off = gpu.mig.as_ref().is_some_and(gpush_api::Mig::is_off);
        match self {
            Self::Off => Change::MigOff,
            Self::On(layout) if layout.is_none() && is_off => Change::MigOn,
            Self::On(_) => Change::Layout,
        }
    }
}

fn requested_mode(gpu: &Gpu, one: &GpuLayout) -> Result<RequestedMode, ApiError> {
    match (one.mig, one.layout.as_slice()) {
        (false, []) => Ok(RequestedMode::Off),
        (false, _) => {
            let message = format!("{} cannot have MIG instances with MIG mode off", label(gpu));
            Err(ApiError::new(Code::BadRequest, message).hint("leave the layout of this GPU empty, or enable MIG mode"))
        }
        (true, []) => Ok(RequestedMode::On(Layout::none())),
        (true, entries) => Ok(RequestedMode::On(Layout::parse_list(entries).map_err(ApiError::from)?)),
    }
}

/// Returns a plan that turns MIG mode off.
pub(super) fn plan_mig_off(gpu: &Gpu) -> GpuPlan {
    plan_for(gpu, &RequestedMode::Off)
}

fn plan_for(gpu: &Gpu, want: &RequestedMode) -> GpuPlan {
    let layout = match want {
        RequestedMode::Off => &Layout::none(),
        RequestedMode::On(layout) => layout,
    };
    match (check_plannable(gpu, None), want) {
        (Err(error), _) => GpuPlan { error: Some(error), ..empty_plan(gpu, layout) },
        // The request asks explicitly for MIG mode, so a GPU with MIG mode off needs a change, even
        // for an empty layout.
        (Ok(()), RequestedMode::On(layout)) => plan_gpu(gpu, layout, false),
        (Ok(()), RequestedMode::Off) => disable_mig(gpu, empty_plan(gpu, layout)),
    }
}

/// Plans to turn MIG mode off. First the instances are destroyed, then the mode changes.
fn disable_mig(gpu: &Gpu, answer: GpuPlan) -> GpuPlan {
    let Some(mig) = &gpu.mig else { return answer };
    if mig.is_off() {
        return answer;
    }
    if let Some(users) = in_use(gpu, Scope::OutsideInstances, None) {
        return refused(gpu, answer, users.into());
    }
    let off = match mode::step(gpu, mig, false) {
        Ok(step) => Step::MigMode(step),
        Err(refusal) => return refused(gpu, answer, refusal),
    };
    let geometry = Geometry::new(&mig.profiles, mig.memory_slices, mig.compute_slices);
    let holds = ProtectedInstances::of(gpu);
    match plan::plan_protecting(&geometry, &mig.instances, &Target::default(), &holds) {
        Ok(plan) => match unknown_users_error(gpu, true, &plan.steps) {
            None => {
                let steps = plan.steps.into_iter().map(Step::Instance).chain([off]).collect();
                GpuPlan { steps, ..answer }
            }
            error => GpuPlan { error, ..answer },
        },
        Err(refusal) => {
            let error = refusal::explain_mig_off(&refusal, gpu.index, &label(gpu));
            GpuPlan { refusal: Some(refusal), error: Some(error), ..answer }
        }
    }
}
