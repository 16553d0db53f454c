//! Process lists that the driver cannot read, and sessions whose lists of instances are outdated.
//!
//! If gpushd cannot read which processes use a GPU, an instance that looks idle may be in use.
//! gpushd then destroys no instance on this GPU, does not change MIG mode, and reports why. If a
//! session still lists destroyed instances, a change must not fail because of them.

use gpush_api::{Code, GpuState, OperationState};
use gpush_tests::{
    agent::{Agent, Setup, gi_at, real_layout},
    host::{Host, program},
};
use serde_json::json;

/// Error codes with which drivers report that they cannot list processes.
const CODES: [&str; 5] = ["UNKNOWN", "NO_PERMISSION", "TIMEOUT", "INSUFFICIENT_SIZE", "NOT_SUPPORTED"];

/// Returns the output of `gpushctl status`.
fn status(agent: &Agent) -> String {
    let socket = agent.socket();
    let output = std::process::Command::new(program("gpushctl")).arg("--socket").arg(socket).arg("status").output();
    String::from_utf8(output.expect("gpushctl can be started").stdout).expect("text")
}

#[test]
fn unknown_users_block_destruction() {
    let host = Host::up("dgx-a100");
    let agent = Agent::start(&host, "");
    assert_eq!(agent.apply(&["0"], &["3g.40gb@0", "1g.10gb@4"]).state, OperationState::Done);
    host.process(&format!("--gpu 0 --gi {} --ci 0", gi_at(&host, 0, 0)));
    let before = real_layout(&host, 0);
    let mut tried = 0;
    for code in CODES {
        host.start_trace();
        host.fault(&format!("nvmlDeviceGetComputeRunningProcesses* --gpu 0 --rc {code}"));
        agent.settle_reads();
        let gpu = agent.gpu(0);
        assert_eq!((gpu.state, gpu.processes_known), (GpuState::Ready, false), "{code}: {gpu:?}");
        let reason = "the processes that use the GPU are not known";
        assert!(gpu.reasons.iter().any(|r| r.starts_with(reason) && r.contains("RunningProcesses")), "{gpu:?}");
        assert!(status(&agent).contains(reason), "{code}: {}", status(&agent));

        for layout in [&["7g.80gb"][..], &["3g.40gb@0"], &["none"]] {
            let plans =
                agent.post("/v1/mig/plan", &json!({"selectors": ["0"], "layout_source": {"entries": layout}})).json();
            assert_eq!(plans["plans"][0]["steps"], json!([]), "{code} {layout:?}: {plans}");
            assert_eq!(plans["plans"][0]["error"]["code"], "driver_error", "{code} {layout:?}: {plans}");
            let refused = agent.begin(&["0"], layout).unwrap_err();
            assert_eq!(refused.code, Code::DriverError, "{code} {layout:?}: {refused:?}");
            assert!(refused.message.starts_with(&format!("GPU 0 ({}): {reason}", gpu.uuid)), "{refused:?}");
            assert!(refused.causes.iter().any(|cause| cause.contains("RunningProcesses")), "{refused:?}");
            assert!(refused.causes.iter().all(|cause| !cause.contains("op-")), "{refused:?}");
            assert!(refused.hint.as_ref().is_some_and(|hint| hint.contains("nvidia-smi")), "{refused:?}");
            tried += 1;
        }
        assert_eq!(real_layout(&host, 0), before, "{code}");
        assert_eq!(host.trace(), [], "{code}");
        // Other GPUs of the host are not affected.
        assert_eq!(agent.apply(&["1"], &["7g.80gb"]).state, OperationState::Done, "{code}");
        assert_eq!(agent.apply(&["1"], &["none"]).state, OperationState::Done, "{code}");
        host.clear_faults();
    }
    // When the driver can list processes again, only instances in use block a change.
    assert_eq!(agent.begin(&["0"], &["7g.80gb"]).unwrap_err().code, Code::Blocked);
    assert_eq!(agent.apply(&["0"], &["3g.40gb@0", "2g.20gb@4"]).state, OperationState::Done);
    assert!(agent.gpu(0).processes_known);
    println!("{tried} layouts refused, {} ways of not knowing", CODES.len());
}

#[test]
fn new_instances_are_created_without_process_list() {
    let host = Host::up("dgx-a100");
    let agent = Agent::start(&host, "");
    assert_eq!(agent.apply(&["0"], &["3g.40gb@0"]).state, OperationState::Done);
    host.fault("nvmlDeviceGetComputeRunningProcesses* --gpu 0 --rc UNKNOWN");
    let grown = agent.apply(&["0"], &["3g.40gb@0", "2g.20gb@4"]);
    assert_eq!(grown.state, OperationState::Done, "{grown:?}");
    assert_eq!(real_layout(&host, 0).len(), 2);
    // The layout already exists, so the request changes nothing, and gpushd accepts it.
    assert_eq!(agent.apply(&["0"], &["3g.40gb@0", "2g.20gb@4"]).state, OperationState::Done);
}

#[test]
fn unknown_users_block_enabling_mig() {
    let host = Host::up("[[gpu]]\nmodel = \"h100-80-sxm\"\nmig = false\n");
    let agent = Agent::start(&host, "");
    host.process("--gpu 0");
    host.fault("nvmlDeviceGetComputeRunningProcesses* --gpu 0 --rc UNKNOWN");
    host.start_trace();
    let refused = agent.begin(&["0"], &["3g.40gb"]).unwrap_err();
    assert_eq!(refused.code, Code::DriverError, "{refused:?}");
    assert!(refused.message.contains("MIG mode is not changed"), "{refused:?}");
    assert_eq!(host.trace(), []);
    host.clear_faults();
    let refused = agent.begin(&["0"], &["3g.40gb"]).unwrap_err();
    assert_eq!(refused.code, Code::Blocked, "{refused:?}");
    assert_eq!(host.trace(), []);
}

#[test]
fn apply_succeeds_although_session_lists_deleted_instances() {
    for function in ["nvmlDeviceGetGpuInstances", "nvmlDeviceGetGpuInstance*"] {
        let host = Host::up("dgx-a100");
        let agent = Agent::start(&host, "");
        assert_eq!(agent.apply(&["0"], &["3g.40gb@0", "1g.10gb@4"]).state, OperationState::Done);
        agent.stop();
        // The driver session of this agent begins while these instances exist, and continues to
        // list them.
        let agent = Setup::on(&host).named("second").start();
        assert_eq!(agent.gpu(0).mig.expect("MIG").instances.len(), 2);
        host.fault(&format!("{function} --gpu 0 --mutate stale"));
        for layout in [&["2g.20gb@0", "2g.20gb@2"][..], &["7g.80gb"], &["none"]] {
            let operation = agent.apply(&["0"], layout);
            assert_eq!(operation.state, OperationState::Done, "{function} {layout:?}: {operation:?}");
            agent.settle_reads();
            let gpu = agent.gpu(0);
            assert_eq!((gpu.state, gpu.reasons), (GpuState::Ready, Vec::new()), "{function} {layout:?}");
            let seen = gpu.mig.expect("MIG").instances.len();
            assert_eq!(seen, real_layout(&host, 0).len(), "{function} {layout:?}");
        }
    }
}
