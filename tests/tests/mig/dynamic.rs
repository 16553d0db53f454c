//! Leases on GPUs with layout `dynamic`. gpushd is killed while it creates a MIG device.

use std::collections::BTreeMap;

use gpush_api::{EndReason, LeaseGrant, LeaseId, LeaseState};
use gpush_tests::{
    agent::{Agent, real_layout},
    host::{Host, Traced},
    mps::{lease_becomes, lease_now, release},
};
use serde_json::{Value, json};

use crate::faults::fault_at;

const CONFIG: &str = "[driver]\nchange_s = 5\n[[gpu]]\nmatch = [\"0-1\"]\nmode = \"mig\"\nlayout = \"dynamic\"\n";

fn start(host: &Host) -> Agent {
    let agent = Agent::start(host, CONFIG);
    let _operations = agent.settle();
    agent.await_that("MIG devices can be leased", || {
        [0, 1].into_iter().all(|gpu| agent.gpu(gpu).mig.is_some_and(|mig| mig.enabled))
    });
    agent
}

/// Returns a request for a MIG device on GPU 0.
fn body(profile: &str) -> Value {
    let share = json!({ "kind": "mig_profile", "profile": profile });
    json!({ "share": share, "duration_s": 3600, "selectors": ["0"] })
}

fn ask(agent: &Agent, profile: &str) -> LeaseGrant {
    let answer = agent.post("/v1/leases", &body(profile));
    assert!(answer.status < 400, "{profile}: {}", String::from_utf8_lossy(&answer.body));
    serde_json::from_value(answer.json()).expect("a lease")
}

fn ended(agent: &Agent, id: LeaseId) {
    release(agent, id);
    lease_becomes(agent, id, LeaseState::Ended);
}

/// Requests a lease. A driver call of the grant kills gpushd.
fn ask_and_die(agent: &mut Agent, profile: &str) {
    let body = body(profile).to_string();
    let request = format!(
        "POST /v1/leases HTTP/1.1\r\nhost: gpush\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    );
    let _reported = agent.try_raw(request.as_bytes());
    agent.wait();
}

/// Creates two free devices that belong to gpushd. Before gpushd can grant the whole GPU, it must
/// destroy these devices.
fn prepare(agent: &Agent) {
    for profile in ["3g.40gb", "2g.20gb"] {
        ended(agent, ask(agent, profile).lease.id);
    }
}

#[test]
fn grant_killed_around_every_driver_call_is_completed() {
    let host = Host::up("dgx-a100");
    let mut agent = start(&host);
    prepare(&agent);
    let before = real_layout(&host, 0);
    host.start_trace();
    let first = ask(&agent, "7g.80gb");
    let calls: Vec<Traced> = host.trace();
    ended(&agent, first.lease.id);
    let mut ends: BTreeMap<String, u32> = BTreeMap::new();
    for k in 0..calls.len() {
        for when in ["before", "after"] {
            prepare(&agent);
            assert_eq!(real_layout(&host, 0), before);
            let last = newest(&agent);
            host.fault(&fault_at(&calls, k, &format!("--kill {when} --parent")));
            ask_and_die(&mut agent, "7g.80gb");
            host.clear_faults();
            agent = start(&host);
            let what = format!("{when} call {k} ({})", calls[k].function);
            let id = newest(&agent);
            assert!(id > last, "{what}: the lease was recorded with its operation");
            agent.await_that("the lease is decided", || lease_now(&agent, id).state != LeaseState::Granting);
            let lease = lease_now(&agent, id);
            match lease.state {
                LeaseState::Active => {
                    assert_eq!(real_layout(&host, 0), ["7g.80gb@0[7g.80gb@0]"], "{what}");
                    assert!(lease.members[0].target.starts_with("MIG-"), "{what}: {lease:?}");
                    ended(&agent, id);
                }
                LeaseState::Ended => {
                    assert_eq!(
                        (real_layout(&host, 0), lease.reason),
                        (before.clone(), Some(EndReason::Failed)),
                        "{what}"
                    );
                    // The devices still belong to gpushd. So gpushd may destroy them for a lease.
                    ended(&agent, ask(&agent, "7g.80gb").lease.id);
                }
                LeaseState::Queued | LeaseState::Granting | LeaseState::Releasing => panic!("{what}: {lease:?}"),
            }
            *ends.entry(lease.state.to_string()).or_default() += 1;
        }
    }
    println!("killed at {} points of a grant: {ends:?}", ends.values().sum::<u32>());
    assert!(ends.values().sum::<u32>() >= 8, "{ends:?}");
}

/// Returns the id of the last lease.
fn newest(agent: &Agent) -> LeaseId {
    let all: Vec<gpush_api::Lease> = serde_json::from_value(agent.get("/v1/leases?ended=5").json()).expect("leases");
    all.iter().map(|lease| lease.id).max_by_key(|id| id.0).expect("a lease")
}
