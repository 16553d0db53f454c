//! The keys `over_limit` and `over_limit_grace` of a rule: what gpushd does with leases that use more memory than their
//! share has.

use std::time::Duration;

use gpush_api::{Mode, OverLimitAction};
use toml::de::DeTable;

use super::{
    Config, Rule,
    reader::{Reader, get},
    toml_text::{span, text},
};

/// Longest grace period: a day.
const LONGEST: Duration = Duration::from_secs(86_400);

/// Values of the key `over_limit`.
const ACTIONS: [(&str, OverLimitAction); 2] = [("report", OverLimitAction::Report), ("end", OverLimitAction::End)];

/// What gpushd does with leases that use more memory than their share has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OverLimitTerms {
    /// The action.
    pub action: OverLimitAction,
    /// Time from the notice to the end of a lease.
    pub grace: Duration,
}

impl Default for OverLimitTerms {
    fn default() -> Self {
        Self { action: OverLimitAction::Report, grace: Duration::from_secs(600) }
    }
}

impl Config {
    /// Returns what applies to a lease on the GPUs of a rule; the default without a rule.
    #[must_use]
    pub fn over_limit_terms(&self, rule: Option<usize>) -> OverLimitTerms {
        rule.and_then(|position| self.rules.get(position)).map(|rule| rule.over_limit).unwrap_or_default()
    }

    /// Returns whether gpushd ends leases above their memory limit on any GPU, so that it needs samples.
    #[must_use]
    pub fn ends_leases_over_limit(&self) -> bool {
        self.rules.iter().any(|rule| rule.over_limit.action == OverLimitAction::End)
    }
}

/// Reads the keys of a rule. Reports them in a mode in which the hardware limits the memory, or gpushd grants no leases.
pub(super) fn read(reader: &mut Reader<'_>, rule: &DeTable<'_>, mode: Option<Mode>) -> OverLimitTerms {
    let why = match mode {
        Some(Mode::Exclusive) => Some("in mode `exclusive`: a lease has all memory of the GPU"),
        Some(Mode::Unmanaged) => Some("in mode `unmanaged`: gpushd grants no leases on the GPUs of this rule"),
        Some(Mode::Mig | Mode::Mps | Mode::Timeslice | Mode::NoRule) | None => None,
    };
    if let Some(why) = why {
        for key in ["over_limit", "over_limit_grace"].into_iter().filter(|key| get(rule, key).is_some()) {
            reader.report_at(rule, key, format!("`{key}` has no effect {why}"), format!("leave `{key}` out"));
        }
        return OverLimitTerms::default();
    }
    let default = OverLimitTerms::default();
    let action = reader.choice(rule, "over_limit", "valid value of `over_limit`", &ACTIONS);
    let grace = reader.duration(rule, "over_limit_grace", Duration::from_secs(1)..=LONGEST, default.grace);
    // A wrong value of `over_limit` is already reported.
    let is_wrong = get(rule, "over_limit").is_some() && action.is_none();
    if get(rule, "over_limit_grace").is_some() && action != Some(OverLimitAction::End) && !is_wrong {
        let problem = "`over_limit_grace` has no effect, because `over_limit` of the rule is not \"end\"";
        let hint = "write over_limit = \"end\", or leave `over_limit_grace` out";
        reader.report_at(rule, "over_limit_grace", problem, hint);
    }
    OverLimitTerms { action: action.unwrap_or_default(), grace }
}

/// Returns the keys of a rule with their values. Leaves out keys that have no effect.
pub(super) fn written(rule: &Rule) -> Vec<(&'static str, String)> {
    let OverLimitTerms { action, grace } = rule.over_limit;
    let has_shares = match rule.mode {
        Mode::Mps | Mode::Timeslice => true,
        Mode::Mig => rule.mps.is_some() || action != OverLimitAction::Report,
        Mode::Exclusive | Mode::Unmanaged | Mode::NoRule => false,
    };
    let grace = (action == OverLimitAction::End).then(|| ("over_limit_grace", span(grace)));
    has_shares.then(|| ("over_limit", text(action.name()))).into_iter().chain(grace).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(keys: &str) -> Result<Config, String> {
        let text = format!("[[gpu]]\nmatch = \"0\"\n{keys}\n");
        Config::parse(&text, "config.toml").map_err(|error| error.to_string())
    }

    #[test]
    fn rule_says_what_happens_above_the_limit() {
        let ends = parse("mode = \"timeslice\"\nover_limit = \"end\"\nover_limit_grace = \"90s\"").unwrap();
        let terms = OverLimitTerms { action: OverLimitAction::End, grace: Duration::from_secs(90) };
        assert_eq!((ends.over_limit_terms(Some(0)), ends.ends_leases_over_limit()), (terms, true));
        assert_eq!(ends.over_limit_terms(None), OverLimitTerms::default());
        assert_eq!(Config::parse(&ends.effective(), "effective").unwrap(), ends);
        let reports = parse("mode = \"mps\"").unwrap();
        assert!(reports.effective().contains("over_limit = \"report\"") && !reports.ends_leases_over_limit());
    }

    #[test]
    fn keys_without_effect_are_named() {
        for (keys, part) in [
            ("mode = \"exclusive\"\nover_limit = \"end\"", "a lease has all memory of the GPU"),
            ("mode = \"unmanaged\"\nover_limit = \"report\"", "gpushd grants no leases"),
            ("mode = \"mps\"\nover_limit = \"kill\"\nover_limit_grace = \"1m\"", "is not a valid value"),
            ("mode = \"mps\"\nover_limit_grace = \"1m\"", "is not \"end\""),
            ("mode = \"mps\"\nover_limit = \"end\"\nover_limit_grace = \"0s\"", "from \"1s\""),
        ] {
            let error = parse(keys).unwrap_err();
            assert!(error.contains(part) && error.matches("config.toml:").count() == 1, "{keys}: {error}");
        }
    }
}
