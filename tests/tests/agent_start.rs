//! Layouts at start: a new boot, the same boot, a driver that comes later, drift.

use gpush_api::OperationState;
use gpush_tests::{
    agent::{Agent, Setup, gi_at, truth},
    host::Host,
};
use serde_json::json;

const CONFIG: &str = r#"
[[gpu]]
name = "training"
match = ["0-1"]
mode = "mig"
layout = ["3g.40gb", "2g.20gb", "1g.10gb*2"]
"#;

/// Waits until the layouts at start are applied.
fn applied(agent: &Agent, operations: usize) {
    let mut tries = 0;
    loop {
        let all = agent.settle();
        if all.len() >= operations {
            assert!(all.iter().all(|op| op.state == OperationState::Done), "{all:?}");
            return;
        }
        tries += 1;
        assert!(tries < 20_000, "{}", agent.log());
    }
}

#[test]
fn a_new_boot_gets_its_layouts_and_the_same_boot_is_left_alone() {
    let host = Host::up("dgx-a100");
    let agent = Agent::start(&host, CONFIG);
    applied(&agent, 2);
    for gpu in [0, 1] {
        assert_eq!(truth(&host, gpu).len(), 4, "GPU {gpu}");
    }
    assert!(truth(&host, 2).is_empty(), "no rule claims GPU 2");
    assert!(agent.gpus().iter().all(|gpu| gpu.drift.is_empty()));

    // Somebody asks for something else; a restart on the same boot respects it and shows the drift.
    assert_eq!(agent.apply(&["0"], &["7g.80gb"]).state, OperationState::Done);
    agent.stop();
    host.start_trace();
    let agent = Agent::start(&host, CONFIG);
    let gpus = agent.gpus();
    assert_eq!(gpus[0].rule.as_deref(), Some("training"));
    assert_eq!(gpus[0].drift, ["missing 3g.40gb, 2g.20gb, 1g.10gb*2", "extra 7g.80gb@0"]);
    assert!(gpus[1].drift.is_empty());
    agent.stop();
    assert_eq!(host.trace(), [], "a restart on the same boot made no change");
    assert_eq!(truth(&host, 0), ["7g.80gb@0[7g.80gb@0]"]);

    // After a reboot nothing stands; the agent makes it anew.
    host.sim::<&str>("reboot", &[]);
    assert!(truth(&host, 0).is_empty());
    let agent = Agent::start(&host, CONFIG);
    applied(&agent, 2);
    assert_eq!(truth(&host, 0).len(), 4);
    assert!(agent.gpus().iter().all(|gpu| gpu.drift.is_empty()));
}

#[test]
fn a_killed_agent_starts_again_without_reshaping() {
    let host = Host::up("a30x4");
    let config = "[[gpu]]\nmatch = [\"all\"]\nmode = \"mig\"\nlayout = [\"2g.12gb\", \"1g.6gb*2\"]\n";
    let agent = Agent::start(&host, config);
    applied(&agent, 4);
    // The boot is recorded once the layouts are applied; killed before, it would apply them again.
    let record = Setup::on(&host).state_dir().join("boot.json");
    let mut tries = 0;
    while !record.exists() {
        tries += 1;
        assert!(tries < 1_000_000, "{}", agent.log());
        std::thread::yield_now();
    }
    assert_eq!(agent.apply(&["0"], &["4g.24gb"]).state, OperationState::Done);
    agent.kill();
    let agent = Agent::start(&host, config);
    let _ = agent.gpus();
    assert!(agent.settle().is_empty(), "{:?}", agent.settle());
    assert_eq!(truth(&host, 0), ["4g.24gb@0[4g.24gb@0]"]);
}

#[test]
fn auto_reconcile_puts_drift_right_at_start() {
    let host = Host::up("dgx-a100");
    let agent = Agent::start(&host, CONFIG);
    applied(&agent, 2);
    assert_eq!(agent.apply(&["0"], &["7g.80gb"]).state, OperationState::Done);
    agent.stop();
    let agent = Agent::start(&host, &format!("auto_reconcile = true\n{CONFIG}"));
    applied(&agent, 1);
    assert_eq!(truth(&host, 0).len(), 4);
    // And after a reload.
    assert_eq!(agent.apply(&["1"], &["7g.80gb"]).state, OperationState::Done);
    agent.signal(nix::sys::signal::Signal::SIGHUP);
    applied(&agent, 3);
    assert_eq!(truth(&host, 1).len(), 4);
}

#[test]
fn one_gpu_that_cannot_have_its_layout_costs_no_other() {
    let host = Host::up("dgx-a100");
    host.fault("nvmlDeviceCreateGpuInstance* --gpu 0 --rc INSUFFICIENT_RESOURCES");
    let agent = Agent::start(&host, CONFIG);
    let mut tries = 0;
    let all = loop {
        let all = agent.settle();
        if all.len() == 2 {
            break all;
        }
        tries += 1;
        assert!(tries < 20_000, "{}", agent.log());
    };
    let state = |gpu| all.iter().find(|op| op.plans[0].gpu == gpu).unwrap().state;
    assert_eq!((state(0), state(1)), (OperationState::RolledBack, OperationState::Done));
    assert_eq!((truth(&host, 0).len(), truth(&host, 1).len()), (0, 4));
    let mut health = agent.get("/v1/health").json();
    while health["causes"] == json!([]) {
        health = agent.get("/v1/health").json();
        tries += 1;
        assert!(tries < 20_000, "{}", agent.log());
    }
    assert_eq!(health["status"], "degraded");
    assert!(health["causes"][0]["message"].as_str().unwrap().starts_with("GPU 0 (GPU-"), "{health}");
    // Mended by hand, it is well again.
    host.clear_faults();
    let mended = agent.follow(agent.begin_with(&json!({ "gpus": ["0"] })).unwrap());
    assert_eq!(mended.state, OperationState::Done);
    assert_eq!(agent.get("/v1/health").json()["status"], "ok");
}

#[test]
fn a_driver_that_comes_after_the_agent_is_found_and_gets_its_layouts() {
    let host = Host::up("dgx-a100");
    host.fault("nvmlInit* --rc DRIVER_NOT_LOADED");
    let agent = Agent::start(&host, CONFIG);
    let answer = agent.get("/v1/gpus");
    assert_eq!(answer.status, 503);
    let error = answer.error();
    assert_eq!(error.code, gpush_api::Code::DriverUnavailable, "{error:?}");
    assert!(error.hint.unwrap().contains("modprobe nvidia"));
    let health = agent.get("/v1/health").json();
    assert_eq!((&health["status"], &health["gpus"]), (&json!("degraded"), &json!(0)), "{health}");
    assert_eq!(agent.get("/v1/version").json()["agent"], env!("CARGO_PKG_VERSION"));
    host.clear_faults();
    applied(&agent, 2);
    assert_eq!(truth(&host, 0).len(), 4);
    assert_eq!(agent.get("/v1/health").json()["status"], "ok");
}

#[test]
fn a_boot_that_cannot_be_told_reshapes_nothing() {
    let host = Host::up("dgx-a100");
    let agent = Setup::on(&host).config(CONFIG).env("GPUSH_BOOT_ID_FILE", "/nonexistent").start();
    assert_eq!(agent.gpus()[0].drift.len(), 1);
    assert!(agent.settle().is_empty());
    let health = agent.get("/v1/health").json();
    assert!(health["causes"][0]["message"].as_str().unwrap().contains("/nonexistent"), "{health}");
}

#[test]
fn a_layout_blocked_at_start_tells_nobody_who_blocks_it() {
    let host = Host::up("a30x4");
    let agent = Agent::start(&host, "");
    assert_eq!(agent.apply(&["0"], &["2g.12gb"]).state, OperationState::Done);
    let pid = host.process(&format!("--gpu 0 --gi {} --ci 0", gi_at(&host, 0, 0)));
    agent.stop();
    let config = "[[gpu]]\nmatch = [\"0\"]\nmode = \"mig\"\nlayout = [\"4g.24gb\"]\n";
    let agent = Setup::on(&host).named("second").config(config).start();
    let mut tries = 0;
    let health = loop {
        let health = agent.get("/v1/health").json();
        if health["causes"][0]["code"] == "blocked" {
            break health.to_string();
        }
        tries += 1;
        assert!(tries < 20_000, "{health}\n{}", agent.log());
    };
    assert!(!health.contains(&format!("{pid}")), "pid {pid} in {health}");
}
