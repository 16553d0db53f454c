//! A drain has a deadline for the clients of the daemon. The deadline holds even if the daemon
//! ends, and the API reports the deadline.

use gpush_api::{EventPayload, MpsState};
use gpush_tests::{
    agent::Agent,
    host::Host,
    mps::{Client, Served, act, becomes, daemon, lease, pid_of, reaches, real_programs, signal},
};
use nix::sys::signal::Signal;
use serde_json::json;

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
