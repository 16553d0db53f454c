//! gpushd is killed during a change of MIG mode on GPUs without instances. So no instance shows how
//! far the change got. The next gpushd must finish the change, and report the right outcome.

use gpush_api::{GpuState, Operation, OperationState};
use gpush_tests::{
    agent::{Agent, real_layout},
    host::Host,
};
use serde_json::{Value, json};

/// Requests MIG modes for GPUs, without instances. A driver call of the operation kills the agent.
fn begin(agent: &mut Agent, modes: &[(u32, bool)]) {
    let each: Vec<Value> =
        modes.iter().map(|&(gpu, mig)| json!({ "selector": agent.gpu(gpu).uuid, "mig_enabled": mig })).collect();
    die_of(agent, &json!({ "layout_source": { "per_gpu": each } }));
}

fn die_of(agent: &mut Agent, body: &Value) {
    let body = body.to_string();
    let _reported = agent.try_raw(
        format!(
            "POST /v1/mig/apply HTTP/1.1\r\nhost: gpush\r\nconnection: close\r\ncontent-type: application/json\r\n\
             content-length: {}\r\n\r\n{body}",
            body.len()
        )
        .as_bytes(),
    );
    agent.wait();
}

/// Starts the next agent. Returns the agent, and the operation that it has recovered.
fn next(host: &Host, config: &str) -> (Agent, Operation) {
    host.clear_faults();
    let agent = Agent::start(host, config);
    let ended = agent.follow(agent.operation("op-1"));
    (agent, ended)
}

fn modes(host: &Host, gpus: usize) -> Vec<bool> {
    (0..gpus).map(|gpu| real_layout(host, gpu) != ["MIG off"]).collect()
}

#[test]
fn enabling_mig_without_instances_is_resumed() {
    for model in ["a30-24", "h100-80-pcie"] {
        let host = Host::up(&format!("[[gpu]]\nmodel = \"{model}\"\ncount = 2\nmig = false\n"));
        host.fault("nvmlDeviceSetMigMode --kill before --parent --times 1");
        let mut agent = Agent::start(&host, "");
        begin(&mut agent, &[(0, true), (1, true)]);
        assert_eq!(modes(&host, 2), [false, false]);
        let (_agent, ended) = next(&host, "");
        assert_eq!((ended.state, modes(&host, 2)), (OperationState::Done, vec![true, true]), "{model}: {ended:?}");
    }
}

#[test]
fn failed_operation_stays_failed_if_other_gpu_is_done() {
    let host = Host::up("[[gpu]]\nmodel = \"h100-80-pcie\"\ncount = 2\nmig = false\n");
    host.fault("nvmlDeviceSetMigMode --gpu 1 --rc IN_USE");
    host.fault("nvmlDeviceSetMigMode --gpu 0 --kill before --parent --after 1 --times 1");
    let mut agent = Agent::start(&host, "");
    begin(&mut agent, &[(0, true), (1, true)]);
    assert_eq!(modes(&host, 2), [true, false], "it died on its way back");
    let (agent, ended) = next(&host, "");
    assert_eq!((ended.state, modes(&host, 2)), (OperationState::RolledBack, vec![false, false]), "{ended:?}");
    assert_eq!(agent.gpu(0).state, GpuState::Ready);
}

#[test]
fn rolled_back_mode_change_restores_mig() {
    let host = Host::up("[[gpu]]\nmodel = \"h100-80-pcie\"\ncount = 2\nmig = true\n");
    host.fault("nvmlDeviceSetMigMode --gpu 1 --rc IN_USE");
    host.fault("nvmlDeviceSetMigMode --gpu 0 --kill before --parent --after 1 --times 1");
    let mut agent = Agent::start(&host, "");
    begin(&mut agent, &[(0, false), (1, false)]);
    assert_eq!(modes(&host, 2), [false, true], "it died on its way back");
    let (_agent, ended) = next(&host, "");
    assert_eq!((ended.state, modes(&host, 2)), (OperationState::RolledBack, vec![true, true]), "{ended:?}");
}

#[test]
fn gpus_without_mig_do_not_block_recovery() {
    const WHOLE: &str = "[[gpu]]\nmatch = [\"all\"]\nmode = \"exclusive\"\n";
    let host = Host::up("mixed");
    for times in 0..2 {
        host.sim::<&str>("reboot", &[]);
        let host = Host::up("mixed");
        // After this start, no later start on the same boot changes a GPU by itself.
        let first = Agent::start(&host, "");
        first.wait_for_layouts_at_start();
        first.stop();
        host.fault(&format!("nvmlDeviceSetMigMode --kill after --parent --after {times} --times 1"));
        let mut agent = Agent::start(&host, WHOLE);
        die_of(&mut agent, &json!({ "selectors": ["2-4"], "layout_source": "config" }));
        let (_agent, ended) = next(&host, WHOLE);
        assert_eq!(ended.state, OperationState::Done, "{times}: {ended:?}");
        assert_eq!(modes(&host, 4), [true, true, false, false], "{times}");
    }
}

#[test]
fn reset_group_is_kept_after_restart() {
    const GROUP: &str = "fabric_manager = false\n[[gpu]]\nmodel = \"a100-80\"\ncount = 3\nmig = false\n";
    let host = Host::up(GROUP);
    host.fault("nvmlDeviceSetMigMode --kill after --parent --times 1");
    let mut agent = Agent::start(&host, "");
    die_of(&mut agent, &json!({ "selectors": ["0"], "layout_source": { "entries": ["3g.40gb"] } }));
    let (_agent, ended) = next(&host, "");
    assert_eq!((ended.state, modes(&host, 3)), (OperationState::Done, vec![true, false, false]), "{ended:?}");
    // Also kill gpushd during the rollback.
    let host = Host::up(GROUP);
    host.fault("nvmlDeviceCreateGpuInstance* --gpu 2 --rc UNKNOWN");
    host.fault("nvmlGpuInstanceDestroy --kill before --parent --times 1");
    host.fault("nvmlDeviceCreateGpuInstance* --gpu 2 --delay-ms 300");
    let mut agent = Agent::start(&host, "");
    die_of(&mut agent, &json!({ "selectors": ["all"], "layout_source": { "entries": ["1g.10gb*7"] } }));
    let (agent, ended) = next(&host, "");
    assert_eq!((ended.state, modes(&host, 3)), (OperationState::RolledBack, vec![false; 3]), "{ended:?}");
    assert!((0..3).all(|gpu| agent.gpu(gpu).state == GpuState::Ready));
}
