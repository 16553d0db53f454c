//! Random requests, releases, processes, crashes, reboots, faults and layout changes through gpushd on a simulated host,
//! checked after each step against a reference model. The model is written from the rules for leases, not from code.
//!
//! 1,000 steps here, more by `GPUSH_TEST_LEASE_STEPS`; the same ones again by `GPUSH_TEST_SEED`. `cargo xtask soak` makes
//! 10,000.
//!
//! Three faults are planted, between gpushd and the test, and each must be found: a target that two leases have, a
//! release that is lost, and capacity that is freed while a process runs.
//!
//! | file | subject |
//! |---|---|
//! | `model` | which leases there are, and what a request must get |
//! | `observed` | the leases as gpushd shows them, with a planted fault |
//! | `world` | the host, gpushd, and the calls |
//! | `steps` | the random steps |

mod model;
mod observed;
mod steps;
mod world;

use std::collections::BTreeMap;

use gpush_tests::dice::{Dice, number};

use self::{observed::Planted, world::World};

/// Steps of a usual run, and within which a planted fault must be found.
const STEPS: u64 = 1000;

/// How a run ended.
struct Run {
    steps: u64,
    checks: u64,
    /// Steps and outcomes by name.
    counts: BTreeMap<String, u32>,
    /// What violated the model.
    violation: Option<String>,
}

/// Makes random steps until the model is violated.
fn run(steps: u64, seed: u64, planted: Option<Planted>) -> Run {
    let mut dice = Dice::new(seed);
    let mut world = World::up(planted);
    let mut done = 0;
    let mut violation = None;
    while done < steps && violation.is_none() {
        let Some((name, result)) = steps::one(&mut world, &mut dice) else { continue };
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
