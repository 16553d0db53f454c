//! Compute instances within GPU instances, and MPS daemons on these compute instances. The oracle
//! searches random samples exhaustively.
//!
//! The oracle tries every final state of the GPU instances, and every assignment of their
//! placements to the requested GPU instances. For each existing GPU instance, it tries every final
//! state of the compute instances. The objective (`objective`) determines the best result.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use gpush_api::{ComputeInstance, GpuInstance, InstanceStep, Placement, Refusal, TargetUuid};
use gpush_core::geometry::Geometry;
use gpush_core::plan::{Plan, ProtectedInstances, RequestedCompute, RequestedInstance, Target, plan_protecting};

use crate::model_states::{ModelStates, Multiset, Slot, State, compute_states, is_possible_compute, members, profiles};
use crate::objective::{Cost, Objective, PlanValue};
use crate::whole::Tally;
use crate::wire::{gi_of, pair_of, process};

/// Requested compute instances of one GPU instance. For each: the index of its profile in the list
/// of profiles, and its fixed start, if any.
type Split = Vec<(usize, Option<u8>)>;

/// `tolls[placement][request]`: the least cost of assigning the placement to the requested GPU
/// instance; `None` if the request does not fit there.
type Costs = Vec<Vec<Option<Cost>>>;

fn sum(a: Cost, b: Cost) -> Cost {
    std::array::from_fn(|n| a[n] + b[n])
}

#[derive(Debug, Clone)]
struct ExistingCompute {
    slot: Slot,
    busy: bool,
    has_daemon: bool,
}

#[derive(Debug, Clone, Default)]
struct ExistingGpuInstance {
    compute: Vec<ExistingCompute>,
    /// Whether the driver reports a process for the GPU instance, but for none of its compute
    /// instances.
    busy: bool,
}

/// One GPU with instances, processes and leases, and a request for it.
#[derive(Debug)]
pub(crate) struct Sample {
    state: State,
    /// The existing GPU instances, by the position of their pair.
    standing: Vec<ExistingGpuInstance>,
    multiset: Multiset,
    /// Profile position, fixed start and compute instances of each requested GPU instance.
    wanted: Vec<(usize, Option<u8>, Split)>,
}

impl Sample {
    pub(crate) fn random(part: &ModelStates, states: &[Vec<Vec<Slot>>], rng: &mut fastrand::Rng) -> Self {
        let state = part.states[rng.usize(..part.states.len())].state;
        let mut standing = vec![ExistingGpuInstance::default(); part.pairs.len()];
        let (quiet, unshared) = (rng.usize(..2) == 0, rng.usize(..2) == 0);
        for pair in members(state) {
            let compute = rng.choice(&states[part.pairs[pair].profile]).unwrap().clone();
            let stand = |slot| ExistingCompute {
                slot,
                busy: !quiet && rng.usize(..4) == 0,
                has_daemon: !unshared && rng.usize(..4) == 0,
            };
            let compute = compute.into_iter().map(stand).collect();
            standing[pair] = ExistingGpuInstance { compute, busy: !quiet && rng.usize(..10) == 0 };
        }
        // Most targets have exactly or almost the same profiles as the state, so that many
        // instances can be kept.
        let own = part.states[part.index[&state]].multiset;
        let multiset = match rng.usize(..4) {
            0 => *rng.choice(&part.multisets()).unwrap(),
            1 => own,
            _ => neighbour(part, own, rng),
        };
        let wanted = profiles(multiset)
            .map(|p| {
                let here: Vec<usize> = members(state).filter(|n| part.pairs[*n].profile == p).collect();
                let slots: Vec<Slot> = if !here.is_empty() && rng.usize(..2) == 0 {
                    standing[*rng.choice(&here).unwrap()].compute.iter().map(|c| c.slot).collect()
                } else {
                    rng.choice(&states[p]).unwrap().clone()
                };
                let slots =
                    slots.into_iter().map(|(n, start, _)| (n, (rng.usize(..6) == 0).then_some(start))).collect();
                let start =
                    (!here.is_empty() && rng.usize(..8) == 0).then(|| part.pairs[*rng.choice(&here).unwrap()].start);
                (p, start, slots)
            })
            .collect();
        Self { state, standing, multiset, wanted }
    }

    pub(crate) fn instances(&self, part: &ModelStates) -> (Vec<GpuInstance>, ProtectedInstances) {
        let mut daemons = BTreeSet::new();
        let processes = |busy: bool, pid| if busy { vec![process(pid)] } else { Vec::new() };
        let instances: Vec<GpuInstance> = members(self.state)
            .map(|n| {
                let (pair, standing) = (part.pairs[n], &self.standing[n]);
                let profile = &part.model.gi_profiles[pair.profile];
                let compute = standing.compute.iter().enumerate().map(|(id, c)| {
                    let (of, start, size) = c.slot;
                    let uuid = TargetUuid::from(format!("MIG-{n}-{id}"));
                    if c.has_daemon {
                        daemons.insert(uuid.clone());
                    }
                    ComputeInstance {
                        id: id as u32,
                        profile_id: profile.compute[of].id,
                        profile: profile.compute[of].name.clone(),
                        placement: Some(Placement { start, size }),
                        uuid: Some(uuid),
                        processes: processes(c.busy, 10 + id as u32),
                    }
                });
                GpuInstance {
                    id: gi_of(n),
                    profile_id: profile.id,
                    profile: profile.name.clone(),
                    placement: Placement { start: pair.start, size: pair.size },
                    memory: None,
                    compute: compute.collect(),
                    processes: processes(standing.busy, 9),
                }
            })
            .collect();
        let holds = ProtectedInstances::default().with_mps_daemons(&instances, &daemons);
        (instances, holds)
    }

    pub(crate) fn target(&self, part: &ModelStates) -> Target {
        let wanted = |(p, start, split): &(usize, Option<u8>, Split)| {
            let profile = &part.model.gi_profiles[*p];
            let at = |start: &u8, placements: &[(u8, u8)]| {
                let (start, size) = *placements.iter().find(|(s, _)| s == start).unwrap();
                Placement { start, size }
            };
            let compute = split.iter().map(|(c, start)| RequestedCompute {
                profile_id: profile.compute[*c].id,
                at: start.map(|s| at(&s, &profile.compute[*c].placements)),
                profile: profile.compute[*c].name.clone(),
            });
            RequestedInstance {
                profile_id: profile.id,
                at: start.map(|s| at(&s, &profile.placements)),
                compute: compute.collect(),
                profile: profile.name.clone(),
            }
        };
        Target { instances: self.wanted.iter().map(wanted).collect() }
    }

    fn in_use(&self, pair: usize, compute: &ExistingCompute) -> bool {
        compute.busy || self.standing[pair].busy
    }

    /// Returns the cost of destroying these compute instances of a GPU instance.
    fn cost_of<'a>(&self, pair: usize, destroyed: impl Iterator<Item = &'a ExistingCompute>) -> Cost {
        destroyed.fold([0; 5], |toll, c| sum(toll, [u32::from(self.in_use(pair, c)), u32::from(c.has_daemon), 0, 0, 0]))
    }

    /// Returns the cost of destroying a whole GPU instance.
    fn cost_of_all(&self, part: &ModelStates, pair: usize) -> Cost {
        let standing = &self.standing[pair];
        let charged_to_itself = u32::from(standing.busy && standing.compute.is_empty());
        sum(self.cost_of(pair, standing.compute.iter()), [charged_to_itself, 0, 1, 0, u32::from(part.pairs[pair].size)])
    }

    /// Returns the costs of all ways to assign the placement of `pair` to a requested GPU instance;
    /// empty if the requested compute instances do not fit.
    fn assignment_costs(
        &self,
        part: &ModelStates,
        states: &[Vec<Vec<Slot>>],
        pair: usize,
        split: &Split,
    ) -> BTreeSet<Cost> {
        let ends = states[part.pairs[pair].profile].iter().filter(|end| is_split(end, split));
        if self.state >> pair & 1 == 0 {
            return ends.map(|_| [0; 5]).take(1).collect();
        }
        let standing = &self.standing[pair].compute;
        ends.map(|end| {
            let destroyed = || standing.iter().filter(|c| !end.contains(&c.slot));
            // If the driver reports a process for the GPU instance itself, no compute instance may
            // be added to it.
            let only_adds = destroyed().count() == 0 && end.len() > standing.len();
            let in_use = u32::from(only_adds && self.standing[pair].busy);
            sum(self.cost_of(pair, destroyed()), [in_use, 0, 0, destroyed().count() as u32, 0])
        })
        .collect()
    }

    /// Returns the costs of all ways to assign a placement to a requested GPU instance, for each
    /// placement and each requested GPU instance.
    pub(crate) fn all_assignment_costs(
        &self,
        part: &ModelStates,
        states: &[Vec<Vec<Slot>>],
    ) -> Vec<Vec<BTreeSet<Cost>>> {
        let of = |pair: usize| {
            let ways = |(profile, _, split): &(usize, Option<u8>, Split)| match *profile == part.pairs[pair].profile {
                true => self.assignment_costs(part, states, pair, split),
                false => BTreeSet::new(),
            };
            self.wanted.iter().map(ways).collect()
        };
        (0..part.pairs.len()).map(of).collect()
    }

    /// Returns the best cost for each assignment. With `remakes`, an instance may also be destroyed
    /// and created again at its placement. Under the planner's objective, such a replacement is
    /// never better.
    fn best_assignment_costs(
        &self,
        part: &ModelStates,
        ways: &[Vec<BTreeSet<Cost>>],
        objective: &Objective,
        remakes: bool,
    ) -> Costs {
        let best = |pair: usize, tolls: &BTreeSet<Cost>| -> Option<Cost> {
            let stands = self.state >> pair & 1 == 1;
            let again = (remakes && stands && !tolls.is_empty()).then(|| self.cost_of_all(part, pair));
            tolls.iter().copied().chain(again).min_by(|a, b| objective.compare_costs(a, b))
        };
        let of = |(pair, wanted): (usize, &Vec<BTreeSet<Cost>>)| wanted.iter().map(|tolls| best(pair, tolls)).collect();
        ways.iter().enumerate().map(of).collect()
    }

    /// Returns the least cost of assigning the placements of `pairs` to the requests that are not
    /// `served` yet.
    fn assign(
        &self,
        part: &ModelStates,
        objective: &Objective,
        tolls: &Costs,
        pairs: &[usize],
        served: u32,
    ) -> Option<Cost> {
        let Some((pair, rest)) = pairs.split_first() else { return Some([0; 5]) };
        let place = part.pairs[*pair];
        let mut best: Option<Cost> = None;
        for (n, (profile, start, split)) in self.wanted.iter().enumerate() {
            let twin_waits =
                (0..n).any(|m| served >> m & 1 == 0 && self.wanted[m] == (*profile, *start, split.clone()));
            let suits = *profile == place.profile && start.is_none_or(|s| s == place.start);
            if served >> n & 1 == 1 || twin_waits || !suits {
                continue;
            }
            let Some(toll) = tolls[*pair][n] else { continue };
            let Some(others) = self.assign(part, objective, tolls, rest, served | 1 << n) else { continue };
            best = best.into_iter().chain([sum(toll, others)]).min_by(|a, b| objective.compare_costs(a, b));
        }
        best
    }

    /// Returns, for each final state, the value of the best way to reach it.
    pub(crate) fn finals(
        &self,
        part: &ModelStates,
        ways: &[Vec<BTreeSet<Cost>>],
        objective: &Objective,
        remakes: bool,
    ) -> Vec<PlanValue> {
        let tolls = self.best_assignment_costs(part, ways, objective, remakes);
        let worth = |n: &usize| {
            let end = &part.states[*n];
            let pairs: Vec<usize> = members(end.state).collect();
            let mut toll = self.assign(part, objective, &tolls, &pairs, 0)?;
            for gone in members(self.state & !end.state) {
                toll = sum(toll, self.cost_of_all(part, gone));
            }
            Some((toll, Reverse(end.room), end.ranks.clone()))
        };
        part.by_multiset[&self.multiset].iter().filter_map(worth).collect()
    }

    /// Returns the best value under the planner's objective; `None` if no final state is possible.
    fn best(&self, part: &ModelStates, states: &[Vec<Vec<Slot>>]) -> Option<PlanValue> {
        let objective = Objective::planners();
        let finals = self.finals(part, &self.all_assignment_costs(part, states), &objective, true);
        finals.into_iter().min_by(|a, b| objective.compare(a, b))
    }

    /// Executes the plan step by step, checks the result, and returns its value.
    pub(crate) fn execute(&self, part: &ModelStates, plan: &Plan) -> PlanValue {
        let mut state = self.state;
        let mut slots: Vec<BTreeSet<Slot>> =
            self.standing.iter().map(|s| s.compute.iter().map(|c| c.slot).collect()).collect();
        let mut lost: Vec<BTreeSet<usize>> = vec![BTreeSet::new(); part.pairs.len()];
        let mut toll = [0; 5];
        for step in &plan.steps {
            match step {
                InstanceStep::DestroyCompute { gi, ci, .. } => {
                    let pair = pair_of(*gi);
                    let standing = &self.standing[pair].compute[*ci as usize];
                    assert!(slots[pair].remove(&standing.slot) && lost[pair].insert(*ci as usize), "{self:?}");
                    toll = sum(toll, self.cost_of(pair, [standing].into_iter()));
                }
                InstanceStep::DestroyGpuInstance { gi, .. } => {
                    let pair = pair_of(*gi);
                    assert!(slots[pair].is_empty() && state >> pair & 1 == 1, "{self:?}");
                    state &= !(1 << pair);
                    lost[pair].clear();
                    toll = sum(toll, [0, 0, 1, 0, u32::from(part.pairs[pair].size)]);
                    let standing = &self.standing[pair];
                    assert!(!standing.busy, "{self:?}: in use");
                }
                InstanceStep::CreateGpuInstance { profile_id, placement, .. } => {
                    state |= 1 << part.pair(*profile_id, placement.start, placement.size);
                    assert!(part.index.contains_key(&state), "{self:?}: {state:x} can't be");
                }
                InstanceStep::CreateCompute { gi_placement, profile_id, placement, .. } => {
                    let pair = members(state).find(|n| part.pairs[*n].start == gi_placement.start).unwrap();
                    assert!(!self.standing[pair].busy, "{self:?}: in use");
                    let profile = &part.model.gi_profiles[part.pairs[pair].profile];
                    let of = profile.compute.iter().position(|c| c.id == *profile_id).unwrap();
                    let (start, size) = match placement {
                        Some(placement) => (placement.start, placement.size),
                        None if profile.compute[of].placements.len() == 1 => profile.compute[of].placements[0],
                        None => panic!("{self:?}: left to the driver where it matters"),
                    };
                    assert!(slots[pair].insert((of, start, size)), "{self:?}");
                    let now: Vec<Slot> = slots[pair].iter().copied().collect();
                    assert!(is_possible_compute(profile, &now), "{self:?}: {now:?} can't be");
                }
            }
        }
        toll[3] = lost.iter().map(|l| l.len() as u32).sum();
        // Each requested GPU instance is at the placement in the plan, with exactly its compute
        // instances.
        let mut served = 0;
        for ((profile, start, split), placement) in self.wanted.iter().zip(&plan.placements) {
            let id = part.model.gi_profiles[*profile].id;
            let pair = part.pair(id, placement.start, placement.size);
            served |= 1 << pair;
            assert!(start.is_none_or(|s| s == placement.start), "{self:?}");
            assert!(is_split(&slots[pair].iter().copied().collect::<Vec<_>>(), split), "{self:?}: {slots:?}");
        }
        assert_eq!(served, state, "{self:?}");
        let end = &part.states[part.index[&state]];
        (toll, Reverse(end.room), end.ranks.clone())
    }
}

/// Returns a feasible target that differs from the state in one or two profiles. For such a target,
/// an instance must be destroyed or created elsewhere, and several choices are possible.
fn neighbour(part: &ModelStates, own: Multiset, rng: &mut fastrand::Rng) -> Multiset {
    for _ in 0..40 {
        let mut multiset = own;
        if own != 0 && rng.usize(..2) == 0 {
            let there: Vec<usize> = profiles(own).collect();
            multiset -= 1 << (4 * rng.choice(&there).unwrap());
        }
        for _ in 0..=rng.usize(..2) {
            multiset += 1 << (4 * rng.usize(..part.model.gi_profiles.len()));
        }
        if part.by_multiset.contains_key(&multiset) {
            return multiset;
        }
    }
    own
}

/// Returns whether these compute instances are exactly the requested compute instances.
fn is_split(end: &[Slot], split: &Split) -> bool {
    let mut left: Vec<Slot> = end.to_vec();
    // Requests with a fixed start are matched first, because other requests accept any start.
    let mut wants: Vec<_> = split.clone();
    wants.sort_by_key(|(_, start)| start.is_none());
    for (profile, start) in wants {
        match left.iter().position(|(p, s, _)| *p == profile && start.is_none_or(|start| start == *s)) {
            Some(n) => left.swap_remove(n),
            None => return false,
        };
    }
    left.is_empty()
}

/// Compares samples on one GPU model.
pub(crate) fn sample(key: &str, samples: usize, seed: u64) -> Tally {
    let part = ModelStates::of(key);
    let geometry = Geometry::of_model(&part.model);
    let states: Vec<Vec<Vec<Slot>>> = part.model.gi_profiles.iter().map(compute_states).collect();
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut tally = Tally::default();
    for _ in 0..samples {
        let sample = Sample::random(&part, &states, &mut rng);
        let (instances, holds) = sample.instances(&part);
        let target = sample.target(&part);
        let best = sample.best(&part, &states);
        match (best, plan_protecting(&geometry, &instances, &target, &holds)) {
            (Some(best), Ok(plan)) => {
                tally.planned += 1;
                assert_eq!(sample.execute(&part, &plan), best, "{key}: {sample:?} {plan:?}");
                assert_eq!(best.0[0], 0, "{key}: {sample:?}");
            }
            (Some((toll, ..)), Err(Refusal::Blocked { blockers })) => {
                tally.blocked += 1;
                assert_eq!(blockers.len() as u32, toll[0], "{key}: {sample:?}: {blockers:?}");
                assert!(blockers.iter().all(|b| !b.holders.is_empty()), "{key}: {sample:?}");
            }
            (None, Err(refusal)) => {
                tally.impossible += 1;
                assert!(!matches!(refusal, Refusal::Blocked { .. }), "{key}: {sample:?}: {refusal:?}");
            }
            (oracle, planner) => panic!("{key}: {sample:?}: oracle {oracle:?}, planner {planner:?}"),
        }
    }
    let splits: usize = states.iter().map(Vec::len).sum();
    println!("{key}: {splits} compute states; {samples} samples: {tally:?}");
    tally
}
