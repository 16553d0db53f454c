//! Operations to and from mode `mps`. Each change is one operation, which ends and starts MPS daemons. A reload ends or
//! starts no daemon. A lease on the GPU blocks the operation.

use std::sync::Arc;

use gpush_api::{Code, ComputeMode, LeaseGrant, MpsDaemon, MpsState, MpsStep, OperationState, Phase, Step};
use serde_json::{Value, json};

use super::{INTERVALS, kill, rule, shared};
use crate::lifecycle::in_process::{
    InProcess,
    call_rules::{ANY_CHANGE, CallEffect, CallRule, EndMoment},
    daemons::DaemonStart,
    host::ScriptedHost,
    programs::{UserProgram, own_uid},
    user,
};

const MIG: &str = "mode = \"mig\"\nlayout = [\"3g.40gb*2\"]";
const MPS: &str = "mode = \"mps\"";

async fn in_mode(how: &str) -> InProcess {
    let host = InProcess::start("dgx-h100", 1, &rule(how)).await;
    host.apply_rules(&["0"]).await;
    host
}

/// Returns whether a daemon reports that its rule grants no more leases.
fn grants_nothing(daemon: &MpsDaemon) -> bool {
    daemon.findings.iter().any(|finding| finding.contains("no lease is granted"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn plan_and_refused_apply_probe_the_daemon_once() {
    let host = in_mode(MPS).await;
    host.share("0", json!({})).await.expect("a lease");
    host.reload(&rule(MIG)).await;
    // Each probe sends this command once.
    let probes = || host.host.daemons.count("get_default_client_priority");
    let before = probes();
    let body = json!({ "selectors": ["0"], "layout_source": "wanted" });
    host.post::<Value>("/v1/mig/plan", &body).await.expect("a plan");
    assert_eq!(host.begin_rules(&["0"], None).await.unwrap_err().code, Code::Blocked);
    assert_eq!(probes() - before, 2, "a plan and a refused request");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mode_change_is_one_operation_and_reaches_the_new_mode() {
    let host = in_mode(MPS).await;
    assert_eq!(host.gpus().await[0].compute_mode, Some(ComputeMode::ExclusiveProcess));
    let moves = [
        (MIG, 0, true),
        (MPS, 1, false),
        ("mode = \"exclusive\"", 0, false),
        (MPS, 1, false),
        ("mode = \"timeslice\"", 0, false),
        (MPS, 1, false),
        (MIG, 0, true),
    ];
    for (how, daemons, mig) in moves {
        host.reload(&rule(how)).await;
        assert_ne!(host.gpus().await[0].drift, [] as [String; 0], "{how}: nothing is done by a reload");
        let operation = host.apply_rules(&["0"]).await;
        let plan = &operation.plans[0];
        assert_eq!((plan.starts_mps(), plan.stopped_daemons().next().is_none()), (daemons == 1, daemons == 1), "{how}");
        let words = match (daemons, mig) {
            (1, _) => "whole GPU, shared through MPS",
            (_, false) if how.contains("timeslice") => "whole GPU, time-sliced",
            (_, false) => "whole GPU, not shared through MPS",
            (_, true) => &plan.layout.join(", "),
        };
        assert_eq!(plan.end_state(), words, "{how}");
        let gpu = host.gpus().await.remove(0);
        assert_eq!(gpu.drift, [] as [String; 0], "{how}");
        assert_eq!(host.host.daemons.running(), daemons, "{how}");
        let exclusive = host.gpus.compute_mode(0) == Some(ComputeMode::ExclusiveProcess);
        assert_eq!((exclusive, host.gpus.instances(0).len() == 2), (daemons == 1, mig), "{how}: {gpu:?}");
    }
}

/// A reload changes nothing. gpushd refuses the operation until the lease is released and its client has ended.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reload_ends_no_client_and_a_lease_blocks_the_mode_change() {
    let host = in_mode(MPS).await;
    let pid = host.daemon("0").await.pid;
    let granted = host.share("0", json!({ "percentage": 25 })).await.expect("a lease");
    let client = host.client("0", &granted).await;
    host.reload(&rule(MIG)).await;
    let drift = host.gpus().await.remove(0).drift;
    assert!(drift.iter().any(|one| one.contains("shared through MPS")), "{drift:?}");
    let error = host.begin_rules(&["0"], None).await.unwrap_err();
    assert_eq!((error.code, error.retryable), (Code::Blocked, true), "{error:?}");
    assert!(error.causes.iter().any(|cause| cause.contains(&format!("lease {} of", granted.lease.id))), "{error:?}");
    assert!(error.hint.as_deref().is_some_and(|hint| hint.contains("gpushctl lease end")), "{error:?}");
    let now = host.daemon("0").await;
    assert_eq!((now.pid, now.clients.len()), (pid, 1));
    // The operation waits, and starts when the last client and the last lease have ended.
    let operation = host.begin_rules(&["0"], Some(600)).await.expect("it waits");
    assert!(!operation.state.is_final(), "{operation:?}");
    host.end_client(0, client).await;
    host.release(&granted).await;
    let operation = host.ended(&operation).await;
    assert_eq!(operation.state, OperationState::Done, "{operation:#?}");
    assert_eq!(host.gpus.instances(0).len(), 2);
    host.no_daemon_is_left().await;
}

/// While the first operation runs, gpushd refuses a second one. With `wait_s`, the second one waits.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn conflicting_mode_changes_run_one_after_the_other() {
    let host = in_mode(MIG).await;
    host.host.daemons.start_next(DaemonStart::Slow);
    host.reload(&rule(MPS)).await;
    let first = host.begin_rules(&["0"], None).await.expect("it begins");
    host.until("its daemon has been started", async || (host.host.daemons.running() == 1).then_some(())).await;
    // Another administrator changes the rule back to mode `mig`.
    host.reload(&rule(MIG)).await;
    let error = host.begin_rules(&["0"], None).await.unwrap_err();
    assert!(format!("{error:?}").contains(&first.id) && error.retryable, "{error:?}");
    let second = host.begin_rules(&["0"], Some(600)).await.expect("it waits");
    host.host.daemons.clear_faults();
    // The first operation may succeed, or gpushd may roll it back because its rule has changed.
    assert!(host.ended(&first).await.state.is_final());
    let second = host.ended(&second).await;
    assert_eq!(second.state, OperationState::Done, "{second:#?}");
    assert_eq!((host.gpus.instances(0).len(), host.host.daemons.running()), (2, 0));
    let gpu = host.gpus().await.remove(0);
    assert_eq!((gpu.drift, gpu.compute_mode.unwrap_or_default()), (Vec::new(), ComputeMode::Default));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failed_daemon_start_rolls_the_operation_back() {
    let host = in_mode(MIG).await;
    let before = host.gpus.instances(0);
    host.reload(&rule(MPS)).await;
    host.host.daemons.start_next(DaemonStart::Refused);
    let begun = host.begin_rules(&["0"], None).await.expect("it begins");
    let operation = host.ended(&begun).await;
    assert_eq!(operation.state, OperationState::RolledBack, "{operation:#?}");
    let error = operation.error.expect("the operation has an error");
    assert!(error.message.contains("does not start"), "{error:?}");
    assert_eq!(host.gpus.instances(0), before);
    assert_eq!((host.host.daemons.running(), host.gpus.compute_mode(0)), (0, Some(ComputeMode::Default)));
}

/// An operation that removes one MIG device must not affect the daemon and the client of another device.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn removed_mig_device_ends_only_its_own_daemon() {
    let host = in_mode("mode = \"mig\"\nlayout = [\"3g.40gb@0:mps\", \"3g.40gb@4:mps\"]").await;
    // The operation has ended after the start of both daemons.
    let daemons = host.daemons().await;
    assert!(daemons.len() == 2 && daemons.iter().all(|daemon| daemon.state == MpsState::Ready), "{daemons:#?}");
    assert_eq!(host.gpus.compute_mode(0), Some(ComputeMode::Default), "the mode cannot be combined with MIG");
    let [first, second] = [host.daemon("0:3g.40gb@0").await, host.daemon("0:3g.40gb@4").await];
    for one in [&first, &second] {
        let name = format!("0:{}", one.device.as_deref().expect("a device"));
        let taken: LeaseGrant = host.share(&name, json!({ "percentage": 1 })).await.expect("a lease");
        let visible = taken.environment.iter().find(|(name, _)| name == "CUDA_VISIBLE_DEVICES");
        assert_eq!(visible.map(|(_, uuid)| uuid.as_str()), Some(one.uuid.as_str()));
        host.release(&taken).await;
        host.wait_until_ended(&taken).await;
    }
    let granted = host.share("0:3g.40gb@0", json!({ "percentage": 50 })).await.expect("a lease");
    let client = host.client("0:3g.40gb@0", &granted).await;
    host.reload(&rule("mode = \"mig\"\nlayout = [\"3g.40gb@0:mps\", \"1g.10gb@4\"]")).await;
    let operation = host.apply_rules(&["0"]).await;
    let label = "MIG device 0:3g.40gb@4".to_owned();
    let stop = Step::Mps(MpsStep::StopDaemon { uuid: second.uuid.clone(), label });
    assert_eq!(operation.plans[0].phase(Phase::Before).collect::<Vec<_>>(), [&stop]);
    let now = host.daemon("0:3g.40gb@0").await;
    assert_eq!((now.pid, now.clients.len(), host.host.daemons.running()), (first.pid, 1, 1), "{now:#?}");
    // A device on which a program runs blocks the operation.
    host.reload(&rule("mode = \"mig\"\nlayout = \"none\"")).await;
    let error = host.begin_rules(&["0"], None).await.unwrap_err();
    assert_eq!(error.code, Code::Blocked, "{error:?}");
    drop(client);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mode_change_succeeds_when_the_daemon_is_killed() {
    let host = in_mode(MPS).await;
    host.reload(&rule(MIG)).await;
    kill(host.daemon("0").await.pid.expect("a daemon"));
    host.apply_rules(&["0"]).await;
    assert_eq!(host.host.daemons.running(), 0);
}

/// gpushd ends before or after each driver call of a mode change, in both directions. The next gpushd completes the change
/// or rolls it back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn crash_in_a_mode_change_never_leaves_mig_and_a_daemon() {
    let wanted = json!({ "selectors": ["0"], "layout_source": "wanted" });
    let mut points = 0;
    for (from, to) in [(MPS, MIG), (MIG, MPS)] {
        let host = in_mode(from).await;
        host.reload(&rule(to)).await;
        host.gpus.take_changes();
        host.apply_rules(&["0"]).await;
        let calls = u32::try_from(host.gpus.take_changes().len()).expect("a few");
        for (call, moment) in (0..calls).flat_map(|call| [(call, EndMoment::Before), (call, EndMoment::After)]) {
            let what = format!("{from} to {to}: {moment:?} call {call} of {calls}");
            let host = in_mode(from).await;
            let world = Arc::clone(&host.host);
            host.reload(&rule(to)).await;
            world.gpus.rule(CallRule::on(ANY_CHANGE, 0).after(call).once().with(CallEffect::EndGpushd(moment)));
            let asked = host.begin_post(user(0), "/v1/mig/apply", &wanted);
            host.died().await;
            drop(asked);
            world.gpus.clear_faults();
            let host = world.start(&rule(to)).await;
            host.operations().await;
            let reached = || (world.daemons.running(), world.gpus.layout(0) != ["MIG off"]);
            assert!([(0, false), (0, true), (1, false)].contains(&reached()), "{what}: {:?}", reached());
            // A new request reaches the desired state from every state in between.
            host.apply_rules(&["0"]).await;
            assert_eq!(reached(), if to == MIG { (0, true) } else { (1, false) }, "{what}");
            let mode = if to == MIG { ComputeMode::Default } else { ComputeMode::ExclusiveProcess };
            assert_eq!(world.gpus.compute_mode(0), Some(mode), "{what}");
            points += 1;
        }
    }
    println!("ended at {points} points of mode changes");
    assert!(points >= 12, "{points}");
}

/// If a GPU has no rule any more, gpushd grants no new lease on it. When the last client has ended, gpushd ends the
/// daemon.
#[test]
fn gpu_without_a_rule_is_drained_and_restarted_by_operation() {
    let world = ScriptedHost::new("dgx-h100", 1);
    world.run_until(&rule(MPS), async |host| {
        host.apply_rules(&["0"]).await;
        let granted = host.share("0", json!({ "percentage": 25 })).await.expect("a lease");
        let client = host.client("0", &granted).await;
        host.reload(INTERVALS).await;
        let short = host.daemon("0").await.target;
        let kept = host.daemon_becomes(&short, "without new leases", grants_nothing).await;
        assert_eq!((kept.leases.len(), host.gpus.compute_mode(0)), (1, Some(ComputeMode::ExclusiveProcess)));
        host.share("0", json!({ "percentage": 1 })).await.expect_err("no new lease is granted");
        host.release(&granted).await;
        assert_eq!(host.daemon(&short).await.clients.len(), 1, "the client may finish");
        host.end_client(0, client).await;
        host.wait_until_ended(&granted).await;
        host.no_daemon_is_left().await;
        host.compute_mode_becomes(0, ComputeMode::Default).await;
        assert!(!host.host.path("mps").join(&short).exists(), "its directory goes with it");
        // The GPU has an MPS rule again. A reload only reports the difference. An operation then applies the rule.
        host.reload(&rule(MPS)).await;
        assert_eq!(host.gpus().await[0].drift, ["it is not shared through MPS yet"]);
        assert_eq!(host.daemons().await, []);
        host.apply_rules(&["0"]).await;
        assert_eq!(host.daemon_reaches("0", MpsState::Ready).await.leases, []);
    });
    // The rule is removed while gpushd does not run. The next gpushd ends the daemon.
    world.run_until(INTERVALS, async |host| {
        host.no_daemon_is_left().await;
        host.compute_mode_becomes(0, ComputeMode::Default).await;
    });
}

/// The present lease stays active until it is released. If a request has drained the daemon, the daemon does not block the
/// mode change.
#[test]
fn target_without_mps_rule_grants_no_lease_and_can_change_mode() {
    let world = ScriptedHost::new("dgx-h100", 1);
    world.run_until(&rule(MPS), async |host| {
        host.apply_rules(&["0"]).await;
        host.share("0", json!({ "percentage": 25 })).await.expect("a lease");
        host.reload(&rule("mode = \"timeslice\"")).await;
        let refused = host.share("0", json!({ "percentage": 1 })).await.expect_err("no new lease is granted");
        assert_eq!(refused.code, Code::Unsupported, "{refused:?}");
        assert!(refused.causes.iter().any(|cause| cause.contains("`timeslice` when L1 ends")), "{refused:?}");
        assert!(grants_nothing(&host.daemon("0").await));
    });
    // After a restart of gpushd, the lease is still active.
    world.run_until(&rule("mode = \"timeslice\""), async |host| {
        let kept = host.daemon_becomes("0", "listed", |daemon| daemon.gpu.is_some()).await;
        assert!(super::is_open(&kept));
        for verb in ["start", "restart"] {
            let refused = host.act("0", verb, json!({})).await.unwrap_err();
            assert_eq!(refused.code, Code::Conflict, "{verb}: {refused:?}");
        }
        let refused = host.act("0", "settings", json!({ "percentage": 10 })).await.unwrap_err();
        assert_eq!(refused.code, Code::Conflict, "{refused:?}");
        host.post::<Value>("/v1/leases/L1/release", &json!({})).await.expect("it is released");
        // A drain does not change the desired state. So a request for all GPUs also changes the mode of this GPU.
        host.until("the drain", async || host.act("0", "drain", json!({})).await.ok()).await;
        host.until("the lease and the daemon have ended", async || {
            (host.leases().await.is_empty() && host.host.daemons.running() == 0).then_some(())
        })
        .await;
        host.apply_rules(&["all"]).await;
        let gpu = host.gpus().await.remove(0);
        assert_eq!((gpu.drift, gpu.compute_mode), (Vec::new(), Some(ComputeMode::Default)));
        host.no_daemon_is_left().await;
    });
}

/// An operation changes two GPUs. If one of the daemons cannot start, gpushd rolls both GPUs back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn started_daemon_is_rolled_back_when_another_fails_to_start() {
    let config = |mode: &str| shared("\"0-1\"", "").replace("\"mps\"", &format!("\"{mode}\""));
    let mut gpus = gpush_core::preset::gpus("dgx-h100").expect("a preset");
    gpus.truncate(2);
    // The names of the directories differ.
    gpus[1].uuid = gpus[1].uuid.as_str().replacen("0000", "1111", 1).into();
    let host = ScriptedHost::with(&gpus).start(&config("exclusive")).await;
    host.apply_rules(&["0-1"]).await;
    // A file at the path of the second daemon's directory, so that this daemon cannot start.
    let second = host.gpus().await.remove(1).uuid;
    let short = gpush_core::sharing::short_name(second.as_target(), &std::collections::BTreeSet::new());
    let file = host.host.path("mps").join(&short);
    std::fs::write(&file, "").expect("a file");
    host.reload(&config("mps")).await;
    let begun = host.begin_rules(&["0-1"], None).await.expect("it begins");
    let operation = host.ended(&begun).await;
    assert_eq!(operation.state, OperationState::RolledBack, "{operation:#?}");
    let error = operation.error.expect("an error");
    assert!(error.message.contains("GPU 1"), "the error names the GPU: {error:?}");
    host.no_daemon_is_left().await;
    for gpu in 0..2 {
        host.compute_mode_becomes(gpu, ComputeMode::Default).await;
    }
    std::fs::remove_file(&file).expect("the file can be removed");
    host.apply_rules(&["0-1"]).await;
    assert_eq!(host.host.daemons.running(), 2);
}

/// A client connects after the operation was planned, while the operation stops the daemon of another GPU. The daemon is
/// not stopped under the client.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn daemon_with_a_client_since_the_plan_is_not_stopped() {
    let config = |mode: &str| {
        let patient = INTERVALS.replace("mps.stop=2s", "mps.stop=600s");
        format!("{patient}[[gpu]]\nmatch = \"0-1\"\n{mode}\n")
    };
    let mut gpus = gpush_core::preset::gpus("dgx-h100").expect("a preset");
    gpus.truncate(2);
    // The names of the directories differ.
    gpus[1].uuid = gpus[1].uuid.as_str().replacen("0000", "1111", 1).into();
    let host = ScriptedHost::with(&gpus).start(&config(MPS)).await;
    host.apply_rules(&["0-1"]).await;
    let (first, second) = (host.daemon("0").await, host.daemon("1").await);
    host.reload(&config(MIG)).await;
    let daemons = &host.host.daemons;
    daemons.ignore_quit();
    let begun = host.begin_rules(&["0-1"], None).await.expect("it begins");
    host.until("the end of the first daemon is requested", async || (daemons.count("quit") > 0).then_some(())).await;
    let client = UserProgram::sleep(own_uid());
    host.connect("1", &client).await;
    kill(first.pid.expect("it runs"));
    let ended = host.ended(&begun).await;
    let error = ended.error.clone().expect("an error");
    assert_eq!((ended.state, error.code), (OperationState::RolledBack, Code::Blocked), "{ended:#?}");
    assert!(error.message.contains("is in use now"), "{error:?}");
    let after = host.daemon("1").await;
    assert_eq!((after.pid, after.clients.len()), (second.pid, 1));
    host.end_client(1, client).await;
    daemons.kill_servers(after.pid.expect("it runs"));
}
