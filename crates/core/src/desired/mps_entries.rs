//! Refuses `:mps` entries that would have no effect. gpushd shares the MIG devices of the desired
//! layout, so a layout that does not become the desired layout shares nothing.

use std::collections::BTreeMap;

use gpush_api::{ApiError, Code, Gpu, GpuPlan, Mode, PlanRequest};

use super::{
    DesiredState, desired_states,
    gpu_label::label,
    override_effect::{OverrideEffect, override_effects},
    plan_hints::{RELOAD, rule_name},
};
use crate::{config::Config, layout::Layout};

/// Checks that each `:mps` entry of the request has an effect. With `once`, the request changes no
/// override.
///
/// # Errors
/// An entry has no effect. The error names its GPU and the reason.
pub fn check_mps_entries(
    config: &Config,
    gpus: &[Gpu],
    request: &PlanRequest,
    plans: &[GpuPlan],
    once: bool,
) -> Result<(), ApiError> {
    let desired_states = desired_states(config, gpus);
    for (plan, effect) in plans.iter().zip(override_effects(config, gpus, request, plans)) {
        let Some(at) = gpus.iter().position(|gpu| gpu.uuid == plan.gpu_uuid) else { continue };
        match effect {
            OverrideEffect::Made { .. } | OverrideEffect::Ended if !once => {}
            OverrideEffect::Stays | OverrideEffect::Made { .. } | OverrideEffect::Ended => {
                check_one(&gpus[at], &desired_states[at], plan)?;
            }
        }
    }
    Ok(())
}

/// Checks a GPU whose desired layout does not change.
fn check_one(gpu: &Gpu, desired_state: &DesiredState, plan: &GpuPlan) -> Result<(), ApiError> {
    let Ok(layout) = Layout::parse_list(&plan.layout) else { return Ok(()) };
    let effective = desired_state.layout.as_ref().map(shared_counts).unwrap_or_default();
    let without = shared_counts(&layout).into_iter().find(|(kind, count)| effective.get(kind).unwrap_or(&0) < count);
    let Some(((slices, profile), _)) = without else { return Ok(()) };
    let what = slices.map_or_else(|| profile.clone(), |slices| format!("{slices}c.{profile}"));
    let failure = format!("cannot share {what} of {} through MPS", label(gpu));
    let index = gpu.index;
    let (cause, hint) = match (&desired_state.rule, desired_state.mode) {
        (Some(_), Mode::Mig) => (
            "the layout is applied only once, and the desired layout does not share this MIG device".to_owned(),
            "leave out `--once`, so that the layout becomes the desired layout; or leave out `:mps`".to_owned(),
        ),
        (Some(rule), mode) => (
            format!("{} of the config sets the mode `{}`", rule_name(rule), mode.name()),
            "leave out `:mps`".to_owned(),
        ),
        (None, _) => (
            "no rule of the config claims the GPU".to_owned(),
            format!(
                "leave out `:mps`; or add to the config a rule with match = [\"{index}\"], mode = \"mig\" and a \
                 layout, {RELOAD}"
            ),
        ),
    };
    Err(ApiError::new(Code::Conflict, format!("{failure}: {cause}")).hint(hint))
}

/// Returns the number of shared MIG devices of each kind: compute slices and profile.
fn shared_counts(layout: &Layout) -> BTreeMap<(Option<u8>, String), u32> {
    let mut counts = BTreeMap::new();
    for entry in layout.entries.iter().filter(|entry| entry.share.is_some()) {
        *counts.entry((entry.compute_slices, entry.profile.to_ascii_lowercase())).or_default() +=
            u32::from(entry.count);
    }
    counts
}
