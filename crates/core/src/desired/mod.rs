//! The desired state of each GPU of a host, from the config and its overrides. Also the drift: the
//! differences between a GPU and its desired state.
//!
//! ```text
//! Config ──claims──► the rule of each GPU     ──┬──drift──► sentences: differences
//!                        ▲                      └──plan───► one plan per GPU, or the obstacle
//! Gpu::overridden ───────┘ replaces the rule's layout if a rule of mode mig claims the GPU
//! ```
//!
//! An override is stored in the data of its GPU, like instances. Only this module determines the
//! effect of an override.
//!
//! gpushd uses this module for real hosts, and `gpushctl` uses it offline for presets and saved
//! hosts. So both programs give the same answers.

use gpush_api::{Gpu, GpuState, Mode, TimeslicePolicy};

use crate::{
    config::Config,
    layout::{DYNAMIC, Layout},
};

mod as_if_idle;
mod compare;
mod drift;
mod driver_limits;
mod findings;
mod gpu_label;
mod gpu_plan;
mod grant;
pub mod in_use;
mod lints;
mod mode;
mod mps_entries;
mod override_effect;
mod pending;
mod per_gpu;
mod plan;
mod plan_hints;
mod quota_findings;
mod rule_label;
mod timeslice_state;
mod unexpected_effects;
mod whole_gpu;

pub use as_if_idle::as_if_idle;
pub use compare::{changed_under, compare};
pub use drift::{compute_mode_drift, drift};
pub use driver_limits::serves_many_users;
pub use findings::{ConfigFinding, KnownHost, findings};
pub use grant::{created_after, plan_grant};
pub use lints::{LintFinding, lints};
pub use mode::{add_services, is_switched, needs_reset, without_fabric_manager};
pub use mps_entries::check_mps_entries;
pub use override_effect::{OverrideEffect, layouts_after, override_effects};
pub use pending::{deferred, pending, promised_timeslice};
pub use plan::plan_host;
pub use plan_hints::rule_name;
pub use unexpected_effects::impossible_rule_layouts;
pub(crate) use whole_gpu::whole_gpu_obstacles;

/// The desired state of one GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DesiredState {
    /// Sharing mode.
    pub mode: Mode,
    /// Name or position of the rule that claims the GPU; `None` if no rule claims it.
    pub rule: Option<String>,
    /// Layout in mode `mig`: the layout of the active override, or of the rule if there is no
    /// override.
    pub layout: Option<Layout>,
    /// The rule's layout in mode `mig`, regardless of an override.
    pub configured: Option<Layout>,
    /// Whether the rule's layout is `dynamic`.
    pub dynamic_rule: bool,
    /// Whether leases create the instances: the rule's layout is `dynamic`, and no override
    /// replaces that layout.
    pub dynamic: bool,
    /// The time-slicing policy, in mode `timeslice`.
    pub timeslice: Option<TimeslicePolicy>,
}

impl DesiredState {
    /// Returns the desired state of a GPU that no rule claims.
    fn without_rule() -> Self {
        Self {
            mode: Mode::NoRule,
            rule: None,
            layout: None,
            configured: None,
            dynamic_rule: false,
            dynamic: false,
            timeslice: None,
        }
    }

    /// Returns whether the rule has a layout: instances, or `dynamic`.
    pub(super) fn has_rule_layout(&self) -> bool {
        self.configured.is_some() || self.dynamic_rule
    }

    /// Returns the layout as the API shows it.
    #[must_use]
    pub fn layout_view(&self) -> Option<Vec<String>> {
        if self.dynamic { Some(vec![DYNAMIC.to_owned()]) } else { self.layout.as_ref().map(Layout::canonical) }
    }

    /// Returns whether the rule's mode needs the whole GPU, with MIG mode off.
    #[must_use]
    pub fn needs_whole_gpu(&self) -> bool {
        self.mode.needs_whole_gpu()
    }
}

/// Returns, for each GPU, the position of the rule that claims it.
#[must_use]
pub fn claims(config: &Config, gpus: &[Gpu]) -> Vec<Option<usize>> {
    let mut claimed = vec![None; gpus.len()];
    for (position, rule) in config.rules.iter().enumerate() {
        for at in rule.matches.iter().flat_map(|selector| selector.matching(gpus)) {
            claimed[at].get_or_insert(position);
        }
    }
    claimed
}

/// Returns the desired state of each GPU, in order, from the config and the overrides.
#[must_use]
pub fn desired_states(config: &Config, gpus: &[Gpu]) -> Vec<DesiredState> {
    claims(config, gpus).into_iter().zip(gpus).map(|(claimed, gpu)| desired_state(config, claimed, gpu)).collect()
}

/// Returns the desired state from the rule at position `claimed` and the GPU's override. An
/// override has an effect only if the rule has mode `mig`.
#[must_use]
pub fn desired_state(config: &Config, claimed: Option<usize>, gpu: &Gpu) -> DesiredState {
    let Some((position, rule)) = claimed.and_then(|position| Some((position, config.rules.get(position)?))) else {
        return DesiredState::without_rule();
    };
    let configured = if rule.mode == Mode::Mig { config.layout_of(rule) } else { None };
    let layout = match &gpu.overridden {
        // If this version cannot parse the override, use no layout: then the GPU is not changed.
        // The rule's layout must not replace the override.
        Some(one) if rule.mode == Mode::Mig => Layout::parse_list(&one.layout).ok(),
        Some(_) | None => configured.clone(),
    };
    let timeslice = rule.timeslice.clone().filter(|_| rule.mode == Mode::Timeslice);
    let dynamic_rule = rule.is_dynamic();
    let dynamic = dynamic_rule && gpu.overridden.is_none();
    DesiredState {
        mode: rule.mode,
        rule: Some(rule.label(position)),
        layout,
        configured,
        dynamic_rule,
        dynamic,
        timeslice,
    }
}

/// Adds the desired state and the drift to the reading of a GPU. Sets the fields `mode`, `rule`,
/// `access`, `layout`, `drift` and `pending`, and the desired part of `timeslice`. The caller must already have
/// set `leases`, and the level in `timeslice` if that level is known. `claimed` is the position of
/// the GPU's rule, from [`claims`]. Returns the desired state.
pub fn describe(config: &Config, claimed: Option<usize>, gpu: &mut Gpu) -> DesiredState {
    let desired_state = desired_state(config, claimed, gpu);
    // The instances of a lost GPU are unknown, so no drift is reported.
    gpu.drift = if gpu.state == GpuState::Lost { Vec::new() } else { drift(&desired_state, gpu) };
    gpu.timeslice = timeslice_state::view(&desired_state, gpu);
    gpu.pending = pending(&desired_state, gpu);
    gpu.mode = desired_state.mode;
    gpu.layout = desired_state.layout_view();
    gpu.rule.clone_from(&desired_state.rule);
    gpu.access = claimed.and_then(|position| config.rules.get(position)?.access.clone());
    desired_state
}

/// Calls [`describe`] for all GPUs of a host.
pub fn describe_all(config: &Config, gpus: &mut [Gpu]) {
    for (claimed, gpu) in claims(config, gpus).into_iter().zip(gpus) {
        describe(config, claimed, gpu);
    }
}

#[cfg(test)]
mod tests;
