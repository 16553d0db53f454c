//! The keys of a rule that describe the users of its GPUs: `isolation` and `workload`.
//!
//! gpushd does nothing with these keys. The lints compare the mode and the limits of the rule with them.

use std::ops::RangeInclusive;

use serde::Serialize;
use toml::de::DeTable;

use super::{Rule, reader::Reader};

/// How well users must be isolated from each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Isolation {
    /// The hardware must separate memory, compute and faults.
    Hard,
    /// The users trust each other: they divide the memory themselves, and accept each other's faults.
    Shared,
}

impl Isolation {
    /// All values, strictest first.
    pub const ALL: [Self; 2] = [Self::Hard, Self::Shared];

    /// Returns the name in the config.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Hard => "hard",
            Self::Shared => "shared",
        }
    }
}

/// What the programs on a GPU do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Workload {
    /// Training, which usually fills the GPU.
    Training,
    /// Batch jobs such as preprocessing.
    Batch,
    /// Inference whose latency matters.
    Inference,
    /// Notebooks and other interactive work.
    Notebooks,
    /// Many small kernels, which leave most multiprocessors idle.
    Kernels,
}

impl Workload {
    /// All values, in the order of the documentation.
    pub const ALL: [Self; 5] = [Self::Training, Self::Batch, Self::Inference, Self::Notebooks, Self::Kernels];

    /// Returns the name in the config.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Training => "training",
            Self::Batch => "batch",
            Self::Inference => "inference",
            Self::Notebooks => "notebooks",
            Self::Kernels => "kernels",
        }
    }

    /// Returns how many leases usually share a GPU; `None` if no usual number is known.
    #[must_use]
    pub fn usual_leases(self) -> Option<RangeInclusive<u32>> {
        match self {
            Self::Training => Some(1..=1),
            Self::Notebooks => Some(2..=4),
            Self::Inference => Some(4..=8),
            Self::Batch | Self::Kernels => None,
        }
    }
}

/// Reads the key `isolation` of a rule.
pub(super) fn isolation(reader: &mut Reader<'_>, rule: &DeTable<'_>) -> Option<Isolation> {
    let values = Isolation::ALL.map(|isolation| (isolation.name(), isolation));
    reader.choice(rule, "isolation", "valid value of `isolation`", &values)
}

/// Reads the key `workload` of a rule.
pub(super) fn workload(reader: &mut Reader<'_>, rule: &DeTable<'_>) -> Option<Workload> {
    let values = Workload::ALL.map(|workload| (workload.name(), workload));
    reader.choice(rule, "workload", "valid value of `workload`", &values)
}

/// Returns the keys that the rule sets, with their values.
pub(super) fn written(rule: &Rule) -> impl Iterator<Item = (&'static str, &'static str)> {
    let isolation = rule.isolation.map(|isolation| ("isolation", isolation.name()));
    isolation.into_iter().chain(rule.workload.map(|workload| ("workload", workload.name())))
}

#[cfg(test)]
mod tests {
    use crate::config::Config;

    use super::*;

    fn parse(keys: &str) -> Result<Config, crate::config::ConfigErrors> {
        Config::parse(&format!("[[gpu]]\nmatch = \"0\"\nmode = \"exclusive\"\n{keys}\n"), "config.toml")
    }

    #[test]
    fn each_isolation_and_workload_is_read_and_written() {
        for isolation in Isolation::ALL {
            for workload in Workload::ALL {
                let keys = format!("isolation = \"{}\"\nworkload = \"{}\"", isolation.name(), workload.name());
                let config = parse(&keys).unwrap();
                assert_eq!((config.rules[0].isolation, config.rules[0].workload), (Some(isolation), Some(workload)));
                assert_eq!(Config::parse(&config.effective(), "effective").unwrap(), config);
            }
        }
        assert_eq!((parse("").unwrap().rules[0].isolation, parse("").unwrap().rules[0].workload), (None, None));
    }

    #[test]
    fn unknown_isolation_lists_the_values() {
        let errors = parse("isolation = \"strict\"").unwrap_err().to_string();
        assert!(errors.contains("hard") && errors.contains("shared"), "{errors}");
        let errors = parse("workload = \"inferense\"").unwrap_err().to_string();
        assert!(errors.contains("inference"), "{errors}");
    }
}
