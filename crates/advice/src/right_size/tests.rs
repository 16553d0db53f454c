use gpush_core::preset;
use proptest::prelude::*;

use super::*;

fn gpu(preset: &str) -> Gpu {
    preset::gpus(preset).unwrap().remove(0)
}

/// Returns the use of a target over 2 days, with this memory in MiB.
pub(crate) fn target(kind: &str, profile: Option<&str>, p98: u64, peak: u64) -> UsedTarget {
    UsedTarget {
        gpu_uuid: gpu("dgx-a100").uuid,
        share_kind: kind.to_owned(),
        profile: profile.map(str::to_owned),
        compute_part: 1.0,
        share_memory_mib: 81_920,
        held_s: 2 * 86_400,
        busy_s: 86_400,
        memory_known_s: 2 * 86_400,
        memory_peak_mib: Some(peak),
        memory_p98_mib: Some(p98),
        activity_known_s: 2 * 86_400,
        sm_mean: Some(0.03),
    }
}

pub(crate) fn lease(number: u64, user: &str, targets: Vec<UsedTarget>) -> UsedLease {
    let begun_at = "2026-11-20T08:00:00Z".parse().unwrap();
    UsedLease {
        lease_id: LeaseId(number),
        user: user.to_owned(),
        begun_at,
        ended_at: None,
        waited_s: 0,
        used_targets: targets,
    }
}

fn advised(preset: &str, target: UsedTarget) -> SizeAdvice {
    right_sizes(&[lease(17, "anna", vec![target])], &[gpu(preset)]).remove(0)
}

fn profile(advice: &SizeAdvice) -> Option<&str> {
    match &advice.verdict {
        SizeVerdict::SmallerDevice { profile, .. } => Some(profile),
        SizeVerdict::SmallerLimit { .. } | SizeVerdict::None { .. } => None,
    }
}

fn why(advice: &SizeAdvice) -> Option<NoAdvice> {
    match &advice.verdict {
        SizeVerdict::None { why } => Some(*why),
        SizeVerdict::SmallerDevice { .. } | SizeVerdict::SmallerLimit { .. } => None,
    }
}

/// The example of the documentation: p98 + 15 % = 9.1 of 9.5 GiB, and 3 of 8 memory slices.
#[test]
fn smaller_profile_is_advised_for_a_3g_device() {
    let advice = advised("dgx-a100", target("mig", Some("3g.40gb"), 8_100, 8_200));
    let SizeVerdict::SmallerDevice { profile, enough_mib, freed_slices, memory_slices } = &advice.verdict else {
        panic!("{advice:?}");
    };
    assert_eq!((profile.as_str(), *freed_slices, *memory_slices), ("1g.10gb", 3, 8));
    assert!(*enough_mib >= 9_316, "{enough_mib}");
    assert_eq!(advice.observed_need.unwrap().needed_mib, 9_315);
    assert_eq!(advice.held_slices, 4);
}

#[test]
fn margin_over_the_peak_decides_for_short_peaks() {
    let advice = advised("dgx-a100", target("whole", None, 4_000, 18_000));
    let need = advice.observed_need.unwrap();
    assert_eq!((need.needed_mib, need.is_of_peak), (18_900, true));
    assert_eq!(profile(&advice), Some("1g.20gb"));
}

/// The mean activity over all the time hides that the lease fills the GPU while it works.
#[test]
fn busy_multiprocessors_keep_a_lease_on_its_share() {
    let mut busy = target("whole", None, 4_000, 4_100);
    (busy.busy_s, busy.sm_mean) = (busy.held_s / 10, Some(0.09));
    let advice = advised("dgx-h100", UsedTarget { gpu_uuid: gpu("dgx-h100").uuid, ..busy.clone() });
    assert_eq!(why(&advice), Some(NoAdvice::NeedsItsShare));
    assert!(advice.observed_need.unwrap().needed_compute.unwrap() > 0.99);
    // 30 % of the GPU with the margin are 3 of 7 slices.
    busy.sm_mean = Some(0.03);
    assert_eq!(profile(&advised("dgx-h100", busy)), Some("3g.40gb"));
}

#[test]
fn without_activity_the_profile_with_more_compute_is_advised() {
    let mut unknown = target("mig", Some("3g.40gb"), 12_000, 13_000);
    let known = advised("dgx-a100", unknown.clone());
    assert_eq!(profile(&known), Some("1g.20gb"));
    unknown.sm_mean = None;
    let advice = advised("dgx-a100", unknown);
    assert_eq!(profile(&advice), Some("2g.20gb"));
    assert_eq!(advice.evidence.uncertainties, [crate::evidence::Uncertainty::NoActivity]);
}

#[test]
fn activity_of_a_device_is_relative_to_the_device() {
    let mut half = target("mig", Some("3g.40gb"), 4_000, 4_000);
    // Half of 3 slices with the margin are 1.7 slices.
    (half.busy_s, half.sm_mean) = (half.held_s, Some(0.5));
    assert_eq!(profile(&advised("dgx-a100", half)), Some("2g.20gb"));
}

#[test]
fn too_few_samples_give_no_advice() {
    let mut short = target("whole", None, 1_000, 1_000);
    short.memory_known_s = LEAST_KNOWN_S - 1;
    let advice = advised("dgx-a100", short);
    assert_eq!(why(&advice), Some(NoAdvice::TooFewSamples));
    assert_eq!(advice.observed_need, None);
    let unknown = UsedTarget { memory_known_s: 0, memory_p98_mib: None, ..target("mps", None, 1, 1) };
    assert_eq!(why(&advised("dgx-a100", unknown)), Some(NoAdvice::TooFewSamples));
}

#[test]
fn shares_that_cannot_be_smaller_say_why() {
    let t4 = preset::gpus("mixed").unwrap().into_iter().find(|gpu| gpu.mig.is_none()).unwrap();
    let on = |gpu: &Gpu, target| right_sizes(&[lease(1, "a", vec![target])], std::slice::from_ref(gpu)).remove(0);
    let whole = UsedTarget { gpu_uuid: t4.uuid.clone(), ..target("whole", None, 1_000, 1_000) };
    assert_eq!(why(&on(&t4, whole)), Some(NoAdvice::NoMig));
    let gone = UsedTarget { gpu_uuid: "GPU-1".into(), ..target("whole", None, 1_000, 1_000) };
    let advice = on(&t4, gone);
    assert_eq!((why(&advice), advice.index), (Some(NoAdvice::UnknownShare), None));
    for (lease, reason) in [
        (target("timeslice", None, 1_000, 1_000), NoAdvice::NothingReserved),
        (target("whole", None, 0, 0), NoAdvice::NoWork),
        (UsedTarget { busy_s: 0, ..target("whole", None, 1_000, 1_000) }, NoAdvice::NoWork),
        (target("mig", None, 1_000, 1_000), NoAdvice::UnknownShare),
        (target("mig", Some("1c.3g.40gb"), 1_000, 1_000), NoAdvice::UnknownShare),
        (target("mig", Some("1g.10gb"), 1_000, 1_000), NoAdvice::NeedsItsShare),
        (target("fpga", None, 1_000, 1_000), NoAdvice::UnknownShare),
    ] {
        assert_eq!(why(&advised("dgx-a100", lease.clone())), Some(reason), "{lease:?}");
    }
}

#[test]
fn mps_lease_gets_a_smaller_memory_limit() {
    let mps = UsedTarget { share_memory_mib: 20_480, ..target("mps", None, 4_000, 4_200) };
    let advice = advised("dgx-a100", mps);
    assert_eq!(advice.verdict, SizeVerdict::SmallerLimit { enough_mib: 5_120, freed_mib: 15_360 });
    let full = UsedTarget { share_memory_mib: 4_200, ..target("mps", None, 4_000, 4_200) };
    assert_eq!(why(&advised("dgx-a100", full)), Some(NoAdvice::NeedsItsShare));
}

#[test]
fn advice_reads_as_json() {
    let json = serde_json::to_value(advised("dgx-a100", target("mig", Some("3g.40gb"), 8_100, 8_200))).unwrap();
    assert_eq!(
        (&json["verdict"], &json["profile"], &json["gpu"]),
        (&"smaller_device".into(), &"1g.10gb".into(), &0.into())
    );
    assert_eq!(json["evidence"]["confidence"], "high");
    let json = serde_json::to_value(advised("dgx-a100", target("whole", None, 0, 0))).unwrap();
    assert_eq!((&json["verdict"], &json["no_advice"]), (&"none".into(), &"no_work".into()));
}

proptest! {
    /// No advised size is below the observed need with its margins, and the GPU has each advised profile. Without enough
    /// samples, nothing is advised.
    #[test]
    fn advised_size_is_never_below_the_need(
        preset in 0usize..6, held in 0usize..12, p98 in 0u64..200_000, more in 0u64..50_000,
        known_s in 0u64..300_000, gap_s in 0u64..100_000, busy in 0u64..=100, sm in proptest::option::of(0.0f64..=1.0),
        share_mib in 1u64..200_000, kind in 0usize..4,
    ) {
        let gpu = gpu(["dgx-a100", "dgx-h100", "dgx-h200", "dgx-b200", "a30x4", "mixed"][preset]);
        let kind = LeaseKind::ALL[kind];
        let profiles: Vec<&GpuProfile> = gpu.mig.iter().flat_map(|mig| mig.profiles.iter()).collect();
        let named = (kind == LeaseKind::Mig && !profiles.is_empty()).then(|| profiles[held % profiles.len()].name.clone());
        let held_s = known_s + gap_s;
        let used = UsedTarget {
            gpu_uuid: gpu.uuid.clone(),
            share_kind: kind.name().to_owned(),
            profile: named,
            compute_part: 1.0,
            share_memory_mib: share_mib,
            held_s,
            busy_s: held_s * busy / 100,
            memory_known_s: known_s,
            memory_peak_mib: Some(p98 + more),
            memory_p98_mib: Some(p98),
            activity_known_s: if sm.is_some() { known_s } else { 0 },
            sm_mean: sm,
        };
        let advice = right_sizes(&[lease(1, "a", vec![used.clone()])], std::slice::from_ref(&gpu)).remove(0);
        let least = (p98 * 115).div_ceil(100).max(p98 + more);
        match &advice.verdict {
            SizeVerdict::SmallerDevice { profile, enough_mib, freed_slices, memory_slices } => {
                let found = profiles.iter().find(|one| one.name == *profile);
                prop_assert!(found.is_some_and(|found| found.memory_mib == *enough_mib), "{} is not on the GPU", profile);
                prop_assert!(*enough_mib >= least);
                prop_assert!((1..*memory_slices).contains(freed_slices));
                prop_assert!(known_s >= LEAST_KNOWN_S && more + p98 > 0);
                let whole = f64::from(whole_sm(&gpu));
                let part = f64::from(found.unwrap().sm) / whole;
                let held = if kind == LeaseKind::Whole { 1.0 } else {
                    f64::from(profiles.iter().find(|one| Some(&one.name) == used.profile.as_ref()).unwrap().sm) / whole
                };
                if let (Some(mean), Some(needed)) = (sm, advice.observed_need.unwrap().needed_compute) {
                    prop_assert!(needed >= (mean * held).min(1.0) - 1e-9 && part >= needed);
                }
            }
            SizeVerdict::SmallerLimit { enough_mib, freed_mib } => {
                prop_assert!(*enough_mib >= least && known_s >= LEAST_KNOWN_S);
                prop_assert_eq!(enough_mib + freed_mib, share_mib);
            }
            SizeVerdict::None { why } => {
                prop_assert_eq!(*why == NoAdvice::TooFewSamples, known_s < LEAST_KNOWN_S && kind != LeaseKind::Timeslice);
            }
        }
    }
}
