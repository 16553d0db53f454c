//! MPS targets while the driver starts, without a driver, and on a lost GPU.

use std::process::Stdio;

use gpush_api::{ApiError, Code, MpsState};
use gpush_tests::{
    agent::Agent,
    host::{Host, program},
    mps::{reaches, request},
};
use serde_json::json;

const HOST: &str = "[[gpu]]\nmodel = \"l4\"\ncount = 2\n";
const CONFIG: &str = "[mps]\nhealth_s = 1\n[[gpu]]\nmatch = [\"0-1\"]\nmode = \"mps\"\n";

/// Starts a host and gpushd. When the daemons are ready, kills gpushd.
fn served() -> Host {
    let host = Host::up(HOST);
    let agent = Agent::start(&host, CONFIG);
    for target in ["0", "1"] {
        reaches(&agent, target, MpsState::Ready);
    }
    let _begun = agent.settle();
    agent.kill();
    host
}

fn refusals(agent: &Agent, target: &str) -> Vec<ApiError> {
    let path = format!("/v1/mps/{target}");
    vec![
        agent.get(&path).error(),
        agent.post("/v1/leases", &request(target, &json!({}))).error(),
        agent.post(&format!("{path}/stop"), &json!({})).error(),
        agent.post(&format!("{path}/settings"), &json!({ "percentage": 10 })).error(),
    ]
}

/// Fault: while the driver started, the error was `not_found`, which is not retryable.
#[test]
fn target_is_unavailable_while_the_driver_starts() {
    let host = served();
    host.fault("nvmlInit* --delay-ms 600000");
    let agent = Agent::start(&host, CONFIG);
    for refused in refusals(&agent, "0") {
        // A lease request reads the GPUs. So its error may be that the driver is missing.
        let is_unavailable = matches!(refused.code, Code::Unavailable | Code::DriverUnavailable);
        assert!(is_unavailable && refused.retryable, "{refused:?}");
    }
}

#[test]
fn run_waits_until_the_driver_has_started() {
    let host = served();
    host.fault("nvmlInit* --delay-ms 2000 --times 1");
    let agent = Agent::start(&host, CONFIG);
    let mut run = host.command(program("gpushctl"));
    run.args(["run", "--mps", "10", "-g", "0", "--", "true"]).env("GPUSH_SOCKET", agent.socket()).stdin(Stdio::null());
    let output = run.output().expect("gpushctl");
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
}

/// gpushd must return an error: an empty list would mean that no GPU is shared.
#[test]
fn targets_without_a_driver_are_an_error_and_not_an_empty_list() {
    let host = Host::up(HOST);
    host.fault("nvmlInit* --rc DRIVER_NOT_LOADED");
    let agent = Agent::start(&host, CONFIG);
    let refused = agent.until("the driver's error", || {
        let answer = agent.get("/v1/mps");
        assert_ne!(answer.status, 200);
        Some(answer.error()).filter(|error| error.code == Code::DriverUnavailable)
    });
    assert!(refused.hint.is_some(), "{refused:?}");
    for refused in refusals(&agent, "0") {
        assert_eq!(refused.code, Code::DriverUnavailable, "{refused:?}");
    }
}

/// gpushd finds the daemon of a lost GPU through the directory of the daemon. If a request names
/// the target by the index of the GPU, the response is the error of the lost GPU.
#[test]
fn target_on_a_lost_gpu_is_refused_with_gpu_lost() {
    let host = served();
    host.fault("nvmlDeviceGetHandleByIndex* --gpu 1 --rc GPU_IS_LOST");
    let agent = Agent::start(&host, CONFIG);
    reaches(&agent, "0", MpsState::Ready);
    let refused = agent.until("the error of the GPU", || {
        let refused = agent.get("/v1/mps/1").error();
        Some(refused).filter(|error| error.code != Code::Unavailable)
    });
    assert_eq!(refused.code, Code::GpuLost, "{refused:?}");
    assert!(refused.message.contains("GPU 1"), "{refused:?}");
}
