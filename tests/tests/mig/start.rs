//! Layouts that gpushd applies at its start: after a reboot, in the same boot, with a driver that
//! appears later, and with drift.

use gpush_api::OperationState;
use gpush_tests::{
    agent::{Agent, Setup, gi_at, real_layout},
    host::Host,
};
use nix::sys::signal::Signal;
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

#[test]
fn killed_agent_restarts_without_changing_layouts() {
    let host = Host::up("a30x4");
    let config = "[[gpu]]\nmatch = [\"all\"]\nmode = \"mig\"\nlayout = [\"2g.12gb\", \"1g.6gb*2\"]\n";
    let agent = Agent::start(&host, config);
    applied(&agent, 4);
    // When gpushd has applied the layouts, it records the boot. If gpushd is killed before this
    // record, the next gpushd applies the layouts again. Otherwise, it does not.
    agent.wait_for_layouts_at_start();
    assert_eq!(agent.apply_once(&["0"], &["4g.24gb"]).state, OperationState::Done);
    agent.kill();
    let agent = Agent::start_again(&host, config);
    let _ = agent.gpus();
    assert!(agent.settle().is_empty(), "{:?}", agent.settle());
    assert_eq!(real_layout(&host, 0), ["4g.24gb@0[4g.24gb@0]"]);
}

#[test]
fn auto_reconcile_repairs_drift_at_start() {
    let host = Host::up("dgx-a100");
    let agent = Agent::start(&host, CONFIG);
    applied(&agent, 2);
    assert_eq!(agent.apply_once(&["0"], &["7g.80gb"]).state, OperationState::Done);
    agent.stop();
    let agent = Agent::start_again(&host, &format!("auto_reconcile = true\n{CONFIG}"));
    applied(&agent, 1);
    assert_eq!(real_layout(&host, 0).len(), 4);
    // With auto_reconcile, gpushd also repairs drift after a reload.
    assert_eq!(agent.apply_once(&["1"], &["7g.80gb"]).state, OperationState::Done);
    agent.signal(Signal::SIGHUP);
    applied(&agent, 3);
    assert_eq!(real_layout(&host, 1).len(), 4);
}

/// Waits until health reports a cause about a GPU whose message contains `says`.
fn reported(agent: &Agent, gpu: u32, says: &str) -> Value {
    agent.until(says, || {
        let health = agent.get("/v1/health").json();
        let about = |cause: &&Value| cause["message"].as_str().is_some_and(|m| m.contains(&format!("GPU {gpu} (GPU-")));
        let causes = health["errors"].as_array()?.clone();
        causes.iter().filter(about).find(|cause| cause.to_string().contains(says)).cloned()
    })
}

/// Returns the record of the boot.
fn record(agent: &Agent) -> Value {
    agent.get("/v1/health").json()["layouts_at_start"].clone()
}

/// Returns the states of the operations on a GPU.
fn on(agent: &Agent, gpu: u32) -> Vec<OperationState> {
    agent.settle().into_iter().filter(|op| op.plans[0].gpu == gpu).map(|op| op.state).collect()
}

#[test]
fn impossible_layout_affects_one_gpu_and_retries_end() {
    let host = Host::up("dgx-a100");
    host.fault("nvmlDeviceCreateGpuInstance* --gpu 0 --rc INSUFFICIENT_RESOURCES");
    let agent = Agent::start(&host, CONFIG);
    let trouble = reported(&agent, 0, "tried 1 of 6 times");
    assert!(trouble["causes"].to_string().contains("tries again"), "{trouble}");
    assert_eq!(record(&agent)["complete"], json!(false), "it is still being tried");
    let trouble = reported(&agent, 0, "tried 6 times");
    assert!(trouble["causes"].to_string().contains("`gpushctl apply 0` (administrator)"), "{trouble}");
    agent.wait_for_layouts_at_start();
    assert_eq!(on(&agent, 0), [OperationState::RolledBack; 6]);
    assert_eq!(on(&agent, 1), [OperationState::Done]);
    assert_eq!((real_layout(&host, 0).len(), real_layout(&host, 1).len()), (0, 4));
    assert_eq!(agent.get("/v1/health").json()["status"], "degraded");
    // When an administrator has repaired the GPU, health is `ok`.
    host.clear_faults();
    let mended = agent.follow(agent.begin_with(&json!({ "selectors": ["0"] })).unwrap());
    assert_eq!(mended.state, OperationState::Done);
    assert_eq!(agent.get("/v1/health").json()["status"], "ok");
    // gpushd has given up this layout. After a restart in the same boot, gpushd does not apply it
    // either.
    assert_eq!(agent.apply_once(&["0"], &["7g.80gb"]).state, OperationState::Done);
    agent.stop();
    let agent = Agent::start_again(&host, CONFIG);
    let _ = agent.gpus();
    agent.stop();
    assert_eq!(real_layout(&host, 0), ["7g.80gb@0[7g.80gb@0]"]);
}

#[test]
fn transient_driver_error_delays_but_keeps_layouts() {
    for (fault, says) in [
        // Three faults: the apply fails and is rolled back; the worker is killed during the apply;
        // the GPU cannot be read.
        ("nvmlDeviceCreateGpuInstance* --gpu 0 --times 2 --rc UNKNOWN", "tried 1 of 6 times"),
        ("nvmlDeviceCreateGpuInstance* --gpu 0 --times 1 --kill before", "tried 1 of 6 times"),
        ("nvmlDeviceGetMigMode --gpu 0 --times 3 --rc UNKNOWN", "gpushd tries again"),
    ] {
        let host = Host::up("dgx-a100");
        host.fault(fault);
        let agent = Agent::start(&host, CONFIG);
        reported(&agent, 0, says);
        agent.wait_for_layouts_at_start();
        assert_eq!((real_layout(&host, 0).len(), real_layout(&host, 1).len()), (4, 4), "{fault}");
        assert_eq!(on(&agent, 0).last(), Some(&OperationState::Done), "{fault}");
        // If the worker dies, the current call for the other GPU also fails. gpushd must retry the
        // operation on the other GPU, too.
        assert_eq!(on(&agent, 1).last(), Some(&OperationState::Done), "{fault}");
        let health = agent.get("/v1/health").json();
        assert_eq!(health["status"], "ok", "{fault}: {health}");
    }
}

#[test]
fn unidentified_gpus_get_layouts_after_restart() {
    let host = Host::up("dgx-a100");
    host.fault("nvmlDeviceGetUUID --gpu 1 --rc UNKNOWN");
    let agent = Agent::start(&host, CONFIG);
    let uuid = json!(agent.gpu(0).uuid);
    agent.await_that("GPU 0 on record", || record(&agent)["settled"].as_array().is_some_and(|all| all.contains(&uuid)));
    let health = agent.get("/v1/health").json();
    assert!(
        health["errors"]
            .to_string()
            .contains("the driver reports no UUID for GPU 1, so gpushd does not apply a layout there yet"),
        "{health}"
    );
    assert_eq!(real_layout(&host, 0).len(), 4);
    assert_eq!(agent.apply_once(&["0"], &["7g.80gb"]).state, OperationState::Done);
    agent.stop();
    // At its next start in this boot, gpushd can identify the GPU. It applies only the layout of
    // this GPU.
    host.clear_faults();
    let agent = Agent::start_again(&host, CONFIG);
    agent.wait_for_layouts_at_start();
    assert_eq!(real_layout(&host, 0), ["7g.80gb@0[7g.80gb@0]"]);
    assert_eq!(real_layout(&host, 1).len(), 4);
    assert!(agent.settle().iter().all(|op| op.plans[0].gpu == 1), "{:?}", agent.settle());
    assert_eq!(agent.get("/v1/health").json()["errors"], json!([]));
}

#[test]
fn stop_during_start_layouts_leaves_rest_to_next_start() {
    let host = Host::up("dgx-a100");
    // The creation on GPU 0 is slow, and GPU 1 cannot be read.
    host.fault("nvmlDeviceCreateGpuInstance* --gpu 0 --times 1 --delay-ms 1500");
    host.fault("nvmlDeviceGetMigMode --gpu 1 --rc UNKNOWN");
    let mut agent = Agent::start(&host, CONFIG);
    agent.until("operation", || {
        let all = agent.get("/v1/operations").json();
        all.as_array().filter(|all| !all.is_empty()).cloned()
    });
    agent.signal(Signal::SIGTERM);
    assert!(agent.wait().success(), "{}", agent.log());
    assert_eq!((real_layout(&host, 0).len(), real_layout(&host, 1).len()), (4, 0));
    host.clear_faults();
    host.start_trace();
    let agent = Agent::start_again(&host, CONFIG);
    agent.wait_for_layouts_at_start();
    assert_eq!((real_layout(&host, 0).len(), real_layout(&host, 1).len()), (4, 4));
    assert!(host.trace().iter().all(|call| call.gpu == Some(1)), "{:?}", host.trace());
}

#[test]
fn stop_without_driver_leaves_layouts_to_next_start() {
    let host = Host::up("dgx-a100");
    host.fault("nvmlInit* --rc DRIVER_NOT_LOADED");
    let agent = Agent::start(&host, CONFIG);
    assert_eq!(agent.get("/v1/gpus").status, 503);
    agent.stop();
    host.clear_faults();
    let agent = Agent::start_again(&host, CONFIG);
    agent.wait_for_layouts_at_start();
    assert_eq!((real_layout(&host, 0).len(), real_layout(&host, 1).len()), (4, 4));
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
fn unknown_boot_id_changes_no_layout() {
    let host = Host::up("dgx-a100");
    let agent = Setup::on(&host).config(CONFIG).env("GPUSH_BOOT_ID_FILE", "/nonexistent").start();
    assert_eq!(agent.gpus()[0].drift.len(), 1);
    assert!(agent.settle().is_empty());
    let health = agent.get("/v1/health").json();
    assert!(health["errors"][0]["message"].as_str().unwrap().contains("/nonexistent"), "{health}");
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

/// Fault: rules of the modes `exclusive` and `timeslice` left MIG on at the first start. The operation never destroys an
/// instance in use.
#[test]
fn first_start_turns_mig_off_for_whole_gpus() {
    let host = Host::up("[[gpu]]\nmodel = \"h100-80-sxm\"\ncount = 3\n");
    let agent = Agent::start(&host, "");
    for gpu in ["0", "1", "2"] {
        assert_eq!(agent.apply(&[gpu], &["1g.10gb@0"]).state, OperationState::Done);
    }
    let user = host.process(&format!("--gpu 2 --gi {} --ci 0", gi_at(&host, 2, 0)));
    agent.stop();
    let rule = |gpu: u32, mode: &str| format!("[[gpu]]\nmatch = [\"{gpu}\"]\nmode = \"{mode}\"\n");
    let config = [rule(0, "exclusive"), rule(1, "timeslice"), rule(2, "exclusive")].concat();
    let agent = Setup::on(&host).named("second").config(&config).start();
    for gpu in [0, 1] {
        agent.await_that("MIG off", || real_layout(&host, gpu) == ["MIG off"]);
    }
    let named = || agent.gpu(2).blocked_by.iter().any(|holder| holder.pid == Some(user)).then_some(());
    agent.until("the user is named", named);
    assert_eq!(real_layout(&host, 2), ["1g.10gb@0[1g.10gb@0]"]);
    host.end_process(user);
    agent.wait_for_layouts_at_start();
    assert_eq!(real_layout(&host, 2), ["MIG off"]);
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
