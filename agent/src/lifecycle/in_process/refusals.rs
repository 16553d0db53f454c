//! Requests that gpushd refuses before it changes anything. The error names the object and a solution.

use gpush_api::{Code, Gpu, GpuPlan, GpuState, HealthStatus, OperationState, Plans};
use gpush_nvml::ErrorKind;
use serde_json::{Value, json};

use super::{
    InProcess,
    call_rules::{CallEffect, CallRule, READ},
    host::ScriptedHost,
    user,
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn impossible_layouts_are_refused_with_a_precise_reason() {
    let host = InProcess::start("dgx-a100", 1, "").await;
    assert_eq!(host.apply(&["0"], &["3g.40gb"]).await.state, OperationState::Done);
    host.gpus.take_changes();
    for (entries, code, says) in [
        (&["9g.90gb"][..], Code::UnknownProfile, "has no profile 9g.90gb"),
        // Fault 4 of mig-parted: for an unknown profile, it destroyed everything and reported success.
        (&["3g.41gb"], Code::UnknownProfile, "3g.40gb"),
        (&["1g.10gb*8"], Code::LayoutImpossible, "at most 7"),
        (&["4g.40gb", "4g.40gb"], Code::LayoutImpossible, "4g.40gb"),
        (&["3g.40gb@2"], Code::LayoutImpossible, "can't start at memory slice 2"),
        (&["3g.40gb@0", "2g.20gb@2"], Code::LayoutImpossible, "overlap"),
        (&["7g.80gb", "1g.10gb"], Code::LayoutImpossible, "slices"),
        (&["9c.3g.40gb"], Code::BadRequest, "9c.3g.40gb"),
        (&["1c.3g.40gb*9"], Code::BadRequest, "*9"),
        (&["3g.40gb*0"], Code::BadRequest, "*0"),
        (&[""], Code::BadRequest, ""),
        (&[], Code::BadRequest, ""),
        (&["3g.40gb@x"], Code::BadRequest, "3g.40gb@x"),
        (&["\u{7f}"], Code::BadRequest, ""),
    ] {
        let refused = host.refused(&["0"], entries).await;
        assert_eq!(refused.code, code, "{entries:?}: {refused:?}");
        let hint = refused.hint.as_ref().expect("a hint");
        let text = format!("{} {} {hint}", refused.message, refused.causes.join(" "));
        assert!(text.contains(says), "{entries:?}: {refused:?}");
    }
    let unknown = json!({ "selectors": ["0"], "layout_source": { "named": "nope" } });
    assert_eq!(host.begin_with(&unknown).await.unwrap_err().code, Code::NotFound);
    assert_eq!((host.gpus.layout(0).len(), host.gpus.take_changes().len()), (1, 0));
}

/// Fault 6 of mig-parted: it ignored `devices: [9]` and invalid filters, and reported success.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unknown_gpus_and_invalid_selectors_are_refused() {
    let host = InProcess::start("a30x4", 4, "").await;
    for (gpu, code) in [
        ("9", Code::NotFound),
        ("0-9", Code::NotFound),
        ("*H100*", Code::NotFound),
        ("GPU-0000000f", Code::NotFound),
        ("0000:ff:00.0", Code::NotFound),
        ("-1", Code::BadRequest),
        ("3-0", Code::BadRequest),
        ("", Code::BadRequest),
        ("\u{0}", Code::BadRequest),
        ("GPU-zz", Code::BadRequest),
    ] {
        let refused = host.refused(&[gpu], &["1g.6gb"]).await;
        assert_eq!(refused.code, code, "{gpu:?}: {refused:?}");
        assert!(refused.hint.is_some(), "{refused:?}");
    }
    // If one name of a request is valid and another is unknown, gpushd refuses the request.
    assert_eq!(host.refused(&["0", "9"], &["1g.6gb"]).await.code, Code::NotFound);
    assert!(host.gpus.take_changes().is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gpu_is_found_by_index_uuid_and_pci_address() {
    let host = InProcess::start("dgx-a100", 8, "").await;
    let gpu = host.gpu(5).await;
    for name in [gpu.uuid.as_str(), &gpu.pci, &gpu.pci.to_uppercase(), &gpu.uuid.as_str().to_uppercase()] {
        let found: gpush_api::Gpu = host.get(&format!("/v1/gpus/{name}")).await;
        assert_eq!(found.index, 5, "{name}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gpu_without_mig_refuses_layouts() {
    let host = ScriptedHost::of("mixed").start("").await;
    for gpu in ["4", "5"] {
        let refused = host.refused(&[gpu], &["1g.10gb"]).await;
        assert_eq!(refused.code, Code::Unsupported, "{refused:?}");
        assert!(refused.message.contains("does not support MIG"), "{refused:?}");
        let profiles = host.get_as::<Value>(user(0), &format!("/v1/gpus/{gpu}/profiles")).await;
        assert_eq!(profiles.unwrap_err().code, Code::Unsupported);
    }
    assert!(host.gpus.take_changes().is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn host_without_gpus_is_healthy_and_refuses_requests() {
    let host = InProcess::start("dgx-a100", 0, "").await;
    assert!(host.gpus().await.is_empty());
    let health = host.health().await;
    assert_eq!((health.status, health.gpu_count), (HealthStatus::Ok, 0));
    for gpus in [&["0"][..], &["all"], &[]] {
        assert_eq!(host.refused(gpus, &["1g.10gb"]).await.code, Code::NotFound);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_gpu_is_shown_and_others_work() {
    let host = InProcess::start("dgx-a100", 4, "").await;
    assert_eq!(host.gpus().await.len(), 4);
    host.gpus.lose(3);
    host.until("the lost GPU", async || (host.gpu(3).await.state == GpuState::Lost).then_some(())).await;
    let gpus = host.gpus().await;
    assert_eq!(gpus.iter().filter(|gpu| gpu.state == GpuState::Lost).count(), 1, "{gpus:?}");
    assert!(gpus.len() == 4 && !host.gpu(3).await.reasons.is_empty(), "{gpus:?}");
    assert_eq!(host.apply(&["0"], &["7g.80gb"]).await.state, OperationState::Done);
}

/// Fault 1 of mig-parted: if an instance was in use, it first destroyed the idle instances. Only then did the change fail.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn layout_without_the_used_instance_is_refused_before_any_call() {
    let host = InProcess::start("dgx-a100", 2, "").await;
    assert_eq!(host.apply(&["all"], &["3g.40gb@4", "2g.20gb", "1g.10gb"]).await.state, OperationState::Done);
    let (used, pid) = (host.gpus.instance_at(1, 4), std::process::id());
    host.gpus.use_device_at(1, 4, pid);
    host.gpus.take_changes();
    let refused = host.refused(&["1"], &["7g.80gb"]).await;
    assert_eq!((refused.code, refused.retryable), (Code::Blocked, true), "{refused:?}");
    assert!(refused.message.contains("3g.40gb@4 is in use"), "{refused:?}");
    assert!(refused.causes[0].starts_with(&format!("3g.40gb@4 (GPU instance {used}")), "{refused:?}");
    assert!(refused.causes.iter().any(|cause| cause.contains(&format!("pid {pid}"))), "{refused:?}");
    // Nor does gpushd change another GPU of the request.
    let refused = host.refused(&["all"], &["7g.80gb"]).await;
    assert!(refused.code == Code::Blocked && refused.message.contains("GPU 1"), "{refused:?}");
    assert!(host.gpus.take_changes().is_empty());
    // If a layout fits around the instance in use, gpushd applies the layout and keeps this instance.
    let kept = host.apply(&["1"], &["4g.40gb", "3g.40gb"]).await;
    assert_eq!((kept.state, &kept.plans[0].keeps[..]), (OperationState::Done, &[used][..]), "{kept:?}");
    assert_eq!(host.gpus.instance_at(1, 4), used);
    host.gpus.end_processes(1);
    assert_eq!(host.apply(&["1"], &["7g.80gb"]).await.state, OperationState::Done);
}

/// If gpushd cannot read which processes use a GPU, an instance that looks idle may be in use.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unknown_processes_block_destruction_and_mode_changes() {
    let host = InProcess::start("dgx-h100", 3, "").await;
    assert_eq!(host.apply(&["0"], &["3g.40gb@0", "1g.10gb@4"]).await.state, OperationState::Done);
    host.gpus.alter(1, |reading| reading.mig.as_mut().expect("MIG").set_mode(false, false));
    host.gpus.use_device_at(0, 0, std::process::id());
    let hidden = CallEffect::HideProcesses("nvmlDeviceGetComputeRunningProcesses_v3: Unknown Error");
    host.gpus.rule(CallRule::on(READ, 0).with(hidden.clone()));
    host.gpus.rule(CallRule::on(READ, 1).with(hidden));
    let known = async || Some(host.gpu(0).await).filter(|gpu| !gpu.processes_known);
    let gpu = host.until("a reading without processes", known).await;
    let reason = "the processes that use the GPU are not known";
    let is_said = |text: &String| text.starts_with(reason) && text.contains("RunningProcesses");
    assert!(gpu.state == GpuState::Ready && gpu.reasons.iter().any(is_said), "{gpu:?}");
    host.gpus.take_changes();
    for layout in [&["7g.80gb"][..], &["3g.40gb@0"], &["none"]] {
        let body = json!({ "selectors": ["0"], "layout_source": { "entries": layout } });
        let plan = host.post::<Plans>("/v1/mig/plan", &body).await.expect("a plan").plans.remove(0);
        let code = plan.error.as_ref().map(|error| error.code);
        assert_eq!((plan.steps.len(), code), (0, Some(Code::DriverError)), "{layout:?}: {plan:?}");
        let refused = host.refused(&["0"], layout).await;
        assert_eq!(refused.code, Code::DriverError, "{layout:?}: {refused:?}");
        assert!(refused.message.starts_with(&format!("GPU 0: {reason}")), "{refused:?}");
        assert!(refused.causes.iter().any(|cause| cause.contains("RunningProcesses")), "{refused:?}");
        assert!(refused.causes.iter().all(|cause| !cause.contains("op-")), "{refused:?}");
        assert!(refused.hint.as_ref().is_some_and(|hint| hint.contains("nvidia-smi")), "{refused:?}");
    }
    let refused = host.refused(&["1"], &["3g.40gb"]).await;
    assert_eq!(refused.code, Code::DriverError, "{refused:?}");
    assert!(refused.message.contains("MIG mode is not changed"), "{refused:?}");
    assert!(host.gpus.take_changes().is_empty());
    // Other GPUs are not affected, and new instances can be created.
    assert_eq!(host.apply(&["2"], &["7g.80gb"]).await.state, OperationState::Done);
    for _ in 0..2 {
        let grown = host.apply(&["0"], &["3g.40gb@0", "1g.10gb@4", "1g.10gb@5"]).await;
        assert_eq!(grown.state, OperationState::Done, "{grown:?}");
    }
    // When the driver lists processes again, only instances in use block a change.
    host.gpus.clear_faults();
    host.gpus.use_first_device(1, std::process::id());
    for gpu in ["0", "1"] {
        assert_eq!(host.refused(&[gpu], &["7g.80gb"]).await.code, Code::Blocked, "GPU {gpu}");
    }
    assert_eq!(host.apply(&["0"], &["3g.40gb@0", "2g.20gb@4"]).await.state, OperationState::Done);
    assert!(host.gpu(0).await.processes_known);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn layouts_per_gpu_are_checked() {
    let host = InProcess::start("dgx-a100", 3, "").await;
    let each = |layouts: Value| json!({ "layout_source": { "per_gpu": layouts } });
    let on = json!({ "selector": "0", "mig_enabled": true });
    for (body, says) in [
        (each(json!([])), "the request names no GPU"),
        (each(json!([on, on])), "named twice"),
        (each(json!([{ "selector": "all", "mig_enabled": true }])), "does not name exactly one GPU"),
        (each(json!([{ "selector": "0", "mig_enabled": false, "layout": ["1g.10gb"] }])), "cannot have MIG instances"),
        (json!({ "selectors": ["0"], "layout_source": { "per_gpu": [on] } }), "names GPUs twice"),
    ] {
        let refused = host.begin_with(&body).await.expect_err(says);
        assert!(refused.message.contains(says), "{refused:?}");
    }
    assert!(host.gpus.take_changes().is_empty());
    let layouts = json!([
        { "selector": "2", "mig_enabled": true, "layout": ["1g.10gb*7"] },
        { "selector": "0", "mig_enabled": true, "layout": ["3g.40gb@4"] },
    ]);
    let begun = host.begin_with(&each(layouts)).await.expect("it begins");
    let ended = host.ended(&begun).await;
    assert_eq!(ended.state, OperationState::Done, "{ended:?}");
    assert_eq!(ended.plans.iter().map(|plan: &GpuPlan| plan.gpu).collect::<Vec<_>>(), [0, 2]);
    assert_eq!([0, 1, 2].map(|gpu| host.gpus.instances(gpu).len()), [1, 0, 7]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_without_a_driver_get_its_error_until_it_is_loaded() {
    for (kind, says) in [
        (ErrorKind::DriverNotLoaded, "modprobe nvidia"),
        (ErrorKind::LibRmVersionMismatch, "reboot, or reload the module"),
        (ErrorKind::Unknown, ""),
    ] {
        let world = ScriptedHost::new("a30x4", 2);
        world.gpus.unload(Some(kind.clone()));
        let host = world.start("").await;
        for path in ["/v1/gpus", "/v1/gpus/0", "/v1/gpus/0/profiles"] {
            let error = host.get_as::<Value>(user(0), path).await.expect_err("there is no driver");
            assert_eq!(error.code, Code::DriverUnavailable, "{kind:?} {path}: {error:?}");
            assert!(error.hint.as_ref().is_some_and(|hint| hint.contains(says)), "{kind:?} {path}: {error:?}");
        }
        assert_eq!(host.refused(&["0"], &["1g.6gb"]).await.code, Code::DriverUnavailable, "{kind:?}");
        assert_eq!(host.health().await.status, HealthStatus::Degraded, "{kind:?}");
        host.get::<Value>("/v1/config").await;
        world.gpus.unload(None);
        // Each request makes gpushd try to load the driver again.
        host.until("the GPUs", async || host.get_as::<Vec<Gpu>>(user(0), "/v1/gpus").await.ok()).await;
        assert_eq!(host.health().await.status, HealthStatus::Ok, "{kind:?}");
    }
}
