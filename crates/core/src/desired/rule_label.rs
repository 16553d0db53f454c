//! The name of a rule in warnings.

use crate::config::Rule;

/// Returns the label of a rule: ``rule `training` ``, or `rule 2` if the rule has no name.
pub(super) fn rule_label(rule: &Rule, position: usize) -> String {
    match &rule.name {
        Some(name) => format!("rule `{name}`"),
        None => rule.label(position),
    }
}
