//! Leases and programs that block the start or stop of an MPS daemon. A program calls cuInit only seconds after its
//! start, and is a client of the daemon only from then on. So gpushd treats a daemon with a lease as in use, even if the
//! daemon has no clients.

use std::{io::Write, process::Stdio};

use gpush_api::{ApiError, Code, ComputeMode, GpuPlan, MpsState, Operation, OperationState};
use gpush_tests::{
    agent::Agent,
    host::{Host, program},
    mps::{Client, base, controls, daemon, lease, reaches, release},
};
use serde_json::{Value, json};

const HOST: &str = "[[gpu]]\nmodel = \"l4\"\n";
const CONFIG: &str = "[mps]\nhealth = \"1s\"\n[[gpu]]\nmatch = [\"0\"]\nmode = \"mps\"\n";

#[test]
fn stop_that_waits_ends_the_daemon_after_the_last_lease() {
    let host = Host::up(HOST);
    let agent = Agent::start(&host, CONFIG);
    reaches(&agent, "0", MpsState::Ready);
    let id = lease(&agent, "0", &json!({ "percentage": 20 })).expect("a lease").lease.id;
    let stop = |wait: &str| {
        let mut command = host.command(program("gpushctl"));
        command.args(["mps", "stop", "0", wait]).env("GPUSH_SOCKET", agent.socket());
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("gpushctl")
    };
    let too_long = stop("--wait=1s").wait_with_output().expect("an end");
    let text = String::from_utf8_lossy(&too_long.stderr);
    assert_eq!(too_long.status.code(), Some(8), "{text}");
    assert!(text.contains("and admits new clients again") && !text.contains("gpushd continues"), "{text}");
    let pid = reaches(&agent, "0", MpsState::Ready).pid;
    let mut waiting = stop("--wait");
    reaches(&agent, "0", MpsState::Draining);
    assert_eq!(daemon(&agent, "0").pid, pid, "the daemon was there all the time");
    assert!(waiting.try_wait().expect("a state").is_none());
    release(&agent, id);
    let output = waiting.wait_with_output().expect("an end");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    reaches(&agent, "0", MpsState::Stopped);
}

/// Returns the body of a request that applies the rule of GPU 0.
fn wanted() -> Value {
    json!({ "selectors": ["0"], "layout_source": "wanted" })
}

/// Begins an operation that applies the rule of GPU 0 when the GPU is no longer in use.
fn begin_and_wait(agent: &Agent) -> Operation {
    let mut request = wanted();
    request["wait_s"] = json!(600);
    agent.begin_with(&request).expect("an operation that waits")
}

/// Asserts that the plan and the operation are refused, name this process, and change nothing.
fn names_user_of_gpu(host: &Host, agent: &Agent, pid: &str) {
    let plans = agent.post("/v1/mig/plan", &wanted()).json();
    let plan: GpuPlan = serde_json::from_value(plans["plans"][0].clone()).expect("a plan");
    let planned = plan.error.unwrap_or_else(|| panic!("the plan has no error: {plans}"));
    let refused = agent.begin_with(&wanted()).expect_err("the GPU is in use");
    for error in [planned, refused] {
        let ApiError { code, message, causes, retryable, .. } = &error;
        assert_eq!((*code, *retryable), (Code::Blocked, true), "{error:?}");
        assert!(message.starts_with("cannot start the MPS daemon of GPU 0 ("), "{error:?}");
        let named = format!("held by pid {pid} (");
        assert!(causes.iter().any(|cause| cause.starts_with(&named)), "{pid}: {error:?}");
    }
    assert_eq!((controls(&base(host)), agent.gpu(0).compute_mode), (Vec::new(), Some(ComputeMode::Default)));
}

/// An administrator has started an MPS daemon without gpushd. The server of this daemon keeps the GPU open after its
/// last client has ended.
#[test]
fn server_of_another_daemon_prevents_a_change_to_mode_mps() {
    let host = Host::up(HOST);
    let agent = Agent::start(&host, "");
    agent.settle_reads();
    let directory = host.scratch("other-mps");
    std::fs::create_dir(&directory).expect("a directory");
    let named = |name: &str| (name.to_owned(), directory.display().to_string());
    let environment = [named("CUDA_MPS_PIPE_DIRECTORY"), named("CUDA_MPS_LOG_DIRECTORY")];
    let control = |argument: &[&str]| {
        let mut command = host.command(host.dir().join("bin/nvidia-cuda-mps-control"));
        command.args(argument).envs(environment.iter().cloned()).stdin(Stdio::piped());
        command
    };
    assert!(control(&["-d"]).status().expect("the daemon starts").success());
    let client = Client::start(&host, &environment);
    let server = client.word("server");
    agent.reload(CONFIG);
    names_user_of_gpu(&host, &agent, &server);
    client.end();
    names_user_of_gpu(&host, &agent, &server);
    let mut quit = control(&[]).spawn().expect("the front-end starts");
    quit.stdin.take().expect("piped").write_all(b"quit\n").expect("the front-end reads");
    assert!(quit.wait().expect("the front-end ends").success());
    let operation = agent.follow(begin_and_wait(&agent));
    assert_eq!(operation.state, OperationState::Done, "{operation:#?}\n{}", agent.log());
    reaches(&agent, "0", MpsState::Ready);
}
