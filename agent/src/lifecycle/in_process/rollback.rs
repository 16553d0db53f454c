//! Driver calls fail, the worker dies, or a GPU is lost during an apply. After that, the GPU has the new or the previous
//! layout, as the operation reports, or the GPU is degraded.

use std::sync::Arc;

use gpush_api::{Code, GpuState, HealthStatus, Operation, OperationState, OperationSummary};
use gpush_nvml::ErrorKind;

use super::{
    InProcess,
    call_rules::{ANY_CHANGE, CREATE, CREATE_COMPUTE, CallEffect, CallRule, DESTROY, EndMoment, READ, SET_MODE},
    host::ScriptedHost,
};

const BEFORE: &[&str] = &["2g.20gb@0", "1g.10gb@2", "1g.10gb@3", "3g.40gb@4"];
/// A layout that keeps the 3g.40gb with other compute instances, and replaces all other instances.
const AFTER: &[&str] = &["1c.3g.40gb*2", "4g.40gb"];

async fn started(gpus: usize) -> InProcess {
    InProcess::start("dgx-a100", gpus, "").await
}

/// Applies AFTER once to a GPU with BEFORE. Returns the number of calls that change the GPU.
async fn number_of_calls(host: &InProcess) -> u32 {
    assert_eq!(host.apply(&["0"], BEFORE).await.state, OperationState::Done);
    host.gpus.take_changes();
    assert_eq!(host.apply(&["0"], AFTER).await.state, OperationState::Done);
    u32::try_from(host.gpus.take_changes().len()).expect("a few")
}

/// Checks that an operation was rolled back, and says why.
fn assert_rolled_back(operation: &Operation, what: &str) {
    assert_eq!(operation.state, OperationState::RolledBack, "{what}: {operation:?}");
    let error = operation.error.as_ref().expect("a reason");
    assert!(error.message.starts_with("GPU 0 (GPU-"), "{what}: {error:?}");
    assert!(operation.progress[0].rolling_back && operation.progress[0].error.is_some(), "{what}");
}

/// All changes of an operation are undone, whichever of its calls fails.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failure_of_any_call_restores_the_previous_layout() {
    let host = started(1).await;
    let calls = number_of_calls(&host).await;
    assert!(calls > 8, "{calls}");
    let kinds = [ErrorKind::Unknown, ErrorKind::InUse, ErrorKind::InsufficientResources, ErrorKind::NoPermission];
    for (call, kind) in (0..calls).zip(kinds.into_iter().cycle()) {
        assert_eq!(host.apply(&["0"], BEFORE).await.state, OperationState::Done);
        let before = host.gpus.layout(0);
        // If a call returns IN_USE, gpushd repeats the call once in a new session.
        let times = if kind == ErrorKind::InUse { 2 } else { 1 };
        host.gpus.rule(CallRule::on(ANY_CHANGE, 0).after(call).times(times).fails(kind.clone()));
        let operation = host.apply(&["0"], AFTER).await;
        assert_rolled_back(&operation, &format!("call {call}, {kind:?}"));
        assert_eq!(operation.progress[0].done, call, "the steps before call {call}");
        assert_eq!(host.gpus.layout(0), before, "call {call}");
        assert_eq!(host.gpu(0).await.state, GpuState::Ready, "call {call}");
        host.gpus.clear_faults();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failure_on_one_gpu_restores_all_gpus_of_the_operation() {
    let host = started(3).await;
    assert_eq!(host.apply(&["all"], BEFORE).await.state, OperationState::Done);
    let before: Vec<_> = (0..3).map(|gpu| host.gpus.layout(gpu)).collect();
    host.gpus.fail(CREATE, 1, 1, ErrorKind::Unknown);
    let ended = host.apply(&["all"], AFTER).await;
    assert_eq!(ended.state, OperationState::RolledBack, "{:?}", ended.error);
    assert!(ended.error.expect("a reason").message.starts_with("GPU 1 (GPU-"));
    assert_eq!((0..3).map(|gpu| host.gpus.layout(gpu)).collect::<Vec<_>>(), before);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failed_rollback_degrades_the_gpu_until_a_change_succeeds() {
    let host = started(2).await;
    assert_eq!(host.apply(&["0"], BEFORE).await.state, OperationState::Done);
    // Every creation fails, including the creations of the rollback.
    host.gpus.rule(CallRule::on(CREATE, 0).fails(ErrorKind::InsufficientResources));
    let ended = host.apply(&["0"], AFTER).await;
    assert_eq!(ended.state, OperationState::Failed, "{:?}", ended.error);
    let gpu = host.gpu(0).await;
    assert_eq!(gpu.state, GpuState::Degraded, "{:?}", gpu.reasons);
    assert!(gpu.reasons.iter().any(|reason| reason.contains("failed")), "{:?}", gpu.reasons);
    assert!(gpu.reasons.iter().any(|reason| reason.contains("2g.20gb@0")), "{:?}", gpu.reasons);
    assert_eq!(host.gpu(1).await.state, GpuState::Ready);
    assert_eq!(host.health().await.status, HealthStatus::Degraded);
    // If a later change is also rolled back, the GPU stays degraded.
    let later = host.apply(&["0"], &["2g.20gb"]).await;
    assert_ne!(later.state, OperationState::Done, "{later:?}");
    assert_eq!(host.gpu(0).await.state, GpuState::Degraded, "{later:?}");
    host.gpus.clear_faults();
    assert_eq!(host.apply(&["0"], BEFORE).await.state, OperationState::Done);
    assert_eq!(host.gpu(0).await.state, GpuState::Ready);
    assert_eq!(host.health().await.status, HealthStatus::Ok);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_gpu_is_named_and_others_roll_back() {
    for call in [0, 4, 9] {
        let host = started(2).await;
        number_of_calls(&host).await;
        assert_eq!(host.apply(&["0", "1"], BEFORE).await.state, OperationState::Done);
        let before = host.gpus.layout(1);
        host.gpus.rule(CallRule::on(ANY_CHANGE, 0).after(call).once().with(CallEffect::LoseGpu));
        let ended = host.apply(&["0", "1"], AFTER).await;
        assert_eq!(ended.state, OperationState::Failed, "{ended:?}");
        let error = ended.error.expect("a reason");
        assert_eq!(error.code, Code::GpuLost, "{error:?}");
        assert!(error.message.starts_with("GPU 0 (GPU-"), "{error:?}");
        assert!(error.causes.iter().any(|cause| cause.contains("is lost")), "{error:?}");
        assert_eq!(host.gpus.layout(1), before, "GPU 1 is as before");
        let gpus = host.gpus().await;
        let lost: Vec<_> = gpus.iter().filter(|gpu| gpu.state == GpuState::Lost).map(|gpu| &gpu.uuid).collect();
        assert_eq!(lost, [&ended.plans[0].gpu_uuid], "{gpus:?}");
        assert_eq!(host.health().await.errors[0].code, Code::GpuLost);
        assert_eq!(host.refused(&[ended.plans[0].gpu_uuid.as_str()], AFTER).await.code, Code::GpuLost);
    }
}

/// Begins the second operation, which has no steps, and holds one of its readings. Returns `None` if it has no such reading.
async fn held_reading(host: &InProcess, number: u32) -> Option<Operation> {
    host.gpus.rule(CallRule::on(READ, 0).after(number).once().held());
    let body = serde_json::json!({ "selectors": ["0"], "layout_source": { "entries": ["4g.24gb"] } });
    let asked = host.begin_post(super::user(0), "/v1/mig/apply", &body);
    let is_either = async || (host.gpus.is_held() || asked.is_finished()).then_some(());
    host.until("a reading or an answer", is_either).await;
    // If gpushd has not recorded the operation yet, it still plans, and this is not a reading of the operation.
    if host.get::<Vec<OperationSummary>>("/v1/operations").await.len() < 2 {
        host.gpus.release();
    }
    let begun: Operation = asked.await.expect("an answer").document().expect("an operation");
    while !host.gpus.is_held() {
        let now = host.operation(&begun.id).await;
        if now.state.is_final() {
            host.gpus.clear_faults();
            return None;
        }
    }
    Some(begun)
}

/// The operation has no steps, but gpushd reads the GPU back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unchanged_gpu_that_is_lost_or_changed_by_others_is_named() {
    for is_lost in [true, false] {
        let mut failed = 0;
        for number in 0..6 {
            let host = InProcess::start("a30x4", 2, "").await;
            assert_eq!(host.apply(&["0"], &["4g.24gb"]).await.state, OperationState::Done);
            let Some(begun) = held_reading(&host, number).await else { continue };
            if is_lost {
                host.gpus.lose(0);
            } else {
                host.gpus.clear(0);
                host.gpus.create_by_hand(0, "2g.12gb", 0);
            }
            let theirs = host.gpus.layout(0);
            host.gpus.release();
            let ended = host.ended(&begun).await;
            assert_eq!(host.gpus.layout(0), theirs, "nothing of theirs is taken back");
            if ended.state == OperationState::Done {
                continue;
            }
            failed += 1;
            assert_eq!(ended.state, OperationState::Failed, "{ended:?}");
            let error = ended.error.expect("a reason");
            if is_lost {
                assert!(error.causes.iter().any(|cause| cause.contains("is lost")), "{error:?}");
            } else {
                assert!(error.message.contains("another program has changed the layout"), "{error:?}");
                assert!(error.causes.iter().any(|cause| cause.contains("stays as it is")), "{error:?}");
                assert_eq!(error.outcome, None, "{error:?}");
                assert_eq!(host.gpu(0).await.state, GpuState::Ready, "it only differs from the request");
            }
        }
        assert!(failed > 0, "no reading of the operation was held");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unlisted_handle_is_refused_with_a_hint_to_its_holder() {
    let host = started(1).await;
    assert_eq!(host.apply(&["0"], BEFORE).await.state, OperationState::Done);
    let before = host.gpus.layout(0);
    host.gpus.rule(CallRule::on(DESTROY, 0).fails(ErrorKind::InUse));
    let ended = host.apply(&["0"], &["7g.80gb"]).await;
    assert_rolled_back(&ended, "an unlisted handle");
    let error = ended.error.expect("a reason");
    assert_eq!(error.code, Code::Blocked);
    assert!(error.hint.as_ref().is_some_and(|hint| hint.contains("`gpushctl gpu holders GPU-")), "{error:?}");
    assert_eq!(host.gpus.layout(0), before);
}

/// The deadline of the call has passed, but it returns within the grace period.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn late_call_counts_as_a_completed_step() {
    let host = InProcess::start("dgx-a100", 2, "# --constants driver.change=3s\n").await;
    assert_eq!(host.apply(&["0"], BEFORE).await.state, OperationState::Done);
    host.gpus.rule(CallRule::on(ANY_CHANGE, 0).after(2).once().held());
    let begun = host.begin(&["0"], AFTER, &serde_json::json!({})).await.expect("it begins");
    host.until("the deadline", async || (host.gpus().await[0].state == GpuState::Unknown).then_some(())).await;
    assert_eq!(host.gpu(1).await.state, GpuState::Ready);
    host.gpus.release();
    let ended = host.ended(&begun).await;
    assert_eq!(ended.state, OperationState::Done, "{ended:?}");
    assert_eq!(host.gpus.layout(0).len(), 2, "{:?}", host.gpus.layout(0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mode_without_effect_is_rolled_back() {
    let host = InProcess::start("dgx-h100", 1, "").await;
    host.gpus.without_mig();
    // The call returns success, but its activation status is IN_USE.
    host.gpus.rule(CallRule::on(SET_MODE, 0).once().with(CallEffect::KeepMode(ErrorKind::InUse)));
    let ended = host.apply(&["0"], &["3g.40gb"]).await;
    assert_eq!(ended.state, OperationState::RolledBack, "{ended:?}");
    let error = ended.error.expect("a reason");
    assert!(error.message.contains("switching MIG mode on"), "{error:?}");
    assert_eq!(host.gpus.layout(0), ["MIG off"]);
    let mig = host.gpu(0).await.mig.expect("MIG");
    assert_eq!((mig.enabled, mig.pending_mode()), (false, false));
    // On Hopper, the driver reports only at the first creation that a GPU is busy. gpushd must then also disable MIG mode
    // again.
    host.gpus.fail(CREATE, 0, 2, ErrorKind::InUse);
    let ended = host.apply(&["0"], &["3g.40gb"]).await;
    assert_eq!(ended.state, OperationState::RolledBack, "{ended:?}");
    assert_eq!(host.gpus.layout(0), ["MIG off"]);
    assert_eq!(host.apply(&["0"], &["3g.40gb"]).await.state, OperationState::Done);
}

/// Runs an operation of two steps in which a call kills the worker. After that, the GPU cannot be read.
async fn outcome_unknown(host: &Arc<ScriptedHost>, call: &'static str, moment: EndMoment) -> InProcess {
    let gpushd = host.start("").await;
    host.gpus.rule(CallRule::on(call, 0).once().held().with(CallEffect::EndWorker(moment)));
    let begun = gpushd.begin(&["0"], &["7g.80gb"], &serde_json::json!({})).await.expect("an operation");
    gpushd.until_held().await;
    host.gpus.rule(CallRule::on(READ, 0).fails(ErrorKind::Unknown));
    host.gpus.release();
    let ended = gpushd.ended(&begun).await;
    assert_eq!(ended.state, OperationState::Failed, "{ended:?}");
    let causes = &ended.error.as_ref().expect("a reason").causes;
    assert!(causes.iter().any(|cause| cause.contains("unknown state")), "{causes:?}");
    assert_ne!(gpushd.gpu(0).await.state, GpuState::Ready);
    host.gpus.clear_faults();
    gpushd
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gpu_is_ready_again_when_a_known_layout_is_read() {
    for (call, moment) in [(CREATE_COMPUTE, EndMoment::After), (CREATE, EndMoment::Before)] {
        let gpushd = outcome_unknown(&ScriptedHost::new("dgx-a100", 1), call, moment).await;
        gpushd.until("a reading", async || Some(gpushd.gpu(0).await).filter(|gpu| gpu.state == GpuState::Ready)).await;
        assert_eq!(gpushd.gpu(0).await.reasons, Vec::<String>::new(), "{call}");
        assert_eq!(gpushd.health().await.status, HealthStatus::Ok, "{call}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unknown_outcome_with_neither_layout_stays_degraded() {
    // The first step takes effect. The second step is never tried.
    let gpushd = outcome_unknown(&ScriptedHost::new("dgx-a100", 1), CREATE, EndMoment::After).await;
    gpushd.until("a reading", async || (gpushd.gpu(0).await.state == GpuState::Degraded).then_some(())).await;
    assert_eq!(gpushd.apply(&["0"], &["7g.80gb"]).await.state, OperationState::Done);
    assert_eq!(gpushd.gpu(0).await.state, GpuState::Ready);
}

/// Fault 5 of mig-parted: it did not find a GPU instance without a compute instance, so it never removed this instance.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn incomplete_gpu_instance_is_completed_or_removed() {
    let host = started(1).await;
    for (layout, calls) in [("3g.40gb", Some(1)), ("7g.80gb", None)] {
        // The first step succeeds. The second step fails, and so does the rollback of the first step.
        host.gpus.rule(CallRule::on(CREATE_COMPUTE, 0).fails(ErrorKind::Unknown));
        host.gpus.rule(CallRule::on(DESTROY, 0).fails(ErrorKind::Unknown));
        assert_eq!(host.apply(&["0"], &["3g.40gb@4"]).await.state, OperationState::Failed);
        host.gpus.clear_faults();
        assert_eq!(host.gpus.layout(0), ["3g.40gb@4[]"]);
        let shown = host.gpu(0).await.mig.expect("MIG").instances;
        assert!(shown.len() == 1 && shown[0].compute.is_empty(), "{shown:?}");
        host.gpus.take_changes();
        // If the layout has this GPU instance, gpushd adds only the compute instance. Otherwise, gpushd destroys it.
        assert_eq!(host.apply(&["0"], &[layout]).await.state, OperationState::Done);
        let made = host.gpus.take_changes().len();
        assert!(calls.is_none_or(|calls| calls == made), "{layout}: {made}");
        assert_eq!(host.gpus.instances(0).len(), 1);
        assert!(host.gpus.layout(0)[0].starts_with(layout) && !host.gpus.layout(0)[0].ends_with("[]"));
        assert_eq!(host.apply(&["0"], &["none"]).await.state, OperationState::Done);
    }
}
