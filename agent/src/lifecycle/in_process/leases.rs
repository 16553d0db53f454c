//! Leases: what is granted, what waits, what is refused, and what is left when a grant fails.

use std::collections::BTreeSet;

use gpush_api::{Code, EndReason, Lease, LeaseGrant, LeaseState, Operation, OperationState};
use gpush_nvml::ErrorKind;
use serde_json::{Value, json};

use super::{
    InProcess,
    call_rules::{CallEffect, CallRule, READ},
    host::ScriptedHost,
    programs::{UserProgram, own_uid},
    user,
};

pub(super) const DYNAMIC: &str = "[[gpu]]\nmatch = [\"all\"]\nmode = \"mig\"\nlayout = \"dynamic\"\n";
pub(super) const FIXED: &str = "[[gpu]]\nmatch = [\"all\"]\nmode = \"mig\"\nlayout = [\"1g.10gb*2\"]\n";

pub(super) fn devices(profile: &str, count: u32) -> Value {
    json!({ "share": { "kind": "mig_profile", "profile": profile }, "count": count, "duration_s": 3600 })
}

pub(super) fn waiting(mut body: Value) -> Value {
    body["wait"] = json!("unlimited");
    body
}

impl InProcess {
    pub(super) async fn lease(&self, uid: u32, body: &Value) -> Result<LeaseGrant, gpush_api::ApiError> {
        self.post_as(user(uid), "/v1/leases", body).await
    }

    pub(super) async fn leases(&self) -> Vec<Lease> {
        self.get("/v1/leases").await
    }

    /// Returns the leases as they are recorded, without their use, which a restart can leave out for a moment.
    pub(super) async fn recorded_leases(&self) -> Vec<Lease> {
        let mut leases = self.leases().await;
        for lease in &mut leases {
            (lease.usage, lease.idle) = (None, None);
        }
        leases
    }

    pub(super) async fn release(&self, lease: &LeaseGrant) {
        let path = format!("/v1/leases/{}/release", lease.lease.id);
        self.post::<Value>(&path, &json!({})).await.expect("it is released");
    }

    pub(super) async fn wait_until_ended(&self, lease: &LeaseGrant) -> Lease {
        let path = format!("/v1/leases/{}", lease.lease.id);
        self.until("the lease ends", async || {
            let now: Lease = self.get(&path).await;
            Some(now).filter(|now| now.state == LeaseState::Ended)
        })
        .await
    }

    pub(super) async fn wait_for_queued(&self, number: usize) -> Vec<Lease> {
        self.until("the requests wait", async || {
            let mut queued = self.leases().await;
            queued.retain(|lease| lease.state == LeaseState::Queued && lease.queue.is_some());
            Some(queued).filter(|queued| queued.len() == number)
        })
        .await
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gang_gets_all_devices_or_none() {
    let host = InProcess::start("dgx-h100", 1, DYNAMIC).await;
    let refused = host.lease(1000, &devices("1g.10gb", 8)).await.unwrap_err();
    assert!(!refused.retryable && host.gpus.take_changes().is_empty(), "{refused:?}");
    let granted = host.lease(0, &devices("2g.20gb", 3)).await.expect("three devices");
    assert_eq!((granted.lease.members.len(), host.gpus.instances(0).len()), (3, 3));
    let refused = host.lease(1001, &devices("1g.10gb", 2)).await.unwrap_err();
    assert_eq!(refused.code, Code::Blocked, "only one fits: {refused:?}");
    assert_eq!(host.gpus.instances(0).len(), 3);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failed_creation_leaves_no_lease_and_no_device() {
    let host = InProcess::start("dgx-h100", 1, DYNAMIC).await;
    for (call, after) in
        [("creating a GPU instance", 0), ("creating a compute instance", 0), ("creating a GPU instance", 1)]
    {
        host.gpus.fail_after(after, call, 0, 1, ErrorKind::InsufficientResources);
        let failed = host.lease(1000, &devices("1g.10gb", 2)).await.unwrap_err();
        assert!(failed.message.contains("was not granted"), "{call} {after}: {failed:?}");
        assert!(host.leases().await.is_empty() && host.gpus.instances(0).is_empty(), "{call} {after}");
        host.gpus.clear_faults();
    }
    host.lease(1000, &devices("1g.10gb", 2)).await.expect("the capacity is free");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn free_device_is_destroyed_only_when_it_is_in_the_way() {
    let host = InProcess::start("dgx-h100", 1, DYNAMIC).await;
    let first = host.lease(1000, &devices("3g.40gb", 1)).await.expect("a device");
    host.release(&first).await;
    assert_eq!(host.wait_until_ended(&first).await.reason, Some(EndReason::Released));
    host.gpus.take_changes();
    let second = host.lease(1001, &devices("3g.40gb", 1)).await.expect("a device");
    assert_eq!(second.lease.members[0].target, first.lease.members[0].target);
    assert!(host.gpus.take_changes().is_empty(), "the device is used again");
    let refused = host.lease(0, &devices("7g.80gb", 1)).await.unwrap_err();
    assert_eq!(refused.code, Code::Blocked, "{refused:?}");
    host.release(&second).await;
    host.wait_until_ended(&second).await;
    host.lease(0, &devices("7g.80gb", 1)).await.expect("the free device makes room");
    assert_eq!(host.gpus.instances(0), ["7g.80gb@0"]);
}

/// Otherwise small requests could overtake a large request forever.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn later_request_does_not_take_what_the_first_waits_for() {
    let host = InProcess::start("dgx-h100", 1, FIXED).await;
    host.apply(&["0"], &["1g.10gb*2"]).await;
    let holder = host.lease(1000, &devices("1g.10gb", 1)).await.expect("a device");
    let both = waiting(devices("1g.10gb", 2));
    let first = host.lease(1001, &both);
    let then = async {
        let queued = host.wait_for_queued(1).await;
        let refused = host.lease(1002, &devices("1g.10gb", 1)).await.unwrap_err();
        assert!(format!("{refused:?}").contains(&queued[0].id.to_string()), "{refused:?}");
        host.release(&holder).await;
        queued[0].id
    };
    let (granted, queued) = tokio::join!(first, then);
    let granted = granted.expect("both devices");
    assert_eq!((granted.lease.id, granted.lease.members.len()), (queued, 2));
}

/// Fault: a user held one of two devices and waited for both. The second device stayed reserved, and no other user could
/// lease it, until the user released the first.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn request_that_only_own_leases_block_reserves_nothing() {
    let host = InProcess::start("dgx-h100", 1, FIXED).await;
    host.apply(&["0"], &["1g.10gb*2"]).await;
    let own = host.lease(1000, &devices("1g.10gb", 1)).await.expect("a device");
    let both = waiting(devices("1g.10gb", 2));
    let gang = host.lease(1000, &both);
    let then = async {
        let queued = host.wait_for_queued(1).await;
        let reasons = &queued[0].queue.as_ref().unwrap().reasons;
        let expected =
            format!("waits only for a lease of the same user ({}), so it reserves no capacity", own.lease.id);
        assert!(matches!(reasons.as_slice(), [reason] if reason.starts_with(&expected)), "{reasons:?}");
        let other = host.lease(1001, &devices("1g.10gb", 1)).await.expect("the device without a user");
        host.release(&own).await;
        // Now a lease of another user blocks the request, so the request reserves the first device.
        host.until("the request waits for the other user", async || {
            let queued = host.wait_for_queued(1).await;
            let reasons = queued[0].queue.as_ref().unwrap().reasons.join("; ");
            reasons.contains(&other.lease.id.to_string()).then_some(())
        })
        .await;
        let refused = host.lease(1002, &devices("1g.10gb", 1)).await.unwrap_err();
        assert!(refused.message.ends_with("the free capacity is reserved for earlier requests"), "{refused:?}");
        host.release(&other).await;
    };
    let (granted, ()) = tokio::join!(gang, then);
    assert_eq!(granted.expect("both devices").lease.members.len(), 2);
}

/// Fault: a gang could wait for its user's own lease or for another user's lease. gpushd chose the own lease, so the gang
/// reserved nothing, and later requests overtook it again and again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gang_reserves_where_leases_of_others_block_it() {
    let host = ScriptedHost::new("dgx-h100", 4);
    host.gpus.without_mig();
    let host = host.start("[[gpu]]\nmatch = [\"all\"]\nmode = \"exclusive\"\n").await;
    let whole = |count: u32| json!({ "share": { "kind": "whole" }, "count": count, "duration_s": 3600 });
    let mut held = Vec::new();
    for uid in [1000, 1001, 1002, 1003] {
        held.push(host.lease(uid, &whole(1)).await.expect("a GPU"));
    }
    let gang = waiting(whole(2));
    let gang = host.lease(1000, &gang);
    let then = async {
        host.wait_for_queued(1).await;
        host.release(&held[1]).await;
        host.wait_until_ended(&held[1]).await;
        let refused = host.lease(1004, &whole(1)).await.unwrap_err();
        let reserved = |cause: &String| cause.ends_with("is reserved for earlier requests");
        assert!(refused.causes.iter().any(reserved), "{refused:?}");
        host.release(&held[2]).await;
    };
    let (granted, ()) = tokio::join!(gang, then);
    let granted = granted.expect("the two GPUs of other users");
    let gpus: BTreeSet<&str> = granted.lease.members.iter().map(|member| member.gpu_uuid.as_str()).collect();
    let freed = [&held[1], &held[2]].map(|lease| lease.lease.members[0].gpu_uuid.as_str());
    assert_eq!(gpus, BTreeSet::from(freed));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiting_requests_are_granted_in_their_order() {
    let host = InProcess::start("dgx-h100", 1, FIXED).await;
    host.apply(&["0"], &["1g.10gb*2"]).await;
    let holder = host.lease(1000, &devices("1g.10gb", 2)).await.expect("both devices");
    let both = waiting(devices("1g.10gb", 2));
    let (one, two) = (host.lease(1001, &both), async {
        host.wait_for_queued(1).await;
        host.lease(1002, &both).await
    });
    let then = async {
        let queued = host.wait_for_queued(2).await;
        host.release(&holder).await;
        queued
    };
    let one = async {
        let granted = one.await.expect("the first");
        assert_eq!(host.wait_for_queued(1).await.len(), 1, "the second still waits");
        host.release(&granted).await;
        granted
    };
    let (one, two, queued) = tokio::join!(one, two, then);
    let two = two.expect("the second");
    assert_eq!([one.lease.id, two.lease.id], [queued[0].id, queued[1].id]);
    let positions: Vec<_> = queued.iter().map(|lease| lease.queue.as_ref().map(|queue| queue.position)).collect();
    assert_eq!(positions, [Some(1), Some(2)]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leased_device_blocks_a_change_until_the_lease_ends() {
    let host = InProcess::start("dgx-h100", 1, FIXED).await;
    host.apply(&["0"], &["1g.10gb*2"]).await;
    let lease = host.lease(1000, &devices("1g.10gb", 1)).await.expect("a device");
    let refused = host.begin(&["0"], &["7g.80gb"], &json!({})).await.unwrap_err();
    assert_eq!(refused.code, Code::Blocked, "{refused:?}");
    assert!(format!("{refused:?}").contains(&lease.lease.id.to_string()), "{refused:?}");
    let waits: Operation = host.begin(&["0"], &["7g.80gb"], &json!({ "wait_s": 600 })).await.expect("it waits");
    let refused = host.lease(1001, &devices("1g.10gb", 1)).await.unwrap_err();
    assert!(format!("{refused:?}").contains(&waits.id), "the waiting operation reserves its GPU: {refused:?}");
    host.release(&lease).await;
    assert_eq!(host.ended(&waits).await.state, OperationState::Done);
    assert_eq!(host.gpus.instances(0), ["7g.80gb@0"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn denial_by_quota_names_a_lease_to_release() {
    let config = format!("[[quota]]\neverybody = true\nleases = 1\nwaiting = 1\n{DYNAMIC}");
    let host = InProcess::start("dgx-h100", 1, &config).await;
    let lease = host.lease(1000, &devices("1g.10gb", 1)).await.expect("a device");
    let denied = host.lease(1000, &devices("1g.10gb", 1)).await.unwrap_err();
    assert_eq!(denied.code, Code::Denied, "{denied:?}");
    assert_eq!(
        denied.hint,
        Some(format!(
            "use {0}: `gpushctl run --lease {0} -- COMMAND`, or release it: `gpushctl lease end {0}`",
            lease.lease.id
        ))
    );
    host.lease(1001, &devices("1g.10gb", 1)).await.expect("another user");
    host.release(&lease).await;
    host.wait_until_ended(&lease).await;
    host.lease(1000, &devices("1g.10gb", 1)).await.expect("the quota has room again");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cordoned_gpu_gets_no_lease_and_keeps_its_leases() {
    let host = InProcess::start("dgx-h100", 1, DYNAMIC).await;
    let lease = host.lease(1000, &devices("1g.10gb", 1)).await.expect("a device");
    host.post::<Value>("/v1/gpus/0/cordon", &json!({ "reason": "fan" })).await.expect("it is cordoned");
    let refused = host.lease(1001, &devices("1g.10gb", 1)).await.unwrap_err();
    assert!(format!("{refused:?}").contains("cordon"), "{refused:?}");
    assert_eq!(host.leases().await[0].state, LeaseState::Active);
    host.post::<Value>("/v1/gpus/0/uncordon", &json!({})).await.expect("it is open again");
    host.lease(1001, &devices("1g.10gb", 1)).await.expect("a device");
    host.release(&lease).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lease_ends_at_its_time_and_frees_its_device() {
    let host = InProcess::start("dgx-h100", 1, FIXED).await;
    host.apply(&["0"], &["1g.10gb*2"]).await;
    let mut short = devices("1g.10gb", 2);
    short["duration_s"] = json!(1);
    let lease = host.lease(1000, &short).await.expect("both devices");
    host.lease(1001, &waiting(devices("1g.10gb", 2))).await.expect("granted when the first has expired");
    assert_eq!(host.wait_until_ended(&lease).await.reason, Some(EndReason::Expired));
}

/// A device is free only if the driver says that no process uses it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn released_lease_keeps_its_device_while_processes_are_unknown() {
    let host = InProcess::start("dgx-h100", 1, FIXED).await;
    host.apply(&["0"], &["1g.10gb*2"]).await;
    let lease = host.lease(1000, &devices("1g.10gb", 2)).await.expect("both devices");
    let hidden = CallEffect::HideProcesses("nvmlDeviceGetComputeRunningProcesses_v3: Unknown Error");
    host.gpus.rule(CallRule::on(READ, 0).with(hidden));
    host.release(&lease).await;
    let says = "gpushd cannot read from the driver which processes use the GPUs of the lease";
    host.until("what the lease waits for", async || {
        let now = host.leases().await.remove(0);
        assert_eq!(now.state, LeaseState::Releasing);
        now.waits_for.iter().any(|why| why == says).then_some(())
    })
    .await;
    host.gpus.clear_faults();
    assert_eq!(host.wait_until_ended(&lease).await.reason, Some(EndReason::Released));
    host.lease(1001, &devices("1g.10gb", 2)).await.expect("both devices are free");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn processes_end_with_an_expired_lease_only_if_the_rule_says_so() {
    for at_end in ["report", "end"] {
        let config = format!("[processes]\ngrace = \"0s\"\n{FIXED}at_end = \"{at_end}\"\n");
        let host = InProcess::start("dgx-h100", 1, &config).await;
        host.apply(&["0"], &["1g.10gb*2"]).await;
        let mut short = devices("1g.10gb", 1);
        short["duration_s"] = json!(1);
        let lease = host.lease(own_uid(), &short).await.expect("a device");
        let mut program = UserProgram::with_environment(own_uid(), &lease.environment);
        let waits = format!("process {} ", program.pid());
        if at_end == "report" {
            host.until("what the lease waits for", async || {
                let now = host.leases().await.remove(0);
                now.waits_for.iter().any(|why| why.starts_with(&waits)).then_some(())
            })
            .await;
            assert!(program.lives());
            drop(program);
            assert_eq!(host.wait_until_ended(&lease).await.reason, Some(EndReason::Expired));
        } else {
            assert_eq!(host.wait_until_ended(&lease).await.reason, Some(EndReason::Expired));
            assert!(!program.lives());
        }
    }
}
