//! Whole GPU instances: compares the oracle's answer to a case with the planner's answer.

use std::cmp::Reverse;

use gpush_api::{GpuInstance, InstanceStep, Refusal};
use gpush_core::geometry::Geometry;
use gpush_core::plan::{Target, plan};

use crate::model_states::{ModelStates, Multiset, State, members, subsets};
use crate::wire::{gi_of, pair_of};

/// One case: the existing instances, the instances in use, the request, and the fixed placements.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Case {
    pub(crate) state: State,
    pub(crate) busy: State,
    pub(crate) multiset: Multiset,
    pub(crate) fixed: State,
}

/// Number of cases for each outcome.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    pub(crate) planned: u64,
    pub(crate) blocked: u64,
    pub(crate) impossible: u64,
}

impl Tally {
    pub(crate) fn all(self) -> u64 {
        self.planned + self.blocked + self.impossible
    }

    pub(crate) fn add(&mut self, other: Self) {
        self.planned += other.planned;
        self.blocked += other.blocked;
        self.impossible += other.impossible;
    }
}

/// The oracle's answer: the best final state, or the number of instances in use that block the
/// target.
#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    Final(State),
    Blocked(u32),
    Impossible,
}

/// Tries every final state. With `matchings`, also tries every choice of instances to keep,
/// although it is never better to keep fewer instances.
fn verdict(part: &ModelStates, case: Case, matchings: bool) -> Verdict {
    let finals = part.by_multiset.get(&case.multiset).map_or(&[][..], Vec::as_slice);
    let finals = || finals.iter().map(|n| &part.states[*n]).filter(|f| f.state & case.fixed == case.fixed);
    let mut best: Option<(_, State)> = None;
    for end in finals().filter(|f| f.state & case.busy == case.busy) {
        let most_kept = case.state & end.state;
        let spare = if matchings { most_kept & !case.busy } else { 0 };
        for not_kept in subsets(spare) {
            let destroyed = case.state & !(most_kept & !not_kept);
            let worth =
                (destroyed.count_ones(), part.slices(destroyed), Reverse(end.room), &end.ranks, not_kept.count_ones());
            if best.as_ref().is_none_or(|(worth_of_best, _)| worth < *worth_of_best) {
                best = Some((worth, end.state));
            }
        }
    }
    match best {
        Some(((.., not_kept), state)) => {
            assert_eq!(not_kept, 0, "keeping less is never better");
            Verdict::Final(state)
        }
        None => {
            finals().map(|f| (case.busy & !f.state).count_ones()).min().map_or(Verdict::Impossible, Verdict::Blocked)
        }
    }
}

/// Compares the oracle and the planner: both must agree on feasibility and on the optimum, and the
/// steps must be executable.
pub(crate) fn compare(
    part: &ModelStates,
    geometry: &Geometry,
    instances: &[GpuInstance],
    target: &Target,
    case: Case,
    matchings: bool,
    tally: &mut Tally,
) -> State {
    match (verdict(part, case, matchings), plan(geometry, instances, target)) {
        (Verdict::Final(end), Ok(plan)) => {
            tally.planned += 1;
            let carried_out = execute(part, case, &plan.steps);
            assert_eq!(carried_out, end, "{}: another final state: {case:x?}", part.model.key);
            assert!(members(case.state & end).all(|n| plan.keeps.contains(&gi_of(n))), "{case:x?}");
            assert_eq!(plan.keeps.len() as u32, (case.state & end).count_ones(), "{case:x?}");
            end
        }
        (Verdict::Blocked(fewest), Err(Refusal::Blocked { blockers })) => {
            tally.blocked += 1;
            assert_eq!(blockers.len() as u32, fewest, "{}: not the fewest: {case:x?}", part.model.key);
            let named: State = blockers.iter().map(|b| 1 << pair_of(b.gi)).sum();
            assert_eq!(named & !case.busy, 0, "{case:x?}");
            assert!(blockers.iter().all(|b| !b.holders.is_empty()));
            let idle = Case { busy: case.busy & !named, ..case };
            assert!(matches!(verdict(part, idle, false), Verdict::Final(_)), "{case:x?}: still blocked");
            case.state
        }
        (Verdict::Impossible, Err(refusal)) => {
            tally.impossible += 1;
            assert!(!matches!(refusal, Refusal::Blocked { .. }), "{case:x?}: {refusal:?}");
            case.state
        }
        (oracle, planner) => panic!("{}: {case:x?}: oracle {oracle:x?}, planner {planner:?}", part.model.key),
    }
}

/// Executes the steps. Every intermediate state must be possible. No step may destroy an instance
/// that is in use or that is part of the result.
fn execute(part: &ModelStates, case: Case, steps: &[InstanceStep]) -> State {
    let mut state = case.state;
    // GPU instances that have a compute instance.
    let mut whole = case.state;
    let mut created = 0;
    for step in steps {
        match step {
            InstanceStep::DestroyCompute { gi, ci, .. } => {
                assert_eq!((*ci, whole >> pair_of(*gi) & 1), (0, 1), "{case:x?}");
                assert_eq!(case.busy >> pair_of(*gi) & 1, 0, "{case:x?}: in use");
                whole &= !(1 << pair_of(*gi));
            }
            InstanceStep::DestroyGpuInstance { gi, .. } => {
                let bit = 1 << pair_of(*gi);
                assert!(state & bit != 0 && whole & bit == 0 && created == 0, "{case:x?}");
                state &= !bit;
            }
            InstanceStep::CreateGpuInstance { profile_id, placement, .. } => {
                let bit = 1 << part.pair(*profile_id, placement.start, placement.size);
                assert!(state & bit == 0, "{case:x?}");
                state |= bit;
                created |= bit;
                assert!(part.index.contains_key(&state), "{case:x?}: {state:x} can't be");
            }
            InstanceStep::CreateCompute { gi_placement, profile, placement, .. } => {
                let pair = members(created).find(|n| part.pairs[*n].start == gi_placement.start).unwrap();
                assert_eq!(*profile, part.model.gi_profiles[part.pairs[pair].profile].name);
                assert!(placement.is_none() && whole >> pair & 1 == 0, "{case:x?}");
                whole |= 1 << pair;
            }
        }
    }
    assert_eq!(whole, state, "{case:x?}: every GPU instance has its compute instance");
    // No instance may be destroyed and then created again.
    assert_eq!(created & case.state, 0, "{case:x?}");
    state
}
