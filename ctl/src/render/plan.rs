//! A plan: the GPU as it is now, the GPU after the plan, and the steps from one to the other.
//!
//! ```text
//! GPU 0  A100-SXM4-80GB  07:00.0
//!        ╭─ now ─╮   - destroyed   = kept
//!        ╭─ then ╮   + created     = kept, ~ kept with other compute instances; without MIG mode: MIG off
//!   1  - GPU instance 1g.10gb@4 (GI 11)
//! ```
//!
//! GPUs whose drawings are equal are drawn only once. So a host with eight equal GPUs has one drawing.

use anstyle::Style;
use gpush_api::{
    ApiError, Gpu, GpuIndex, GpuPlan, InstanceStep, MigModeStep, MpsStep, Placement, Plans, Reset, Step, TimesliceStep,
};
use gpush_core::layout::Layout;

use super::{
    Appearance,
    appearance::{GONE, NEW, NOTE, PLAIN, QUIET, STRONG, count, paint, pci, product, width},
    names::gpu_numbers,
    slices::{self, Cell},
    trouble,
};

/// Width of the labels `now` and `then`, left of the drawings.
const GUTTER: usize = 7;

/// How many instances a plan destroys, creates and keeps on one GPU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    pub(crate) destroys: usize,
    pub(crate) creates: usize,
    pub(crate) keeps: usize,
}

impl Tally {
    pub(crate) fn of(plan: &GpuPlan) -> Self {
        let mut tally = Self { keeps: plan.keeps.len(), ..Self::default() };
        for step in plan.instance_steps() {
            match step {
                InstanceStep::DestroyGpuInstance { .. } => tally.destroys += 1,
                InstanceStep::CreateGpuInstance { .. } => tally.creates += 1,
                InstanceStep::DestroyCompute { .. } | InstanceStep::CreateCompute { .. } => {}
            }
        }
        tally
    }
}

/// Returns one sentence for each obstacle of these plans. If the causes of an error name the obstacles, leaves out the
/// error's message.
pub(crate) fn blockers(plans: &Plans) -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    for plan in &plans.plans {
        let Some(error) = &plan.error else { continue };
        let sentences = match error.causes.as_slice() {
            [] => vec![error.message.clone()],
            causes => causes.iter().map(|cause| format!("GPU {}: {cause}", plan.gpu)).collect(),
        };
        sentences.into_iter().for_each(|sentence| {
            if !found.contains(&sentence) {
                found.push(sentence);
            }
        });
    }
    found
}

/// Returns whether the GPU already is as planned: the plan is possible and has no steps.
pub(crate) fn needs_no_change(plan: &GpuPlan) -> bool {
    plan.refusal.is_none() && plan.error.is_none() && plan.is_empty()
}

/// Describes the steps of a plan in their order, each with a style. The drawing numbers these lines, and the progress
/// counts them.
pub(crate) fn steps(plan: &GpuPlan) -> impl Iterator<Item = (Style, String)> {
    plan.steps.iter().map(step)
}

/// Describes the services and hooks around the steps; `None` if there are none.
fn surroundings(plan: &GpuPlan) -> Option<String> {
    let mut parts = Vec::new();
    if !plan.services.is_empty() {
        parts.push(format!("stops and starts {}", plan.services.join(", ")));
    }
    if !plan.hooks.is_empty() {
        parts.push(format!("runs {}", plan.hooks.join(", ")));
    }
    (!parts.is_empty()).then(|| parts.join("; "))
}

/// Describes a step. It begins with `+` if the step creates or starts something, and with `-` if it destroys or stops
/// something.
fn step(step: &Step) -> (Style, String) {
    let completion = |step: &MigModeStep| match step.reset() {
        Some(reset) => format!(", with a reset of the GPU{}", disturbed(reset)),
        None if step.at_reboot() => ", when this virtual machine reboots".to_owned(),
        None => String::new(),
    };
    match step {
        Step::Mps(MpsStep::StopDaemon { label, .. }) => (GONE, format!("- MPS daemon of {label}")),
        Step::Mps(MpsStep::StartDaemon { device: None }) => (NEW, "+ MPS daemon of the GPU".to_owned()),
        Step::Mps(MpsStep::StartDaemon { device: Some(device) }) => (NEW, format!("+ MPS daemon of {device}")),
        Step::MigMode(step) if step.enables() => (NEW, format!("+ MIG mode{}", completion(step))),
        Step::MigMode(step) => (GONE, format!("- MIG mode{}", completion(step))),
        Step::Instance(step) if step.destroys().is_some() => (GONE, instance_step(step)),
        Step::Instance(step) => (NEW, instance_step(step)),
        Step::Timeslice(TimesliceStep::Set) => (NEW, "+ time-sliced".to_owned()),
        Step::Timeslice(TimesliceStep::Clear) => (GONE, "- time-sliced".to_owned()),
    }
}

/// Describes what a reset disturbs, as the end of a line.
fn disturbed(reset: &Reset) -> String {
    if reset.together.is_empty() {
        return String::new();
    }
    format!(": also resets {}", gpu_numbers(&reset.together.iter().map(|peer| peer.gpu).collect::<Vec<_>>()))
}

/// Describes a step on an instance: `+ GPU instance 2g.20gb@4`.
fn instance_step(step: &InstanceStep) -> String {
    match step {
        InstanceStep::DestroyCompute { gi, ci, profile, .. } => {
            format!("- compute instance {profile} (GI {gi} CI {ci})")
        }
        InstanceStep::DestroyGpuInstance { gi, profile, placement } => {
            format!("- GPU instance {profile}@{} (GI {gi})", placement.start)
        }
        InstanceStep::CreateGpuInstance { profile, placement, .. } => {
            format!("+ GPU instance {profile}@{}", placement.start)
        }
        InstanceStep::CreateCompute { gi_placement, profile, placement, .. } => {
            let gi = format!("{}@{}", within(profile), gi_placement.start);
            match placement {
                _ if within(profile) == profile => format!("+ compute instance {gi}"),
                Some(at) => format!("+ compute instance {profile} at slot {} of {gi}", at.start),
                None => format!("+ compute instance {profile} of {gi}"),
            }
        }
    }
}

/// Returns the profile of the GPU instance to which a compute instance profile belongs: `3g.40gb` for `1c.3g.40gb`.
fn within(profile: &str) -> &str {
    match profile.split_once('.') {
        Some((slices, rest)) if slices.ends_with('c') => rest,
        Some(_) | None => profile,
    }
}

/// Draws all plans. `gpus` are the current GPUs; empty if they are not known.
pub(crate) fn plans(plans: &Plans, gpus: &[Gpu], look: &Appearance) -> String {
    draw(plans, gpus, trouble_of_plan, look)
}

/// Draws all plans. `trouble` draws the error of a plan.
pub(super) fn draw(
    plans: &Plans,
    gpus: &[Gpu],
    trouble: fn(&GpuPlan, &ApiError, &Appearance) -> Vec<String>,
    look: &Appearance,
) -> String {
    if plans.plans.is_empty() {
        return paint(
            NOTE,
            "Nothing to plan: no rule of the config claims a GPU for \
            MIG.",
        ) + "\n"
            + NOTHING_CLAIMED
            + "\n";
    }
    // Group the equal plans. A group has the indexes of its GPUs, a heading and a body. The groups are in the order of
    // their first GPUs.
    let mut groups: Vec<(Vec<GpuIndex>, Heading, Vec<String>)> = Vec::new();
    for plan in &plans.plans {
        let gpu = gpus.iter().find(|gpu| gpu.uuid == plan.gpu_uuid);
        let body = match &plan.error {
            Some(error) => trouble(plan, error, look),
            None => body(plan, gpu, look),
        };
        let heading = Heading { name: look.clean(product(&plan.name)), wanted: plan.end_state() };
        match groups.iter_mut().find(|(_, h, b)| *h == heading && *b == body) {
            Some((indexes, _, _)) => indexes.push(plan.gpu),
            None => groups.push((vec![plan.gpu], heading, body)),
        }
    }
    let mut out = Vec::new();
    for (indexes, heading, body) in &groups {
        if !out.is_empty() {
            out.push(String::new());
        }
        let numbers = gpu_numbers(indexes);
        let mut address = String::new();
        if let [one] = indexes.as_slice() {
            address = gpus.iter().find(|g| g.index == *one).map_or_else(String::new, |g| look.clean(pci(&g.pci)));
        }
        out.push(headline(&numbers, &heading.name, &address, look));
        out.extend(look.wrap("  desired: ", &look.clean(&heading.wanted)).into_iter().map(|l| paint(QUIET, &l)));
        out.extend(body.iter().cloned());
    }
    out.join("\n") + "\n"
}

const NOTHING_CLAIMED: &str = "Name a layout, and a GPU with --gpu; or add a rule for the GPU to the config.";

#[derive(PartialEq)]
struct Heading {
    name: String,
    wanted: String,
}

/// Returns a heading such as `GPUs 0-3  A100-SXM4-80GB  07:00.0`.
pub(crate) fn headline(numbers: &str, name: &str, address: &str, look: &Appearance) -> String {
    let gap = if address.is_empty() { "" } else { "  " };
    let room = look.width.saturating_sub(width(numbers) + 2 + gap.len() + width(address));
    format!("{}  {}{gap}{}", paint(STRONG, numbers), look.fit(name, room.max(16)), paint(QUIET, address))
}

/// Draws the error of a plan.
pub(super) fn trouble_of_plan(_: &GpuPlan, error: &ApiError, look: &Appearance) -> Vec<String> {
    trouble::lines("refused", error, 2, look)
}

fn body(plan: &GpuPlan, gpu: Option<&Gpu>, look: &Appearance) -> Vec<String> {
    if let Some(refusal) = &plan.refusal {
        // gpushd always sends a refusal together with its error, but a saved plan may lack the error.
        let reason = serde_json::to_string(refusal).unwrap_or_default();
        return look.wrap("  refused: ", &look.clean(&reason));
    }
    if needs_no_change(plan) {
        return vec![paint(NEW, "  as desired: nothing to do")];
    }
    let mut out = Vec::new();
    // Draw the GPU only if it has MIG mode before or after the plan.
    let cut = |mig: &&gpush_api::Mig| mig.enabled || plan.changes_mig();
    if let Some((gpu, mig)) = gpu.and_then(|gpu| Some((gpu, gpu.mig.as_ref().filter(cut)?))) {
        let (now, then) = cells(plan, mig);
        // Without MIG mode, there are no slices to draw.
        let drawn = |on: bool, cells| {
            if on { slices::draw(cells, mig.memory_slices, slices::FREE, GUTTER, look) } else { off() }
        };
        out.extend(labelled("now", drawn(mig.enabled, now)));
        out.extend(labelled("then", drawn(!plan.leaves_whole(gpu), then)));
    }
    if let Some(text) = surroundings(plan) {
        out.extend(look.wrap("  around the steps: ", &look.clean(&text)).into_iter().map(|line| paint(NOTE, &line)));
    }
    let total = steps(plan).count();
    let digits = total.to_string().len();
    for (at, (style, one)) in steps(plan).enumerate() {
        let number = paint(QUIET, &format!("  {:>digits$}  ", at + 1));
        out.push(format!("{number}{}", paint(style, &look.clean(&one))));
    }
    if let Some(text) = shared_devices(plan) {
        out.extend(look.wrap("  ", &look.clean(&text)).into_iter().map(|line| paint(NEW, &line)));
    }
    let Tally { destroys, creates, keeps } = Tally::of(plan);
    let steps = count(total, "step");
    let text = if plan.changes_mig() {
        format!("  {steps}: {} destroyed, {creates} created, {keeps} kept", count(destroys, "GPU instance"))
    } else {
        format!("  {steps}")
    };
    out.push(paint(QUIET, &text));
    out
}

/// Returns a sentence about the MIG devices that get an MPS daemon; `None` if there are no such devices. The plan has
/// no step for such a daemon, because gpushd starts it when the device exists.
fn shared_devices(plan: &GpuPlan) -> Option<String> {
    let shared: Vec<&str> =
        plan.layout.iter().map(String::as_str).filter(|entry| Layout::shares_devices(&[entry])).collect();
    (!shared.is_empty()).then(|| format!("after the change, MPS daemons run on: {}", shared.join(", ")))
}

/// Returns the drawn slices of a GPU: before the plan, and after it.
fn cells(plan: &GpuPlan, mig: &gpush_api::Mig) -> (Vec<Cell>, Vec<Cell>) {
    let destroyed =
        |id: u32| plan.instance_steps().any(|s| matches!(s, InstanceStep::DestroyGpuInstance { gi, .. } if *gi == id));
    let new_inside = |at: Placement| -> Vec<&str> {
        plan.instance_steps()
            .filter_map(|s| match s {
                InstanceStep::CreateCompute { gi_placement, profile, .. } if *gi_placement == at => {
                    Some(profile.as_str())
                }
                InstanceStep::CreateCompute { .. }
                | InstanceStep::DestroyCompute { .. }
                | InstanceStep::DestroyGpuInstance { .. }
                | InstanceStep::CreateGpuInstance { .. } => None,
            })
            .collect()
    };
    let (mut now, mut then) = (Vec::new(), Vec::new());
    for instance in &mig.instances {
        let inside = slices::inside(instance);
        let cell =
            |mark, inside: Option<&str>, style| Cell::of(&instance.profile, instance.placement, mark, inside, style);
        if destroyed(instance.id) {
            now.push(cell("-", inside.as_deref(), GONE));
            continue;
        }
        let gone = |ci: u32| {
            plan.instance_steps()
                .any(|s| matches!(s, InstanceStep::DestroyCompute { gi, ci: c, .. } if *gi == instance.id && *c == ci))
        };
        let added = new_inside(instance.placement);
        if added.is_empty() && !instance.compute.iter().any(|c| gone(c.id)) {
            now.push(cell("=", inside.as_deref(), PLAIN));
            then.push(cell("=", inside.as_deref(), PLAIN));
        } else {
            let stay = instance.compute.iter().filter(|c| !gone(c.id)).map(|c| c.profile.as_str());
            let after = split(&instance.profile, &stay.chain(added).collect::<Vec<_>>());
            now.push(cell("~", inside.as_deref(), NOTE));
            then.push(cell("~", after.as_deref(), NOTE));
        }
    }
    for one in plan.instance_steps() {
        if let InstanceStep::CreateGpuInstance { profile, placement, .. } = one {
            let inside = split(profile, &new_inside(*placement));
            then.push(Cell::of(profile, *placement, "+", inside.as_deref(), NEW));
        }
    }
    (now, then)
}

/// Returns the compute instances of a split GPU instance, such as `1c 2c`. `None` if one compute instance uses all of
/// it.
fn split(profile: &str, compute: &[&str]) -> Option<String> {
    if compute == [profile] {
        return None;
    }
    let parts: Vec<_> = compute.iter().map(|c| c.split('.').next().unwrap_or("?")).collect();
    Some(parts.join(" "))
}

/// Returns the text that replaces the drawing of a GPU without MIG mode.
fn off() -> Vec<String> {
    vec![format!("{}{}", " ".repeat(GUTTER), paint(QUIET, "MIG off"))]
}

/// Adds a label on the left of a drawing, next to its middle line.
fn labelled(label: &str, lines: Vec<String>) -> Vec<String> {
    let middle = lines.len() / 2;
    lines
        .into_iter()
        .enumerate()
        .map(|(at, line)| if at == middle { format!("  {label:<w$}{}", &line[GUTTER..], w = GUTTER - 2) } else { line })
        .collect()
}

#[cfg(test)]
mod tests {
    use gpush_api::Code;

    use super::*;
    use crate::render::{Charset, fixtures};

    #[test]
    fn devices_that_the_layout_shares_are_named() {
        let mut plan = fixtures::plan();
        assert_eq!(shared_devices(&plan), None);
        plan.layout = vec!["3g.40gb".to_owned(), "2g.20gb*2:mps".to_owned()];
        let text = fixtures::plain(&plans(&Plans { plans: vec![plan] }, &[], &fixtures::look(80, Charset::Ascii)));
        assert!(text.contains("\n  after the change, MPS daemons run on: 2g.20gb*2:mps\n"), "{text}");
    }

    #[test]
    fn blocker_is_named_once_without_the_summary() {
        let mut first = fixtures::plan();
        let error = ApiError::new(Code::Blocked, "cannot apply the layout to GPU 0: 3g.40gb@4 is in use");
        first.error = Some(error.cause("3g.40gb@4 is held by pid 7 (alice)"));
        let mut second = fixtures::plan();
        second.error = Some(ApiError::new(Code::Conflict, "op-3 is ahead in the queue of GPU 1"));
        let all = Plans { plans: vec![first.clone(), first, second, fixtures::plan()] };
        assert_eq!(
            blockers(&all),
            ["GPU 0: 3g.40gb@4 is held by pid 7 (alice)", "op-3 is ahead in the queue of GPU 1"]
        );
    }
}
