//! A host whose requests wait in gpushd's queue instead of being refused.
//!
//! Requests arrive at random times. A request that does not fit waits. After each arrival and each end of a lease, the queue
//! decides about all waiting requests, in order of arrival.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BinaryHeap},
    time::{Duration, Instant},
};

use gpush_core::{
    geometry::Geometry,
    lease::placement::{PlacementPolicy, PlacementRequest, RequestedDevice, RequestedShare},
    schedule::{Needs, Outcome, Queue, ReservationLimits, ScheduleRules, Ticket, Waiter},
};

use crate::{
    arrivals::{Demand, exponential},
    mixes::PROFILES,
    strategies::Gpush,
};

/// Seconds of the unit of time, which is the mean duration of a lease.
const UNIT: f64 = 100_000.0;

/// How often a known end is overestimated at most.
const OVERESTIMATED: f64 = 5.0;

/// How a queue works.
#[derive(Debug, Clone, Copy)]
pub(crate) struct QueueRules {
    pub(crate) name: &'static str,
    pub(crate) limits: ReservationLimits,
    /// Whether the queue uses the known ends of leases.
    pub(crate) uses_ends: bool,
}

/// What a run has measured. Waits are in mean durations of a lease.
#[derive(Debug, Clone, Default)]
pub(crate) struct Waits {
    /// The waits of each profile.
    of: [Vec<f64>; PROFILES.len()],
    leased: f64,
    time: f64,
    /// Longest times of decisions, if they were measured.
    pub(crate) decisions: Vec<Duration>,
}

impl Waits {
    /// Returns the mean wait of all requests, or of those for one profile.
    pub(crate) fn mean(&self, kind: Option<usize>) -> f64 {
        let all: Vec<f64> = match kind {
            Some(kind) => self.of[kind].clone(),
            None => self.of.iter().flatten().copied().collect(),
        };
        all.iter().sum::<f64>() / all.len() as f64
    }

    /// Returns a quantile of the waits.
    pub(crate) fn quantile(&self, part: f64) -> f64 {
        let mut all: Vec<f64> = self.of.iter().flatten().copied().collect();
        all.sort_by(f64::total_cmp);
        all.get((all.len() as f64 * part) as usize).or(all.last()).copied().unwrap_or_default()
    }

    /// Returns the leased memory slices in percent of all, as a mean over time.
    pub(crate) fn leased(&self) -> f64 {
        100.0 * self.leased / self.time
    }
}

/// One request.
struct Request {
    kind: usize,
    at: f64,
    lasts: f64,
    /// The duration that the request names, in seconds.
    named: Option<u64>,
}

struct Model<'a> {
    demand: &'a Demand,
    rules: QueueRules,
    host: Gpush,
    queue: Queue,
    /// The request of each entry.
    waiting: BTreeMap<Ticket, usize>,
    requests: Vec<Request>,
    ends: BinaryHeap<Reverse<(u64, usize)>>,
    now: f64,
    used: usize,
    slices: usize,
    kinds: fastrand::Rng,
    durations: fastrand::Rng,
    limits: fastrand::Rng,
    arrivals: fastrand::Rng,
    /// Requests before this one are not measured.
    first_measured: usize,
    is_timed: bool,
    waits: Waits,
}

impl<'a> Model<'a> {
    fn new(geometry: &Geometry, demand: &'a Demand, rules: QueueRules, gpus: u32, seed: u64) -> Self {
        let mut host = Gpush::new(geometry, gpus, PlacementPolicy::Pack);
        host.end_leases();
        // Generators whose seeds are close to each other give related numbers.
        let mut seeds = fastrand::Rng::with_seed(seed);
        Self {
            demand,
            rules,
            host,
            queue: Queue::default(),
            waiting: BTreeMap::new(),
            requests: Vec::new(),
            ends: BinaryHeap::new(),
            now: 0.0,
            used: 0,
            slices: gpus as usize * usize::from(geometry.memory_slices),
            kinds: seeds.fork(),
            durations: seeds.fork(),
            limits: seeds.fork(),
            arrivals: seeds.fork(),
            first_measured: 0,
            is_timed: false,
            waits: Waits::default(),
        }
    }

    /// Adds a random request to the queue.
    fn arrive(&mut self) {
        let kind = self.demand.kind(&mut self.kinds);
        let lasts = exponential(&mut self.durations);
        let factor = 1.0 + (OVERESTIMATED - 1.0) * self.limits.f64();
        let has_end = self.limits.bool() && self.rules.uses_ends;
        let named = has_end.then(|| (lasts * factor * UNIT).ceil() as u64);
        let share = RequestedShare::Mig(RequestedDevice::Profile(PROFILES[kind].to_owned()));
        let wanted = PlacementRequest { share, count: 1, holder: 1000, gpus: None, targets: None };
        let ticket = self.queue.push(Waiter::Lease(String::new()), Some(wanted), Needs::new());
        self.queue.set_lasts(ticket, named);
        self.waiting.insert(ticket, self.requests.len());
        self.requests.push(Request { kind, at: self.now, lasts, named });
    }

    /// Ends the next lease, and moves the time to its end.
    fn end_next(&mut self) {
        let Some(Reverse((end, request))) = self.ends.pop() else { return };
        self.move_to(f64::from_bits(end));
        self.host.release(request);
        self.used -= self.demand.slices[self.requests[request].kind];
    }

    fn move_to(&mut self, time: f64) {
        if self.requests.len() > self.first_measured {
            self.waits.leased += self.used as f64 / self.slices as f64 * (time - self.now);
            self.waits.time += time - self.now;
        }
        self.now = time;
    }

    /// Grants what can be granted.
    fn pass(&mut self) {
        loop {
            let now = (self.now * UNIT).ceil() as u64;
            let rules = ScheduleRules { policy: PlacementPolicy::Pack, limits: self.rules.limits, now };
            let decide = || self.queue.schedule(self.host.host(), rules);
            if self.is_timed {
                let time = |_| {
                    let start = Instant::now();
                    std::hint::black_box(decide());
                    start.elapsed()
                };
                self.waits.decisions.extend((0..3).map(time).min());
            }
            let grant = decide().outcomes.into_iter().find_map(|(ticket, outcome)| match outcome {
                Outcome::Grant(assignment) => Some((ticket, assignment)),
                Outcome::Ready | Outcome::Waits { .. } | Outcome::Never(_) => None,
            });
            let Some((ticket, assignment)) = grant else { return };
            self.queue.note_grant(Some(ticket), self.host.host(), &assignment.gpus());
            self.queue.remove(ticket);
            let Some(number) = self.waiting.remove(&ticket) else { return };
            let request = &self.requests[number];
            let end = request.named.map(|named| now + named);
            self.host.execute(number, &assignment, PROFILES[request.kind], end);
            self.used += self.demand.slices[request.kind];
            self.ends.push(Reverse(((self.now + request.lasts).to_bits(), number)));
            if number >= self.first_measured {
                self.waits.of[request.kind].push(self.now - request.at);
            }
        }
    }
}

/// Offers this number of requests at the rate of the demand, and measures their waits.
pub(crate) fn waits(
    geometry: &Geometry,
    demand: &Demand,
    rules: QueueRules,
    (gpus, requests): (u32, usize),
    seeds: u64,
) -> Waits {
    let mut all = Waits::default();
    for seed in 0..seeds {
        let mut model = Model::new(geometry, demand, rules, gpus, seed);
        model.first_measured = requests / 10;
        model.waits = std::mem::take(&mut all);
        let rate: f64 = demand.rates.iter().sum();
        let mut next = exponential(&mut model.arrivals) / rate;
        while model.requests.len() < requests || !model.waiting.is_empty() {
            let end = model.ends.peek().map(|Reverse((end, _))| f64::from_bits(*end));
            if model.requests.len() < requests && end.is_none_or(|end| next < end) {
                model.move_to(next);
                model.arrive();
                next += exponential(&mut model.arrivals) / rate;
            } else {
                model.end_next();
            }
            model.pass();
        }
        all = model.waits;
    }
    all
}

/// Keeps this number of requests waiting until `ends` leases have ended. Measures the leased part of the host.
pub(crate) fn saturated(
    geometry: &Geometry,
    demand: &Demand,
    rules: QueueRules,
    (gpus, waiting): (u32, usize),
    (ends, is_timed): (usize, bool),
) -> Waits {
    let mut model = Model::new(geometry, demand, rules, gpus, 0);
    for end in 0..ends {
        model.is_timed = is_timed && end >= ends / 2;
        model.first_measured = if end < ends / 10 { usize::MAX } else { 0 };
        while model.waiting.len() < waiting {
            while model.waiting.len() < waiting {
                model.arrive();
            }
            model.pass();
        }
        model.end_next();
        model.pass();
    }
    model.waits
}
