//! During an apply, driver calls fail, kill the worker or hang. After that, the GPU must have the new or the previous
//! layout, as the operation reports, or the GPU must be degraded.

use gpush_api::{Code, GpuState, Operation, OperationState};
use gpush_tests::{
    agent::{Agent, Setup, real_layout},
    host::{Host, Traced},
};

use crate::faults::fault_at;

const BEFORE: &[&str] = &["2g.20gb@0", "1g.10gb@2", "1g.10gb@3", "3g.40gb@4"];
/// A layout that keeps the 3g.40gb with other compute instances, and replaces all other instances.
const AFTER: &[&str] = &["1c.3g.40gb*2", "4g.40gb"];
const CONFIG: &str = "[driver]\nchange_s = 1\nread_ms = 2000\n";

/// Applies AFTER once to a GPU with BEFORE. Returns the driver calls that change the GPU.
fn calls(host: &Host, agent: &Agent) -> Vec<Traced> {
    assert_eq!(agent.apply(&["0"], BEFORE).state, OperationState::Done);
    host.start_trace();
    assert_eq!(agent.apply(&["0"], AFTER).state, OperationState::Done);
    host.trace()
}

/// Compares what an operation reports with the hardware.
fn check(host: &Host, agent: &Agent, operation: &Operation, before: &[String], after: &[String]) {
    let now = real_layout(host, 0);
    let gpu = agent.gpu(0);
    match operation.state {
        OperationState::Done => assert_eq!(now, after, "{operation:?}"),
        OperationState::RolledBack => {
            assert_eq!(now, before, "{operation:?}");
            let error = operation.error.as_ref().expect("a reason");
            assert!(error.message.starts_with("GPU 0 (GPU-"), "{error:?}");
            assert!(operation.progress[0].rolling_back && operation.progress[0].error.is_some());
        }
        OperationState::Queued
        | OperationState::Waiting
        | OperationState::Running
        | OperationState::Cancelling
        | OperationState::Interrupted
        | OperationState::NotStarted
        | OperationState::Failed => {
            panic!("{operation:?}\n{}", agent.log())
        }
    }
    assert_eq!(gpu.state, GpuState::Ready, "{:?}", gpu.reasons);
}

#[test]
fn failure_of_any_call_restores_previous_layout() {
    let host = Host::up("dgx-a100");
    let agent = Agent::start(&host, CONFIG);
    let calls = calls(&host, &agent);
    assert!(calls.len() > 8, "{calls:?}");
    let after = real_layout(&host, 0);
    let mut tried = 0;
    for (k, code) in
        (0..calls.len()).zip(["UNKNOWN", "IN_USE", "INSUFFICIENT_RESOURCES", "NO_PERMISSION"].iter().cycle())
    {
        assert_eq!(agent.apply(&["0"], BEFORE).state, OperationState::Done);
        let before = real_layout(&host, 0);
        // If a call returns IN_USE, gpushd repeats the call once in a new session.
        let times = if *code == "IN_USE" { 2 } else { 1 };
        let rule = fault_at(&calls, k, &format!("--rc {code}"));
        host.fault(&rule.replace("--times 1", &format!("--times {times}")));
        let operation = agent.apply(&["0"], AFTER);
        assert_eq!(operation.state, OperationState::RolledBack, "call {k} ({}): {operation:?}", calls[k].function);
        assert_eq!(operation.progress[0].done as usize, k, "steps taken before call {k}");
        check(&host, &agent, &operation, &before, &after);
        host.clear_faults();
        tried += 1;
    }
    println!("{tried} failing calls of {}: the previous layout each time", calls.len());
}

#[test]
fn worker_killed_at_any_call_leaves_target_or_previous_layout() {
    let host = Host::up("dgx-a100");
    let agent = Agent::start(&host, CONFIG);
    let calls = calls(&host, &agent);
    let after = real_layout(&host, 0);
    let (mut done, mut back) = (0, 0);
    for k in 0..calls.len() {
        for when in ["before", "after"] {
            assert_eq!(agent.apply(&["0"], BEFORE).state, OperationState::Done);
            let before = real_layout(&host, 0);
            host.fault(&fault_at(&calls, k, &format!("--kill {when}")));
            let operation = agent.apply(&["0"], AFTER);
            check(&host, &agent, &operation, &before, &after);
            // If the worker died after the call had taken effect, the step counts as completed.
            let expected = if when == "after" { OperationState::Done } else { OperationState::RolledBack };
            assert_eq!(operation.state, expected, "killed {when} call {k}: {operation:?}");
            if operation.state == OperationState::Done {
                done += 1;
            } else {
                back += 1;
            }
            host.clear_faults();
        }
    }
    let log = agent.until("a line for each death in the log", || {
        let log = agent.log();
        (log.matches("WARN gpushd's driver worker died").count() >= 2 * calls.len()).then_some(log)
    });
    let died: Vec<&str> = log.lines().filter(|line| line.contains("WARN gpushd's driver worker died")).collect();
    assert_eq!(died.len(), 2 * calls.len(), "{died:#?}");
    let uuid = agent.gpu(0).uuid;
    for line in died {
        assert!(line.contains("signal SIGKILL") && line.contains(" during ") && line.contains(&uuid), "{line}");
        assert!(line.contains("from the hardware"), "{line}");
    }
    println!("{} kills of the worker: {done} went on to the target, {back} back", done + back);
}

#[test]
fn hung_call_is_abandoned_and_judged_by_its_effect() {
    let host = Host::up("dgx-a100");
    let agent = Agent::start(&host, CONFIG);
    let calls = calls(&host, &agent);
    assert_eq!(agent.apply(&["0"], BEFORE).state, OperationState::Done);
    let (before, after) = (real_layout(&host, 0), Vec::new());
    host.fault(&fault_at(&calls, 3, "--hang"));
    let mut operation = agent.begin(&["0"], AFTER).unwrap();
    // Wait until the step hangs, and then until its deadline has passed.
    while operation.progress[0].done < 3 && !operation.state.is_final() {
        operation = step(&agent, &operation);
    }
    let mut seen = Vec::new();
    while !operation.state.is_final() {
        let gpus = agent.gpus();
        operation = serde_json::from_value(agent.get(&format!("/v1/operations/{}", operation.id)).json()).unwrap();
        if operation.state.is_final() {
            break;
        }
        assert!(matches!(gpus[0].state, GpuState::Changing | GpuState::Unknown), "{:?}", gpus[0]);
        if seen.last() != Some(&gpus[0].state) {
            seen.push(gpus[0].state);
        }
        for other in &gpus[1..] {
            assert_eq!(other.state, GpuState::Ready, "{other:?}");
        }
    }
    assert!(seen.contains(&GpuState::Unknown), "{seen:?}\n{}", agent.log());
    assert_eq!(operation.state, OperationState::RolledBack, "{operation:?}");
    check(&host, &agent, &operation, &before, &after);
    // The GPU is `ready` now, so the hint must not say that it is `unknown`.
    let error = operation.error.unwrap();
    let hint = error.hint.unwrap();
    assert!(!hint.contains("unknown") && hint.contains("dmesg"), "{hint}");
    assert!(error.causes.iter().any(|cause| cause.contains("no visible effect")), "{:?}", error.causes);
    assert!(error.causes.iter().all(|cause| !cause.contains("may still take effect")), "{:?}", error.causes);
    assert_eq!(error.outcome.as_deref(), Some("the previous layout was restored and read back"));
    // Other GPUs remained usable.
    assert_eq!(agent.apply(&["1"], &["7g.80gb"]).state, OperationState::Done);
}

fn step(agent: &Agent, operation: &Operation) -> Operation {
    let path = format!("/v1/operations/{}?after={}&wait_ms=10000", operation.id, operation.revision);
    serde_json::from_value(agent.get(&path).json()).expect("an operation")
}

#[test]
fn late_call_counts_as_completed_step() {
    let host = Host::up("dgx-a100");
    let agent = Agent::start(&host, CONFIG);
    let calls = calls(&host, &agent);
    let after = real_layout(&host, 0);
    assert_eq!(agent.apply(&["0"], BEFORE).state, OperationState::Done);
    // The deadline of the call is 1 s. The call returns later, but within the grace period.
    host.fault(&fault_at(&calls, 2, "--delay-ms 1500"));
    let operation = agent.apply(&["0"], AFTER);
    assert_eq!(operation.state, OperationState::Done, "{operation:?}\n{}", agent.log());
    assert_eq!(real_layout(&host, 0), after);
}

#[test]
fn lost_gpu_is_named_and_others_roll_back() {
    for k in [0, 4, 9] {
        let host = Host::up("dgx-a100");
        let agent = Agent::start(&host, CONFIG);
        let calls = calls(&host, &agent);
        assert_eq!(agent.apply(&["0", "1"], BEFORE).state, OperationState::Done);
        let before = real_layout(&host, 1);
        host.fault(&fault_at(&calls, k, "--mutate lose"));
        let operation = agent.apply(&["0", "1"], AFTER);
        assert_eq!(operation.state, OperationState::Failed, "{operation:?}");
        let error = operation.error.unwrap();
        assert_eq!(error.code, Code::GpuLost, "{error:?}");
        assert!(error.message.starts_with("GPU 0 (GPU-"), "{error:?}");
        assert!(error.causes.iter().any(|cause| cause.contains("is lost")), "{error:?}");
        assert_eq!(real_layout(&host, 1), before, "GPU 1 is as before");
        let gpus = agent.gpus();
        let lost: Vec<_> = gpus.iter().filter(|gpu| gpu.state == GpuState::Lost).map(|gpu| &gpu.uuid).collect();
        assert_eq!(lost, [&operation.plans[0].uuid], "{gpus:?}");
        let health = agent.get("/v1/health").json();
        assert_eq!(health["errors"][0]["code"], "gpu_lost", "{health}");
        let refused = agent.begin(&[&operation.plans[0].uuid], AFTER).unwrap_err();
        assert_eq!(refused.code, Code::GpuLost, "{refused:?}");
    }
}

#[test]
fn unlisted_handle_is_refused_with_hint_to_its_holder() {
    let host = Host::up("dgx-a100");
    let agent = Agent::start(&host, CONFIG);
    assert_eq!(agent.apply(&["0"], BEFORE).state, OperationState::Done);
    let before = real_layout(&host, 0);
    host.fault("nvmlGpuInstanceDestroy --gpu 0 --rc IN_USE");
    let operation = agent.apply(&["0"], &["7g.80gb"]);
    assert_eq!(operation.state, OperationState::RolledBack, "{operation:?}");
    let error = operation.error.unwrap();
    assert_eq!(error.code, Code::Blocked);
    let hint = error.hint.unwrap();
    assert!(hint.contains("`gpushctl gpu holders GPU-"), "{hint}");
    assert_eq!(real_layout(&host, 0), before);
}

#[test]
fn own_session_handle_blocks_nothing() {
    let host = Host::up("dgx-a100");
    let agent = Agent::start(&host, CONFIG);
    // The leaked handle blocks the first creation. gpushd repeats this creation in a new driver session.
    assert_eq!(agent.apply(&["0"], &["1g.10gb*7"]).state, OperationState::Done);
    host.fault("nvmlDeviceGetGpuInstanceById --mutate leak --times 1");
    let operation = agent.apply(&["0"], &["3g.40gb*2"]);
    assert_eq!(operation.state, OperationState::Done, "{operation:?}\n{}", agent.log());
    host.clear_faults();
    // Here, the leaked handle first blocks a rollback.
    let before = real_layout(&host, 0);
    host.fault("nvmlDeviceGetGpuInstanceById --mutate leak --times 1");
    host.fault("nvmlDeviceCreateGpuInstance* --gpu 0 --times 1 --rc UNKNOWN");
    let operation = agent.apply(&["0"], &["1g.10gb*7"]);
    assert_eq!(operation.state, OperationState::RolledBack, "{operation:?}\n{}", agent.log());
    assert_eq!(real_layout(&host, 0), before);
    assert_eq!(agent.gpu(0).state, GpuState::Ready);
    agent.wait_for_log("trying again in a new driver session");
}

#[test]
fn failing_gpu_rolls_back_whole_operation() {
    let host = Host::up("dgx-a100");
    let agent = Agent::start(&host, CONFIG);
    assert_eq!(agent.apply(&["all"], BEFORE).state, OperationState::Done);
    let before: Vec<_> = (0..8).map(|gpu| real_layout(&host, gpu)).collect();
    host.fault("nvmlDeviceCreateGpuInstance* --gpu 5 --times 1 --rc UNKNOWN");
    let operation = agent.apply(&["all"], AFTER);
    assert_eq!(operation.state, OperationState::RolledBack, "{operation:?}");
    assert!(operation.error.unwrap().message.starts_with("GPU 5 (GPU-"));
    assert_eq!((0..8).map(|gpu| real_layout(&host, gpu)).collect::<Vec<_>>(), before);
}

#[test]
fn failed_rollback_degrades_gpu_until_a_change_succeeds() {
    let host = Host::up("dgx-a100");
    let agent = Agent::start(&host, CONFIG);
    assert_eq!(agent.apply(&["0"], BEFORE).state, OperationState::Done);
    // Every creation fails, including the creations of the rollback.
    host.fault("nvmlDeviceCreateGpuInstance* --gpu 0 --rc UNKNOWN");
    let operation = agent.apply(&["0"], AFTER);
    assert_eq!(operation.state, OperationState::Failed, "{operation:?}");
    let gpu = agent.gpu(0);
    assert_eq!(gpu.state, GpuState::Degraded, "{gpu:?}");
    assert!(gpu.reasons.iter().any(|reason| reason.contains("failed")), "{:?}", gpu.reasons);
    assert_eq!(agent.gpu(1).state, GpuState::Ready);
    assert_eq!(agent.get("/v1/health").json()["status"], "degraded");
    // If a later change is also rolled back, the GPU stays degraded.
    let operation = agent.apply(&["0"], &["2g.20gb"]);
    assert_ne!(operation.state, OperationState::Done, "{operation:?}");
    assert_eq!(agent.gpu(0).state, GpuState::Degraded, "{operation:?}");
    host.clear_faults();
    assert_eq!(agent.apply(&["0"], BEFORE).state, OperationState::Done);
    assert_eq!(agent.gpu(0).state, GpuState::Ready);
    assert_eq!(agent.get("/v1/health").json()["status"], "ok");
}

#[test]
fn mode_without_effect_is_rolled_back() {
    let host = Host::up("[[gpu]]\nmodel = \"h100-80-sxm\"\nmig = false\n");
    let agent = Agent::start(&host, CONFIG);
    // The call returns success, but its activation status is IN_USE.
    host.fault("nvmlDeviceSetMigMode --times 1 --activation-status IN_USE");
    let operation = agent.apply(&["0"], &["3g.40gb"]);
    assert_eq!(operation.state, OperationState::RolledBack, "{operation:?}\n{}", agent.log());
    let error = operation.error.unwrap();
    assert!(error.message.contains("switching MIG mode on"), "{error:?}");
    assert_eq!(real_layout(&host, 0), ["MIG off"]);
    let mig = agent.gpu(0).mig.unwrap();
    assert_eq!((mig.enabled, mig.pending_mode()), (false, false));
    // On Hopper, the driver reports only at the first creation that a GPU is busy. gpushd must then
    // also disable MIG mode again.
    host.fault("nvmlDeviceCreateGpuInstance* --times 2 --rc IN_USE");
    let operation = agent.apply(&["0"], &["3g.40gb"]);
    assert_eq!(operation.state, OperationState::RolledBack, "{operation:?}\n{}", agent.log());
    assert_eq!(real_layout(&host, 0), ["MIG off"]);
    assert_eq!(agent.apply(&["0"], &["3g.40gb"]).state, OperationState::Done);
}

#[test]
fn unchanged_gpu_lost_at_read_back_is_named() {
    let mut lost = 0;
    // The GPU must become lost at one certain call. The number of this call differs between runs,
    // because the fault rule also counts other readings. So try several numbers.
    for after in (0..5).cycle().take(50) {
        if lost > 0 && after == 0 {
            break;
        }
        let host = Host::up("a30x4");
        let agent = Agent::start(&host, CONFIG);
        assert_eq!(agent.apply(&["1"], &["4g.24gb"]).state, OperationState::Done);
        host.fault(&format!("nvmlDeviceGetMigMode --gpu 1 --after {after} --times 1 --mutate lose"));
        // If the GPU becomes lost too early, gpushd refuses the operation. If it becomes lost too
        // late, the operation succeeds.
        let Ok(operation) = agent.begin(&["0", "1"], &["4g.24gb"]) else { continue };
        let operation = agent.follow(operation);
        if operation.state == OperationState::Done {
            continue;
        }
        lost += 1;
        assert_eq!(operation.state, OperationState::Failed, "{operation:?}");
        let error = operation.error.unwrap();
        assert!(error.causes.iter().any(|cause| cause.contains("is lost")), "{error:?}");
    }
    println!("lost at its read-back {lost} times");
    assert!(lost > 0);
}

/// Runs an operation whose last step kills the worker. After that, the GPU cannot be read.
fn outcome_unknown(host: &Host, agent: &Agent, when: &str) -> Operation {
    assert_eq!(agent.apply(&["0"], &["7g.80gb"]).state, OperationState::Done);
    assert_eq!(agent.apply(&["0"], &["none"]).state, OperationState::Done);
    // The operation creates a GPU instance with a compute instance. With "before", the worker is
    // killed before it creates the GPU instance. With "after", it is killed after it has created
    // the compute instance.
    let function =
        if when == "after" { "nvmlGpuInstanceCreateComputeInstance*" } else { "nvmlDeviceCreateGpuInstance*" };
    host.fault(&format!("{function} --gpu 0 --times 1 --delay-ms 800 --kill {when}"));
    let mut operation = agent.begin(&["0"], &["7g.80gb"]).expect("an operation");
    let doing = if when == "after" { "creating compute" } else { "creating GPU" };
    while !operation.progress[0].doing.as_ref().is_some_and(|words| words.starts_with(doing)) {
        operation = step(agent, &operation);
        assert!(!operation.state.is_final(), "{operation:?}");
    }
    host.fault("nvmlDeviceGetMigMode --gpu 0 --rc UNKNOWN");
    agent.follow(operation)
}

#[test]
fn unknown_outcome_ends_when_layout_is_read_back() {
    for (when, stands) in [("after", "as planned"), ("before", "as before")] {
        let host = Host::up("dgx-a100");
        let agent = Agent::start(&host, CONFIG);
        let operation = outcome_unknown(&host, &agent, when);
        assert_eq!(operation.state, OperationState::Failed, "{operation:?}");
        let causes = &operation.error.as_ref().unwrap().causes;
        assert!(causes.iter().any(|cause| cause.contains("unknown state")), "{causes:?}");
        assert_ne!(agent.gpu(0).state, GpuState::Ready);
        host.clear_faults();
        agent.settle_reads();
        let gpu = agent.gpu(0);
        assert_eq!((gpu.state, gpu.reasons), (GpuState::Ready, Vec::new()), "{when}");
        agent.wait_for_log(&format!("it is {stands}"));
        assert_eq!(agent.get("/v1/health").json()["status"], "ok");
    }
}

#[test]
fn unknown_outcome_with_neither_layout_stays_degraded() {
    let host = Host::up("dgx-a100");
    let agent = Agent::start(&host, CONFIG);
    // The operation has two steps. The first step takes effect. Then the worker is killed, before it makes the call of
    // the second step.
    host.fault("nvmlDeviceCreateGpuInstance* --gpu 0 --times 1 --delay-ms 800 --kill after");
    let mut operation = agent.begin(&["0"], &["7g.80gb"]).unwrap();
    while operation.progress[0].doing.is_none() {
        operation = step(&agent, &operation);
    }
    host.fault("nvmlDeviceGetMigMode --gpu 0 --rc UNKNOWN");
    assert_eq!(agent.follow(operation).state, OperationState::Failed);
    host.clear_faults();
    agent.settle_reads();
    assert_eq!(agent.gpu(0).state, GpuState::Degraded);
    assert_eq!(agent.apply(&["0"], &["7g.80gb"]).state, OperationState::Done);
    assert_eq!(agent.gpu(0).state, GpuState::Ready);
}

#[test]
fn unchanged_gpu_altered_by_others_is_named_and_kept() {
    let mut changed = 0;
    // The fault must hit the last reading of the operation. The number of this reading differs between runs, because
    // the fault rule also counts readings that are not part of the operation. So try several numbers.
    for after in (0..18).map(|round| round % 6) {
        if changed > 0 && after == 0 {
            break;
        }
        let host = Host::up("a30x4");
        let agent = Agent::start(&host, "");
        // Two agents on one host need separate MPS directories.
        let mps = host.scratch("other.mps").display().to_string();
        let other = Setup::on(&host).named("other").env("GPUSH_MPS_DIR", mps).start();
        assert_eq!(agent.apply(&["0"], &["4g.24gb"]).state, OperationState::Done);
        // The fault rule makes one reading slow. If this is the last reading, another agent changes
        // the GPU meanwhile.
        host.fault(&format!("nvmlDeviceGetMigMode --gpu 0 --after {after} --times 1 --delay-ms 1500"));
        let operation = agent.begin(&["0"], &["4g.24gb"]).unwrap();
        if operation.state.is_final() {
            continue;
        }
        assert_eq!(other.apply(&["0"], &["2g.12gb"]).state, OperationState::Done);
        let theirs = real_layout(&host, 0);
        let operation = agent.follow(operation);
        assert_eq!(real_layout(&host, 0), theirs, "nothing of theirs is taken back");
        if operation.state == OperationState::Done {
            continue;
        }
        changed += 1;
        assert_eq!(operation.state, OperationState::Failed, "{operation:?}");
        let error = operation.error.unwrap();
        assert!(error.message.contains("another program has changed the layout"), "{error:?}");
        assert!(error.causes.iter().any(|cause| cause.contains("stays as it is")), "{error:?}");
        assert_eq!(error.outcome, None, "{error:?}");
        assert_eq!(agent.gpu(0).state, GpuState::Ready, "it is well, only other than was asked");
    }
    println!("changed before its read-back {changed} times");
    assert!(changed > 0);
}
