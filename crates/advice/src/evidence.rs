//! The confidence of advice from recorded use: it depends on the observed time and on missing signals.

use gpush_api::{LeaseKind, UsedTarget};
use serde::Serialize;

/// Shortest time in seconds for which the memory must be known. Below it, there is no advice.
pub const LEAST_KNOWN_S: u64 = 3600;
/// A full day in seconds. Use often differs by the time of the day.
const DAY_S: u64 = 24 * 3600;
/// Time in seconds between two samples while a lease is open.
const SAMPLE_S: u64 = 15;

/// A reason why an advice is less sure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Uncertainty {
    /// The use was observed for less than a day.
    NoFullDay,
    /// The memory is not known for a tenth of the time or more.
    MemoryGaps,
    /// The activity of the multiprocessors is not known, as on GPUs before Hopper.
    NoActivity,
    /// The figures of programs that share a GPU through MPS are estimates.
    Estimate,
}

/// How sure an advice is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Confidence {
    /// Several reasons make the advice less sure.
    Low,
    /// One reason makes the advice less sure.
    Medium,
    /// The use was observed for a day or more, without gaps, and with all signals.
    High,
}

impl Confidence {
    /// Returns the name in JSON and in messages.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Low => "low",
            Self::Medium => "medium",
            Self::High => "high",
        }
    }
}

/// The evidence for an advice.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Evidence {
    /// How sure the advice is.
    pub confidence: Confidence,
    /// Time for which the memory is known, in seconds.
    pub memory_known_s: u64,
    /// Number of samples, as far as gpushd took one every 15 s.
    pub sample_count: u64,
    /// Reasons why the advice is less sure.
    pub uncertainties: Vec<Uncertainty>,
}

impl Evidence {
    /// Returns the evidence about one target. `has_activity` says whether the activity of the multiprocessors is known.
    pub(crate) fn of(target: &UsedTarget, has_activity: bool) -> Self {
        let known_s = target.memory_known_s;
        let is_mps = target.share_kind == LeaseKind::Mps.name();
        let uncertainties: Vec<Uncertainty> = [
            (known_s < DAY_S, Uncertainty::NoFullDay),
            (known_s.saturating_mul(10) <= target.held_s.saturating_mul(9), Uncertainty::MemoryGaps),
            // The advice for an MPS lease does not cover compute.
            (!has_activity && !is_mps, Uncertainty::NoActivity),
            (is_mps, Uncertainty::Estimate),
        ]
        .into_iter()
        .filter_map(|(is, uncertainty)| is.then_some(uncertainty))
        .collect();
        let confidence = match uncertainties.len() {
            0 => Confidence::High,
            1 => Confidence::Medium,
            _ => Confidence::Low,
        };
        Self { confidence, memory_known_s: known_s, sample_count: known_s / SAMPLE_S, uncertainties }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::right_size::tests::target;

    fn evidence(target: &UsedTarget, has_activity: bool) -> (Confidence, Vec<Uncertainty>) {
        let found = Evidence::of(target, has_activity);
        (found.confidence, found.uncertainties)
    }

    #[test]
    fn confidence_falls_with_each_missing_signal() {
        let mut lease = target("whole", None, 5_000, 6_000);
        assert_eq!(evidence(&lease, true), (Confidence::High, vec![]));
        assert_eq!(evidence(&lease, false), (Confidence::Medium, vec![Uncertainty::NoActivity]));
        lease.memory_known_s = DAY_S - 1;
        lease.held_s = lease.memory_known_s;
        assert_eq!(evidence(&lease, true), (Confidence::Medium, vec![Uncertainty::NoFullDay]));
        lease.held_s *= 2;
        assert_eq!(evidence(&lease, true), (Confidence::Low, vec![Uncertainty::NoFullDay, Uncertainty::MemoryGaps]));
        assert_eq!(Evidence::of(&lease, true).sample_count, (DAY_S - 1) / 15);
    }

    #[test]
    fn figures_of_mps_leases_are_estimates() {
        let lease = target("mps", None, 5_000, 6_000);
        assert_eq!(evidence(&lease, false), (Confidence::Medium, vec![Uncertainty::Estimate]));
    }
}
