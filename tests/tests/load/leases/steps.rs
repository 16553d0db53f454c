//! The random steps. Each step changes gpushd or its host, and changes the model in the same way.

use std::time::Instant;

use gpush_api::{ApiError, Code, EndReason, LeaseGrant, LeaseKind, LeaseState, OperationState};
use serde_json::{Value, json};

use super::{
    model::{Expected, Share},
    world::{LAYOUTS, PROFILES, SOON, World, lease_of},
};

type Outcome = Result<(), String>;

/// A step: its name and its function. If the step is not possible now, the function has no effect
/// and returns `None`.
type Step = (&'static str, fn(&mut World, &mut fastrand::Rng) -> Option<Outcome>);

const STEPS: &[Step] = &[
    ("request", request),
    ("request", request),
    ("request", request),
    ("request", request),
    ("request", request),
    ("request", request),
    ("release", release),
    ("release", release),
    ("release", release),
    ("revoke", revoke),
    ("release an ended lease", release_again),
    ("release an unknown lease", release_unknown),
    ("start a process", start_process),
    ("start a process", start_process),
    ("end a process", end_process),
    ("end a process", end_process),
    ("cordon or uncordon a GPU", cordon),
    ("apply a layout", apply),
    ("request while the driver fails", request_with_fault),
    ("kill gpushd", kill),
    ("stop gpushd", stop),
    ("reboot", reboot),
];

/// On average, a slow step is executed only once in this number of draws.
const RARE: usize = 8;

/// Runs one random step.
pub(super) fn one(world: &mut World, rng: &mut fastrand::Rng) -> Option<(&'static str, Outcome)> {
    let (name, step) = STEPS[rng.usize(..STEPS.len())];
    let is_long = matches!(name, "kill gpushd" | "stop gpushd" | "reboot" | "apply a layout");
    if is_long && rng.usize(..RARE) > 0 {
        return None;
    }
    Some((name, step(world, rng)?))
}

fn share(rng: &mut fastrand::Rng) -> (Share, usize) {
    match rng.usize(..8) {
        0..=3 => (Share::Mig(PROFILES[rng.usize(..PROFILES.len())]), 1 + rng.usize(..2)),
        4 | 5 => (Share::Timeslice, 1),
        _ => (Share::Whole, 1 + rng.usize(..4)),
    }
}

/// Returns the uid of root, or of a user who holds so few leases that no quota applies.
fn holder(world: &World, rng: &mut fastrand::Rng) -> u32 {
    let user = 1001;
    let held = world.model.open.values().filter(|lease| lease.holder == user).count();
    if rng.usize(..3) == 0 && held < 2 { user } else { 0 }
}

fn body(share: &Share, count: usize, holder: u32) -> Value {
    let share = match share {
        Share::Mig(profile) => json!({ "kind": "mig_profile", "profile": profile }),
        Share::Timeslice => json!({ "kind": "timeslice" }),
        Share::Whole => json!({ "kind": "whole" }),
    };
    json!({ "share": share, "count": count, "holder_uid": holder })
}

fn request(world: &mut World, rng: &mut fastrand::Rng) -> Option<Outcome> {
    let (share, count) = share(rng);
    let holder = holder(world, rng);
    let expected = world.model.expects(&share, count);
    world.count(format!("request {:?}: {expected:?}", share.kind()));
    let answer = insist(world, &body(&share, count, holder), expected);
    let what = || format!("{count} {share:?} for uid {holder}");
    Some(match (expected, answer) {
        (Expected::Granted, Ok(grant)) => {
            let id = grant.lease.id.to_string();
            let named = grant.environment.iter().any(|(name, value)| name == "GPUSH_LEASE" && *value == id);
            if grant.lease.state != LeaseState::Active || grant.lease.holder.uid != holder || !named {
                return Some(Err(format!("{}: {grant:?}", what())));
            }
            world.model.grant(&id, &share, count, lease_of(&grant.lease))
        }
        (Expected::Blocked, Err(error)) if error.code == Code::Blocked && error.retryable => Ok(()),
        (Expected::Impossible, Err(error)) if !error.retryable => Ok(()),
        (_, answer) => Err(format!("{}: expected {expected:?}, got {answer:?}", what())),
    })
}

/// Sends a request. If gpushd must grant the request but refuses it, repeats the request for a
/// while: on a busy machine, the reading of a GPU can be late, and gpushd grants nothing on a GPU
/// without a reading.
fn insist(world: &mut World, body: &Value, expected: Expected) -> Result<LeaseGrant, ApiError> {
    let began = Instant::now();
    loop {
        match world.observed.request(world.agent(), body) {
            Err(error) if expected == Expected::Granted && error.retryable && began.elapsed() < SOON => {
                world.count("request repeated");
                world.agent().settle_reads();
            }
            answer => return answer,
        }
    }
}

/// Requests a lease while readings of GPU 0 fail. gpushd may refuse the GPU's devices, or grant
/// them based on an earlier reading.
fn request_with_fault(world: &mut World, rng: &mut fastrand::Rng) -> Option<Outcome> {
    let share = Share::Mig(PROFILES[rng.usize(..3)]);
    world.host.fault("nvmlDeviceGetGpuInstances --gpu 0 --rc UNKNOWN");
    let answer = world.observed.request(world.agent(), &body(&share, 1, 0));
    world.host.clear_faults();
    let outcome = match answer {
        Ok(grant) => world.model.grant(&grant.lease.id.to_string(), &share, 1, lease_of(&grant.lease)),
        Err(error) if error.retryable || world.model.expects(&share, 1) == Expected::Impossible => Ok(()),
        Err(error) => Err(format!("refused for good while the driver fails: {error:?}")),
    };
    world.agent().settle_reads();
    Some(outcome)
}

/// Returns a random active lease.
fn active(world: &World, rng: &mut fastrand::Rng) -> Option<String> {
    let active = world.model.open.iter().filter(|(_, lease)| lease.state == LeaseState::Active);
    let active: Vec<&String> = active.map(|(id, _)| id).collect();
    if active.is_empty() { None } else { Some(active[rng.usize(..active.len())].clone()) }
}

fn end(world: &mut World, rng: &mut fastrand::Rng, reason: EndReason) -> Option<Outcome> {
    let id = active(world, rng)?;
    let is_used = world.model.is_used(&id);
    world.count(format!("{} {}", reason.name(), if is_used { "in use" } else { "idle" }));
    let answer = world.observed.end(world.agent(), &id, reason == EndReason::Revoked);
    world.model.end(&id, reason);
    Some(match answer {
        Ok(lease) if is_used && lease.state == LeaseState::Ended => Err(format!("{id} ended while it is in use")),
        Ok(_) => Ok(()),
        Err(error) => Err(format!("{id}: {error:?}")),
    })
}

fn release(world: &mut World, rng: &mut fastrand::Rng) -> Option<Outcome> {
    end(world, rng, EndReason::Released)
}

fn revoke(world: &mut World, rng: &mut fastrand::Rng) -> Option<Outcome> {
    end(world, rng, EndReason::Revoked)
}

fn release_again(world: &mut World, _: &mut fastrand::Rng) -> Option<Outcome> {
    let id = world.model.ended.keys().next_back()?.clone();
    Some(match world.observed.end(world.agent(), &id, false) {
        Ok(lease) if lease.state == LeaseState::Ended => Ok(()),
        other => Err(format!("second release of {id}: {other:?}")),
    })
}

fn release_unknown(world: &mut World, _: &mut fastrand::Rng) -> Option<Outcome> {
    Some(match world.observed.end(world.agent(), "L99999999", false) {
        Err(error) if error.code == Code::NotFound => Ok(()),
        other => Err(format!("release of an unknown lease: {other:?}")),
    })
}

/// Starts a process of root on a target that root has leased.
fn start_process(world: &mut World, rng: &mut fastrand::Rng) -> Option<Outcome> {
    let leases = world.model.open.values().filter(|lease| lease.holder == 0 && lease.state == LeaseState::Active);
    let targets: Vec<String> = leases.flat_map(|lease| lease.targets.iter().cloned()).collect();
    let running: usize = world.model.targets.values().map(|target| target.processes.len()).sum();
    if targets.is_empty() || running >= 4 {
        return None;
    }
    let uuid = &targets[rng.usize(..targets.len())];
    let place = world.model.targets.get(uuid)?.place.clone();
    let pid = world.host.process(&place);
    world.model.targets.get_mut(uuid)?.processes.insert(pid);
    Some(Ok(()))
}

fn end_process(world: &mut World, rng: &mut fastrand::Rng) -> Option<Outcome> {
    let running =
        world.model.targets.iter().flat_map(|(uuid, target)| target.processes.iter().map(move |pid| (uuid, *pid)));
    let running: Vec<(String, u32)> = running.map(|(uuid, pid)| (uuid.clone(), pid)).collect();
    if running.is_empty() {
        return None;
    }
    let (uuid, pid) = &running[rng.usize(..running.len())];
    world.host.end_process(*pid);
    world.model.targets.get_mut(uuid)?.processes.remove(pid);
    world.model.settle();
    Some(Ok(()))
}

fn cordon(world: &mut World, rng: &mut fastrand::Rng) -> Option<Outcome> {
    let gpu = rng.usize(..5);
    let is_closed = world.model.closed.contains(&gpu);
    let verb = if is_closed { "uncordon" } else { "cordon" };
    let answer = world.agent().post(&format!("/v1/gpus/{gpu}/{verb}"), &json!({}));
    if answer.status != 200 {
        return Some(Err(format!("{verb} of GPU {gpu}: {:?}", answer.error())));
    }
    if is_closed {
        world.model.closed.remove(&gpu)
    } else {
        world.model.closed.insert(gpu)
    };
    Some(Ok(()))
}

/// Applies a layout. Without leases, the operation must succeed. With leases, it must not destroy a
/// leased device.
fn apply(world: &mut World, rng: &mut fastrand::Rng) -> Option<Outcome> {
    let layout = LAYOUTS[rng.usize(..LAYOUTS.len())];
    let is_leased = world.model.open.values().any(|lease| lease.kind == LeaseKind::Mig);
    let outcome = match world.agent().begin(&["0"], layout) {
        Ok(begun) => match world.agent().follow(begun) {
            operation if operation.state == OperationState::Done => Ok("done"),
            operation => Err(format!("layout {layout:?}: {operation:?}")),
        },
        Err(error) if is_leased && error.code == Code::Blocked => Ok("blocked"),
        Err(error) => Err(format!("layout {layout:?}: {error:?}")),
    };
    world.agent().settle_reads();
    Some(outcome.and_then(|outcome| {
        world.count(format!("layout {outcome}, {}", if is_leased { "leased" } else { "not leased" }));
        world.leased_devices_exist()?;
        world.learn_targets();
        Ok(())
    }))
}

fn kill(world: &mut World, _: &mut fastrand::Rng) -> Option<Outcome> {
    world.kill_agent();
    world.start_agent();
    Some(Ok(()))
}

fn stop(world: &mut World, _: &mut fastrand::Rng) -> Option<Outcome> {
    world.stop_agent();
    world.start_agent();
    Some(Ok(()))
}

/// Reboots the host. All leases end. gpushd then applies the layout of the config or of an
/// override.
fn reboot(world: &mut World, _: &mut fastrand::Rng) -> Option<Outcome> {
    // gpushd applies no layout to a cordoned GPU, so uncordon it first.
    if world.model.closed.remove(&0) {
        assert_eq!(world.agent().post("/v1/gpus/0/uncordon", &json!({})).status, 200);
    }
    world.kill_agent();
    world.host.sim::<&str>("reboot", &[]);
    world.model.reboot();
    world.start_agent();
    world.learn_targets();
    Some(Ok(()))
}
