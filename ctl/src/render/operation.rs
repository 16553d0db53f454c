//! An operation: how it went, and what is different now, by the hardware's word.

use anstyle::Style;
use gpush_api::{ApiError, Code, Gpu, GpuPlan, Operation, OperationState, Step};

use super::{
    Look,
    look::{BAD, GONE, NEW, NOTE, PLAIN, QUIET, count, paint, pci, product},
    plan::{self, Tally},
    status::gpu_numbers,
    trouble,
};

/// A state in words, and how loud it is.
pub(crate) fn state(of: OperationState) -> (&'static str, Style) {
    match of {
        OperationState::Queued => ("queued", PLAIN),
        OperationState::Running => ("running", NOTE),
        OperationState::Done => ("done", NEW),
        OperationState::RolledBack => ("rolled back", BAD),
        OperationState::Failed => ("failed", BAD),
    }
}

/// The error that explains an operation that did not succeed.
pub(crate) fn error(operation: &Operation) -> Option<ApiError> {
    let first = || operation.progress.iter().find_map(|p| p.error.clone());
    let error = operation.error.clone().or_else(first);
    match operation.state {
        OperationState::Queued | OperationState::Running | OperationState::Done => error,
        OperationState::RolledBack | OperationState::Failed => Some(
            error.unwrap_or_else(|| ApiError::new(Code::Internal, format!("{} failed without a word", operation.id))),
        ),
    }
}

/// What became of an operation. `before` and `after` are the GPUs read before and after it, as far as
/// they were.
pub(crate) fn operation(operation: &Operation, before: &[Gpu], after: &[Gpu], look: &Look) -> String {
    let (word, style) = state(operation.state);
    let changed: Vec<_> = operation.plans.iter().filter(|p| !plan::as_wanted(p)).collect();
    let same: Vec<u32> = operation.plans.iter().filter(|p| plan::as_wanted(p)).map(|p| p.gpu).collect();
    let by = operation.by.user.as_ref().map_or_else(|| format!("uid {}", operation.by.uid), |u| look.clean(u));
    let mut out = vec![format!(
        "{} {}: {} by {by}, {}",
        operation.id,
        paint(style, word),
        look.clean(&operation.kind),
        look.ago(operation.created_at)
    )];
    for plan in &changed {
        let of = |gpus: &'_ [Gpu]| gpus.iter().find(|g| g.uuid == plan.uuid).cloned();
        let (was, gpu) = (of(before), of(after));
        let address = gpu.as_ref().or(was.as_ref()).map_or("", |g| pci(&g.pci));
        let number = gpu_numbers(&[plan.gpu]);
        out.push(plan::headline(&number, &look.clean(product(&plan.name)), &look.clean(address), look));
        match operation.state {
            OperationState::Done => out.extend(done(plan, was.as_ref(), gpu.as_ref(), look)),
            OperationState::Queued | OperationState::Running => out.extend(under_way(operation, plan, look)),
            OperationState::RolledBack => out.push("  as it was before".to_owned()),
            OperationState::Failed => out.extend(under_way(operation, plan, look)),
        }
        if let Some(error) = error_of(operation, plan.gpu) {
            out.extend(trouble::lines("error", error, 2, look));
        }
    }
    if !same.is_empty() {
        let text = look.wrap("", &format!("{}: as wanted, nothing to do", gpu_numbers(&same)));
        out.extend(text.iter().map(|l| paint(QUIET, l)));
    }
    match operation.state {
        OperationState::Done | OperationState::Queued | OperationState::Running => {}
        OperationState::RolledBack | OperationState::Failed => {
            // The whole's error may repeat a GPU's: it is said once.
            let said = changed.iter().filter_map(|plan| error_of(operation, plan.gpu)).collect::<Vec<_>>();
            for error in operation.error.iter().filter(|error| !said.contains(error)) {
                out.extend(trouble::lines("error", error, 0, look));
            }
        }
    }
    out.join("\n") + "\n"
}

/// What went wrong on a GPU.
fn error_of(operation: &Operation, gpu: u32) -> Option<&ApiError> {
    operation.progress.iter().find(|p| p.gpu == gpu).and_then(|p| p.error.as_ref())
}

/// What was destroyed, what was made and how it is called, what stayed.
fn done(plan: &GpuPlan, before: Option<&Gpu>, gpu: Option<&Gpu>, look: &Look) -> Vec<String> {
    let mut out = Vec::new();
    if plan.enables_mig {
        out.push(paint(NEW, "  + MIG mode is on"));
    }
    let instances = gpu.and_then(|g| g.mig.as_ref()).map_or(&[][..], |m| &m.instances);
    for step in &plan.steps {
        match step {
            Step::DestroyGpuInstance { gi, profile, placement } => {
                let text = format!("  - {}@{}  was GI {gi}", look.clean(profile), placement.start);
                out.push(paint(GONE, &text));
            }
            Step::DestroyCompute { gi, ci, profile } => {
                // With its GPU instance gone too, one line says it.
                let with_it = |s: &Step| matches!(s, Step::DestroyGpuInstance { gi: g, .. } if g == gi);
                if !plan.steps.iter().any(with_it) {
                    out.push(paint(GONE, &format!("  - {}  was GI {gi} CI {ci}", look.clean(profile))));
                }
            }
            Step::CreateGpuInstance { .. } | Step::CreateCompute { .. } => {}
        }
    }
    let made_in = |at| {
        plan.steps
            .iter()
            .filter(move |s| matches!(s, Step::CreateCompute { gi_placement, .. } if *gi_placement == at))
            .count()
    };
    let mut kept = 0;
    for instance in instances {
        let at = format!("{}@{}", look.clean(&instance.profile), instance.placement.start);
        let made = plan
            .steps
            .iter()
            .any(|s| matches!(s, Step::CreateGpuInstance { placement, .. } if *placement == instance.placement));
        let computes = made_in(instance.placement);
        if !made && computes == 0 {
            kept += 1;
            continue;
        }
        let fresh = instance.compute.iter().filter(|c| made || !stayed(plan, before, instance.id, c.id));
        let fresh: Vec<_> = fresh.collect();
        if fresh.is_empty() {
            out.push(paint(NEW, &format!("  + {at}  GI {}", instance.id)));
        }
        for compute in fresh {
            let what = if compute.profile == instance.profile {
                at.clone()
            } else {
                format!("{} in {at}", look.clean(&compute.profile))
            };
            let uuid = compute.uuid.as_ref().map_or_else(String::new, |u| look.clean(u));
            let line = format!("  + {what}  GI {} CI {}", instance.id, compute.id);
            out.push(format!("{}  {uuid}", paint(NEW, &line)));
        }
    }
    if instances.is_empty() {
        let Tally { creates, keeps, .. } = Tally::of(plan);
        kept = keeps;
        if creates > 0 {
            out.push(paint(NEW, &format!("  + {}", count(creates, "GPU instance"))));
        }
    }
    match kept {
        0 => {}
        1 => out.push(paint(QUIET, "  = 1 GPU instance kept as it was")),
        n => out.push(paint(QUIET, &format!("  = {n} GPU instances kept as they were"))),
    }
    out
}

/// Whether a compute instance was there before and was to stay: ids are handed out anew, so only the
/// reading before and the plan together tell.
fn stayed(plan: &GpuPlan, before: Option<&Gpu>, gi: u32, ci: u32) -> bool {
    let instances = before.and_then(|g| g.mig.as_ref()).map_or(&[][..], |m| &m.instances);
    let was = instances.iter().any(|i| i.id == gi && i.compute.iter().any(|c| c.id == ci));
    was && !plan.steps.iter().any(|s| matches!(s, Step::DestroyCompute { gi: g, ci: c, .. } if *g == gi && *c == ci))
}

/// How far a GPU is.
fn under_way(operation: &Operation, plan: &GpuPlan, look: &Look) -> Vec<String> {
    let Some(progress) = operation.progress.iter().find(|p| p.gpu == plan.gpu) else { return Vec::new() };
    let way = if progress.rolling_back { "steps, taking them back" } else { "steps" };
    let mut text = format!("  {} of {} {way}", progress.done, progress.total);
    if let Some(doing) = &progress.doing {
        text += &format!(": {}", look.clean(doing));
    }
    vec![text]
}
