//! Finds the lints of a config: mistakes in how its rules share GPUs.

use std::fmt;

use gpush_api::{Gpu, LeaseRequirement, Mode, MpsUsers, Percentage};
use serde::Serialize;

use super::{claims, rule_label::rule_label};
use crate::{
    config::{Config, Isolation, Rule},
    lint::Lint,
};

/// A mistake in a rule.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LintFinding {
    /// Kind of the mistake.
    pub lint: Lint,
    /// The mistake, as one clause that names the rule.
    pub message: String,
    /// What to write instead.
    pub hint: String,
}

impl fmt::Display for LintFinding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}; {}", self.lint, self.message, self.hint)
    }
}

/// Most leases of one GPU that any workload usually has.
const MOST_USUAL: u32 = 8;

/// Returns the mistakes in the rules of a config, in the order of the rules. The GPUs of the host do not matter.
#[must_use]
pub fn lints(config: &Config) -> Vec<LintFinding> {
    let mut found = Vec::new();
    for (position, rule) in config.rules.iter().enumerate() {
        let label = rule_label(rule, position);
        let mut add = |lint, message: String, hint: &str| {
            found.push(LintFinding { lint, message: format!("{label}: {message}"), hint: hint.to_owned() });
        };
        let sharing = RuleSharing::of(config, rule);
        timeslice_isolation(rule, &mut add);
        shared_faults(rule, &sharing, &mut add);
        soft_limits(rule, &sharing, &mut add);
        unbounded_memory(rule, &sharing, &mut add);
        unusual_ratio(rule, &sharing, &mut add);
        open_devices(rule, &mut add);
    }
    found
}

/// Returns the mistakes that depend on the GPUs of the host.
#[must_use]
pub(super) fn lints_on_gpus(config: &Config, gpus: &[Gpu]) -> Vec<LintFinding> {
    let claimed = claims(config, gpus);
    let mut found = Vec::new();
    for (position, rule) in config.rules.iter().enumerate().filter(|(_, rule)| rule.mode == Mode::Mps) {
        let sharing = RuleSharing::of(config, rule);
        let Some(limit) = rule.mps_policy().settings.memory_limit_mib else { continue };
        let wanted = limit.mib().saturating_mul(u64::from(sharing.leases));
        let own = gpus.iter().zip(&claimed).filter(|(_, by)| **by == Some(position)).map(|(gpu, _)| gpu);
        let Some(smallest) = own.min_by_key(|gpu| gpu.memory.total_mib) else { continue };
        if wanted > smallest.memory.total_mib {
            let message = format!(
                "{}: {} leases with {limit} each need {wanted}M, but GPU {} has {}M",
                rule_label(rule, position),
                sharing.leases,
                smallest.index,
                smallest.memory.total_mib
            );
            let most = smallest.memory.total_mib / u64::from(sharing.leases.max(1));
            let hint = format!("write `memory = \"{most}M\"` or less");
            found.push(LintFinding { lint: Lint::OvercommittedMemory, message, hint });
        }
    }
    found
}

/// How a rule shares its GPUs.
struct RuleSharing {
    /// Whether clients share a GPU or a MIG device through MPS.
    through_mps: bool,
    /// Most leases at a time on a GPU or on a MIG device that is shared through MPS.
    leases: u32,
}

impl RuleSharing {
    fn of(config: &Config, rule: &Rule) -> Self {
        let shares_devices = || config.layout_of(rule).is_some_and(|layout| layout.shared().is_some());
        let through_mps = rule.mode == Mode::Mps || rule.mode == Mode::Mig && shares_devices();
        let leases = if through_mps {
            let policy = rule.mps_policy();
            let fit =
                policy.total_percentage.saturating_mul(10) / u32::from(policy.settings.percentage.tenths()).max(1);
            fit.min(policy.max_clients).max(1)
        } else {
            rule.timeslice.as_ref().map_or(1, |policy| policy.replicas)
        };
        Self { through_mps, leases }
    }
}

fn is_timesliced(rule: &Rule) -> bool {
    rule.mode == Mode::Timeslice && rule.timeslice.as_ref().is_some_and(|policy| policy.replicas > 1)
}

fn timeslice_isolation(rule: &Rule, add: &mut impl FnMut(Lint, String, &str)) {
    if rule.isolation == Some(Isolation::Hard) && is_timesliced(rule) {
        let message = "`isolation = \"hard\"` contradicts mode `timeslice`, which isolates neither memory nor faults";
        add(Lint::TimesliceIsolation, message.to_owned(), "write mode = \"mig\", or mode = \"exclusive\"");
    }
}

fn shared_faults(rule: &Rule, sharing: &RuleSharing, add: &mut impl FnMut(Lint, String, &str)) {
    if !sharing.through_mps || rule.isolation == Some(Isolation::Shared) {
        return;
    }
    let many = rule.mps_policy().users == MpsUsers::Many;
    if rule.isolation == Some(Isolation::Hard) && (rule.mode == Mode::Mps || many) {
        let message =
            "`isolation = \"hard\"` contradicts MPS: a fatal fault of one client ends all clients of the daemon";
        let hint = "write mode = \"mig\" with entries that do not end in `:mps`";
        add(Lint::SharedFaults, message.to_owned(), hint);
    } else if many {
        let message = "with `users = \"many\"`, a fatal fault of one user ends the programs of the other users";
        add(Lint::SharedFaults, message.to_owned(), "if the users trust each other, write isolation = \"shared\"");
    }
}

fn soft_limits(rule: &Rule, sharing: &RuleSharing, add: &mut impl FnMut(Lint, String, &str)) {
    let settings = rule.mps_policy().settings;
    if !sharing.through_mps || (settings.percentage == Percentage::ALL && settings.memory_limit_mib.is_none()) {
        return;
    }
    let terms = rule.lease.unwrap_or_default();
    if rule.isolation == Some(Isolation::Hard) {
        let message = "`isolation = \"hard\"` needs hard limits, but a program can lift the limits of MPS";
        add(Lint::SoftLimits, message.to_owned(), "write mode = \"mig\", and choose profiles of the needed size");
    } else if terms.requirement_for(true) == LeaseRequirement::Optional {
        let message =
            "the limits of MPS do not apply to processes without a lease, which `lease = \"optional\"` permits";
        add(Lint::SoftLimits, message.to_owned(), "write lease = \"required\"");
    }
}

fn unbounded_memory(rule: &Rule, sharing: &RuleSharing, add: &mut impl FnMut(Lint, String, &str)) {
    if rule.isolation.is_some() || sharing.leases < 2 {
        // With hard isolation, the sharing itself is the mistake, and another lint reports it.
        return;
    }
    let leases = sharing.leases;
    if is_timesliced(rule) {
        let message = format!("each of {leases} lease holders can allocate all memory of the GPU");
        let hint = "write mode = \"mps\" with `memory`, or isolation = \"shared\" if the programs divide the memory";
        add(Lint::UnboundedMemory, message, hint);
    } else if sharing.through_mps && rule.mps_policy().settings.memory_limit_mib.is_none() {
        let message = format!("{leases} leases share the memory of the device without a limit");
        add(Lint::UnboundedMemory, message, "write mps = { memory = \"8G\" }, or isolation = \"shared\"");
    }
}

fn unusual_ratio(rule: &Rule, sharing: &RuleSharing, add: &mut impl FnMut(Lint, String, &str)) {
    let is_shared = sharing.through_mps || rule.mode == Mode::Timeslice;
    if !is_shared {
        return;
    }
    let leases = sharing.leases;
    let holders = if leases == 1 { "1 lease".to_owned() } else { format!("{leases} leases") };
    let key = if sharing.through_mps { "mps.percentage" } else { "timeslice.replicas" };
    match rule.workload.map(|workload| (workload, workload.usual_leases())) {
        Some((workload, Some(usual))) if !usual.contains(&leases) => {
            let (least, most) = (usual.start(), usual.end());
            let range = if least == most { least.to_string() } else { format!("{least} to {most}") };
            let message = format!("the rule admits {holders} of workload `{}`; {range} is usual", workload.name());
            add(Lint::UnusualRatio, message, &format!("change `{key}`, or leave `workload` out"));
        }
        // The number is usual, or the workload has no usual number.
        Some(_) => {}
        None if leases > MOST_USUAL => {
            let message = format!("the rule admits {holders} on one GPU or MIG device; at most {MOST_USUAL} are usual");
            add(Lint::UnusualRatio, message, &format!("change `{key}`, or write for example workload = \"kernels\""));
        }
        None => {}
    }
}

fn open_devices(rule: &Rule, add: &mut impl FnMut(Lint, String, &str)) {
    let is_isolating = matches!(rule.mode, Mode::Mig | Mode::Exclusive);
    let terms = rule.lease.unwrap_or_default();
    if rule.isolation == Some(Isolation::Hard)
        && is_isolating
        && terms.requirement_for(false) == LeaseRequirement::Optional
    {
        let message = "`isolation = \"hard\"`, but processes without a lease can use the devices of other users";
        let hint = "write lease = \"required\", and unleased = \"end\" under [processes]";
        add(Lint::OpenDevices, message.to_owned(), hint);
    }
}

#[cfg(test)]
mod tests;
