//! Which requests reserve, where, and who may use reserved capacity. Runs with random requests and ends.

use std::collections::BTreeMap;

use super::*;
use crate::lease::placement::{Assignment, GpuOffer, Member};

const MOST: u32 = ReservationLimits::DEFAULT.overtaken_per_gpu;

/// Returns a GPU on which gpushd ends the processes of expired leases, with the end of each of its instances.
fn with_ends(index: u32, instances: &str, ends: &[Option<u64>]) -> GpuOffer {
    let mut gpu = GpuOffer { ends_leases: true, ..mig(index, MODEL, true, instances) };
    for (instance, end) in gpu.mig.as_mut().unwrap().instances.iter_mut().zip(ends) {
        instance.devices[0].end = *end;
        instance.devices[0].uuid = format!("{index}/{}", instance.placement.start).into();
    }
    gpu
}

fn push(queue: &mut Queue, name: &str, lasts: Option<u64>) -> Ticket {
    let (waiter, wanted, needs) = lease(profile(name), 1);
    let ticket = queue.push(waiter, wanted, needs);
    queue.set_lasts(ticket, lasts);
    ticket
}

/// Returns the GPUs that a waiting entry reserves.
fn reserved(queue: &Queue, host: &Host, ticket: Ticket) -> Option<Vec<u32>> {
    let schedule = queue.schedule(host, RULES);
    let reservation = schedule.reservation(ticket)?;
    Some(reservation.assignment.gpus().into_iter().map(|gpu| gpu.0).collect())
}

#[test]
fn reservation_prefers_the_earliest_known_end() {
    let host = Host {
        gpus: vec![
            with_ends(0, "1g.10gb@0 used", &[None]),
            with_ends(1, "7g.80gb@0 used", &[Some(900)]),
            with_ends(2, "1g.10gb@0 used, 1g.10gb@4 used", &[Some(300), Some(500)]),
        ],
    };
    let mut queue = Queue::default();
    let first = push(&mut queue, "7g.80gb", None);
    let schedule = queue.schedule(&host, RULES);
    let reservation = schedule.reservation(first).unwrap();
    assert_eq!((reservation.assignment.gpus(), reservation.free_at), ([GpuIndex(2)].into(), Some(500)));
    let second = push(&mut queue, "7g.80gb", None);
    assert_eq!(reserved(&queue, &host, second), Some(vec![1]), "GPU 0 has a lease without an end");
}

#[test]
fn third_request_reserves_only_after_it_was_overtaken() {
    let host = Host { gpus: (0..4).map(|index| with_ends(index, "1g.10gb@0 used", &[None])).collect() };
    let mut queue = Queue::default();
    let tickets = [(); 3].map(|()| push(&mut queue, "7g.80gb", None));
    let third = tickets[2];
    assert_eq!(reserved(&queue, &host, tickets[1]), Some(vec![1]));
    assert_eq!(reserved(&queue, &host, third), None);
    let newcomer = push(&mut queue, "1g.10gb", None);
    let grants: Vec<_> =
        queue.schedule(&host, RULES).outcomes.into_iter().filter(|(one, _)| *one == newcomer).collect();
    assert!(matches!(&grants[..], [(_, Outcome::Grant(one))] if *one.gpus().first().unwrap() > GpuIndex(1)));
    for _ in 0..4 * MOST {
        assert_eq!(reserved(&queue, &host, third), None);
        queue.note_grant(Some(newcomer), &host, &[GpuIndex(3)].into());
    }
    assert_eq!(reserved(&queue, &host, third), Some(vec![2]));
    assert_eq!(queue.get(newcomer).unwrap().overtaken, 0, "a later entry was not overtaken");
}

/// Requests for different GPUs do not use up each other's reservations.
#[test]
fn requests_for_other_gpus_do_not_count() {
    let host = Host { gpus: (0..3).map(|index| with_ends(index, "1g.10gb@0 used", &[None])).collect() };
    let mut queue = Queue::default();
    let only = |gpu: u32| PlacementRequest { gpus: Some([GpuIndex(gpu)].into()), ..wanted(profile("7g.80gb"), 1) };
    let tickets = [0, 1, 2].map(|gpu| {
        let (waiter, wanted, needs) = requested(only(gpu));
        queue.push(waiter, wanted, needs)
    });
    assert_eq!(tickets.map(|ticket| reserved(&queue, &host, ticket)), [Some(vec![0]), Some(vec![1]), Some(vec![2])]);
}

#[test]
fn short_lease_passes_over_a_reservation_and_a_long_one_does_not() {
    let host = Host { gpus: vec![with_ends(0, "1g.10gb@0 used, 2g.20gb@4 used", &[Some(600), Some(900)])] };
    let decide = |lasts: Option<u64>, host: &Host| {
        let mut queue = Queue::default();
        push(&mut queue, "7g.80gb", None);
        let later = push(&mut queue, "1g.10gb", lasts);
        let schedule = queue.schedule(host, RULES);
        let new = schedule.place(&wanted(profile("1g.10gb"), 1), &schedule.passed_over(lasts)).is_ok();
        let waits = |(ticket, outcome): &(Ticket, Outcome)| *ticket == later && matches!(outcome, Outcome::Grant(_));
        let queued = schedule.outcomes.iter().any(waits);
        assert!(!new || queued, "a newcomer comes after the waiting request");
        queued
    };
    assert!(decide(Some(900), &host), "it ends with the last lease in the way");
    assert!(!decide(Some(901), &host) && !decide(None, &host));
    let mut report = host.clone();
    report.gpus[0].ends_leases = false;
    assert!(!decide(Some(10), &report), "gpushd does not end its processes");
    let unknown = Host { gpus: vec![with_ends(0, "1g.10gb@0 used, 2g.20gb@4 used", &[Some(600), None])] };
    assert!(!decide(Some(10), &unknown), "the reserved place can be free at any time");
}

/// Fault of an earlier trial: two requests waited for leases without an end on GPUs 0 and 1, and only the first two
/// requests reserved. So small leases on the other GPUs overtook the third request for ever.
#[test]
fn request_behind_two_endless_waits_is_granted() {
    let mut world = World::new(3);
    let mut queue = Queue::default();
    for gpu in [0, 1] {
        let member =
            Member::Create { gpu: GpuIndex(gpu), profile_id: 0, placement: gpush_api::Placement { start: 0, size: 8 } };
        world.grant(Ticket(0), &Assignment { members: vec![member], destroys: Vec::new() }, None);
        let only = PlacementRequest { gpus: Some([GpuIndex(gpu)].into()), ..wanted(profile("7g.80gb"), 1) };
        let (waiter, wanted, needs) = requested(only);
        queue.push(waiter, wanted, needs);
    }
    let mut small = std::collections::VecDeque::new();
    let (mut large, mut steps) = (None, 0);
    while large.is_none_or(|large| queue.get(large).is_some()) {
        // Small leases come all the time. Two of them always run, and the older one ends next.
        push(&mut queue, "1g.10gb", None);
        for (ticket, outcome) in queue.schedule(&world.host, RULES).outcomes {
            if let Outcome::Grant(assignment) = outcome {
                queue.note_grant(Some(ticket), &world.host, &assignment.gpus());
                queue.remove(ticket);
                world.grant(ticket, &assignment, None);
                small.push_back(ticket);
                break;
            }
        }
        let large = *large.get_or_insert_with(|| push(&mut queue, "7g.80gb", None));
        if small.len() > 1 || queue.get(large).is_some_and(|entry| entry.overtaken >= 3 * MOST) {
            let ends = small.pop_front();
            let at = world.held.iter().position(|(ticket, _)| Some(*ticket) == ends);
            if let Some(at) = at {
                world.release(at);
            }
        }
        steps += 1;
        assert!(steps < 10 * MOST, "the large request waits for ever");
    }
    assert!(steps > 2 * MOST, "{steps}: it reserves only after it was overtaken");
}

/// A random run, in which each lease ends at the latest at its known end.
struct Run {
    rng: fastrand::Rng,
    world: World,
    queue: Queue,
    now: u64,
    /// Names and times of the requests.
    requests: BTreeMap<Ticket, (&'static str, Option<u64>)>,
    /// The time at which each running lease really ends.
    ends: BTreeMap<Ticket, u64>,
    granted: Vec<Ticket>,
    /// What the first entry waited for in the last pass.
    first: Option<(Ticket, (usize, u64))>,
}

impl Run {
    fn new(seed: u64) -> Self {
        let mut rng = fastrand::Rng::with_seed(seed);
        let world = World::new(rng.u32(1..4));
        let (queue, requests, ends, granted) = Default::default();
        Self { rng, world, queue, now: 0, requests, ends, granted, first: None }
    }

    fn arrive(&mut self) {
        let name = ["1g.10gb", "1g.10gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb"][self.rng.usize(..6)];
        let lasts = [None, Some(20), Some(50), Some(200)][self.rng.usize(..4)];
        let ticket = push(&mut self.queue, name, lasts);
        self.requests.insert(ticket, (name, lasts));
    }

    fn end_next(&mut self) {
        let Some((ticket, end)) = self.ends.iter().map(|(ticket, end)| (*ticket, *end)).min_by_key(|one| one.1) else {
            return;
        };
        self.now = self.now.max(end);
        self.ends.remove(&ticket);
        let at = self.world.held.iter().position(|(one, _)| *one == ticket).unwrap();
        self.world.release(at);
    }

    /// Makes passes until no request can be granted. Returns why the rules were broken.
    fn pass(&mut self) -> Result<(), String> {
        loop {
            let schedule = self.queue.schedule(&self.world.host, ScheduleRules { now: self.now, ..RULES });
            if let Some(reservation) = schedule.reservations().first()
                && self.queue.position(reservation.ticket) == Some(1)
            {
                let now = self.world.waits_for(reservation);
                let free_at = (now.0 == 0).then_some(now.1);
                if reservation.free_at != free_at {
                    return Err(format!("{reservation:?} waits for {now:?}"));
                }
                if let Some((_, before)) = self.first.filter(|(ticket, _)| *ticket == reservation.ticket)
                    && now > before
                {
                    return Err(format!("the first entry waits for {now:?}, before for {before:?}"));
                }
                self.first = Some((reservation.ticket, now));
            }
            let grant = schedule.outcomes.into_iter().find_map(|(ticket, outcome)| match outcome {
                Outcome::Grant(assignment) => Some((ticket, assignment)),
                Outcome::Ready | Outcome::Waits { .. } | Outcome::Never(_) => None,
            });
            let Some((ticket, assignment)) = grant else { return Ok(()) };
            self.queue.note_grant(Some(ticket), &self.world.host, &assignment.gpus());
            let request = self.requests[&ticket];
            let earlier = self.queue.entries().find(|(other, _)| *other < ticket && self.requests[other] == request);
            if let Some((earlier, _)) = earlier {
                return Err(format!("{ticket:?} was granted before the equal request {earlier:?}"));
            }
            self.queue.remove(ticket);
            let known = request.1.map(|lasts| self.now + lasts);
            self.world.grant(ticket, &assignment, known);
            self.ends.insert(ticket, self.now + self.rng.u64(1..=request.1.unwrap_or(100)));
            self.granted.push(ticket);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]
    /// Requests come for a long time, more than the host can serve. The first entry is never delayed by a later request
    /// that ends as promised, equal requests keep their order, and each request is granted after a limited number of
    /// others.
    #[test]
    fn no_request_waits_for_ever(seed in any::<u64>()) {
        let mut run = Run::new(seed);
        let gpus = run.world.host.gpus.len();
        for _ in 0..150 {
            for _ in 0..run.rng.usize(..4) {
                run.arrive();
            }
            prop_assert_eq!(run.pass(), Ok(()));
            run.end_next();
        }
        // While an entry is among the first ones, at most all instances of the host are granted before the entry.
        let bound = MOST as usize * gpus + 60 * (run.queue.entries().count() + 3);
        for (ticket, entry) in run.queue.entries() {
            prop_assert!((entry.overtaken as usize) < bound, "{ticket:?} was overtaken {} times", entry.overtaken);
        }
        // No more requests come: all are granted.
        prop_assert_eq!(run.pass(), Ok(()));
        while run.queue.entries().next().is_some() {
            prop_assert!(!run.ends.is_empty(), "requests wait for nothing");
            run.end_next();
            prop_assert_eq!(run.pass(), Ok(()));
        }
        prop_assert_eq!(run.granted.len(), run.requests.len());
    }
}
