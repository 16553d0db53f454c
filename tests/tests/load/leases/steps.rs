//! The random steps on leases and processes. Each step changes gpushd or its host, and changes the
//! model in the same way.

use gpush_api::{Code, EndReason, LeaseGrant, LeaseKind, LeaseState};
use gpush_tests::mps::Client;
use serde_json::json;

use super::{
    changes,
    model::{Expected, Share},
    rules::{PROFILES, Rule},
    world::{World, body},
};

pub(super) type Outcome = Result<(), String>;

/// A step: how often it is drawn, its name and its function. If the step is not possible now, the
/// function has no effect and returns `None`.
type Step = (usize, &'static str, fn(&mut World, &mut fastrand::Rng) -> Option<Outcome>);

const STEPS: &[Step] = &[
    (60, "request", request),
    (26, "release", release),
    (8, "revoke", revoke),
    (6, "release an ended lease", release_again),
    (4, "release an unknown lease", release_unknown),
    (14, "start a process", start_process),
    (14, "end a process", end_process),
    (8, "cordon or uncordon a GPU", cordon),
    (6, "request while the driver fails", request_with_fault),
    (14, "reload another rule", changes::reload),
    (2, "reload, and clear overrides", changes::reload_and_clear),
    (14, "apply", changes::apply),
    (10, "override", changes::override_layout),
    (4, "clear an override", changes::clear_override),
    (3, "switch auto_reconcile", changes::switch_auto_reconcile),
    (2, "kill gpushd", kill),
    (1, "stop gpushd", stop),
    (2, "restart with another file", changes::restart),
    (1, "reboot", reboot),
];

/// Runs one random step.
pub(super) fn one(world: &mut World, rng: &mut fastrand::Rng) -> Option<(&'static str, Outcome)> {
    let all: usize = STEPS.iter().map(|(weight, ..)| weight).sum();
    let mut drawn = rng.usize(..all);
    let step = STEPS.iter().find(|(weight, ..)| {
        let is_drawn = drawn < *weight;
        drawn = drawn.saturating_sub(*weight);
        is_drawn
    });
    let (_, name, step) = step.expect("the number is below the sum");
    let outcome = world.refresh().map_or_else(|why| Some(Err(why)), |()| step(world, rng));
    Some((name, outcome?))
}

fn share(rng: &mut fastrand::Rng) -> (Share, usize) {
    match rng.usize(..10) {
        0..=3 => (Share::Mig(PROFILES[rng.usize(..PROFILES.len())]), 1 + rng.usize(..2)),
        4 | 5 => (Share::Mps([25, 50, 100][rng.usize(..3)]), 1),
        6 | 7 => (Share::Timeslice, 1),
        _ => (Share::Whole, 1 + rng.usize(..3)),
    }
}

/// Returns the uid of root, or of a user who holds so few leases that no quota applies. An MPS daemon
/// serves one user at a time, so all MPS leases are of root.
fn holder(world: &World, rng: &mut fastrand::Rng, share: Share, count: usize) -> u32 {
    let user = 1001;
    let held = world.model.open.values().filter(|lease| lease.holder == user).count();
    let may_hold = held < 2 && count == 1 && share.kind() != LeaseKind::Mps;
    if rng.usize(..3) == 0 && may_hold { user } else { 0 }
}

fn request(world: &mut World, rng: &mut fastrand::Rng) -> Option<Outcome> {
    let (share, count) = share(rng);
    let holder = holder(world, rng, share, count);
    let only = (rng.usize(..2) == 0).then(|| rng.usize(..world.model.gpus.len()));
    Some(request_share(world, share, count, only, holder))
}

/// Requests a share of any GPU, or of one GPU.
pub(super) fn request_share(
    world: &mut World,
    share: Share,
    count: usize,
    only: Option<usize>,
    holder: u32,
) -> Outcome {
    let (expected, answer) = world.request(share, count, only, holder);
    let verdict = if answer.is_ok() { "granted" } else { "refused" };
    world.count(format!("request {:?}: {expected:?}, {verdict}", share.kind()));
    let unexpected = |got: String| Err(format!("{count} {share:?} of {only:?}: expected {expected:?}, got {got}"));
    match (expected, answer) {
        (_, Ok(grant)) => {
            record(world, &grant, share, count, holder)?;
            match expected {
                Expected::Granted | Expected::GrantedOrRefused => Ok(()),
                Expected::Refused | Expected::Blocked | Expected::Impossible => unexpected(format!("{grant:?}")),
            }
        }
        (Expected::GrantedOrRefused | Expected::Refused, Err(_)) => Ok(()),
        // If the request names a cordoned GPU, the GPU is `unavailable`.
        (Expected::Blocked, Err(error))
            if matches!(error.code, Code::Blocked | Code::Unavailable) && error.retryable =>
        {
            Ok(())
        }
        (Expected::Impossible, Err(error)) if !error.retryable => Ok(()),
        (Expected::Granted | Expected::Blocked | Expected::Impossible, Err(error)) => unexpected(format!("{error:?}")),
    }
}

fn record(world: &mut World, grant: &LeaseGrant, share: Share, count: usize, holder: u32) -> Outcome {
    world.granted(grant, share, count)?;
    let id = grant.lease.id.to_string();
    let named = grant.environment.iter().any(|(name, value)| name == "GPUSH_LEASE" && *value == id);
    if grant.lease.state != LeaseState::Active || grant.lease.holder.uid != holder || !named {
        return Err(format!("{share:?} for uid {holder}: {grant:?}"));
    }
    if world.observed.changes_compute_mode() && share == Share::Whole {
        world.change_compute_mode(grant.lease.members[0].gpu_uuid.as_str());
    }
    Ok(())
}

/// Requests a MIG device while readings of GPU 0 fail. gpushd may refuse the devices of this GPU, or
/// grant them based on an earlier reading.
fn request_with_fault(world: &mut World, rng: &mut fastrand::Rng) -> Option<Outcome> {
    let share = Share::Mig(PROFILES[rng.usize(..3)]);
    world.host.fault("nvmlDeviceGetGpuInstances --gpu 0 --rc UNKNOWN");
    let answer = world.observed.request(world.agent(), &body(share, 1, None, 0));
    world.host.clear_faults();
    let expected = world.model.expects(share, 1, None);
    let may_be_final = matches!(expected, Expected::Impossible | Expected::Refused | Expected::GrantedOrRefused);
    world.agent().settle_reads();
    Some(match answer {
        Ok(grant) => world.granted(&grant, share, 1),
        Err(error) if error.retryable || may_be_final => Ok(()),
        Err(error) => Err(format!("refused for good while the driver fails: {error:?}")),
    })
}

/// Returns a random active lease.
fn active(world: &World, rng: &mut fastrand::Rng) -> Option<String> {
    let active = world.model.open.iter().filter(|(_, lease)| lease.state == LeaseState::Active);
    let active: Vec<&String> = active.map(|(id, _)| id).collect();
    if active.is_empty() { None } else { Some(active[rng.usize(..active.len())].clone()) }
}

pub(super) fn end(world: &mut World, id: &str, reason: EndReason) -> Outcome {
    let is_used = world.model.is_used(id);
    world.count(format!("{} {}", reason.name(), if is_used { "in use" } else { "idle" }));
    let answer = world.observed.end(world.agent(), id, reason == EndReason::Revoked);
    world.model.end(id, reason);
    match answer {
        Ok(lease) if is_used && lease.state == LeaseState::Ended => Err(format!("{id} ended while it is in use")),
        Ok(_) => Ok(()),
        Err(error) => Err(format!("{id}: {error:?}")),
    }
}

fn release(world: &mut World, rng: &mut fastrand::Rng) -> Option<Outcome> {
    let id = active(world, rng)?;
    Some(end(world, &id, EndReason::Released))
}

fn revoke(world: &mut World, rng: &mut fastrand::Rng) -> Option<Outcome> {
    let id = active(world, rng)?;
    Some(end(world, &id, EndReason::Revoked))
}

fn release_again(world: &mut World, _: &mut fastrand::Rng) -> Option<Outcome> {
    let id = world.model.last_ended()?.0.clone();
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

/// Maximum number of processes and MPS clients that run at the same time.
const PROCESSES: usize = 4;

/// Starts a process of root on a target that root has leased, or an MPS client of a lease of root.
fn start_process(world: &mut World, rng: &mut fastrand::Rng) -> Option<Outcome> {
    let leases = world.model.open.iter().filter(|(_, one)| one.holder == 0 && one.state == LeaseState::Active);
    let leases: Vec<(&String, &String)> =
        leases.flat_map(|(id, one)| one.targets.iter().map(move |uuid| (id, uuid))).collect();
    let running: usize = world.model.targets.values().map(|target| target.processes.len()).sum();
    if leases.is_empty() || running + world.clients.len() >= PROCESSES {
        return None;
    }
    let (id, uuid) = leases[rng.usize(..leases.len())];
    let target = world.model.targets.get(uuid)?;
    // With this rule, the driver permits one process.
    if world.model.gpus[target.gpu].in_force == Rule::OneProcess && !target.processes.is_empty() {
        return None;
    }
    let (id, uuid) = (id.clone(), uuid.clone());
    Some(start_process_on(world, &id, &uuid))
}

/// Starts a process of root on the first target of a lease.
pub(super) fn start_process_of(world: &mut World, id: &str) -> Outcome {
    let uuid = world.model.open[id].targets[0].clone();
    start_process_on(world, id, &uuid)
}

fn start_process_on(world: &mut World, id: &str, uuid: &str) -> Outcome {
    if world.model.open[id].kind == LeaseKind::Mps {
        return start_client(world, id);
    }
    let Some(target) = world.model.targets.get_mut(uuid) else { return Err(format!("{uuid} of {id} does not exist")) };
    target.processes.insert(world.host.process(&target.place()));
    Ok(())
}

/// Starts an MPS client with the environment of a lease.
fn start_client(world: &mut World, id: &str) -> Outcome {
    let answer = world.agent().get(&format!("/v1/leases/{id}/environment"));
    if answer.status != 200 {
        return Err(format!("environment of {id}: {:?}", answer.error()));
    }
    let grant: LeaseGrant = serde_json::from_value(answer.json()).expect("an environment");
    let client = Client::start(&world.host, &grant.environment);
    if !client.first.starts_with("active") {
        return Err(format!("the MPS client of {id} printed {:?}", client.first));
    }
    world.clients.push((id.to_owned(), client));
    *world.model.clients.entry(id.to_owned()).or_default() += 1;
    Ok(())
}

fn end_process(world: &mut World, rng: &mut fastrand::Rng) -> Option<Outcome> {
    let running: usize = world.model.targets.values().map(|target| target.processes.len()).sum();
    let drawn = rng.usize(..(running + world.clients.len()).max(1));
    end_process_at(world, drawn).then_some(Ok(()))
}

/// Ends a process or an MPS client. Returns false if none runs.
pub(super) fn end_any_process(world: &mut World) -> bool {
    end_process_at(world, 0)
}

fn end_process_at(world: &mut World, at: usize) -> bool {
    let running = world.model.targets.values().flat_map(|target| target.processes.iter().copied());
    let running: Vec<u32> = running.collect();
    if let Some(pid) = running.get(at) {
        world.host.end_process(*pid);
        for target in world.model.targets.values_mut() {
            target.processes.remove(pid);
        }
    } else if at < running.len() + world.clients.len() {
        let (id, client) = world.clients.swap_remove(at - running.len());
        client.end();
        if let Some(clients) = world.model.clients.get_mut(&id) {
            *clients -= 1;
        }
    } else {
        return false;
    }
    world.model.settle();
    true
}

fn cordon(world: &mut World, rng: &mut fastrand::Rng) -> Option<Outcome> {
    let gpu = rng.usize(..world.model.gpus.len());
    let is_closed = world.model.gpus[gpu].is_closed;
    Some(set_cordon(world, gpu, !is_closed))
}

fn set_cordon(world: &mut World, gpu: usize, is_closed: bool) -> Outcome {
    let verb = if is_closed { "cordon" } else { "uncordon" };
    let answer = world.agent().post(&format!("/v1/gpus/{gpu}/{verb}"), &json!({}));
    if answer.status != 200 {
        return Err(format!("{verb} of GPU {gpu}: {:?}", answer.error()));
    }
    world.model.gpus[gpu].is_closed = is_closed;
    Ok(())
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

/// Reboots the host. All leases end. gpushd then applies the desired state of each GPU.
fn reboot(world: &mut World, _: &mut fastrand::Rng) -> Option<Outcome> {
    // gpushd does not change a cordoned GPU, so uncordon all GPUs first.
    for gpu in 0..world.model.gpus.len() {
        if world.model.gpus[gpu].is_closed
            && let Err(why) = set_cordon(world, gpu, false)
        {
            return Some(Err(why));
        }
    }
    world.reboot();
    Some(Ok(()))
}
