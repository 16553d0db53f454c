//! Actions of administrators on a daemon: stop, restart, settings, and maintenance of the host.

use gpush_api::{AuditRecord, Code, ComputeMode, GpuPlan, MpsDaemon, MpsState};
use serde_json::{Value, json};

use super::{is_open, kill, rule, shared};
use crate::lifecycle::in_process::{InProcess, daemons::DaemonStart, host::ScriptedHost, programs::UserProgram};

/// Without a check of leases, `stop` would end the daemon, and a program of the lease that has not connected yet would
/// run without MPS.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lease_without_client_blocks_stop_and_restart() {
    let host = InProcess::with_daemon("").await;
    let pid = host.daemon("0").await.pid;
    let granted = host.share("0", json!({ "percentage": 20 })).await.expect("a lease");
    let id = granted.lease.id.to_string();
    for verb in ["stop", "restart"] {
        let refused = host.act("0", verb, json!({})).await.unwrap_err();
        assert_eq!((refused.code, refused.retryable), (Code::Blocked, true), "{verb}: {refused:?}");
        assert!(refused.message.contains("1 lease is in use"), "{verb}: {refused:?}");
        assert!(refused.causes.iter().any(|cause| cause.contains(&id)), "{verb}: {refused:?}");
        assert!(refused.hint.as_ref().is_some_and(|hint| hint.contains(&id)), "{verb}: {refused:?}");
        assert_eq!(host.daemon("0").await.pid, pid, "{verb}");
    }
    host.release(&granted).await;
    host.wait_until_ended(&granted).await;
    host.act("0", "stop", json!({})).await.expect("it is stopped");
    host.daemon_reaches("0", MpsState::Stopped).await;
}

/// gpushd probes the daemon before a stop, so it finds a client that connected after the last probe.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_since_the_last_probe_is_found_before_a_stop() {
    let host = InProcess::with_daemon("").await;
    let granted = host.share("0", json!({})).await.expect("a lease");
    let mut client = host.client("0", &granted).await;
    let refused = async |verb: &str| {
        let refused = host.act("0", verb, json!({})).await.unwrap_err();
        assert_eq!(refused.code, Code::Blocked, "{verb}: {refused:?}");
        assert!(refused.causes.iter().any(|cause| cause.contains(&format!("pid {}", client.pid()))), "{refused:?}");
        assert!(refused.hint.as_ref().is_some_and(|hint| hint.contains("mps stop 0 --wait")), "{refused:?}");
        host.daemon("0").await
    };
    for verb in ["stop", "restart"] {
        let now = refused(verb).await;
        assert!(now.state == MpsState::Ready && is_open(&now), "{verb}: access is open again: {now:#?}");
    }
    host.release(&granted).await;
    for verb in ["stop", "restart"] {
        assert_eq!(refused(verb).await.state, MpsState::Ready, "{verb}: a client without a lease counts, too");
    }
    assert!(client.lives());
}

#[test]
fn stopped_daemon_stays_stopped_until_it_is_started() {
    let world = ScriptedHost::new("dgx-h100", 1);
    let config = shared("\"0\"", "");
    world.run_until(&config, async |host| {
        host.apply_rules(&["0"]).await;
        let first = host.daemon("0").await;
        // A restart of a daemon with a client needs `force`, and starts another daemon.
        let granted = host.share("0", json!({})).await.expect("a lease");
        let client = host.client("0", &granted).await;
        host.act("0", "restart", json!({ "force": true })).await.expect("it is restarted");
        let second =
            host.daemon_becomes("0", "ready again", |now| now.state == MpsState::Ready && now.pid != first.pid).await;
        assert_eq!((second.leases.len(), host.host.daemons.running()), (1, 1), "a lease outlives its daemon");
        host.end_client(0, client).await;
        host.act("0", "stop", json!({ "force": true })).await.expect("it is stopped");
        host.daemon_reaches("0", MpsState::Stopped).await;
    });
    world.run_until(&config, async |host| {
        host.daemon_becomes("0", "known", |daemon| daemon.gpu.is_some()).await;
        host.until("the hint names the command that starts it", async || {
            let refused = host.share("0", json!({})).await.expect_err("the daemon is stopped");
            refused.hint.filter(|hint| hint.contains("gpushctl mps start 0"))
        })
        .await;
        assert_eq!((host.daemon("0").await.state, host.host.daemons.running()), (MpsState::Stopped, 0));
        host.act("0", "start", json!({})).await.expect("it is started");
        let third = host.daemon_reaches("0", MpsState::Ready).await;
        assert_eq!((third.leases.len(), host.host.daemons.running()), (1, 1));
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn settings_are_checked_recorded_and_end_with_their_rule() {
    let host = InProcess::with_daemon("").await;
    let granted = host.share("0", json!({})).await.expect("a lease");
    let _client = host.client("0", &granted).await;
    let answer = host.act("0", "settings", json!({ "percentage": 33.3, "memory_limit_mib": 1536 })).await.expect("set");
    assert_eq!(
        answer["daemon"]["effective_settings"],
        json!({ "percentage": 33.3, "memory_limit_mib": 1536, "priority": "normal" })
    );
    let trail: Vec<AuditRecord> = host.get("/v1/audit").await;
    let set = trail.iter().find(|one| one.action == "mps.set").expect("a record");
    assert_eq!(set.detail["percentage"], 33.3, "{set:?}");
    assert_eq!((&set.detail["memory_limit_mib"], set.detail.get("priority")), (&json!(1536), None));
    let reaches = answer["reaches"].to_string();
    assert!(
        reaches.contains("the clients that run now (1)") && reaches.contains("keeps its memory limit"),
        "{reaches}"
    );
    for (bad, why) in [
        (json!({ "percentage": 0 }), "percentage"),
        (json!({ "percentage": 101 }), "percentage"),
        (json!({ "percentage": "NaN" }), "percentage"),
        (json!({ "percentage": null, "memory_limit_mib": 0 }), "memory"),
        (json!({ "memory_limit_mib": "1.5G" }), "memory"),
        (json!({ "memory_limit_mib": 80 * 1024 }), "memory"),
        (json!({ "memory_limit_mib": u64::MAX }), "memory"),
    ] {
        let error = host.act("0", "settings", bad.clone()).await.unwrap_err();
        assert_eq!(error.code, Code::BadRequest, "{bad}: {error:?}");
        assert!(format!("{error:?}").to_lowercase().contains(why), "{bad}: {error:?}");
    }
    let now = host.daemon("0").await;
    assert_eq!(now.rule.as_ref().map(|rule| rule.percentage.to_string()).as_deref(), Some("100"));
    assert_eq!(now.in_force.map(|settings| settings.percentage.to_string()).as_deref(), Some("33.3"));
    // The server has been started with the limit from before.
    let reported = "an MPS server was started with no memory limit; the limit cannot change";
    assert!(now.findings.iter().any(|one| one.starts_with(reported)), "{:?}", now.findings);
    host.reload(&shared("\"0\"", "mps = { percentage = 60 }\n")).await;
    let other = host
        .daemon_becomes("0", "with the settings of the new rule", |daemon| {
            daemon.in_force.as_ref().is_some_and(|settings| settings.percentage.to_string() == "60")
        })
        .await;
    assert_eq!((other.pid, other.rule, other.wanted.settings.memory_limit_mib), (now.pid, None, None));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_actions_are_both_executed() {
    let host = InProcess::with_daemon("").await;
    for round in 0..20 {
        let percentage = 10 + round;
        let (stopped, set) = tokio::join!(
            host.act("0", "stop", json!({})),
            host.act("0", "settings", json!({ "percentage": percentage }))
        );
        stopped.and(set).expect("both succeed");
        let stopped = host.daemon_reaches("0", MpsState::Stopped).await;
        assert_eq!(stopped.wanted.settings.percentage.to_string(), percentage.to_string());
        host.act("0", "start", json!({})).await.expect("it is started");
        let started = host.daemon_reaches("0", MpsState::Ready).await;
        let effective = started.in_force.expect("settings").percentage.to_string();
        assert_eq!(effective, percentage.to_string(), "after a stop and a start");
    }
    host.act("0", "settings", json!({ "clear": true })).await.expect("cleared");
    let reset = host.daemon("0").await;
    assert_eq!((reset.rule, reset.wanted.settings.percentage.to_string()), (None, "100".to_owned()));
    for round in 0..10 {
        host.act("0", "settings", json!({ "clear": true })).await.expect("cleared");
        let (one, other) = tokio::join!(
            host.act("0", "settings", json!({ "percentage": 30 })),
            host.act("0", "settings", json!({ "memory_limit_mib": 4096 }))
        );
        one.and(other).expect("both succeed");
        let had = host.daemon("0").await.wanted.settings;
        let both = (had.percentage.to_string(), had.memory_limit_mib.is_some());
        assert_eq!(both, ("30".to_owned(), true), "round {round}: {had:?}");
    }
}

/// A stop request often arrives before the daemon has begun to listen. gpushd then repeats `quit` and does not kill the
/// daemon.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn daemon_that_does_not_listen_yet_is_stopped_without_sigkill() {
    let host = InProcess::start("dgx-h100", 1, &shared("\"0\"", "").replace("mps.stop=2s", "mps.stop=600s")).await;
    host.apply_rules(&["0"]).await;
    for _ in 0..3 {
        host.act("0", "stop", json!({})).await.expect("it is stopped");
        host.daemon_reaches("0", MpsState::Stopped).await;
        host.host.daemons.start_next(DaemonStart::Slow);
        host.act("0", "start", json!({})).await.expect("it is started");
        host.act("0", "stop", json!({})).await.expect("it is stopped");
        host.daemon_reaches("0", MpsState::Stopping).await;
        host.host.daemons.clear_faults();
        host.daemon_reaches("0", MpsState::Stopped).await;
        host.act("0", "start", json!({})).await.expect("it is started");
        host.daemon_reaches("0", MpsState::Ready).await;
    }
    let trail: Vec<AuditRecord> = host.get("/v1/audit?limit=1000").await;
    assert!(trail.iter().all(|record| record.action != "mps.kill"), "{trail:#?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn host_in_maintenance_grants_no_lease_and_starts_no_daemon() {
    let host = InProcess::with_daemon("").await;
    let pid = host.daemon("0").await.pid.expect("a daemon");
    host.post::<Value>("/v1/maintenance/enter", &json!({ "reason": "driver 570" })).await.expect("it is entered");
    let refused = host.share("0", json!({})).await.expect_err("no new lease is granted");
    assert_eq!(refused.code, Code::Conflict, "{refused:?}");
    assert!(refused.message.contains("is in maintenance"), "{refused:?}");
    kill(pid);
    let waits = host
        .daemon_becomes("0", "waiting for the end of maintenance", |daemon| {
            daemon.reasons.iter().any(|reason| reason.contains("the host is in maintenance"))
        })
        .await;
    assert_eq!((waits.state, waits.pid, host.host.daemons.running()), (MpsState::BackingOff, None, 0));
    let refused = host.act("0", "restart", json!({ "force": true })).await.unwrap_err();
    assert_eq!(refused.code, Code::Conflict, "{refused:?}");
    host.post::<Value>("/v1/maintenance/leave", &json!({})).await.expect("it is left");
    host.daemon_becomes("0", "ready", |daemon| daemon.state == MpsState::Ready && daemon.findings.is_empty()).await;
    host.until("a lease", async || host.share("0", json!({})).await.ok()).await;
}

/// Fault: an operation to mode `mps` started the daemon although programs without MPS used the GPU. The clients of the
/// daemon then failed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn program_without_mps_delays_a_change_to_mode_mps() {
    let host = InProcess::start("dgx-h100", 1, &rule("mode = \"exclusive\"")).await;
    host.apply_rules(&["0"]).await;
    let program = UserProgram::sleep(super::own_uid());
    host.gpus.use_first_device(0, program.pid());
    host.reload(&shared("\"0\"", "")).await;
    let plans: Value = host
        .post("/v1/mig/plan", &json!({ "selectors": ["0"], "layout_source": "wanted" }))
        .await
        .expect("a plan with an error");
    let plan: GpuPlan = serde_json::from_value(plans["plans"][0].clone()).expect("a plan");
    let planned = plan.error.expect("an error");
    let refused = host.begin_rules(&["0"], None).await.unwrap_err();
    for error in [planned, refused] {
        assert_eq!((error.code, error.retryable), (Code::Blocked, true), "{error:?}");
        assert!(error.message.starts_with("cannot start the MPS daemon of GPU 0 while it is in use"), "{error:?}");
        let named = format!("held by pid {} (", program.pid());
        assert!(error.causes.iter().any(|cause| cause.starts_with(&named)), "{error:?}");
    }
    let operation = host.begin_rules(&["0"], Some(600)).await.expect("it waits");
    assert!(!operation.state.is_final() && host.host.daemons.running() == 0, "{operation:?}");
    assert_eq!(host.gpus.compute_mode(0), Some(ComputeMode::Default));
    host.gpus.end_process(0, program.pid());
    let operation = host.ended(&operation).await;
    assert_eq!(operation.state, gpush_api::OperationState::Done, "{operation:#?}");
    host.daemon_reaches("0", MpsState::Ready).await;
}

/// The settings of a request end when another rule applies at the next start. The deadline of a drain remains.
#[test]
fn settings_end_with_their_rule_and_drain_deadlines_persist() {
    let world = ScriptedHost::new("dgx-h100", 2);
    let mut client = None;
    world.run_until(&shared("\"0-1\"", ""), async |host| {
        host.apply_rules(&["0-1"]).await;
        host.act("0", "settings", json!({ "percentage": 30 })).await.expect("set");
        let granted = host.share("1", json!({})).await.expect("a lease");
        client = Some(host.client("1", &granted).await);
        host.act("1", "drain", json!({ "end_after_s": 2 })).await.expect("it drains");
        host.daemon_reaches("1", MpsState::Draining).await;
    });
    world.run_until(&shared("\"0-1\"", "mps = { percentage = 80 }\n"), async |host| {
        let is_so = |daemon: &MpsDaemon| {
            daemon.rule.is_none() && daemon.in_force.as_ref().is_some_and(|now| now.percentage.to_string() == "80")
        };
        host.daemon_becomes("0", "with the settings of its rule", is_so).await;
        host.daemon_reaches("1", MpsState::Stopped).await;
    });
    assert!(client.is_some_and(|mut client| client.lives()), "only its work on the GPU has ended");
}
