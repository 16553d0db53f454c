//! An operation: its result, and what it has changed on the hardware.

use anstyle::Style;
use gpush_api::{
    ApiError, Code, ComputeInstance, Gpu, GpuIndex, GpuPlan, InstanceStep, MigModeStep, Mode, MpsStep, Operation,
    OperationState, OperationSummary, Step, TimesliceStep,
};

use super::{
    Appearance,
    appearance::{BAD, GONE, NEW, NOTE, PLAIN, QUIET, count, paint, pci, product, width},
    names,
    names::gpu_numbers,
    overrides, plan, trouble,
};

/// Returns a state as text, with its style.
pub(crate) fn state(of: OperationState) -> (&'static str, Style) {
    match of {
        OperationState::Queued => ("queued", PLAIN),
        OperationState::Waiting => ("waiting", PLAIN),
        OperationState::Running => ("running", NOTE),
        OperationState::Cancelling => ("rolling back", NOTE),
        OperationState::Interrupted => ("interrupted", NOTE),
        OperationState::Done => ("done", NEW),
        OperationState::NotStarted => ("not started", BAD),
        OperationState::RolledBack => ("rolled back", BAD),
        OperationState::Failed => ("failed", BAD),
    }
}

/// Returns the result of an operation as text. If a user cancelled the operation, the text is `cancelled`, even after a
/// rollback.
fn outcome(operation: &Operation) -> (&'static str, Style) {
    summary_outcome(&OperationSummary::from(operation))
}

/// Returns the result of an operation in a list, in the same words as [`outcome`].
pub(crate) fn summary_outcome(operation: &OperationSummary) -> (&'static str, Style) {
    let is_cancelled = operation.error.as_ref().is_some_and(|error| error.code == Code::Cancelled);
    match operation.state {
        OperationState::NotStarted | OperationState::RolledBack if is_cancelled => ("cancelled", NOTE),
        other => state(other),
    }
}

/// Returns whether a user has cancelled the operation, and no change of it remains.
fn is_cancelled(operation: &Operation) -> bool {
    let error = operation.error.as_ref();
    matches!(operation.state, OperationState::NotStarted | OperationState::RolledBack)
        && error.is_some_and(|error| error.code == Code::Cancelled)
}

/// Returns the error of an operation if it did not succeed.
pub(crate) fn error(operation: &Operation) -> Option<ApiError> {
    let first = || operation.progress.iter().find_map(|p| p.error.clone());
    let error = operation.error.clone().or_else(first);
    match operation.state {
        OperationState::Queued
        | OperationState::Waiting
        | OperationState::Running
        | OperationState::Cancelling
        | OperationState::Interrupted
        | OperationState::Done => error,
        OperationState::NotStarted | OperationState::RolledBack | OperationState::Failed => {
            Some(error.unwrap_or_else(|| {
                ApiError::new(Code::Internal, format!("{} failed without an error message", operation.id))
            }))
        }
    }
}

/// Draws the result of an operation. `before` contains the GPUs before the operation, if they were read, and `now`
/// contains the current GPUs. `just` says that the operation has just ended. Otherwise, the ids of the instances in
/// `now` are not shown.
pub(crate) fn operation(operation: &Operation, before: &[Gpu], now: &[Gpu], just: bool, look: &Appearance) -> String {
    let (word, style) = outcome(operation);
    // Before an operation begins, its plans have no steps. This does not mean that the GPUs need no
    // change.
    let is_same = |p: &&GpuPlan| operation.begun && plan::needs_no_change(p);
    let changed: Vec<_> = operation.plans.iter().filter(|p| !is_same(p)).collect();
    let same: Vec<GpuIndex> = operation.plans.iter().filter(is_same).map(|p| p.gpu).collect();
    let by = names::actor(&operation.by, look);
    let mut out = vec![format!(
        "{} {}: {} by {by}, {}",
        operation.id,
        paint(style, word),
        look.clean(&operation.kind),
        look.ago(operation.created_at)
    )];
    if let Some(reason) = &operation.reason {
        out.extend(look.wrap("", &format!("reason: {}", look.clean(reason))).iter().map(|line| paint(QUIET, line)));
    }
    // Show each error only once: the operation may have the same error as a GPU, and several GPUs
    // may have the same error.
    let mut printed: Vec<&ApiError> = Vec::new();
    for plan in &changed {
        let of = |gpus: &'_ [Gpu]| gpus.iter().find(|g| g.uuid == plan.gpu_uuid).cloned();
        let (was, gpu) = (of(before), of(now));
        let address = gpu.as_ref().or(was.as_ref()).map_or("", |g| pci(&g.pci));
        let number = gpu_numbers(&[plan.gpu]);
        out.push(plan::headline(&number, &look.clean(product(&plan.name)), &look.clean(address), look));
        match operation.state {
            OperationState::Queued | OperationState::Waiting | OperationState::NotStarted => {
                out.extend(not_started_line(plan, look));
            }
            OperationState::Done => out.extend(changes(plan, was.as_ref(), gpu.as_ref().filter(|_| just), look)),
            OperationState::Running | OperationState::Cancelling | OperationState::Interrupted => {
                out.extend(progress_lines(operation, plan, look));
            }
            OperationState::RolledBack => out.extend(unchanged_line(operation, plan, look)),
            OperationState::Failed if was_rolled_back(operation, plan.gpu) => {
                out.extend(unchanged_line(operation, plan, look));
            }
            OperationState::Failed => out.extend(progress_lines(operation, plan, look)),
        }
        if let Some(error) =
            error_of(operation, plan).filter(|error| !printed.contains(error) && !is_cancelled(operation))
        {
            out.extend(trouble::lines("error", error, 2, look));
            printed.push(error);
        }
    }
    if !same.is_empty() {
        let text = look.wrap("", &format!("{}: as desired, nothing to do", gpu_numbers(&same)));
        out.extend(text.iter().map(|l| paint(QUIET, l)));
    }
    // The reasons to wait of an operation that has ended say nothing about the present.
    for reason in operation.waits_for.iter().filter(|_| !operation.state.is_final()) {
        out.extend(look.wrap("waits: ", &look.clean(reason)).iter().map(|line| paint(QUIET, line)));
    }
    for note in &operation.notes {
        out.extend(look.wrap("", &look.clean(note)).iter().map(|line| paint(QUIET, line)));
    }
    match operation.state {
        OperationState::Queued
        | OperationState::Waiting
        | OperationState::Running
        | OperationState::Cancelling
        | OperationState::Interrupted => {}
        OperationState::Done if just => out.extend(overrides::override_results(operation, before, now, look)),
        OperationState::Done => {}
        // Show no error, because the user has requested the cancellation.
        OperationState::NotStarted | OperationState::RolledBack if is_cancelled(operation) => {}
        OperationState::NotStarted | OperationState::RolledBack | OperationState::Failed => {
            for error in
                operation.error.iter().filter(|whole| !printed.iter().any(|printed| printed.message == whole.message))
            {
                out.extend(trouble::lines("error", error, 0, look));
            }
        }
    }
    out.join("\n") + "\n"
}

/// Draws that the change of a GPU has not started. Shows the desired layout of the GPU as a user types it.
fn not_started_line(plan: &GpuPlan, look: &Appearance) -> Vec<String> {
    look.wrap("  ", &look.clean(&format!("not started; desired: {}", plan.end_state())))
}

/// Returns whether the previous state of this GPU was restored, even if the operation as a whole has failed.
fn was_rolled_back(operation: &Operation, gpu: GpuIndex) -> bool {
    operation.progress.iter().any(|p| p.gpu == gpu && p.restored)
}

/// Draws that a GPU is as it was before, and the reason. Leaves out the reason if the error of this GPU follows.
fn unchanged_line(operation: &Operation, plan: &GpuPlan, look: &Appearance) -> Vec<String> {
    let mut failed: Vec<GpuIndex> = operation.progress.iter().filter(|p| p.error.is_some()).map(|p| p.gpu).collect();
    if failed.is_empty() || failed.contains(&plan.gpu) {
        return vec!["  as it was before".to_owned()];
    }
    failed.sort_unstable();
    look.wrap("  ", &format!("as it was before, because the change of {} failed", gpu_numbers(&failed)))
}

/// Returns the error of a GPU. If the error of the operation is about this GPU, returns that error,
/// because it says more.
fn error_of<'o>(operation: &'o Operation, plan: &GpuPlan) -> Option<&'o ApiError> {
    let own = operation.progress.iter().find(|p| p.gpu == plan.gpu).and_then(|p| p.error.as_ref())?;
    // The operation's error has the UUID of a GPU only at its first mention, so compare without
    // UUIDs.
    let bare = |sentence: &str| sentence.replace(&format!(" ({})", plan.gpu_uuid), "");
    let is_own = |sentence: &String| bare(sentence) == bare(&own.message);
    let tells = |whole: &&ApiError| std::iter::once(&whole.message).chain(&whole.causes).any(is_own);
    Some(operation.error.as_ref().filter(tells).unwrap_or(own))
}

/// Describes the MIG mode of a GPU after an operation.
fn done_mode(step: &MigModeStep, gpu: Option<&Gpu>) -> String {
    let (sign, mode) = if step.enables() { ("+", "on") } else { ("-", "off") };
    if !step.at_reboot() {
        return format!("{sign} MIG mode is {mode}");
    }
    // gpushd keeps a layout only if the rule of the GPU has mode `mig`.
    let then = match gpu {
        Some(gpu) if step.enables() && gpu.mode != Mode::Mig => {
            "; after the reboot, repeat the command to create the instances"
        }
        Some(_) | None => "",
    };
    format!("{sign} MIG mode is {mode} after a reboot of this virtual machine{then}")
}

/// Draws what the operation has destroyed, created and kept on a GPU, according to its plan. `gpu`
/// is the GPU as read right after the operation. Takes the ids and UUIDs of instances from `gpu`.
fn changes(plan: &GpuPlan, before: Option<&Gpu>, gpu: Option<&Gpu>, look: &Appearance) -> Vec<String> {
    let mut out = Vec::new();
    let mut altered = false;
    for step in &plan.steps {
        let (style, text) = match step {
            Step::MigMode(step) => {
                let style = if step.enables() { NEW } else { GONE };
                (style, format!("  {}", done_mode(step, gpu)))
            }
            Step::Mps(MpsStep::StopDaemon { label, .. }) => (GONE, format!("  - MPS daemon of {}", look.clean(label))),
            Step::Mps(MpsStep::StartDaemon { device: None }) => (NEW, "  + MPS daemon of the GPU".to_owned()),
            Step::Mps(MpsStep::StartDaemon { device: Some(device) }) => {
                (NEW, format!("  + MPS daemon of {}", look.clean(device)))
            }
            Step::Timeslice(TimesliceStep::Set) => (NEW, "  + time-sliced".to_owned()),
            Step::Timeslice(TimesliceStep::Clear) => (GONE, "  - time-sliced".to_owned()),
            Step::Instance(_) => continue,
        };
        out.push(paint(style, &text));
    }
    for step in plan.instance_steps() {
        match step {
            InstanceStep::DestroyGpuInstance { gi, profile, placement } => {
                let text = format!("  - {}@{}  was GI {gi}", look.clean(profile), placement.start);
                out.push(paint(GONE, &text));
            }
            InstanceStep::DestroyCompute { gi, ci, profile, .. } => {
                // Do not show this line if the whole GPU instance was destroyed, because the destruction has a separate
                // line.
                let with_it = |s: &InstanceStep| matches!(s, InstanceStep::DestroyGpuInstance { gi: g, .. } if g == gi);
                if !plan.instance_steps().any(with_it) {
                    altered = true;
                    out.push(paint(GONE, &format!("  - {}  was GI {gi} CI {ci}", look.clean(profile))));
                }
            }
            InstanceStep::CreateGpuInstance { .. } | InstanceStep::CreateCompute { .. } => {}
        }
    }
    let made = created_instances(plan, before, gpu);
    altered |= made.iter().any(|made| made.in_kept);
    let widest =
        |of: fn(&CreatedInstance) -> &str| made.iter().map(|made| width(&look.clean(of(made)))).max().unwrap_or(0);
    let (what_width, ids_width) = (widest(|m| &m.what), widest(|m| &m.ids));
    for CreatedInstance { what, ids, uuid, .. } in &made {
        let what = look.clean(what);
        // Pad the text here: a format width would count the color codes too.
        let line = format!("  + {what:<what_width$}  {ids}");
        let fill = " ".repeat(ids_width.saturating_sub(width(ids)));
        let text = format!("{}{fill}  {}", paint(NEW, line.trim_end()), look.clean(uuid));
        out.push(text.trim_end().to_owned());
    }
    // Say so if the compute instances of a kept GPU instance have changed.
    out.extend(
        match (plan.keeps.len(), altered) {
            (0, _) => None,
            (n, true) => Some(format!("  = {} kept", count(n, "GPU instance"))),
            (1, false) => Some("  = 1 GPU instance kept as it was".to_owned()),
            (n, false) => Some(format!("  = {n} GPU instances kept as they were")),
        }
        .map(|text| paint(QUIET, &text)),
    );
    out
}

struct CreatedInstance {
    /// The name of the instance, such as `3g.40gb@4` or `1c.3g.40gb in 3g.40gb@4`.
    what: String,
    /// The ids of the instance, such as `GI 2 CI 0`; empty if not known.
    ids: String,
    /// The UUID of the MIG device; empty if not known.
    uuid: String,
    /// Whether this is a compute instance in a GPU instance that existed before.
    in_kept: bool,
}

/// Returns the instances that the steps of a plan have created, in the order of the slices.
fn created_instances(plan: &GpuPlan, before: Option<&Gpu>, gpu: Option<&Gpu>) -> Vec<CreatedInstance> {
    let live = gpu.and_then(|g| g.mig.as_ref()).map_or(&[][..], |m| &m.instances);
    let mut reported: Vec<(u32, u32)> = Vec::new();
    let mut all = Vec::new();
    for step in plan.instance_steps() {
        match step {
            InstanceStep::CreateGpuInstance { profile, placement, .. } => {
                let filled = |s: &InstanceStep| matches!(s, InstanceStep::CreateCompute { gi_placement, .. } if gi_placement == placement);
                if !plan.instance_steps().any(filled) {
                    let it = live.iter().find(|i| i.placement == *placement && i.profile == *profile);
                    let ids = it.map_or_else(String::new, |i| format!("GI {}", i.id));
                    let what = format!("{profile}@{}", placement.start);
                    all.push((*placement, CreatedInstance { what, ids, uuid: String::new(), in_kept: false }));
                }
            }
            InstanceStep::CreateCompute { gi_placement, profile, .. } => {
                let parent = plan.instance_steps().find_map(|s| match s {
                    InstanceStep::CreateGpuInstance { profile, placement, .. } if placement == gi_placement => {
                        Some(profile)
                    }
                    InstanceStep::CreateGpuInstance { .. }
                    | InstanceStep::CreateCompute { .. }
                    | InstanceStep::DestroyGpuInstance { .. }
                    | InstanceStep::DestroyCompute { .. } => None,
                });
                let part = profile.split_once("c.").filter(|(n, _)| n.parse::<u8>().is_ok()).map(|(_, whole)| whole);
                let whole = parent.map_or(part.unwrap_or(profile), String::as_str);
                let at = format!("{whole}@{}", gi_placement.start);
                let found = live.iter().filter(|i| i.placement == *gi_placement && i.profile == whole).find_map(|i| {
                    let fresh = |ci| parent.is_some() || !was_kept(plan, before, i.id, ci);
                    let is_it = |c: &&ComputeInstance| {
                        c.profile == *profile && fresh(c.id) && !reported.contains(&(i.id, c.id))
                    };
                    i.compute.iter().find(is_it).map(|c| (i.id, c))
                });
                reported.extend(found.map(|(gi, c)| (gi, c.id)));
                let what = if part.is_some() { format!("{profile} in {at}") } else { at };
                all.push((
                    *gi_placement,
                    CreatedInstance {
                        what,
                        ids: found.map_or_else(String::new, |(gi, c)| format!("GI {gi} CI {}", c.id)),
                        uuid: found.and_then(|(_, c)| c.uuid.clone()).unwrap_or_default().to_string(),
                        in_kept: parent.is_none(),
                    },
                ));
            }
            InstanceStep::DestroyGpuInstance { .. } | InstanceStep::DestroyCompute { .. } => {}
        }
    }
    all.sort_by_key(|(placement, _)| *placement);
    all.into_iter().map(|(_, made)| made).collect()
}

/// Returns whether a compute instance existed before and the plan has kept it. Looks at the earlier
/// reading and at the plan, because a new instance may get the id of a destroyed one.
fn was_kept(plan: &GpuPlan, before: Option<&Gpu>, gi: u32, ci: u32) -> bool {
    let instances = before.and_then(|g| g.mig.as_ref()).map_or(&[][..], |m| &m.instances);
    let was = instances.iter().any(|i| i.id == gi && i.compute.iter().any(|c| c.id == ci));
    was && !plan
        .instance_steps()
        .any(|s| matches!(s, InstanceStep::DestroyCompute { gi: g, ci: c, .. } if *g == gi && *c == ci))
}

/// Draws how far the operation has come on a GPU.
fn progress_lines(operation: &Operation, plan: &GpuPlan, look: &Appearance) -> Vec<String> {
    let Some(progress) = operation.progress.iter().find(|p| p.gpu == plan.gpu) else { return Vec::new() };
    let way = match (progress.rolling_back, operation.state.is_final()) {
        (false, _) => "steps",
        (true, false) => "steps, rolling them back",
        (true, true) => "steps were executed, and not all of them could be rolled back",
    };
    let mut text = format!("  {} of {} {way}", progress.done, progress.total);
    if let Some(doing) = &progress.doing {
        text += &format!(": {}", look.clean(doing));
    }
    vec![text]
}
