//! Operations that cannot start immediately: gpushd refuses or queues them, or they wait until
//! instances are idle.
//!
//! The helper functions may use `unwrap`, because a panic makes the test fail.
#![allow(clippy::unwrap_used)]

use std::time::{Duration, Instant};

use gpush_api::{ApiError, Code, Operation, OperationState};
use gpush_tests::{
    agent::{Agent, gi_at, real_layout},
    host::Host,
};
use nix::sys::signal::Signal;
use serde_json::json;

/// Requests a layout for GPUs. The operation may wait at most `seconds`.
fn wait_for(agent: &Agent, gpus: &[&str], entries: &[&str], seconds: u64) -> Operation {
    agent.begin_with(&json!({"selectors": gpus, "layout_source": {"entries": entries}, "wait_s": seconds})).unwrap()
}

fn is_waiting(operation: &Operation) -> bool {
    operation.state == OperationState::Waiting && !operation.waits_for.is_empty()
}

/// Creates one instance on GPU 0 and starts a process in it. Returns the pid.
fn in_use(host: &Host, agent: &Agent) -> u32 {
    assert_eq!(agent.apply(&["0"], &["3g.40gb@4"]).state, OperationState::Done);
    host.process(&format!("--gpu 0 --gi {} --ci 0 --memory 100", gi_at(host, 0, 4)))
}

#[test]
fn second_operation_on_gpu_is_refused_or_queued_in_order() {
    let host = Host::up("dgx-a100");
    let agent = Agent::start(&host, "");
    host.fault("nvmlDeviceCreateGpuInstance* --gpu 0 --times 1 --delay-ms 1500");
    let first = agent.begin(&["0"], &["7g.80gb"]).unwrap();
    let refused = agent.begin(&["1", "0"], &["7g.80gb"]).unwrap_err();
    assert_eq!((refused.code, refused.retryable), (Code::Conflict, true));
    assert!(refused.message.contains(&format!("operation {}", first.id)), "{}", refused.message);
    let second = wait_for(&agent, &["0", "1"], &["1g.10gb*7"], 60);
    assert_eq!(second.state, OperationState::Queued);
    let third = wait_for(&agent, &["0"], &["3g.40gb"], 60);
    // Operations that are queued on GPU 0 do not delay an operation on another GPU.
    assert_eq!(agent.apply(&["2"], &["7g.80gb"]).state, OperationState::Done);
    let ended: Vec<Operation> = [first, second, third].map(|one| agent.follow(one)).into();
    assert!(ended.iter().all(|one| one.state == OperationState::Done), "{ended:?}");
    let ends: Vec<_> = ended.iter().map(|one| one.ended_at.unwrap()).collect();
    assert!(ends.is_sorted(), "{ends:?}");
    assert_eq!((real_layout(&host, 0).len(), real_layout(&host, 1).len()), (1, 7), "the last one asked for stands");
}

#[test]
fn waiting_operation_begins_when_instance_is_idle() {
    let host = Host::up("dgx-a100");
    let agent = Agent::start(&host, "");
    let pid = in_use(&host, &agent);
    let refused = agent.begin(&["0"], &["7g.80gb"]).unwrap_err();
    assert_eq!((refused.code, refused.retryable), (Code::Blocked, true), "{refused:?}");
    let operation = agent.follow_until(wait_for(&agent, &["0"], &["7g.80gb"], 3600), is_waiting);
    assert!(!operation.begun && !operation.waits_for.is_empty(), "{operation:?}");
    let reasons = operation.waits_for.join("; ");
    assert!(reasons.contains(&pid.to_string()), "root reads which process blocks the operation: {reasons}");
    // A waiting operation claims no GPU. So a change that does not conflict with the waiting
    // operation is possible.
    assert_eq!(agent.apply(&["0"], &["3g.40gb@4", "1g.10gb"]).state, OperationState::Done);
    host.end_process(pid);
    let operation = agent.follow(operation);
    assert_eq!(operation.state, OperationState::Done, "{operation:?}");
    assert_eq!(real_layout(&host, 0), ["7g.80gb@0[7g.80gb@0]"]);
    // The reason for waiting is gone, both in the agent's memory and in the journal.
    for reported in [&operation, &agent.operation(&operation.id)] {
        assert!(
            reported.begun && reported.waits_for.is_empty() && reported.notes[0].starts_with("it waited: "),
            "{reported:?}"
        );
    }
    // When the operation started, gpushd made a new plan. The progress shows this plan.
    assert!(operation.progress[0].done > 0 && operation.progress[0].done == operation.progress[0].total);
}

#[test]
fn waiting_operation_ends_on_cancel_or_timeout() {
    let host = Host::up("dgx-a100");
    let agent = Agent::start(&host, "");
    let pid = in_use(&host, &agent);
    let before = real_layout(&host, 0);
    let outcome = |operation: Operation| -> (OperationState, ApiError) { (operation.state, operation.error.unwrap()) };

    let waiting = agent.follow_until(wait_for(&agent, &["0"], &["7g.80gb"], 3600), is_waiting);
    let cancelled = agent.cancel(&waiting.id);
    assert_eq!(cancelled.status, 202);
    // Earlier fault: the answer did not show root which process blocks the operation.
    let text = cancelled.json().to_string();
    assert!(!text.contains("to its owner and to administrators"), "{text}");
    let (state, error) = outcome(agent.follow(waiting.clone()));
    assert_eq!((state, error.code), (OperationState::NotStarted, Code::Cancelled), "{error:?}");
    assert_eq!(error.outcome.as_deref(), Some("nothing was changed"));
    // The response now comes from the journal, and still has the same outcome.
    let recorded = agent.operation(&waiting.id).error.unwrap();
    assert_eq!(recorded.outcome.as_deref(), Some("nothing was changed"));
    let again = agent.cancel(&waiting.id);
    assert_eq!((again.status, again.error().code), (409, Code::Conflict));

    let begun = Instant::now();
    let (state, error) = outcome(agent.follow(wait_for(&agent, &["0"], &["7g.80gb"], 1)));
    assert_eq!((state, error.code), (OperationState::NotStarted, Code::TimedOut), "{error:?}");
    assert!(begun.elapsed() >= Duration::from_secs(1) && error.message.contains("within 1s"), "{error:?}");

    // An operation that is queued behind another operation can also be cancelled.
    host.fault("nvmlDeviceCreateGpuInstance* --gpu 1 --times 1 --delay-ms 1500");
    let first = agent.begin(&["1"], &["7g.80gb"]).unwrap();
    let queued = wait_for(&agent, &["1"], &["1g.10gb"], 3600);
    assert_eq!(agent.cancel(&queued.id).status, 202);
    let (state, error) = outcome(agent.follow(queued));
    assert_eq!((state, error.code), (OperationState::NotStarted, Code::Cancelled), "{error:?}");
    assert!(!agent.operation(&first.id).state.is_final(), "it did not wait for the other one");
    assert_eq!(agent.follow(first).state, OperationState::Done);
    // A cancelled operation no longer delays other operations.
    assert_eq!(agent.apply(&["1"], &["1g.10gb*2"]).state, OperationState::Done);

    // gpushd refuses an impossible layout at once.
    let refused =
        agent.begin_with(&json!({"selectors": ["0"], "layout_source": {"entries": ["9g.80gb"]}, "wait_s": 60}));
    assert_eq!(refused.unwrap_err().code, Code::UnknownProfile);
    assert_eq!(real_layout(&host, 0), before);
    host.end_process(pid);
}

#[test]
fn waiting_operation_survives_restart() {
    let host = Host::up("dgx-a100");
    let mut agent = Agent::start(&host, "");
    let pid = in_use(&host, &agent);
    let mut operation = agent.follow_until(wait_for(&agent, &["0"], &["7g.80gb"], 3600), is_waiting);
    let mut lives = 1;
    for kill in [false, true, true] {
        if kill {
            agent.kill();
        } else {
            let begun = Instant::now();
            agent.signal(Signal::SIGTERM);
            assert!(agent.wait().success(), "{}", agent.log());
            assert!(begun.elapsed() < Duration::from_secs(5), "what waits holds up no end");
        }
        agent = Agent::start(&host, "");
        operation = agent.operation(&operation.id);
        assert_eq!(operation.state, OperationState::Waiting, "{operation:?}");
        lives += 1;
    }
    let notes =
        operation.notes.iter().filter(|note| note.contains("gpushd ended while the operation was waiting")).count();
    assert!(notes >= 1, "{:?}", operation.notes);
    host.end_process(pid);
    let operation = agent.follow(operation);
    assert_eq!(operation.state, OperationState::Done, "{operation:?}");
    assert_eq!(real_layout(&host, 0), ["7g.80gb@0[7g.80gb@0]"]);
    println!("{lives} lives of the agent");
}

#[test]
fn reported_cancellation_is_true_after_agent_dies() {
    let host = Host::up("dgx-a100");
    let mut agent = Agent::start(&host, "");
    let pid = in_use(&host, &agent);
    let before = real_layout(&host, 0);
    // Cancel an operation that has not started. gpushd records the end of the operation before it
    // answers.
    let waiting = agent.follow_until(wait_for(&agent, &["0"], &["7g.80gb"], 3600), is_waiting);
    assert_eq!(agent.cancel(&waiting.id).status, 202);
    agent.kill();
    agent = Agent::start(&host, "");
    let ended = agent.operation(&waiting.id);
    assert_eq!((ended.state, ended.error.unwrap().code), (OperationState::NotStarted, Code::Cancelled));
    host.end_process(pid);
    // Cancel an operation that has started. The next gpushd could finish it, but must roll it back.
    host.fault("nvmlDeviceCreateGpuInstance* --gpu 0 --times 1 --delay-ms 5000");
    let running = agent.begin(&["0"], &["3g.40gb@4", "1g.10gb*4"]).unwrap();
    let answer = agent.cancel(&running.id);
    assert_eq!(answer.status, 202);
    agent.kill();
    host.clear_faults();
    agent = Agent::start(&host, "");
    let ended = agent.follow(agent.operation(&running.id));
    assert_eq!(ended.state, OperationState::RolledBack, "{ended:?}");
    assert_eq!(real_layout(&host, 0), before);
}

#[test]
fn cancel_at_each_step_ends_in_previous_or_target_layout() {
    let host = Host::up("dgx-a100");
    let agent = Agent::start(&host, "");
    let (before, wanted) = (["3g.40gb@4", "2g.20gb@0"], ["1g.10gb*4", "2g.20gb@4"]);
    assert_eq!(agent.apply(&["0"], &before).state, OperationState::Done);
    let standing = real_layout(&host, 0);
    let calls = [
        "nvmlComputeInstanceDestroy",
        "nvmlGpuInstanceDestroy",
        "nvmlDeviceCreateGpuInstance*",
        "nvmlGpuInstanceCreateComputeInstance*",
    ];
    let (mut cancelled, mut points, mut step) = (0, 0, 0);
    loop {
        // Make each call of the apply slow, so that the cancellation arrives during a step.
        for call in calls {
            host.fault(&format!("{call} --gpu 0 --delay-ms 100"));
        }
        let begun = agent.begin(&["0"], &wanted).unwrap();
        let total = begun.progress[0].total;
        let id = begun.id.clone();
        let reached = agent.follow_until(begun, |one| one.progress[0].done >= step || one.state.is_final());
        let answer = agent.cancel(&id);
        host.clear_faults();
        let ended = agent.follow(reached);
        points += 1;
        match (ended.state, answer.status) {
            (OperationState::RolledBack, 202) => {
                assert_eq!(ended.error.as_ref().unwrap().code, Code::Cancelled, "{ended:?}");
                assert_eq!(real_layout(&host, 0), standing, "after {step} of {total} steps: {ended:?}");
                cancelled += 1;
            }
            (OperationState::Done, 202 | 409) => {
                assert_eq!(real_layout(&host, 0).len(), 5, "{ended:?}");
                assert_eq!(agent.apply(&["0"], &before).state, OperationState::Done);
                assert_eq!(real_layout(&host, 0), standing);
            }
            other => panic!("{other:?}: {ended:?}"),
        }
        if step >= total {
            break;
        }
        step += 1;
    }
    println!("cancelled at {points} points: {cancelled} times as before, {} times as wanted", points - cancelled);
    assert!(points > 10 && cancelled >= 10, "{points} points, {cancelled} taken back");
}

#[test]
fn repeated_request_is_answered_and_not_repeated() {
    let host = Host::up("dgx-a100");
    let mut agent = Agent::start(&host, "");
    agent.settle_reads();
    let headers = "content-type: application/json\r\nidempotency-key: k-1\r\n";
    let wanted = |entries: &str| json!({"selectors": ["0"], "layout_source": {"entries": [entries]}}).to_string();
    // Send several requests at the same time, while gpushd reads the GPU. All responses must name
    // the same operation.
    host.fault("nvmlDeviceGetMemoryInfo* --gpu 0 --times 1 --delay-ms 300");
    let ask = |agent: &Agent| agent.request("POST", "/v1/mig/apply", headers, wanted("7g.80gb").as_bytes());
    let answers: Vec<_> = std::thread::scope(|scope| {
        let asking: Vec<_> = (0..8).map(|_| scope.spawn(|| ask(&agent))).collect();
        asking.into_iter().map(|one| one.join().unwrap()).collect()
    });
    let ids: std::collections::BTreeSet<String> =
        answers.iter().map(|answer| answer.json()["id"].as_str().unwrap_or_default().to_owned()).collect();
    assert!(answers.iter().all(|answer| answer.status == 202), "{answers:?}");
    assert_eq!(ids.into_iter().collect::<Vec<_>>(), ["op-1"]);
    let first = agent.follow(agent.operation("op-1"));
    assert_eq!(first.state, OperationState::Done);
    // The next agent also knows the key. It still refuses a different request with this key.
    for _ in 0..2 {
        agent.kill();
        agent = Agent::start(&host, "");
        assert_eq!(ask(&agent).json()["id"], "op-1");
        let other = agent.request("POST", "/v1/mig/apply", headers, wanted("1g.10gb").as_bytes());
        assert_eq!(other.error().code, Code::Conflict);
    }
    // A cancel request can also have a key. The client can then repeat the request safely.
    host.fault("nvmlGpuInstanceDestroy --gpu 0 --times 1 --delay-ms 500");
    let operation = agent.begin(&["0"], &["1g.10gb"]).unwrap();
    let path = format!("/v1/operations/{}/cancel", operation.id);
    let cancel = |agent: &Agent| agent.request("POST", &path, "idempotency-key: k-2\r\n", b"").status;
    assert_eq!(cancel(&agent), 202);
    assert_eq!(agent.follow(operation).state, OperationState::RolledBack);
    assert_eq!((cancel(&agent), agent.request("POST", &path, "", b"").status), (202, 409));
    let all: Vec<String> =
        agent.get("/v1/operations").json().as_array().unwrap().iter().map(|one| one["id"].to_string()).collect();
    assert_eq!(all, ["\"op-1\"", "\"op-2\""]);
}

#[test]
fn concurrent_requests_with_one_key_change_once() {
    let host = Host::up("dgx-a100");
    let agent = Agent::start(&host, "");
    agent.settle_reads();
    let ask = |path: &str, key: &str| {
        let headers = format!("content-type: application/json\r\nidempotency-key: {key}\r\n");
        agent.request("POST", path, &headers, b"{\"reason\": \"once\"}").status
    };
    let at_once = |path: &str, key: &str, then: &(dyn Fn() + Sync)| {
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    assert_eq!(ask(path, key), 200, "{}", agent.log());
                    then();
                });
            }
        });
    };
    let recorded = |action: &str| {
        let trail = agent.get("/v1/audit?limit=1000").json();
        trail.as_array().unwrap().iter().filter(|record| record["action"] == action).count()
    };
    at_once("/v1/gpus/2/cordon", "k-3", &|| {});
    assert_eq!(recorded("gpu.cordon"), 1);
    // When gpushd has entered maintenance, it has no handle open, even if a worker has hung.
    host.fault("nvmlDeviceGetMemoryInfo* --gpu 0 --hang");
    agent.until("a reading that hangs", || agent.gpu(0).stale.then_some(()));
    let no_handle_is_open = || {
        let listed: serde_json::Value = serde_json::from_str(&host.sim("process", &["list", "--json"])).unwrap();
        let clients = listed["clients"].as_array().unwrap().iter();
        let alive: Vec<_> = clients.filter(|pid| std::path::Path::new(&format!("/proc/{pid}")).exists()).collect();
        assert!(alive.is_empty(), "{alive:?}");
    };
    at_once("/v1/maintenance/enter", "k-4", &no_handle_is_open);
    assert_eq!(recorded("maintenance.enter"), 1);
}

/// Two operations wait for processes. When both processes have ended, the reading for the first
/// operation hangs.
#[test]
fn waiting_operation_begins_while_other_gpu_hangs() {
    let host = Host::up("dgx-a100");
    let agent = Agent::start(&host, "[driver]\nread_ms = 60000\n");
    let users: Vec<u32> = [0, 1]
        .map(|gpu: usize| {
            assert_eq!(agent.apply(&[&gpu.to_string()], &["3g.40gb@4"]).state, OperationState::Done);
            host.process(&format!("--gpu {gpu} --gi {} --ci 0 --memory 100", gi_at(&host, gpu, 4)))
        })
        .into();
    let hangs = agent.follow_until(wait_for(&agent, &["0"], &["7g.80gb"], 3600), is_waiting);
    let works = agent.follow_until(wait_for(&agent, &["1"], &["7g.80gb"], 3600), is_waiting);
    // The first reading shows that GPU 0 is idle, so the operation claims GPU 0. The next reading
    // hangs.
    host.fault("nvmlDeviceGetComputeMode --gpu 0 --after 1 --hang");
    host.end_process(users[0]);
    let has_fired = || host.sim("fault", &["list"]).contains("fired 1]");
    agent.await_that("the reading that hangs", has_fired);
    host.end_process(users[1]);
    assert_eq!(agent.follow(works).state, OperationState::Done);
    assert!(!agent.operation(&hangs.id).begun);
}
