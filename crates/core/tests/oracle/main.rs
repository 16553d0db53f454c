//! Tests the planner against an oracle that searches exhaustively. The planner and the oracle must
//! find the same optimum.
//!
//! The oracle and the planner share only the numbers of the geometry data. Every test prints how
//! many cases it compared.

#![allow(clippy::unwrap_used, reason = "a test that meets nothing fails")]

mod daemons;
mod model_states;
mod objective;
mod sequences;
mod splits;
mod whole;
mod wire;

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use gpush_core::geometry::Geometry;
use gpush_core::plan::Target;

use model_states::{ModelStates, some_of, subsets};
use whole::{Case, Tally, compare};

/// Tests every state of a GPU model, with every subset of its instances in use, and with every
/// feasible target.
fn exhaust(key: &str, matchings: bool) -> Tally {
    let part = ModelStates::of(key);
    let geometry = Geometry::of_model(&part.model);
    let targets: Vec<(u64, Target)> = part.multisets().into_iter().map(|m| (m, wire::target(&part, m, 0))).collect();
    let next = AtomicUsize::new(0);
    let total = Mutex::new(Tally::default());
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(2, usize::from) {
            scope.spawn(|| {
                let mut tally = Tally::default();
                while let Some(facts) = part.states.get(next.fetch_add(1, Ordering::Relaxed)) {
                    for busy in subsets(facts.state) {
                        let instances = wire::instances(&part, facts.state, busy);
                        for (multiset, target) in &targets {
                            let case = Case { state: facts.state, busy, multiset: *multiset, fixed: 0 };
                            compare(&part, &geometry, &instances, target, case, matchings, &mut tally);
                        }
                    }
                }
                total.lock().unwrap().add(tally);
            });
        }
    });
    let tally = total.into_inner().unwrap();
    println!(
        "{key}: {} states, {} targets, {} cases: {} planned, {} blocked",
        part.states.len(),
        targets.len(),
        tally.all(),
        tally.planned,
        tally.blocked
    );
    tally
}

#[test]
fn a30_plans_match_the_oracle_with_every_matching() {
    let tally = exhaust("a30-24", true);
    assert!(tally.planned > 0 && tally.blocked > 0 && tally.impossible == 0);
}

#[test]
fn a100_plans_match_the_oracle() {
    let tally = exhaust("a100-80", false);
    assert!(tally.planned > 0 && tally.blocked > 0 && tally.impossible == 0);
}

#[test]
fn targets_of_up_to_eight_instances_match_the_oracle() {
    for key in ["a30-24", "a100-80", "h100-80-sxm"] {
        let part = ModelStates::of(key);
        let geometry = Geometry::of_model(&part.model);
        let mut tally = Tally::default();
        let mut rng = fastrand::Rng::with_seed(8);
        let mut wanted = vec![(0, 0, 0)];
        while let Some((multiset, from, instances)) = wanted.pop() {
            for state in [0, part.states[rng.usize(..part.states.len())].state] {
                let busy = some_of(state, 3, &mut rng);
                let case = Case { state, busy, multiset, fixed: 0 };
                let (standing, target) = (wire::instances(&part, state, busy), wire::target(&part, multiset, 0));
                compare(&part, &geometry, &standing, &target, case, false, &mut tally);
            }
            if instances < 8 {
                let profiles = part.model.gi_profiles.len();
                wanted.extend((from..profiles).map(|p| (multiset + (1 << (4 * p)), p, instances + 1)));
            }
        }
        println!("{key}: {} cases: {tally:?}", tally.all());
        assert!(tally.planned > 0 && tally.blocked > 0 && tally.impossible > 0);
    }
}

#[test]
fn random_sequences_match_the_oracle_on_every_family() {
    let mut total = Tally::default();
    let mut parts = 0;
    for (seed, key) in gpush_geometry::KEYS.iter().enumerate() {
        if gpush_geometry::model(key).unwrap().has_mig() {
            let tally = sequences::walk(key, 20_000, seed as u64);
            assert!(tally.planned > 1000 && tally.blocked > 1000 && tally.impossible > 1000, "{key}");
            total.add(tally);
            parts += 1;
        }
    }
    println!("{parts} parts, {} steps", total.all());
}

#[test]
fn sampled_splits_and_mps_daemons_match_the_oracle() {
    for (seed, key) in ["a30-24", "a100-80", "h100-80-sxm", "b200-180", "rtxpro6000-96"].into_iter().enumerate() {
        let tally = splits::sample(key, 60_000, seed as u64);
        assert!(tally.planned > 1000 && tally.blocked > 1000 && tally.impossible > 100, "{key}");
    }
}
