//! Executes plans on simulated hardware. The driver must never refuse a step, and in the end the
//! GPU must have exactly the requested instances. Instances in use must never change, and an
//! interrupted plan must be reversible.
//!
//! The simulated hardware has its own rules (`sim/silicon`), so that the planner and the simulator
//! check each other.

#![allow(clippy::unwrap_used, reason = "a test that meets nothing fails")]

mod host;

use gpush_api::{GpuInstance, Refusal};
use gpush_core::geometry::{Geometry, profiles_of_model};
use gpush_core::layout::Layout;
use gpush_core::plan::{Plan, Target, plan};

use host::Host;

/// Counters of a random walk.
#[derive(Debug, Default)]
struct Tally {
    carried_out: u32,
    steps: u32,
    taken_back: u32,
    blocked: u32,
    impossible: u32,
}

impl Tally {
    fn add(&mut self, other: &Self) {
        self.carried_out += other.carried_out;
        self.steps += other.steps;
        self.taken_back += other.taken_back;
        self.blocked += other.blocked;
        self.impossible += other.impossible;
    }
}

/// Returns a layout as a user might write it, possible or not.
fn any_layout(geometry: &Geometry, rng: &mut fastrand::Rng) -> Layout {
    let mut entries = Vec::new();
    for _ in 0..=rng.usize(..4) {
        let profile = rng.choice(&geometry.profiles).unwrap();
        let mut entry = String::new();
        if rng.usize(..3) == 0 {
            entry += &format!("{}c.", rng.choice(&profile.compute).unwrap().profile.slices);
        }
        entry += &profile.profile.name;
        if rng.usize(..5) == 0 {
            entry += &format!("@{}", rng.choice(&profile.spots).unwrap().placement.start);
        } else if rng.usize(..3) == 0 {
            entry += &format!("*{}", 1 + rng.usize(..3));
        }
        entries.push(entry);
    }
    if rng.usize(..20) == 0 { Layout::none() } else { Layout::parse(&entries.join(",")).unwrap() }
}

/// Asserts that each requested GPU instance is at the placement in the plan, with exactly its
/// compute instances, and that no other GPU instances exist.
fn assert_is(target: &Target, plan: &Plan, now: &[GpuInstance]) {
    assert_eq!(target.instances.len(), now.len());
    for (wanted, placement) in target.instances.iter().zip(&plan.placements) {
        let there = now.iter().find(|i| i.placement == *placement).unwrap();
        assert_eq!(there.profile_id, wanted.profile_id);
        let mut have: Vec<u32> = there.compute.iter().map(|c| c.profile_id).collect();
        let mut want: Vec<u32> = wanted.compute.iter().map(|c| c.profile_id).collect();
        have.sort_unstable();
        want.sort_unstable();
        assert_eq!(have, want, "{now:?}");
    }
}

/// Asserts that the plan is possible after the holders in the refusal have ended.
fn assert_blocked_by(host: &Host, geometry: &Geometry, target: &Target, refusal: &Refusal) {
    let Refusal::Blocked { blockers } = refusal else { panic!("{refusal:?}") };
    let mut idle = host.clone();
    for pid in blockers.iter().flat_map(|b| &b.holders).filter_map(|p| p.pid) {
        idle.stop(pid);
    }
    assert!(plan(geometry, &idle.read(), target).is_ok(), "{blockers:?} are not all that blocks");
}

fn walk(key: &str, rounds: usize, seed: u64) -> Tally {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut host = Host::of_model(key);
    let model = gpush_geometry::model(key).unwrap();
    let full = Geometry::of_model(&model);
    let mut tally = Tally::default();
    for _ in 0..rounds {
        // Sometimes the driver does not report a profile. The planner then knows no profile for the
        // instances of that profile.
        let mut described = profiles_of_model(&model);
        if rng.usize(..4) == 0 {
            described.remove(rng.usize(..described.len()));
        }
        let geometry = Geometry::new(&described, model.memory_slices, model.compute_slices);
        host.stop_some(&mut rng);
        host.start_some(&mut rng);

        let layout = any_layout(&full, &mut rng);
        let Ok(target) = Target::resolve(&geometry, &layout) else {
            tally.impossible += 1;
            continue;
        };
        let before = host.read();
        let plan = match plan(&geometry, &before, &target) {
            Ok(plan) => plan,
            Err(refusal) => {
                assert_blocked_by(&host, &geometry, &target, &refusal);
                tally.blocked += 1;
                continue;
            }
        };
        if rng.usize(..4) == 0 {
            let cut = rng.usize(..plan.steps.len() + 1);
            host.execute(&plan.steps[..cut]);
            let exact = Target::of_instances(&geometry, &before);
            let back = gpush_core::plan::plan(&geometry, &host.read(), &exact).unwrap();
            assert!(back.steps.len() <= 2 * cut.max(plan.steps.len()));
            host.execute(&back.steps);
            assert_eq!(host::shape(&host.read()), host::shape(&before));
            tally.taken_back += 1;
        } else {
            host.execute(&plan.steps);
            let now = host.read();
            assert_is(&target, &plan, &now);
            let again = gpush_core::plan::plan(&geometry, &now, &target).unwrap();
            assert!(again.steps.is_empty(), "{layout:?}: {again:?}");
            tally.carried_out += 1;
            tally.steps += plan.steps.len() as u32;
        }
    }
    println!("{key}: {tally:?}");
    tally
}

#[test]
fn simulated_driver_never_refuses_a_step() {
    let mut total = Tally::default();
    let mut parts = 0;
    for (seed, key) in gpush_geometry::KEYS.iter().enumerate() {
        if gpush_geometry::model(key).unwrap().has_mig() {
            total.add(&walk(key, 12_000, seed as u64));
            parts += 1;
        }
    }
    println!("{parts} parts: {total:?}");
    assert!(parts > 0 && total.carried_out > 1000 && total.taken_back > 1000);
    assert!(total.blocked > 1000 && total.impossible > 1000);
}
