//! Conditions that must always hold. The checks use other sources than gpushd where possible.

use std::{collections::BTreeSet, path::Path, process::Stdio};

use gpush_api::{GpuState, LeaseState, MpsState, OperationSummary};
use gpush_tests::{
    agent::real_layout,
    mps::{Role, base, becomes, is_open, parts},
};
use serde_json::json;

use super::world::{MIG, MPS, World};

/// Checks all conditions. If `thorough` is false, leaves out the slow checks.
pub(super) fn all(world: &mut World, thorough: bool) {
    instances_in_use_are_there(world);
    layouts_are_those_of_the_model(world);
    driver_calls_are_of_operations(world);
    targets_are_those_of_the_model(world);
    daemons_are_not_doubled(world);
    clients_live(world);
    if thorough {
        daemons_have_their_settings(world);
        no_operation_is_left(world);
    }
}

fn check(world: &mut World, holds: bool, what: impl FnOnce() -> String) {
    world.checks += 1;
    if !holds {
        world.fail(&what());
    }
}

/// Checks that no instance in use was destroyed. Uses the simulated hardware and the trace of
/// driver calls.
fn instances_in_use_are_there(world: &mut World) {
    let (show, trace) = (world.host.show(), world.host.trace());
    for gpu in MIG {
        let instances = show["gpus"][gpu]["state"]["instances"].as_array().cloned().unwrap_or_default();
        for held in world.cuts[gpu].held.clone() {
            let is_there = instances.iter().any(|instance| instance["id"] == json!(held.gi));
            check(world, is_there, || format!("GPU {gpu} has lost GPU instance {} of process {}", held.gi, held.pid));
            let lives = Path::new(&format!("/proc/{}", held.pid)).exists();
            check(world, lives, || format!("process {} on GPU {gpu} has ended", held.pid));
            let destroys = |call: &&gpush_tests::host::Traced| {
                let is_this = call.arguments.split(' ').any(|word| word == format!("gi={}", held.gi));
                call.function.contains("Destroy") && call.gpu == u32::try_from(gpu).ok() && is_this
            };
            let tried = trace.iter().find(destroys);
            check(world, tried.is_none(), || format!("the driver was asked to destroy an instance in use: {tried:?}"));
        }
    }
}

/// Checks for each GPU that its instances, the record of the last operation and the API agree.
fn layouts_are_those_of_the_model(world: &mut World) {
    for gpu in MIG {
        let now = real_layout(&world.host, gpu);
        let expected = world.cuts[gpu].instances.clone();
        check(world, now == expected, || format!("GPU {gpu} holds {now:?}, not {expected:?}"));
        let cordoned = world.cuts[gpu].cordoned;
        let state = if cordoned { GpuState::Cordoned } else { GpuState::Ready };
        let index = u32::try_from(gpu).expect("an index");
        world.agent().await_that("the GPU as it is", || {
            let shown = world.agent().gpu(index);
            let count = shown.mig.as_ref().map_or(0, |mig| mig.instances.len());
            shown.state == state && count == expected.len()
        });
        world.checks += 1;
    }
}

/// Checks that a GPU with MIG is changed only by operations.
fn driver_calls_are_of_operations(world: &mut World) {
    if world.operates {
        return;
    }
    let calls: Vec<_> = world.host.trace().into_iter().filter(|call| matches!(call.gpu, Some(0 | 1))).collect();
    check(world, calls.is_empty(), || format!("the driver was asked to change a MIG GPU: {calls:?}"));
}

/// Compares state, pid and leases of each target with the model. Also checks that only holders of a
/// lease have access to the pipe directory.
fn targets_are_those_of_the_model(world: &mut World) {
    for name in MPS {
        let target = &world.targets[name];
        let state = if target.stopped { MpsState::Stopped } else { MpsState::Ready };
        let ids: BTreeSet<String> = target.leases.iter().map(|lease| lease.id.clone()).collect();
        let clients = target.clients.len();
        let pid = (!target.stopped).then_some(target.pid.cast_unsigned());
        // Retry until gpushd matches the model: a lease ends a moment after its process, and gpushd
        // polls a daemon at most once a second.
        let now = becomes(
            world.agent(),
            name,
            &format!("as the model: {state:?} {pid:?} {ids:?}, {clients} clients"),
            |now| {
                let active = now.leases.iter().filter(|lease| lease.state == LeaseState::Active);
                let leases: BTreeSet<String> = active.map(|lease| lease.id.to_string()).collect();
                now.state == state && leases == ids && now.pid == pid && now.clients.len() == clients
            },
        );
        let admits = !ids.is_empty() && !world.targets[name].stopped;
        if let Some(pipe) = &now.pipe_directory {
            world.agent().await_that("access to the pipe directory", || is_open(Path::new(pipe)) == admits);
        } else {
            check(world, !admits, || format!("{name} has leases and no pipe directory"));
        }
        world.checks += 2;
    }
}

/// Checks in `/proc` that each running target has one daemon with at most one server, and that a
/// stopped target has no daemon.
fn daemons_are_not_doubled(world: &mut World) {
    let all = parts(&base(&world.host));
    let mut expected: Vec<i32> = world.targets.values().filter(|one| !one.stopped).map(|one| one.pid).collect();
    expected.sort_unstable();
    let mut controls: Vec<i32> = all.iter().filter(|part| part.role == Role::Control).map(|part| part.pid).collect();
    controls.sort_unstable();
    check(world, controls == expected, || format!("control daemons {controls:?}, not {expected:?}: {all:?}"));
    let pipes: Vec<_> = all.iter().filter(|part| part.role == Role::Server).map(|part| &part.pipe).collect();
    let distinct: BTreeSet<_> = pipes.iter().collect();
    check(world, distinct.len() == pipes.len(), || format!("two servers of one daemon: {all:?}"));
}

fn clients_live(world: &mut World) {
    for name in MPS {
        let target = world.targets.get_mut(name).expect("a target");
        let lost = target.clients.iter_mut().find_map(|client| (!client.lives()).then(|| client.pid()));
        check(world, lost.is_none(), || format!("client {lost:?} of {name} has ended"));
    }
}

/// Checks with the front-end that each daemon has the percentage that the test has set.
fn daemons_have_their_settings(world: &mut World) {
    for name in MPS {
        let (stopped, percentage) = (world.targets[name].stopped, world.targets[name].percentage);
        if stopped {
            continue;
        }
        let now = gpush_tests::mps::daemon(world.agent(), name);
        let pipe = now.pipe_directory.expect("a directory");
        let reported = world.agent().until("an answer of the front-end", || front(world, &pipe));
        check(world, reported == f64::from(percentage), || format!("{name} has {reported} %, not {percentage} %"));
    }
}

/// Returns the output of the front-end. If gpushd uses the control connection of the daemon at this
/// moment, returns `None`.
fn front(world: &World, pipe: &str) -> Option<f64> {
    // If NVIDIA's own front-end is installed, use it with the simulated daemon.
    let nvidia = std::path::PathBuf::from("/usr/bin/nvidia-cuda-mps-control");
    let simulated = || world.host.dir().join("bin/nvidia-cuda-mps-control");
    let mut command = world.host.command(if nvidia.is_file() { nvidia } else { simulated() });
    command.env("CUDA_MPS_PIPE_DIRECTORY", pipe).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().expect("a front-end");
    let typed =
        std::io::Write::write_all(&mut child.stdin.take().expect("piped"), b"get_default_active_thread_percentage\n");
    let output = child.wait_with_output().expect("it ends");
    typed.ok()?;
    String::from_utf8_lossy(&output.stdout).trim().parse().ok()
}

/// Checks that every operation has ended and none has failed.
fn no_operation_is_left(world: &mut World) {
    let all: Vec<OperationSummary> =
        serde_json::from_value(world.agent().get("/v1/operations?limit=200").json()).expect("operations");
    let left: Vec<_> = all.iter().filter(|one| !one.state.is_final()).map(|one| one.id.clone()).collect();
    check(world, left.is_empty(), || format!("operations have not ended: {left:?}"));
}
