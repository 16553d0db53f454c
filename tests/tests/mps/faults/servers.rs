//! Servers that end, never become ready, or continue after their daemon has ended. Other tests
//! combine kills.

use gpush_api::{Code, MpsState};
use gpush_tests::{
    host::Host,
    mps::{
        Client, Role, Served, act, base, becomes, clear_faults, controls, fault, parts, pid_of, reaches, real_programs,
        signal,
    },
};
use nix::sys::signal::Signal;
use serde_json::json;

use super::{reported_as, serves};

/// The server ends at once, or never becomes ready.
#[test]
fn server_failure_revokes_access_to_the_pipe_directory() {
    let served = Served::up();
    fault(&served.host, "server-dies");
    for _ in 0..3 {
        let client = Client::start(&served.host, &served.environment);
        assert_eq!(client.first, "error 805");
    }
    reported_as(&served, MpsState::Fault, "end as soon as they are started");
    assert_eq!(served.controls(), [served.pid]);

    let served = Served::up();
    fault(&served.host, "never-active");
    let waits = Client::begin(&served.host, &served.environment, None);
    let stuck = reported_as(&served, MpsState::Fault, "is not ready after");
    assert_eq!(stuck.servers.len(), 1);
    clear_faults(&served.host);
    assert!(waits.says().starts_with("active") && serves(&served));
}

/// A daemon was killed, and its server still has a client. gpushd must start no other daemon.
#[test]
fn leftover_server_serves_its_client_before_the_next_daemon() {
    for real in [false, true] {
        let host = Host::up(Served::HOST);
        let programs = if real { real_programs(&host, "the leftover server of NVIDIA's own daemon") } else { None };
        if real && programs.is_none() {
            return;
        }
        left_behind(Served::on(host, programs.as_deref()));
    }
}

fn left_behind(mut served: Served) {
    let mut client = served.client();
    assert!(signal(served.pid, Signal::SIGKILL));
    let waits = reported_as(&served, MpsState::BackingOff, "still serves 1 client");
    assert_eq!((waits.clients.len(), served.controls().len()), (1, 0));
    assert!(client.lives() && client.printed().is_empty());
    // After a restart of gpushd, only the driver reports this server to gpushd.
    served.restart(|_| {});
    let Served { host, agent, environment, .. } = served;
    let waits = becomes(&agent, "0", "waiting for the leftover server", |daemon| {
        daemon.reasons.iter().any(|reason| reason.contains("still serves 1 client"))
    });
    assert_eq!((waits.failures, controls(&base(&host)).len()), (0, 0));
    let health = agent.get("/v1/health").json();
    assert_eq!(health["status"], "degraded", "the target grants nothing: {health}");
    let refused = act(&agent, "0", "restart", &json!({})).error();
    assert_eq!(refused.code, Code::Blocked, "{refused:?}");
    client.end();
    let ready = reaches(&agent, "0", MpsState::Ready);
    let left = parts(&base(&host));
    assert_eq!((left.len(), left[0].pid), (1, pid_of(&ready)), "the server ends with its last client");

    // A forced restart also ends the server and its client.
    let client = Client::start(&host, &environment);
    assert!(signal(pid_of(&ready), Signal::SIGKILL));
    becomes(&agent, "0", "waiting for the leftover server", |daemon| {
        daemon.state == MpsState::BackingOff && daemon.clients.len() == 1
    });
    assert_eq!(act(&agent, "0", "restart", &json!({ "force": true })).status, 200);
    assert_eq!(client.says(), "lost");
    reaches(&agent, "0", MpsState::Ready);
    assert_eq!(controls(&base(&host)).len(), 1);
}

#[test]
fn one_daemon_remains_after_kills_in_any_order() {
    let mut served = Served::up();
    for order in ["dsa", "sda", "ads", "asd", "das", "sad"] {
        let client = Client::start(&served.host, &served.environment);
        assert!(client.first.starts_with("active"), "{order}: {}", client.first);
        let all = parts(&base(&served.host));
        let of = |role| all.iter().find(|part| part.role == role).expect("one").pid;
        let (control, server) = (of(Role::Control), of(Role::Server));
        for who in order.chars() {
            match who {
                'd' => drop(signal(control, Signal::SIGKILL)),
                's' => drop(signal(server, Signal::SIGKILL)),
                _ => served.restart(|_| {}),
            }
        }
        assert_eq!(client.says(), "lost", "{order}");
        drop(client);
        let ready = becomes(&served.agent, "0", "ready with another pid", |daemon| {
            daemon.state == MpsState::Ready && daemon.pid.is_some_and(|pid| pid.cast_signed() != control)
        });
        let left = parts(&base(&served.host));
        assert_eq!((left.len(), left[0].pid), (1, pid_of(&ready)), "{order}: {left:?}");
        assert_eq!(ready.leases.len(), 1, "{order}");
        // A stop and a start reset the count of failures. Otherwise gpushd would give up.
        assert_eq!(act(&served.agent, "0", "stop", &json!({ "force": true })).status, 200);
        reaches(&served.agent, "0", MpsState::Stopped);
        assert_eq!(act(&served.agent, "0", "start", &json!({})).status, 200);
        reaches(&served.agent, "0", MpsState::Ready);
    }
}
