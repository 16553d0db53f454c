//! Tests of whole passes.

mod reservations;
mod world;

use gpush_api::{GpuIndex, TargetUuid};
use std::collections::BTreeSet;

use proptest::prelude::*;

use self::world::{MODEL, World};
use super::*;
use crate::lease::placement::{
    Host, PlacementPolicy, PlacementRequest, RequestedDevice, RequestedShare, place,
    scene::{mig, mps, wanted, whole},
};

/// gpushd's rules at the time 0.
const RULES: ScheduleRules =
    ScheduleRules { policy: PlacementPolicy::Pack, limits: ReservationLimits::DEFAULT, now: 0 };

/// What a test adds to a queue.
type Added = (Waiter, Option<PlacementRequest>, Needs);

fn requested(wanted: PlacementRequest) -> Added {
    (Waiter::Lease(String::new()), Some(wanted), Needs::new())
}

fn lease(share: RequestedShare, count: usize) -> Added {
    requested(wanted(share, count))
}

fn operation(gpu: u32, claimed: ClaimedTargets) -> Added {
    (Waiter::Operation(String::new()), None, Needs::from([(format!("GPU-{gpu}").into(), Need::Lane(claimed))]))
}

fn profile(name: &str) -> RequestedShare {
    RequestedShare::Mig(RequestedDevice::Profile(name.to_owned()))
}

fn queue(entries: Vec<Added>) -> Queue {
    let mut queue = Queue::default();
    for (waiter, wanted, needs) in entries {
        queue.push(waiter, wanted, needs);
    }
    queue
}

/// Returns the decisions of one pass, in short form.
fn decisions(queue: &Queue, host: &Host) -> Vec<String> {
    let decide = |(ticket, outcome): (Ticket, Outcome)| {
        let text = match outcome {
            Outcome::Grant(assignment) => format!("grant {:?}", assignment.gpus()),
            Outcome::Ready => "ready".to_owned(),
            Outcome::Waits { reserves: Some(assignment), .. } => format!("reserves {:?}", assignment.gpus()),
            Outcome::Waits { reserves: None, behind, .. } => format!("behind {behind:?}"),
            Outcome::Never(_) => "never".to_owned(),
        };
        format!("{}: {text}", ticket.0)
    };
    queue.schedule(host, RULES).outcomes.into_iter().map(decide).collect()
}

#[test]
fn later_small_request_is_granted_only_outside_the_reservation() {
    let host = Host { gpus: vec![mig(0, "a100-80", true, "3g.40gb@4 used, 1g.10gb@0 used")] };
    let queue = queue(vec![lease(profile("4g.40gb"), 1), lease(profile("1g.10gb"), 1)]);
    assert_eq!(decisions(&queue, &host), ["1: reserves {0}", "2: behind [Ticket(1)]"]);
    let host = Host { gpus: vec![mig(0, "a100-80", true, "4g.40gb@0 used, 1g.10gb@4 used")] };
    let queue = super::tests::queue(vec![lease(profile("4g.40gb"), 1), lease(profile("1g.10gb"), 1)]);
    assert_eq!(decisions(&queue, &host), ["1: reserves {0}", "2: grant {0}"]);
}

#[test]
fn two_gangs_for_the_same_gpus_are_served_in_order() {
    let host = Host { gpus: vec![whole(0, false), whole(1, true), whole(2, true)] };
    let gang = || lease(RequestedShare::Whole, 3);
    let queue = queue(vec![gang(), gang(), lease(RequestedShare::Whole, 1)]);
    let expected = ["1: reserves {0, 1, 2}", "2: behind [Ticket(1)]", "3: behind [Ticket(1)]"];
    assert_eq!(decisions(&queue, &host), expected);
}

#[test]
fn gang_that_is_not_first_on_all_gpus_reserves_nothing() {
    let host = Host { gpus: vec![whole(0, false), whole(1, true)] };
    let only =
        |gpu| requested(PlacementRequest { gpus: Some(BTreeSet::from([gpu])), ..wanted(RequestedShare::Whole, 1) });
    let queue = queue(vec![only(GpuIndex(0)), lease(RequestedShare::Whole, 2), only(GpuIndex(1))]);
    assert_eq!(decisions(&queue, &host), ["1: reserves {0}", "2: behind [Ticket(1)]", "3: grant {1}"]);
}

#[test]
fn operation_reserves_what_it_takes_and_waits_behind_a_lease() {
    let host =
        Host { gpus: vec![mig(0, "a100-80", false, "3g.40gb@0, 3g.40gb@4"), whole(1, true), mps(2, 1000, None)] };
    let device = ClaimedTargets::Targets(BTreeSet::from(["3g.40gb@0".into()]));
    let share = RequestedShare::Mps { percentage: "10".parse().ok(), memory_limit: None, priority: None };
    let queue = queue(vec![
        operation(0, device),
        lease(profile("3g.40gb"), 1),
        lease(profile("3g.40gb"), 1),
        operation(1, ClaimedTargets::Gpu),
        lease(RequestedShare::Whole, 1),
        lease(share, 1),
        operation(2, ClaimedTargets::Gpu),
    ]);
    let expected = [
        "1: ready",
        "2: grant {0}",
        "3: behind [Ticket(1)]",
        "4: ready",
        "5: behind [Ticket(4)]",
        "6: reserves {2}",
        "7: behind [Ticket(6)]",
    ];
    assert_eq!(decisions(&queue, &host), expected);
}

#[test]
fn newcomer_does_not_take_what_an_entry_reserves() {
    let host = Host { gpus: vec![mps(0, 600, Some(1000))] };
    let share =
        |percent: &str| RequestedShare::Mps { percentage: percent.parse().ok(), memory_limit: None, priority: None };
    let queue = queue(vec![lease(share("60"), 1)]);
    let left = queue.schedule(&host, RULES).host().clone();
    assert!(place(&left, &wanted(share("10"), 1), PlacementPolicy::Pack).is_err());
    assert!(place(&host, &wanted(share("10"), 1), PlacementPolicy::Pack).is_ok());
}

#[test]
fn impossible_request_is_reported_and_delays_no_other() {
    let host = Host { gpus: vec![whole(0, true)] };
    let queue = queue(vec![lease(RequestedShare::Whole, 5), lease(RequestedShare::Whole, 1)]);
    assert_eq!(decisions(&queue, &host), ["1: never", "2: grant {0}"]);
    assert_eq!((queue.position(Ticket(2)), queue.position(Ticket(9))), (Some(2), None));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]
    /// Makes random requests and releases. The number of instances that block the first entry never grows. Every
    /// request is granted when the other leases have ended.
    #[test]
    fn first_entry_is_never_delayed_by_later_ones(seed in any::<u64>()) {
        let mut rng = fastrand::Rng::with_seed(seed);
        let mut world = World::new(2);
        let mut queue = Queue::default();
        let mut first: Option<(Ticket, usize)> = None;
        for round in 0..60 {
            if round < 40 && rng.usize(..3) > 0 {
                let name = ["1g.10gb", "1g.10gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb"][rng.usize(..6)];
                let (waiter, wanted, needs) = lease(profile(name), 1 + rng.usize(..2));
                queue.push(waiter, wanted, needs);
            } else if !world.held.is_empty() {
                let n = rng.usize(..world.held.len());
                world.release(n);
            }
            for (n, (ticket, outcome)) in queue.schedule(&world.host, RULES).outcomes.into_iter().enumerate() {
                match outcome {
                    Outcome::Grant(assignment) => {
                        queue.remove(ticket);
                        world.grant(ticket, &assignment, None);
                    }
                    Outcome::Waits { reserves, behind, .. } if n == 0 => {
                        prop_assert!(behind.is_empty());
                        let now = world.blockers(&reserves.expect("the first entry reserves"));
                        if let Some((_, before)) = first.filter(|(known, _)| *known == ticket) {
                            prop_assert!(now <= before, "{now} instances in the way of {ticket:?}, {before} before");
                        }
                        prop_assert!(now > 0);
                        first = Some((ticket, now));
                    }
                    Outcome::Waits { .. } => {}
                    Outcome::Never(why) => prop_assert!(false, "{why:?}"),
                    Outcome::Ready => prop_assert!(false),
                }
            }
        }
        while queue.entries().next().is_some() {
            prop_assert!(!world.held.is_empty(), "{queue:?} waits for nothing");
            world.release(0);
            for (ticket, outcome) in queue.schedule(&world.host, RULES).outcomes {
                if let Outcome::Grant(assignment) = outcome {
                    queue.remove(ticket);
                    world.grant(ticket, &assignment, None);
                }
            }
        }
    }
}

/// Adds a random lease or operation to the queue.
fn push_random(rng: &mut fastrand::Rng, queue: &mut Queue) {
    let share = |percent| RequestedShare::Mps { percentage: Some(percent), memory_limit: None, priority: None };
    let gpu = rng.u32(..3);
    let (waiter, wanted, needs) = match rng.usize(..6) {
        0 => lease(RequestedShare::Whole, 1 + rng.usize(..2)),
        1 | 2 => lease(share(["10", "60"][rng.usize(..2)].parse().unwrap()), 1),
        3 => lease(profile(["1g.10gb", "3g.40gb"][rng.usize(..2)]), 1),
        4 => operation(gpu, ClaimedTargets::Gpu),
        _ => {
            let targets = ["GPU-0", "GPU-2", "3g.40gb@0", "3g.40gb@4"].map(TargetUuid::from);
            operation(gpu, ClaimedTargets::Targets(targets.into_iter().filter(|_| rng.bool()).collect()))
        }
    };
    queue.push(waiter, wanted, needs);
}

proptest! {
    /// A pass and the queue must give the same answer about an operation. Between two passes, only the queue answers.
    #[test]
    fn pass_and_queue_agree_which_operations_are_first(seed in any::<u64>()) {
        let mut rng = fastrand::Rng::with_seed(seed);
        let used = ["3g.40gb@0 used, 3g.40gb@4", "3g.40gb@0, 3g.40gb@4", "3g.40gb@0 used, 3g.40gb@4 used"];
        let host = Host {
            gpus: vec![
                mps(0, rng.u32(..11) * 100, Some(1000)),
                mig(1, MODEL, false, used[rng.usize(..3)]),
                whole(2, rng.bool()),
            ],
        };
        let mut queue = Queue::default();
        (0..rng.usize(1..9)).for_each(|_| push_random(&mut rng, &mut queue));
        let without_capacity: BTreeSet<Ticket> = queue.entries().map(|(ticket, _)| ticket).filter(|_| rng.u8(..6) == 0).collect();
        let schedule = queue.for_pass(|ticket| !without_capacity.contains(&ticket)).schedule(&host, RULES);
        for (ticket, outcome) in &schedule.outcomes {
            match outcome {
                Outcome::Grant(assignment) | Outcome::Waits { reserves: Some(assignment), .. } => {
                    queue.set_needs(*ticket, reserved_parts(&host, assignment));
                }
                Outcome::Ready | Outcome::Waits { .. } | Outcome::Never(_) => {}
            }
        }
        let operations: Vec<_> = queue.operations().map(|(ticket, ahead)| (ticket, ahead.is_none())).collect();
        let decided = |(ticket, outcome): &(Ticket, Outcome)| {
            matches!(queue.get(*ticket)?.waiter, Waiter::Operation(_)).then(|| (*ticket, *outcome == Outcome::Ready))
        };
        prop_assert_eq!(schedule.outcomes.iter().filter_map(decided).collect::<Vec<_>>(), operations);
        // An operation waits only for earlier entries.
        for (ticket, outcome) in &schedule.outcomes {
            if let Outcome::Waits { behind, .. } = outcome {
                prop_assert!(behind.iter().all(|earlier| earlier < ticket), "{:?} waits for {:?}", ticket, behind);
            }
        }
    }
}

/// Fault: an operation that was first on its GPU reserved nothing if an earlier lease waited for another target of the GPU.
/// So a later lease got the targets of the operation.
#[test]
fn operation_reserves_targets_on_a_gpu_with_a_waiting_lease() {
    let host = Host { gpus: vec![mig(0, MODEL, false, "3g.40gb@0 used, 3g.40gb@4")] };
    let only = |target: &str| {
        let wanted = wanted(profile("3g.40gb"), 1);
        requested(PlacementRequest { targets: Some(BTreeSet::from([target.into()])), ..wanted })
    };
    let device = ClaimedTargets::Targets(BTreeSet::from(["3g.40gb@4".into()]));
    let queue = queue(vec![only("3g.40gb@0"), operation(0, device), only("3g.40gb@4")]);
    assert_eq!(decisions(&queue, &host), ["1: reserves {0}", "2: ready", "3: behind [Ticket(1), Ticket(2)]"]);
}

#[test]
fn ten_thousand_equal_requests_reserve_two_gpus() {
    let gpus = (0..8).map(|index| mig(index, MODEL, true, "7g.80gb@0 used")).collect();
    let entries = (0..10_000).map(|_| lease(profile("1g.10gb"), 1)).collect();
    let outcomes = queue(entries).schedule(&Host { gpus }, RULES).outcomes;
    let reserving = outcomes.iter().filter(|(_, one)| matches!(one, Outcome::Waits { reserves: Some(_), .. })).count();
    assert_eq!((outcomes.len(), reserving), (10_000, 2));
}
