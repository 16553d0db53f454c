//! Leases with real processes: gpushd ends the processes of a lease, or waits for their end.

use std::process::Command;

use gpush_api::{ApiError, EndReason, Lease, LeaseGrant, LeaseId, LeaseState};
use gpush_tests::{
    agent::Agent,
    host::Host,
    mps::{lease_becomes, lease_now},
};
use serde_json::{Value, json};

pub(crate) const WHOLE: &str = "[[gpu]]\nmatch = [\"0-1\"]\nmode = \"exclusive\"\n";

pub(crate) fn two_gpus(config: &str) -> (Host, Agent) {
    let host = Host::up("[[gpu]]\nmodel = \"l4\"\ncount = 2\n");
    let agent = Agent::start(&host, config);
    agent.wait_for_layouts_at_start();
    (host, agent)
}

pub(crate) fn request(agent: &Agent, body: &Value) -> Result<LeaseGrant, ApiError> {
    let answer = agent.post("/v1/leases", body);
    if answer.status >= 400 {
        return Err(answer.error());
    }
    Ok(serde_json::from_value(answer.json()).expect("a lease"))
}

pub(crate) fn leases(agent: &Agent) -> Vec<Lease> {
    serde_json::from_value(agent.get("/v1/leases").json()).expect("leases")
}

#[test]
fn revoked_lease_ends_its_processes_after_the_notice() {
    let (host, agent) = two_gpus(WHOLE);
    let granted = request(&agent, &json!({ "share": { "kind": "whole" }, "selectors": ["0"] })).expect("a lease");
    let id: LeaseId = granted.lease.id;
    let process = host.process_of_lease("--gpu 0", &id.to_string());
    let other = host.process("--gpu 0");
    let body = json!({ "reason": "maintenance window", "end": true, "notice_s": 0, "grace_s": 0 });
    let revoked = agent.post(&format!("/v1/leases/{id}/revoke"), &body);
    assert_eq!(revoked.status, 200, "{}", String::from_utf8_lossy(&revoked.body));
    agent.await_that("the process is ended", || has_ended(process));
    // The other process does not name the lease, so gpushd does not end it, and the lease waits for it.
    let says = format!("process {other} ");
    agent.await_that("what it waits for", || match lease_now(&agent, id).waits_for.as_slice() {
        [only] => only.starts_with(&says),
        _ => false,
    });
    assert!(!has_ended(other) && lease_now(&agent, id).state == LeaseState::Releasing);
    host.end_process(other);
    let ended = lease_becomes(&agent, id, LeaseState::Ended);
    assert_eq!(ended.reason, Some(EndReason::Revoked));
    assert_eq!(ended.revocation.expect("recorded").reason, "maintenance window");
    assert_eq!(lease_now(&agent, id).state, LeaseState::Ended);
}

#[test]
fn expired_lease_ends_its_processes_if_configured() {
    let (host, agent) = two_gpus(&WHOLE.replace("mode = ", "at_end = \"end\"\nmode = "));
    let body = json!({ "share": { "kind": "whole" }, "selectors": ["0"], "duration_s": 1 });
    let id = request(&agent, &body).expect("a lease").lease.id;
    let process = host.process_of_lease("--gpu 0", &id.to_string());
    let ended = lease_becomes(&agent, id, LeaseState::Ended);
    assert_eq!(ended.reason, Some(EndReason::Expired));
    assert!(has_ended(process));
    // Without `at_end = "end"` in the rule, the processes of an expired lease continue. The lease stays `releasing`
    // until the processes have ended.
    agent.reload(WHOLE);
    let id = request(&agent, &body).expect("a lease").lease.id;
    let process = host.process("--gpu 0");
    let releasing = lease_becomes(&agent, id, LeaseState::Releasing);
    assert_eq!(releasing.reason, Some(EndReason::Expired));
    let says = format!("process {process} ");
    agent.await_that("what it waits for", || {
        lease_now(&agent, id).waits_for.iter().any(|sentence| sentence.starts_with(&says))
    });
    host.end_process(process);
    lease_becomes(&agent, id, LeaseState::Ended);
}

/// Fault: without a free file descriptor, gpushd treated every process as ended. A lease then ended while its processes
/// ran.
#[test]
fn lease_does_not_end_while_gpushd_has_no_free_descriptor() {
    let (_host, agent) = two_gpus("[[gpu]]\nmatch = [\"0\"]\nmode = \"timeslice\"\ntimeslice = { replicas = 2 }\n");
    let sleep = |lease: &str| Command::new("sleep").arg("600").env("GPUSH_LEASE", lease).spawn().expect("a process");
    let mut bound = sleep("");
    let body = json!({ "share": { "kind": "timeslice" }, "process": bound.id(), "bind_to": "process" });
    let id = request(&agent, &body).expect("a lease").lease.id;
    let mut other = sleep(&id.to_string());
    let limit = |words: &[&str]| {
        let output = Command::new("prlimit").args(["--pid", &agent.pid().to_string()]).args(words).output();
        String::from_utf8(output.expect("prlimit").stdout).expect("text").trim().to_owned()
    };
    let before = limit(&["--nofile", "--output=SOFT", "--noheadings"]);
    limit(&["--nofile=1:"]);
    bound.kill().and_then(|()| bound.wait()).expect("the process ends");
    agent.wait_for_log(&format!("lease {id} cannot end yet, because gpushd cannot read all processes"));
    limit(&[&format!("--nofile={before}:")]);
    let says = format!("process {} (sleep) runs", other.id());
    agent.await_that("what it waits for", || lease_now(&agent, id).waits_for == [says.as_str()]);
    assert_eq!(lease_now(&agent, id).state, LeaseState::Releasing);
    other.kill().and_then(|()| other.wait()).expect("the process ends");
    lease_becomes(&agent, id, LeaseState::Ended);
}

/// Returns whether a process has ended, or is a zombie.
fn has_ended(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"));
    stat.map_or(true, |stat| stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('Z')))
}
