//! Steps that change how GPUs are shared: another config, an override, an apply.

use gpush_api::{ApiError, Code, Operation, OperationState};
use serde_json::json;

use super::{
    rules::{Layout, Rule},
    steps::Outcome,
    world::World,
};

/// What a change of a GPU must lead to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Expected {
    Done,
    /// gpushd refuses the change, because the GPU is in use.
    Blocked,
    /// gpushd may do or refuse the change: a planner can keep leased devices, or gpushd itself may change
    /// the GPU at present.
    DoneOrBlocked,
}

/// Returns the expected outcome when the rule of a GPU changes to `to`.
fn expects(world: &World, gpu: usize, to: Rule) -> Expected {
    let from = world.model.gpus[gpu].in_force;
    if from == to {
        // gpushd itself may be changing the GPU to another rule at present.
        let is_repaired = world.auto_reconcile && world.model.gpus[gpu].desired() != from;
        if is_repaired { Expected::DoneOrBlocked } else { Expected::Done }
    } else if !world.model.is_occupied(gpu) {
        if world.auto_reconcile { Expected::DoneOrBlocked } else { Expected::Done }
    } else if from.changes_devices_only(to) {
        Expected::DoneOrBlocked
    } else {
        Expected::Blocked
    }
}

/// Follows an operation to its end. Returns whether gpushd has changed the GPU.
fn finish(
    world: &mut World,
    gpu: usize,
    expected: Expected,
    begun: Result<Operation, ApiError>,
) -> Result<bool, String> {
    let is_done = match begun.map(|begun| world.agent().follow(begun)) {
        Ok(operation) if operation.state == OperationState::Done => true,
        Err(error) if matches!(error.code, Code::Blocked | Code::Conflict) && error.retryable => false,
        other => return Err(format!("GPU {gpu}: {other:?}")),
    };
    world.count(format!("change: {expected:?}, {}", if is_done { "done" } else { "blocked" }));
    match (expected, is_done) {
        (Expected::DoneOrBlocked, _) | (Expected::Done, true) | (Expected::Blocked, false) => Ok(is_done),
        (Expected::Done, false) | (Expected::Blocked, true) => {
            let one = &world.model.gpus[gpu];
            let what = format!("GPU {gpu} from {:?} to {:?}", one.in_force, one.desired());
            Err(format!("{what}: expected {expected:?}, is done: {is_done}"))
        }
    }
}

/// Applies the desired state of a GPU.
pub(super) fn apply_desired(world: &mut World, gpu: usize) -> Outcome {
    let expected = expects(world, gpu, world.model.gpus[gpu].desired());
    let begun = world.agent().begin_with(&json!({ "selectors": [gpu.to_string()], "layout_source": "wanted" }));
    if finish(world, gpu, expected, begun)? { world.settled(gpu) } else { Ok(()) }
}

/// Applies the desired state of all GPUs, which have no leases.
pub(super) fn apply_all(world: &mut World) -> Outcome {
    let begun = world.agent().begin_with(&json!({ "selectors": ["all"], "layout_source": "wanted" }));
    let ended = begun.map(|begun| world.agent().follow(begun));
    if !ended.as_ref().is_ok_and(|operation| operation.state == OperationState::Done) {
        return Err(format!("{ended:?}"));
    }
    (0..world.model.gpus.len()).try_for_each(|gpu| world.settled(gpu))
}

/// Applies a layout to a GPU, which makes an override.
pub(super) fn apply_layout(world: &mut World, gpu: usize, layout: Layout) -> Outcome {
    let expected = expects(world, gpu, Rule::Mig(layout));
    let begun = world.agent().begin(&[&gpu.to_string()], layout.entries());
    if !finish(world, gpu, expected, begun)? {
        return Ok(());
    }
    let one = &mut world.model.gpus[gpu];
    one.overridden = (one.rule != Rule::Mig(layout)).then_some(layout);
    world.settled(gpu)
}

/// Writes a config with another rule of one GPU, and reloads it.
pub(super) fn reload_rule(world: &mut World, gpu: usize, rule: Rule, clear_overrides: bool) -> Outcome {
    let mut rules = world.rules();
    rules[gpu] = rule;
    reload_rules(world, &rules, clear_overrides)
}

/// Writes a config with these rules, and reloads it.
pub(super) fn reload_rules(world: &mut World, rules: &[Rule], clear_overrides: bool) -> Outcome {
    let before = world.rules();
    let changed: Vec<usize> = (0..rules.len()).filter(|gpu| rules[*gpu] != before[*gpu]).collect();
    let is_overridden = changed.iter().any(|gpu| world.model.gpus[*gpu].overridden.is_some());
    let is_refused = is_overridden && !clear_overrides;
    world.set_rules(rules);
    world.agent().write_config(world.config());
    let answer = world.agent().post("/v1/config/reload", &json!({ "clear_overrides": clear_overrides }));
    match (answer.status, is_refused) {
        (200, false) => {}
        (200, true) => return Err(format!("a reload changed a rule under an override: {before:?} to {rules:?}")),
        (_, true) => {
            world.count("reload refused because of an override");
            world.set_rules(&before);
            world.agent().write_config(world.config());
            return Ok(());
        }
        (_, false) => return Err(format!("reload of {rules:?}: {:?}", answer.error())),
    }
    for gpu in changed {
        world.model.gpus[gpu].overridden = None;
        world.count(format!("reload {}", if world.model.is_leased(gpu) { "of a leased GPU" } else { "of a free GPU" }));
    }
    reconciled(world)
}

/// With `auto_reconcile`, waits until gpushd has repaired the drift of the GPUs that have no lease and no
/// process. gpushd repairs only GPUs whose rule has mode `mig` or `mps`, and no cordoned GPU.
pub(super) fn reconciled(world: &mut World) -> Outcome {
    for gpu in 0..world.model.gpus.len() {
        let one = &world.model.gpus[gpu];
        let is_repaired = matches!(one.desired(), Rule::Mig(_) | Rule::Mps) && !one.is_closed;
        if world.auto_reconcile && is_repaired && !one.is_settled() && !world.model.is_occupied(gpu) {
            world.count("repaired by auto_reconcile");
            world.until_settled(gpu)?;
        }
    }
    Ok(())
}

/// Ends the override of a GPU.
pub(super) fn end_override(world: &mut World, gpu: usize) -> Outcome {
    let answer = world.agent().request("DELETE", &format!("/v1/overrides/{gpu}"), "", b"");
    if answer.status != 200 {
        return Err(format!("end of the override of GPU {gpu}: {:?}", answer.error()));
    }
    world.model.gpus[gpu].overridden = None;
    Ok(())
}

/// Starts gpushd again with these rules. gpushd keeps the overrides.
pub(super) fn restart_with(world: &mut World, rules: &[Rule], is_killed: bool) {
    if is_killed {
        world.kill_agent();
    } else {
        world.stop_agent();
    }
    world.set_rules(rules);
    world.start_agent();
}

/// Returns a random GPU, and another rule for it.
fn another_rule(world: &World, rng: &mut fastrand::Rng) -> (usize, Rule) {
    let gpu = rng.usize(..world.model.gpus.len());
    let one = &world.model.gpus[gpu];
    let rules: Vec<Rule> = Rule::of_gpu(one.has_mig).into_iter().filter(|rule| *rule != one.rule).collect();
    // Often go back to the rule in force, because only a settled GPU gets new leases.
    let is_back = one.in_force != one.rule && rng.bool();
    (gpu, if is_back { one.in_force } else { rules[rng.usize(..rules.len())] })
}

pub(super) fn reload(world: &mut World, rng: &mut fastrand::Rng) -> Option<Outcome> {
    let (gpu, rule) = another_rule(world, rng);
    Some(reload_rule(world, gpu, rule, false))
}

pub(super) fn reload_and_clear(world: &mut World, rng: &mut fastrand::Rng) -> Option<Outcome> {
    let (gpu, rule) = another_rule(world, rng);
    Some(reload_rule(world, gpu, rule, true))
}

pub(super) fn switch_auto_reconcile(world: &mut World, rng: &mut fastrand::Rng) -> Option<Outcome> {
    world.auto_reconcile = !world.auto_reconcile;
    let gpu = rng.usize(..world.model.gpus.len());
    let rule = world.model.gpus[gpu].rule;
    Some(reload_rule(world, gpu, rule, false))
}

pub(super) fn restart(world: &mut World, rng: &mut fastrand::Rng) -> Option<Outcome> {
    let (gpu, rule) = another_rule(world, rng);
    let mut rules = world.rules();
    rules[gpu] = rule;
    restart_with(world, &rules, rng.bool());
    Some(Ok(()))
}

/// Applies the desired state of a random GPU. Prefers GPUs whose change is pending.
pub(super) fn apply(world: &mut World, rng: &mut fastrand::Rng) -> Option<Outcome> {
    let pending: Vec<usize> = (0..world.model.gpus.len()).filter(|gpu| !world.model.gpus[*gpu].is_settled()).collect();
    let gpu =
        if pending.is_empty() { rng.usize(..world.model.gpus.len()) } else { pending[rng.usize(..pending.len())] };
    Some(apply_desired(world, gpu))
}

pub(super) fn override_layout(world: &mut World, rng: &mut fastrand::Rng) -> Option<Outcome> {
    let gpus: Vec<usize> =
        (0..world.model.gpus.len()).filter(|gpu| world.model.gpus[*gpu].rule.layout().is_some()).collect();
    if gpus.is_empty() {
        return None;
    }
    let gpu = gpus[rng.usize(..gpus.len())];
    Some(apply_layout(world, gpu, Layout::ALL[rng.usize(..Layout::ALL.len())]))
}

pub(super) fn clear_override(world: &mut World, _: &mut fastrand::Rng) -> Option<Outcome> {
    let gpu = world.model.gpus.iter().position(|gpu| gpu.overridden.is_some())?;
    Some(end_override(world, gpu).and_then(|()| reconciled(world)))
}
