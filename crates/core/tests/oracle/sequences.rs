//! Random sequences on every GPU family: each step plans, applies the plan, and continues from the
//! result, as on real hosts.

use gpush_core::geometry::Geometry;

use crate::model_states::{ModelStates, Multiset, State, members, some_of};
use crate::whole::{Case, Tally, compare};
use crate::wire;

/// Returns a random target, possible or not, that resembles possible states of the GPU.
fn any_target(part: &ModelStates, rng: &mut fastrand::Rng, possible: &[Multiset]) -> (Multiset, State) {
    let mut multiset = *rng.choice(possible).unwrap();
    let mut fixed = 0;
    match rng.usize(..4) {
        // Any placement.
        0 => {}
        // Some placements are fixed. All fixed placements belong to one possible arrangement.
        1 | 2 => {
            let arrangement = *rng.choice(&part.by_multiset[&multiset]).unwrap();
            fixed = some_of(part.states[arrangement].state, 2, rng);
        }
        // Random instances are requested, with random fixed placements.
        _ => {
            for _ in 0..rng.usize(..3) {
                let pair = rng.usize(..part.pairs.len());
                if fixed >> pair & 1 == 0 {
                    fixed |= 1 << pair;
                    multiset += 1 << (4 * part.pairs[pair].profile);
                }
            }
        }
    }
    (multiset, fixed)
}

/// Executes random steps on one GPU model.
pub(crate) fn walk(key: &str, steps: usize, seed: u64) -> Tally {
    let part = ModelStates::of(key);
    let geometry = Geometry::of_model(&part.model);
    let possible = part.multisets();
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut tally = Tally::default();
    let mut state: State = 0;
    for _ in 0..steps {
        if rng.usize(..50) == 0 {
            state = part.states[rng.usize(..part.states.len())].state;
        }
        let busy = match rng.usize(..3) {
            0 => 0,
            n => some_of(state, 2 * n, &mut rng),
        };
        let (multiset, fixed) = any_target(&part, &mut rng, &possible);
        if members(fixed).count() > 8 {
            continue;
        }
        let instances = wire::instances(&part, state, busy);
        let target = wire::target(&part, multiset, fixed);
        let case = Case { state, busy, multiset, fixed };
        state = compare(&part, &geometry, &instances, &target, case, rng.usize(..8) == 0, &mut tally);
    }
    println!(
        "{key}: {} states, {} feasible targets; {} steps: {} planned, {} blocked, {} impossible",
        part.states.len(),
        possible.len(),
        tally.all(),
        tally.planned,
        tally.blocked,
        tally.impossible
    );
    tally
}
