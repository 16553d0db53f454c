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
    mps::{Client, Served, act, becomes, daemon, end_leases, lease, reaches, release, signal},
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

#[test]
fn ended_daemon_is_not_restarted_in_maintenance() {
    let served = Served::up();
    // gpushd refuses maintenance while a GPU has a lease. So release the leases.
    end_leases(&served.agent, "0");
    assert_eq!(served.agent.post("/v1/maintenance/enter", &json!({ "reason": "a look" })).status, 200);
    assert!(signal(served.pid, Signal::SIGKILL));
    let waits = becomes(&served.agent, "0", "waiting for the end of maintenance", |daemon| {
        daemon.reasons.iter().any(|reason| reason.contains("the host is in maintenance"))
    });
    assert_eq!((waits.state, waits.pid, served.controls()), (MpsState::BackingOff, None, Vec::new()));
    assert_eq!(act(&served.agent, "0", "restart", &json!({ "force": true })).error().code, Code::Conflict);
    assert_eq!(served.agent.post("/v1/maintenance/leave", &json!({})).status, 200);
    served.another();
}

#[test]
fn host_in_maintenance_grants_no_lease() {
    let host = Host::up(HOST);
    let agent = Agent::start(&host, CONFIG);
    reaches(&agent, "0", MpsState::Ready);
    let enter = || agent.post("/v1/maintenance/enter", &json!({ "reason": "driver 570" })).status == 200;
    agent.await_that("maintenance, after the operation at the start has ended", enter);
    let refused = lease(&agent, "0", &json!({})).expect_err("no new lease is granted");
    assert_eq!(refused.code, Code::Conflict, "{refused:?}");
    assert!(refused.message.contains("is in maintenance"), "{refused:?}");
    assert_eq!(agent.post("/v1/maintenance/leave", &json!({})).status, 200);
    becomes(&agent, "0", "ready without findings", |daemon| {
        daemon.state == MpsState::Ready && daemon.findings.is_empty()
    });
    agent.await_that("a lease", || lease(&agent, "0", &json!({})).is_ok());
    let _ = act(&agent, "0", "stop", &json!({ "force": true }));
}
