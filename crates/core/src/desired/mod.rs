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

use gpush_api::{ComputeMode, Gpu, GpuState, Mode, TimeslicePolicy};

use crate::{
    config::{Config, QuotaRule, Rule},
    layout::{DYNAMIC, Layout},
    sharing,
};

mod compare;
mod drift;
mod grant;
pub mod in_use;
mod mode;
mod mps_entries;
mod override_effect;
mod pending;
mod per_gpu;
mod plan;
mod plan_hints;
mod timeslice_state;

pub use compare::{changed_under, compare};
pub(crate) use drift::whole_gpu_obstacles;
pub use drift::{compute_mode_drift, drift};
pub use grant::{created_after, plan_grant};
pub use mode::{add_services, is_switched, needs_reset, without_fabric_manager};
pub use mps_entries::check_mps_entries;
pub use override_effect::{OverrideEffect, layouts_after, override_effects};
pub use pending::{deferred, pending, promised_timeslice};
pub use plan::plan_host;
pub use plan_hints::rule_name;

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
/// `layout`, `drift` and `pending`, and the desired part of `timeslice`. The caller must already have
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
    desired_state
}

/// Calls [`describe`] for all GPUs of a host.
pub fn describe_all(config: &Config, gpus: &mut [Gpu]) {
    for (claimed, gpu) in claims(config, gpus).into_iter().zip(gpus) {
        describe(config, claimed, gpu);
    }
}

/// Returns warnings about a config on a given host, one sentence each: selectors and rules that
/// match nothing, and shares that the GPUs cannot provide.
#[must_use]
pub fn findings(config: &Config, gpus: &[Gpu]) -> Vec<String> {
    let claimed = claims(config, gpus);
    let mut findings = Vec::new();
    for (position, rule) in config.rules.iter().enumerate() {
        let label = rule_label(rule, position);
        let mut silent = 0;
        for selector in &rule.matches {
            if selector.is_ambiguous(gpus) {
                findings.push(format!("{label}: `{selector}` is the beginning of several UUIDs, so it claims no GPU"));
            } else if selector.matching(gpus).is_empty() {
                findings.push(format!("{label}: `{selector}` matches no GPU of this host"));
            } else {
                continue;
            }
            silent += 1;
        }
        findings.extend(compute_mode_conflict(rule).map(|finding| format!("{label}: {finding}")));
        if silent < rule.matches.len() && !claimed.contains(&Some(position)) {
            findings.push(format!("{label} claims no GPU: earlier rules claim all GPUs that it matches"));
        }
    }
    findings.extend(quota_selectors(config, gpus));
    findings.extend(sharing::unfit_settings(config, gpus));
    findings
}

/// Returns sentences about selectors of quotas that match no GPU.
fn quota_selectors(config: &Config, gpus: &[Gpu]) -> Vec<String> {
    let of = |(position, quota): (usize, &QuotaRule)| {
        let selectors = quota.gpus.iter().flatten().filter(|selector| selector.matching(gpus).is_empty());
        selectors
            .map(move |selector| format!("quota {}: `{selector}` matches no GPU of this host", position + 1))
            .collect::<Vec<_>>()
    };
    config.quotas.iter().enumerate().flat_map(of).collect()
}

/// Returns a warning if the compute mode of a rule allows no process. The parser has already
/// refused a number of replicas that the compute mode does not allow.
fn compute_mode_conflict(rule: &Rule) -> Option<String> {
    let TimeslicePolicy { replicas, compute_mode, .. } = rule.timeslice.as_ref()?;
    if *compute_mode != Some(ComputeMode::Prohibited) {
        return None;
    }
    let holders = if *replicas == 1 { "1 holder".to_owned() } else { format!("{replicas} holders") };
    Some(format!("compute mode `prohibited` allows no process, but the rule allows {holders} at a time"))
}

fn rule_label(rule: &Rule, position: usize) -> String {
    match &rule.name {
        Some(name) => format!("rule `{name}`"),
        None => rule.label(position),
    }
}

#[cfg(test)]
mod tests;
