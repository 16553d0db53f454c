//! A drain has a deadline for the clients of the daemon. The deadline holds even if the daemon
//! ends, and the API reports the deadline.

use gpush_api::{Code, EventPayload, LeaseState, MpsState};
use gpush_tests::{
    agent::Agent,
    host::Host,
    mps::{
        Client, Served, act, base, becomes, controls, daemon, lease, lease_becomes, parts, pid_of, reaches,
        real_programs, release, release_all, signal,
    },
};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

const HOST: &str = "[[gpu]]\nmodel = \"l4\"\n";
/// A config without periodic probes: gpushd probes a daemon only on events and requests.
const CONFIG: &str = "[mps]\nhealth_s = 3600\nstop_s = 2\n[[gpu]]\nmatch = [\"0\"]\nmode = \"mps\"\n";

fn served(host: &Host) -> (Agent, Client) {
    let agent = Agent::start(host, CONFIG);
    reaches(&agent, "0", MpsState::Ready);
    let client = Client::start(host, &lease(&agent, "0", &json!({})).expect("a lease").environment);
    becomes(&agent, "0", "with a client", |daemon| daemon.clients.len() == 1);
    (agent, client)
}

/// Kills a daemon that has a client, and drains the server that is left.
fn orphaned(host: &Host, agent: &Agent, within: &Value) {
    assert!(signal(pid_of(&daemon(agent, "0")), Signal::SIGKILL));
    becomes(agent, "0", "waiting for its leftovers", |daemon| {
        daemon.state == MpsState::BackingOff && daemon.reasons.iter().any(|why| why.contains("still serves 1 client"))
    });
    assert_eq!(act(agent, "0", "drain", within).status, 200);
    let left = daemon(agent, "0");
    assert_eq!((left.state, left.pid, left.clients.len()), (MpsState::Draining, None, 1), "{left:#?}");
    assert!(left.reasons.iter().any(|why| why.contains("which the previous daemon left")), "{left:#?}");
    assert!(!left.reasons.iter().any(|why| why.contains("starts another daemon")), "{left:#?}");
    assert_eq!(controls(&base(host)), Vec::<i32>::new());
}

/// A program with a lease may not have called cuInit yet. If a drain ended the daemon, this program
/// would run without MPS and report no error.
#[test]
fn drain_waits_for_a_lease_whose_program_has_not_connected_yet() {
    let host = Host::up(HOST);
    let agent = Agent::start(&host, CONFIG);
    reaches(&agent, "0", MpsState::Ready);
    let granted = lease(&agent, "0", &json!({ "percentage": 20 })).expect("a lease");
    assert_eq!(act(&agent, "0", "drain", &json!({})).status, 200);
    let drained = daemon(&agent, "0");
    assert_eq!((drained.state, drained.leases.len()), (MpsState::Draining, 1), "{drained:#?}");
    assert!(
        drained.reasons.iter().any(|why| why.contains("the daemon ends after the leases on its GPU or MIG device")),
        "{drained:#?}"
    );
    assert_eq!(lease(&agent, "0", &json!({})).unwrap_err().code, Code::Conflict, "no new lease is granted");
    // After a restart of gpushd, the drain continues.
    agent.kill();
    let agent = Agent::start(&host, CONFIG);
    becomes(&agent, "0", "draining again", |daemon| daemon.state == MpsState::Draining && daemon.gpu.is_some());
    // The program now calls cuInit and connects as a client.
    let client = Client::start(&host, &granted.environment);
    assert!(client.first.starts_with("active"), "{}", client.first);
    becomes(&agent, "0", "with a client", |daemon| daemon.clients.len() == 1);
    release(&agent, granted.lease.id);
    assert_eq!(daemon(&agent, "0").state, MpsState::Draining, "the client may finish");
    client.end();
    lease_becomes(&agent, granted.lease.id, LeaseState::Ended);
    reaches(&agent, "0", MpsState::Stopped);
}

#[test]
fn drain_ends_with_the_last_lease_or_at_its_deadline() {
    let host = Host::up(HOST);
    let agent = Agent::start(&host, CONFIG);
    reaches(&agent, "0", MpsState::Ready);
    let granted = lease(&agent, "0", &json!({})).expect("a lease");
    assert_eq!(act(&agent, "0", "drain", &json!({})).status, 200);
    assert_eq!(daemon(&agent, "0").state, MpsState::Draining);
    release(&agent, granted.lease.id);
    lease_becomes(&agent, granted.lease.id, LeaseState::Ended);
    reaches(&agent, "0", MpsState::Stopped);
    assert_eq!(act(&agent, "0", "start", &json!({})).status, 200);
    reaches(&agent, "0", MpsState::Ready);
    let granted = lease(&agent, "0", &json!({})).expect("a lease");
    assert_eq!(act(&agent, "0", "drain", &json!({ "end_after_s": 1 })).status, 200);
    reaches(&agent, "0", MpsState::Stopped);
    release(&agent, granted.lease.id);
}

/// A daemon is killed, and its server still has a client. A drain lets this client finish.
#[test]
fn leftover_server_is_drained_without_a_new_daemon() {
    let host = Host::up(HOST);
    let (agent, mut client) = served(&host);
    orphaned(&host, &agent, &json!({}));
    assert_eq!(daemon(&agent, "0").clients_end_at, None);
    assert!(client.lives() && client.printed().is_empty());
    client.end();
    // The server has no client any more, so it ends.
    reaches(&agent, "0", MpsState::Stopped);
    assert!(parts(&base(&host)).is_empty());
    assert_eq!(act(&agent, "0", "start", &json!({})).status, 200);
    reaches(&agent, "0", MpsState::Ready);
}

#[test]
fn drain_deadline_of_leftovers_survives_a_gpushd_restart() {
    let host = Host::up(HOST);
    let (agent, client) = served(&host);
    orphaned(&host, &agent, &json!({ "end_after_s": 3600 }));
    let until = daemon(&agent, "0").clients_end_at.expect("a time");
    let reported = daemon(&agent, "0").reasons.concat();
    assert!(reported.contains("may run until") && reported.contains("is then ended"), "{reported}");
    agent.kill();
    let agent = Agent::start(&host, CONFIG);
    let left = becomes(&agent, "0", "drained until then", |daemon| daemon.clients_end_at.is_some());
    let again = left.clients_end_at.expect("a time");
    assert!((again - until).get_seconds().abs() <= 2, "{until} and {again}");
    assert_eq!(left.state, MpsState::Draining);
    // If several drains are requested, the deadline of the last drain counts.
    assert_eq!(act(&agent, "0", "drain", &json!({ "end_after_s": 1 })).status, 200);
    assert_eq!(client.says(), "lost");
    reaches(&agent, "0", MpsState::Stopped);
    assert!(parts(&base(&host)).is_empty());
}

#[test]
fn forced_stop_ends_leftovers() {
    let host = Host::up(HOST);
    let (agent, client) = served(&host);
    orphaned(&host, &agent, &json!({}));
    assert_eq!(act(&agent, "0", "stop", &json!({})).error().code, Code::Blocked);
    let stopped = act(&agent, "0", "stop", &json!({ "force": true }));
    assert_eq!(stopped.status, 200);
    let stopped = daemon(&agent, "0");
    assert_eq!((stopped.state, stopped.reasons, stopped.clients), (MpsState::Stopped, Vec::new(), Vec::new()));
    assert_eq!(client.says(), "lost");
}

#[test]
fn clients_of_a_killed_draining_daemon_keep_their_deadline() {
    let host = Host::up(HOST);
    let (agent, client) = served(&host);
    let pid = pid_of(&daemon(&agent, "0"));
    assert_eq!(act(&agent, "0", "drain", &json!({ "end_after_s": 3 })).status, 200);
    let drained = daemon(&agent, "0");
    assert_eq!((drained.state, drained.pid), (MpsState::Draining, u32::try_from(pid).ok()));
    let until = drained.clients_end_at.expect("a time");
    assert!(signal(pid, Signal::SIGKILL));
    let left = becomes(&agent, "0", "without its daemon", |daemon| daemon.pid.is_none());
    assert_eq!(left.state, MpsState::Draining, "{left:#?}");
    assert!((left.clients_end_at.expect("a time") - until).get_seconds().abs() <= 1, "{left:#?}");
    assert_eq!(client.says(), "lost");
    assert!(jiff::Timestamp::now() >= until, "the client ends at the deadline, not earlier");
    reaches(&agent, "0", MpsState::Stopped);
}

#[test]
fn drain_writes_few_log_lines_and_ends_with_the_last_client() {
    let host = Host::up(HOST);
    let (agent, client) = served(&host);
    let log = daemon(&agent, "0").log_directory.expect("a directory");
    let lines = || std::fs::read_to_string(format!("{log}/control.log")).expect("a log").lines().count();
    assert_eq!(act(&agent, "0", "drain", &json!({})).status, 200);
    let before = lines();
    // A caller that follows the drain sends many requests. The daemon must not log a command for
    // each of them.
    for _ in 0..20 {
        assert_eq!(daemon(&agent, "0").state, MpsState::Draining);
    }
    let more = lines() - before;
    println!("{more} more lines after 20 requests");
    assert!(more < 60, "{more} lines after 20 requests; a probe sends several commands of three or more lines each");
    release_all(&agent, "0");
    client.end();
    reaches(&agent, "0", MpsState::Stopped);
}

#[test]
fn ended_server_is_reported_to_event_listeners() {
    let host = Host::up(HOST);
    let (agent, client) = served(&host);
    let mut listener = agent.listen("?kinds=mps", None);
    let server = daemon(&agent, "0").servers[0].pid.expect("a pid");
    assert!(signal(server.cast_signed(), Signal::SIGKILL));
    assert_eq!(client.says(), "lost");
    let reported = "an MPS server ended";
    // Each request of this loop makes gpushd probe the daemon.
    becomes(&agent, "0", "reported", |daemon| daemon.findings.iter().any(|one| one.starts_with(reported)));
    let is =
        |what: &EventPayload| matches!(what, EventPayload::Mps(change) if change.reasons.concat().contains(reported));
    listener.until(|event| is(&event.what));
}

#[test]
fn server_with_an_older_memory_limit_is_reported() {
    let host = Host::up(HOST);
    let agent = Agent::start(&host, CONFIG);
    reaches(&agent, "0", MpsState::Ready);
    let limit = |mib: u64| assert_eq!(act(&agent, "0", "settings", &json!({ "memory_limit_mib": mib })).status, 200);
    limit(8192);
    let client = Client::start(&host, &lease(&agent, "0", &json!({})).expect("a lease").environment);
    // On a busy host, gpushd may not know the lease of a new client at once.
    becomes(&agent, "0", "with a server and without findings", |daemon| {
        daemon.servers.len() == 1 && daemon.findings.is_empty()
    });
    limit(1024);
    let reported = "an MPS server was started with memory limit 8192M; the limit cannot change";
    becomes(&agent, "0", "reported", |daemon| daemon.findings.iter().any(|one| one.starts_with(reported)));
    client.end();
}

/// gpushd replaces a daemon that is suspended by SIGSTOP. The commands that gpushd has sent to the
/// suspended daemon must not end the new daemon.
#[test]
fn command_for_a_replaced_daemon_does_not_reach_the_next_one() {
    for real in [false, true] {
        let host = Host::up(HOST);
        let programs = if real { real_programs(&host, "a command for a replaced daemon") } else { None };
        if real && programs.is_none() {
            return;
        }
        let served = Served::of(host, "0", &CONFIG.replace("stop_s = 2", "stop_s = 1"), programs.as_deref());
        let (agent, client) = (&served.agent, served.client());
        let before = pid_of(&daemon(agent, "0"));
        assert!(signal(before, Signal::SIGSTOP));
        assert_eq!(act(agent, "0", "restart", &json!({ "force": true })).status, 200);
        let next = becomes(agent, "0", "ready with another pid", |now| {
            now.state == MpsState::Ready && now.pid != u32::try_from(before).ok()
        });
        assert_eq!(client.says(), "lost");
        let new = served.client();
        for _ in 0..40 {
            let now = daemon(agent, "0");
            assert_eq!((now.state, now.pid, now.failures), (MpsState::Ready, next.pid, 0), "{now:#?}\n{}", agent.log());
        }
        assert!(new.printed().is_empty());
        new.end();
    }
}

/// Often, a stop request arrives before the daemon has begun to listen.
#[test]
fn starting_daemon_is_stopped_without_sigkill() {
    let host = Host::up(HOST);
    let agent = Agent::start(&host, &CONFIG.replace("stop_s = 2", "stop_s = 600"));
    reaches(&agent, "0", MpsState::Ready);
    // While an operation changes the target, gpushd refuses to start the target. So wait for the
    // operations.
    let _ended = agent.settle();
    for _ in 0..5 {
        assert_eq!(act(&agent, "0", "stop", &json!({})).status, 200);
        reaches(&agent, "0", MpsState::Stopped);
        let started = act(&agent, "0", "start", &json!({}));
        assert_eq!(started.status, 200, "{started:?}");
        // Do not wait for the daemon, so that the next stop request can arrive before the daemon
        // listens.
    }
    assert_eq!(act(&agent, "0", "stop", &json!({})).status, 200);
    reaches(&agent, "0", MpsState::Stopped);
    assert!(!agent.log().contains("signal 9"), "{}", agent.log());
}
