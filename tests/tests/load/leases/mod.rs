//! Random requests, releases, processes, crashes, reboots, faults and layout changes through gpushd on a simulated
//! host. After each step, the test checks gpushd against a reference model. The model is written from the rules for
//! leases, not from the code.
//!
//! The default is 1,000 steps. `GPUSH_TEST_LEASE_STEPS` sets another number, and `GPUSH_TEST_SEED` repeats a run.
//! `cargo xtask soak` makes 10,000 steps.
//!
//! To test the test, three faults are planted between gpushd and the test, and each must be found: one target in two
//! leases, a lost release, and capacity that becomes free while a process runs.
//!
//! | file | subject |
//! |---|---|
//! | `model` | which leases exist, and what a request must get |
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

/// Number of steps by default. A planted fault must be found within this number.
const STEPS: u64 = 1000;

/// The result of a run.
struct Run {
    steps: u64,
    checks: u64,
    /// Numbers of steps and outcomes, by name.
    counts: BTreeMap<String, u32>,
    /// How gpushd violated the model.
    violation: Option<String>,
}

/// Makes random steps until gpushd violates the model.
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
