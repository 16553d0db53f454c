//! Random requests, and what a strategy grants of them.

use std::{cmp::Reverse, collections::BinaryHeap};

use gpush_core::geometry::Geometry;

use crate::{
    mixes::{PROFILES, Weights},
    strategies::Strategy,
};

/// Number of requests of one seed.
const REQUESTS: usize = 20_000;
/// Seeds of the random numbers.
const SEEDS: u64 = 5;
/// Number of requests in a row of the table.
pub(crate) const TOTAL: usize = REQUESTS * SEEDS as usize;

/// Requests at random times with random durations. The unit of time is the mean duration of a lease.
#[derive(Debug, Clone)]
pub(crate) struct Demand {
    /// Requests for each profile per unit of time.
    pub(crate) rates: [f64; 6],
    /// Memory slices of each profile.
    pub(crate) slices: [usize; 6],
}

/// What a strategy granted.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Counts {
    pub(crate) requests: usize,
    pub(crate) granted: usize,
    requested_slices: usize,
    granted_slices: usize,
    pub(crate) created: usize,
}

impl Counts {
    /// Returns the granted memory slices in percent of the requested ones.
    pub(crate) fn work_met(&self) -> f64 {
        100.0 * self.granted_slices as f64 / self.requested_slices as f64
    }

    /// Returns the granted requests in percent of all requests.
    pub(crate) fn requests_met(&self) -> f64 {
        100.0 * self.granted as f64 / self.requests as f64
    }
}

impl Demand {
    /// Returns the demand that offers a load, in percent of the host's memory slices.
    pub(crate) fn new(geometry: &Geometry, weights: Weights, load: usize, gpus: u32) -> Self {
        let slices = PROFILES.map(|name| geometry.named(name).map_or(0, |profile| profile.memory_slices() as usize));
        let offered = (load * gpus as usize * usize::from(geometry.memory_slices)) as f64 / 100.0;
        let unit: usize = slices.iter().zip(weights).map(|(slices, weight)| slices * weight).sum();
        Self { rates: weights.map(|weight| offered * weight as f64 / unit as f64), slices }
    }

    /// Returns the profile of a random request, as an index of [`PROFILES`].
    pub(crate) fn kind(&self, rng: &mut fastrand::Rng) -> usize {
        let mut ball = rng.f64() * self.rates.iter().sum::<f64>();
        let last = self.rates.iter().rposition(|rate| *rate > 0.0).unwrap_or(0);
        let kind = self.rates.iter().position(|rate| {
            let is_here = ball < *rate;
            ball -= rate;
            is_here
        });
        kind.unwrap_or(last)
    }

    /// Offers the requests of all seeds, each to a new host.
    pub(crate) fn offered_to<'a>(&self, strategy: impl Fn() -> Box<dyn Strategy + 'a>) -> Counts {
        let mut counts = Counts::default();
        for seed in 0..SEEDS {
            self.offer(strategy().as_mut(), seed, &mut counts);
        }
        counts
    }

    /// Offers the requests of one seed.
    pub(crate) fn offer(&self, strategy: &mut dyn Strategy, seed: u64, counts: &mut Counts) {
        let mut rng = fastrand::Rng::with_seed(seed);
        let total: f64 = self.rates.iter().sum();
        let mut now = 0.0;
        // Times are positive, so their bits have the order of the numbers.
        let mut ends: BinaryHeap<Reverse<(u64, usize)>> = BinaryHeap::new();
        for request in 0..REQUESTS {
            now += exponential(&mut rng) / total;
            let kind = self.kind(&mut rng);
            let until = now + exponential(&mut rng);
            while let Some(Reverse((end, gone))) = ends.peek().copied()
                && f64::from_bits(end) <= now
            {
                ends.pop();
                strategy.leave(gone);
            }
            counts.requests += 1;
            counts.requested_slices += self.slices[kind];
            if strategy.arrive(request, PROFILES[kind]) {
                counts.granted += 1;
                counts.granted_slices += self.slices[kind];
                ends.push(Reverse((until.to_bits(), request)));
            }
        }
        counts.created += strategy.created();
    }
}

/// Returns a random time with mean 1.
pub(crate) fn exponential(rng: &mut fastrand::Rng) -> f64 {
    -(1.0 - rng.f64()).ln()
}
