//! Leases and programs that block the start or stop of an MPS daemon. A program calls cuInit only seconds after its
//! start, and is a client of the daemon only from then on. So gpushd treats a daemon with a lease as in use, even if the
//! daemon has no clients.

use std::{
    io::{BufRead, BufReader, Write},
    process::Stdio,
};

use gpush_api::{ApiError, Code, ComputeMode, GpuPlan, MpsState, Operation, OperationState};
use gpush_tests::{
    agent::Agent,
    host::{Host, program},
    mps::{Client, act, base, becomes, controls, daemon, lease, reaches, release},
};
use serde_json::{Value, json};

const HOST: &str = "[[gpu]]\nmodel = \"l4\"\n";
const CONFIG: &str = "[mps]\nhealth_s = 1\n[[gpu]]\nmatch = [\"0\"]\nmode = \"mps\"\n";

/// Without a check of leases, `stop` would end the daemon, and the program would run without MPS.
#[test]
fn lease_blocks_stop_before_its_program_uses_cuda() {
    let host = Host::up(HOST);
    let agent = Agent::start(&host, CONFIG);
    let pid = reaches(&agent, "0", MpsState::Ready).pid;
    let sim = program("gpush-sim");
    // The program calls cuInit only after it has read a line from its standard input.
    let script = format!("read go && exec {} mps-client", sim.display());
    let mut run = host.command(program("gpushctl"));
    run.args(["run", "--mps", "20", "-g", "0", "--", "sh", "-c", &script]).env("GPUSH_SOCKET", agent.socket());
    let mut run = run.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("gpushctl");
    let lease = becomes(&agent, "0", "with a lease", |daemon| !daemon.leases.is_empty()).leases.remove(0);
    let id = lease.id.to_string();
    for verb in ["stop", "restart"] {
        let refused = act(&agent, "0", verb, &json!({})).error();
        assert_eq!((refused.code, refused.retryable), (Code::Blocked, true), "{verb}: {refused:?}");
        assert!(refused.message.contains("1 lease is in use"), "{verb}: {refused:?}");
        assert!(refused.causes.iter().any(|cause| cause.contains(&id)), "{verb}: {refused:?}");
        assert!(refused.hint.as_ref().is_some_and(|hint| hint.contains(&id)), "{verb}: {refused:?}");
        assert_eq!(daemon(&agent, "0").pid, pid, "{verb}");
    }
    run.stdin.take().expect("piped").write_all(b"go\n").expect("the program reads");
    let mut first = String::new();
    BufReader::new(run.stdout.take().expect("piped")).read_line(&mut first).expect("the program writes");
    assert!(first.starts_with("active"), "it runs through MPS: {first}");
    run.kill().and_then(|()| run.wait()).expect("the program ends");
    // When the program ends, its lease ends. Retry until gpushd has noticed this.
    agent.await_that("a stop", || act(&agent, "0", "stop", &json!({})).status == 200);
    reaches(&agent, "0", MpsState::Stopped);
}

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

/// Fault: an operation to mode `mps` started the daemon although programs without MPS used the GPU. The clients of the
/// daemon then failed.
#[test]
fn program_without_mps_delays_a_change_to_mode_mps() {
    let host = Host::up(HOST);
    let agent = Agent::start(&host, "");
    agent.settle_reads();
    let pid = host.process("--gpu 0 --memory 100");
    agent.reload(CONFIG);
    names_user_of_gpu(&host, &agent, &pid.to_string());
    let operation = begin_and_wait(&agent);
    assert!(!operation.state.is_final() && controls(&base(&host)).is_empty(), "{operation:?}");
    host.end_process(pid);
    let operation = agent.follow(operation);
    assert_eq!(operation.state, OperationState::Done, "{operation:#?}\n{}", agent.log());
    reaches(&agent, "0", MpsState::Ready);
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
