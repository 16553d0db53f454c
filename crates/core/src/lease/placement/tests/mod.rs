mod blockers;
mod ends;
mod messages;
mod offers;
mod oracle;

pub(crate) use oracle::legal;
mod room;
pub(crate) mod scene;

use std::collections::BTreeSet;

use gpush_api::{ApiError, GpuIndex, LeaseKind, Mode};

use super::*;
use scene::{gpu, mig, mps, timeslice, wanted, whole};

fn at_least(memory_gib: u64, slices: u8) -> RequestedShare {
    RequestedShare::Mig(RequestedDevice::AtLeast { memory_mib: memory_gib * 1024, slices })
}

fn profile(name: &str) -> RequestedShare {
    RequestedShare::Mig(RequestedDevice::Profile(name.to_owned()))
}

fn some_mps(percentage: &str) -> RequestedShare {
    RequestedShare::Mps { percentage: percentage.parse().ok(), memory_limit: None, priority: None }
}

fn text(assignment: &Assignment) -> String {
    let member = |member: &Member| match member {
        Member::Device { gpu, uuid } => format!("{gpu}:{uuid}"),
        Member::Create { gpu, profile_id, placement } => format!("{gpu}:new {profile_id}@{}", placement.start),
        Member::Mps { gpu, target, percentage } => format!("{gpu}:{target} {percentage}%"),
        Member::Timeslice { gpu } | Member::Whole { gpu } => gpu.to_string(),
    };
    let mut words: Vec<String> = assignment.members.iter().map(member).collect();
    words.extend(assignment.destroys.iter().map(|(gpu, id)| format!("destroys {gpu}:{id}")));
    words.join(", ")
}

fn placed(host: &Host, wanted: &PlacementRequest, policy: PlacementPolicy) -> String {
    place(host, wanted, policy).map_or_else(|error| format!("{error:?}"), |assignment| text(&assignment))
}

/// Returns the error for a request that cannot be placed.
fn refusal(host: &Host, wanted: &PlacementRequest) -> ApiError {
    place(host, wanted, PlacementPolicy::Pack).unwrap_err().error(wanted, context(host))
}

fn context(host: &Host) -> ErrorContext<'_> {
    ErrorContext { host, gpus: &[], allowed: None, duration: None, allowance: None }
}

#[test]
fn tightest_free_instance_is_taken_first() {
    let host = Host {
        gpus: vec![
            mig(0, "a100-80", false, "4g.40gb@0, 2g.20gb@4"),
            mig(1, "a100-80", false, "3g.40gb@0, 1g.10gb@4 used"),
        ],
    };
    assert_eq!(placed(&host, &wanted(at_least(10, 1), 1), PlacementPolicy::Pack), "0:2g.20gb@4");
    assert_eq!(placed(&host, &wanted(at_least(30, 1), 1), PlacementPolicy::Pack), "1:3g.40gb@0");
    assert_eq!(
        placed(&host, &wanted(profile("1g.10gb"), 1), PlacementPolicy::Pack),
        "Busy { obstacles: [(1, InUse)], free: Some(Larger { gpu: 0, profile: \"2g.20gb\" }) }"
    );
}

#[test]
fn dynamic_gpu_reuses_instances_then_saves_placements() {
    let empty = Host { gpus: vec![mig(0, "a100-80", true, "")] };
    // A 1g at start 6 keeps 4g@0, 2g@0 and 2g@2 possible. A 1g at start 0 would make 4g and 3g@0
    // impossible.
    assert_eq!(placed(&empty, &wanted(profile("1g.10gb"), 1), PlacementPolicy::Pack), "0:new 19@6");
    let kept = Host { gpus: vec![mig(0, "a100-80", true, "1g.10gb@0, 3g.40gb@4 used")] };
    assert_eq!(placed(&kept, &wanted(profile("1g.10gb"), 1), PlacementPolicy::Pack), "0:1g.10gb@0");
    // Only free instances that overlap the new one are destroyed, and never the instances of other
    // programs.
    assert_eq!(placed(&kept, &wanted(profile("3g.40gb"), 1), PlacementPolicy::Pack), "0:new 9@0, destroys 0:0");
    let foreign = Host { gpus: vec![mig(0, "a100-80", true, "1g.10gb@0 foreign, 3g.40gb@4 used")] };
    assert_eq!(
        placed(&foreign, &wanted(profile("3g.40gb"), 1), PlacementPolicy::Pack),
        "Busy { obstacles: [(0, InUse)], free: Some(Smaller { gpu: 0, profile: \"1g.10gb\" }) }"
    );
    assert_eq!(placed(&foreign, &wanted(profile("1g.10gb"), 1), PlacementPolicy::Pack), "0:1g.10gb@0");
}

#[test]
fn pack_fills_one_gpu_and_spread_uses_several() {
    let host = Host {
        gpus: vec![mig(0, "a100-80", true, ""), mig(1, "a100-80", true, "3g.40gb@4 used"), mig(2, "a100-80", true, "")],
    };
    let gpus = |policy| {
        place(&host, &wanted(profile("1g.10gb"), 2), policy)
            .unwrap()
            .members
            .iter()
            .map(Member::gpu)
            .collect::<Vec<_>>()
    };
    assert_eq!(gpus(PlacementPolicy::Pack), [1, 1]);
    assert_eq!(gpus(PlacementPolicy::Spread), [0, 2]);
}

#[test]
fn gang_is_placed_as_a_whole_or_not_at_all() {
    let host =
        Host { gpus: vec![mig(0, "a100-80", true, "4g.40gb@0 used"), mig(1, "a100-80", true, "7g.80gb@0 used")] };
    assert_eq!(
        placed(&host, &wanted(profile("2g.20gb"), 2), PlacementPolicy::Pack),
        "Busy { obstacles: [(0, Partly(1)), (1, InUse)], free: None }"
    );
    assert_eq!(placed(&host, &wanted(profile("3g.40gb"), 5), PlacementPolicy::Pack), "TooLarge { most: 4 }");
    let whole = Host { gpus: vec![whole(0, true), whole(1, false), whole(2, true)] };
    assert_eq!(placed(&whole, &wanted(RequestedShare::Whole, 2), PlacementPolicy::Spread), "0, 2");
    assert_eq!(placed(&whole, &wanted(RequestedShare::Whole, 4), PlacementPolicy::Pack), "TooLarge { most: 3 }");
}

#[test]
fn part_of_an_instance_is_granted_by_name_only() {
    let mut one = mig(0, "a100-80", false, "3g.40gb@0");
    let instance = &mut one.mig.as_mut().unwrap().instances[0];
    instance.devices = (0..3)
        .map(|n| Device {
            uuid: format!("part-{n}").into(),
            profile: "1c.3g.40gb".to_owned(),
            whole: false,
            free: n > 0,
            leased: n == 0,
            shared: false,
            end: None,
        })
        .collect();
    let host = Host { gpus: vec![one] };
    assert_eq!(placed(&host, &wanted(profile("1c.3g.40gb"), 2), PlacementPolicy::Pack), "0:part-1, 0:part-2");
    assert!(
        place(&host, &wanted(at_least(10, 1), 1), PlacementPolicy::Pack).is_err(),
        "it shares its memory with others"
    );
    let NoAssignment::UnknownProfile { nearest, .. } =
        place(&Host { gpus: vec![mig(0, "a100-80", true, "")] }, &wanted(profile("1g.12gb"), 1), PlacementPolicy::Pack)
            .unwrap_err()
    else {
        panic!()
    };
    assert_eq!(nearest[..2], ["1g.10gb", "1g.20gb"]);
}

/// Fault: a request was refused because `mps set` had lowered the limit of one target, although another one had room.
#[test]
fn target_whose_daemon_allows_less_is_chosen_last() {
    let mut host = Host { gpus: vec![mps(2, 0, Some(1000)), mps(3, 0, None)] };
    host.gpus[0].mps[0].ceiling = "25".parse().unwrap();
    for policy in [PlacementPolicy::Pack, PlacementPolicy::Spread] {
        assert_eq!(placed(&host, &wanted(some_mps("50"), 1), policy), "3:GPU-3 50%");
    }
    assert_eq!(
        placed(&host, &wanted(some_mps("25"), 1), PlacementPolicy::Pack),
        "2:GPU-2 25%",
        "the user's own daemon"
    );
}

#[test]
fn mps_target_of_another_user_or_without_room_is_not_used() {
    let host = Host { gpus: vec![mps(0, 900, None), mps(1, 500, Some(1000)), mps(2, 0, Some(2000)), mps(3, 0, None)] };
    assert_eq!(
        placed(&host, &wanted(some_mps("25"), 1), PlacementPolicy::Pack),
        "1:GPU-1 25%",
        "the user's own daemon first"
    );
    assert_eq!(placed(&host, &wanted(some_mps("10"), 1), PlacementPolicy::Spread), "3:GPU-3 10%");
    assert_eq!(placed(&host, &wanted(some_mps("60"), 1), PlacementPolicy::Pack), "3:GPU-3 60%");
    let one = Host { gpus: vec![host.gpus[2].clone()] };
    assert_eq!(
        placed(&one, &wanted(some_mps("10"), 1), PlacementPolicy::Pack),
        "Busy { obstacles: [(2, OtherUser(2000))], free: None }"
    );
    let limit = MemoryLimit::of_mib(1 << 20);
    let much = RequestedShare::Mps { percentage: None, memory_limit: limit, priority: None };
    assert_eq!(placed(&host, &wanted(much, 1), PlacementPolicy::Pack), "TooLarge { most: 0 }");
}

#[test]
fn timeslice_replicas_are_counted() {
    let host = Host { gpus: vec![timeslice(0, 4, 3), timeslice(1, 4, 0), timeslice(2, 4, 4)] };
    for policy in [PlacementPolicy::Pack, PlacementPolicy::Spread] {
        assert_eq!(placed(&host, &wanted(RequestedShare::Timeslice, 1), policy), "1", "replicas share without limits");
    }
}

#[test]
fn closed_gpu_and_unselected_gpu_are_not_used() {
    for (gpu, share) in [
        (whole(0, true), RequestedShare::Whole),
        (timeslice(0, 4, 0), RequestedShare::Timeslice),
        (mps(0, 0, None), some_mps("10")),
        (mig(0, "a100-80", false, "3g.40gb@4"), profile("3g.40gb")),
        (mig(0, "a100-80", true, ""), profile("3g.40gb")),
    ] {
        assert!(place(&Host { gpus: vec![gpu.clone()] }, &wanted(share.clone(), 1), PlacementPolicy::Pack).is_ok());
        for reason in [Closed::Cordoned, Closed::Claimed, Closed::NotReady] {
            let host = Host { gpus: vec![GpuOffer { closed: Some(reason), ..gpu.clone() }] };
            let error = place(&host, &wanted(share.clone(), 1), PlacementPolicy::Pack).unwrap_err();
            let obstacles = vec![(GpuIndex(0), Obstacle::Closed(reason))];
            assert!(matches!(&error, NoAssignment::Busy { obstacles: found, .. } if *found == obstacles), "{error:?}");
        }
    }
    let host = Host { gpus: vec![whole(0, true), mps(1, 0, None)] };
    let only =
        |index| PlacementRequest { gpus: Some(BTreeSet::from([GpuIndex(index)])), ..wanted(RequestedShare::Whole, 1) };
    assert_eq!(placed(&host, &only(0), PlacementPolicy::Pack), "0");
    let offered = vec![(LeaseKind::Mps, "mps=25".to_owned())];
    let error = place(&host, &only(1), PlacementPolicy::Pack).unwrap_err();
    assert_eq!(error, NoAssignment::NotOffered { kind: LeaseKind::Whole, offered, unoffered: Vec::new() });
    let message = refusal(&host, &only(1)).message;
    assert_eq!(message, "cannot grant a whole GPU: GPU 1 offers only leases of kind mps", "it names the selected GPU");
    let unmanaged = GpuOffer { index: GpuIndex(2), unoffered: Some(Unoffered::Unmanaged), ..GpuOffer::default() };
    let error = refusal(&Host { gpus: vec![unmanaged] }, &only(2));
    assert_eq!(error.message, "cannot grant a whole GPU: GPU 2 cannot be leased");
    assert_eq!(error.causes, ["GPU 2 has mode `unmanaged`: gpushd grants no leases on it"]);
}

#[test]
fn reservation_waits_for_few_and_is_kept_from_later_requests() {
    let mut host = Host { gpus: vec![mig(0, "a100-80", true, "1g.10gb@4 used, 1g.10gb@0 used, 1g.10gb@1 used")] };
    let large = wanted(profile("3g.40gb"), 1);
    assert!(place(&host, &large, PlacementPolicy::Pack).is_err());
    let (reservation, _) = host.reservation(&large, PlacementPolicy::Pack).unwrap();
    assert_eq!(text(&reservation), "0:new 9@4", "one instance is in the way there, two at start 0");
    host.reserve(&reservation, 1000);
    let small = wanted(profile("1g.10gb"), 1);
    let mut starts = Vec::new();
    while let Ok(assignment) = place(&host, &small, PlacementPolicy::Pack) {
        let Member::Create { placement, .. } = assignment.members[0] else { panic!() };
        starts.push(placement.start);
        host.gpus[0].mig.as_mut().unwrap().instances.push(scene::instance("a100-80", 19, placement, false));
    }
    starts.sort_unstable();
    assert_eq!(starts, [2, 3], "never from slice 4 on");
}

#[test]
fn same_inputs_give_the_same_assignment_in_any_order_of_gpus() {
    let mut gpus: Vec<GpuOffer> = (0..4).map(|index| mig(index, "h100-80-sxm", true, "1g.10gb@0 used")).collect();
    gpus.push(gpu(9));
    let request = wanted(at_least(20, 2), 3);
    let expected = place(&Host { gpus: gpus.clone() }, &request, PlacementPolicy::Pack).unwrap();
    for turn in 0..gpus.len() {
        gpus.rotate_left(turn);
        assert_eq!(place(&Host { gpus: gpus.clone() }, &request, PlacementPolicy::Pack).unwrap(), expected);
    }
}

/// Placement finds an assignment if one exists. No other assignment is better. The planner can
/// execute the assignment.
#[test]
fn placement_equals_the_brute_force_search() {
    let (mut placed, mut refused, mut created, mut destroyed) = (0, 0, 0, 0);
    for seed in 0..400_u64 {
        let mut rng = fastrand::Rng::with_seed(seed);
        let model = ["a100-80", "a30-24", "h100-80-sxm"][rng.usize(..3)];
        let gpus = 1 + rng.usize(..2);
        let random = |index| scene::random(&mut rng, u32::try_from(index).unwrap(), model);
        let host = Host { gpus: (0..gpus).map(random).collect() };
        let geometry = host.gpus[0].mig.as_ref().unwrap().geometry.clone();
        let named = geometry.profiles[rng.usize(..geometry.profiles.len())].profile.clone();
        let (share, most) = match rng.usize(..3) {
            0 => (at_least(nominal_mib(&named.name).unwrap() / 1024, named.slices), 2),
            _ => (profile(&named.name), 3),
        };
        let request = wanted(share, 1 + rng.usize(..most));
        for policy in [PlacementPolicy::Pack, PlacementPolicy::Spread] {
            let best = oracle::least_cost(&host, &request, policy);
            match place(&host, &request, policy) {
                Ok(assignment) => {
                    let what = format!("seed {seed}: {}", text(&assignment));
                    assert_eq!(oracle::cost(&host, &assignment, policy), best, "{what}");
                    oracle::executes(&host, &assignment);
                    placed += 1;
                    created += usize::from(assignment.needs_operation());
                    destroyed += usize::from(!assignment.destroys.is_empty());
                }
                Err(error) => {
                    assert_eq!(best, None, "seed {seed}: {error:?}");
                    refused += 1;
                }
            }
        }
    }
    println!("{placed} placed ({created} with a creation, {destroyed} with a destruction), {refused} refused");
    assert!(placed > 300 && refused > 100 && created > 150 && destroyed > 40);
}

#[test]
fn request_for_one_target_is_granted_there_or_not_at_all() {
    let host = Host { gpus: vec![mps(0, 0, None), mps(1, 300, None), mig(2, "a100-80", true, "1g.10gb@0, 1g.10gb@1")] };
    let share = RequestedShare::Mps { percentage: "80".parse().ok(), memory_limit: None, priority: None };
    let on = |target: &str, share: &RequestedShare| PlacementRequest {
        targets: Some([target.into()].into()),
        ..wanted(share.clone(), 1)
    };
    let placed = place(&host, &on("GPU-0", &share), PlacementPolicy::Pack).unwrap();
    assert!(matches!(&placed.members[0], Member::Mps { target, .. } if target == "GPU-0"), "{placed:?}");
    let full = place(&host, &on("GPU-1", &share), PlacementPolicy::Pack);
    assert!(matches!(full, Err(NoAssignment::Busy { .. })), "{full:?}");
    let device = RequestedShare::Mig(RequestedDevice::Profile("1g.10gb".to_owned()));
    let placed = place(&host, &on("1g.10gb@1", &device), PlacementPolicy::Pack).unwrap();
    assert!(matches!(&placed.members[0], Member::Device { uuid, .. } if uuid == "1g.10gb@1"), "{placed:?}");
    assert!(place(&host, &on("1g.10gb@5", &device), PlacementPolicy::Pack).is_err(), "no instance is created for it");
}

#[test]
fn mps_target_with_as_many_leases_as_clients_is_full() {
    let mut host = Host { gpus: vec![mps(0, 0, None)] };
    host.gpus[0].mps[0].most_leases = 2;
    let tenth = RequestedShare::Mps { percentage: "10".parse().ok(), memory_limit: None, priority: None };
    for _ in 0..2 {
        let placed = place(&host, &wanted(tenth.clone(), 1), PlacementPolicy::Pack).unwrap();
        host.occupy(&placed, 1000);
    }
    assert!(matches!(place(&host, &wanted(tenth, 1), PlacementPolicy::Pack), Err(NoAssignment::Busy { .. })));
}
