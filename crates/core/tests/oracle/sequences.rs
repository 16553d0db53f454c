//! Random sequences on every GPU family: each step plans, applies the plan, and continues from the
//! result, as on real hosts.

use gpush_core::geometry::Geometry;

use crate::dice::Dice;
use crate::model_states::{ModelStates, Multiset, State, members, some_of};
use crate::whole::{Case, Tally, compare};
use crate::wire;

/// Returns a random target, possible or not, that resembles possible states of the GPU.
fn any_target(part: &ModelStates, dice: &mut Dice, possible: &[Multiset]) -> (Multiset, State) {
    let mut multiset = *dice.pick(possible);
    let mut fixed = 0;
    match dice.below(4) {
        // Any placement.
        0 => {}
        // Some placements are fixed to those of one possible arrangement.
        1 | 2 => {
            let arrangement = *dice.pick(&part.by_multiset[&multiset]);
            fixed = some_of(part.states[arrangement].state, 2, dice);
        }
        // Any instances, with any fixed placements.
        _ => {
            for _ in 0..dice.below(3) {
                let pair = dice.below(part.pairs.len());
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
    let mut dice = Dice::new(seed);
    let mut tally = Tally::default();
    let mut state: State = 0;
    for _ in 0..steps {
        if dice.one_in(50) {
            state = part.states[dice.below(part.states.len())].state;
        }
        let busy = match dice.below(3) {
            0 => 0,
            n => some_of(state, 2 * n, &mut dice),
        };
        let (multiset, fixed) = any_target(&part, &mut dice, &possible);
        if members(fixed).count() > 8 {
            continue;
        }
        let instances = wire::instances(&part, state, busy);
        let target = wire::target(&part, multiset, fixed);
        let case = Case { state, busy, multiset, fixed };
        state = compare(&part, &geometry, &instances, &target, case, dice.one_in(8), &mut tally);
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
