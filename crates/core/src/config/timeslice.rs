//! Reads and formats the key `timeslice` of a rule.

use gpush_api::{ComputeMode, Mode, TimesliceLevel, TimeslicePolicy};
use toml::de::DeTable;

use super::{
    reader::{Reader, get},
    schema::RULE_TIMESLICE,
};

/// Values of the compute mode in a rule; `None` keeps the current mode. The list does not contain
/// EXCLUSIVE_THREAD, because current drivers refuse it.
const COMPUTE_MODES: [(&str, Option<ComputeMode>); 4] = [
    ("default", Some(ComputeMode::Default)),
    ("exclusive_process", Some(ComputeMode::ExclusiveProcess)),
    ("prohibited", Some(ComputeMode::Prohibited)),
    ("keep", None),
];

/// Returns the policy of a rule. Only rules with mode `timeslice` have a policy.
pub(super) fn read(reader: &mut Reader<'_>, rule: &DeTable<'_>, mode: Option<Mode>) -> Option<TimeslicePolicy> {
    if get(rule, "timeslice").is_none() {
        return (mode == Some(Mode::Timeslice)).then(TimeslicePolicy::default);
    }
    match mode {
        // If the mode is wrong, that error is already reported. Check the rest of the rule anyway.
        Some(Mode::Timeslice) | None => {}
        Some(other) => {
            let problem = format!("`timeslice` has no effect in mode `{}`", other.name());
            reader.report_at(rule, "timeslice", problem, "write mode = \"timeslice\", or leave `timeslice` out");
            return None;
        }
    }
    let table = reader.table(rule, RULE_TIMESLICE)?;
    reader.report_unknown_keys(table, RULE_TIMESLICE, &[]);
    let default = TimeslicePolicy::default();
    let levels = TimesliceLevel::ALL.map(|level| (level.name(), level));
    let policy = TimeslicePolicy {
        replicas: reader.number(table, "replicas", 1..=1000, default.replicas),
        level: reader.choice(table, "level", "time-slice level", &levels).unwrap_or(default.level),
        compute_mode: reader
            .choice(table, "compute_mode", "compute mode", &COMPUTE_MODES)
            .unwrap_or(default.compute_mode),
    };
    refuse_unusable_replicas(reader, table, &policy);
    Some(policy)
}

/// Reports an error if the policy has several replicas, but its compute mode allows only one
/// process on the GPU.
fn refuse_unusable_replicas(reader: &mut Reader<'_>, table: &DeTable<'_>, policy: &TimeslicePolicy) {
    let admits_one = matches!(policy.compute_mode, Some(ComputeMode::ExclusiveProcess | ComputeMode::ExclusiveThread));
    if policy.replicas > 1 && admits_one {
        let problem = format!(
            "`replicas = {}` cannot be used: compute mode `exclusive_process` admits only one process",
            policy.replicas
        );
        let hint = "write compute_mode = \"default\", or replicas = 1";
        reader.report_at(table, "replicas", problem, hint);
    }
}

/// Formats the policy on one line, as the value of the rule's key `timeslice`.
pub(super) fn written(policy: &TimeslicePolicy) -> String {
    let TimeslicePolicy { replicas, level, compute_mode } = policy;
    // A mode that is not in the list is formatted as `keep`. A file cannot contain such a mode.
    let known = COMPUTE_MODES.iter().find(|(_, mode)| mode == compute_mode);
    let compute_mode = known.map_or("keep", |(name, _)| *name);
    format!("{{ replicas = {replicas}, level = \"{level}\", compute_mode = \"{compute_mode}\" }}")
}
