//! What gpushd grants and refuses at once, and which lease survives what.

use std::{fs, sync::Arc};

use gpush_api::{
    Code, EndReason, GpuState, Lease, LeaseBinding, LeaseGrant, LeaseMember, LeaseState, MemberShare, OperationState,
};
use serde_json::{Value, json};

use super::{
    InProcess,
    call_rules::{CallRule, READ},
    host::ScriptedHost,
    leases::{FIXED, devices, waiting},
    user,
};
use crate::{operations::scheduler::Reserved, state::Reservation};

pub(super) const WHOLE: &str = "[[gpu]]\nmatch = [\"all\"]\nmode = \"exclusive\"\n";

/// A limit that no reading exceeds while a test runs.
pub(super) const SLOW_READINGS: &str = "# --constants driver.read=600000ms\n";

impl InProcess {
    /// Lets the next readings of a GPU hang, until [`super::gpus::ScriptedGpus::release`]. Returns when gpushd shows the
    /// last reading as old. The config must contain [`SLOW_READINGS`].
    pub(super) async fn reading_hangs(&self, gpu: u32) {
        let is_ready = |gpu: gpush_api::Gpu| gpu.state == GpuState::Ready && !gpu.stale;
        self.until("the first reading", async || is_ready(self.gpu(gpu).await).then_some(())).await;
        self.gpus.rule(CallRule::on(READ, gpu).held());
        let is_stale = async || self.gpu(gpu).await.stale.then_some(());
        self.until("a late reading", is_stale).await;
    }
}

/// Creates a host whose GPUs have MIG off.
pub(super) fn whole_gpus(count: usize) -> Arc<ScriptedHost> {
    let host = ScriptedHost::new("dgx-h100", count);
    host.gpus.without_mig();
    host
}

pub(super) fn whole(gpus: &str, count: u32) -> Value {
    json!({ "share": { "kind": "whole" }, "selectors": [gpus], "count": count })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn request_outside_every_limit_is_refused_and_changes_nothing() {
    let host = InProcess::start("dgx-h100", 1, FIXED).await;
    host.apply(&["0"], &["1g.10gb*2"]).await;
    let device = json!({ "kind": "mig_profile", "profile": "1g.10gb" });
    for (body, code, part) in [
        (json!({ "duration_s": -1 }), Code::BadRequest, "duration_s"),
        (json!({ "duration_s": 0 }), Code::BadRequest, ""),
        (json!({ "duration_s": u64::MAX }), Code::BadRequest, "52 weeks"),
        (json!({ "wait": "-5s" }), Code::BadRequest, ""),
        (json!({ "share": { "kind": "mps", "percentage": 0 } }), Code::BadRequest, "percentage"),
        (json!({ "share": { "kind": "mps", "percentage": 101 } }), Code::BadRequest, "percentage"),
        (json!({ "share": { "kind": "mig_size", "memory_mib": 1_u64 << 40 } }), Code::BadRequest, ""),
        (json!({ "share": { "kind": "mig_size", "memory_mib": u64::MAX } }), Code::BadRequest, ""),
        (json!({ "share": { "kind": "mig_profile", "profile": "1g.11gb" } }), Code::UnknownProfile, "1g.10gb"),
        (json!({ "share": device, "count": 9 }), Code::BadRequest, ""),
        (json!({ "share": device, "count": 0 }), Code::BadRequest, "1 to 64 devices"),
        (json!({ "share": device, "count": u32::MAX }), Code::BadRequest, ""),
        (json!({ "share": device, "selectors": ["9"] }), Code::NotFound, "9"),
        (json!({ "share": { "kind": "fpga" } }), Code::BadRequest, "fpga"),
        (json!({ "holder_uid": u32::MAX }), Code::BadRequest, "user id"),
        (json!({ "process": 0 }), Code::BadRequest, ""),
        (json!({ "process": 0, "bind_to": "cgroup" }), Code::BadRequest, "process 0"),
        (json!({ "bind_to": "cgroup" }), Code::BadRequest, "needs an end"),
        (json!({ "unknown": 1 }), Code::BadRequest, "unknown"),
    ] {
        let error = host.lease(0, &body).await.expect_err("a refusal");
        let text = error.sentences().join("; ") + &error.hint.clone().unwrap_or_default();
        assert_eq!(error.code, code, "{body}: {error:?}");
        assert!(text.contains(part), "{body}: {error:?}");
    }
    assert!(host.leases().await.is_empty());
}

/// Fault: gpushd trimmed a selector for its check, but stored, audited and logged the text with 63,000 blanks.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn padded_request_is_stored_in_its_normal_form() {
    let host = whole_gpus(2).start(WHOLE).await;
    let padded = format!("{}1", " ".repeat(3000));
    let lease = host.lease(0, &whole(&padded, 1)).await.expect("a lease").lease;
    assert_eq!(lease.request.expect("the own request").gpus, ["1"]);
    for size in [5000, 60_000] {
        let body = json!({ "share": { "kind": "whole" }, "target": "x".repeat(size) });
        assert_eq!(host.lease(0, &body).await.unwrap_err().code, Code::BadRequest, "{size}");
    }
}

/// A request that names no kind of share gets a replica, because the host offers only replicas.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replicas_of_a_time_sliced_gpu_are_counted() {
    let config = "[[gpu]]\nmatch = [\"all\"]\nmode = \"timeslice\"\ntimeslice = { replicas = 2 }\n";
    let host = whole_gpus(1).start(config).await;
    let replica = async || host.lease(0, &json!({ "duration_s": 600 })).await;
    let first = replica().await.expect("a replica");
    replica().await.expect("another one");
    assert_eq!(replica().await.unwrap_err().code, Code::Blocked);
    host.release(&first).await;
    host.wait_until_ended(&first).await;
    replica().await.expect("the free one");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gang_of_whole_gpus_gets_all_or_none() {
    let host = whole_gpus(2).start(WHOLE).await;
    assert_eq!(host.lease(0, &whole("all", 3)).await.unwrap_err().code, Code::BadRequest, "the host has two");
    let first = host.lease(0, &whole("all", 1)).await.expect("a lease");
    let refused = host.lease(0, &whole("all", 2)).await.unwrap_err();
    assert_eq!((refused.code, refused.retryable), (Code::Blocked, true), "{refused:?}");
    let named = format!("lease {} of", first.lease.id);
    assert!(refused.causes.iter().any(|cause| cause.contains(&named)), "{refused:?}");
    host.release(&first).await;
    host.wait_until_ended(&first).await;
    let both = host.lease(0, &whole("all", 2)).await.expect("both GPUs");
    assert_eq!(both.lease.members.len(), 2);
    let visible = both.environment.iter().find(|(name, _)| name == "CUDA_VISIBLE_DEVICES").expect("devices");
    assert_eq!(visible.1.split(',').count(), 2);
    assert_eq!(host.lease(0, &whole("all", 1)).await.unwrap_err().code, Code::Blocked);
}

/// The gpushd of a test is not the gpushd of the system, so it creates no scopes. A lease is then bound to the process
/// that the request names, and the answer says why the lease has no scope.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lease_without_a_scope_has_the_named_end_and_a_reason() {
    let host = whole_gpus(5).start(WHOLE).await;
    let own = std::process::id();
    for bind_to in ["scope", "cgroup"] {
        for (body, expected) in [
            (json!({ "bind_to": bind_to, "process": own }), "process"),
            (json!({ "bind_to": bind_to, "duration_s": 600 }), "time"),
        ] {
            let granted = host.lease(0, &body).await.expect("a lease");
            let binding = serde_json::to_value(&granted.lease.binding).expect("JSON");
            assert_eq!(binding["kind"], expected, "{body}");
            let reason = granted.binding_reason.expect("a reason");
            assert!(["systemd", "root", "service"].iter().any(|word| reason.contains(word)), "{reason}");
        }
    }
    let granted = host.lease(0, &json!({ "process": own })).await.expect("a lease");
    assert_eq!(granted.binding_reason, None, "the request asks for no cgroup");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn granted_leases_are_the_same_after_a_restart() {
    let host = whole_gpus(2);
    let gpushd = host.start(WHOLE).await;
    let mut body = whole("all", 1);
    body["duration_s"] = json!(3600);
    let granted = gpushd.lease(0, &body).await.expect("a lease");
    let before = gpushd.recorded_leases().await;
    gpushd.kill();
    let gpushd = host.start(WHOLE).await;
    assert_eq!(gpushd.recorded_leases().await, before);
    assert_eq!((before[0].id, &before[0].binding), (granted.lease.id, &LeaseBinding::Time));
    // The first lease still holds its GPU. The new lease has a higher number.
    let other = gpushd.lease(0, &whole("all", 1)).await.expect("the other GPU");
    assert!(other.lease.id > granted.lease.id && other.lease.members[0].gpu_uuid != granted.lease.members[0].gpu_uuid);
    let path = format!("/v1/leases/{}/renew", granted.lease.id);
    let renewed: Lease = gpushd.post(&path, &json!({ "duration_s": 7200 })).await.expect("it is renewed");
    assert!(renewed.expires_at > before[0].expires_at);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lease_of_a_lost_gpu_ends() {
    let host = whole_gpus(2).start(WHOLE).await;
    let lost = host.lease(0, &whole("1", 1)).await.expect("a lease");
    let other = host.lease(0, &whole("0", 1)).await.expect("a lease");
    host.gpus.lose(1);
    let path = format!("/v1/leases/{}", lost.lease.id);
    let is_over = async || {
        host.gpus().await;
        Some(host.get::<Lease>(&path).await).filter(|lease| lease.state != LeaseState::Active)
    };
    assert_eq!(host.until("the end", is_over).await.reason, Some(EndReason::GpuLost));
    let other: Lease = host.get(&format!("/v1/leases/{}", other.lease.id)).await;
    assert_eq!(other.state, LeaseState::Active);
}

/// Fault: a plan did not consider leases, so it destroyed a leased device that was idle.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lease_continues_after_its_rule_changes() {
    let host = InProcess::start("dgx-h100", 1, FIXED).await;
    host.apply(&["0"], &["1g.10gb*2"]).await;
    let granted = host.lease(0, &devices("1g.10gb", 1)).await.expect("a lease");
    let before = host.gpus.layout(0);
    let rule = "[[gpu]]\nmatch = [\"0\"]\nmode = \"mig\"\nlayout = [\"7g.80gb\"]\n";
    host.try_reload(rule, &json!({ "clear_overrides": true })).await.expect("it is taken");
    let body = json!({ "selectors": ["0"], "layout_source": "wanted" });
    let blocked = host.begin_with(&body).await.unwrap_err();
    assert_eq!(blocked.code, Code::Blocked, "{blocked:?}");
    let named = format!("lease {} of", granted.lease.id);
    assert!(blocked.causes.iter().any(|cause| cause.contains(&named)), "{blocked:?}");
    // Maintenance considers leases too.
    let refused = host.post::<Value>("/v1/maintenance/enter", &json!({})).await.unwrap_err();
    assert_eq!(refused.code, Code::Blocked, "{refused:?}");
    assert!(refused.causes.iter().any(|cause| cause.contains(&named)), "{refused:?}");
    assert_eq!((host.gpus.layout(0), host.leases().await[0].state), (before, LeaseState::Active));
    host.release(&granted).await;
    host.wait_until_ended(&granted).await;
    let begun = host.begin_with(&body).await.expect("nothing is leased");
    assert_eq!(host.ended(&begun).await.state, OperationState::Done);
    assert_eq!(host.gpus.instances(0), ["7g.80gb@0"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lease_numbers_do_not_repeat_after_a_lost_database() {
    let host = whole_gpus(2);
    let gpushd = host.start(WHOLE).await;
    let first = gpushd.lease(0, &whole("all", 1)).await.expect("a lease").lease.id;
    gpushd.kill();
    for file in ["gpush.db", "gpush.db-wal", "gpush.db-shm"] {
        let _may_be_absent = fs::remove_file(host.state_directory().join(file));
    }
    let gpushd = host.start(WHOLE).await;
    assert!(gpushd.leases().await.is_empty() && gpushd.gpus().await.len() == 2);
    let held = gpushd.lease(0, &whole("all", 1)).await.unwrap_err();
    assert!(matches!(held.code, Code::Blocked | Code::Conflict), "nothing is granted before `recover`: {held:?}");
    gpushd.post::<Value>("/v1/recover", &json!({ "reason": "a test" })).await.expect("the loss is accepted");
    let next = gpushd.lease(0, &whole("all", 1)).await.expect("a lease");
    assert!(next.lease.id > first, "{} and {first}", next.lease.id);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gangs_for_the_same_gpus_are_granted_one_by_one() {
    let host = whole_gpus(2).start(WHOLE).await;
    let body = waiting(whole("all", 2));
    let gang = async || {
        for _ in 0..5 {
            let granted = host.lease(0, &body).await.expect("both GPUs");
            assert_eq!(granted.lease.members.len(), 2);
            host.release(&granted).await;
        }
    };
    tokio::join!(gang(), gang(), gang());
}

/// Leases and layout changes of one GPU begin at the same moment, in a random order.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_lease_and_operation_get_different_devices() {
    let config = "[[gpu]]\nmatch = [\"all\"]\nmode = \"mig\"\nlayout = [\"7g.80gb\"]\n";
    let host = ScriptedHost::new("dgx-a100", 2).start_with_layouts(config).await;
    host.until_layouts_are_settled().await;
    let run = async |gpu: usize| {
        let name = gpu.to_string();
        let (mut leased, mut changed, mut refused) = (0, 0, 0);
        for round in 0..80_u32 {
            // The operation replaces the current layout with the other layout. The lease request names a profile of the
            // current layout.
            let (profile, other) =
                if host.gpus.instances(gpu).len() == 1 { ("7g.80gb", ["3g.40gb*2"]) } else { ("3g.40gb", ["7g.80gb"]) };
            let lease = json!({ "share": { "kind": "mig_profile", "profile": profile }, "selectors": [name] });
            let ask = async {
                if round % 3 == 0 {
                    tokio::task::yield_now().await;
                }
                host.lease(0, &lease).await
            };
            let change = async {
                if round % 3 == 1 {
                    tokio::task::yield_now().await;
                }
                match host.begin(&[&name], &other, &json!({ "once": true })).await {
                    Ok(operation) => Ok(host.ended(&operation).await),
                    Err(error) => Err(error),
                }
            };
            let (granted, operation) = tokio::join!(ask, change);
            match granted {
                Ok(granted) => {
                    leased += 1;
                    let target = Some(&granted.lease.members[0].target);
                    let exists = host.gpus.alter(gpu, |reading| {
                        let instances = reading.mig.iter().flat_map(|mig| &mig.instances);
                        instances.flat_map(|one| &one.compute).any(|compute| compute.uuid.as_ref() == target)
                    });
                    assert!(exists, "GPU {gpu}, round {round}: the device of the lease is gone: {operation:?}");
                    host.release(&granted).await;
                    host.wait_until_ended(&granted).await;
                }
                Err(error) => {
                    let codes = [Code::Blocked, Code::Conflict, Code::UnknownProfile, Code::BadRequest];
                    assert!(codes.contains(&error.code), "GPU {gpu}, round {round}: {error:?}");
                }
            }
            match operation {
                Ok(_) => changed += 1,
                Err(error) => {
                    assert!([Code::Blocked, Code::Conflict].contains(&error.code), "{error:?}");
                    refused += 1;
                }
            }
        }
        (leased, changed, refused)
    };
    let (one, other) = tokio::join!(run(0), run(1));
    let (leased, changed, refused) = (one.0 + other.0, one.1 + other.1, one.2 + other.2);
    println!("160 rounds: {leased} leases, {changed} changes, {refused} changes refused");
    assert!(leased > 10 && changed > 10 && refused > 10, "{leased} {changed} {refused}");
}

/// Fault: with `leases = 1`, a user got eight GPUs with eight subordinate uids, because each uid had its own quota.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn uids_without_a_user_share_one_quota() {
    let quota = "[[quota]]\nusers = [\"user1000\"]\nleases = 3\n[[quota]]\neverybody = true\nleases = 2\n";
    let host = whole_gpus(8).start(&format!("{quota}{WHOLE}")).await;
    let granted = async |uid: u32| match host.lease(uid, &json!({ "duration_s": 600 })).await {
        Ok(_) => true,
        Err(error) => {
            assert_eq!(error.code, Code::Denied, "{error:?}");
            false
        }
    };
    for (uid, expected) in [(4_100_000, true), (4_100_001, true), (4_100_002, false), (4_100_003, false)] {
        assert_eq!(granted(uid).await, expected, "{uid}");
    }
    for expected in [true, true, true, false] {
        assert_eq!(granted(1000).await, expected, "a user of the host has its own quota");
    }
}

/// Fault: gpushd checked the limit of waiting requests only after the search for a placement.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiting_request_beyond_the_quota_is_refused_before_a_search() {
    let host = whole_gpus(1).start(&format!("[[quota]]\neverybody = true\nwaiting = 0\n{WHOLE}")).await;
    // A GPU is free, so a search would find a placement.
    let denied = host.post_as::<LeaseGrant>(user(1000), "/v1/leases", &waiting(json!({ "duration_s": 600 }))).await;
    assert_eq!(denied.unwrap_err().code, Code::Denied);
    host.lease(1000, &json!({ "duration_s": 600 })).await.expect("it need not wait");
}

/// A grant may come after its request has left the queue. Then no lease uses its capacity.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn capacity_of_an_unused_grant_is_free_again() {
    let host = whole_gpus(1).start(WHOLE).await;
    let engine = host.engine.as_ref().expect("gpushd runs");
    let gpu = host.gpu(0).await.uuid;
    let now = engine.context.state.now();
    let members = vec![LeaseMember {
        target: gpu.clone().into(),
        gpu_uuid: gpu,
        share: MemberShare::Whole,
        memory_mib: 1,
        gpu_memory_mib: 1,
    }];
    let reservation = Reservation { holder: 0, members: members.clone(), lease: None, end: None };
    let id = engine.context.state.reserve(&now, &now.leases, reservation).expect("nothing has changed");
    let unused = Reserved::new(&engine.scheduler, id, members, None, Vec::new());
    assert_eq!(host.lease(0, &whole("0", 1)).await.unwrap_err().code, Code::Blocked);
    drop(unused);
    host.lease(0, &whole("0", 1)).await.expect("the GPU is free");
}
