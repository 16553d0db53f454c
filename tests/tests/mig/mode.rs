//! Changes of MIG mode with the real programs. On Ampere, a change needs a reset of the GPU. On
//! Hopper, it does not.

use std::{
    collections::BTreeSet,
    os::unix::fs::PermissionsExt,
    time::{Duration, Instant},
};

use gpush_api::{ApiError, Code, GpuHolders, GpuState, Operation, OperationState, Refusal};
use gpush_tests::{
    agent::{Agent, PATIENCE, Setup, real_layout},
    around::Around,
    host::Host,
};
use serde_json::{Value, json};

use crate::faults::resets;

const AMPERE: &str = "[[gpu]]\nmodel = \"a100-80\"\ncount = 3\nmig = false\n";
const LAYOUT: &[&str] = &["3g.40gb", "1g.10gb*2"];

fn off(agent: &Agent, gpu: u32) -> Value {
    json!({ "layout_source": { "per_gpu": [{ "selector": agent.gpu(gpu).uuid, "mig_enabled": false }] } })
}

fn refused(agent: &Agent, gpu: &str) -> ApiError {
    agent.begin(&[gpu], LAYOUT).expect_err("it is refused")
}

#[test]
fn ampere_mode_change_resets_only_that_gpu() {
    let host = Host::up(AMPERE);
    let agent = Agent::start(&host, "");
    assert_eq!(agent.apply(&["0"], LAYOUT).state, OperationState::Done);
    let neighbour = real_layout(&host, 0);
    assert_eq!(neighbour.len(), 3, "{neighbour:?}");
    let plan =
        agent.post("/v1/mig/plan", &json!({ "selectors": ["1"], "layout_source": { "entries": LAYOUT } })).json();
    assert_eq!(plan["plans"][0]["steps"][0]["do"], json!("enable_mig"), "{plan}");
    assert!(plan["plans"][0]["steps"][0]["reset"].is_object(), "{plan}");
    host.start_trace();
    let operation = agent.apply(&["1"], LAYOUT);
    assert_eq!(operation.state, OperationState::Done, "{operation:?}\n{}", agent.log());
    assert_eq!(operation.progress[0].done, operation.progress[0].total);
    assert_eq!(real_layout(&host, 1).len(), 3);
    assert_eq!(resets(&host), [Some(1)], "only the GPU concerned");
    assert_eq!(real_layout(&host, 0), neighbour, "the neighbour's instances stay");
    assert_eq!(real_layout(&host, 2), ["MIG off"]);
    // Disable MIG mode again. gpushd must destroy the instances before that.
    host.start_trace();
    let operation = agent.follow(agent.begin_with(&off(&agent, 1)).expect("an operation"));
    assert_eq!(operation.state, OperationState::Done, "{operation:?}\n{}", agent.log());
    assert!(operation.plans[0].mig_mode() == Some(false) && operation.plans[0].reset().is_some());
    assert_eq!(operation.progress[0].done, operation.progress[0].total);
    assert_eq!(real_layout(&host, 1), ["MIG off"]);
    assert_eq!((resets(&host), real_layout(&host, 0)), (vec![Some(1)], neighbour));
    // If the same request is sent again, gpushd changes nothing and makes no driver call.
    host.start_trace();
    let operation = agent.follow(agent.begin_with(&off(&agent, 1)).expect("an operation"));
    assert_eq!((operation.state, host.trace().len()), (OperationState::Done, 0));
    assert_eq!(agent.gpu(1).state, GpuState::Ready);
}

#[test]
fn open_handle_blocks_mode_change_and_is_named() {
    let host = Host::up(AMPERE);
    let agent = Agent::start(&host, "");
    // The driver lists neither of the two processes.
    let monitors = [host.process("--gpu 0 --kind handle"), host.process("--gpu 0 --kind handle")];
    host.process("--gpu 1 --kind handle");
    host.start_trace();
    let error = refused(&agent, "0");
    assert_eq!((error.code, error.retryable), (Code::Blocked, true));
    for pid in monitors {
        assert!(error.causes.iter().any(|cause| cause.contains(&format!("pid {pid} "))), "{error:?}");
    }
    assert_eq!(error.causes.len(), 2, "the neighbour's holder is not in the way: {error:?}");
    assert!(error.hint.as_deref().is_some_and(|hint| hint.contains("end these processes")), "{error:?}");
    let plan =
        agent.post("/v1/mig/plan", &json!({ "selectors": ["0"], "layout_source": { "entries": LAYOUT } })).json();
    let refusal: Refusal = serde_json::from_value(plan["plans"][0]["refusal"].clone()).expect("a refusal");
    let Refusal::Held { holders, .. } = refusal else { panic!("{refusal:?}") };
    assert_eq!(holders.len(), 2);
    assert_eq!(holders[0].devices, ["/dev/nvidia0"]);
    assert_eq!(host.trace(), []);
    // A waiting operation checks once a second, and starts when the processes have ended.
    let body = json!({ "selectors": ["0"], "layout_source": { "entries": LAYOUT }, "wait_s": 60 });
    let waiting = agent.begin_with(&body).expect("it waits");
    let (begun, mut looks) = (Instant::now(), BTreeSet::new());
    while looks.len() < 6 {
        assert!(begun.elapsed() < PATIENCE, "{}", agent.log());
        looks.insert(agent.gpu(0).observed_at);
    }
    // The operation reads the GPU at most once a second, and so do the requests of this test. So
    // six readings take at least a second.
    assert!(begun.elapsed() >= Duration::from_secs(1), "{looks:?}");
    monitors.iter().for_each(|pid| host.end_process(*pid));
    // While a process has a GPU open, the simulated driver refuses to reset the GPU. So the success
    // shows that the operation has waited.
    let operation = agent.follow(waiting);
    assert_eq!(operation.state, OperationState::Done, "{operation:?}\n{}", agent.log());
    assert_eq!(real_layout(&host, 0).len(), 3);
}

#[test]
fn services_stop_and_start_around_mode_change_and_hooks() {
    let host = Host::up(AMPERE);
    let around = Around::of(&host);
    around.run("nvidia-dcgm");
    let agent = Agent::start(&host, &around.config(&["nvidia-dcgm", "nvsm"], ""));
    let uuid = agent.gpu(0).uuid;
    let operation = agent.apply(&["0"], LAYOUT);
    assert_eq!(operation.state, OperationState::Done, "{operation:?}\n{}", agent.log());
    let reset = format!("nvidia-smi --gpu-reset -i {uuid}");
    assert_eq!(
        around.take_calls(),
        [
            "systemctl is-active nvidia-dcgm.service",
            "systemctl stop nvidia-dcgm.service",
            "systemctl is-active nvsm.service",
            "before ",
            &reset,
            "after ",
            "systemctl start nvidia-dcgm.service",
        ]
    );
    assert!(around.runs("nvidia-dcgm") && !around.runs("nvsm"), "what did not run is not started");
    let facts = format!("GPUSH_MIG_OFF=\nGPUSH_MIG_ON={uuid}\nGPUSH_OPERATION={}\n", operation.id);
    assert_eq!(around.reported("before.env"), format!("{facts}GPUSH_PHASE=before\n"));
    assert_eq!(around.reported("after.env"), format!("{facts}GPUSH_PHASE=after\nGPUSH_RESULT=done\n"));
    // If the layout changes but not the mode, gpushd needs no reset and stops no service.
    assert_eq!(agent.apply(&["0"], &["7g.80gb"]).state, OperationState::Done);
    assert_eq!(around.take_calls(), Vec::<String>::new());
    // The helper units have left no files.
    let left = std::fs::read_dir(Setup::on(&host).state_dir().join("helper")).expect("a directory").count();
    assert_eq!(left, 0);

    // One operation resets several GPUs at once.
    let operation = agent.apply(&["1", "2"], LAYOUT);
    assert_eq!(operation.state, OperationState::Done, "{operation:?}\n{}", agent.log());
    let calls = around.take_calls();
    let resets: Vec<_> = calls.iter().filter(|call| call.starts_with("nvidia-smi")).collect();
    assert_eq!(resets.len(), 1, "{calls:?}");
    assert_eq!(resets[0].matches("GPU-").count(), 2);
    assert_eq!([1, 2].map(|gpu| real_layout(&host, gpu).len()), [3, 3]);

    // gpushd does not run a program that other users can write.
    let hook = around.file("before");
    std::fs::set_permissions(&hook, std::fs::Permissions::from_mode(0o777)).unwrap();
    let error = agent.begin_with(&off(&agent, 1)).expect_err("it is refused");
    assert!(error.message.contains("can be written by other users"), "{error:?}");
    assert_eq!(error.hint, Some(format!("check its content, then run `chmod go-w {}`", hook.display())));
    assert_eq!(around.take_calls(), Vec::<String>::new());
}

/// Asserts that gpushd has restored layout, mode and services after a change that failed.
fn taken_back(host: &Host, around: &Around, agent: &Agent, operation: &Operation) {
    assert_eq!(operation.state, OperationState::RolledBack, "{operation:?}\n{}", agent.log());
    assert_eq!(real_layout(host, 0), ["MIG off"]);
    let mig = agent.gpu(0).mig.expect("MIG");
    assert_eq!((mig.enabled, mig.pending_mode()), (false, false), "nothing waits for a reset");
    assert!(around.runs("nvidia-dcgm"), "{}", agent.log());
    assert!(around.reported("after.env").contains("GPUSH_RESULT=rolled_back"));
}

#[test]
fn failed_hook_or_reset_restores_everything() {
    let host = Host::up(AMPERE);
    let around = Around::of(&host);
    around.run("nvidia-dcgm");
    let agent = Agent::start(&host, &around.config(&["nvidia-dcgm"], "timeout = \"5s\""));
    around.hook("echo waiting for godot; sleep 600");
    host.start_trace();
    let operation = agent.apply(&["0"], LAYOUT);
    taken_back(&host, &around, &agent, &operation);
    let error = operation.error.as_ref().expect("an error");
    assert!(error.message.contains("did not end in time"), "{error:?}");
    agent.wait_for_log("godot");
    assert_eq!(host.trace(), [], "nothing was changed");

    around.hook("echo 'no licence for bob, --token=hunter2' >&2; exit 7");
    let operation = agent.apply(&["0"], LAYOUT);
    taken_back(&host, &around, &agent, &operation);
    let error = operation.error.as_ref().expect("an error");
    assert!(error.message.contains("status 7"), "{error:?}");
    // The output is in the log, which only root may read, and in no operation.
    agent.wait_for_log("status 7: no licence for bob, --token=hunter2");
    let reported = agent.get(&format!("/v1/operations/{}", operation.id)).json().to_string();
    assert!(!reported.contains("hunter2") && reported.contains("journalctl -u gpushd"), "{reported}");
    around.hook(":");

    host.fault("gpu-reset --rc UNKNOWN --times 1");
    let operation = agent.apply(&["0"], LAYOUT);
    taken_back(&host, &around, &agent, &operation);
    let error = operation.error.as_ref().expect("an error");
    // The cause contains the output of nvidia-smi.
    let has_output = |cause: &String| cause.starts_with("the reset ended") && cause.contains("could not be reset: ");
    assert!(error.causes.iter().any(has_output), "{error:?}");
    agent.wait_for_log("could not be reset");
    host.clear_faults();

    // The first instance cannot be created. So gpushd disables MIG mode again, with a second reset.
    host.fault("nvmlGpuInstanceCreateComputeInstance* --rc UNKNOWN --times 1");
    host.start_trace();
    let operation = agent.apply(&["0"], LAYOUT);
    taken_back(&host, &around, &agent, &operation);
    assert_eq!(resets(&host), [Some(0), Some(0)]);
    host.clear_faults();

    // If the reset that disables MIG mode fails, gpushd restores the layout.
    assert_eq!(agent.apply(&["0"], LAYOUT).state, OperationState::Done);
    let before = real_layout(&host, 0);
    host.fault("gpu-reset --rc UNKNOWN --times 1");
    let operation = agent.follow(agent.begin_with(&off(&agent, 0)).expect("an operation"));
    assert_eq!(operation.state, OperationState::RolledBack, "{operation:?}\n{}", agent.log());
    assert_eq!(real_layout(&host, 0), before);
    assert!(around.runs("nvidia-dcgm"));
}

#[test]
fn failed_service_start_is_reported_and_retried_by_next_gpushd() {
    let host = Host::up(AMPERE);
    let around = Around::of(&host);
    around.run("nvidia-dcgm");
    let config = around.config(&["nvidia-dcgm"], "");
    let agent = Agent::start(&host, &config);
    around.break_service("nvidia-dcgm", true);
    let operation = agent.apply(&["0"], LAYOUT);
    assert_eq!(operation.state, OperationState::Done);
    assert!(operation.notes.iter().any(|note| note.contains("systemctl status nvidia-dcgm")), "{operation:?}");
    let ill = agent.get("/v1/health").json()["errors"].to_string();
    assert!(ill.contains("nvidia-dcgm was stopped for operation op-1"), "{ill}");
    assert!(!around.runs("nvidia-dcgm"));
    agent.stop();
    around.break_service("nvidia-dcgm", false);
    let agent = Agent::start(&host, &config);
    wait_until(|| around.runs("nvidia-dcgm"), &agent);
    assert!(!agent.get("/v1/health").json()["errors"].to_string().contains("nvidia-dcgm"));

    // In maintenance, gpushd starts no service.
    around.break_service("nvidia-dcgm", true);
    let operation = agent.apply(&["1"], LAYOUT);
    assert_eq!((operation.state, operation.notes.len()), (OperationState::Done, 1), "{operation:?}");
    assert!(agent.post("/v1/maintenance/enter", &json!({})).status < 300);
    agent.kill();
    around.break_service("nvidia-dcgm", false);
    let agent = Agent::start(&host, &config);
    assert!(agent.get("/v1/health").json()["maintenance"].is_object());
    let _before = around.take_calls();
    assert!(agent.post("/v1/maintenance/leave", &json!({})).status < 300);
    wait_until(|| around.runs("nvidia-dcgm"), &agent);
    assert_eq!(around.take_calls().iter().filter(|call| call.starts_with("systemctl start")).count(), 1);
}

fn wait_until(there: impl Fn() -> bool, agent: &Agent) {
    let until = Instant::now() + PATIENCE;
    while !there() {
        assert!(Instant::now() < until, "{}", agent.log());
        std::thread::yield_now();
    }
}

#[test]
fn next_gpushd_waits_for_reset_in_progress() {
    let host = Host::up(AMPERE);
    let around = Around::of(&host);
    let agent = Agent::start(&host, &around.config(&[], ""));
    let config = around.config(&[], "");
    // Let the reset take long. gpushd must not open the GPU meanwhile: the reset would fail.
    host.fault("gpu-reset --delay-ms 1500 --times 1");
    let _ = agent.begin(&["0"], LAYOUT).expect("an operation");
    let calls = || std::fs::read_to_string(around.file("calls")).unwrap_or_default();
    wait_until(|| calls().contains("nvidia-smi"), &agent);
    agent.kill();
    let agent = Agent::start(&host, &config);
    let operations = agent.get("/v1/operations?limit=1").json();
    let id = operations[0]["id"].as_str().expect("an operation");
    let operation: Operation =
        serde_json::from_value(agent.get(&format!("/v1/operations/{id}")).json()).expect("an operation");
    let operation = agent.follow(operation);
    assert_eq!(operation.state, OperationState::Done, "{operation:?}\n{}", agent.log());
    assert_eq!(calls().matches("nvidia-smi").count(), 1, "it was not asked for twice");
    assert_eq!(real_layout(&host, 0).len(), 3);
}

#[test]
fn hopper_needs_no_reset_and_names_holders_on_refusal() {
    let host = Host::up("[[gpu]]\nmodel = \"h100-80-sxm\"\nmig = false\n");
    let around = Around::of(&host);
    around.run("nvidia-dcgm");
    let agent = Agent::start(&host, &around.config(&["nvidia-dcgm"], ""));
    let monitor = host.process("--gpu 0 --kind handle");
    let operation = agent.apply(&["0"], LAYOUT);
    assert_eq!(operation.state, OperationState::RolledBack, "{operation:?}\n{}", agent.log());
    // An administrator reads which process has the GPU open, in the operation and in the list of holders.
    let error = operation.error.as_ref().expect("an error");
    assert!(error.causes.iter().any(|cause| cause.starts_with(&format!("held by pid {monitor} "))), "{error:?}");
    let holders: GpuHolders = serde_json::from_value(agent.get("/v1/gpus/0/holders").json()).expect("holders");
    assert_eq!(holders.holders.iter().filter_map(|holder| holder.pid).collect::<Vec<_>>(), [monitor]);
    assert_eq!(real_layout(&host, 0), ["MIG off"]);
    host.end_process(monitor);
    let (stop, start) = ("systemctl stop nvidia-dcgm.service", "systemctl start nvidia-dcgm.service");
    let surrounded = |operation: &Operation| {
        assert_eq!(operation.state, OperationState::Done, "{operation:?}\n{}", agent.log());
        let calls = around.take_calls();
        assert!(calls.iter().any(|call| call == stop) && calls.iter().any(|call| call == start), "{calls:?}");
        assert!(!calls.iter().any(|call| call.starts_with("nvidia-smi")), "no reset: {calls:?}");
    };
    let _earlier = around.take_calls();
    surrounded(&agent.apply(&["0"], LAYOUT));
    // While the GPU has instances, another layout needs no stopped service.
    assert_eq!(agent.apply(&["0"], &["3g.40gb", "1g.10gb"]).state, OperationState::Done);
    assert_eq!(around.take_calls(), Vec::<String>::new());
    surrounded(&agent.follow(agent.begin_with(&off(&agent, 0)).expect("an operation")));
    assert_eq!(real_layout(&host, 0), ["MIG off"]);
}

/// A virtual machine cannot reset a GPU. gpushd sets the mode, and continues with the layout after the reboot.
#[test]
fn reboot_of_virtual_machine_completes_mode_change() {
    let host = Host::up(&format!("virtual_machine = true\n{AMPERE}"));
    let config = format!("[[gpu]]\nmatch = [\"0\"]\nmode = \"mig\"\nlayout = {LAYOUT:?}\n");
    let agent = Agent::start(&host, &config);
    let is_set = |agent: &Agent| {
        let gpu = agent.gpu(0);
        // The operation ends a moment after the mode is set.
        gpu.state != GpuState::Changing && gpu.mig.is_some_and(|mig| !mig.enabled && mig.reset_pending)
    };
    agent.until("the mode is set", || is_set(&agent).then_some(()));
    let error = refused(&agent, "0");
    assert_eq!(error.code, Code::Conflict);
    assert!(error.message.contains("when this virtual machine reboots"), "{error:?}");
    assert!(error.hint.is_some_and(|hint| hint.starts_with("reboot this virtual machine")));
    // gpushd keeps no layout for a GPU without a rule, so it sets only the mode.
    let operation = agent.apply(&["1"], LAYOUT);
    assert_eq!(operation.state, OperationState::Done, "{operation:?}");
    assert!(operation.plans[0].waits_for_reboot() && operation.plans[0].steps.len() == 1, "{operation:?}");
    agent.stop();
    host.sim::<&str>("reboot", &[]);
    let agent = Agent::start(&host, &config);
    for gpu in 0..2 {
        agent.until("the GPU has its layout", || agent.gpu(gpu).drift.is_empty().then_some(()));
        if gpu == 1 {
            assert_eq!(agent.apply(&["1"], LAYOUT).state, OperationState::Done);
        }
        assert_eq!(
            real_layout(&host, gpu as usize),
            ["1g.10gb@0[1g.10gb@0]", "1g.10gb@1[1g.10gb@0]", "3g.40gb@4[3g.40gb@0]"]
        );
    }
    // MIG mode off also waits for a reboot.
    let operation = agent.follow(agent.begin_with(&off(&agent, 1)).expect("an operation"));
    assert_eq!(operation.state, OperationState::Done, "{operation:?}");
    assert!(agent.gpu(1).mig.is_some_and(|mig| mig.enabled && mig.reset_pending && mig.instances.is_empty()));
    agent.stop();
    host.sim::<&str>("reboot", &[]);
    let agent = Agent::start(&host, &config);
    agent.until("MIG mode is off", || agent.gpu(1).mig.is_some_and(|mig| mig.is_off()).then_some(()));
}
