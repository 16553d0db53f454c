//! Conditions of GPUs and of the host: cordons, replaced memory rows, a lost database, and nvidia-mig-manager.

use std::{fs, sync::Arc};

use gpush_api::{ApiError, AuditRecord, Code, Gpu, GpuState, OperationState};
use gpush_nvml::RemappedRows;
use serde_json::{Value, json};

use super::{InProcess, host::ScriptedHost};

const CONFIG: &str = r#"
[[gpu]]
name = "training"
match = ["0-1"]
mode = "mig"
layout = ["3g.40gb", "2g.20gb"]
"#;

impl InProcess {
    /// Sends a changing request with a reason, which must succeed.
    pub(super) async fn change(&self, path: &str, reason: &str) -> Value {
        self.post(path, &json!({ "reason": reason })).await.unwrap_or_else(|error| panic!("{path}: {error:?}"))
    }

    /// Returns the error in health whose message contains `part`.
    async fn health_error(&self, part: &str) -> Option<ApiError> {
        self.health().await.errors.into_iter().find(|error| error.message.contains(part))
    }

    async fn until_state(&self, gpu: u32, state: GpuState) -> Gpu {
        self.until("the state", async || Some(self.gpu(gpu).await).filter(|gpu| gpu.state == state)).await
    }
}

/// Starts gpushd on a host with three GPUs, two of which have a rule and its layout.
async fn settled(host: &Arc<ScriptedHost>, config: &str) -> InProcess {
    let gpushd = host.start_with_layouts(config).await;
    gpushd.until_layouts_are_settled().await;
    gpushd
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cordon_survives_a_restart_and_yields_to_named_requests() {
    let host = ScriptedHost::new("dgx-a100", 3);
    let gpushd = settled(&host, CONFIG).await;
    gpushd.change("/v1/gpus/0/cordon", "fan replacement").await;
    let cordoned = gpushd.gpu(0).await;
    assert_eq!((cordoned.state, cordoned.cordons.len()), (GpuState::Cordoned, 1), "{cordoned:?}");
    let cordon = &cordoned.cordons[0];
    assert_eq!((cordon.cause.as_str(), cordon.reason.as_str()), ("admin", "fan replacement"));
    let reason = &cordoned.reasons[0];
    assert!(reason.starts_with("cordoned by ") && reason.ends_with(": fan replacement"), "{cordoned:?}");
    assert!(gpushd.health().await.errors.is_empty(), "an administrator's cordon does not degrade health");
    // If a request names the cordoned GPU, gpushd changes the layout. The GPU stays cordoned.
    assert_eq!(gpushd.apply_once(&["0", "1"], &["7g.80gb"]).await.state, OperationState::Done);
    assert_eq!(gpushd.gpu(0).await.state, GpuState::Cordoned);
    // A request for all GPUs fails because of the cordoned GPU.
    let refused = gpushd.begin_with(&json!({ "layout_source": "config" })).await.unwrap_err();
    assert!(refused.code == Code::Conflict && refused.message.contains("is cordoned"), "{refused:?}");
    assert!(refused.hint.is_some_and(|hint| hint.contains("--gpu 0")));
    gpushd.stop().await;

    // The next gpushd repairs drift on all other GPUs, but does not change the cordoned GPU.
    let gpushd = host.start_with_layouts(&format!("auto_reconcile = true\n{CONFIG}")).await;
    gpushd.until("GPU 1 is repaired", async || gpushd.gpu(1).await.drift.is_empty().then_some(())).await;
    let kept = gpushd.gpu(0).await;
    assert_eq!((&kept.cordons[0].by, kept.state), (&cordon.by, GpuState::Cordoned));
    assert_eq!(host.gpus.instances(0), ["7g.80gb@0"]);
    gpushd.change("/v1/gpus/0/uncordon", "fan replaced").await;
    assert!(gpushd.gpu(0).await.cordons.is_empty());
    gpushd.until("GPU 0 is repaired", async || gpushd.gpu(0).await.drift.is_empty().then_some(())).await;
    let mut trail: Vec<AuditRecord> = gpushd.get("/v1/audit").await;
    trail.sort_by_key(|record| record.sequence);
    let about: Vec<_> = trail.iter().filter(|record| record.action.starts_with("gpu.")).collect();
    let about: Vec<_> = about.iter().map(|one| (one.action.as_str(), one.detail["reason"].as_str())).collect();
    assert_eq!(about, [("gpu.cordon", Some("fan replacement")), ("gpu.uncordon", Some("fan replaced"))]);
}

/// A second pending row is a new fault, and so is a row that cannot be replaced.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pending_row_remap_cordons_once_across_restarts() {
    let host = ScriptedHost::new("a30x4", 1);
    let rows = |rows: RemappedRows| host.gpus.alter(0, |reading| reading.rows = Some(rows));
    let pending = RemappedRows { correctable: 1, pending: true, ..RemappedRows::default() };
    let gpushd = host.start("").await;
    rows(pending);
    let gpu = gpushd.until_state(0, GpuState::Cordoned).await;
    assert_eq!(gpu.cordons[0].cause, "row-remap");
    assert!(gpu.reasons[0].contains("the next reset replaces"), "{:?}", gpu.reasons);
    gpushd.change("/v1/gpus/0/uncordon", "it may wait for the weekend").await;
    gpushd.until_state(0, GpuState::Ready).await;
    gpushd.stop().await;
    let gpushd = host.start("").await;
    assert_eq!(gpushd.gpu(0).await.state, GpuState::Ready, "gpushd knows that the row still waits");
    rows(RemappedRows { uncorrectable: 1, ..pending });
    gpushd.until_state(0, GpuState::Cordoned).await;
    gpushd.change("/v1/gpus/0/uncordon", "that too").await;
    rows(RemappedRows { uncorrectable: 1, failed: true, ..pending });
    let gpu = gpushd.until_state(0, GpuState::Cordoned).await;
    assert!(gpu.reasons[0].contains("could not be replaced"), "{:?}", gpu.reasons);
    gpushd.stop().await;
    rows(RemappedRows::default());
    let gpushd = host.start("").await;
    assert_eq!(gpushd.gpu(0).await.state, GpuState::Cordoned, "until an administrator uncordons it");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_database_holds_managed_gpus_until_recover_or_reboot() {
    for loss in ["damaged", "deleted", "directory"] {
        let host = ScriptedHost::new("dgx-a100", 3);
        let gpushd = settled(&host, CONFIG).await;
        assert_eq!(gpushd.apply(&["0"], &["7g.80gb"]).await.state, OperationState::Done);
        gpushd.stop().await;
        let (state, database) = (host.state_directory(), host.state_directory().join("gpush.db"));
        match loss {
            "damaged" => fs::write(&database, "no database").expect("a file"),
            "deleted" => fs::remove_file(&database).expect("a file"),
            _ => {
                fs::remove_dir_all(&state).expect("a directory");
                host.create_state_directory();
            }
        }
        host.gpus.take_changes();
        // If gpushd had lost the override, it would now apply the layout of the rule, because of `auto_reconcile`.
        let gpushd = host.start_with_layouts(&format!("auto_reconcile = true\n{CONFIG}")).await;
        let gpus = gpushd.gpus().await;
        let states = [GpuState::Held, GpuState::Held, GpuState::Ready];
        assert_eq!([0, 1, 2].map(|gpu: usize| gpus[gpu].state), states, "{loss}");
        assert!(gpus[0].reasons[0].contains("the database was lost"), "{:?}", gpus[0].reasons);
        let refused = gpushd.refused(&["0"], &["3g.40gb"]).await;
        assert_eq!(refused.code, Code::Conflict, "{refused:?}");
        assert!(refused.hint.is_some_and(|hint| hint.contains("gpushctl recover")));
        // A GPU that no rule manages is not held.
        assert_eq!(gpushd.apply(&["2"], &["3g.40gb"]).await.state, OperationState::Done);
        let error = gpushd.health_error("the database was lost").await.expect("health reports it");
        assert!(error.causes.iter().any(|cause| cause.contains("GPUs 0, 1 are held")), "{error:?}");
        assert!(error.hint.as_ref().is_some_and(|hint| hint.contains("`gpushctl recover`")), "{error:?}");
        let kept = error.causes.iter().find_map(|cause| cause.strip_prefix("the damaged database file is kept as "));
        assert_eq!(kept.map(|path| fs::read_to_string(path).expect("a file")).is_some(), loss == "damaged");
        let is_named = |cause: &String| cause.contains("was deleted");
        assert!(loss == "damaged" || error.causes.iter().any(is_named), "{loss}: {error:?}");
        gpushd.stop().await;
        let changes = host.gpus.take_changes();
        assert!(changes.iter().all(|call| call.ends_with(" 2")), "{changes:?}");

        // The GPUs stay held after a restart of gpushd, but not after a reboot.
        if loss == "deleted" {
            host.reboot();
            let gpushd = settled(&host, CONFIG).await;
            assert_eq!(gpushd.gpu(0).await.state, GpuState::Ready);
            assert_eq!(host.gpus.instances(0).len(), 2);
            continue;
        }
        let gpushd = host.start(CONFIG).await;
        gpushd.until_state(0, GpuState::Held).await;
        let recovered = gpushd.change("/v1/recover", "no user is left").await;
        assert_eq!((recovered["released"].as_array().map(Vec::len), recovered["kept"].as_str()), (Some(2), kept));
        assert_eq!(gpushd.gpu(0).await.state, GpuState::Ready);
        assert!(gpushd.health_error("the database was lost").await.is_none());
        assert_eq!(gpushd.change("/v1/recover", "").await["released"], json!([]));
        let trail: Vec<AuditRecord> = gpushd.get("/v1/audit").await;
        let is_recorded = |one: &AuditRecord| one.action == "recover" && one.detail["reason"] == "no user is left";
        assert!(trail.iter().any(is_recorded), "{trail:?}");
        gpushd.stop().await;
        // gpushd keeps the existing layout, also after a restart.
        let gpushd = host.start_with_layouts(CONFIG).await;
        assert_eq!(gpushd.gpu(0).await.drift, ["missing 3g.40gb, 2g.20gb", "extra 7g.80gb@0"]);
        assert!(host.gpus.take_changes().is_empty());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn database_damaged_before_a_boot_is_reported_and_holds_nothing() {
    let host = ScriptedHost::new("dgx-a100", 2);
    settled(&host, CONFIG).await.stop().await;
    fs::write(host.state_directory().join("gpush.db"), "no database").expect("a file");
    host.reboot();
    let gpushd = settled(&host, CONFIG).await;
    let gpu = gpushd.gpu(0).await;
    assert_eq!((gpu.state, gpu.drift), (GpuState::Ready, Vec::new()));
    assert!(gpushd.health_error("lost before this boot").await.is_some());
    let recovered = gpushd.change("/v1/recover", "").await;
    assert_eq!(recovered["released"], json!([]));
    assert!(recovered["kept"].as_str().is_some_and(|kept| fs::metadata(kept).is_ok()), "{recovered}");
    assert!(gpushd.health_error("lost before this boot").await.is_none());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gpus_of_nvidia_mig_manager_are_not_changed() {
    let host = ScriptedHost::new("dgx-a100", 3);
    let wants = host.path("etc/systemd/system/multi-user.target.wants");
    fs::create_dir_all(&wants).expect("a directory");
    let link = wants.join("nvidia-mig-manager.service");
    std::os::unix::fs::symlink("/usr/lib/systemd/system/nvidia-mig-manager.service", &link).expect("a link");
    let gpushd = host.start_with_layouts(CONFIG).await;
    let error = gpushd.until("the error", async || gpushd.health_error("nvidia-mig-manager").await).await;
    assert!(error.hint.is_some_and(|hint| hint.contains("`systemctl disable --now nvidia-mig-manager.service`")));
    let refused = gpushd.refused(&["2"], &["3g.40gb"]).await;
    assert_eq!(refused.code, Code::Conflict, "{refused:?}");
    let path = link.to_str().expect("text");
    assert!(refused.message.contains("GPU 2") && refused.causes[0].contains(path), "{refused:?}");
    // If a request names the layout that already exists, gpushd accepts the request and changes nothing.
    assert_eq!(gpushd.apply(&["2"], &["none"]).await.state, OperationState::Done);
    gpushd.until_layouts_are_settled().await;
    assert!(host.gpus.take_changes().is_empty());
    fs::remove_file(&link).expect("a link");
    assert_eq!(gpushd.apply(&["0", "1"], &["3g.40gb", "2g.20gb"]).await.state, OperationState::Done);
    assert!(gpushd.health().await.errors.is_empty());
}
