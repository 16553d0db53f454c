use gpush_api::{GpuInstance, Placement};
use gpush_core::{geometry::Geometry, layout::Layout, plan::Target, preset};
use proptest::prelude::*;

use super::*;
use crate::request_replay::{
    ReplayedRequest,
    tests::{held, history, line},
};

/// Returns GPUs of mode `mig`, each with instances of these profiles.
fn host(preset: &str, layouts: &[&[&str]]) -> Vec<Gpu> {
    let gpus = preset::gpus(preset).unwrap();
    gpus.into_iter().zip(layouts).map(|(gpu, profiles)| cut(gpu, profiles)).collect()
}

fn cut(mut gpu: Gpu, profiles: &[&str]) -> Gpu {
    gpu.mode = Mode::Mig;
    gpu.layout = Some(profiles.iter().map(|&name| name.to_owned()).collect());
    let instance = |(id, name): (u32, &&str)| GpuInstance {
        id,
        profile_id: 0,
        profile: (*name).to_owned(),
        placement: Placement { start: 0, size: 1 },
        memory: None,
        compute: Vec::new(),
        processes: Vec::new(),
    };
    gpu.mig.as_mut().unwrap().instances = (0..).zip(profiles).map(instance).collect();
    gpu
}

fn layouts(advice: &LayoutAdvice) -> Vec<Vec<&str>> {
    advice.gpu_layouts.iter().map(|gpu| gpu.entries.iter().map(String::as_str).collect()).collect()
}

/// Nine users wanted a small device at the same time, and the host had seven.
#[test]
fn refused_requests_change_the_layout_of_one_gpu() {
    let gpus = host("dgx-a100", &[&["1g.10gb"; 7], &["7g.80gb"], &["7g.80gb"]]);
    let mut leases: Vec<_> = (0..7).map(|_| held("1g.10gb", 1, 40)).collect();
    leases.push(held("7g.80gb", 1, 40));
    let advice = layout_advice(&history(leases, vec![line("mig", "1g.10gb", 2)]), &gpus);
    assert_eq!((advice.met_today, advice.met_best, advice.regret(), advice.replayed()), (8, 10, 2, 10));
    assert_eq!(layouts(&advice).iter().filter(|entries| **entries == ["7g.80gb"]).count(), 1);
    let changed: Vec<_> = advice.gpu_layouts.iter().filter(|gpu| gpu.differs).collect();
    assert_eq!(changed.len(), 1);
    assert_eq!(
        (changed[0].entries[0].as_str(), &*changed[0].present_entries),
        ("1g.10gb*7", &["7g.80gb".to_owned()][..])
    );
    assert!(advice.is_proven && advice.left_out.is_empty());
    let small = &advice.demands[0];
    assert_eq!((small.share.as_str(), small.requests, small.met_today, small.met_best), ("1g.10gb", 9, 7, 9));
}

#[test]
fn layouts_that_meet_all_requests_are_kept() {
    let gpus = host("dgx-a100", &[&["3g.40gb", "3g.40gb"], &["2g.20gb"]]);
    let advice = layout_advice(&history(vec![held("3g.40gb", 0, 5), held("2g.20gb", 1, 2)], Vec::new()), &gpus);
    assert_eq!((advice.met_today, advice.met_best, advice.regret()), (2, 2, 0));
    assert!(advice.gpu_layouts.iter().all(|gpu| !gpu.differs && gpu.entries == gpu.present_entries));
    assert_eq!(layouts(&advice), [vec!["3g.40gb*2"], vec!["2g.20gb"]]);
}

#[test]
fn whole_gpu_is_cut_for_refused_devices() {
    let mut gpus = host("dgx-a100", &[&["3g.40gb"], &[]]);
    gpus[1].mode = Mode::Exclusive;
    let leases = vec![held("3g.40gb", 0, 40)];
    let advice = layout_advice(&history(leases, vec![line("mig", "3g.40gb", 2)]), &gpus);
    assert_eq!((advice.met_today, advice.met_best), (1, 3));
    // The first GPU has room for a second device, so the other can stay whole, but two refused requests need two devices.
    assert_eq!(advice.gpu_layouts[1].present_entries, [WHOLE]);
    assert_eq!(layouts(&advice)[1], ["3g.40gb*2"]);
    let both = vec![held("3g.40gb", 0, 40), held(WHOLE, 0, 40)];
    let mut whole = both;
    whole[1].used_targets[0].gpu_uuid = gpus[1].uuid.clone();
    let advice = layout_advice(&history(whole, Vec::new()), &gpus);
    assert_eq!((advice.met_today, advice.met_best, layouts(&advice)[1].clone()), (2, 2, vec![WHOLE]));
}

#[test]
fn gpus_without_a_fixed_layout_are_left_out() {
    let mut gpus = host("dgx-a100", &[&["3g.40gb"], &["3g.40gb"], &["3g.40gb"], &["3g.40gb"]]);
    gpus[0].layout = None;
    gpus[1].mode = Mode::Mps;
    gpus[3].layout = Some(vec!["3g.40gb:mps".to_owned()]);
    // The lease is on GPU 0.
    let advice = layout_advice(&history(vec![held("3g.40gb", 0, 5)], vec![line("mig", "3g.40gb", 1)]), &gpus);
    assert_eq!(advice.left_out, [GpuIndex(0), GpuIndex(1), GpuIndex(3)]);
    assert_eq!((advice.replayed(), advice.request_tally.other_grants, advice.request_tally.other_refusals), (0, 1, 1));
    let none = layout_advice(&history(Vec::new(), Vec::new()), &[]);
    assert_eq!((none.met_best, none.gpu_layouts.len()), (0, 0));
}

#[test]
fn room_beside_the_advised_layout_is_named() {
    let gpus = host("dgx-a100", &[&["7g.80gb"]]);
    let advice = layout_advice(&history(vec![held("4g.40gb", 0, 5)], Vec::new()), &gpus);
    let [only] = &advice.gpu_layouts[..] else { panic!("{advice:?}") };
    assert_eq!((&*only.entries, &*only.also_fits), (&["4g.40gb".to_owned()][..], &["3g.40gb".to_owned()][..]));
}

/// Every profile and the whole GPU are wanted on a large host, so the search is not complete.
#[test]
fn layouts_of_eight_gpus_meet_at_least_as_many_as_random_ones() {
    let seven: &[&str] = &["1g.10gb"; 7];
    let gpus = host("dgx-a100", &[seven; 8]);
    let shares = ["1g.10gb", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb", WHOLE];
    let leases =
        shares.iter().cycle().zip(0_i64..200).map(|(share, number)| held(share, number % 11, 12 + number % 17));
    let history = history(leases.collect(), Vec::new());
    let advice = layout_advice(&history, &gpus);
    assert!(!advice.is_proven && advice.met_best > advice.met_today, "{advice:?}");
    let requests = RecordedRequests::of(&history, |_| true, |_| true);
    let mut random = fastrand::Rng::with_seed(8);
    for _ in 0..200 {
        let layouts = gpus.iter().map(|gpu| random_layout(gpu, &mut random)).collect::<Vec<_>>();
        let names = layouts.iter().flatten().filter_map(|entry| entry.split('@').next());
        let met = met_one_by_one(&requests, &names.map(str::to_owned).collect::<Vec<_>>());
        assert!(met <= advice.met_best, "{met} of {layouts:?}");
    }
}

/// Returns a random layout of a GPU: random profiles at random free places, until several tries in a row have failed.
fn random_layout(gpu: &Gpu, random: &mut fastrand::Rng) -> Vec<String> {
    let mig = gpu.mig.as_ref().unwrap();
    let profiles: Vec<_> =
        mig.profiles.iter().filter(|profile| !profile.gfx && !profile.placements.is_empty()).collect();
    let (mut taken, mut compute, mut failed) = (Vec::<Placement>::new(), 0, 0);
    let mut placed: Vec<String> = Vec::new();
    while failed < 20 {
        let profile = profiles[random.usize(..profiles.len())];
        let place = profile.placements[random.usize(..profile.placements.len())];
        if taken.iter().any(|one| one.overlaps(place)) || compute + profile.slices > mig.compute_slices {
            failed += 1;
            continue;
        }
        taken.push(place);
        compute += profile.slices;
        placed.push(format!("{}@{}", profile.name, place.start));
    }
    placed
}

/// Returns whether the planner accepts the layout.
fn is_possible(gpu: &Gpu, entries: &[String]) -> bool {
    let mig = gpu.mig.as_ref().unwrap();
    let geometry = Geometry::new(&mig.profiles, mig.memory_slices, mig.compute_slices);
    Target::resolve(&geometry, &Layout::parse_list(entries).unwrap()).is_ok()
}

/// Returns how many requests these shares meet, one share after the other: an oracle for the replay.
fn met_one_by_one(requests: &RecordedRequests, shares: &[String]) -> usize {
    let mut all: Vec<(ReplayedRequest, &str)> = requests
        .by_share
        .iter()
        .flat_map(|(share, requests)| requests.iter().map(|request| (*request, share.as_str())))
        .collect();
    all.sort_unstable();
    let mut free_at: Vec<(&str, i64)> = shares.iter().map(|share| (share.as_str(), i64::MIN)).collect();
    let meets = |(request, share): (ReplayedRequest, &str), free_at: &mut Vec<(&str, i64)>| {
        let free = free_at.iter_mut().find(|(name, at)| *name == share && *at <= request.at_ms);
        free.map(|(_, at)| *at = request.at_ms + request.length_ms).is_some()
    };
    all.into_iter().filter(|one| meets(*one, &mut free_at)).count()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]
    /// The advised layouts meet at least as many requests as any of 200 random ones, and as today's.
    #[test]
    fn advised_layouts_meet_at_least_as_many_as_random_ones(
        preset in 0usize..4,
        gpu_count in 1usize..4,
        leases in prop::collection::vec((0usize..7, 0i64..40, 1i64..20), 1..60),
        refusals in prop::collection::vec((0usize..7, 1u64..20), 0..4),
        seed: u64,
    ) {
        let name = ["dgx-a100", "dgx-h100", "dgx-b200", "a30x4"][preset];
        let mut random = fastrand::Rng::with_seed(seed);
        let mut gpus: Vec<Gpu> = preset::gpus(name).unwrap().into_iter().take(gpu_count).collect();
        for gpu in &mut gpus {
            if random.u8(..4) == 0 {
                gpu.mode = Mode::Exclusive;
                continue;
            }
            let mut entries = random_layout(gpu, &mut random);
            while !is_possible(gpu, &entries) {
                entries = random_layout(gpu, &mut random);
            }
            let profiles: Vec<&str> = entries.iter().filter_map(|entry| entry.split('@').next()).collect();
            *gpu = cut(gpu.clone(), &profiles);
        }
        let profiles: Vec<String> = gpus[0].mig.as_ref().unwrap().profiles.iter()
            .filter(|profile| !profile.gfx).map(|profile| profile.name.clone()).collect();
        let share = |number: usize| match number { 0 => WHOLE, number => &profiles[number % profiles.len()] };
        let used: Vec<_> = leases
            .iter()
            .map(|(number, from, length)| {
                let mut lease = held(share(*number), *from, from + length);
                lease.used_targets[0].gpu_uuid = gpus[0].uuid.clone();
                lease
            })
            .collect();
        let lines = refusals.iter().map(|(number, count)| match share(*number) {
            WHOLE => line("whole", "", *count),
            profile => line("mig", profile, *count),
        });
        let history = history(used, lines.collect());
        let advice = layout_advice(&history, &gpus);
        prop_assert!(advice.is_proven && advice.met_best >= advice.met_today);

        let requests = RecordedRequests::of(&history, |_| true, |_| true);
        let expanded = |entries: &[String]| -> Vec<String> {
            entries.iter().flat_map(|entry| {
                let (name, count) = entry.split_once('*').unwrap_or((entry, "1"));
                vec![name.to_owned(); count.parse().unwrap()]
            }).collect()
        };
        let best: Vec<String> = advice.gpu_layouts.iter().flat_map(|gpu| expanded(&gpu.entries)).collect();
        prop_assert_eq!(met_one_by_one(&requests, &best), advice.met_best);
        let today: Vec<String> = advice.gpu_layouts.iter().flat_map(|gpu| expanded(&gpu.present_entries)).collect();
        prop_assert_eq!(met_one_by_one(&requests, &today), advice.met_today);
        for (gpu, layout) in gpus.iter().zip(&advice.gpu_layouts) {
            prop_assert!(layout.entries == [WHOLE] || is_possible(gpu, &layout.entries), "{:?}", layout);
        }
        let (mut tried, mut random_best) = (0, 0);
        while tried < 200 {
            let mut shares = Vec::new();
            let mut possible = true;
            for gpu in &gpus {
                let entries = if random.u8(..5) == 0 { vec![WHOLE.to_owned()] } else { random_layout(gpu, &mut random) };
                possible &= entries == [WHOLE] || is_possible(gpu, &entries);
                shares.extend(entries.iter().filter_map(|entry| entry.split('@').next()).map(str::to_owned));
            }
            if possible {
                tried += 1;
                random_best = random_best.max(met_one_by_one(&requests, &shares));
            }
        }
        prop_assert!(advice.met_best >= random_best, "{} is below {}", advice.met_best, random_best);
    }
}
