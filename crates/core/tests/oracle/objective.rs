//! The objective of the planner as data, so that tests can show which mistakes they would detect.
//!
//! A mutant is the planner's objective with one rule inverted, dropped, or swapped with the next
//! rule. For generated cases, the test compares the planner's plan with the oracle's exhaustive
//! search. For each mutant, it counts the cases that have a different best plan under the mutant.
//! On each of these cases, a planner with that mistake would fail.

use std::cmp::{Ordering, Reverse};
use std::fmt;

use gpush_core::geometry::Geometry;
use gpush_core::plan::plan_protecting;

use crate::model_states::{ModelStates, compute_states};
use crate::splits::Sample;

/// Counts of destroyed objects: in use, with an MPS daemon, GPU instances, compute instances in kept GPU
/// instances, memory slices.
pub(crate) type Cost = [u32; 5];

/// The values by which plans are compared: destroyed objects, remaining placements, and the start
/// and profile id of each GPU instance.
pub(crate) type PlanValue = (Cost, Reverse<(u64, u64)>, Vec<(u8, u32)>);

/// A property of plans. For `Room`, more is better. For all other properties, less is better.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Criterion {
    /// Destroyed instances in use. This is a hard constraint, so it comes first in every objective.
    InUse,
    /// Destroyed compute instances with an MPS daemon.
    MpsDaemons,
    /// Destroyed GPU instances.
    GpuInstances,
    /// Destroyed compute instances in GPU instances that are kept.
    ComputeInstances,
    /// Destroyed memory slices.
    MemorySlices,
    /// Room for later requests.
    Room,
    /// Start and profile id of each GPU instance.
    Rank,
}

/// The rules of the planner's objective, in order.
const RULES: [Criterion; 6] = [
    Criterion::MpsDaemons,
    Criterion::GpuInstances,
    Criterion::ComputeInstances,
    Criterion::MemorySlices,
    Criterion::Room,
    Criterion::Rank,
];

/// Criteria, in order. The flag says whether the criterion is inverted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Objective(Vec<(Criterion, bool)>);

impl Objective {
    /// Returns the planner's objective.
    pub(crate) fn planners() -> Self {
        let rules = RULES.iter().map(|rule| (*rule, false));
        Self([(Criterion::InUse, false)].into_iter().chain(rules).collect())
    }

    /// Compares two plans. `Less` means that the first plan is better.
    pub(crate) fn compare(&self, a: &PlanValue, b: &PlanValue) -> Ordering {
        let by = |criterion| match criterion {
            Criterion::Room => a.1.cmp(&b.1),
            Criterion::Rank => a.2.cmp(&b.2),
            toll => compare_cost(toll, &a.0, &b.0),
        };
        self.first_difference(by)
    }

    /// Compares only the destroyed objects.
    pub(crate) fn compare_costs(&self, a: &Cost, b: &Cost) -> Ordering {
        self.first_difference(|criterion| compare_cost(criterion, a, b))
    }

    fn first_difference(&self, by: impl Fn(Criterion) -> Ordering) -> Ordering {
        let ordered = |(criterion, flipped): &(Criterion, bool)| match flipped {
            true => by(*criterion).reverse(),
            false => by(*criterion),
        };
        self.0.iter().map(ordered).find(|order| *order != Ordering::Equal).unwrap_or(Ordering::Equal)
    }
}

fn compare_cost(criterion: Criterion, a: &Cost, b: &Cost) -> Ordering {
    let at = match criterion {
        Criterion::InUse => 0,
        Criterion::MpsDaemons => 1,
        Criterion::GpuInstances => 2,
        Criterion::ComputeInstances => 3,
        Criterion::MemorySlices => 4,
        Criterion::Room | Criterion::Rank => return Ordering::Equal,
    };
    a[at].cmp(&b[at])
}

/// A mistake in the objective.
#[derive(Debug, Clone, Copy)]
enum Mutation {
    Flipped(Criterion),
    Dropped(Criterion),
    Swapped(Criterion, Criterion),
}

impl fmt::Display for Mutation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Flipped(rule) => write!(f, "{rule:?} flipped"),
            Self::Dropped(rule) => write!(f, "{rule:?} dropped"),
            Self::Swapped(first, second) => write!(f, "{first:?} and {second:?} swapped"),
        }
    }
}

impl Mutation {
    fn all() -> Vec<Self> {
        let each = RULES.iter().flat_map(|rule| [Self::Flipped(*rule), Self::Dropped(*rule)]);
        each.chain(RULES.windows(2).map(|two| Self::Swapped(two[0], two[1]))).collect()
    }

    fn of(self, objective: &Objective) -> Objective {
        let mut rules = objective.0.clone();
        let position = |rule| objective.0.iter().position(|(known, _)| *known == rule).unwrap();
        match self {
            Self::Flipped(rule) => rules[position(rule)].1 = true,
            Self::Dropped(rule) => {
                rules.remove(position(rule));
            }
            Self::Swapped(first, second) => rules.swap(position(first), position(second)),
        }
        Objective(rules)
    }
}

/// Returns whether a planner with the objective of the mutant could return a plan that differs from
/// the right plan.
fn detects(mutant: &Objective, right: &PlanValue, finals: &[PlanValue]) -> bool {
    // If the other plan is equally good under the mutant, the mutant may return either plan.
    finals.iter().any(|other| match mutant.compare(other, right) {
        Ordering::Less => true,
        Ordering::Equal => other != right,
        Ordering::Greater => false,
    })
}

/// Plans samples on one GPU model. Counts, for each mutation, the samples that detect it.
fn count_detections(key: &str, samples: usize, seed: u64) -> Vec<(Mutation, usize)> {
    let part = ModelStates::of(key);
    let geometry = Geometry::of_model(&part.model);
    let states: Vec<_> = part.model.gi_profiles.iter().map(compute_states).collect();
    let objective = Objective::planners();
    let mut counts: Vec<_> = Mutation::all().into_iter().map(|mutation| (mutation, 0)).collect();
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut planned = 0;
    for _ in 0..samples {
        let sample = Sample::random(&part, &states, &mut rng);
        let (instances, holds) = sample.instances(&part);
        let ways = sample.all_assignment_costs(&part, &states);
        let finals = sample.finals(&part, &ways, &objective, false);
        let Some(right) = finals.iter().min_by(|a, b| objective.compare(a, b)) else { continue };
        if right.0[0] > 0 {
            // The sample is blocked, so there is no plan to compare.
            continue;
        }
        let plan = plan_protecting(&geometry, &instances, &sample.target(&part), &holds).unwrap();
        assert_eq!(&sample.execute(&part, &plan), right, "{key}: {sample:?} {plan:?}");
        planned += 1;
        for (mutation, count) in &mut counts {
            let mutant = mutation.of(&objective);
            let finals = sample.finals(&part, &ways, &mutant, false);
            *count += usize::from(detects(&mutant, right, &finals));
        }
    }
    println!("{key}: {samples} samples, {planned} planned");
    counts
}

/// Minimum number of cases that must detect each mutation, on all GPU models together.
const FEWEST: usize = 10;

#[test]
fn each_rule_of_the_objective_decides_cases() {
    let mut total: Vec<(Mutation, usize)> = Mutation::all().into_iter().map(|mutation| (mutation, 0)).collect();
    for (seed, key) in ["a30-24", "a100-80", "h100-80-sxm", "rtxpro6000-96"].into_iter().enumerate() {
        for ((_, sum), (_, count)) in total.iter_mut().zip(count_detections(key, 8_000, seed as u64)) {
            *sum += count;
        }
    }
    for (mutation, count) in &total {
        println!("{mutation}: noticed by {count} cases");
    }
    for (mutation, count) in &total {
        assert!(*count >= FEWEST, "{mutation}: noticed by {count} cases only");
    }
}
