//! MPS daemons on MIG devices, in the requests that gpushd plans. The oracle enumerates all plans of
//! a request: every final state, and every choice of the instances that the plan keeps.
//!
//! In contrast to `splits`, the cases go through [`gpush_core::desired::plan_host`]. So the test
//! also detects a planner that does not know the daemons of the GPU.

use std::cmp::Reverse;
use std::sync::Arc;

use gpush_api::{Gpu, GpuPlan, InstanceStep, LayoutSource, PlanRequest};
use gpush_core::config::Config;
use gpush_core::desired::plan_host;
use gpush_core::geometry::profiles_of_model;

use crate::model_states::{ModelStates, Multiset, State, members, profiles, some_of, subsets};
use crate::wire::{self, pair_of};

/// The values by which plans are compared: destroyed instances with an MPS daemon, destroyed GPU
/// instances, destroyed memory slices, remaining placements, and the start and profile id of each
/// instance.
type Value<'a> = (u32, u32, u32, Reverse<(u64, u64)>, &'a [(u8, u32)]);

/// Number of samples for each GPU model.
const SAMPLES: usize = 4_000;

/// Number of cases.
#[derive(Debug, Clone, Copy, Default)]
struct Tally {
    /// All cases.
    cases: u64,
    /// All plans that the oracle compared.
    plans: u64,
    /// Cases in which a planner that ignores MPS daemons destroys more daemons than the real planner.
    needs_daemons: u64,
}

fn gpu(part: &ModelStates, state: State, with_daemon: State) -> Gpu {
    let mut gpu = gpush_core::preset::gpus("dgx-a100").unwrap().remove(0);
    let mig = gpu.mig.as_mut().unwrap();
    (mig.memory_slices, mig.compute_slices) = (part.model.memory_slices, part.model.compute_slices);
    mig.profiles = Arc::new(profiles_of_model(&part.model));
    mig.instances = wire::instances(part, state, 0);
    for instance in &mut mig.instances {
        instance.compute[0].uuid = Some(format!("MIG-{}", instance.id).into());
    }
    gpu.mps_daemons = members(with_daemon).map(|pair| format!("MIG-{}", wire::gi_of(pair)).into()).collect();
    gpu
}

fn planned(part: &ModelStates, gpu: &Gpu, multiset: Multiset) -> GpuPlan {
    let entries = profiles(multiset).map(|p| part.model.gi_profiles[p].name.clone());
    let mut entries: Vec<String> = entries.collect();
    if entries.is_empty() {
        entries.push("none".to_owned());
    }
    let request = PlanRequest { gpus: vec!["0".to_owned()], layout: LayoutSource::Entries(entries) };
    let plan = plan_host(&Config::default(), std::slice::from_ref(gpu), &request).unwrap().plans.remove(0);
    assert_eq!(plan.error, None, "{}", part.model.key);
    plan
}

/// Returns the final state of a plan, and the instances that the plan destroys.
fn executed(part: &ModelStates, state: State, plan: &GpuPlan) -> (State, State) {
    let (mut end, mut destroyed) = (state, 0);
    for step in plan.instance_steps() {
        match step {
            InstanceStep::DestroyGpuInstance { gi, .. } => {
                end &= !(1 << pair_of(*gi));
                destroyed |= 1 << pair_of(*gi);
            }
            InstanceStep::CreateGpuInstance { profile_id, placement, .. } => {
                end |= 1 << part.pair(*profile_id, placement.start, placement.size);
            }
            InstanceStep::DestroyCompute { .. } | InstanceStep::CreateCompute { .. } => {}
        }
    }
    (end, destroyed)
}

fn value(part: &ModelStates, end: State, destroyed: State, with_daemon: State) -> Value<'_> {
    let facts = &part.states[part.index[&end]];
    let daemons = (destroyed & with_daemon).count_ones();
    (daemons, destroyed.count_ones(), part.slices(destroyed), Reverse(facts.room), &facts.ranks)
}

/// Compares the plan of one request with every other plan.
fn compare(part: &ModelStates, state: State, with_daemon: State, multiset: Multiset, tally: &mut Tally) {
    let plan = planned(part, &gpu(part, state, with_daemon), multiset);
    let (end, destroyed) = executed(part, state, &plan);
    let chosen = value(part, end, destroyed, with_daemon);
    for end in part.by_multiset[&multiset].iter().map(|at| part.states[*at].state) {
        for kept in subsets(state & end) {
            let other = value(part, end, state & !kept, with_daemon);
            assert!(chosen <= other, "{}: {state:x}, daemons {with_daemon:x}, {plan:?}: {other:?}", part.model.key);
            tally.plans += 1;
        }
    }
    let (_, unaware) = executed(part, state, &planned(part, &gpu(part, state, 0), multiset));
    tally.needs_daemons += u64::from((unaware & with_daemon).count_ones() > chosen.0);
    tally.cases += 1;
}

#[test]
fn no_plan_destroys_fewer_mps_daemons_on_a30() {
    let part = ModelStates::of("a30-24");
    let mut tally = Tally::default();
    for state in part.states.iter().map(|facts| facts.state) {
        for with_daemon in subsets(state) {
            for multiset in part.multisets() {
                compare(&part, state, with_daemon, multiset, &mut tally);
            }
        }
    }
    println!("a30-24: {tally:?}");
    assert!(tally.needs_daemons > 0, "{tally:?}");
}

#[test]
fn no_plan_destroys_fewer_mps_daemons_in_samples() {
    for (seed, key) in ["a100-80", "h100-80-sxm", "b200-180", "rtxpro6000-96"].into_iter().enumerate() {
        let part = ModelStates::of(key);
        let (mut rng, mut tally) = (fastrand::Rng::with_seed(seed as u64), Tally::default());
        let multisets = part.multisets();
        for _ in 0..SAMPLES {
            let state = rng.choice(&part.states).unwrap().state;
            let with_daemon = some_of(state, 2, &mut rng);
            compare(&part, state, with_daemon, *rng.choice(&multisets).unwrap(), &mut tally);
        }
        println!("{key}: {tally:?}");
        assert!(tally.needs_daemons > 0, "{key}: {tally:?}");
    }
}

/// Fault: an instance with an MPS daemon was destroyed, although an idle instance of the same
/// profile without a daemon existed.
#[test]
fn idle_instance_without_daemon_is_destroyed_first() {
    let part = ModelStates::of("a30-24");
    let small = part.model.gi_profiles.iter().position(|profile| profile.name == "1g.6gb").unwrap();
    let at = |start| 1 << part.pairs.iter().position(|pair| (pair.profile, pair.start) == (small, start)).unwrap();
    for (with_daemon, plain) in [(at(0), at(1)), (at(1), at(0)), (at(2), at(3)), (at(3), at(2))] {
        let plan = planned(&part, &gpu(&part, with_daemon | plain, with_daemon), 1 << (4 * small));
        assert_eq!(executed(&part, with_daemon | plain, &plan), (with_daemon, plain), "{plan:?}");
    }
}
