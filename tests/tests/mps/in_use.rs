//! Shares count as use: a program takes seconds from its start until it calls cuInit.

use std::{
    io::{BufRead, BufReader, Write},
    process::Stdio,
};

use gpush_api::{Code, MpsState};
use gpush_tests::{
    agent::Agent,
    host::{Host, program},
    mps::{act, becomes, daemon, reaches},
};
use serde_json::json;

const HOST: &str = "[[gpu]]\nmodel = \"l4\"\n";
const CONFIG: &str = "[mps]\nhealth_s = 1\n[[gpu]]\nmatch = [\"0\"]\nmode = \"mps\"\n";

/// Without the share, `stop` ended the daemon and the program ran without MPS.
#[test]
fn share_of_a_program_that_has_not_begun_blocks_stop_and_restart() {
    let host = Host::up(HOST);
    let agent = Agent::start(&host, CONFIG);
    let pid = reaches(&agent, "0", MpsState::Ready).pid;
    let sim = program("gpush-sim");
    // The program uses CUDA only when it is told to.
    let script = format!("read go && exec {} mps-client", sim.display());
    let mut run = host.command(program("gpushctl"));
    run.args(["mps", "run", "0", "-p", "20", "--", "sh", "-c", &script]).env("GPUSH_SOCKET", agent.socket());
    let mut run = run.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("gpushctl");
    let share = becomes(&agent, "0", "with a share", |daemon| !daemon.leases.is_empty()).shares.remove(0);
    for verb in ["stop", "restart"] {
        let refused = act(&agent, "0", verb, &json!({})).error();
        assert_eq!((refused.code, refused.retryable), (Code::Blocked, true), "{verb}: {refused:?}");
        assert!(refused.message.contains("1 share is in use"), "{verb}: {refused:?}");
        assert!(refused.causes.iter().any(|cause| cause.contains(&share.id)), "{verb}: {refused:?}");
        assert!(refused.hint.as_ref().is_some_and(|hint| hint.contains(&share.id)), "{verb}: {refused:?}");
        assert_eq!(daemon(&agent, "0").pid, pid, "{verb}");
    }
    run.stdin.take().expect("piped").write_all(b"go\n").expect("the program reads");
    let mut first = String::new();
    BufReader::new(run.stdout.take().expect("piped")).read_line(&mut first).expect("the program writes");
    assert!(first.starts_with("active"), "it runs through MPS: {first}");
    run.kill().and_then(|()| run.wait()).expect("the program ends");
    // The share has ended with the program, whether or not gpushd has noticed.
    agent.await_that("a stop", || act(&agent, "0", "stop", &json!({})).status == 200);
    reaches(&agent, "0", MpsState::Stopped);
}
