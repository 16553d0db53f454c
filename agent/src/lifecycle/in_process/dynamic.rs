//! Leases on GPUs with layout `dynamic`. If no free device meets a request, gpushd creates a MIG device.

use std::collections::BTreeMap;

use gpush_api::{Code, EndReason, Lease, LeaseGrant, LeaseState, OperationState, OperationSummary};
use gpush_nvml::ErrorKind;
use serde_json::{Value, json};

use super::{
    InProcess,
    call_rules::{ANY_CHANGE, CREATE, CREATE_COMPUTE, CallEffect, CallRule, EndMoment},
    host::ScriptedHost,
    leases::{DYNAMIC, devices, waiting},
    requests, user,
};

fn target(grant: &LeaseGrant) -> &str {
    grant.lease.members[0].target.as_str()
}

fn on(gpus: &str, profile: &str, count: u32) -> Value {
    let mut body = devices(profile, count);
    body["selectors"] = json!([gpus]);
    body
}

impl InProcess {
    async fn device(&self, profile: &str) -> LeaseGrant {
        self.lease(0, &devices(profile, 1)).await.unwrap_or_else(|error| panic!("{profile}: {error:?}"))
    }

    async fn return_device(&self, grant: &LeaseGrant) {
        self.release(grant).await;
        self.wait_until_ended(grant).await;
    }

    /// Waits until gpushd has read that GPU 0 has this number of instances.
    async fn until_seen(&self, number: usize) {
        let seen = async || self.gpu(0).await.mig.filter(|mig| mig.instances.len() == number).map(drop);
        self.until("the instances", seen).await;
    }

    /// Returns the number of operations that created devices for leases.
    async fn grants(&self) -> usize {
        let all: Vec<OperationSummary> = self.get("/v1/operations?limit=200").await;
        all.iter().filter(|operation| operation.kind == "lease.grant").count()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn device_is_created_and_reused_after_release() {
    let host = InProcess::start("dgx-a100", 1, DYNAMIC).await;
    let large = host.device("3g.40gb").await;
    assert!(target(&large).starts_with("MIG-"), "{large:?}");
    let visible = large.environment.iter().find(|(name, _)| name == "CUDA_VISIBLE_DEVICES").expect("devices");
    assert_eq!((visible.1.as_str(), large.lease.members[0].memory_mib / 1024), (target(&large), 39));
    let layout = host.gpus.layout(0);
    host.gpus.use_first_device(0, std::process::id());
    let small = host.device("1g.10gb").await;
    assert_eq!(
        (host.gpus.layout(0).len(), host.gpus.layout(0).contains(&layout[0]), host.grants().await),
        (2, true, 2)
    );
    let layout = host.gpus.layout(0);
    host.return_device(&small).await;
    assert_eq!(host.gpus.layout(0), layout, "a free device is kept");
    let again = host.device("1g.10gb").await;
    assert_eq!((target(&again), host.grants().await), (target(&small), 2), "it is granted again without an operation");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_own_free_devices_are_destroyed_for_a_lease() {
    let host = InProcess::start("dgx-a100", 1, DYNAMIC).await;
    let mut sevenths = Vec::new();
    for _ in 0..7 {
        sevenths.push(host.device("1g.10gb").await);
    }
    let full = host.lease(0, &devices("1g.10gb", 1)).await.unwrap_err();
    assert_eq!((full.code, full.retryable), (Code::Blocked, true), "{full:?}");
    assert!(full.causes.iter().any(|cause| cause.contains(&sevenths[0].lease.id.to_string())), "{full:?}");
    for one in &sevenths {
        host.return_device(one).await;
    }
    let whole = host.device("7g.80gb").await;
    assert_eq!(host.gpus.instances(0), ["7g.80gb@0"], "the free devices were destroyed");
    host.return_device(&whole).await;

    let half = host.device("4g.40gb").await;
    host.return_device(&half).await;
    host.gpus.create_by_hand(0, "1g.10gb", 6);
    host.until_seen(2).await;
    let refused = host.lease(0, &devices("7g.80gb", 1)).await.unwrap_err();
    assert_eq!(refused.code, Code::Blocked, "{refused:?}");
    assert!(refused.causes.iter().any(|cause| cause.contains("does not destroy 1g.10gb@6")), "{refused:?}");
    assert_eq!(host.gpus.instances(0).len(), 2, "nothing was destroyed");
    // If another program has created a free device that meets the request, gpushd uses this device.
    let used = host.device("1g.10gb").await;
    assert_eq!(host.gpus.instances(0).len(), 2);
    // gpushd created a device at this place before, and now an administrator creates one there. The new device does not
    // belong to gpushd.
    host.return_device(&used).await;
    assert_eq!(host.apply_once(&["0"], &["1g.10gb@6"]).await.state, OperationState::Done);
    host.gpus.create_by_hand(0, "4g.40gb", 0);
    host.until_seen(2).await;
    assert_eq!(host.lease(0, &devices("7g.80gb", 1)).await.unwrap_err().code, Code::Blocked);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gang_over_several_gpus_gets_all_devices_or_none() {
    let host = InProcess::start("dgx-a100", 2, DYNAMIC).await;
    let small = host.lease(0, &on("1", "1g.10gb", 1)).await.expect("a lease");
    let refused = host.lease(0, &on("0-1", "7g.80gb", 2)).await.unwrap_err();
    assert_eq!((refused.code, refused.retryable), (Code::Blocked, true), "{refused:?}");
    assert_eq!(host.gpus.instances(0), Vec::<String>::new(), "no half of a gang is created");
    host.return_device(&small).await;
    let gang = host.lease(0, &on("0-1", "7g.80gb", 2)).await.expect("both");
    assert_eq!(gang.lease.members.len(), 2);
    assert_eq!([host.gpus.instances(0), host.gpus.instances(1)].concat(), ["7g.80gb@0"; 2]);
    let visible = gang.environment.iter().find(|(name, _)| name == "CUDA_VISIBLE_DEVICES").expect("devices");
    assert_eq!(visible.1.split(',').count(), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_requests_get_different_devices() {
    let host = InProcess::start("dgx-a100", 2, DYNAMIC).await;
    let body = waiting(devices("1g.10gb", 1));
    let asking: Vec<_> = (0..14).map(|_| host.begin_post(user(0), "/v1/leases", &body)).collect();
    let mut targets = Vec::new();
    for one in asking {
        let granted: LeaseGrant = one.await.expect("an answer").document().expect("a lease");
        targets.push(target(&granted).to_owned());
    }
    targets.sort_unstable();
    targets.dedup();
    assert_eq!((targets.len(), host.gpus.instances(0).len(), host.gpus.instances(1).len()), (14, 7, 7));
}

/// Fault: if a client with an idempotency key disconnected while gpushd created the devices of its queued lease, the lease
/// ended as soon as the devices existed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lease_is_kept_for_a_client_that_disconnects_in_creation() {
    let host = InProcess::start("dgx-h100", 1, DYNAMIC).await;
    let holder = host.device("7g.80gb").await;
    let body = waiting(devices("3g.40gb", 1));
    let headers = [("content-type", "application/json"), ("idempotency-key", "disconnects")];
    let text = body.to_string().into_bytes();
    let client = host.begin_request(requests::request(user(0), hyper::Method::POST, "/v1/leases", &headers, text));
    let queued = host.wait_for_queued(1).await[0].id;
    let path = format!("/v1/leases/{queued}");
    host.gpus.rule(CallRule::on(CREATE, 0).once().held());
    host.release(&holder).await;
    host.until_held().await;
    assert_eq!(host.get::<Lease>(&path).await.state, LeaseState::Granting);
    drop(client);
    for _ in 0..20 {
        assert_eq!(host.get::<Lease>(&path).await.state, LeaseState::Granting);
    }
    host.gpus.release();
    host.until("the grant", async || (host.get::<Lease>(&path).await.state == LeaseState::Active).then_some(())).await;
    let granted: LeaseGrant = host.post_with_key("/v1/leases", "disconnects", &body).await.document().expect("a lease");
    assert_eq!((granted.lease.id, granted.lease.state), (queued, LeaseState::Active));
}

/// Creates two free devices that belong to gpushd. Before gpushd can grant the whole GPU, it must destroy these devices.
async fn prepare(gpushd: &InProcess) {
    for profile in ["3g.40gb", "2g.20gb"] {
        let one = gpushd.device(profile).await;
        gpushd.return_device(&one).await;
    }
}

async fn newest(gpushd: &InProcess) -> Lease {
    let all: Vec<Lease> = gpushd.get("/v1/leases?ended=5").await;
    all.into_iter().max_by_key(|lease| lease.id.0).expect("a lease")
}

/// Ends gpushd before and after each driver call of a grant. If `fails`, the creation of the compute instance fails, and
/// gpushd ends around the calls after the failed call. Counts the outcomes of the leases.
async fn end_around(fails: bool) -> BTreeMap<String, u32> {
    let host = ScriptedHost::new("dgx-a100", 1);
    let fault = || CallRule::on(CREATE_COMPUTE, 0).once().fails(ErrorKind::InsufficientResources);
    let mut gpushd = host.start(DYNAMIC).await;
    prepare(&gpushd).await;
    let before = host.gpus.layout(0);
    host.gpus.take_changes();
    if fails {
        host.gpus.rule(fault());
    }
    let first = gpushd.lease(0, &devices("7g.80gb", 1)).await;
    assert_eq!(first.is_err(), fails, "{first:?}");
    let calls = host.gpus.take_changes();
    let failed = calls.iter().position(|call| call.starts_with(CREATE_COMPUTE)).filter(|_| fails);
    if let Ok(granted) = first {
        gpushd.return_device(&granted).await;
    }
    let mut ends: BTreeMap<String, u32> = BTreeMap::new();
    for (call, name) in calls.iter().enumerate().skip(failed.map_or(0, |failed| failed + 1)) {
        for moment in [EndMoment::Before, EndMoment::After] {
            prepare(&gpushd).await;
            assert_eq!(host.gpus.layout(0), before);
            let last = newest(&gpushd).await.id;
            if fails {
                host.gpus.rule(fault());
            }
            let after = u32::try_from(call).expect("a few");
            let ends_gpushd = CallEffect::EndGpushd(moment);
            host.gpus.rule(CallRule::on(ANY_CHANGE, 0).after(after).once().with(ends_gpushd));
            let asked = gpushd.begin_post(user(0), "/v1/leases", &devices("7g.80gb", 1));
            gpushd.died().await;
            drop(asked);
            host.gpus.clear_faults();
            gpushd = host.start(DYNAMIC).await;
            let what = format!("{moment:?} call {call} ({name})");
            let lease = gpushd
                .until("the lease", async || {
                    Some(newest(&gpushd).await).filter(|lease| lease.state != LeaseState::Granting)
                })
                .await;
            assert!(lease.id > last, "{what}: the lease was recorded with its operation");
            match lease.state {
                LeaseState::Active => {
                    assert_eq!(host.gpus.layout(0), ["7g.80gb@0[7g.80gb@0]"], "{what}");
                    assert!(lease.members[0].target.as_str().starts_with("MIG-"), "{what}: {lease:?}");
                    let path = format!("/v1/leases/{}/release", lease.id);
                    gpushd.post::<Value>(&path, &json!({})).await.expect("it is released");
                    gpushd.until("its end", async || gpushd.leases().await.is_empty().then_some(())).await;
                }
                LeaseState::Ended => {
                    assert_eq!(
                        (host.gpus.layout(0), lease.reason),
                        (before.clone(), Some(EndReason::Failed)),
                        "{what}"
                    );
                    // The devices still belong to gpushd. So gpushd may destroy them for a lease.
                    let one = gpushd.device("7g.80gb").await;
                    gpushd.return_device(&one).await;
                }
                LeaseState::Queued | LeaseState::Granting | LeaseState::Releasing => panic!("{what}: {lease:?}"),
            }
            *ends.entry(lease.state.to_string()).or_default() += 1;
        }
    }
    ends
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn grant_is_completed_after_an_end_around_every_driver_call() {
    let ends = end_around(false).await;
    println!("ended at {} points of a grant: {ends:?}", ends.values().sum::<u32>());
    assert!(ends.values().sum::<u32>() >= 8, "{ends:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_grant_rollback_leaves_no_lease() {
    let ends = end_around(true).await;
    println!("ended at {} points of a rollback: {ends:?}", ends.values().sum::<u32>());
    assert!(ends.values().sum::<u32>() >= 6 && ends.keys().eq(["ended"]), "{ends:?}");
}
