//! Hints for a GPU that cannot have a layout: a command that works for this GPU, or a change of the
//! config.

use gpush_api::{Gpu, GpuState, LayoutSource, Mode};

use super::DesiredState;

/// The commands that make a changed config effective.
const RELOAD: &str = "then run `gpushctl config check FILE` and `gpushctl config reload`";

/// Returns a rule's name for a sentence. For a rule without a name, this is a label such as
/// `rule 2`.
pub(super) fn rule_name(label: &str) -> String {
    if label.starts_with("rule ") { label.to_owned() } else { format!("rule `{label}`") }
}

/// Returns a profile of the GPU for an example. Prefers profiles that fit at least twice.
pub(super) fn example_profile(gpu: &Gpu) -> Option<&str> {
    let profiles = &gpu.mig.as_ref()?.profiles;
    let several = profiles.iter().filter(|profile| profile.max > 1).max_by_key(|profile| profile.slices);
    several.or(profiles.first()).map(|profile| profile.name.as_str())
}

/// Returns the GPUs that a request could name instead, written as arguments of the command that
/// sends the request. Returns `None` if there are no such GPUs. A request without a layout can name
/// only GPUs whose rule has a layout.
pub(super) fn alternatives(gpus: &[Gpu], desired_states: &[DesiredState], source: &LayoutSource) -> Option<String> {
    let free = |desired_state: &DesiredState| match source {
        LayoutSource::Config | LayoutSource::Wanted => desired_state.has_rule_layout(),
        LayoutSource::Named(_) | LayoutSource::Entries(_) | LayoutSource::PerGpu(_) => {
            desired_state.mode == Mode::Mig || desired_state.rule.is_none()
        }
    };
    let works = |gpu: &Gpu| match gpu.state {
        GpuState::Ready | GpuState::Changing | GpuState::Degraded => true,
        // A request may name a cordoned GPU, but the hint does not suggest a cordoned GPU.
        GpuState::Cordoned => false,
        GpuState::Held | GpuState::Unknown | GpuState::Lost | GpuState::Maintenance => false,
    };
    let able = gpus
        .iter()
        .zip(desired_states)
        .filter(|(gpu, desired_state)| gpu.mig.is_some() && works(gpu) && free(desired_state));
    let mut spans: Vec<(u32, u32)> = Vec::new();
    for index in able.map(|(gpu, _)| gpu.index) {
        match spans.last_mut() {
            Some((_, last)) if last.checked_add(1) == Some(index) => *last = index,
            Some(_) | None => spans.push((index, index)),
        }
    }
    let words: Vec<String> =
        spans.iter().map(|(a, b)| if a == b { a.to_string() } else { format!("{a}-{b}") }).collect();
    let list = words.join(",");
    (!words.is_empty()).then(|| match source {
        LayoutSource::Wanted => format!("`gpushctl apply {list}` (administrator)"),
        LayoutSource::Config | LayoutSource::Named(_) | LayoutSource::Entries(_) => format!("--gpu {list}"),
        // `mig on` takes GPUs as arguments or with -g, and `mig add` only with -g. So the hint
        // names only the GPUs.
        LayoutSource::PerGpu(_) => format!("GPUs {list}"),
    })
}

/// Returns the hint for a GPU whose rule has a mode other than `mig`.
pub(super) fn for_other_mode(gpu: &Gpu, label: &str, others: Option<&str>) -> String {
    let other = others.map_or_else(String::new, |others| format!("choose other GPUs: {others}"));
    if gpu.mig.is_none() {
        return if other.is_empty() {
            no_mig_hint().to_owned()
        } else {
            format!("the GPU does not support MIG; {other}")
        };
    }
    let or = if other.is_empty() { String::new() } else { format!("{other}; or ") };
    let (index, entries) = (gpu.index, example_profile(gpu).unwrap_or("none"));
    format!(
        "{or}remove the GPU from {0} of the config and add a rule (match = [\"{index}\"], mode = \"mig\", layout = \
         [\"{entries}\"]) before {0}, {RELOAD}",
        rule_name(label)
    )
}

/// Returns the hint for a GPU without MIG.
pub(super) fn without_mig(desired_state: &DesiredState, others: Option<&str>) -> String {
    let other = others.map(|others| format!("choose other GPUs: {others}"));
    match (&desired_state.rule, other) {
        (Some(label), other) if desired_state.mode == Mode::Mig => {
            let or = other.map_or_else(String::new, |other| format!("{other}; or "));
            format!("{or}remove the GPU from {} of the config, {RELOAD}", rule_name(label))
        }
        (_, Some(other)) => other,
        (_, None) => no_mig_hint().to_owned(),
    }
}

fn no_mig_hint() -> &'static str {
    "no other GPU of this host can have MIG instances either, as `gpushctl gpu list` shows"
}

/// Returns the hint for a GPU that no rule claims, in a request that names the GPU without a
/// layout.
pub(super) fn without_layout(gpu: &Gpu) -> String {
    let index = gpu.index;
    let entries = example_profile(gpu).unwrap_or("none");
    format!(
        "name a layout, as in `gpushctl mig plan {entries} -g {index}`; or add to the config a rule with match = \
        [\"{index}\"], mode = \"mig\" and a layout, {RELOAD}"
    )
}

/// Returns the hint for a request that names no GPU, on a host where no rule claims a GPU for MIG.
/// `layout` says whether the request has a layout.
pub(super) fn without_claim(gpus: &[Gpu], desired_states: &[DesiredState], layout: bool) -> String {
    let Some(others) = alternatives(gpus, desired_states, &LayoutSource::Entries(Vec::new())) else {
        return "no GPU of this host can have MIG instances: `gpushctl gpu list` shows the modes of the GPUs, and \
        `gpushctl config show` shows the rules"
            .to_owned();
    };
    if layout {
        return format!("name GPUs: {others}");
    }
    let free = |desired_state: &DesiredState| desired_state.rule.is_none();
    let first = gpus
        .iter()
        .zip(desired_states)
        .find(|(gpu, desired_state)| gpu.mig.is_some() && free(desired_state))
        .map(|(gpu, _)| gpu);
    let Some((gpu, entries)) = first.and_then(|gpu| Some((gpu, example_profile(gpu)?))) else {
        return format!("name GPUs and a layout: {others} --layout ENTRIES");
    };
    let index = gpu.index;
    format!(
        "name a GPU and a layout: `gpushctl mig apply --gpu {index} --layout {entries}` (administrator); or add a rule \
        to the config \
         ([[gpu]] match = [\"{index}\"] mode = \"mig\" layout = [\"{entries}\"]), {RELOAD}"
    )
}
