//! Partial rollback. If a process has entered an instance, or the driver does not destroy it, gpushd keeps this instance.
//! It restores the rest of the previous layout around this instance.

use gpush_api::{GpuState, Operation, OperationState};
use gpush_nvml::ErrorKind;
use serde_json::json;

use super::{
    InProcess,
    call_rules::{CREATE, CallEffect, CallRule, DESTROY_COMPUTE, READ},
};

const BEFORE: &[&str] = &["2g.20gb@0", "1g.10gb@2", "1g.10gb@3", "3g.40gb@4"];
/// A layout that has no instance of BEFORE. So an apply destroys all instances of BEFORE.
const AFTER: &[&str] = &["3g.40gb@0", "2g.20gb@4"];

const HIDDEN: CallEffect = CallEffect::HideProcesses("nvmlDeviceGetComputeRunningProcesses_v3: Unknown Error");

async fn started() -> InProcess {
    let host = InProcess::start("dgx-a100", 1, "").await;
    assert_eq!(host.apply(&["0"], BEFORE).await.state, OperationState::Done);
    host
}

/// Begins an apply from BEFORE to AFTER. The creation of the second GPU instance fails. Calls `meanwhile` before that.
async fn fail_after(host: &InProcess, meanwhile: impl FnOnce()) -> Operation {
    host.gpus.rule(CallRule::on(CREATE, 0).after(1).once().held().fails(ErrorKind::Unknown));
    let begun = host.begin(&["0"], AFTER, &json!({})).await.expect("an operation");
    host.until_held().await;
    meanwhile();
    host.gpus.release();
    host.ended(&begun).await
}

/// The new instance at slice 0 stays, and the instance that does not overlap with it is restored.
fn assert_partly_restored(host: &InProcess, operation: &Operation) {
    assert_eq!(operation.state, OperationState::Failed, "{operation:?}");
    assert_eq!(host.gpus.layout(0), ["3g.40gb@0[3g.40gb@0]", "3g.40gb@4[3g.40gb@0]"]);
}

/// Every user can read operations, conditions and health. So they do not name the process.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn entered_instance_stays_and_rest_is_restored() {
    let host = started().await;
    let pid = std::process::id();
    let operation = fail_after(&host, || host.gpus.use_device_at(0, 0, pid)).await;
    assert_partly_restored(&host, &operation);
    let gpu = host.gpu(0).await;
    assert_eq!(gpu.state, GpuState::Degraded);
    let error = operation.error.as_ref().expect("a reason");
    for says in [
        "the previous layout was restored without 2g.20gb@0, 1g.10gb@2 and 1g.10gb@3",
        "3g.40gb@0 (GPU instance",
        "is in use by a process (`gpushctl gpu show 0` shows this process",
        "2g.20gb@0 was not restored: 3g.40gb@0 is",
        "1g.10gb@3 was not restored: 3g.40gb@0 is",
    ] {
        let says_so = |all: &[String]| all.iter().any(|cause| cause.contains(says));
        assert!(says_so(&error.causes) && says_so(&gpu.reasons), "{says}: {error:?} {:?}", gpu.reasons);
    }
    let public = format!("{error:?} {:?} {:?} {:?}", operation.progress, gpu.reasons, host.health().await.errors);
    assert!(!public.contains(&format!("pid {pid}")), "{public}");
    // When the process has ended, gpushd can change the GPU again.
    host.gpus.end_processes(0);
    assert_eq!(host.apply(&["0"], BEFORE).await.state, OperationState::Done);
    assert_eq!(host.gpu(0).await.state, GpuState::Ready);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unknown_users_block_destruction_in_rollback() {
    let host = started().await;
    let operation = fail_after(&host, || {
        host.gpus.take_changes();
        host.gpus.rule(CallRule::on(READ, 0).with(HIDDEN));
    })
    .await;
    assert_partly_restored(&host, &operation);
    let changes = host.gpus.take_changes();
    assert!(changes.iter().all(|call| !call.starts_with("destroying")), "{changes:?}");
    let causes = operation.error.expect("a reason").causes;
    assert!(causes.iter().any(|cause| cause.contains("may be in use by a process")), "{causes:?}");
    assert_eq!(host.gpu(0).await.state, GpuState::Degraded);
    host.gpus.clear_faults();
    assert_eq!(host.apply(&["0"], BEFORE).await.state, OperationState::Done);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rollback_completes_when_users_become_known_in_time() {
    let host = started().await;
    // Only the first reading of the rollback does not list the processes.
    let operation = fail_after(&host, || host.gpus.rule(CallRule::on(READ, 0).once().with(HIDDEN))).await;
    assert_eq!(operation.state, OperationState::RolledBack, "{operation:?}");
    assert_eq!(host.gpus.layout(0).len(), 4, "{:?}", host.gpus.layout(0));
    assert_eq!(host.gpu(0).await.state, GpuState::Ready);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn undestroyable_instance_stays_and_rest_is_restored() {
    let host = started().await;
    let operation =
        fail_after(&host, || host.gpus.rule(CallRule::on(DESTROY_COMPUTE, 0).fails(ErrorKind::InUse))).await;
    assert_partly_restored(&host, &operation);
    let causes = operation.error.expect("a reason").causes;
    assert!(causes.iter().any(|cause| cause.contains("2g.20gb@0 was not restored")), "{causes:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mig_stays_on_if_a_process_has_entered_a_new_instance() {
    let host = InProcess::start("dgx-h100", 1, "").await;
    host.gpus.without_mig();
    let operation = fail_after(&host, || host.gpus.use_device_at(0, 0, std::process::id())).await;
    assert_eq!(operation.state, OperationState::Failed, "{operation:?}");
    assert_eq!(host.gpus.layout(0), ["3g.40gb@0[3g.40gb@0]"]);
    let causes = operation.error.expect("a reason").causes;
    assert!(causes.iter().any(|cause| cause.starts_with("MIG mode stays on")), "{causes:?}");
}
