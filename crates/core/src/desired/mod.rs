//! What each GPU of a host shall be, by the config and its overrides, and how far it is from that.
//!
//! ```text
//! Config ──claims──► which rule has which GPU ──┬──drift──► sentences: what differs
//!                        ▲                      └──plan───► one plan a GPU, or why not
//! Gpu::overridden ───────┘ its layout in place of the rule's, where a rule of mode mig claims the GPU
//! ```
//!
//! An override is data of the GPU like its instances: what it is worth is decided here alone.
//!
//! Both the agent and `gpushctl` offline (for a preset or a saved host) ask here, so that they
//! give the same answer.

use gpush_api::{ComputeMode, Gpu, GpuState, Mode, TimeslicePolicy};

use crate::{
    config::{Config, QuotaRule, Rule},
    layout::{DYNAMIC, Layout},
    sharing,
};

mod compare;
mod drift;
mod each;
mod grant;
mod mode;
mod plan;
mod standing;
mod turns;
mod way_out;

pub use compare::{changed_under, compare};
pub use drift::drift;
pub(crate) use drift::not_whole;
pub use grant::{created_after, plan_grant};
pub use mode::{is_switched, needs_reset, without_fabric_manager};
pub use plan::plan_host;
pub use standing::{Standing, standing};

/// What is wanted of one GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wish {
    /// How it is shared.
    pub mode: Mode,
    /// Name or position of the rule that claims it; `None` when none does.
    pub rule: Option<String>,
    /// Layout, in mode `mig`: the override's while one stands, else the rule's.
    pub layout: Option<Layout>,
    /// The rule's own layout, in mode `mig`.
    pub configured: Option<Layout>,
    /// Whether the rule's own layout is `dynamic`.
    pub dynamic_rule: bool,
    /// Whether leases create the instances: the rule's layout is `dynamic`, and no override replaces it.
    pub dynamic: bool,
    /// How holders take turns, in mode `timeslice`.
    pub timeslice: Option<TimeslicePolicy>,
}

impl Wish {
    /// The wish for a GPU without a rule.
    fn unmanaged() -> Self {
        Self {
            mode: Mode::Unmanaged,
            rule: None,
            layout: None,
            configured: None,
            dynamic_rule: false,
            dynamic: false,
            timeslice: None,
        }
    }

    /// Whether the rule has a layout: instances, or `dynamic`.
    pub(super) fn has_rule_layout(&self) -> bool {
        self.configured.is_some() || self.dynamic_rule
    }

    /// The layout as the API shows it.
    #[must_use]
    pub fn layout_view(&self) -> Option<Vec<String>> {
        if self.dynamic { Some(vec![DYNAMIC.to_owned()]) } else { self.layout.as_ref().map(Layout::canonical) }
    }

    /// Whether the config wants the GPU uncut.
    #[must_use]
    pub fn wants_whole(&self) -> bool {
        match self.mode {
            Mode::Exclusive | Mode::Mps | Mode::Timeslice => true,
            Mode::Mig | Mode::Unmanaged => false,
        }
    }
}

/// For each GPU, in order, the position of the rule that claims it.
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

/// For each GPU, in order, what the config and its override want of it.
#[must_use]
pub fn wishes(config: &Config, gpus: &[Gpu]) -> Vec<Wish> {
    claims(config, gpus).into_iter().zip(gpus).map(|(claimed, gpu)| wish(config, claimed, gpu)).collect()
}

/// What the rule at position `claimed` and the GPU's override want of it. An override has no effect on a GPU
/// that no rule gives to mode `mig`.
#[must_use]
pub fn wish(config: &Config, claimed: Option<usize>, gpu: &Gpu) -> Wish {
    let Some((position, rule)) = claimed.and_then(|position| Some((position, config.rules.get(position)?))) else {
        return Wish::unmanaged();
    };
    let configured = if rule.mode == Mode::Mig { config.layout_of(rule) } else { None };
    let layout = match &gpu.overridden {
        // An override that cannot be parsed any more must not be replaced by the rule's layout: nothing is done.
        Some(one) if rule.mode == Mode::Mig => Layout::parse_list(&one.layout).ok(),
        Some(_) | None => configured.clone(),
    };
    let timeslice = rule.timeslice.clone().filter(|_| rule.mode == Mode::Timeslice);
    let dynamic_rule = rule.is_dynamic();
    let dynamic = dynamic_rule && gpu.overridden.is_none();
    Wish { mode: rule.mode, rule: Some(rule.label(position)), layout, configured, dynamic_rule, dynamic, timeslice }
}

/// Writes the desired state, and how the GPU differs from it, into the reading of one GPU: the fields `mode`,
/// `rule`, `layout` and `drift`, and the desired part of `timeslice`, where the known level must already be.
/// `claimed` is the position of its rule, from [`claims`].
pub fn describe(config: &Config, claimed: Option<usize>, gpu: &mut Gpu) {
    let wish = wish(config, claimed, gpu);
    // What a lost GPU holds is not known.
    gpu.drift = if gpu.state == GpuState::Lost { Vec::new() } else { drift(&wish, gpu) };
    gpu.timeslice = turns::view(&wish, gpu);
    gpu.mode = wish.mode;
    gpu.layout = wish.layout_view();
    gpu.rule = wish.rule;
}

/// [`describe`]s all GPUs of a host.
pub fn describe_all(config: &Config, gpus: &mut [Gpu]) {
    for (claimed, gpu) in claims(config, gpus).into_iter().zip(gpus) {
        describe(config, claimed, gpu);
    }
}

/// What is worth knowing about a config on a given host though it is no error, one sentence each:
/// selectors that match nothing, rules that claim nothing, and shares that its GPUs can't give.
#[must_use]
pub fn findings(config: &Config, gpus: &[Gpu]) -> Vec<String> {
    let claimed = claims(config, gpus);
    let mut findings = Vec::new();
    for (position, rule) in config.rules.iter().enumerate() {
        let label = rule_label(rule, position);
        let mut silent = 0;
        for selector in &rule.matches {
            if selector.is_ambiguous(gpus) {
                findings.push(format!("{label}: `{selector}` is the beginning of several UUIDs and claims none"));
            } else if selector.matching(gpus).is_empty() {
                findings.push(format!("{label}: `{selector}` matches no GPU of this host"));
            } else {
                continue;
            }
            silent += 1;
        }
        findings.extend(at_odds(rule).map(|finding| format!("{label}: {finding}")));
        if silent < rule.matches.len() && !claimed.contains(&Some(position)) {
            findings.push(format!("{label} claims no GPU: earlier rules have all that it matches"));
        }
    }
    findings.extend(quota_selectors(config, gpus));
    findings.extend(sharing::unfit(config, gpus));
    findings
}

/// Selectors of quotas that match no GPU, one sentence each.
fn quota_selectors(config: &Config, gpus: &[Gpu]) -> Vec<String> {
    let of = |(position, quota): (usize, &QuotaRule)| {
        let selectors = quota.gpus.iter().flatten().filter(|selector| selector.matching(gpus).is_empty());
        selectors
            .map(move |selector| format!("quota {}: `{selector}` matches no GPU of this host", position + 1))
            .collect::<Vec<_>>()
    };
    config.quotas.iter().enumerate().flat_map(of).collect()
}

/// Says that a rule's compute mode admits no process. The config refuses replicas that exceed the compute mode.
fn at_odds(rule: &Rule) -> Option<String> {
    let TimeslicePolicy { replicas, compute_mode, .. } = rule.timeslice.as_ref()?;
    if *compute_mode != Some(ComputeMode::Prohibited) {
        return None;
    }
    let holders = if *replicas == 1 { "1 holder".to_owned() } else { format!("{replicas} holders") };
    Some(format!("compute mode prohibited admits no process, and the rule allows {holders} at a time"))
}

fn rule_label(rule: &Rule, position: usize) -> String {
    match &rule.name {
        Some(name) => format!("rule `{name}`"),
        None => rule.label(position),
    }
}

#[cfg(test)]
mod tests;
