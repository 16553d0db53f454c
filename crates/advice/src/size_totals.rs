//! The advice for the leases of a user, or of a GPU, together.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::{
    evidence::Confidence,
    right_size::{NoAdvice, SizeAdvice, SizeVerdict},
};

/// The key by which advice is added up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Totaled {
    /// By the user of the lease.
    ByUser,
    /// By the UUID of the GPU.
    ByGpu,
}

/// A smaller share, and the number of leases for which it would have been enough.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct EnoughCount {
    /// The smaller share: a profile, or a memory limit in GiB.
    #[serde(rename = "enough_share")]
    pub share: String,
    /// Number of leases.
    pub lease_count: usize,
}

/// The advice for the leases of one user, or on one GPU, with one share.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SizeTotals {
    /// User, or UUID of the GPU.
    pub key: String,
    /// The share that the leases held.
    #[serde(rename = "held_share")]
    pub share: String,
    /// Number of leases. A lease with several targets counts once for each.
    pub lease_count: usize,
    /// Number of leases with too few samples.
    pub too_few_samples: usize,
    /// Smaller shares that would have been enough, with the most leases first.
    pub enough: Vec<EnoughCount>,
    /// Memory slices times hours that the leases held.
    pub held_slice_hours: f64,
    /// Memory slices times hours that the smaller shares would have freed.
    pub freed_slice_hours: f64,
    /// The lowest confidence of the advice that is added up; `None` without advice.
    pub confidence: Option<Confidence>,
}

/// Adds up advice, in the order of the keys and of the shares.
#[must_use]
pub fn size_totals(all: &[SizeAdvice], by: Totaled) -> Vec<SizeTotals> {
    let mut groups: BTreeMap<(&str, &str), Vec<&SizeAdvice>> = BTreeMap::new();
    for advice in all {
        let key = match by {
            Totaled::ByUser => advice.user.as_str(),
            Totaled::ByGpu => advice.gpu_uuid.as_str(),
        };
        groups.entry((key, &advice.share)).or_default().push(advice);
    }
    groups.into_iter().map(|((key, share), group)| totals(key, share, &group)).collect()
}

fn totals(key: &str, share: &str, group: &[&SizeAdvice]) -> SizeTotals {
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for advice in group {
        match &advice.verdict {
            SizeVerdict::SmallerDevice { profile, .. } => *counts.entry(profile.clone()).or_default() += 1,
            SizeVerdict::SmallerLimit { enough_mib, .. } => {
                *counts.entry(format!("{}G", enough_mib / 1024)).or_default() += 1;
            }
            SizeVerdict::None { .. } => {}
        }
    }
    let mut enough: Vec<EnoughCount> =
        counts.into_iter().map(|(share, lease_count)| EnoughCount { share, lease_count }).collect();
    enough.sort_by_key(|one| std::cmp::Reverse(one.lease_count));
    let is_unsampled = |advice: &&&SizeAdvice| advice.verdict == SizeVerdict::None { why: NoAdvice::TooFewSamples };
    let slice_hours = |slices: fn(&SizeAdvice) -> u32| {
        group.iter().map(|advice| f64::from(slices(advice)) * hours(advice.held_s)).sum::<f64>()
    };
    let advised = group.iter().filter(|advice| advice.is_smaller());
    SizeTotals {
        key: key.to_owned(),
        share: share.to_owned(),
        lease_count: group.len(),
        too_few_samples: group.iter().filter(is_unsampled).count(),
        enough,
        held_slice_hours: slice_hours(|advice| advice.held_slices),
        freed_slice_hours: slice_hours(SizeAdvice::freed_slices),
        confidence: advised.map(|advice| advice.evidence.confidence).min(),
    }
}

#[expect(clippy::cast_precision_loss, reason = "the seconds of a lease have fewer than 53 bits")]
fn hours(seconds: u64) -> f64 {
    seconds as f64 / 3600.0
}

#[cfg(test)]
mod tests {
    use gpush_api::{UsedLease, UsedTarget};
    use gpush_core::preset;
    use proptest::prelude::*;

    use super::*;
    use crate::right_size::{
        right_sizes,
        tests::{lease, target},
    };

    fn advised(leases: &[UsedLease]) -> Vec<SizeAdvice> {
        right_sizes(leases, &preset::gpus("dgx-a100").unwrap())
    }

    #[test]
    fn leases_of_a_user_are_added_up_by_share() {
        let small = || target("mig", Some("3g.40gb"), 8_100, 8_200);
        let short = UsedTarget { memory_known_s: 60, ..small() };
        let all = advised(&[
            lease(1, "anna", vec![small(), small()]),
            lease(2, "anna", vec![target("mig", Some("3g.40gb"), 15_000, 15_000)]),
            lease(3, "anna", vec![short]),
            lease(4, "anna", vec![target("whole", None, 70_000, 70_000)]),
            lease(5, "ben", vec![target("mig", Some("1g.10gb"), 100, 100)]),
        ]);
        let totals = size_totals(&all, Totaled::ByUser);
        let keys: Vec<_> = totals.iter().map(|one| (one.key.as_str(), one.share.as_str())).collect();
        assert_eq!(keys, [("anna", "3g.40gb"), ("anna", "whole"), ("ben", "1g.10gb")]);
        let three = &totals[0];
        assert_eq!((three.lease_count, three.too_few_samples), (4, 1));
        let enough: Vec<_> = three.enough.iter().map(|one| (one.share.as_str(), one.lease_count)).collect();
        assert_eq!(enough, [("1g.10gb", 2), ("1g.20gb", 1)]);
        assert!((three.held_slice_hours - 4.0 * 4.0 * 48.0).abs() < 1e-9);
        assert!((three.freed_slice_hours - (3.0 + 3.0 + 2.0) * 48.0).abs() < 1e-9);
        assert_eq!(three.confidence, Some(Confidence::High));
        assert_eq!((totals[2].enough.len(), totals[2].confidence), (0, None));
    }

    #[test]
    fn leases_of_a_gpu_have_its_uuid_as_key() {
        let all = advised(&[lease(1, "anna", vec![target("whole", None, 1, 1)])]);
        assert_eq!(size_totals(&all, Totaled::ByGpu)[0].key, all[0].gpu_uuid.as_str());
        assert_eq!(size_totals(&[], Totaled::ByGpu), []);
    }

    proptest! {
        /// Adding up loses no lease and no slice hour, whatever the key is.
        #[test]
        fn totals_keep_all_leases_and_slice_hours(
            leases in prop::collection::vec((0u64..4, 0usize..3, 0u64..90_000), 0..40),
        ) {
            let shares = [("whole", None), ("mig", Some("3g.40gb")), ("mps", None)];
            let leases: Vec<UsedLease> = leases.iter().enumerate().map(|(number, (user, share, memory))| {
                let (kind, profile) = shares[*share];
                lease(number as u64, &format!("u{user}"), vec![target(kind, profile, *memory, *memory)])
            }).collect();
            let all = advised(&leases);
            let freed: f64 = all.iter().map(|one| f64::from(one.freed_slices()) * hours(one.held_s)).sum();
            for by in [Totaled::ByUser, Totaled::ByGpu] {
                let totals = size_totals(&all, by);
                prop_assert_eq!(totals.iter().map(|one| one.lease_count).sum::<usize>(), all.len());
                let sum: f64 = totals.iter().map(|one| one.freed_slice_hours).sum();
                prop_assert!((sum - freed).abs() < 1e-6);
                prop_assert!(totals.iter().all(|one| one.freed_slice_hours <= one.held_slice_hours));
            }
        }
    }
}
