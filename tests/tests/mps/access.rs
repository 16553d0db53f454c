//! Access to pipe directories. If a client connects just before a stop, gpushd finds the client.
//! While the daemon does not serve, access is closed. If two administrators send requests at the
//! same time, both requests take effect.

use std::{path::Path, process::Stdio};

use gpush_api::{MpsDaemon, MpsState};
use gpush_tests::{
    agent::Agent,
    host::{Host, program},
    mps::{Client, act, becomes, clear_faults, daemon, fault, is_open, lease, reaches, release_all, signal},
};
use nix::sys::signal::Signal;
use serde_json::json;

const HOST: &str = "[[gpu]]\nmodel = \"l4\"\ncount = 2\n";
/// A config without periodic probes: gpushd probes a daemon only on events and requests.
const CONFIG: &str = "[mps]\nhealth = \"3600s\"\n# --constants mps.start=3s\n[[gpu]]\nname = \"lab\"\nmatch = [\"0-1\"]\nmode = \"mps\"\n";

fn ready(host: &Host) -> Agent {
    let agent = Agent::start(host, CONFIG);
    for target in ["0", "1"] {
        reaches(&agent, target, MpsState::Ready);
    }
    let _begun = agent.settle();
    agent
}

fn pipe(daemon: &MpsDaemon) -> &Path {
    Path::new(daemon.pipe_directory.as_deref().expect("a pipe directory"))
}

/// While a server is not ready, gpushd does not probe it. So only the driver can report the clients
/// of the server.
#[test]
fn unprobed_server_is_used_unless_driver_lists_no_client() {
    let host = Host::up(HOST);
    let agent = ready(&host);
    let environment = lease(&agent, "0", &json!({})).expect("a lease").environment;
    fault(&host, "never-active");
    let waits = Client::begin(&host, &environment, None);
    becomes(&agent, "0", "with a server", |daemon| daemon.servers.len() == 1);
    waits.end();
    release_all(&agent, "0");
    for function in ["Compute", "Graphics", "MPSCompute"] {
        host.fault(&format!("nvmlDeviceGet{function}RunningProcesses* --rc UNKNOWN"));
    }
    let refused = act(&agent, "0", "stop", &json!({})).error();
    assert!(refused.message.contains("cannot tell whether the MPS daemon has clients"), "{refused:?}");
    let untold = daemon(&agent, "0");
    assert!(!untold.clients_known, "{untold:#?}");
    assert!(untold.findings.iter().any(|finding| finding.contains("the driver does not list")), "{untold:#?}");
    host.clear_faults();
    // Retry: the lease ends when gpushd has seen that the driver lists no client, and that no
    // client waits for the server.
    agent.await_that("a stop", || act(&agent, "0", "stop", &json!({})).status == 200);
    clear_faults(&host);
    reaches(&agent, "0", MpsState::Stopped);
}

#[test]
fn lease_holder_keeps_access_while_gpushd_waits_for_the_driver() {
    let host = Host::up(HOST);
    let agent = ready(&host);
    let taken = lease(&agent, "0", &json!({})).expect("a lease");
    let (zero, one) = (daemon(&agent, "0"), daemon(&agent, "1"));
    host.fault("nvmlInit* --hang");
    agent.kill();
    let agent = Agent::start(&host, CONFIG);
    // gpushd shows no daemons before it knows the GPUs, but it already keeps the access to their directories.
    let answer = agent.get(&format!("/v1/mps/{}", zero.target));
    assert_eq!((answer.status, answer.error().retryable), (503, true));
    let open = || [is_open(pipe(&zero)), is_open(pipe(&one))];
    agent.await_that("the access follows the leases", || open() == [true, false]);
    let mut client = Client::start(&host, &taken.environment);
    assert!(client.first.starts_with("active"), "{}", client.first);
    // `gpushctl run` waits until the driver has started.
    let mut run = host.command(program("gpushctl"));
    run.args(["run", "--mps", "10", "-g", "1", "--", "true"]).env("GPUSH_SOCKET", agent.socket());
    let run = run.stdin(Stdio::null()).stderr(Stdio::piped()).spawn().expect("gpushctl");
    host.clear_faults();
    reaches(&agent, "0", MpsState::Ready);
    let run = run.wait_with_output().expect("an end");
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    // The rule changes while gpushd does not run. At its next start, gpushd does not close access,
    // because only an operation changes the mode.
    agent.kill();
    let agent = Agent::start(&host, &CONFIG.replace("\"mps\"", "\"exclusive\""));
    becomes(&agent, &zero.target, "reported with its changed rule", |daemon| {
        daemon.clients_known && daemon.findings.iter().any(|reported| reported.contains("no lease is granted"))
    });
    assert!(is_open(pipe(&zero)) && client.lives() && client.printed().is_empty());
    client.end();
}

/// While gpushd does not run, the daemon ends or hangs.
#[test]
fn access_to_an_ended_or_hung_daemon_is_closed_after_a_restart() {
    let host = Host::up(HOST);
    let agent = ready(&host);
    let taken = lease(&agent, "0", &json!({})).expect("a lease");
    let seen = daemon(&agent, "0");
    let (pid, dir) = (seen.pid.expect("a pid").cast_signed(), pipe(&seen).to_owned());
    let mut client = Client::start(&host, &taken.environment);
    assert!(is_open(&dir));
    agent.kill();
    assert!(signal(pid, Signal::SIGKILL) && is_open(&dir));
    let agent = Agent::start(&host, CONFIG);
    becomes(&agent, "0", "waiting for the leftovers", |daemon| daemon.state == MpsState::BackingOff);
    assert!(!is_open(&dir), "a new client would find no daemon, and run without MPS");
    assert!(client.lives());
    client.end();
    reaches(&agent, "0", MpsState::Ready);

    let pid = daemon(&agent, "1").pid.expect("a pid").cast_signed();
    let dir = pipe(&daemon(&agent, "1")).to_owned();
    lease(&agent, "1", &json!({})).expect("a lease");
    agent.kill();
    assert!(signal(pid, Signal::SIGSTOP) && is_open(&dir));
    let agent = Agent::start(&host, CONFIG);
    agent.await_that("access is closed", || !is_open(&dir));
    assert!(signal(pid, Signal::SIGCONT));
    reaches(&agent, "1", MpsState::Ready);
    agent.await_that("access is open", || is_open(&dir));
}

/// If a client connects before the restart request has returned, the restart must not end the
/// client.
#[test]
fn restart_of_a_stopped_daemon_ends_no_new_client() {
    let host = Host::up(HOST);
    let agent = ready(&host);
    let environment = lease(&agent, "0", &json!({})).expect("a lease").environment;
    lease(&agent, "1", &json!({})).expect("a lease");
    let (zero, one) = (daemon(&agent, "0"), daemon(&agent, "1"));
    let hangs = one.pid.expect("a pid").cast_signed();
    assert_eq!(act(&agent, "0", "stop", &json!({ "force": true })).status, 200);
    reaches(&agent, "0", MpsState::Stopped);
    assert!(signal(hangs, Signal::SIGSTOP));
    let client = std::thread::scope(|scope| {
        // A probe of the other daemon is pending. It delays the reconciliation of all targets.
        scope.spawn(|| act(&agent, "1", "stop", &json!({ "force": true })));
        agent.await_that("access to the other daemon is closed", || !is_open(pipe(&one)));
        let restart = scope.spawn(|| act(&agent, "0", "restart", &json!({})).status);
        agent.await_that("the daemon has started", || is_open(pipe(&zero)));
        let client = Client::start(&host, &environment);
        assert!(signal(hangs, Signal::SIGCONT));
        assert_eq!(restart.join().expect("the request returns"), 200);
        client
    });
    becomes(&agent, "0", "with its client", |daemon| daemon.state == MpsState::Ready && daemon.clients.len() == 1);
    assert!(client.first.starts_with("active") && client.printed().is_empty(), "{}", client.first);
    client.end();
}
