//! Layouts that gpushd applies at its start: on a new boot, in the same boot, with errors of the driver, and with drift.

use std::sync::Arc;

use gpush_api::{ApiError, GpuIndex, HealthStatus, OperationState};
use gpush_nvml::ErrorKind;
use serde_json::{Value, json};

use super::{
    InProcess,
    call_rules::{CREATE, CallEffect, CallRule, EndMoment, READ},
    host::ScriptedHost,
};

const CONFIG: &str = r#"
[[gpu]]
name = "training"
match = ["0-1"]
mode = "mig"
layout = ["3g.40gb", "2g.20gb", "1g.10gb*2"]
"#;

fn host() -> Arc<ScriptedHost> {
    ScriptedHost::new("dgx-a100", 3)
}

async fn settled(host: &Arc<ScriptedHost>, config: &str) -> InProcess {
    let gpushd = host.start_with_layouts(config).await;
    gpushd.until_layouts_are_settled().await;
    gpushd
}

/// Returns the numbers of instances on GPUs 0 and 1.
fn devices(host: &ScriptedHost) -> [usize; 2] {
    [0, 1].map(|gpu| host.gpus.instances(gpu).len())
}

impl InProcess {
    /// Waits until health reports an error about a GPU that contains `says`.
    async fn reported(&self, gpu: u32, says: &str) -> ApiError {
        self.until(says, async || {
            let about = |error: &ApiError| {
                let text = format!("{error:?}");
                error.message.contains(&format!("GPU {gpu} (GPU-")) && text.contains(says)
            };
            self.health().await.errors.into_iter().find(about)
        })
        .await
    }

    /// Returns the states of the operations on a GPU.
    async fn states_on(&self, gpu: u32) -> Vec<OperationState> {
        let all = self.operations().await;
        all.into_iter().filter(|one| one.plans[0].gpu == gpu).map(|one| one.state).collect()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn restart_in_the_same_boot_changes_no_layout() {
    let host = host();
    let mut gpushd = settled(&host, CONFIG).await;
    assert_eq!(devices(&host), [4, 4]);
    assert!(host.gpus.instances(2).is_empty(), "no rule claims GPU 2");
    assert!(gpushd.gpus().await.iter().all(|gpu| gpu.drift.is_empty()));
    assert_eq!(gpushd.apply_once(&["0"], &["7g.80gb"]).await.state, OperationState::Done);
    host.gpus.take_changes();
    for kill in [true, false] {
        if kill {
            gpushd.kill();
        } else {
            gpushd.stop().await;
        }
        gpushd = settled(&host, CONFIG).await;
        let gpus = gpushd.gpus().await;
        assert_eq!(gpus[0].drift, ["missing 3g.40gb, 2g.20gb, 1g.10gb*2", "extra 7g.80gb@0"]);
        assert_eq!((gpus[0].rule.as_deref(), gpus[1].drift.len()), (Some("training"), 0));
    }
    assert!(host.gpus.take_changes().is_empty());
    gpushd.stop().await;
    host.reboot();
    let gpushd = settled(&host, CONFIG).await;
    assert_eq!(devices(&host), [4, 4]);
    assert!(gpushd.gpus().await.iter().all(|gpu| gpu.drift.is_empty()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn auto_reconcile_repairs_drift_at_start_and_after_a_reload() {
    let host = host();
    let gpushd = settled(&host, CONFIG).await;
    assert_eq!(gpushd.apply_once(&["0"], &["7g.80gb"]).await.state, OperationState::Done);
    gpushd.stop().await;
    let gpushd = host.start_with_layouts(&format!("auto_reconcile = true\n{CONFIG}")).await;
    gpushd.until("the repair", async || (devices(&host) == [4, 4]).then_some(())).await;
    gpushd.operations().await;
    assert_eq!(gpushd.apply_once(&["1"], &["7g.80gb"]).await.state, OperationState::Done);
    gpushd.post::<Value>("/v1/config/reload", &json!({})).await.expect("it is taken");
    gpushd.until("the repair", async || (devices(&host) == [4, 4]).then_some(())).await;
}

/// A restart in the same boot does not apply a layout that gpushd has given up either.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn impossible_layout_affects_one_gpu_and_retries_end() {
    let host = host();
    host.gpus.rule(CallRule::on(CREATE, 0).fails(ErrorKind::InsufficientResources));
    let gpushd = host.start_with_layouts(CONFIG).await;
    let error = gpushd.reported(0, "tried 1 of 6 times").await;
    assert!(error.causes.iter().any(|cause| cause.contains("tries again")), "{error:?}");
    assert!(gpushd.health().await.layouts_at_start.is_some_and(|layouts| !layouts.complete), "it is still being tried");
    let error = gpushd.reported(0, "tried 6 times").await;
    assert!(format!("{error:?}").contains("`gpushctl apply 0` (administrator)"), "{error:?}");
    gpushd.until_layouts_are_settled().await;
    assert_eq!(gpushd.states_on(0).await, [OperationState::RolledBack; 6]);
    assert_eq!(gpushd.states_on(1).await, [OperationState::Done]);
    assert_eq!(devices(&host), [0, 4]);
    assert_eq!(gpushd.health().await.status, HealthStatus::Degraded);
    host.gpus.clear_faults();
    let begun = gpushd.begin_with(&json!({ "selectors": ["0"] })).await.expect("it begins");
    assert_eq!(gpushd.ended(&begun).await.state, OperationState::Done);
    assert_eq!(gpushd.health().await.status, HealthStatus::Ok);
    assert_eq!(gpushd.apply_once(&["0"], &["7g.80gb"]).await.state, OperationState::Done);
    gpushd.stop().await;
    settled(&host, CONFIG).await;
    assert_eq!(host.gpus.instances(0), ["7g.80gb@0"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn transient_driver_error_delays_but_keeps_layouts() {
    for (rule, says) in [
        // The apply fails and is rolled back; the worker dies during the apply; the GPU cannot be read.
        (CallRule::on(CREATE, 0).times(2).fails(ErrorKind::Unknown), "tried 1 of 6 times"),
        (CallRule::on(CREATE, 0).once().with(CallEffect::EndWorker(EndMoment::Before)), "tried 1 of 6 times"),
        (CallRule::on(READ, 0).times(3).fails(ErrorKind::Unknown), "gpushd tries again"),
    ] {
        let host = host();
        let what = format!("{rule:?}");
        host.gpus.rule(rule);
        let gpushd = host.start_with_layouts(CONFIG).await;
        gpushd.reported(0, says).await;
        gpushd.until_layouts_are_settled().await;
        assert_eq!(devices(&host), [4, 4], "{what}");
        // If the worker dies, the current call for the other GPU also fails, and gpushd tries again.
        for gpu in [0, 1] {
            assert_eq!(gpushd.states_on(gpu).await.last(), Some(&OperationState::Done), "{what}");
        }
        assert_eq!(gpushd.health().await.status, HealthStatus::Ok, "{what}");
    }
}

/// At its next start in this boot, gpushd can identify the GPU. It applies only the layout of this GPU.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unidentified_gpu_gets_its_layout_after_a_restart() {
    let host = host();
    host.gpus.hide_uuid(1, true);
    let gpushd = host.start_with_layouts(CONFIG).await;
    let uuid = gpushd.gpu(0).await.uuid;
    let is_settled =
        async || gpushd.health().await.layouts_at_start.filter(|layouts| layouts.settled.contains(&uuid)).map(drop);
    gpushd.until("the layout of GPU 0", is_settled).await;
    let says = "the driver reports no UUID for GPU 1, so gpushd does not apply a layout there yet";
    let errors = format!("{:?}", gpushd.health().await.errors);
    assert!(errors.contains(says), "{errors}");
    assert_eq!(devices(&host), [4, 0]);
    assert_eq!(gpushd.apply_once(&["0"], &["7g.80gb"]).await.state, OperationState::Done);
    gpushd.stop().await;
    host.gpus.hide_uuid(1, false);
    let gpushd = settled(&host, CONFIG).await;
    assert_eq!(devices(&host), [1, 4]);
    assert_eq!(gpushd.operations().await.last().map(|last| last.plans[0].gpu), Some(GpuIndex(1)));
    assert!(gpushd.health().await.errors.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stop_during_the_layouts_leaves_the_rest_to_the_next_start() {
    let host = host();
    host.gpus.rule(CallRule::on(CREATE, 0).once().held());
    host.gpus.rule(CallRule::on(READ, 1).fails(ErrorKind::Unknown));
    let gpushd = host.start_with_layouts(CONFIG).await;
    gpushd.until_held().await;
    let release = async {
        tokio::task::yield_now().await;
        host.gpus.release();
    };
    tokio::join!(gpushd.stop(), release);
    assert_eq!(devices(&host), [4, 0]);
    host.gpus.clear_faults();
    host.gpus.take_changes();
    settled(&host, CONFIG).await;
    assert_eq!(devices(&host), [4, 4]);
    let changes = host.gpus.take_changes();
    assert!(changes.iter().all(|call| call.ends_with(" 1")), "{changes:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stop_without_a_driver_leaves_the_layouts_to_the_next_start() {
    let host = host();
    host.gpus.unload(Some(ErrorKind::DriverNotLoaded));
    let gpushd = host.start_with_layouts(CONFIG).await;
    gpushd.get_as::<Value>(super::user(0), "/v1/gpus").await.expect_err("there is no driver");
    gpushd.stop().await;
    host.gpus.unload(None);
    settled(&host, CONFIG).await;
    assert_eq!(devices(&host), [4, 4]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unknown_boot_id_changes_no_layout() {
    let host = host();
    host.hide_boot();
    let gpushd = host.start_with_layouts(CONFIG).await;
    assert_eq!(gpushd.gpus().await[0].drift.len(), 1);
    let error = gpushd.until("the error", async || gpushd.health().await.errors.into_iter().next()).await;
    assert!(format!("{error:?}").contains("cannot read the boot id"), "{error:?}");
    assert!(gpushd.operations().await.is_empty() && host.gpus.changes().is_empty());
}

/// Fault: rules of the modes `exclusive` and `timeslice` left MIG on at the first start. The operation never destroys an
/// instance in use.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn first_start_turns_mig_off_for_whole_gpus() {
    let host = ScriptedHost::new("dgx-h100", 3);
    for gpu in 0..3 {
        host.gpus.create_by_hand(gpu, "1g.10gb", 0);
    }
    host.gpus.use_first_device(2, std::process::id());
    let rule = |gpu: u32, mode: &str| format!("[[gpu]]\nmatch = [\"{gpu}\"]\nmode = \"{mode}\"\n");
    let config = [rule(0, "exclusive"), rule(1, "timeslice"), rule(2, "exclusive")].concat();
    let gpushd = host.start_with_layouts(&config).await;
    for gpu in [0, 1] {
        gpushd.until("MIG off", async || (host.gpus.layout(gpu) == ["MIG off"]).then_some(())).await;
    }
    let is_named = async || {
        let holders = gpushd.gpu(2).await.blocked_by;
        holders.iter().any(|holder| holder.pid == Some(std::process::id())).then_some(())
    };
    gpushd.until("the user", is_named).await;
    assert_eq!(host.gpus.instances(2), ["1g.10gb@0"]);
    host.gpus.end_processes(2);
    gpushd.until_layouts_are_settled().await;
    assert_eq!(host.gpus.layout(2), ["MIG off"]);
}
