//! A client requests a change and disconnects immediately. If gpushd has recorded the change,
//! gpushd executes it although the client has disconnected.

use std::{io::Write, time::Duration};

use gpush_api::{AuditRecord, OperationState};
use gpush_tests::{
    agent::{Agent, real_layout},
    host::Host,
};
use serde_json::json;

/// Number of attempts. Each attempt disconnects a little later than the previous one.
const ROUNDS: u64 = 24;

/// Sends a request and disconnects after `quarters` quarters of a millisecond.
fn ask_and_hang_up(agent: &Agent, method: &str, path: &str, quarters: u64) {
    let mut stream = agent.connect();
    let request = format!("{method} {path} HTTP/1.1\r\nhost: gpush\r\ncontent-length: 0\r\n\r\n");
    stream.write_all(request.as_bytes()).expect("it is sent");
    // This sleep waits for no event. Its length is the moment of the disconnect.
    std::thread::sleep(Duration::from_micros(250 * quarters));
}

/// Returns whether the audit trail has a record of this action on the object.
fn on_record(agent: &Agent, action: &str, object: &str) -> bool {
    let trail: Vec<AuditRecord> = serde_json::from_value(agent.get("/v1/audit?limit=1000").json()).expect("a trail");
    trail.iter().any(|record| record.action == action && record.object == object)
}

#[test]
fn recorded_cancel_is_executed_after_disconnect() {
    let host = Host::up("[[gpu]]\nmodel = \"a100-80\"\n");
    let agent = Agent::start(&host, "");
    host.fault("nvmlDeviceCreateGpuInstance* --delay-ms 60");
    let mut cancelled = 0;
    for round in 0..ROUNDS {
        let operation = agent.begin(&["0"], &["1g.10gb*3"]).expect("begun");
        ask_and_hang_up(&agent, "POST", &format!("/v1/operations/{}/cancel", operation.id), round % 12);
        let ended = agent.follow(operation);
        let wanted = on_record(&agent, "operation.cancel", &ended.id);
        let state = if wanted { OperationState::RolledBack } else { OperationState::Done };
        assert_eq!(ended.state, state, "round {round}: {ended:?}");
        cancelled += u32::from(wanted);
        if !wanted {
            assert_eq!(agent.apply(&["0"], &["7g.80gb"]).state, OperationState::Done);
        }
    }
    println!("{cancelled} of {ROUNDS} cancels were on record, and carried out");
    assert!(cancelled > 0);
}

#[test]
fn cancelled_queued_operation_leaves_no_claim() {
    let host = Host::up("[[gpu]]\nmodel = \"a100-80\"\n");
    let agent = Agent::start(&host, "");
    assert_eq!(agent.apply(&["0"], &["7g.80gb"]).state, OperationState::Done);
    host.process("--gpu 0 --gi 0 --ci 0 --memory 100");
    let before = real_layout(&host, 0);
    for round in 0..ROUNDS {
        let body = json!({ "selectors": ["0"], "layout_source": { "entries": ["1g.10gb"] }, "wait_s": 3600 });
        let waiting = agent.begin_with(&body).expect("it waits");
        ask_and_hang_up(&agent, "POST", &format!("/v1/operations/{}/cancel", waiting.id), round % 12);
        if !on_record(&agent, "operation.cancel", &waiting.id) {
            // Ignore an error: if gpushd has executed the first request in the meantime, this
            // request fails.
            let _ = agent.cancel(&waiting.id);
        }
        let ended = agent.follow(waiting);
        assert_eq!(ended.state, OperationState::NotStarted, "round {round}: {ended:?}");
    }
    assert_eq!(real_layout(&host, 0), before);
}

#[test]
fn cleared_override_stays_cleared_after_disconnect() {
    const RULE: &str = "[[gpu]]\nmatch = [\"0\"]\nmode = \"mig\"\nlayout = [\"7g.80gb\"]\n";
    let host = Host::up("[[gpu]]\nmodel = \"a100-80\"\n");
    let agent = Agent::start(&host, RULE);
    agent.until("layout at start", || {
        (agent.get("/v1/health").json()["layouts_at_start"]["complete"] == json!(true)).then_some(())
    });
    let uuid = agent.gpu(0).uuid;
    let ends = || {
        let trail: Vec<AuditRecord> =
            serde_json::from_value(agent.get("/v1/audit?limit=1000").json()).expect("a trail");
        trail.iter().filter(|record| record.action == "override.clear" && record.object == uuid.as_str()).count()
    };
    let stand = || agent.get("/v1/overrides").json()["overrides"].as_array().map_or(0, Vec::len);
    for round in 0..ROUNDS {
        let entries: &[&str] = if round % 2 == 0 { &["3g.40gb"] } else { &["4g.40gb"] };
        assert_eq!(agent.apply(&["0"], entries).state, OperationState::Done);
        assert_eq!(stand(), 1, "round {round}");
        let before = ends();
        ask_and_hang_up(&agent, "DELETE", "/v1/overrides/0", round % 12);
        if ends() > before {
            agent.await_that("it stands no more", || stand() == 0);
        } else if stand() == 1 {
            let answer = agent.request("DELETE", "/v1/overrides/0", "", b"");
            assert!(answer.status == 200 || answer.json()["code"] == "not_found", "round {round}");
        }
    }
}
