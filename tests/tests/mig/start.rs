//! Layouts that gpushd applies at its start: after a reboot, in the same boot, with a driver that
//! appears later, and with programs that hold a GPU.

use gpush_api::OperationState;
use gpush_tests::{
    agent::{Agent, Setup, gi_at, real_layout},
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

#[test]
fn new_boot_gets_layouts_and_same_boot_is_unchanged() {
    let host = Host::up("dgx-a100");
    let agent = Agent::start(&host, CONFIG);
    applied(&agent, 2);
    for gpu in [0, 1] {
        assert_eq!(real_layout(&host, gpu).len(), 4, "GPU {gpu}");
    }
    assert!(real_layout(&host, 2).is_empty(), "no rule claims GPU 2");
    assert!(agent.gpus().iter().all(|gpu| gpu.drift.is_empty()));

    // A user applies another layout. If gpushd restarts in the same boot, it keeps this layout and
    // reports drift.
    assert_eq!(agent.apply_once(&["0"], &["7g.80gb"]).state, OperationState::Done);
    agent.stop();
    host.start_trace();
    let agent = Agent::start_again(&host, CONFIG);
    let gpus = agent.gpus();
    assert_eq!(gpus[0].rule.as_deref(), Some("training"));
    assert_eq!(gpus[0].drift, ["missing 3g.40gb, 2g.20gb, 1g.10gb*2", "extra 7g.80gb@0"]);
    assert!(gpus[1].drift.is_empty());
    agent.stop();
    assert_eq!(host.trace(), [], "a restart on the same boot made no change");
    assert_eq!(real_layout(&host, 0), ["7g.80gb@0[7g.80gb@0]"]);

    // After a reboot, no instance exists, so gpushd creates the layout again.
    host.sim::<&str>("reboot", &[]);
    assert!(real_layout(&host, 0).is_empty());
    let agent = Agent::start_again(&host, CONFIG);
    applied(&agent, 2);
    assert_eq!(real_layout(&host, 0).len(), 4);
    assert!(agent.gpus().iter().all(|gpu| gpu.drift.is_empty()));
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

#[test]
fn blocker_of_start_layout_is_named_only_in_log() {
    let host = Host::up("a30x4");
    let agent = Agent::start(&host, "");
    assert_eq!(agent.apply(&["0"], &["2g.12gb"]).state, OperationState::Done);
    let pid = host.process(&format!("--gpu 0 --gi {} --ci 0", gi_at(&host, 0, 0)));
    agent.stop();
    let config = "[[gpu]]\nmatch = [\"0\"]\nmode = \"mig\"\nlayout = [\"4g.24gb\"]\n";
    let agent = Setup::on(&host).named("second").config(config).start();
    let health = agent.until("blocked layout", || {
        let health = agent.get("/v1/health").json();
        (health["errors"][0]["code"] == "blocked").then(|| health.to_string())
    });
    assert!(!health.contains(&format!("{pid}")), "pid {pid} in {health}");
    // Only root may read the log, so the log names the process.
    agent.wait_for_log(&format!("held by pid {pid} ("));
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
        assert_eq!(record(&agent)["complete"], json!(false), "{model}: gpushd still tries");
        host.end_process(monitor);
        agent.wait_for_layouts_at_start();
        assert_eq!(real_layout(&host, 0), ["3g.40gb@0[3g.40gb@0]"], "{model}");
        assert_eq!(agent.gpu(0).blocked_by, [], "{model}");
        assert_eq!(agent.get("/v1/health").json()["status"], "ok", "{model}");
    }
}

/// Two agents must not use one MPS directory: each would adopt and end the daemons of the other.
#[test]
fn second_agent_on_the_same_mps_directory_is_refused() {
    let host = Host::up("a30x4");
    let agent = Agent::start(&host, "");
    let (status, log) = Setup::on(&host).named("second").refused();
    assert_eq!(status.code(), Some(1), "{log}");
    assert!(log.contains(&format!("another gpushd (pid {}) uses the directory of MPS daemons", agent.pid())), "{log}");
    assert!(log.contains("--mps-dir"), "{log}");
    agent.stop();
    let _own = Setup::on(&host).named("second").start();
}
