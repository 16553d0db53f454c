//! Errors and hints for a GPU on which a change is not allowed. A hint names a command, for example for other GPUs,
//! or a change of the config.

use gpush_api::{Gpu, GpuState, LayoutSource, Mode};

use super::DesiredState;
use crate::{layout::Layout, selector};

/// The commands that make a changed config effective.
pub(super) const RELOAD: &str = "then run `gpushctl config check` and `gpushctl config reload` (administrator)";

/// A kind of change, for messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Change {
    DesiredState,
    Layout,
    MigOn,
    MigOff,
}

impl Change {
    /// Returns the beginning of an error: what failed on the GPU `label`.
    pub(super) fn failure(self, label: &str) -> String {
        match self {
            Self::DesiredState => format!("cannot apply the desired state to {label}"),
            Self::Layout => format!("cannot apply a layout to {label}"),
            Self::MigOn => format!("cannot enable MIG mode on {label}"),
            Self::MigOff => format!("cannot disable MIG mode on {label}"),
        }
    }
}

/// Returns a rule's name for a sentence. For a rule without a name, this is a label such as
/// `rule 2`.
#[must_use]
pub fn rule_name(label: &str) -> String {
    if label.starts_with("rule ") { label.to_owned() } else { format!("rule `{label}`") }
}

/// Returns a profile of the GPU for an example. Prefers profiles that fit at least twice.
pub(super) fn example_profile(gpu: &Gpu) -> Option<&str> {
    let profiles = &gpu.mig.as_ref()?.profiles;
    let several = profiles.iter().filter(|profile| profile.max > 1).max_by_key(|profile| profile.slices);
    several.or(profiles.first()).map(|profile| profile.name.as_str())
}

/// Returns the GPUs for which `fits` holds and whose state allows a change, as an argument of a command. Prefers the
/// GPUs of the request, whose positions are `chosen`. Returns `None` if there are no such GPUs.
fn able(
    gpus: &[Gpu],
    desired_states: &[DesiredState],
    chosen: &[usize],
    fits: impl Fn(&Gpu, &DesiredState) -> bool,
) -> Option<String> {
    let works = |gpu: &Gpu| match gpu.state {
        GpuState::Ready | GpuState::Changing | GpuState::Degraded => true,
        // A request may name a cordoned GPU, but the hint does not suggest a cordoned GPU.
        GpuState::Cordoned => false,
        GpuState::Held | GpuState::Unknown | GpuState::Lost | GpuState::Maintenance => false,
    };
    let able: Vec<usize> =
        (0..gpus.len()).filter(|at| works(&gpus[*at]) && fits(&gpus[*at], &desired_states[*at])).collect();
    let of_request: Vec<usize> = able.iter().copied().filter(|at| chosen.contains(at)).collect();
    let best = if of_request.is_empty() { able } else { of_request };
    (!best.is_empty()).then(|| selector::ranges(best.into_iter().map(|at| gpus[at].index)).join(","))
}

/// Returns whether a request may give the GPU a layout.
fn takes_layout(gpu: &Gpu, desired_state: &DesiredState) -> bool {
    gpu.mig.is_some() && (desired_state.mode == Mode::Mig || desired_state.rule.is_none())
}

/// Returns a command for the GPUs that a request could name instead. Returns `None` if there are no such GPUs. A
/// request without a layout can name only GPUs that have a desired state.
pub(super) fn alternatives(
    gpus: &[Gpu],
    desired_states: &[DesiredState],
    source: &LayoutSource,
    chosen: &[usize],
) -> Option<String> {
    let managed = |gpu: &Gpu, desired_state: &DesiredState| {
        desired_state.needs_whole_gpu() || (desired_state.has_rule_layout() && gpu.mig.is_some())
    };
    let layout = match source {
        LayoutSource::Config | LayoutSource::Wanted => {
            let list = able(gpus, desired_states, chosen, managed)?;
            return Some(format!("`gpushctl apply {list}` (administrator)"));
        }
        LayoutSource::Named(name) => name.clone(),
        LayoutSource::Entries(entries) => Layout::parse_list(entries).ok()?.to_string(),
        LayoutSource::PerGpu(_) => return alternatives_per_gpu(gpus, desired_states, Change::Layout, chosen),
    };
    let list = able(gpus, desired_states, chosen, takes_layout)?;
    Some(format!("`gpushctl mig apply --dry-run {} -g {list}`", quoted(&layout)))
}

/// Returns a command for the GPUs that a request with a layout for each GPU could name instead. gpushd does not know
/// which gpushctl command sent the request. So for a layout, the returned command only lists the instances of these
/// GPUs.
pub(super) fn alternatives_per_gpu(
    gpus: &[Gpu],
    desired_states: &[DesiredState],
    change: Change,
    chosen: &[usize],
) -> Option<String> {
    let list = able(gpus, desired_states, chosen, |gpu, desired_state| {
        let is_off = gpu.mig.as_ref().is_some_and(gpush_api::Mig::is_off);
        takes_layout(gpu, desired_state) && (change != Change::MigOn || is_off)
    })?;
    match change {
        Change::MigOn => Some(format!("`gpushctl mig on {list}` (administrator)")),
        // Do not suggest other GPUs: the change would destroy their instances.
        Change::MigOff => None,
        Change::DesiredState | Change::Layout => Some(format!("`gpushctl mig list {list}` shows their instances")),
    }
}

/// Returns a layout as an argument for a shell.
fn quoted(layout: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_+.,:@".contains(c);
    let plain = !layout.is_empty() && layout.chars().all(is_plain);
    if plain { layout.to_owned() } else { format!("'{}'", layout.replace('\'', r"'\''")) }
}

/// Returns the hint for a request to disable MIG mode on a GPU that gpushd never changes.
pub(super) fn for_mig_off(label: &str) -> String {
    format!("remove the GPU from {} of the config, {RELOAD}; then repeat the request", rule_name(label))
}

/// Returns the hint for a GPU whose rule has a mode other than `mig`. The proposed rule has the requested layout.
pub(super) fn for_other_mode(gpu: &Gpu, label: &str, layout: Option<&Layout>, others: Option<&str>) -> String {
    let other = others.map_or_else(String::new, |others| format!("choose other GPUs: {others}"));
    if gpu.mig.is_none() {
        return if other.is_empty() {
            no_mig_hint().to_owned()
        } else {
            format!("the GPU does not support MIG; {other}")
        };
    }
    let or = if other.is_empty() { String::new() } else { format!("{other}; or ") };
    let index = gpu.index;
    let entries = match layout.filter(|layout| !layout.is_none()).map(Layout::canonical) {
        Some(entries) => entries.join("\", \""),
        None => example_profile(gpu).unwrap_or("none").to_owned(),
    };
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
        "name a layout, as in `gpushctl mig apply --dry-run {entries} -g {index}`; or add to the config a rule with match = \
        [\"{index}\"], mode = \"mig\" and a layout, {RELOAD}"
    )
}

/// Returns the hint for a request that names no GPU, on a host where no rule claims a GPU for MIG.
pub(super) fn without_claim(gpus: &[Gpu], desired_states: &[DesiredState], source: &LayoutSource) -> String {
    let Some(list) = able(gpus, desired_states, &[], takes_layout) else {
        return "no GPU of this host can have MIG instances: `gpushctl gpu list` shows the modes of the GPUs, and \
        `gpushctl config show` shows the rules"
            .to_owned();
    };
    match source {
        LayoutSource::Config | LayoutSource::Wanted => {}
        LayoutSource::Named(_) | LayoutSource::Entries(_) | LayoutSource::PerGpu(_) => {
            let command = alternatives(gpus, desired_states, source, &[]).unwrap_or_default();
            return format!("name GPUs: {command}");
        }
    }
    let free = |desired_state: &DesiredState| desired_state.rule.is_none();
    let first = gpus
        .iter()
        .zip(desired_states)
        .find(|(gpu, desired_state)| gpu.mig.is_some() && free(desired_state))
        .map(|(gpu, _)| gpu);
    let Some((gpu, entries)) = first.and_then(|gpu| Some((gpu, example_profile(gpu)?))) else {
        return format!("name GPUs and a layout; `gpushctl mig profiles {list}` lists the profiles");
    };
    let index = gpu.index;
    format!(
        "name a GPU and a layout: `gpushctl mig apply --gpu {index} --layout {entries}` (administrator); or add a rule \
        to the config \
         ([[gpu]] match = [\"{index}\"] mode = \"mig\" layout = [\"{entries}\"]), {RELOAD}"
    )
}
