//! Leases of MPS targets: grants, refusals, and ends.

use std::os::unix::fs::PermissionsExt as _;

use axum::{body::Body, extract::Request};
use gpush_api::{Code, EndReason, LeaseGrant, LeaseState, MpsState, MpsUsers};
use http_body_util::BodyExt;
use hyper::StatusCode;
use serde_json::{Value, json};
use tower_service::Service;

use super::{is_open, is_open_at, kill, share, shared};
use crate::lifecycle::in_process::{
    InProcess,
    daemons::DaemonStart,
    host::ScriptedHost,
    programs::{UserProgram, own_uid, skips_other_users},
    user,
};

impl InProcess {
    /// Requests a lease with an idempotency key.
    async fn keyed(&self, key: &str, target: &str, body: Value) -> (StatusCode, Value) {
        let request = Request::builder().method("POST").uri("/v1/leases").header("content-type", "application/json");
        let request = request.header("idempotency-key", key).body(Body::from(share(target, &body).to_string()));
        let mut request = request.expect("a request");
        request.extensions_mut().insert(user(0));
        let response = self.router.clone().call(request).await.unwrap_or_else(|never| match never {});
        let (status, body) = (response.status(), response.into_body().collect().await.expect("a body").to_bytes());
        (status, serde_json::from_slice(&body).expect("JSON"))
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lease_capacity_is_free_after_its_last_client() {
    let host = InProcess::with_daemon("").await;
    let body = json!({ "percentage": 25, "memory_limit_mib": 2048, "duration_s": 7200 });
    let granted = host.share("0", body).await.expect("a lease");
    let id = granted.lease.id;
    assert_eq!((granted.lease.state, granted.lease.holder.uid), (LeaseState::Active, own_uid()));
    let names: Vec<&str> = granted.environment.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(
        names,
        [
            "CUDA_VISIBLE_DEVICES",
            "CUDA_DEVICE_ORDER",
            "CUDA_MPS_PIPE_DIRECTORY",
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
            "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT",
            "CUDA_MPS_CLIENT_PRIORITY",
            "GPUSH_NOTICE",
            "GPUSH_LEASE",
        ]
    );
    assert!(granted.warnings[0].contains("are not enforced"), "{granted:?}");
    let path = format!("/v1/leases/{id}/environment");
    assert_eq!(host.get::<LeaseGrant>(&path).await.environment, granted.environment);
    let client = host.client("0", &granted).await;
    let seen = host.daemon("0").await;
    assert_eq!((seen.leases.len(), seen.granted_percent, seen.clients.len()), (1, 25, 1));
    assert_eq!(seen.clients[0].lease, Some(id.to_string()));
    // A released lease keeps its capacity until its client has ended. So the next user never shares the daemon with
    // this client.
    host.release(&granted).await;
    let waits = format!("process {} ", client.pid());
    host.until("what it waits for", async || {
        let lease: gpush_api::Lease = host.get(&format!("/v1/leases/{id}")).await;
        assert_eq!(lease.state, LeaseState::Releasing);
        lease.waits_for.iter().any(|sentence| sentence.starts_with(&waits)).then_some(())
    })
    .await;
    let full = host.share("0", json!({ "percentage": 80 })).await.expect_err("the client has a quarter");
    assert_eq!((full.code, full.retryable), (Code::Blocked, true), "{full:?}");
    assert!(full.causes.iter().any(|cause| cause.contains(&format!("lease {id} of"))), "{full:?}");
    let releasing = host.daemon("0").await;
    assert_eq!((releasing.leases.len(), releasing.clients.len()), (1, 1));
    assert!(!is_open(&releasing), "no new client is admitted");
    assert_eq!(host.get_as::<Value>(user(0), &path).await.unwrap_err().code, Code::Conflict);
    host.end_client(0, client).await;
    assert_eq!(host.wait_until_ended(&granted).await.reason, Some(EndReason::Released));
    // A second release is not an error.
    host.release(&granted).await;
    host.share("0", json!({ "percentage": 80 })).await.expect("a lease");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lease_exceeding_the_rule_is_refused_and_a_key_gets_one_lease() {
    let host = InProcess::with_daemon("mps = { percentage = 60, total_percentage = 100, max_clients = 3 }\n").await;
    let bad = host.share("0", json!({ "percentage": 61 })).await.unwrap_err();
    assert_eq!(bad.code, Code::BadRequest, "{bad:?}");
    for memory in [json!(80 * 1024), json!(u64::MAX), json!(0), json!("1.5G")] {
        let bad = host.share("0", json!({ "memory_limit_mib": memory })).await.unwrap_err();
        assert_eq!(bad.code, Code::BadRequest, "{memory}: {bad:?}");
    }
    host.share("0", json!({ "percentage": 60 })).await.expect("a lease");
    let full = host.share("0", json!({ "percentage": 40.1 })).await.unwrap_err();
    assert_eq!((full.code, full.retryable), (Code::Blocked, true), "{full:?}");
    host.share("0", json!({ "percentage": 39 })).await.expect("a lease");
    let one = host.keyed("once", "0", json!({ "percentage": 1 })).await;
    let same = host.keyed("once", "0", json!({ "percentage": 1 })).await;
    assert_eq!(one.1["lease"]["id"], same.1["lease"]["id"], "the same request, sent again: {one:?}");
    let other = host.keyed("once", "0", json!({ "percentage": 0.5 })).await;
    assert_eq!(other.1["code"], "conflict", "another request with the same key: {other:?}");
    let most = host.share("0", json!({ "percentage": 0.1 })).await.unwrap_err();
    assert_eq!(most.code, Code::Blocked, "as many leases as clients: {most:?}");
    assert_eq!(host.daemon("0").await.leases.len(), 3);
    for wrong in [
        json!({ "duration_s": 0 }),
        json!({ "duration_s": -1 }),
        json!({ "duration_s": u64::MAX }),
        json!({ "process": 4_200_000 }),
        json!({ "percentage": 0 }),
        json!({ "percentage": 101 }),
        json!({ "percents": 1 }),
        json!({ "count": 2 }),
    ] {
        assert_eq!(host.share("0", wrong.clone()).await.unwrap_err().code, Code::BadRequest, "{wrong}");
    }
    assert_eq!(host.share("1", json!({})).await.unwrap_err().code, Code::NotFound);
    assert_eq!(host.daemon("0").await.leases.len(), 3);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn key_sent_for_several_targets_at_once_gets_one_lease() {
    let host = InProcess::start("dgx-h100", 4, &shared("\"0-3\"", "")).await;
    host.apply_rules(&["0-3"]).await;
    for round in 0..10 {
        let key = format!("round-{round}");
        let take = |target: &'static str| host.keyed(&key, target, json!({ "percentage": 1 }));
        let (a, b, c, d) = tokio::join!(take("0"), take("1"), take("2"), take("3"));
        let granted = [a, b, c, d].iter().filter(|(status, _)| *status == 200).count();
        assert_eq!(granted, 1, "round {round}");
    }
    let leases: usize = host.daemons().await.iter().map(|daemon| daemon.leases.len()).sum();
    assert_eq!(leases, 10);
}

#[test]
fn lease_ends_with_process_duration_or_boot() {
    let world = ScriptedHost::new("dgx-h100", 1);
    let config = shared("\"0\"", "");
    world.run_until(&config, async |host| {
        host.apply_rules(&["0"]).await;
        let process = UserProgram::sleep(own_uid());
        let of = async |body: Value| host.share("0", body).await.expect("a lease");
        let bound = of(json!({ "percentage": 1, "process": process.pid() })).await;
        let short = of(json!({ "percentage": 2, "duration_s": 1 })).await;
        let lasting = of(json!({ "percentage": 3 })).await;
        assert_eq!(host.daemon("0").await.leases.len(), 3);
        drop(process);
        assert_eq!(host.wait_until_ended(&bound).await.reason, Some(EndReason::Released));
        assert_eq!(host.wait_until_ended(&short).await.reason, Some(EndReason::Expired));
        let left = host.daemon("0").await.leases;
        assert_eq!(left.iter().map(|lease| lease.id).collect::<Vec<_>>(), [lasting.lease.id]);
    });
    // Leases survive a restart of gpushd, but end with a reboot of the host.
    world.run_until(&config, async |host| {
        let daemon = host.daemon_reaches("0", MpsState::Ready).await;
        assert_eq!(daemon.leases.len(), 1);
        kill(daemon.pid.expect("a daemon"));
    });
    world.reboot();
    world.run_until(&config, async |host| {
        let ended: gpush_api::Lease = host.get("/v1/leases/L3").await;
        assert_eq!((ended.state, ended.reason), (LeaseState::Ended, Some(EndReason::Rebooted)));
        assert_eq!(host.leases().await, []);
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unready_daemon_gets_no_client_and_no_lease() {
    let host = InProcess::with_daemon("").await;
    host.share("0", json!({ "percentage": 50 })).await.expect("a lease");
    let ready = host.daemon("0").await;
    assert!(is_open(&ready));
    host.host.daemons.start_next(DaemonStart::Slow);
    kill(ready.pid.expect("a pid"));
    let starting = host.daemon_reaches("0", MpsState::Starting).await;
    assert!(!is_open(&starting), "closed while it starts");
    let refused = host.share("0", json!({ "percentage": 10 })).await.expect_err("the daemon is starting");
    assert!(refused.retryable && refused.message.contains("its MPS daemon is starting"), "{refused:?}");
    host.host.daemons.clear_faults();
    let again = host.daemon_reaches("0", MpsState::Ready).await;
    assert!(is_open(&again), "the holder is admitted again");
    assert_eq!((again.failures, again.leases.len(), host.host.daemons.running()), (1, 1, 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn next_user_gets_another_pipe_directory() {
    if skips_other_users("users of an MPS daemon") {
        return;
    }
    let host = InProcess::with_daemon("").await;
    let first = host.share_for(1000, "0", json!({ "percentage": 10 })).await.expect("a lease");
    let client = host.client("0", &first).await;
    let seen = host.daemon("0").await;
    assert_eq!((seen.uid, seen.clients[0].uid, seen.servers[0].uid), (Some(1000), Some(1000), Some(1000)));
    for _ in 0..2 {
        // The lease is active first, and then released while its client runs.
        let refused = host.share_for(1001, "0", json!({})).await.unwrap_err();
        assert_eq!((refused.code, refused.retryable), (Code::Blocked, true), "{refused:?}");
        let named = format!("lease {} of user1000", first.lease.id);
        assert!(refused.causes.iter().any(|cause| cause.contains(&named)), "{refused:?}");
        host.release(&first).await;
    }
    host.end_client(0, client).await;
    host.wait_until_ended(&first).await;
    host.share_for(1001, "0", json!({})).await.expect("a lease");
    let second = host.daemon_reaches("0", MpsState::Ready).await;
    assert_eq!(second.uid, Some(1001));
    assert!(second.pid != seen.pid && second.pipe_directory != seen.pipe_directory, "{second:?}");
    assert!(is_open(&second) && !is_open_at(&seen.pipe_directory.expect("a directory")));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn program_without_support_serves_one_user_at_a_time() {
    let host = InProcess::with_daemon("mps = { users = \"many\" }\n").await;
    let ready = host.daemon("0").await;
    assert_eq!(ready.wanted.users, MpsUsers::One);
    let why = "this target serves one user at a time";
    assert!(ready.findings.iter().any(|finding| finding.contains(why)), "{ready:#?}");
    host.share_for(1000, "0", json!({ "percentage": 10 })).await.expect("a lease");
    let refused = host.share_for(1001, "0", json!({ "percentage": 10 })).await.unwrap_err();
    assert_eq!(refused.code, Code::Blocked, "{refused:?}");
}

/// If the setting `users` changes while the daemon is in use, gpushd reports the change, and applies it only when the
/// daemon is idle.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn change_of_users_waits_until_the_daemon_is_idle() {
    if skips_other_users("an MPS daemon for several users") {
        return;
    }
    let rule = |users: &str| shared("\"0\"", &format!("mps = {{ users = \"{users}\" }}\n"));
    let world = ScriptedHost::new("dgx-h100", 1);
    // This program treats the option for several users in another way than an unknown option.
    let control = world.path("programs/nvidia-cuda-mps-control");
    std::fs::remove_file(&control)
        .and_then(|()| std::os::unix::fs::symlink("/usr/bin/tail", &control))
        .expect("a link");
    let host = world.start(&rule("one")).await;
    host.apply_rules(&["0"]).await;
    let first = host.daemon("0").await;
    let taken = host.share("0", json!({})).await.expect("a lease");
    host.reload(&rule("many")).await;
    let waits = "the new value takes effect when the MPS daemon has no lease and no client";
    let has = |words: &'static str| {
        move |daemon: &gpush_api::MpsDaemon| daemon.findings.iter().any(|one| one.contains(words))
    };
    let reported = host.daemon_becomes("0", "with a finding", has(waits)).await;
    assert_eq!(reported.pid, first.pid);
    host.release(&taken).await;
    let serves_many = |daemon: &gpush_api::MpsDaemon| {
        (daemon.state, daemon.wanted.users) == (MpsState::Ready, MpsUsers::Many) && daemon.pid != first.pid
    };
    let next = host.daemon_becomes("0", "for several users", serves_many).await;
    assert_eq!(next.findings, Vec::<String>::new(), "the setting is no problem");
    let pipes = next.pipe_directory.expect("a pipe directory");
    let mode = std::fs::metadata(&pipes).expect("the pipe directory exists").permissions().mode();
    assert_eq!(mode & 0o007, 0, "the access list admits users");
    // A user of the previous pipe directory cannot connect to the new daemon.
    assert_ne!((next.pid, Some(pipes)), (first.pid, first.pipe_directory));
    // Two users have a lease at the same time.
    for uid in [1000, 1001] {
        host.share_for(uid, "0", json!({ "percentage": 10 })).await.expect("a lease");
    }
}
