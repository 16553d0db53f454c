//! Leases on GPUs with layout `dynamic`. If no free device meets a request, gpushd creates a MIG
//! device.

use std::{collections::BTreeMap, thread};

use gpush_api::{ApiError, Code, EndReason, LeaseGrant, LeaseId, LeaseState, OperationState, OperationSummary};
use gpush_tests::{
    agent::{Agent, gi_at, real_layout},
    host::{Host, Traced},
    mps::{lease_becomes, lease_now, release},
};
use serde_json::{Value, json};

use crate::{faults::fault_at, recover::make_by_hand};

const CONFIG: &str = "[driver]\nchange_s = 5\n[[gpu]]\nmatch = [\"0-1\"]\nmode = \"mig\"\nlayout = \"dynamic\"\n";

fn started() -> (Host, Agent) {
    let host = Host::up("dgx-a100");
    let agent = start(&host);
    (host, agent)
}

fn start(host: &Host) -> Agent {
    let agent = Agent::start(host, CONFIG);
    let _operations = agent.settle();
    agent.await_that("MIG devices can be leased", || {
        [0, 1].into_iter().all(|gpu| agent.gpu(gpu).mig.is_some_and(|mig| mig.enabled))
    });
    agent
}

fn body(profile: &str, more: &Value) -> Value {
    let mut body = json!({ "share": { "kind": "mig_profile", "profile": profile }, "duration_s": 3600 });
    body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
    body
}

/// Requests a MIG device on GPU 0. `more` adds or replaces fields of the request.
fn ask(agent: &Agent, profile: &str, more: &Value) -> Result<LeaseGrant, ApiError> {
    let mut all = json!({ "selectors": ["0"] });
    all.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
    let answer = agent.post("/v1/leases", &body(profile, &all));
    if answer.status >= 400 {
        return Err(answer.error());
    }
    Ok(serde_json::from_value(answer.json()).expect("a lease"))
}

fn target(grant: &LeaseGrant) -> &str {
    &grant.lease.members[0].target
}

fn visible(grant: &LeaseGrant) -> &str {
    &grant.environment.iter().find(|(name, _)| name == "CUDA_VISIBLE_DEVICES").expect("devices").1
}

fn ended(agent: &Agent, id: LeaseId) {
    release(agent, id);
    lease_becomes(agent, id, LeaseState::Ended);
}

/// Returns the operations that created devices for leases.
fn grants(agent: &Agent) -> Vec<OperationSummary> {
    let all: Vec<OperationSummary> = serde_json::from_value(agent.get("/v1/operations").json()).expect("operations");
    all.into_iter().filter(|operation| operation.kind == "lease.grant").collect()
}

#[test]
fn device_is_created_and_reused_after_release() {
    let (host, agent) = started();
    let large = ask(&agent, "3g.40gb", &json!({})).expect("a lease");
    assert!(target(&large).starts_with("MIG-"), "{large:?}");
    assert_eq!(visible(&large), target(&large));
    assert_eq!(large.lease.members[0].memory_mib / 1024, 39);
    let place = real_layout(&host, 0);
    assert_eq!(place.len(), 1);
    let slice = if place[0].contains("@4") { 4 } else { 0 };
    let used = gi_at(&host, 0, slice);
    let process = host.process(&format!("--gpu 0 --gi {used} --ci 0"));
    let small = ask(&agent, "1g.10gb", &json!({})).expect("a lease next to the running one");
    assert_eq!((real_layout(&host, 0).len(), gi_at(&host, 0, slice)), (2, used));
    assert_eq!(grants(&agent).len(), 2);
    let devices = real_layout(&host, 0);
    ended(&agent, small.lease.id);
    assert_eq!(real_layout(&host, 0), devices, "a free device is kept");
    let again = ask(&agent, "1g.10gb", &json!({})).expect("a lease");
    assert_eq!((target(&again), grants(&agent).len()), (target(&small), 2), "and granted again without an operation");
    host.end_process(process);
}

#[test]
fn only_own_free_devices_are_destroyed_for_a_lease() {
    let (host, agent) = started();
    let sevenths: Vec<LeaseGrant> =
        (0..7).map(|n| ask(&agent, "1g.10gb", &json!({})).unwrap_or_else(|error| panic!("{n}: {error:?}"))).collect();
    let full = ask(&agent, "1g.10gb", &json!({})).unwrap_err();
    assert_eq!((full.code, full.retryable), (Code::Blocked, true), "{full:?}");
    assert!(full.causes.iter().any(|cause| cause.contains(&sevenths[0].lease.id.to_string())), "{full:?}");
    sevenths.iter().for_each(|one| ended(&agent, one.lease.id));
    let whole = ask(&agent, "7g.80gb", &json!({})).expect("the free devices are destroyed");
    assert_eq!(real_layout(&host, 0), ["7g.80gb@0[7g.80gb@0]"]);
    ended(&agent, whole.lease.id);

    let half = ask(&agent, "4g.40gb", &json!({})).expect("a lease");
    ended(&agent, half.lease.id);
    make_by_hand(&host, "1g.10gb", 6);
    agent.await_that("the foreign device is seen", || agent.gpu(0).mig.is_some_and(|mig| mig.instances.len() == 2));
    let refused = ask(&agent, "7g.80gb", &json!({})).unwrap_err();
    assert!(refused.code == Code::Blocked, "{refused:?}");
    assert!(refused.causes.iter().any(|cause| cause.contains("does not destroy 1g.10gb@6")), "{refused:?}");
    assert_eq!(real_layout(&host, 0).len(), 2, "nothing was destroyed");
    // If another program has created a free device that meets the request, gpushd uses this device.
    let used = ask(&agent, "1g.10gb", &json!({})).expect("a lease");
    assert_eq!(real_layout(&host, 0).len(), 2);
    // gpushd created a device at this place before, and now an administrator creates one there. The
    // new device does not belong to gpushd.
    ended(&agent, used.lease.id);
    assert_eq!(agent.apply_once(&["0"], &["1g.10gb@6"]).state, OperationState::Done);
    agent.await_that("the other device is gone", || agent.gpu(0).mig.is_some_and(|mig| mig.instances.len() == 1));
    make_by_hand(&host, "4g.40gb", 0);
    agent.await_that("the foreign device is seen", || agent.gpu(0).mig.is_some_and(|mig| mig.instances.len() == 2));
    assert_eq!(ask(&agent, "7g.80gb", &json!({})).unwrap_err().code, Code::Blocked);
}

#[test]
fn gang_gets_all_devices_or_none() {
    let (host, agent) = started();
    let both = json!({ "selectors": ["0-1"], "count": 2 });
    let small = ask(&agent, "1g.10gb", &json!({ "selectors": ["1"] })).expect("a lease");
    let refused = ask(&agent, "7g.80gb", &both).unwrap_err();
    assert_eq!((refused.code, refused.retryable), (Code::Blocked, true), "{refused:?}");
    assert_eq!(real_layout(&host, 0), Vec::<String>::new(), "no half of a gang is made");
    ended(&agent, small.lease.id);
    let gang = ask(&agent, "7g.80gb", &both).expect("both");
    assert_eq!(gang.lease.members.len(), 2);
    assert_eq!([real_layout(&host, 0), real_layout(&host, 1)].concat(), ["7g.80gb@0[7g.80gb@0]"; 2]);
    assert_eq!(visible(&gang).split(',').count(), 2);
}

#[test]
fn concurrent_requests_get_different_devices() {
    let (host, agent) = started();
    let granted: Vec<LeaseGrant> = thread::scope(|scope| {
        let ask = || ask(&agent, "1g.10gb", &json!({ "selectors": ["0-1"], "wait": "60s" }));
        let asked: Vec<_> = (0..14).map(|_| scope.spawn(ask)).collect();
        asked.into_iter().map(|one| one.join().expect("an answer").expect("a lease")).collect()
    });
    let mut targets: Vec<&str> = granted.iter().map(target).collect();
    targets.sort_unstable();
    targets.dedup();
    assert_eq!((targets.len(), real_layout(&host, 0).len() + real_layout(&host, 1).len()), (14, 14));
}

#[test]
fn failed_device_creation_leaves_no_lease_and_no_instance() {
    let (host, agent) = started();
    host.fault("nvmlGpuInstanceCreateComputeInstance* --gpu 0 --times 1 --rc INSUFFICIENT_RESOURCES");
    let failed = ask(&agent, "2g.20gb", &json!({})).unwrap_err();
    assert!(failed.message.contains("was not granted"), "{failed:?}");
    assert_eq!(real_layout(&host, 0), Vec::<String>::new());
    let lease = lease_now(&agent, LeaseId(1));
    assert_eq!((lease.state, lease.reason), (LeaseState::Ended, Some(EndReason::Failed)));
    assert_eq!(grants(&agent)[0].state, OperationState::RolledBack);
    ask(&agent, "2g.20gb", &json!({})).expect("the next one");
}

/// Requests a lease. A driver call of the grant kills gpushd.
fn ask_and_die(agent: &mut Agent, profile: &str) {
    let body = body(profile, &json!({ "selectors": ["0"] })).to_string();
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
        let one = ask(agent, profile, &json!({})).unwrap_or_else(|error| panic!("{profile}: {error:?}"));
        ended(agent, one.lease.id);
    }
}

/// Kills gpushd before and after each driver call of a grant. If `fault` makes one of these calls
/// fail, kills gpushd only around the calls after the failed call. Counts the outcomes of the
/// leases.
fn kill_around(fault: Option<&str>) -> BTreeMap<String, u32> {
    let (host, mut agent) = started();
    prepare(&agent);
    let before = real_layout(&host, 0);
    host.start_trace();
    fault.iter().for_each(|fault| host.fault(fault));
    let first = ask(&agent, "7g.80gb", &json!({}));
    host.clear_faults();
    let calls: Vec<Traced> = host.trace();
    assert_eq!(first.is_err(), fault.is_some(), "{first:?}");
    let from = calls.iter().position(|call| call.rc != 0).map_or(0, |failed| failed + 1);
    if let Ok(granted) = first {
        ended(&agent, granted.lease.id);
    }
    let mut ends: BTreeMap<String, u32> = BTreeMap::new();
    for k in from..calls.len() {
        for when in ["before", "after"] {
            prepare(&agent);
            assert_eq!(real_layout(&host, 0), before);
            let last = newest(&agent);
            fault.iter().for_each(|fault| host.fault(fault));
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
                    let one = ask(&agent, "7g.80gb", &json!({})).unwrap_or_else(|error| panic!("{what}: {error:?}"));
                    ended(&agent, one.lease.id);
                }
                LeaseState::Queued | LeaseState::Granting | LeaseState::Releasing => panic!("{what}: {lease:?}"),
            }
            *ends.entry(lease.state.to_string()).or_default() += 1;
        }
    }
    ends
}

#[test]
fn grant_killed_around_every_driver_call_is_completed() {
    let ends = kill_around(None);
    println!("killed at {} points of a grant: {ends:?}", ends.values().sum::<u32>());
    assert!(ends.values().sum::<u32>() >= 8, "{ends:?}");
}

#[test]
fn grant_rollback_killed_around_every_call_leaves_no_lease() {
    let ends = kill_around(Some("nvmlGpuInstanceCreateComputeInstance* --gpu 0 --times 1 --rc INSUFFICIENT_RESOURCES"));
    println!("killed at {} points of a rollback: {ends:?}", ends.values().sum::<u32>());
    assert!(ends.values().sum::<u32>() >= 6 && ends.keys().eq(["ended"]), "{ends:?}");
}

/// Returns the id of the last lease.
fn newest(agent: &Agent) -> LeaseId {
    let all: Vec<gpush_api::Lease> = serde_json::from_value(agent.get("/v1/leases?ended=5").json()).expect("leases");
    all.iter().map(|lease| lease.id).max_by_key(|id| id.0).expect("a lease")
}
