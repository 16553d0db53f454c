//! gpushd is killed during a change of MIG mode of GPUs that must be reset together.

use gpush_api::{GpuState, Operation, OperationState};
use gpush_tests::{
    agent::{Agent, real_layout},
    host::Host,
};
use serde_json::{Value, json};

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
