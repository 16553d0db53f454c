//! Steps on MPS targets.

use gpush_api::{Code, MpsState};
use gpush_tests::mps::{Client, Role, act, base, becomes, daemon, lease, parts, pid_of, reaches};
use serde_json::json;

use super::world::{Granted, World, kill, sleeper};

/// Maximum number of leases on one target.
const MOST: usize = 4;

fn grant(world: &mut World, rng: &mut fastrand::Rng, bound: bool) -> bool {
    let (name, target) = world.target(rng);
    if target.stopped || target.leases.len() >= MOST {
        return false;
    }
    let process = bound.then(sleeper);
    // The percentage is small, because a released lease keeps its capacity while its clients run.
    let percentage = 1 + rng.usize(..10);
    let body = match &process {
        Some(process) => json!({ "percentage": percentage, "process": process.id() }),
        None => json!({ "percentage": percentage }),
    };
    let taken = match lease(world.agent(), name, &body) {
        Ok(taken) => taken,
        Err(error) => world.fail(&format!("a lease on {name}: {error:?}")),
    };
    let new = Granted { id: taken.lease.id.to_string(), environment: taken.environment, process };
    world.targets.get_mut(name).expect("a target").leases.push(new);
    true
}

pub(super) fn take(world: &mut World, rng: &mut fastrand::Rng) -> bool {
    grant(world, rng, false)
}

pub(super) fn take_for_process(world: &mut World, rng: &mut fastrand::Rng) -> bool {
    grant(world, rng, true)
}

pub(super) fn end_process(world: &mut World, rng: &mut fastrand::Rng) -> bool {
    let (_, target) = world.target(rng);
    let Some(at) = target.leases.iter().position(|lease| lease.process.is_some()) else { return false };
    // Dropping the lease ends the process to which it is bound.
    drop(target.leases.remove(at));
    true
}

pub(super) fn release(world: &mut World, rng: &mut fastrand::Rng) -> bool {
    let (_, target) = world.target(rng);
    if target.leases.is_empty() {
        return false;
    }
    let at = rng.usize(..target.leases.len());
    let lease = target.leases.remove(at);
    let answer = world.agent().post(&format!("/v1/leases/{}/release", lease.id), &json!({}));
    if answer.status != 200 {
        world.fail(&format!("the release of {}: {:?}", lease.id, answer.error()));
    }
    true
}

pub(super) fn start_client(world: &mut World, rng: &mut fastrand::Rng) -> bool {
    let (name, target) = world.target(rng);
    if target.stopped || target.leases.is_empty() || target.clients.len() >= MOST {
        return false;
    }
    let environment = target.leases[rng.usize(..target.leases.len())].environment.clone();
    let client = Client::start(&world.host, &environment);
    if !client.first.starts_with("active") {
        world.fail(&format!("a client of {name} says {}", client.first));
    }
    world.targets.get_mut(name).expect("a target").clients.push(client);
    true
}

pub(super) fn end_client(world: &mut World, rng: &mut fastrand::Rng) -> bool {
    let (name, target) = world.target(rng);
    if target.clients.is_empty() {
        return false;
    }
    let at = rng.usize(..target.clients.len());
    target.clients.remove(at).end();
    wait_for_clients(world, name);
    true
}

/// Waits until gpushd reports as many clients as the model has.
fn wait_for_clients(world: &World, name: &'static str) {
    let (count, stopped) = (world.targets[name].clients.len(), world.targets[name].stopped);
    if !stopped {
        becomes(world.agent(), name, "known with its clients", |daemon| daemon.clients.len() == count);
    }
}

/// Stops or restarts a target without `force`. gpushd must refuse the request while the target is
/// in use.
fn unforced(world: &mut World, rng: &mut fastrand::Rng, verb: &str) -> Option<&'static str> {
    let (name, target) = world.target(rng);
    if target.stopped {
        return None;
    }
    let is_used = target.is_used();
    let answer = act(world.agent(), name, verb, &json!({}));
    match (is_used, answer.status) {
        (false, 200) => Some(name),
        (true, 409) if answer.error().code == Code::Blocked => {
            world.count(format!("{verb} of a daemon in use was refused"));
            Some("")
        }
        (_, status) => world.fail(&format!("{verb} of {name}, used: {is_used}: {status} {}", text(&answer.body))),
    }
}

fn text(body: &[u8]) -> String {
    String::from_utf8_lossy(body).into_owned()
}

pub(super) fn stop(world: &mut World, rng: &mut fastrand::Rng) -> bool {
    let Some(name) = unforced(world, rng, "stop") else { return false };
    if !name.is_empty() {
        stopped(world, name);
    }
    true
}

pub(super) fn restart(world: &mut World, rng: &mut fastrand::Rng) -> bool {
    let Some(name) = unforced(world, rng, "restart") else { return false };
    if !name.is_empty() {
        another(world, name);
    }
    true
}

/// Updates the model of a target whose daemon was stopped: its clients have ended, but not its
/// leases.
fn stopped(world: &mut World, name: &'static str) {
    reaches(world.agent(), name, MpsState::Stopped);
    let target = world.targets.get_mut(name).expect("a target");
    (target.stopped, target.pid) = (true, 0);
    target.clients.clear();
}

/// Waits until gpushd has replaced the daemon of a target, and the new daemon is ready.
fn another(world: &mut World, name: &'static str) {
    let before = world.targets[name].pid;
    let now = becomes(world.agent(), name, "ready with another daemon", |daemon| {
        daemon.state == MpsState::Ready && pid_of(daemon) != before
    });
    let target = world.targets.get_mut(name).expect("a target");
    target.pid = pid_of(&now);
}

fn by_force(world: &mut World, rng: &mut fastrand::Rng, verb: &str) -> Option<&'static str> {
    let (name, target) = world.target(rng);
    if target.stopped {
        return None;
    }
    let answer = act(world.agent(), name, verb, &json!({ "force": true }));
    if answer.status != 200 {
        world.fail(&format!("{verb} of {name} by force: {:?}", answer.error()));
    }
    Some(name)
}

pub(super) fn stop_by_force(world: &mut World, rng: &mut fastrand::Rng) -> bool {
    let Some(name) = by_force(world, rng, "stop") else { return false };
    stopped(world, name);
    true
}

pub(super) fn restart_by_force(world: &mut World, rng: &mut fastrand::Rng) -> bool {
    let Some(name) = by_force(world, rng, "restart") else { return false };
    another(world, name);
    world.targets.get_mut(name).expect("a target").clients.clear();
    wait_for_clients(world, name);
    true
}

pub(super) fn start(world: &mut World, rng: &mut fastrand::Rng) -> bool {
    let (name, target) = world.target(rng);
    if !target.stopped {
        return false;
    }
    let answer = act(world.agent(), name, "start", &json!({}));
    if answer.status != 200 {
        world.fail(&format!("start of {name}: {:?}", answer.error()));
    }
    world.targets.get_mut(name).expect("a target").stopped = false;
    world.note_daemon(name);
    true
}

pub(super) fn drain(world: &mut World, rng: &mut fastrand::Rng) -> bool {
    let (name, target) = world.target(rng);
    if target.stopped {
        return false;
    }
    let is_used = target.is_used();
    let answer = act(world.agent(), name, "drain", &json!({}));
    if answer.status != 200 {
        world.fail(&format!("drain of {name}: {:?}", answer.error()));
    }
    if is_used {
        reaches(world.agent(), name, MpsState::Draining);
        let target = world.targets.get_mut(name).expect("a target");
        let lost = target.clients.iter_mut().any(|client| !client.lives() || !client.printed().is_empty());
        let clients = std::mem::take(&mut target.clients);
        if lost {
            world.fail("a client was lost to a drain");
        }
        while world.targets.get(name).is_some_and(|target| !target.leases.is_empty()) {
            let lease = world.targets.get_mut(name).expect("a target").leases.remove(0);
            let answer = world.agent().post(&format!("/v1/leases/{}/release", lease.id), &json!({}));
            if answer.status != 200 {
                world.fail(&format!("the release of {}: {:?}", lease.id, answer.error()));
            }
        }
        clients.into_iter().for_each(Client::end);
    }
    stopped(world, name);
    true
}

pub(super) fn set(world: &mut World, rng: &mut fastrand::Rng) -> bool {
    let (name, target) = world.target(rng);
    let percentage = u32::try_from(50 + rng.usize(..51)).expect("a small number");
    let stopped = target.stopped;
    let answer = world.agent().post(&format!("/v1/mps/{name}/settings"), &json!({ "percentage": percentage }));
    if answer.status != 200 {
        world.fail(&format!("settings of {name}: {:?}", answer.error()));
    }
    world.targets.get_mut(name).expect("a target").percentage = percentage;
    if !stopped {
        becomes(world.agent(), name, "set", |daemon| {
            daemon.in_force.as_ref().is_some_and(|now| now.percentage.to_string() == percentage.to_string())
        });
    }
    true
}

pub(super) fn kill_daemon(world: &mut World, rng: &mut fastrand::Rng) -> bool {
    let (name, target) = world.target(rng);
    if target.stopped {
        return false;
    }
    kill(target.pid);
    // While the server has clients, gpushd starts no other daemon. So end the clients.
    std::mem::take(&mut target.clients).into_iter().for_each(drop);
    another(world, name);
    wait_for_clients(world, name);
    true
}

pub(super) fn kill_server(world: &mut World, rng: &mut fastrand::Rng) -> bool {
    let (name, target) = world.target(rng);
    if target.stopped || target.clients.is_empty() {
        return false;
    }
    let pipe = daemon(world.agent(), name).pipe_directory.expect("a directory");
    let servers = parts(&base(&world.host));
    let server = servers.iter().find(|part| part.role == Role::Server && part.pipe == std::path::Path::new(&pipe));
    let Some(server) = server else { world.fail("clients without a server") };
    kill(server.pid);
    let clients = std::mem::take(&mut world.targets.get_mut(name).expect("a target").clients);
    for client in clients {
        if client.says() != "lost" {
            world.fail("a client outlived its server");
        }
    }
    becomes(world.agent(), name, "ready without clients", |daemon| {
        daemon.state == MpsState::Ready && daemon.clients.is_empty() && daemon.servers.is_empty()
    });
    world.note_daemon(name);
    true
}
