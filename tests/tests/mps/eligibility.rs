//! gpushd grants no lease on a cordoned GPU. The drain of a GPU is complete when its leases and
//! clients have ended. The MPS server may still run.

use std::{
    io::{BufRead, BufReader},
    process::Stdio,
};

use gpush_api::{Code, MpsState};
use gpush_tests::{
    agent::Agent,
    host::{Host, program},
    mps::{Client, becomes, daemon, lease, reaches, release, signal},
};
use nix::sys::signal::Signal;
use serde_json::json;

const HOST: &str = "[[gpu]]\nmodel = \"l4\"\n";
const CONFIG: &str = "[mps]\nhealth_s = 1\n[[gpu]]\nname = \"lab\"\nmatch = [\"0\"]\nmode = \"mps\"\n";

/// The drain waits for the lease and the client, but not for the MPS server.
#[test]
fn cordoned_gpu_grants_no_lease_and_drain_ignores_idle_server() {
    let host = Host::up(HOST);
    let agent = Agent::start(&host, CONFIG);
    let ready = reaches(&agent, "0", MpsState::Ready);
    let taken = lease(&agent, "0", &json!({ "percentage": 20 })).expect("a lease");
    let client = Client::start(&host, &taken.environment);
    let server: i32 = client.word("server").parse().expect("a pid");
    becomes(&agent, "0", "with its client", |daemon| daemon.clients.len() == 1);
    agent.settle_reads();

    let mut drain = host.command(program("gpushctl"));
    drain.args(["gpu", "drain", "0", "--reason", "fan replacement"]).env("GPUSH_SOCKET", agent.socket());
    drain.env("COLUMNS", "400");
    let mut drain = drain.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("gpushctl");
    let mut waits = BufReader::new(drain.stderr.take().expect("piped"));
    let mut printed = String::new();
    waits.read_line(&mut printed).expect("gpushctl prints what it waits for");
    let who = format!("used by pid {}", client.pid());
    assert!(printed.contains(&who) && printed.contains(&format!("lease {} of", taken.lease.id)), "{printed}");
    assert!(!printed.contains(&server.to_string()), "a server counts only through its clients: {printed}");
    let refused = lease(&agent, "0", &json!({ "percentage": 20 })).expect_err("no new lease is granted");
    assert_eq!((refused.code, refused.retryable), (Code::Blocked, true), "{refused:?}");
    assert!(refused.message.ends_with("GPU 0 is cordoned"), "{refused:?}");
    assert!(refused.causes.iter().any(|cause| cause.contains("fan replacement")), "{refused:?}");
    let reported = daemon(&agent, "0");
    assert_eq!(
        (reported.state, reported.pid, reported.clients.len()),
        (MpsState::Ready, ready.pid, 1),
        "daemon and client continue"
    );
    assert!(reported.findings.iter().any(|finding| finding.contains("GPU 0 is cordoned")), "{:?}", reported.findings);

    client.end();
    release(&agent, taken.lease.id);
    assert!(drain.wait().expect("gpushctl ends").success());
    assert!(signal(server, Signal::SIGCONT), "the server still runs");
    assert!(agent.post("/v1/gpus/0/uncordon", &json!({})).status == 200);
    lease(&agent, "0", &json!({ "percentage": 20 })).expect("a lease");
}
