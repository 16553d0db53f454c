//! Layouts that gpushd applies at its start: with a driver that appears later, and with programs
//! that hold a GPU.

use gpush_api::OperationState;
use gpush_tests::{
    agent::{Agent, real_layout},
    host::Host,
};
use serde_json::{Value, json};

const CONFIG: &str = r#"
[[gpu]]
name = "training"
match = ["0-1"]
mode = "mig"
layout = ["3g.40gb", "2g.20gb", "1g.10gb*2"]
"#;

/// Waits until gpushd has applied the layouts of its start.
fn applied(agent: &Agent, operations: usize) {
    let all = agent.until("operations", || Some(agent.settle()).filter(|all| all.len() >= operations));
    assert!(all.iter().all(|op| op.state == OperationState::Done), "{all:?}");
}

/// Returns the record of the boot.
fn record(agent: &Agent) -> Value {
    agent.get("/v1/health").json()["layouts_at_start"].clone()
}

#[test]
fn driver_loaded_after_start_gets_layouts() {
    let host = Host::up("dgx-a100");
    host.fault("nvmlInit* --rc DRIVER_NOT_LOADED");
    let agent = Agent::start(&host, CONFIG);
    let answer = agent.get("/v1/gpus");
    assert_eq!(answer.status, 503);
    let error = answer.error();
    assert_eq!(error.code, gpush_api::Code::DriverUnavailable, "{error:?}");
    assert!(error.hint.unwrap().contains("modprobe nvidia"));
    let health = agent.get("/v1/health").json();
    assert_eq!((&health["status"], &health["gpu_count"]), (&json!("degraded"), &json!(0)), "{health}");
    assert_eq!(agent.get("/v1/version").json()["agent"], env!("CARGO_PKG_VERSION"));
    // If the driver is missing, gpushd logs this once, although the worker probes often.
    agent
        .until("third look", || (agent.log().matches("gpushd's driver worker has started").count() >= 3).then_some(()));
    let log = agent.log();
    let warnings: Vec<&str> = log.lines().filter(|line| line.contains("WARN") || line.contains("ERROR")).collect();
    assert!(matches!(warnings[..], [one] if one.contains("the driver does not answer yet")), "{warnings:#?}");
    host.clear_faults();
    applied(&agent, 2);
    assert_eq!(real_layout(&host, 0).len(), 4);
    assert_eq!(agent.get("/v1/health").json()["status"], "ok");
}

/// Fault: an Ampere GPU that a monitor held for two seconds at boot stayed without MIG until an administrator acted.
#[test]
fn gpu_held_at_boot_gets_its_layout_when_the_holder_ends() {
    for model in ["a100-80", "h100-80-sxm"] {
        let host = Host::up(&format!("[[gpu]]\nmodel = \"{model}\"\nmig = false\n"));
        let monitor = host.process("--gpu 0 --kind handle");
        let agent = Agent::start(&host, "[[gpu]]\nmatch = [\"0\"]\nmode = \"mig\"\nlayout = [\"3g.40gb@0\"]\n");
        let named = || agent.gpu(0).blocked_by.iter().any(|holder| holder.pid == Some(monitor)).then_some(());
        agent.until("the holder is named", named);
        // Every user may read health. Only root can read the log, so the log names the process.
        let health = agent.get("/v1/health").json().to_string();
        assert!(!health.contains(&format!("pid {monitor}")), "{model}: {health}");
        agent.wait_for_log(&format!("held by pid {monitor} ("));
        assert_eq!(record(&agent)["complete"], json!(false), "{model}: gpushd still tries");
        host.end_process(monitor);
        agent.wait_for_layouts_at_start();
        assert_eq!(real_layout(&host, 0), ["3g.40gb@0[3g.40gb@0]"], "{model}");
        assert_eq!(agent.gpu(0).blocked_by, [], "{model}");
        assert_eq!(agent.get("/v1/health").json()["status"], "ok", "{model}");
    }
}
