//! During an apply, driver calls kill the worker or hang. After that, the GPU must have the new or the previous layout, as
//! the operation reports.

use gpush_api::{GpuState, Operation, OperationState};
use gpush_tests::{
    agent::{Agent, real_layout},
    host::{Host, Traced},
};

use crate::faults::fault_at;

const BEFORE: &[&str] = &["2g.20gb@0", "1g.10gb@2", "1g.10gb@3", "3g.40gb@4"];
/// A layout that keeps the 3g.40gb with other compute instances, and replaces all other instances.
const AFTER: &[&str] = &["1c.3g.40gb*2", "4g.40gb"];
const CONFIG: &str = "# --constants driver.change=1s,driver.read=2000ms\n";

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
        assert!(line.contains("signal SIGKILL") && line.contains(" during ") && line.contains(uuid.as_str()), "{line}");
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
