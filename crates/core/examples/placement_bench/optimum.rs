//! The best possible placement on a small host, by a Markov decision process.
//!
//! ```text
//! states of one GPU ─► blocks of states with the same future ─► states of the host ─► value of each state
//! ```
//!
//! The states of a GPU are the sets of instances that may exist together. Two states with the same future are in one block:
//! each request leads from both to the same blocks, and so does each end of a lease. A state of the host is a multiset of
//! blocks, because the order of the GPUs does not matter. Value iteration then finds the largest mean number of granted
//! memory slices, if each request that fits is granted.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use gpush_api::Placement;
use gpush_core::geometry::{Geometry, MOST_INSTANCES, Profile};

use crate::{arrivals::Demand, mixes::PROFILES, strategies::Strategy};

/// Profiles of the requests, as indexes of [`PROFILES`], with their placements.
type Instances = Vec<(usize, Placement)>;

/// Largest difference of the bounds of the mean, in parts of the mean.
const PRECISION: f64 = 1e-5;
const MOST_ITERATIONS: usize = 20_000;

/// All states of one GPU.
struct GpuStates {
    states: Vec<Instances>,
    index: HashMap<Instances, usize>,
    /// The states after a new instance of each profile.
    arrivals: Vec<[Vec<usize>; PROFILES.len()]>,
    /// The states after the end of each instance.
    departures: Vec<Vec<usize>>,
}

impl GpuStates {
    fn new(geometry: &Geometry, demand: &Demand) -> Self {
        let profiles: Vec<(usize, &Profile)> = (0..PROFILES.len())
            .filter(|kind| demand.rates[*kind] > 0.0)
            .filter_map(|kind| Some((kind, geometry.named(PROFILES[kind])?)))
            .collect();
        let mut all = Self { states: Vec::new(), index: HashMap::new(), arrivals: Vec::new(), departures: Vec::new() };
        let mut next = vec![Instances::new()];
        while let Some(state) = next.pop() {
            if all.index.contains_key(&state) {
                continue;
            }
            all.index.insert(state.clone(), all.states.len());
            for (kind, profile) in &profiles {
                next.extend(profile.spots.iter().filter_map(|spot| with(geometry, &state, *kind, spot.placement)));
            }
            all.states.push(state);
        }
        for state in &all.states {
            let mut arrivals: [Vec<usize>; PROFILES.len()] = Default::default();
            for (kind, profile) in &profiles {
                let after = profile.spots.iter().filter_map(|spot| with(geometry, state, *kind, spot.placement));
                arrivals[*kind] = after.map(|state| all.index[&state]).collect();
            }
            all.arrivals.push(arrivals);
            all.departures.push((0..state.len()).map(|gone| all.index[&without(state, gone)]).collect());
        }
        all
    }

    /// Returns the block of each state, and the number of blocks.
    fn blocks(&self) -> (Vec<usize>, usize) {
        let mut blocks = vec![0; self.states.len()];
        let mut count = 1;
        loop {
            let mut known: BTreeMap<_, usize> = BTreeMap::new();
            let mut finer = Vec::with_capacity(blocks.len());
            for state in 0..self.states.len() {
                let arrivals: Vec<BTreeSet<usize>> =
                    self.arrivals[state].iter().map(|after| after.iter().map(|to| blocks[*to]).collect()).collect();
                let mut departures: Vec<usize> = self.departures[state].iter().map(|to| blocks[*to]).collect();
                departures.sort_unstable();
                let next = known.len();
                finer.push(*known.entry((blocks[state], arrivals, departures)).or_insert(next));
            }
            let found = known.len();
            blocks = finer;
            if found == count {
                return (blocks, count);
            }
            count = found;
        }
    }
}

/// Returns the state with one more instance; `None` if the instance does not fit.
fn with(geometry: &Geometry, state: &Instances, kind: usize, placement: Placement) -> Option<Instances> {
    let mut after = state.clone();
    after.push((kind, placement));
    after.sort_unstable_by_key(|(kind, placement)| (placement.start, *kind));
    let profiles: Vec<&Profile> = after.iter().filter_map(|(kind, _)| geometry.named(PROFILES[*kind])).collect();
    let equal = after.iter().filter(|(other, _)| *other == kind).count();
    let compute: u32 = profiles.iter().map(|profile| u32::from(profile.profile.slices)).sum();
    let has_engines = (0..geometry.engines.len())
        .all(|engine| profiles.iter().map(|profile| profile.engines[engine]).sum::<u16>() <= geometry.engines[engine]);
    let fits = state.iter().all(|(_, other)| !other.overlaps(placement))
        && after.len() <= MOST_INSTANCES
        && equal <= geometry.named(PROFILES[kind]).map_or(0, |profile| usize::from(profile.profile.max))
        && compute <= u32::from(geometry.compute_slices)
        && has_engines;
    fits.then_some(after)
}

fn without(state: &Instances, gone: usize) -> Instances {
    let mut after = state.clone();
    after.remove(gone);
    after
}

/// The value of each state of a host.
pub(crate) struct Optimum<'a> {
    geometry: &'a Geometry,
    gpus: usize,
    gpu: GpuStates,
    blocks: Vec<usize>,
    count: usize,
    values: HashMap<usize, f64>,
    /// Granted memory slices in percent of the requested ones.
    work_met: f64,
}

/// What follows a state of the host.
struct Following {
    arrivals: [Vec<u32>; PROFILES.len()],
    departures: Vec<u32>,
}

impl<'a> Optimum<'a> {
    pub(crate) fn new(geometry: &'a Geometry, demand: &Demand, gpus: u32) -> Self {
        let gpu = GpuStates::new(geometry, demand);
        let (blocks, count) = gpu.blocks();
        let gpus = gpus as usize;
        let mut optimum = Self { geometry, gpus, gpu, blocks, count, values: HashMap::new(), work_met: 0.0 };
        optimum.iterate(demand);
        optimum
    }

    /// Returns the exact work met, in percent.
    pub(crate) fn work_met(&self) -> f64 {
        self.work_met
    }

    pub(crate) fn strategy(&self) -> BestPlacement<'_> {
        BestPlacement { optimum: self, gpus: vec![Instances::new(); self.gpus], held: BTreeMap::new(), created: 0 }
    }

    /// Returns the number of a state of the host.
    fn key(&self, mut blocks: Vec<usize>) -> usize {
        blocks.sort_unstable();
        blocks.into_iter().fold(0, |key, block| key * self.count + block)
    }

    /// Returns all states of the host.
    fn host_states(&self) -> Vec<Vec<usize>> {
        let mut all = vec![Vec::new()];
        for _ in 0..self.gpus {
            let longer = |state: Vec<usize>| {
                let first = state.last().copied().unwrap_or(0);
                (first..self.count).map(move |block| [state.clone(), vec![block]].concat())
            };
            all = all.into_iter().flat_map(longer).collect();
        }
        all
    }

    fn iterate(&mut self, demand: &Demand) {
        let states = self.host_states();
        let index: HashMap<usize, u32> =
            states.iter().enumerate().map(|(n, state)| (self.key(state.clone()), n as u32)).collect();
        // One state of each block.
        let mut example = vec![0; self.count];
        self.blocks.iter().enumerate().for_each(|(state, block)| example[*block] = state);
        let followings: Vec<Following> = states.iter().map(|state| self.following(state, &example, &index)).collect();
        let starts = demand.rates.iter().sum::<f64>();
        let events = starts + (7 * self.gpus) as f64;
        let mut values = vec![0.0; states.len()];
        let mut mean = 0.0;
        for _ in 0..MOST_ITERATIONS {
            let next = |(state, following): (usize, &Following)| {
                let mut value = 0.0;
                for (kind, rate) in demand.rates.iter().enumerate() {
                    let best = following.arrivals[kind]
                        .iter()
                        .map(|to| values[*to as usize])
                        .fold(f64::NEG_INFINITY, f64::max);
                    value += rate * if best.is_finite() { demand.slices[kind] as f64 + best } else { values[state] };
                }
                value += following.departures.iter().map(|to| values[*to as usize]).sum::<f64>();
                let rest = events - starts - following.departures.len() as f64;
                (value + rest * values[state]) / events
            };
            let after: Vec<f64> = followings.iter().enumerate().map(next).collect();
            let changes = || after.iter().zip(&values).map(|(after, before)| after - before);
            let (least, most) = (changes().fold(f64::INFINITY, f64::min), changes().fold(f64::NEG_INFINITY, f64::max));
            mean = f64::midpoint(least, most);
            let base = after[0];
            values = after.into_iter().map(|value| value - base).collect();
            if most - least < PRECISION * mean {
                break;
            }
        }
        let requested: f64 = demand.rates.iter().zip(demand.slices).map(|(rate, slices)| rate * slices as f64).sum();
        self.work_met = 100.0 * mean * events / requested;
        self.values = index.into_iter().map(|(key, n)| (key, values[n as usize])).collect();
    }

    fn following(&self, state: &[usize], example: &[usize], index: &HashMap<usize, u32>) -> Following {
        let mut arrivals: [BTreeSet<u32>; PROFILES.len()] = Default::default();
        let mut departures = Vec::new();
        for (gpu, block) in state.iter().enumerate() {
            let to = |after: &usize| {
                let mut changed = state.to_vec();
                changed[gpu] = self.blocks[*after];
                index[&self.key(changed)]
            };
            for (all, here) in arrivals.iter_mut().zip(&self.gpu.arrivals[example[*block]]) {
                all.extend(here.iter().map(to));
            }
            departures.extend(self.gpu.departures[example[*block]].iter().map(to));
        }
        Following { arrivals: arrivals.map(|all| all.into_iter().collect()), departures }
    }

    fn value(&self, gpus: &[Instances]) -> f64 {
        let blocks = gpus.iter().map(|state| self.blocks[self.gpu.index[state]]).collect();
        self.values[&self.key(blocks)]
    }
}

/// Places each request where the state after it has the largest value.
pub(crate) struct BestPlacement<'a> {
    optimum: &'a Optimum<'a>,
    gpus: Vec<Instances>,
    held: BTreeMap<usize, (usize, Placement)>,
    created: usize,
}

impl Strategy for BestPlacement<'_> {
    fn arrive(&mut self, request: usize, profile: &str) -> bool {
        let Some(kind) = PROFILES.iter().position(|name| *name == profile) else { return false };
        let geometry = self.optimum.geometry;
        let mut best: Option<(f64, usize, Placement, Instances)> = None;
        for gpu in 0..self.gpus.len() {
            for spot in geometry.named(profile).iter().flat_map(|profile| &profile.spots) {
                let Some(after) = with(geometry, &self.gpus[gpu], kind, spot.placement) else { continue };
                let before = std::mem::replace(&mut self.gpus[gpu], after);
                let value = self.optimum.value(&self.gpus);
                let after = std::mem::replace(&mut self.gpus[gpu], before);
                if best.as_ref().is_none_or(|(most, ..)| value > *most) {
                    best = Some((value, gpu, spot.placement, after));
                }
            }
        }
        let Some((_, gpu, placement, after)) = best else { return false };
        self.gpus[gpu] = after;
        self.held.insert(request, (gpu, placement));
        self.created += 1;
        true
    }

    fn leave(&mut self, request: usize) {
        if let Some((gpu, placement)) = self.held.remove(&request) {
            self.gpus[gpu].retain(|(_, other)| *other != placement);
        }
    }

    fn created(&self) -> usize {
        self.created
    }
}
