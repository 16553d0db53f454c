//! Plans for a host: selects the GPUs of a request, and makes a plan for each.
//!
//! An invalid request is refused as a whole. A request is also refused as a whole if it gives a
//! layout to a GPU whose rule has a mode other than `mig`. Otherwise the answer contains, for every
//! GPU, a plan, or the reason why no plan is possible. So one answer shows all GPUs, and a lost GPU
//! does not hide the other GPUs.

use gpush_api::{ApiError, Code, Gpu, GpuPlan, LayoutSource, Mode, PlanRequest, Plans, Refusal};

use super::{
    DesiredState, desired_states,
    gpu_label::label,
    gpu_plan::{check_mode, check_plannable, empty_plan, keeps_gpu, no_mig, plan_dynamic, plan_gpu},
    mode, per_gpu,
    plan_hints::{self, Change},
};
use crate::{
    config::Config,
    layout::{self, DYNAMIC, Layout, NONE},
    nearest::nearest,
    quote::Quoted,
    selector::{self, Selector, inventory},
};

/// What a request asks for on one GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
enum PlanGoal {
    /// MIG mode off.
    Whole,
    /// MIG mode on, with exactly these instances.
    Layout(Layout),
    /// MIG mode on. The plan keeps the current instances, because leases create and destroy
    /// instances.
    Dynamic,
}

/// Plans a request for a host.
///
/// Without selectors, the request is for every GPU that a `mig` rule claims. If a rule of another
/// mode claims a GPU, a layout for that GPU is refused. If a request names such a GPU without a
/// layout, the plan turns MIG mode off, because the rule needs the whole GPU. A request may name an
/// unclaimed GPU only with an explicit layout.
///
/// # Errors
/// The request is invalid, matches no GPU, or is not allowed for a GPU that it names. If a GPU
/// cannot have its layout or cannot be used, the function succeeds, and the plan of the GPU
/// contains the reason.
pub fn plan_host(config: &Config, gpus: &[Gpu], request: &PlanRequest) -> Result<Plans, ApiError> {
    let desired_states = desired_states(config, gpus);
    if let LayoutSource::PerGpu(each) = &request.layout {
        let mut plans = per_gpu::plan(gpus, &desired_states, &request.gpus, each)?;
        mode::complete(config, gpus, &mut plans.plans);
        return Ok(plans);
    }
    let given = layout_of_request(config, &request.layout)?;
    let named = !request.gpus.is_empty();
    let chosen = selected_gpus(gpus, &desired_states, request)?;
    let change = if given.is_some() { Change::Layout } else { Change::DesiredState };
    let others = plan_hints::alternatives(gpus, &desired_states, &request.layout, &chosen);
    let others = others.as_deref();
    let mut wanted = Vec::new();
    for at in chosen {
        let (gpu, desired_state) = (&gpus[at], &desired_states[at]);
        let own = named && request.layout == LayoutSource::Config;
        let aim = match &given {
            Some(layout) => PlanGoal::Layout(layout.clone()),
            None if desired_state.needs_whole_gpu() => PlanGoal::Whole,
            None if desired_state.dynamic || (own && desired_state.dynamic_rule) => PlanGoal::Dynamic,
            None => PlanGoal::Layout(desired_layout(gpu, desired_state, own, others)?),
        };
        // Allow a layout that changes nothing on an unmanaged GPU, so that users can compare the GPU with the layout.
        // If the rule has any other mode except `mig`, the layout contradicts the rule.
        let same = || matches!(&aim, PlanGoal::Layout(layout) if keeps_gpu(&plan_gpu(gpu, layout, true)));
        if aim != PlanGoal::Whole
            && let Err(error) = check_mode(gpu, desired_state, change, given.as_ref(), others)
            && !(desired_state.mode == Mode::Unmanaged && same())
        {
            return Err(error);
        }
        wanted.push((gpu, desired_state, aim));
    }
    let implied = (!named).then(|| selector::ranges(wanted.iter().map(|(gpu, ..)| gpu.index)).join(","));
    let explicit = given.is_some();
    let plan = |(gpu, desired_state, aim): &(&Gpu, &DesiredState, PlanGoal)| {
        let empty = match aim {
            PlanGoal::Whole => return GpuPlan { mode: Some(desired_state.mode), ..per_gpu::plan_mig_off(gpu) },
            PlanGoal::Layout(layout) => empty_plan(gpu, layout),
            PlanGoal::Dynamic => GpuPlan { layout: vec![DYNAMIC.to_owned()], ..empty_plan(gpu, &Layout::none()) },
        };
        match (check_plannable(gpu, implied.as_deref()), aim) {
            (Ok(()), _) if gpu.mig.is_none() => {
                let refusal = Some(Refusal::NoMig);
                GpuPlan { refusal, error: Some(no_mig(gpu, desired_state, others)), ..empty }
            }
            (Ok(()), PlanGoal::Layout(layout)) => plan_gpu(gpu, layout, explicit),
            (Ok(()), PlanGoal::Dynamic | PlanGoal::Whole) => plan_dynamic(gpu, empty),
            (Err(error), _) => GpuPlan { error: Some(error), ..empty },
        }
    };
    let mut plans: Vec<GpuPlan> = wanted.iter().map(plan).collect();
    mode::complete(config, gpus, &mut plans);
    Ok(Plans { plans })
}

/// Returns the layout in the request; `None` if the request uses the layout of each rule.
fn layout_of_request(config: &Config, source: &LayoutSource) -> Result<Option<Layout>, ApiError> {
    let layout = match source {
        LayoutSource::Config | LayoutSource::Wanted | LayoutSource::PerGpu(_) => return Ok(None),
        LayoutSource::Named(name) => match config.layout(name.trim()) {
            Some(layout) => layout,
            None => return Err(no_layout(config, name.trim())),
        },
        LayoutSource::Entries(entries) => Layout::parse_list(entries).map_err(ApiError::from)?,
    };
    Ok(Some(layout))
}

fn no_layout(config: &Config, name: &str) -> ApiError {
    if name.eq_ignore_ascii_case(layout::DYNAMIC)
        && let Err(error) = Layout::parse(name)
    {
        return error.into();
    }
    // `none` is never suggested, because it destroys instances.
    let known: Vec<&str> = config.layouts.keys().map(String::as_str).filter(|name| *name != NONE).collect();
    let error = ApiError::new(Code::NotFound, format!("the config has no layout {}", Quoted(name)));
    if known.is_empty() {
        return error.cause("the config defines no layouts").hint(
            "write layout entries instead of a name, such as --layout '3g.40gb,1g.10gb*2', or define a layout under \
            [layouts]",
        );
    }
    let error = error.cause(format!("the layouts are: {}", known.join(", ")));
    match nearest(name, known) {
        Some(meant) => error.hint(format!("did you mean `{meant}`?")),
        None => error.hint("name one of these layouts, or write layout entries: --layout '3g.40gb,1g.10gb*2'"),
    }
}

/// Returns the positions of the selected GPUs.
fn selected_gpus(gpus: &[Gpu], desired_states: &[DesiredState], request: &PlanRequest) -> Result<Vec<usize>, ApiError> {
    if !request.gpus.is_empty() {
        return Selector::resolve(&request.gpus, gpus);
    }
    let layout = match request.layout {
        LayoutSource::Config | LayoutSource::Wanted => false,
        LayoutSource::Named(_) | LayoutSource::Entries(_) | LayoutSource::PerGpu(_) => true,
    };
    // A request for all GPUs never disables MIG, because that would destroy instances.
    let is_cut = |at: usize| gpus[at].mig.as_ref().is_some_and(|mig| mig.enabled || mig.pending_mode());
    let needs_whole = |at: usize| !layout && desired_states[at].needs_whole_gpu();
    let whole = |at: usize| needs_whole(at) && !is_cut(at);
    let of_mig = |at: usize| desired_states[at].mode == Mode::Mig;
    // A GPU whose rule needs the whole GPU is listed only if the GPU differs from its desired
    // state, also if a lease delays the change.
    let differs = |at: usize| !gpus[at].drift.is_empty() || !gpus[at].pending.is_empty();
    let claimed: Vec<usize> = (0..gpus.len()).filter(|at| of_mig(*at) || (whole(*at) && differs(*at))).collect();
    if !claimed.is_empty() {
        return Ok(claimed);
    }
    let whole: Vec<usize> = (0..gpus.len()).filter(|at| whole(*at)).collect();
    if !whole.is_empty() {
        return Ok(whole);
    }
    if gpus.is_empty() {
        return Err(ApiError::new(Code::NotFound, "the driver shows no GPU on this host")
            .hint("run `gpushctl status` to see why"));
    }
    if let Some(at) = (0..gpus.len()).find(|at| needs_whole(*at) && is_cut(*at)) {
        let index = gpus[at].index;
        let message = format!(
            "nothing to apply: no rule has mode `mig`. GPU {index} has MIG enabled, but its rule needs the whole GPU"
        );
        return Err(ApiError::new(Code::NotFound, message)
            .cause("disabling MIG destroys instances, so gpushd disables MIG only on GPUs that you name")
            .hint(format!("`gpushctl mig apply --dry-run --gpu {index}` shows what would be destroyed")));
    }
    let error = ApiError::new(Code::NotFound, "no config rule claims a GPU for MIG").cause(inventory(gpus));
    Err(error.hint(plan_hints::without_claim(gpus, desired_states, &request.layout)))
}

/// Returns the desired layout of the GPU. With `own`, returns the rule's layout, regardless of an
/// override.
fn desired_layout(
    gpu: &Gpu,
    desired_state: &DesiredState,
    own: bool,
    others: Option<&str>,
) -> Result<Layout, ApiError> {
    if let Some(layout) = if own { &desired_state.configured } else { &desired_state.layout } {
        return Ok(layout.clone());
    }
    if desired_state.has_rule_layout() {
        let message = format!("this version of gpushd does not know the layout of the override on {}", label(gpu));
        let clear = format!("to remove the override: `gpushctl config overrides clear {}` (administrator)", gpu.index);
        return Err(ApiError::new(Code::Unsupported, message).hint(clear));
    }
    check_mode(gpu, desired_state, Change::DesiredState, None, others)?;
    // A GPU that cannot be read has no MIG data, but may support MIG. So report missing MIG only
    // for a GPU that can be read.
    if gpu.mig.is_none() && check_plannable(gpu, None).is_ok() {
        return Err(no_mig(gpu, desired_state, others));
    }
    let message = format!("no config rule has a layout for {}", label(gpu));
    Err(ApiError::new(Code::NotFound, message).hint(plan_hints::without_layout(gpu)))
}
