//! Tests of the machine without processes. They cover cases that the scripted worker of `tests/supervisor.rs` cannot
//! produce, such as a worker that exits slowly or hangs in the kernel. Long random walks check that no call is lost.

use gpush_api::GpuUuid;
use std::collections::{BTreeMap, BTreeSet};

use super::*;
use crate::proto::GpuRef;

const SECOND: Duration = Duration::from_secs(1);

fn limits() -> Deadlines {
    Deadlines {
        start: 30 * SECOND,
        read: 10 * SECOND,
        change: 60 * SECOND,
        sample: 2 * SECOND,
        sample_wait: 5 * SECOND,
        queue: 90 * SECOND,
        grace: 10 * SECOND,
        retry: SECOND,
    }
}

fn read(uuid: &str) -> Ask {
    Ask::Request(Request::Read { gpu: GpuRef::new(&uuid.into()) })
}

fn destroy(uuid: &str) -> Ask {
    Ask::Request(Request::DestroyGpuInstance { gpu: GpuRef::new(&uuid.into()), gi: 1 })
}

fn driver() -> Driver {
    let text = || "1".to_owned();
    Driver { version: text(), nvml: text(), cuda: text(), library: text(), simulated: true, memory_limits: false }
}

fn kind_of(effects: &[Effect], wanted: Ticket) -> Option<ErrorKind> {
    effects.iter().find_map(|effect| match effect {
        Effect::Answer { ticket, result: Err(error) } if *ticket == wanted => Some(error.kind.clone()),
        _ => None,
    })
}

/// Returns a machine with a worker that serves, and the time at which it began to serve.
fn serving() -> (Machine, Instant) {
    let now = Instant::now();
    let mut machine = Machine::new(limits());
    let effects = machine.step(now, Event::Call { ticket: 1000, ask: Ask::Driver });
    assert_eq!(effects, [Effect::Spawn(1)]);
    let effects = machine.step(now, Event::Started { worker: 1, result: Ok(driver()) });
    assert!(matches!(effects[..], [Effect::Answer { ticket: 1000, result: Ok(_) }]), "{effects:?}");
    (machine, now)
}

#[test]
fn worker_hanging_in_kernel_is_reported_and_not_awaited() {
    let (mut machine, now) = serving();
    machine.step(now, Event::Call { ticket: 1, ask: destroy("a") });
    let late = now + limits().change;
    let effects = machine.step(late, Event::Tick);
    assert_eq!(kind_of(&effects, 1), Some(ErrorKind::Deadline { may_land: true }));
    machine.step(late, Event::Settle { ticket: 2, uuid: "a".into() });
    machine.step(late, Event::Restart { ticket: 3 });
    assert_eq!(machine.next_tick(), Some(late + limits().grace));
    assert_eq!(machine.step(late + limits().grace, Event::Tick), [Effect::Kill(1)]);
    // The worker does not end. So the restart fails and the GPU stays unsettled, but other GPUs are
    // served.
    let stuck = late + limits().grace + DYING;
    assert_eq!(machine.next_tick(), Some(stuck));
    let effects = machine.step(stuck, Event::Tick);
    assert!(matches!(effects[..], [Effect::Ended { ticket: 3, result: Err(_) }]), "{effects:?}");
    assert!(machine.abandoned()[&1].stuck);
    assert_eq!(machine.unsettled(), ["a"]);
    assert_eq!(machine.next_tick(), None, "nothing is waited for");
    assert_eq!(machine.step(stuck, Event::Call { ticket: 4, ask: read("b") }), [Effect::Spawn(2)]);
    let effects = machine.step(stuck, Event::Started { worker: 2, result: Ok(driver()) });
    assert!(matches!(effects[..], [Effect::Send { worker: 2, ticket: 4, .. }]), "{effects:?}");
    machine.step(stuck, Event::Reply { worker: 2, ticket: 4, result: Ok(Answer::Destroyed) });
    // An hour later, the kernel releases the worker.
    let effects = machine.step(stuck + 3600 * SECOND, Event::Gone { worker: 1, how: "signal 9".to_owned() });
    assert!(effects.contains(&Effect::Settled { ticket: 2, settled: Settled::Gone }), "{effects:?}");
    assert!(machine.unsettled().is_empty() && machine.abandoned().is_empty());
}

#[test]
fn abandoned_worker_finishes_its_calls_in_time() {
    let (mut machine, now) = serving();
    machine.step(now, Event::Call { ticket: 1, ask: read("a") });
    machine.step(now, Event::Call { ticket: 2, ask: destroy("b") });
    let killed = |effects: &[Effect]| effects.contains(&Effect::Kill(1));
    // The read hangs. The mutation has a deadline of a minute.
    let late = now + limits().read;
    let effects = machine.step(late, Event::Tick);
    assert_eq!(kind_of(&effects, 1), Some(ErrorKind::Deadline { may_land: false }));
    assert!(!killed(&effects));
    assert_eq!(machine.next_tick(), Some(now + limits().change));
    assert!(!killed(&machine.step(now + limits().change - SECOND, Event::Tick)));
    let done = Event::Reply { worker: 1, ticket: 2, result: Ok(Answer::Destroyed) };
    let effects = machine.step(now + limits().change - SECOND, done);
    assert!(killed(&effects), "{effects:?}");
}

#[test]
fn number_of_stuck_workers_is_limited() {
    let now = Instant::now();
    let mut machine = Machine::new(limits());
    let mut at = now;
    let mut spawned = 0;
    for ticket in 0..20 {
        at += 3600 * SECOND;
        let effects = machine.step(at, Event::Call { ticket, ask: read("a") });
        spawned += effects.iter().filter(|e| matches!(e, Effect::Spawn(_))).count();
        // The initialisation never returns, and the process never ends.
        at += limits().start;
        machine.step(at, Event::Tick);
    }
    assert_eq!(spawned, MOST_ABANDONED);
}

#[test]
fn crashing_worker_restarts_with_backoff() {
    let (mut machine, mut now) = serving();
    let mut waits = Vec::new();
    for worker in 1..=10 {
        machine.step(now, Event::Gone { worker, how: "signal 11".to_owned() });
        let effects = machine.step(now, Event::Call { ticket: worker, ask: Ask::Driver });
        let spawned = |effects: &[Effect]| effects.contains(&Effect::Spawn(worker + 1));
        let mut waited = Duration::ZERO;
        if !spawned(&effects) {
            let at = machine.next_tick().unwrap();
            waited = at - now;
            now = at;
            let effects = machine.step(now, Event::Tick);
            assert!(spawned(&effects), "{effects:?}");
        }
        waits.push(waited.as_millis());
        machine.step(now, Event::Started { worker: worker + 1, result: Ok(driver()) });
    }
    assert_eq!(waits, [0, 100, 200, 400, 800, 1600, 3200, 6400, 12800, 25600]);
    // A single answer resets the restart delay.
    machine.step(now, Event::Call { ticket: 100, ask: read("a") });
    machine
        .step(now, Event::Reply { worker: 11, ticket: 100, result: Err(DriverError::new(ErrorKind::GpuIsLost, "x")) });
    machine.step(now, Event::Gone { worker: 11, how: "signal 11".to_owned() });
    let effects = machine.step(now, Event::Call { ticket: 101, ask: Ask::Driver });
    assert_eq!(effects, [Effect::Spawn(12)]);
}

#[test]
fn call_that_waits_too_long_is_answered_as_not_begun() {
    let (mut machine, now) = serving();
    machine.step(now, Event::Call { ticket: 1, ask: destroy("a") });
    let effects = machine.step(now, Event::Call { ticket: 2, ask: destroy("a") });
    assert!(effects.is_empty());
    // The first call's deadline passes, so the second one is refused and never sent.
    let effects = machine.step(now + limits().change, Event::Tick);
    assert_eq!(kind_of(&effects, 2), Some(ErrorKind::Unsettled));
    assert!(!effects.iter().any(|e| matches!(e, Effect::Send { .. })));
    // If the worker starts slowly, queued calls time out.
    let mut machine = Machine::new(Deadlines { start: 600 * SECOND, ..limits() });
    machine.step(now, Event::Call { ticket: 1, ask: destroy("a") });
    let effects = machine.step(now + limits().queue, Event::Tick);
    assert_eq!(kind_of(&effects, 1), Some(ErrorKind::Deadline { may_land: false }));
}

#[test]
fn unexpected_answers_are_ignored() {
    let (mut machine, now) = serving();
    machine.step(now, Event::Call { ticket: 1, ask: read("a") });
    let reply = |worker, ticket| Event::Reply { worker, ticket, result: Ok(Answer::Destroyed) };
    assert!(machine.step(now, reply(7, 1)).is_empty());
    assert!(machine.step(now, reply(1, 99)).is_empty());
    assert!(machine.step(now, Event::Started { worker: 9, result: Ok(driver()) }).is_empty());
    assert!(machine.step(now, Event::Gone { worker: 9, how: String::new() }).is_empty());
    assert_eq!(machine.step(now, reply(1, 1)).len(), 1);
}

/// The state outside the machine during a random walk.
#[derive(Default)]
struct World {
    alive: BTreeSet<WorkerId>,
    ready: BTreeSet<WorkerId>,
    doomed: BTreeSet<WorkerId>,
    /// Calls in flight, with their worker and their GPU.
    held: BTreeMap<Ticket, (WorkerId, Option<GpuUuid>)>,
    open: BTreeSet<Ticket>,
    mutations: BTreeSet<Ticket>,
    sent: BTreeMap<Ticket, u32>,
}

impl World {
    fn take(&mut self, effects: Vec<Effect>) {
        for effect in effects {
            match effect {
                Effect::Spawn(worker) => {
                    let serving = self.alive.difference(&self.doomed).count();
                    assert!(serving == 0 || self.held.values().any(|(w, _)| self.alive.contains(w)), "two that serve");
                    assert!(self.alive.insert(worker));
                }
                Effect::Send { worker, ticket, request } => {
                    assert!(self.ready.contains(&worker), "a call to a worker that is not ready");
                    let gpu = request.gpu().map(|gpu| gpu.uuid.clone());
                    assert!(self.held.values().all(|(_, other)| *other != gpu), "two calls to {gpu:?} at once");
                    self.held.insert(ticket, (worker, gpu));
                    *self.sent.entry(ticket).or_default() += 1;
                    let tries = if request.is_mutation() { 1 } else { 2 };
                    assert!(self.sent[&ticket] <= tries, "tried too often");
                }
                Effect::Close(worker) => {
                    assert!(self.held.values().all(|(w, _)| *w != worker), "closed with a call in it");
                    self.doomed.insert(worker);
                }
                Effect::Kill(worker) => {
                    self.doomed.insert(worker);
                }
                Effect::Answer { ticket, .. } | Effect::Settled { ticket, .. } | Effect::Ended { ticket, .. } => {
                    assert!(self.open.remove(&ticket), "{ticket} answered twice");
                }
            }
        }
    }

    fn bury(&mut self, worker: WorkerId) {
        self.alive.remove(&worker);
        self.ready.remove(&worker);
        self.doomed.remove(&worker);
        self.held.retain(|_, (w, _)| *w != worker);
    }
}

fn walk(seed: u64, length: u32) -> (u64, u64) {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut machine = Machine::new(limits());
    let mut world = World::default();
    let mut now = Instant::now();
    let mut next = 0;
    for _ in 0..length {
        now += Duration::from_millis(rng.u64(..3000));
        let pick = |set: &BTreeSet<WorkerId>, roll: u64| {
            set.iter().nth(usize::try_from(roll).unwrap() % set.len().max(1)).copied()
        };
        let roll = rng.u64(..1 << 20);
        let event = match rng.u64(..12) {
            0..=4 => {
                next += 1;
                world.open.insert(next);
                let gpu = ["a", "b", "c", "d"][usize::try_from(roll % 4).unwrap()];
                let ask = match rng.u64(..6) {
                    0 => Ask::Driver,
                    1 => Ask::Request(Request::List { skip: Vec::new() }),
                    2 | 3 => read(gpu),
                    _ => destroy(gpu),
                };
                if matches!(&ask, Ask::Request(request) if request.is_mutation()) {
                    world.mutations.insert(next);
                }
                Event::Call { ticket: next, ask }
            }
            5 => {
                next += 1;
                world.open.insert(next);
                match rng.u64(..8) {
                    0 => Event::Restart { ticket: next },
                    1 => Event::Stop { ticket: next },
                    _ => Event::Settle { ticket: next, uuid: "a".into() },
                }
            }
            6 => Event::Resume,
            7 => {
                let waiting: BTreeSet<_> = world.alive.difference(&world.ready).copied().collect();
                let Some(worker) = pick(&waiting, roll) else { continue };
                world.ready.insert(worker);
                let error = DriverError::new(ErrorKind::DriverNotLoaded, "nvmlInit_v2");
                Event::Started { worker, result: if rng.u64(..4) == 0 { Err(error) } else { Ok(driver()) } }
            }
            8 | 9 => {
                let Some((ticket, (worker, _))) =
                    world.held.iter().nth(usize::try_from(roll).unwrap() % world.held.len().max(1))
                else {
                    continue;
                };
                let (ticket, worker) = (*ticket, *worker);
                world.held.remove(&ticket);
                Event::Reply { worker, ticket, result: Ok(Answer::Destroyed) }
            }
            10 => {
                let set = if rng.u64(..4) == 0 { &world.alive } else { &world.doomed };
                let Some(worker) = pick(set, roll) else { continue };
                world.bury(worker);
                Event::Gone { worker, how: "signal 9".to_owned() }
            }
            _ => Event::Tick,
        };
        world.take(machine.step(now, event));
    }
    // At the end, no call is in progress, and every call has an answer.
    world.take(machine.step(now, Event::Resume));
    for _ in 0..10_000 {
        if let Some(worker) = world.doomed.first().copied() {
            world.bury(worker);
            world.take(machine.step(now, Event::Gone { worker, how: "signal 9".to_owned() }));
        } else if let Some(worker) = world.alive.difference(&world.ready).next().copied() {
            world.ready.insert(worker);
            world.take(machine.step(now, Event::Started { worker, result: Ok(driver()) }));
        } else if let Some((ticket, (worker, _))) = world.held.pop_first() {
            world.take(machine.step(now, Event::Reply { worker, ticket, result: Ok(Answer::Destroyed) }));
        } else if let Some(at) = machine.next_tick() {
            now = now.max(at);
            world.take(machine.step(now, Event::Tick));
        } else {
            break;
        }
    }
    assert!(world.open.is_empty(), "seed {seed}: never answered: {:?} by {machine:#?}", world.open);
    assert!(machine.unsettled().is_empty(), "seed {seed}");
    machine.counts()
}

#[test]
fn random_walks_lose_no_call() {
    let (mut calls, mut started, mut crashed) = (0, 0, 0);
    for seed in 0..300 {
        let counts = walk(seed, 2_000);
        calls += 2_000;
        started += counts.0;
        crashed += counts.1;
    }
    println!("{calls} events, {started} workers started, {crashed} of them crashed");
    assert!(started > 1_000 && crashed > 100);
}

#[test]
fn pause_stops_workers_and_calls_wait() {
    let (mut machine, now) = serving();
    let effects = machine.step(now, Event::Pause { ticket: 1 });
    assert_eq!(effects, [Effect::Close(1)]);
    assert_eq!(machine.step(now, Event::Call { ticket: 2, ask: destroy("a") }), []);
    let effects = machine.step(now, Event::Gone { worker: 1, how: "asked to".to_owned() });
    assert_eq!(effects, [Effect::Ended { ticket: 1, result: Ok(()) }]);
    // During a pause, calls wait longer than the time limit of the queue, and no timer is set.
    assert_eq!(machine.next_tick(), None);
    let later = now + 3 * limits().queue;
    assert_eq!(machine.step(later, Event::Tick), []);
    assert_eq!(machine.step(later, Event::Unpause), [Effect::Spawn(2)]);
    let effects = machine.step(later, Event::Started { worker: 2, result: Ok(driver()) });
    assert!(matches!(effects[..], [Effect::Send { worker: 2, ticket: 2, .. }]), "{effects:?}");
}
