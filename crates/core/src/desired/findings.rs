//! Warnings about a config on a given host.

use std::{collections::BTreeSet, fmt};

use gpush_api::{ComputeMode, Driver, Gpu, Mode, TimeslicePolicy};

use super::{
    claims, driver_limits,
    lints::{LintFinding, lints, lints_on_gpus},
    quota_findings,
    rule_label::rule_label,
    unexpected_effects,
};
use crate::{
    config::{Config, PriceRule, QuotaRule, Rule, names_model},
    quote::Quoted,
    selector::Selector,
    sharing,
};

/// A warning about a config.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ConfigFinding {
    /// A mistake with a number.
    Lint(LintFinding),
    /// Something without effect, or a share that the GPUs cannot provide, as one sentence.
    Remark(String),
}

impl fmt::Display for ConfigFinding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Lint(lint) => lint.fmt(f),
            Self::Remark(text) => f.write_str(text),
        }
    }
}

/// A host for which a config is checked.
#[derive(Debug, Clone, Copy)]
pub struct KnownHost<'a> {
    /// The GPUs, with their profiles.
    pub gpus: &'a [Gpu],
    /// The driver, if it is known.
    pub driver: Option<&'a Driver>,
}

/// Returns warnings about a config: its lints and, if the host is known, selectors and rules that match nothing, and
/// shares that the GPUs or the driver cannot provide.
#[must_use]
pub fn findings(config: &Config, host: Option<KnownHost<'_>>) -> Vec<ConfigFinding> {
    let mut remarks = host.map(|host| remarks(config, host.gpus)).unwrap_or_default();
    if let Some(KnownHost { gpus, driver: Some(driver) }) = host {
        remarks.extend(driver_limits::find(config, gpus, driver));
    }
    let on_gpus = host.map(|host| lints_on_gpus(config, host.gpus)).unwrap_or_default();
    let lints = lints(config).into_iter().chain(on_gpus).map(ConfigFinding::Lint);
    remarks.into_iter().map(ConfigFinding::Remark).chain(lints).collect()
}

/// Returns what has no effect on the GPUs of a host, and what they cannot provide.
pub(super) fn remarks(config: &Config, gpus: &[Gpu]) -> Vec<String> {
    let claimed = claims(config, gpus);
    let mut findings = Vec::new();
    for (position, rule) in config.rules.iter().enumerate() {
        let label = rule_label(rule, position);
        let mut silent = 0;
        for selector in &rule.matches {
            if selector.is_ambiguous(gpus) {
                findings.push(format!("{label}: `{selector}` is the beginning of several UUIDs, so it claims no GPU"));
            } else if selector.matching(gpus).is_empty() {
                let meant = alternative(selector, gpus, "match");
                findings.push(format!("{label}: `{selector}` matches no GPU of this host{meant}"));
            } else {
                continue;
            }
            silent += 1;
        }
        findings.extend(mps_without_devices(config, rule).map(|finding| format!("{label}: {finding}")));
        findings.extend(compute_mode_conflict(rule).map(|finding| format!("{label}: {finding}")));
        if silent < rule.matches.len() && !claimed.contains(&Some(position)) {
            findings.push(format!("{label} claims no GPU: earlier rules claim all GPUs that it matches"));
        }
    }
    findings.extend(quota_selectors(config, gpus));
    findings.extend(prices_without_gpu(config, gpus));
    findings.extend(quota_findings::without_effect(config, gpus));
    findings.extend(sharing::unfit_settings(config, gpus));
    findings.extend(unexpected_effects::find(config, gpus));
    findings
}

/// Returns the end of a sentence about a selector that matches no GPU: what to write for `key`, if that is known.
fn alternative(selector: &Selector, gpus: &[Gpu], key: &str) -> String {
    selector.alternative(gpus).map_or_else(String::new, |meant| format!("; write {key} = {meant}"))
}

/// Returns sentences about selectors of quotas that match no GPU, or of which the host lacks an index.
fn quota_selectors(config: &Config, gpus: &[Gpu]) -> Vec<String> {
    let finding = |selector: &Selector| {
        if selector.matching(gpus).is_empty() {
            let meant = alternative(selector, gpus, "gpus");
            return Some(format!("`{selector}` matches no GPU of this host{meant}"));
        }
        unexpected_effects::absent_index(selector, gpus)
    };
    let of = |(position, quota): (usize, &QuotaRule)| {
        let found: Vec<String> = quota.gpus.iter().flatten().filter_map(finding).collect();
        found.into_iter().map(move |finding| format!("quota {}: {finding}", position + 1))
    };
    config.quotas.iter().enumerate().flat_map(of).collect()
}

/// Returns sentences about prices for models that the host does not have.
fn prices_without_gpu(config: &Config, gpus: &[Gpu]) -> Vec<String> {
    let models: BTreeSet<String> = gpus.iter().map(|gpu| format!("\"{}\"", gpu.name)).collect();
    let models = models.into_iter().collect::<Vec<_>>().join(" or ");
    let finding = |(position, price): (usize, &PriceRule)| {
        let model = price.model.as_ref()?;
        let is_known = gpus.iter().any(|gpu| names_model(model, &gpu.name));
        (!is_known).then(|| {
            format!(
                "price {}: no GPU of this host has the model {}; write model = {models}",
                position + 1,
                Quoted(model)
            )
        })
    };
    if gpus.is_empty() { Vec::new() } else { config.prices.iter().enumerate().filter_map(finding).collect() }
}

/// Returns a warning if a rule has settings of MPS, but its layout shares no MIG device.
fn mps_without_devices(config: &Config, rule: &Rule) -> Option<String> {
    let shares_none = rule.mode == Mode::Mig && config.layout_of(rule).is_none_or(|layout| layout.shared().is_none());
    let finding = || {
        "`mps` has no effect, because no entry of the layout ends in `:mps`; to share a MIG device through MPS, write \
         for example \"3g.40gb:mps\""
            .to_owned()
    };
    (shares_none && rule.mps.is_some()).then(finding)
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
