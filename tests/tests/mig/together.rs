//! Resets that affect more than one GPU, operation or service: GPUs that must be reset together,
//! operations that wait for a reset, and a service that several operations stop.

use gpush_api::{Code, GpuState, OperationState};
use gpush_tests::{
    agent::{Agent, real_layout},
    around::Around,
    host::Host,
};
use serde_json::json;

use crate::faults::resets;

const AMPERE: &str = "[[gpu]]\nmodel = \"a100-80\"\ncount = 3\nmig = false\n";
const LAYOUT: &[&str] = &["3g.40gb", "1g.10gb*2"];

#[test]
fn reset_group_must_be_free_and_is_named() {
    let host = Host::up(AMPERE);
    let agent = Agent::start(&host, "[mode_change]\nreset_together = [\"0-1\"]\n");
    host.start_trace();
    let operation = agent.apply(&["0"], LAYOUT);
    assert_eq!(operation.state, OperationState::Done, "{operation:?}\n{}", agent.log());
    let mut both = resets(&host);
    both.sort_unstable();
    assert_eq!(both, [Some(0), Some(1)]);
    let error = agent.begin(&["1"], LAYOUT).expect_err("it is refused");
    assert_eq!(error.code, Code::Blocked);
    assert!(
        error.causes.iter().any(|cause| cause.contains("GPU 0") && cause.contains("has GPU instances")),
        "{error:?}"
    );
    assert_eq!(real_layout(&host, 0).len(), 3);
}

/// A hook that waits until the test creates the file `go`.
const HELD: &str = "while [ ! -e \"$D/go\" ]; do sleep 0.05; done";

#[test]
fn nvswitch_gpu_resets_alone_only_with_fabric_manager() {
    for runs in [true, false] {
        let host = Host::up(&format!("fabric_manager = {runs}\n{AMPERE}"));
        let around = Around::of(&host);
        let agent = Agent::start(&host, &around.config(&[], ""));
        let nvlink = agent.gpu(0).nvlink.expect("links");
        assert_eq!((nvlink.links, nvlink.switched, nvlink.peers.len()), (12, true, 0));
        let plan =
            agent.post("/v1/mig/plan", &json!({ "selectors": ["0"], "layout_source": { "entries": LAYOUT } })).json();
        assert_eq!(
            plan["plans"][0]["steps"][0]["reset"]["together"].as_array().map(Vec::len),
            Some(if runs { 0 } else { 2 })
        );
        host.start_trace();
        around.hook(HELD);
        let first = agent.begin(&["0"], LAYOUT).expect("begun");
        if !runs {
            // The GPUs that are reset with GPU 0 are claimed meanwhile.
            let other = agent.begin(&["1"], LAYOUT).expect_err("it is reset along");
            assert_eq!(other.code, Code::Conflict, "{other:?}");
            assert!(other.message.contains("GPU 1") && other.message.contains(&first.id), "{other:?}");
        }
        std::fs::write(around.file("go"), "").unwrap();
        let operation = agent.follow(first);
        assert_eq!(operation.state, OperationState::Done, "{operation:?}\n{}", agent.log());
        let mut reset = resets(&host);
        reset.sort_unstable();
        assert_eq!(reset, if runs { vec![Some(0)] } else { vec![Some(0), Some(1), Some(2)] });
        if runs {
            assert_eq!(agent.apply(&["1"], LAYOUT).state, OperationState::Done);
            continue;
        }
        let error = agent.begin(&["1"], LAYOUT).expect_err("it is refused");
        assert!(error.causes.iter().any(|cause| cause.contains("GPU 0")), "{error:?}");
        assert!(error.hint.as_deref().is_some_and(|hint| hint.contains("nvidia-fabricmanager")), "{error:?}");
        assert_eq!(real_layout(&host, 0).len(), 3);
    }
}

#[test]
fn reset_group_rolls_back_together_and_retries_a_failed_reset() {
    let host = Host::up(&format!("fabric_manager = false\n{AMPERE}"));
    let agent = Agent::start(&host, "");
    host.fault("nvmlDeviceCreateGpuInstance* --gpu 1 --after 6 --rc UNKNOWN");
    // The rollback of GPU 0 now takes longer than all rollback attempts of another GPU. The other
    // GPUs must wait for GPU 0 and not give up.
    host.fault("nvmlGpuInstanceDestroy --gpu 0 --delay-ms 300");
    rolls_back(&host, &agent, &["1g.10gb*7"], "a slow rollback");
    for fault in ["gpu-reset --rc UNKNOWN --after 3 --times 1", "nvmlGpuInstanceDestroy --gpu 1 --rc UNKNOWN --times 1"]
    {
        host.fault("nvmlDeviceCreateGpuInstance* --gpu 0 --rc UNKNOWN --after 1 --times 1");
        host.fault(fault);
        rolls_back(&host, &agent, LAYOUT, fault);
    }
}

/// Applies a layout to all GPUs. gpushd must roll it back to MIG mode off.
fn rolls_back(host: &Host, agent: &Agent, layout: &[&str], what: &str) {
    let operation = agent.apply(&["all"], layout);
    assert_eq!(operation.state, OperationState::RolledBack, "{what}: {operation:?}\n{}", agent.log());
    for (gpu, index) in (0..3).zip(0..3) {
        assert_eq!(real_layout(host, gpu), ["MIG off"], "{what}");
        let now = agent.gpu(index);
        assert_eq!(now.state, GpuState::Ready, "{what}");
        assert!(now.mig.is_some_and(|mig| !mig.pending_mode()), "{what}");
    }
    host.clear_faults();
}

#[test]
fn nvlinks_are_reported_and_do_not_extend_a_reset() {
    let host = Host::up("[[gpu]]\nmodel = \"a30-24\"\ncount = 4\nnvlink = \"pairs\"\nmig = false\n");
    let agent = Agent::start(&host, "");
    let (own, peer) = (agent.gpu(2).nvlink.expect("links"), agent.gpu(3));
    assert_eq!((own.links, own.switched, own.peers), (4, false, vec![peer.pci]));
    host.start_trace();
    let operation = agent.apply(&["2"], &["1g.6gb*4"]);
    assert_eq!(operation.state, OperationState::Done, "{operation:?}\n{}", agent.log());
    assert_eq!(resets(&host), [Some(2)]);
}

#[test]
fn shared_service_is_started_by_last_operation() {
    let host = Host::up(AMPERE);
    let around = Around::of(&host);
    around.run("nvidia-dcgm");
    // The hook of the first operation waits until the hook of the second operation runs. The
    // service is stopped meanwhile.
    around.hook("case $GPUSH_OPERATION in op-1) while [ ! -e \"$D/second\" ]; do sleep 0.05; done;; *) : > \"$D/second\";; esac");
    let agent = Agent::start(&host, &around.config(&["nvidia-dcgm"], ""));
    let operations = [agent.begin(&["0"], LAYOUT).expect("begun"), agent.begin(&["1"], LAYOUT).expect("begun")];
    for operation in operations {
        let ended = agent.follow(operation);
        assert_eq!(ended.state, OperationState::Done, "{ended:?}\n{}", agent.log());
    }
    assert!(around.runs("nvidia-dcgm"));
    let calls = around.take_calls();
    let at = |wanted: &str| calls.iter().rposition(|call| call.starts_with(wanted)).expect("a call");
    assert_eq!(calls.iter().filter(|call| call.starts_with("systemctl start")).count(), 1, "{calls:?}");
    assert!(at("systemctl start") > at("nvidia-smi"), "not while the other resets: {calls:?}");
}

#[test]
fn other_operations_are_refused_or_queued_during_reset() {
    let host = Host::up(AMPERE);
    let around = Around::of(&host);
    let agent = Agent::start(&host, &around.config(&[], ""));
    host.fault("gpu-reset --gpu 0 --delay-ms 2500");
    let first = agent.begin(&["0"], LAYOUT).expect("begun");
    agent
        .until("the first is reset", || around.calls().iter().any(|call| call.starts_with("nvidia-smi")).then_some(()));
    let refused = agent.begin(&["1"], LAYOUT).expect_err("nothing can be read");
    assert!(refused.code == Code::Resetting && refused.retryable, "{refused:?}");
    let plan =
        agent.post("/v1/mig/plan", &json!({ "selectors": ["1"], "layout_source": { "entries": LAYOUT } })).error();
    assert_eq!(plan.code, Code::Resetting, "{plan:?}");
    let body = json!({ "selectors": ["2"], "layout_source": { "entries": LAYOUT }, "wait_s": 60 });
    let waiting = agent.begin_with(&body).expect("it waits");
    for operation in [first, waiting] {
        assert_eq!(agent.follow(operation).state, OperationState::Done, "{}", agent.log());
    }
    assert_eq!((real_layout(&host, 0).len(), real_layout(&host, 2).len()), (3, 3));
}

#[test]
fn operation_cancelled_during_another_reset_resets_nothing() {
    let host = Host::up(AMPERE);
    let around = Around::of(&host);
    // Both operations start before one of them resets its GPU.
    around.hook("case $GPUSH_OPERATION in op-1) while [ ! -e \"$D/second\" ]; do sleep 0.05; done;; *) : > \"$D/second\"; sleep 0.3;; esac");
    let agent = Agent::start(&host, &around.config(&[], ""));
    host.start_trace();
    host.fault("gpu-reset --gpu 0 --delay-ms 2500");
    let [first, second] = [agent.begin(&["0"], LAYOUT).expect("begun"), agent.begin(&["1"], LAYOUT).expect("begun")];
    agent
        .until("the first is reset", || around.calls().iter().any(|call| call.starts_with("nvidia-smi")).then_some(()));
    assert!(agent.cancel(&second.id).status < 300);
    let ended = agent.follow(second);
    assert_eq!((ended.state, ended.error.map(|error| error.code)), (OperationState::RolledBack, Some(Code::Cancelled)));
    assert_eq!(agent.follow(first).state, OperationState::Done);
    assert_eq!(resets(&host), [Some(0)]);
    assert_eq!((real_layout(&host, 1), agent.gpu(1).state), (vec!["MIG off".to_owned()], GpuState::Ready));
}
