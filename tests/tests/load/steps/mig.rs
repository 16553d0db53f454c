//! Steps that change MIG layouts. They also check which instances were kept.

use gpush_api::{ApiError, Code, Operation, OperationState};
use gpush_tests::agent::{gi_at, real_layout};
use serde_json::json;

use super::world::{Held, MIG, World};

const LAYOUTS: [&[&str]; 7] = [
    &["7g.40gb"],
    &["3g.20gb*2"],
    &["4g.20gb", "3g.20gb"],
    &["2g.10gb*3"],
    &["1g.5gb*7"],
    &["3g.20gb", "2g.10gb", "1g.5gb"],
    &["2g.10gb", "1g.5gb*3"],
];

fn layout(rng: &mut fastrand::Rng) -> &'static [&'static str] {
    LAYOUTS[rng.usize(..LAYOUTS.len())]
}

/// Returns the profiles of a layout, sorted.
fn profiles(layout: &[&str]) -> Vec<String> {
    let mut all = Vec::new();
    for entry in layout {
        let (profile, count) = entry.split_once('*').unwrap_or((entry, "1"));
        let count: usize = count.parse().expect("a number");
        all.extend(std::iter::repeat_n(profile.to_owned(), count));
    }
    all.sort();
    all
}

/// Returns the profiles of a GPU's instances, sorted.
fn held_profiles(instances: &[String]) -> Vec<String> {
    let mut all: Vec<String> =
        instances.iter().map(|one| one.split('@').next().unwrap_or_default().to_owned()).collect();
    all.sort();
    all
}

/// Compares the record of an operation with the instances of its GPUs, and updates the model.
fn judge(world: &mut World, operation: &Operation, gpus: &[usize], layout: &[&str]) {
    for gpu in gpus.iter().copied() {
        let now = real_layout(&world.host, gpu);
        let is_new = held_profiles(&now) == profiles(layout);
        let is_old = now == world.cuts[gpu].instances;
        let is_true = match operation.state {
            OperationState::Done => is_new,
            OperationState::RolledBack | OperationState::NotStarted => is_old,
            _ => false,
        };
        if !is_true {
            let record = format!("{operation:#?}");
            world.fail(&format!("GPU {gpu} holds {now:?}, before {:?}: {record}", world.cuts[gpu].instances));
        }
        world.cuts[gpu].instances = now;
    }
    world.count(format!("operation {:?}", operation.state));
}

/// Checks a refusal. The only permitted reason is that instances are in use.
fn refused(world: &mut World, gpus: &[usize], error: &ApiError) {
    let in_use = gpus.iter().any(|gpu| !world.cuts[*gpu].held.is_empty());
    if error.code != Code::Blocked || !in_use {
        world.fail(&format!("a layout of {gpus:?} was refused: {error:?}"));
    }
    world.count("operation refused: in use");
}

fn names(gpus: &[usize]) -> Vec<String> {
    gpus.iter().map(ToString::to_string).collect()
}

fn carry_out(world: &mut World, gpus: &[usize], layout: &'static [&'static str]) {
    world.operates = true;
    match world.agent().begin_with(&json!({ "selectors": names(gpus), "layout_source": { "entries": layout } })) {
        Ok(begun) => {
            let operation = world.agent().follow(begun);
            judge(world, &operation, gpus, layout);
        }
        Err(error) => refused(world, gpus, &error),
    }
}

pub(super) fn apply(world: &mut World, rng: &mut fastrand::Rng) -> bool {
    let gpu = MIG[rng.usize(..MIG.len())];
    carry_out(world, &[gpu], layout(rng));
    true
}

pub(super) fn apply_to_both(world: &mut World, rng: &mut fastrand::Rng) -> bool {
    carry_out(world, &MIG, layout(rng));
    true
}

pub(super) fn apply_with_fault(world: &mut World, rng: &mut fastrand::Rng) -> bool {
    let gpu = MIG[rng.usize(..MIG.len())];
    let call = ["nvmlGpuInstanceDestroy", "nvmlDeviceCreateGpuInstance*", "nvmlGpuInstanceCreateComputeInstance*"];
    let call = call[rng.usize(..call.len())];
    let after = rng.usize(..4);
    world.host.fault(&format!("{call} --gpu {gpu} --after {after} --rc UNKNOWN --times 1"));
    carry_out(world, &[gpu], layout(rng));
    world.host.clear_faults();
    true
}

pub(super) fn apply_and_kill(world: &mut World, rng: &mut fastrand::Rng) -> bool {
    let gpu = MIG[rng.usize(..MIG.len())];
    let layout = layout(rng);
    world.operates = true;
    // The calls are so slow that the kill can happen during any step of the operation.
    world.host.fault(&format!("nvmlDeviceCreateGpuInstance* --gpu {gpu} --delay-ms {}", 1 + rng.usize(..30)));
    let begun =
        world.agent().begin_with(&json!({ "selectors": names(&[gpu]), "layout_source": { "entries": layout } }));
    let pause = std::time::Duration::from_millis(rng.usize(..40) as u64);
    if begun.is_ok() {
        std::thread::sleep(pause);
        world.kill_agent();
    }
    world.host.clear_faults();
    match begun {
        Ok(begun) => {
            world.start_agent();
            world.wait_until_known();
            let operation = world.agent().follow(world.agent().operation(&begun.id));
            judge(world, &operation, &[gpu], layout);
            world.count(format!("operation {:?} after a kill", operation.state));
        }
        Err(error) => refused(world, &[gpu], &error),
    }
    true
}

pub(super) fn wait_and_cancel(world: &mut World, rng: &mut fastrand::Rng) -> bool {
    let Some(gpu) = MIG.into_iter().find(|gpu| !world.cuts[*gpu].held.is_empty()) else { return false };
    let layout = layout(rng);
    world.operates = true;
    let body = json!({ "selectors": names(&[gpu]), "layout_source": { "entries": layout }, "wait_s": 600 });
    let begun = match world.agent().begin_with(&body) {
        Ok(begun) => begun,
        Err(error) => world.fail(&format!("an operation that may wait: {error:?}")),
    };
    let cancelled = world.agent().cancel(&begun.id);
    // The operation may have started at once, and may have ended before the cancel.
    if cancelled.status != 202 && cancelled.error().code != Code::Conflict {
        world.fail(&format!("cancel: {:?}", cancelled.error()));
    }
    let operation = world.agent().follow(begun);
    judge(world, &operation, &[gpu], layout);
    world.count(format!("waiting operation {:?}", operation.state));
    true
}

pub(super) fn hold(world: &mut World, rng: &mut fastrand::Rng) -> bool {
    let gpu = MIG[rng.usize(..MIG.len())];
    let cut = &world.cuts[gpu];
    if cut.instances.is_empty() || cut.held.len() >= 2 {
        return false;
    }
    let instance = &cut.instances[rng.usize(..cut.instances.len())];
    let start = instance.split(['@', '[']).nth(1).and_then(|start| start.parse().ok()).expect("a placement");
    let gi = gi_at(&world.host, gpu, start);
    if cut.held.iter().any(|held| held.gi == gi) {
        return false;
    }
    let pid = world.host.process(&format!("--gpu {gpu} --gi {gi} --ci 0"));
    world.cuts[gpu].held.push(Held { gi, pid });
    true
}

pub(super) fn free(world: &mut World, rng: &mut fastrand::Rng) -> bool {
    let gpu = MIG[rng.usize(..MIG.len())];
    let Some(held) = world.cuts[gpu].held.pop() else { return false };
    world.host.end_process(held.pid);
    true
}

pub(super) fn cordon(world: &mut World, rng: &mut fastrand::Rng) -> bool {
    let gpu = MIG[rng.usize(..MIG.len())];
    let verb = if world.cuts[gpu].cordoned { "uncordon" } else { "cordon" };
    let answer = world.agent().post(&format!("/v1/gpus/{gpu}/{verb}"), &json!({}));
    if answer.status != 200 {
        world.fail(&format!("{verb} of GPU {gpu}: {:?}", answer.error()));
    }
    world.cuts[gpu].cordoned = !world.cuts[gpu].cordoned;
    true
}
