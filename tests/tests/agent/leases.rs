//! Leases of MIG devices, whole GPUs and time-slice replicas: gpushd grants, refuses and queues
//! them, and keeps them after a crash.

use std::{io::Write, process::Command, thread};

use gpush_api::{ApiError, Code, EndReason, Lease, LeaseBinding, LeaseGrant, LeaseId, LeaseState, OperationState};
use gpush_tests::{
    agent::Agent,
    host::Host,
    mps::{lease_becomes, lease_now, release},
};
use serde_json::{Value, json};

pub(crate) const WHOLE: &str = "[[gpu]]\nmatch = [\"0-1\"]\nmode = \"exclusive\"\n";
pub(crate) const MIG: &str = "[[gpu]]\nmatch = [\"0\"]\nmode = \"mig\"\nlayout = [\"1g.10gb*2\"]\n";

pub(crate) fn two_gpus(config: &str) -> (Host, Agent) {
    // gpushd grants no lease of a whole GPU that has MIG enabled. So only a config with a layout
    // gets GPUs with MIG.
    let model = if config.contains("layout") { "h100-80-sxm" } else { "l4" };
    let host = Host::up(&format!("[[gpu]]\nmodel = \"{model}\"\ncount = 2\n"));
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

fn queued(agent: &Agent) -> Option<Lease> {
    leases(agent).into_iter().find(|lease| lease.state == LeaseState::Queued && lease.queue.is_some())
}

#[test]
fn gang_of_whole_gpus_gets_all_or_none() {
    let (_host, agent) = two_gpus(WHOLE);
    let whole = |count: u32| request(&agent, &json!({ "share": { "kind": "whole" }, "count": count }));
    assert_eq!(whole(3).unwrap_err().code, Code::BadRequest, "the host has two");
    let first = whole(1).expect("a lease");
    let refused = whole(2).unwrap_err();
    assert_eq!((refused.code, refused.retryable), (Code::Blocked, true), "{refused:?}");
    let named = format!("lease {} of", first.lease.id);
    assert!(refused.causes.iter().any(|cause| cause.contains(&named)), "{refused:?}");
    release(&agent, first.lease.id);
    lease_becomes(&agent, first.lease.id, LeaseState::Ended);
    let both = whole(2).expect("both GPUs");
    assert_eq!(both.lease.members.len(), 2);
    let visible = both.environment.iter().find(|(name, _)| name == "CUDA_VISIBLE_DEVICES").expect("devices");
    assert_eq!(visible.1.split(',').count(), 2);
    assert_eq!(whole(1).unwrap_err().code, Code::Blocked);
}

#[test]
fn replicas_of_a_time_sliced_gpu_are_counted() {
    let (_host, agent) = two_gpus("[[gpu]]\nmatch = [\"0\"]\nmode = \"timeslice\"\ntimeslice = { replicas = 2 }\n");
    // This request names no kind of share. gpushd grants a replica, because the host offers only replicas.
    let replica = || request(&agent, &json!({}));
    let first = replica().expect("a replica");
    replica().expect("another one");
    assert_eq!(replica().unwrap_err().code, Code::Blocked);
    release(&agent, first.lease.id);
    lease_becomes(&agent, first.lease.id, LeaseState::Ended);
    replica().expect("the free one");
}

/// The gpushd of a test is not the gpushd of the system, so it creates no scopes. A lease is then bound to the process
/// that the request names, and the answer says why the lease has no scope.
#[test]
fn lease_without_a_scope_has_the_named_end_and_a_reason() {
    let (_host, agent) = two_gpus("[[gpu]]\nmatch = [\"0\"]\nmode = \"timeslice\"\ntimeslice = { replicas = 8 }\n");
    let own = std::process::id();
    for bind_to in ["scope", "cgroup"] {
        for (body, expected) in [
            (json!({ "bind_to": bind_to, "process": own }), "process"),
            (json!({ "bind_to": bind_to, "duration_s": 600 }), "time"),
        ] {
            let granted = request(&agent, &body).expect("a lease");
            let binding = serde_json::to_value(&granted.lease.binding).expect("JSON");
            assert_eq!(binding["kind"], expected, "{body}");
            let reason = granted.binding_reason.expect("a reason");
            assert!(["systemd", "root", "service"].iter().any(|word| reason.contains(word)), "{reason}");
        }
    }
    let granted = request(&agent, &json!({ "process": own })).expect("a lease");
    assert_eq!(granted.binding_reason, None, "the request asks for no cgroup");
}

/// Fault: a plan did not consider leases, so it destroyed a leased device that was idle.
#[test]
fn plan_that_destroys_a_leased_device_names_the_lease() {
    let (_host, agent) = two_gpus(MIG);
    let granted = request(&agent, &json!({ "share": { "kind": "mig_profile", "profile": "1g.10gb" } })).expect("one");
    let id = granted.lease.id;
    let refused = agent.begin(&["0"], &["7g.80gb"]).unwrap_err();
    assert_eq!((refused.code, refused.retryable), (Code::Blocked, true), "{refused:?}");
    let named = format!("lease {id} of");
    assert!(refused.causes.iter().any(|cause| cause.contains(&named)), "{refused:?}");
    let refused = agent.post("/v1/maintenance/enter", &json!({})).error();
    assert_eq!(refused.code, Code::Blocked, "{refused:?}");
    assert!(refused.causes.iter().any(|cause| cause.contains(&named)), "{refused:?}");
    // The operation waits, and begins when the lease has ended.
    let body = json!({ "selectors": ["0"], "layout_source": { "entries": ["7g.80gb"] }, "wait_s": 600 });
    let waiting = agent.begin_with(&body).expect("it is queued");
    assert!(!waiting.state.is_final());
    release(&agent, id);
    assert_eq!(agent.follow(waiting).state, OperationState::Done);
    let unknown = request(&agent, &json!({ "share": { "kind": "mig_profile", "profile": "1g.11gb" } })).unwrap_err();
    assert_eq!(unknown.code, Code::UnknownProfile, "{unknown:?}");
    assert!(unknown.hint.is_some_and(|hint| hint.contains("1g.10gb")));
}

#[test]
fn granted_leases_are_the_same_after_a_crash() {
    let (host, agent) = two_gpus(WHOLE);
    let granted = request(&agent, &json!({ "share": { "kind": "whole" }, "duration_s": 3600 })).expect("a lease");
    let before = leases(&agent);
    agent.kill();
    let agent = Agent::start(&host, WHOLE);
    assert_eq!(leases(&agent), before);
    assert_eq!(before[0].id, granted.lease.id);
    assert_eq!(before[0].binding, LeaseBinding::Time);
    // While the first lease still holds its GPU, gpushd grants the other GPU. The new lease has a higher number.
    let other = agent.until("a lease", || request(&agent, &json!({ "share": { "kind": "whole" } })).ok());
    assert!(other.lease.id > granted.lease.id && other.lease.members[0].gpu != granted.lease.members[0].gpu);
    let renewed = agent.post(&format!("/v1/leases/{}/renew", granted.lease.id), &json!({ "duration_s": 7200 }));
    let renewed: Lease = serde_json::from_value(renewed.json()).expect("a lease");
    assert!(renewed.expires_at > before[0].expires_at);
}

#[test]
fn waiting_request_is_granted_after_a_release_or_times_out() {
    let (_host, agent) = two_gpus(WHOLE);
    let both = request(&agent, &json!({ "share": { "kind": "whole" }, "count": 2 })).expect("both");
    let body = json!({ "share": { "kind": "whole" }, "count": 2, "wait": "unlimited" });
    thread::scope(|scope| {
        let waits = scope.spawn(|| request(&agent, &body));
        let first = agent.until("a queued lease", || queued(&agent));
        assert_eq!(first.queue.as_ref().map(|queue| queue.position), Some(1), "{first:?}");
        release(&agent, both.lease.id);
        let granted = waits.join().expect("a thread").expect("the lease");
        assert_eq!((granted.lease.id, granted.lease.state), (first.id, LeaseState::Active));
        assert_eq!(granted.lease.members.len(), 2);
    });
    let soon = json!({ "share": { "kind": "whole" }, "wait": "1s" });
    let late = request(&agent, &soon).unwrap_err();
    assert_eq!((late.code, late.retryable), (Code::TimedOut, true), "{late:?}");
    assert_eq!(leases(&agent).len(), 1);
}

#[test]
fn request_whose_client_disconnects_leaves_the_queue() {
    let (_host, agent) = two_gpus(WHOLE);
    let both = request(&agent, &json!({ "share": { "kind": "whole" }, "count": 2 })).expect("both");
    let mut connection = agent.connect();
    let body = json!({ "share": { "kind": "whole" }, "wait": "unlimited" }).to_string();
    let head = "POST /v1/leases HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n";
    write!(connection, "{head}content-length: {}\r\n\r\n{body}", body.len()).expect("sent");
    let waiting = agent.until("a queued lease", || queued(&agent));
    drop(connection);
    let ended = lease_becomes(&agent, waiting.id, LeaseState::Ended);
    assert_eq!(ended.reason, Some(EndReason::Cancelled));
    release(&agent, both.lease.id);
    request(&agent, &json!({ "share": { "kind": "whole" }, "count": 2 })).expect("both are free");
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
