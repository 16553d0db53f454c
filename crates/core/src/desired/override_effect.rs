//! The effect of a request on a GPU's override.
//!
//! | layout of the request | effect on a GPU whose rule has mode `mig` |
//! |---|---|
//! | an explicit layout | sets an override, or clears the override if the layout equals the rule's layout |
//! | the layout of the config; the request names the GPU | clears the override |
//! | the layout of the config; the request names no GPU | keeps the override, which is the desired layout |
//! | the desired layout | keeps the override |
//!
//! A request has no effect on the override of a GPU that no rule with mode `mig` claims: no rule
//! gives such a GPU a layout that an override could replace.

use gpush_api::{Gpu, GpuPlan, LayoutSource, Mode, PlanRequest};

use super::desired_states;
use crate::{config::Config, layout::Layout, selector::Selector};

/// The effect of a request on the override of one GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OverrideEffect {
    /// The override does not change, or the GPU has no override.
    Stays,
    /// The override is set, and replaces an earlier override, if any.
    Made {
        /// Rule that claims the GPU.
        rule: Option<String>,
        /// Layout in canonical text.
        layout: Vec<String>,
    },
    /// An existing override is cleared.
    Ended,
}

/// Returns the effect on the override for each plan of `request`.
#[must_use]
pub fn override_effects(
    config: &Config,
    gpus: &[Gpu],
    request: &PlanRequest,
    plans: &[GpuPlan],
) -> Vec<OverrideEffect> {
    let desired_states = desired_states(config, gpus);
    let of = |plan: &GpuPlan| {
        let Some(at) = gpus.iter().position(|gpu| gpu.uuid == plan.gpu_uuid) else { return OverrideEffect::Stays };
        let desired_state = &desired_states[at];
        if desired_state.mode != Mode::Mig || !desired_state.has_rule_layout() {
            return OverrideEffect::Stays;
        }
        let is_own =
            |layout: &[String]| desired_state.configured.as_ref().is_some_and(|own| equals_canonical(own, layout));
        match &request.layout {
            LayoutSource::Wanted => OverrideEffect::Stays,
            LayoutSource::Config if request.gpus.is_empty() => OverrideEffect::Stays,
            LayoutSource::Config => OverrideEffect::Ended,
            LayoutSource::PerGpu(each)
                if each.iter().any(|one| {
                    !one.mig && Selector::resolve(std::slice::from_ref(&one.gpu), gpus).is_ok_and(|is| is == [at])
                }) =>
            {
                OverrideEffect::Stays
            }
            LayoutSource::Named(_) | LayoutSource::Entries(_) | LayoutSource::PerGpu(_) if is_own(&plan.layout) => {
                OverrideEffect::Ended
            }
            LayoutSource::Named(_) | LayoutSource::Entries(_) | LayoutSource::PerGpu(_) => {
                OverrideEffect::Made { rule: desired_state.rule.clone(), layout: plan.layout.clone() }
            }
        }
    };
    plans.iter().map(of).collect()
}

/// Returns the layout that each GPU should have after an operation with these plans. This is the layout of an
/// override that the operation creates, the layout of the rule if the operation ends the override, and otherwise the
/// desired layout. With `once`, the request changes no override. `None` if no
/// layout is desired, or if this version cannot parse it.
#[must_use]
pub fn layouts_after(
    config: &Config,
    gpus: &[Gpu],
    request: &PlanRequest,
    plans: &[GpuPlan],
    once: bool,
) -> Vec<Option<Layout>> {
    let desired_states = desired_states(config, gpus);
    let after = |(plan, effect): (&GpuPlan, OverrideEffect)| {
        let at = gpus.iter().position(|gpu| gpu.uuid == plan.gpu_uuid)?;
        let desired_state = &desired_states[at];
        match effect {
            OverrideEffect::Made { layout, .. } if !once => Layout::parse_list(&layout).ok(),
            OverrideEffect::Ended if !once => desired_state.configured.clone(),
            OverrideEffect::Stays | OverrideEffect::Made { .. } | OverrideEffect::Ended => desired_state.layout.clone(),
        }
    };
    plans.iter().zip(override_effects(config, gpus, request, plans)).map(after).collect()
}

/// Returns whether both layouts are the same. The order of entries does not matter, and two equal
/// entries are the same as one entry with a count of 2.
fn equals_canonical(layout: &Layout, canonical: &[String]) -> bool {
    Layout::parse_list(canonical).is_ok_and(|other| layout.counts() == other.counts())
}
