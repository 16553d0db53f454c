//! Enumerates all states of the GPU instances of a GPU model.
//!
//! The module uses only the raw numbers (`gpush_geometry::Model`) and shares no rule with the
//! planner. It checks overlap slice by slice, and sums capacity for every state. It finds the
//! states by adding one instance after another to the empty GPU.

use std::collections::HashMap;

use gpush_geometry::{ComputeProfile, GpuProfile, Model};

/// One (profile, placement) pair. A state of a GPU is a set of pairs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Pair {
    /// Position of the profile in the model.
    pub(crate) profile: usize,
    pub(crate) start: u8,
    pub(crate) size: u8,
}

/// A set of pairs, with one bit for the position of each pair.
pub(crate) type State = u64;

/// Count of each profile, four bits each.
pub(crate) type Multiset = u64;

/// Properties of a state, which are computed only once.
#[derive(Debug, Clone)]
pub(crate) struct Facts {
    pub(crate) state: State,
    pub(crate) multiset: Multiset,
    /// Room for later instances: of the pairs that are possible now, and of all pairs.
    pub(crate) room: (u64, u64),
    /// (start, profile id) of each instance, sorted.
    pub(crate) ranks: Vec<(u8, u32)>,
}

/// A GPU model and all its states.
#[derive(Debug)]
pub(crate) struct ModelStates {
    pub(crate) model: Model,
    pub(crate) pairs: Vec<Pair>,
    pub(crate) states: Vec<Facts>,
    pub(crate) index: HashMap<State, usize>,
    /// States of each multiset.
    pub(crate) by_multiset: HashMap<Multiset, Vec<usize>>,
}

impl ModelStates {
    pub(crate) fn of(key: &str) -> Self {
        let model = gpush_geometry::model(key).unwrap();
        let mut pairs = Vec::new();
        for (profile, p) in model.gi_profiles.iter().enumerate() {
            for &(start, size) in &p.placements {
                pairs.push(Pair { profile, start, size });
            }
        }
        assert!(pairs.len() <= 64 && model.gi_profiles.len() <= 16);
        let mut part = Self { model, pairs, states: Vec::new(), index: HashMap::new(), by_multiset: HashMap::new() };
        let mut found = Vec::new();
        part.walk(0, 0, &mut found);
        for state in found {
            let rooms = (0..part.pairs.len()).map(|pair| part.room_of(pair, state));
            let room = rooms.fold((0, 0), |sum, room| (sum.0 + room.0, sum.1 + room.1));
            let mut ranks: Vec<(u8, u32)> = part.profiles_in(state).map(|(pair, p)| (pair.start, p.id)).collect();
            ranks.sort_unstable();
            let multiset = part.profiles_in(state).map(|(pair, _)| 1 << (4 * pair.profile)).sum();
            part.index.insert(state, part.states.len());
            part.by_multiset.entry(multiset).or_default().push(part.states.len());
            part.states.push(Facts { state, multiset, room, ranks });
        }
        part
    }

    /// Finds `state` and all possible states that add pairs at positions `from` and higher.
    fn walk(&self, state: State, from: usize, found: &mut Vec<State>) {
        found.push(state);
        for n in from..self.pairs.len() {
            if self.is_possible(state | 1 << n) {
                self.walk(state | 1 << n, n + 1, found);
            }
        }
    }

    /// Returns the room of one pair: the square of its memory slices, divided by 4 for each instance in the way, and once
    /// more if the pair does not fit even without these instances. The result is in units of 4⁻⁸ square memory slices.
    fn room_of(&self, pair: usize, state: State) -> (u64, u64) {
        let overlaps = |other: usize| {
            let [one, other] = [pair, other].map(|n| self.pairs[n].start..self.pairs[n].start + self.pairs[n].size);
            one.start < other.end && other.start < one.end
        };
        let in_the_way: Vec<usize> = members(state).filter(|other| overlaps(*other)).collect();
        let rest = in_the_way.iter().fold(state, |rest, other| rest & !(1 << other));
        let lacks = usize::from(!self.is_possible(rest | 1 << pair));
        let sizes = self.pairs.iter().filter(|other| other.profile == self.pairs[pair].profile).map(|other| other.size);
        let memory = u64::from(sizes.min().unwrap());
        let divisions = in_the_way.len() + lacks;
        let now = if divisions == 0 { memory * memory } else { 0 };
        (now, memory * memory * 4_u64.pow(8 - divisions as u32))
    }

    fn profiles_in(&self, state: State) -> impl Iterator<Item = (Pair, &GpuProfile)> {
        members(state).map(|n| (self.pairs[n], &self.model.gi_profiles[self.pairs[n].profile]))
    }

    fn is_possible(&self, state: State) -> bool {
        let mut users_of_slice = [0; 16];
        let mut numbers = [0; 16];
        let mut compute = 0;
        let mut engines = [0_u32; 5];
        for (pair, profile) in self.profiles_in(state) {
            for slice in pair.start..pair.start + pair.size {
                users_of_slice[usize::from(slice)] += 1;
            }
            numbers[pair.profile] += 1;
            compute += profile.slices;
            for (sum, one) in engines.iter_mut().zip(row(profile)) {
                *sum += one;
            }
        }
        let whole = self.model.gi_profiles.iter().find(|p| p.slices == self.model.compute_slices).unwrap();
        users_of_slice.iter().all(|users| *users <= 1)
            && self.model.gi_profiles.iter().zip(numbers).all(|(p, n)| n <= p.max)
            && compute <= self.model.compute_slices
            && engines.iter().zip(row(whole)).all(|(sum, have)| *sum <= have)
            && state.count_ones() <= 8
    }

    /// Returns the number of memory slices of a set of pairs.
    pub(crate) fn slices(&self, state: State) -> u32 {
        members(state).map(|n| u32::from(self.pairs[n].size)).sum()
    }

    /// Returns the position of a pair.
    pub(crate) fn pair(&self, profile_id: u32, start: u8, size: u8) -> usize {
        self.pairs
            .iter()
            .position(|p| (self.model.gi_profiles[p.profile].id, p.start, p.size) == (profile_id, start, size))
            .unwrap()
    }

    /// Returns every feasible multiset, in a fixed order.
    pub(crate) fn multisets(&self) -> Vec<Multiset> {
        let mut all: Vec<Multiset> = self.by_multiset.keys().copied().collect();
        all.sort_unstable();
        all
    }
}

fn row(profile: &GpuProfile) -> [u32; 5] {
    let e = profile.engines;
    [e.copy, e.decoder, e.encoder, e.jpeg, e.ofa].map(u32::from)
}

/// Returns the positions of the members of a set.
pub(crate) fn members(mut set: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let next = (set != 0).then(|| set.trailing_zeros() as usize)?;
        set &= set - 1;
        Some(next)
    })
}

/// Returns the profiles of a multiset, each as often as it occurs.
pub(crate) fn profiles(multiset: Multiset) -> impl Iterator<Item = usize> {
    (0..16).flat_map(move |p| std::iter::repeat_n(p, (multiset >> (4 * p) & 15) as usize))
}

/// Returns every subset of a set, including the empty set and the set itself.
pub(crate) fn subsets(set: u64) -> impl Iterator<Item = u64> {
    let mut next = Some(0_u64);
    std::iter::from_fn(move || {
        let this = next?;
        let after = this.wrapping_sub(set) & set;
        next = (after != 0).then_some(after);
        Some(this)
    })
}

/// Returns a random subset. Each member is in the subset with probability 1/`n`.
pub(crate) fn some_of(set: u64, n: usize, rng: &mut fastrand::Rng) -> u64 {
    members(set).filter(|_| rng.usize(..n) == 0).map(|bit| 1 << bit).sum()
}

/// A compute instance in its GPU instance: position of its profile, start, size.
pub(crate) type Slot = (usize, u8, u8);

/// Returns every possible combination of compute instances in a GPU instance of the profile.
pub(crate) fn compute_states(profile: &GpuProfile) -> Vec<Vec<Slot>> {
    let slots: Vec<Slot> = profile
        .compute
        .iter()
        .enumerate()
        .flat_map(|(n, c)| c.placements.iter().map(move |&(start, size)| (n, start, size)))
        .collect();
    let mut found = Vec::new();
    walk_compute(profile, &slots, &mut Vec::new(), &mut found);
    found
}

fn walk_compute(profile: &GpuProfile, from: &[Slot], held: &mut Vec<Slot>, found: &mut Vec<Vec<Slot>>) {
    found.push(held.clone());
    for (n, slot) in from.iter().enumerate() {
        held.push(*slot);
        if is_possible_compute(profile, held) {
            walk_compute(profile, &from[n + 1..], held, found);
        }
        held.pop();
    }
}

pub(crate) fn is_possible_compute(profile: &GpuProfile, held: &[Slot]) -> bool {
    let mut users_of_slot = [0; 16];
    for (_, start, size) in held {
        for slot in *start..start + size {
            users_of_slot[usize::from(slot)] += 1;
        }
    }
    let of = |c: &ComputeProfile| held.iter().filter(|(n, ..)| profile.compute[*n].id == c.id).count();
    let slices: u8 = held.iter().map(|(n, ..)| profile.compute[*n].slices).sum();
    users_of_slot.iter().all(|users| *users <= 1)
        && profile.compute.iter().all(|c| of(c) <= usize::from(c.max))
        && slices <= profile.slices
        && held.len() <= 8
}
