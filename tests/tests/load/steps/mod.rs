//! Random steps on MPS daemons and random operations on MIG layouts, on one host. After each step,
//! the test checks conditions that must always hold. For this, it uses other sources than gpushd:
//! `/proc`, the simulated hardware, the front-end of the MPS daemons, and the trace of driver
//! calls.
//!
//! The default is 60 steps. `GPUSH_TEST_STEPS` sets another number, and `GPUSH_TEST_SEED` repeats a
//! run. `cargo xtask soak` runs 1,000 steps.
//!
//! | file | subject |
//! |---|---|
//! | `world` | the host, gpushd, and the model of their state |
//! | `mps` | steps on MPS targets |
//! | `mig` | steps that are operations on MIG layouts |
//! | `check` | the invariants |

mod check;
mod mig;
mod mps;
mod world;

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use gpush_tests::random::{number, seeded};

use self::world::World;

/// A step: its name and its function. If the step is not possible now, the function has no effect
/// and returns false.
type Step = (&'static str, fn(&mut World, &mut fastrand::Rng) -> bool);

const STEPS: &[Step] = &[
    ("take a share", mps::take),
    ("take a share", mps::take),
    ("take a share for a process", mps::take_for_process),
    ("end the process of a share", mps::end_process),
    ("release a share", mps::release),
    ("start a client", mps::start_client),
    ("start a client", mps::start_client),
    ("end a client", mps::end_client),
    ("stop a daemon", mps::stop),
    ("stop a daemon by force", mps::stop_by_force),
    ("start a daemon", mps::start),
    ("start a daemon", mps::start),
    ("restart a daemon", mps::restart),
    ("restart a daemon by force", mps::restart_by_force),
    ("drain a daemon", mps::drain),
    ("set a percentage", mps::set),
    ("kill a daemon", mps::kill_daemon),
    ("kill a server", mps::kill_server),
    ("kill gpushd", world::kill_agent),
    ("stop gpushd", world::stop_agent),
    ("reload the config", world::reload),
    ("apply a layout", mig::apply),
    ("apply a layout", mig::apply),
    ("apply a layout to both GPUs", mig::apply_to_both),
    ("apply a layout while a driver call fails", mig::apply_with_fault),
    ("apply a layout and kill gpushd", mig::apply_and_kill),
    ("wait for an instance, then cancel", mig::wait_and_cancel),
    ("use an instance", mig::hold),
    ("use an instance", mig::hold),
    ("free an instance", mig::free),
    ("cordon or uncordon a GPU", mig::cordon),
];

#[test]
fn random_steps_keep_every_invariant() {
    let steps = number("GPUSH_TEST_STEPS", 60);
    let (mut rng, seed) = seeded(20_261_123);
    let mut world = World::up();
    let mut done: BTreeMap<&str, (u32, Duration)> = BTreeMap::new();
    let mut count = 0;
    while count < steps {
        let (name, step) = STEPS[rng.usize(..STEPS.len())];
        let began = Instant::now();
        world.begin(format!("seed {seed}, step {count}: {name}"));
        if !step(&mut world, &mut rng) {
            continue;
        }
        check::all(&mut world, count.is_multiple_of(10));
        let (times, longest) = done.entry(name).or_default();
        (*times, *longest) = (*times + 1, (*longest).max(began.elapsed()));
        count += 1;
    }
    println!("seed {seed}: {count} steps, {} invariants held", world.checks);
    for (name, (times, longest)) in done {
        println!("{times:>5}  {name}, {longest:?} at most");
    }
    for (outcome, times) in &world.outcomes {
        println!("{times:>5}  {outcome}");
    }
}
