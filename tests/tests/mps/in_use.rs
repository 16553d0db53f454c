//! A program calls cuInit only seconds after its start, and is a client of the MPS daemon only from
//! then on. So gpushd treats a daemon with a lease as in use, even if the daemon has no clients.

use std::{
    io::{BufRead, BufReader, Write},
    process::Stdio,
};

use gpush_api::{Code, MpsState};
use gpush_tests::{
    agent::Agent,
    host::{Host, program},
    mps::{act, becomes, daemon, lease, reaches, release},
};
use serde_json::json;

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
