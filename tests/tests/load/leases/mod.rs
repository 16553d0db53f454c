//! Random requests, releases, processes, crashes, reboots, faults, and changes of the config, of layouts
//! and of MPS sharing, through gpushd on a simulated host. After each step, the test compares gpushd and
//! the simulated hardware with a reference model. The model follows the rules for leases, not the code
//! of gpushd.
//!
//! The default is 500 steps. `GPUSH_TEST_LEASE_STEPS` sets another number, and `GPUSH_TEST_SEED`
//! repeats a run. `cargo xtask soak` runs 10,000 steps.
//!
//! To check the test itself, faults change the requests and responses between gpushd and the test, or
//! the hardware. The test must find each of these faults.
//!
//! | file | subject |
//! |---|---|
//! | `rules` | the config rules between which the tests change |
//! | `model` | which leases exist, and what a request must get |
//! | `observed` | the leases as gpushd shows them, with an inserted fault |
//! | `hardware` | the state of the GPUs and MPS daemons, read without gpushd |
//! | `world` | the host, gpushd, and the calls |
//! | `steps` | the random steps on leases and processes |
//! | `changes` | the steps that change how GPUs are shared |
//! | `pairs` | all pairs of a leased kind and another rule, and all ways to change the rule |

mod changes;
mod hardware;
mod model;
mod observed;
mod pairs;
mod rules;
mod steps;
mod world;

use std::collections::BTreeMap;

use gpush_tests::random::number;

use self::{
    observed::Planted,
    rules::{Layout, Rule},
    world::World,
};

/// Default number of steps. The test must find an inserted fault within this number of steps.
const STEPS: u64 = 500;

/// The rules at the start, and the number of GPUs with MIG.
const RULES: [Rule; 5] = [Rule::Mig(Layout::PLAIN), Rule::Mps, Rule::Timeslice, Rule::Whole, Rule::Whole];
const WITH_MIG: usize = 2;

/// The result of a run.
struct Run {
    steps: u64,
    checks: u64,
    /// How often each step and outcome occurred.
    counts: BTreeMap<String, u32>,
    /// The first difference between gpushd and the model, or `None`.
    violation: Option<String>,
}

/// Runs `steps` random steps. Stops early if gpushd differs from the model.
fn run(steps: u64, seed: u64, planted: Option<Planted>) -> Run {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut world = World::up(&RULES, WITH_MIG, planted);
    let mut done = 0;
    let mut violation = None;
    let mut latest = Vec::new();
    while done < steps && violation.is_none() {
        let Some((name, result)) = steps::one(&mut world, &mut rng) else { continue };
        world.count(name);
        latest.push(name);
        let result = result.and_then(|()| world.check());
        violation = result.err().map(|why| format!("seed {seed}, step {done}: {name}: {why}"));
        done += 1;
    }
    latest.drain(..latest.len().saturating_sub(20));
    let violation =
        violation.map(|why| format!("{why}\nlatest steps: {latest:?}\n{}\n{}", world.config(), world.log()));
    Run { steps: done, checks: world.checks, counts: std::mem::take(&mut world.counts), violation }
}

fn seed() -> u64 {
    number("GPUSH_TEST_SEED", 20_261_123)
}

#[test]
fn leases_follow_the_model_in_random_steps() {
    let run = run(number("GPUSH_TEST_LEASE_STEPS", STEPS), seed(), None);
    println!("seed {}: {} steps, {} checks", seed(), run.steps, run.checks);
    for (what, times) in &run.counts {
        println!("{times:>6}  {what}");
    }
    assert!(run.violation.is_none(), "{}", run.violation.unwrap_or_default());
}

/// Checks the test itself.
#[test]
fn every_planted_fault_is_found() {
    for planted in
        [Planted::DoubleGrant, Planted::LostRelease, Planted::FreedEarly, Planted::OtherKind, Planted::ComputeMode]
    {
        let run = run(STEPS, seed(), Some(planted));
        let violation = run.violation.unwrap_or_else(|| panic!("{planted:?} is not found"));
        println!("{planted:?}: found in step {}: {}", run.steps, violation.lines().next().unwrap_or_default());
    }
}
