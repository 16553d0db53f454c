//! Recovery of an operation after its environment has changed: after a reboot, with another config, without a driver, with
//! a lost GPU, with a new process, or with instances of another program.

use std::sync::Arc;

use gpush_api::{GpuState, Operation, OperationState};
use gpush_nvml::ErrorKind;
use serde_json::{Value, json};

use super::{
    InProcess,
    call_rules::{CREATE, CREATE_COMPUTE, CallEffect, CallRule, DESTROY, EndMoment, SET_MODE},
    host::ScriptedHost,
    user,
};

const CONFIG: &str = "[[gpu]]\nname = \"lab\"\nmatch = [\"0\"]\nmode = \"mig\"\nlayout = [\"2g.20gb\", \"1g.10gb\"]\n";
const BEFORE: &[&str] = &["3g.40gb@4", "2g.20gb@0"];
const AFTER: [&str; 2] = ["4g.40gb@0", "3g.40gb@4"];

fn ends_gpushd(call: &'static str, moment: EndMoment) -> CallRule {
    CallRule::on(call, 0).once().with(CallEffect::EndGpushd(moment))
}

/// Sends an apply request, and waits until a rule has ended gpushd. Returns the id of the operation. gpushd may have ended
/// before it answered.
async fn die_in(gpushd: InProcess, body: &Value) -> String {
    let number = gpushd.operations().await.len() + 1;
    let asked = gpushd.begin_post(user(0), "/v1/mig/apply", body);
    gpushd.died().await;
    drop(asked);
    format!("op-{number}")
}

fn layout(entries: &[&str]) -> Value {
    json!({ "selectors": ["0"], "layout_source": { "entries": entries } })
}

/// Starts gpushd with this config, and begins a change from `BEFORE` to `AFTER`. gpushd ends when it has destroyed the
/// 2g.20gb. Returns the id of the operation.
async fn ended_half_way(host: &Arc<ScriptedHost>, config: &str) -> String {
    let gpushd = host.start_with_layouts(config).await;
    gpushd.until_layouts_are_settled().await;
    assert_eq!(gpushd.apply(&["0"], BEFORE).await.state, OperationState::Done);
    host.gpus.rule(ends_gpushd(CREATE, EndMoment::Before));
    let id = die_in(gpushd, &layout(&AFTER)).await;
    assert_eq!(host.gpus.instances(0), ["3g.40gb@4"]);
    id
}

async fn recovered(gpushd: &InProcess, id: &str) -> Operation {
    gpushd.ended(&gpushd.operation(id).await).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn operation_fails_after_reboot_and_config_layout_is_applied() {
    let host = ScriptedHost::new("dgx-a100", 1);
    let id = ended_half_way(&host, CONFIG).await;
    host.reboot();
    let gpushd = host.start_with_layouts(CONFIG).await;
    let ended = recovered(&gpushd, &id).await;
    assert_eq!(ended.state, OperationState::Failed, "{ended:?}");
    let error = ended.error.expect("a reason");
    assert!(error.message.contains("the host was restarted during the operation"), "{error:?}");
    gpushd.until_layouts_are_settled().await;
    assert_eq!(host.gpus.instances(0).len(), 2);
    let gpu = gpushd.gpu(0).await;
    assert!(gpu.state == GpuState::Ready && gpu.drift.is_empty(), "{gpu:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn resumed_operation_keeps_its_layout_on_the_same_boot() {
    let host = ScriptedHost::new("dgx-a100", 1);
    let id = ended_half_way(&host, CONFIG).await;
    let gpushd = host.start_with_layouts(CONFIG).await;
    let ended = recovered(&gpushd, &id).await;
    assert_eq!(ended.state, OperationState::Done, "{ended:?}");
    assert!(ended.notes[0].contains("gpushd ended while the operation was running"), "{:?}", ended.notes);
    gpushd.until_layouts_are_settled().await;
    assert_eq!(gpushd.operations().await.last().map(|last| last.id.clone()), Some(id));
    assert_eq!(host.gpus.instances(0), AFTER);
}

/// After the recovery, the GPU is managed according to the new config.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn recovery_keeps_its_plan_after_a_config_change() {
    let host = ScriptedHost::new("dgx-a100", 1);
    let id = ended_half_way(&host, "").await;
    let gpushd = host.start("[[gpu]]\nmatch = [\"0\"]\nmode = \"exclusive\"\n").await;
    let ended = recovered(&gpushd, &id).await;
    assert_eq!(ended.state, OperationState::Done, "{ended:?}");
    assert_eq!(host.gpus.instances(0), AFTER);
    gpushd.begin(&["0"], &["none"], &json!({})).await.expect_err("the rule says `exclusive`");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gpu_missing_at_recovery_is_named() {
    let host = ScriptedHost::new("dgx-a100", 2);
    let id = ended_half_way(&host, "").await;
    host.gpus.lose(0);
    let gpushd = host.start("").await;
    let ended = recovered(&gpushd, &id).await;
    assert_eq!(ended.state, OperationState::Failed, "{ended:?}");
    let error = ended.error.expect("a reason");
    assert!(error.causes.iter().any(|cause| cause.contains("GPU 0 (GPU-") && cause.contains("is lost")), "{error:?}");
    assert_eq!(gpushd.apply(&["1"], &["7g.80gb"]).await.state, OperationState::Done);
}

/// If two operations on a GPU start one after the other, the operation that starts later also ends later, even if it was
/// requested first.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn queued_operation_resumes_although_a_later_one_has_ended() {
    let host = ScriptedHost::new("dgx-a100", 1);
    let gpushd = host.start("").await;
    assert_eq!(gpushd.apply(&["0"], &["3g.40gb@4"]).await.state, OperationState::Done);
    host.gpus.use_first_device(0, std::process::id());
    let waiting = gpushd.begin_waiting(&["0"], &["7g.80gb"]).await;
    gpushd.ended_or(&waiting, |now| now.state == OperationState::Waiting).await;
    assert_eq!(gpushd.apply(&["0"], &["3g.40gb@4", "1g.10gb"]).await.state, OperationState::Done);
    host.gpus.rule(ends_gpushd(CREATE, EndMoment::Before));
    host.gpus.end_processes(0);
    gpushd.died().await;
    assert_eq!(host.gpus.instances(0), Vec::<String>::new(), "it ended half way");
    let gpushd = host.start("").await;
    assert_eq!(recovered(&gpushd, &waiting.id).await.state, OperationState::Done);
    assert_eq!(host.gpus.layout(0), ["7g.80gb@0[7g.80gb@0]"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reason_of_a_rollback_survives_a_restart() {
    let host = ScriptedHost::new("dgx-a100", 1);
    let gpushd = host.start("").await;
    assert_eq!(gpushd.apply(&["0"], BEFORE).await.state, OperationState::Done);
    let before = host.gpus.layout(0);
    host.gpus.fail(CREATE, 0, 1, ErrorKind::Unknown);
    // The apply creates no compute instance before the rollback. So gpushd ends when the rollback creates its first one.
    host.gpus.rule(ends_gpushd(CREATE_COMPUTE, EndMoment::Before));
    let id = die_in(gpushd, &layout(&["7g.80gb"])).await;
    assert_ne!(host.gpus.layout(0), before);
    let gpushd = host.start("").await;
    let ended = recovered(&gpushd, &id).await;
    assert_eq!(ended.state, OperationState::RolledBack, "{ended:?}");
    assert_eq!(host.gpus.layout(0), before);
    let error = ended.error.expect("a reason");
    assert!(error.message.contains("creating GPU instance 7g.80gb@0 failed"), "{error:?}");
    assert!(error.causes.iter().any(|cause| cause.contains("gpushd ended")), "{error:?}");
}

/// gpushd restores the part of the previous layout that does not overlap with the instance of the other program.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn instances_of_other_programs_are_kept_by_recovery() {
    let host = ScriptedHost::new("dgx-a100", 1);
    let gpushd = host.start("").await;
    assert_eq!(gpushd.apply(&["0"], &["3g.40gb@0", "3g.40gb@4"]).await.state, OperationState::Done);
    // gpushd ends when it has destroyed both instances.
    host.gpus.rule(ends_gpushd(CREATE, EndMoment::Before));
    let id = die_in(gpushd, &layout(&["7g.80gb"])).await;
    assert_eq!(host.gpus.instances(0), Vec::<String>::new());
    host.gpus.create_by_hand(0, "2g.20gb", 0);
    host.gpus.take_changes();
    let gpushd = host.start("").await;
    let ended = recovered(&gpushd, &id).await;
    assert_eq!(ended.state, OperationState::Failed, "{ended:?}");
    assert_eq!(host.gpus.layout(0), ["2g.20gb@0[2g.20gb@0]", "3g.40gb@4[3g.40gb@0]"]);
    let changes = host.gpus.take_changes();
    assert!(changes.iter().all(|call| !call.starts_with("destroying")), "{changes:?}");
    let error = ended.error.expect("a reason");
    assert!(error.message.contains("was changed by another program"), "{error:?}");
    for says in [
        "2g.20gb@0 (GPU instance",
        "did not exist before the operation, and the operation did not create it",
        "remains: another program created it in the meantime",
        "3g.40gb@0 was not restored: 2g.20gb@0",
    ] {
        assert!(error.causes.iter().any(|cause| cause.contains(says)), "{says}: {error:?}");
    }
    assert_eq!(gpushd.gpu(0).await.state, GpuState::Degraded);
    // gpushd accepts a new request. Its plan takes the instance of the other program into account.
    assert_eq!(gpushd.apply(&["0"], &["7g.80gb"]).await.state, OperationState::Done);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn recovery_keeps_an_instance_that_a_process_has_entered() {
    let host = ScriptedHost::new("dgx-a100", 1);
    let gpushd = host.start("").await;
    assert_eq!(gpushd.apply(&["0"], BEFORE).await.state, OperationState::Done);
    // gpushd ends when it has destroyed one of the two GPU instances.
    host.gpus.rule(ends_gpushd(DESTROY, EndMoment::After));
    let id = die_in(gpushd, &layout(&["7g.80gb"])).await;
    let left = host.gpus.layout(0);
    let start = if left[0].starts_with("3g") { 4 } else { 0 };
    assert!(left.len() == 1 && !left[0].ends_with("[]"), "a process can enter the other instance: {left:?}");
    let kept = host.gpus.instance_at(0, start);
    host.gpus.use_first_device(0, std::process::id());
    let gpushd = host.start("").await;
    let ended = recovered(&gpushd, &id).await;
    assert_eq!(ended.state, OperationState::RolledBack, "{ended:?}");
    assert_eq!(host.gpus.layout(0), ["2g.20gb@0[2g.20gb@0]", "3g.40gb@4[3g.40gb@0]"]);
    assert_eq!(host.gpus.instance_at(0, start), kept, "the instance in use");
}

/// The GPUs have no instances that show how far the change got.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mode_change_without_instances_is_resumed_or_rolled_back() {
    let modes = |host: &ScriptedHost| [0, 1].map(|gpu| host.gpus.layout(gpu) != ["MIG off"]);
    for mode in [true, false] {
        for fails in [false, true] {
            let host = ScriptedHost::new("dgx-h100", 2);
            if mode {
                host.gpus.without_mig();
            }
            let before = modes(&host);
            if fails {
                // gpushd ends when it sets the mode of GPU 0 back.
                host.gpus.rule(CallRule::on(SET_MODE, 1).fails(ErrorKind::InUse));
                host.gpus.rule(ends_gpushd(SET_MODE, EndMoment::Before).after(1));
            } else {
                host.gpus.rule(ends_gpushd(SET_MODE, EndMoment::Before));
            }
            let each = [0, 1].map(|gpu| json!({ "selector": gpu.to_string(), "mig_enabled": mode }));
            let id = die_in(host.start("").await, &json!({ "layout_source": { "per_gpu": each } })).await;
            if fails {
                assert_eq!(modes(&host), [mode, !mode], "it ended on its way back");
            }
            host.gpus.clear_faults();
            let gpushd = host.start("").await;
            let ended = recovered(&gpushd, &id).await;
            let (state, expected) =
                if fails { (OperationState::RolledBack, before) } else { (OperationState::Done, [mode; 2]) };
            assert_eq!((ended.state, modes(&host)), (state, expected), "{mode} {fails}: {ended:?}");
            assert_eq!(gpushd.gpu(0).await.state, GpuState::Ready);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gpus_without_mig_do_not_block_recovery() {
    const WHOLE: &str = "[[gpu]]\nmatch = [\"all\"]\nmode = \"exclusive\"\n";
    for (gpu, moment) in [(2, EndMoment::After), (3, EndMoment::After)] {
        let host = ScriptedHost::of("mixed");
        host.gpus.rule(CallRule::on(SET_MODE, gpu).once().with(CallEffect::EndGpushd(moment)));
        let id = die_in(host.start(WHOLE).await, &json!({ "selectors": ["2-4"], "layout_source": "config" })).await;
        let gpushd = host.start(WHOLE).await;
        let ended = recovered(&gpushd, &id).await;
        assert_eq!(ended.state, OperationState::Done, "{gpu}: {ended:?}");
        assert_eq!([0, 1, 2, 3].map(|gpu| host.gpus.layout(gpu) != ["MIG off"]), [true, true, false, false], "{gpu}");
    }
}

/// gpushd stops without waiting for the operation, and keeps its record.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn recovery_without_a_driver_waits_and_is_reported() {
    let host = ScriptedHost::new("dgx-a100", 1);
    let id = ended_half_way(&host, "").await;
    host.gpus.unload(Some(ErrorKind::DriverNotLoaded));
    let gpushd = host.start("").await;
    let is_interrupted =
        async || Some(gpushd.operation(&id).await).filter(|operation| operation.state == OperationState::Interrupted);
    assert!(gpushd.until("the interrupted operation", is_interrupted).await.ended_at.is_none());
    gpushd.stop().await;
    host.gpus.unload(None);
    let gpushd = host.start("").await;
    assert_eq!(recovered(&gpushd, &id).await.state, OperationState::Done);
}
