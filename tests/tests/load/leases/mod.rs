//! Random requests, releases, processes, crashes, reboots, faults and layout changes, through
//! gpushd on a simulated host. After each step, the test compares gpushd with a reference model.
//! The model follows the rules for leases, not the code of gpushd.
//!
//! The default is 1,000 steps. `GPUSH_TEST_LEASE_STEPS` sets another number, and `GPUSH_TEST_SEED`
//! repeats a run. `cargo xtask soak` runs 10,000 steps.
//!
//! To check the test itself, three faults change the requests and responses between gpushd and the
//! test. The test must find each of these faults: one target in two leases, a lost release, and
//! capacity that becomes free while a process still runs.
//!
//! | file | subject |
//! |---|---|
//! | `model` | which leases exist, and what a request must get |
//! | `observed` | the leases as gpushd shows them, with an inserted fault |
//! | `world` | the host, gpushd, and the calls |
//! | `steps` | the random steps |

mod model;
mod observed;
mod steps;
mod world;

use std::collections::BTreeMap;

use gpush_tests::random::number;

use self::{observed::Planted, world::World};

/// Default number of steps. The test must find an inserted fault within this number of steps.
const STEPS: u64 = 1000;

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
    let mut world = World::up(planted);
    let mut done = 0;
    let mut violation = None;
    while done < steps && violation.is_none() {
        let Some((name, result)) = steps::one(&mut world, &mut rng) else { continue };
        world.count(name);
        let result = result.and_then(|()| world.check());
        violation = result.err().map(|why| format!("seed {seed}, step {done}: {name}: {why}"));
        done += 1;
    }
    let violation = violation.map(|why| format!("{why}\n{}", world.log()));
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

fn finds(planted: Planted) {
    let run = run(STEPS, seed(), Some(planted));
    let violation = run.violation.expect("the planted fault is found");
    println!("{planted:?}: found in step {}: {}", run.steps, violation.lines().next().unwrap_or_default());
}

#[test]
fn planted_double_grant_is_found() {
    finds(Planted::DoubleGrant);
}

#[test]
fn planted_lost_release_is_found() {
    finds(Planted::LostRelease);
}

#[test]
fn planted_early_free_is_found() {
    finds(Planted::FreedEarly);
}
