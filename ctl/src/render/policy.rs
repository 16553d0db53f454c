//! The sharing policy of a rule as text.

use gpush_api::{MpsComputeMode, MpsPolicy, MpsUsers, RuleView, TimeslicePolicy};

use super::{
    Appearance,
    appearance::{QUIET, count, pad, paint},
    mps::memory,
};

/// Describes the limits of MPS clients, or the settings of time-slicing. Returns `None` if the rule
/// has neither.
pub(crate) fn describe(mps: Option<&MpsPolicy>, timeslice: Option<&TimeslicePolicy>) -> Option<String> {
    match (mps, timeslice) {
        (Some(policy), _) => Some(through_mps(policy)),
        (None, Some(policy)) => Some(by_timeslicing(policy)),
        (None, None) => None,
    }
}

fn through_mps(MpsPolicy { settings, max_clients, total_percentage, users, compute_mode }: &MpsPolicy) -> String {
    let memory =
        settings.memory_limit_mib.map_or_else(String::new, |limit| format!(" and {} of memory", memory(Some(limit))));
    let users = match users {
        MpsUsers::One => "",
        MpsUsers::Many => ", of any users",
    };
    let kept = match compute_mode {
        MpsComputeMode::ExclusiveProcess => "",
        MpsComputeMode::Keep => "; gpushd does not change the compute mode",
    };
    format!(
        "{} % of the GPU{memory} for each client, priority {}; {} at most{users}; the shares of all leases are at most \
         {total_percentage} % together{kept}",
        settings.percentage,
        settings.priority,
        count(*max_clients as usize, "client"),
    )
}

fn by_timeslicing(TimeslicePolicy { replicas, level, compute_mode }: &TimeslicePolicy) -> String {
    let mode = compute_mode.map_or_else(|| "left as it is".to_owned(), |mode| mode.to_string());
    format!("{}, time-slice level {level}, compute mode {mode}", count(*replicas as usize, "replica"))
}

/// Describes each rule that shares GPUs, in one paragraph.
pub(crate) fn of_rules(rules: &[RuleView], look: &Appearance) -> String {
    let shared: Vec<(String, String)> = rules
        .iter()
        .filter_map(|rule| Some((look.clean(&rule.name), describe(rule.mps.as_ref(), rule.timeslice.as_ref())?)))
        .collect();
    let width = shared.iter().map(|(name, _)| super::appearance::width(name)).max().unwrap_or_default();
    let mut out = String::new();
    for (name, words) in shared {
        let first = format!("{}  ", pad(&name, width));
        for line in look.wrap(&first, &words) {
            out += &format!("{}\n", paint(QUIET, &line));
        }
    }
    out
}
