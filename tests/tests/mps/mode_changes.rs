//! Mode changes of GPUs with the real programs. Each change is one operation, which ends and starts
//! MPS daemons. A reload ends or starts no daemon. A lease on the GPU blocks the operation.

use gpush_api::{ComputeMode, Operation, OperationState};
use gpush_tests::{
    agent::{Agent, Setup, real_layout},
    host::Host,
    mps::{self},
};
use serde_json::{Value, json};

const HOPPER: &str = "[[gpu]]\nmodel = \"h100-80-sxm\"\ncount = 2\nmig = false\n";
const MIG: &str = "mode = \"mig\"\nlayout = [\"3g.40gb*2\"]";

fn rule(how: &str) -> String {
    format!("[[gpu]]\nmatch = [\"0\"]\n{how}\n")
}

fn wanted() -> Value {
    json!({ "selectors": ["0"], "layout_source": "wanted" })
}

fn apply(agent: &Agent) -> Operation {
    let operation =
        agent.follow(agent.begin_with(&wanted()).unwrap_or_else(|error| panic!("{error:?}\n{}", agent.log())));
    assert_eq!(operation.state, OperationState::Done, "{operation:#?}\n{}", agent.log());
    assert_eq!(operation.progress[0].done, operation.progress[0].total, "{operation:#?}");
    operation
}

/// Waits until all operations have ended, also those of an earlier gpushd.
fn all_ended(agent: &Agent) {
    let all = agent.get("/v1/operations?limit=50").json();
    for one in all.as_array().expect("operations") {
        let _ended = agent.follow(agent.operation(one["id"].as_str().expect("an id")));
    }
}

/// Requests the desired state. If gpushd is killed before it answers, returns `None`.
fn asked(agent: &Agent) -> Option<Vec<u8>> {
    let body = wanted().to_string();
    let length = body.len();
    let head = "POST /v1/mig/apply HTTP/1.1\r\nhost: gpush\r\ncontent-type: application/json\r\nconnection: close\r\n";
    agent.try_raw(format!("{head}content-length: {length}\r\n\r\n{body}").as_bytes())
}

/// Kills gpushd before or after driver calls of a mode change, in both directions. Then checks which
/// state the next gpushd reaches. An in-process test ends gpushd at each call.
#[test]
fn restarted_gpushd_completes_or_rolls_back_a_mode_change() {
    for (from, to, call, moment) in [
        ("mode = \"mps\"", MIG, "nvmlDeviceSetComputeMode", "after"),
        ("mode = \"mps\"", MIG, "nvmlDeviceSetMigMode", "before"),
        ("mode = \"mps\"", MIG, "nvmlDeviceCreateGpuInstanceWithPlacement", "after"),
        (MIG, "mode = \"mps\"", "nvmlGpuInstanceDestroy", "before"),
        (MIG, "mode = \"mps\"", "nvmlDeviceSetMigMode", "after"),
        (MIG, "mode = \"mps\"", "nvmlDeviceSetComputeMode", "before"),
    ] {
        let host = Host::up(HOPPER);
        let mut agent = Agent::start(&host, &rule(from));
        agent.until("the GPU has its desired state", || {
            let gpu = agent.gpu(0);
            (gpu.drift.is_empty() && !gpu.stale).then_some(())
        });
        let _begun = agent.settle();
        agent.reload(rule(to));
        host.fault(&format!("{call} --gpu 0 --kill {moment} --parent --times 1"));
        let answer = asked(&agent);
        // The call comes during the operation, or when its compute mode is restored.
        agent.wait();
        drop((answer, agent));
        host.clear_faults();
        let agent = Setup::on(&host).config(rule(to)).start();
        all_ended(&agent);
        let daemons = mps::controls(&mps::base(&host)).len();
        let mig = real_layout(&host, 0) != ["MIG off"];
        assert!(daemons <= 1, "{from} to {to}, killed {moment} {call}: {daemons} daemons");
        assert!(!(mig && daemons == 1), "MIG and MPS at once: killed {moment} {call}\n{}", agent.log());
        // A new request must reach the desired state from every state in between.
        apply(&agent);
        let daemons = mps::controls(&mps::base(&host)).len();
        let mig = real_layout(&host, 0) != ["MIG off"];
        assert_eq!((daemons, mig), if to == MIG { (0, true) } else { (1, false) }, "{}", agent.log());
        let exclusive = agent.gpu(0).compute_mode == Some(ComputeMode::ExclusiveProcess);
        assert_eq!(exclusive, daemons == 1, "killed {moment} {call}\n{}", agent.log());
    }
}
