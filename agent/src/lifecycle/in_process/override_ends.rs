//! Overrides that expire, and overrides at the next start or on the next boot.

use std::sync::Arc;

use gpush_api::{Operation, OperationState};
use serde_json::{Value, json};

use super::{
    host::ScriptedHost,
    overrides::{CONFIG, HALVES, WHOLE, empty, started, whole},
};

/// Waits until an override has expired. Times of the API are whole seconds, so the override may expire almost a second
/// later.
async fn until_expired(expires_at: jiff::Timestamp) {
    while jiff::Timestamp::now() < expires_at + jiff::SignedDuration::from_secs(1) {
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn changed_rule_suspends_override_at_start() {
    let gpushd = started().await;
    let host = Arc::clone(&gpushd.host);
    gpushd.done(&whole("still there")).await;
    gpushd.stop().await;
    let gpushd = host.start("[[gpu]]\nmatch = [\"all\"]\nmode = \"mig\"\nlayout = [\"1g.10gb*7\"]\n").await;
    assert!(gpushd.gpu(0).await.drift.is_empty(), "the override also replaces the layout of the new rule");
    gpushd.stop().await;
    let gpushd = host.start("[[gpu]]\nmatch = [\"all\"]\nmode = \"exclusive\"\n").await;
    let gpu = gpushd.gpu(0).await;
    assert_eq!((gpu.layout, gpu.drift.len()), (None, 1), "an override does not partition a GPU in mode `exclusive`");
    assert_eq!(gpushd.only_override().await.reason, "still there");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn expired_override_stays_expired_and_its_layout_stays() {
    let gpushd = started().await;
    let host = Arc::clone(&gpushd.host);
    gpushd.short_override().await;
    assert_eq!(gpushd.only_override().await.reason, "for a moment");
    gpushd.until("the record of the end", async || (gpushd.overrides().await.generation == 2).then_some(())).await;
    let gpu = gpushd.gpu(0).await;
    assert!(gpu.overridden.is_none() && gpu.drift.len() == 2, "{gpu:?}");
    gpushd.stop().await;
    let gpushd = host.start(CONFIG).await;
    assert_eq!(gpushd.overrides().await, empty(2));
    assert_eq!(host.gpus.instances(0), WHOLE);
    // The second override expires while gpushd does not run.
    gpushd.short_override().await;
    let expires_at = gpushd.only_override().await.expires_at.expect("an expiry");
    gpushd.kill();
    until_expired(expires_at).await;
    let gpushd = host.start(CONFIG).await;
    gpushd.until("the record of the end", async || (gpushd.overrides().await.generation == 4).then_some(())).await;
    assert_eq!(
        (gpushd.overrides().await.overrides.len(), host.gpus.instances(0)),
        (0, WHOLE.map(str::to_owned).to_vec())
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn auto_reconcile_follows_an_override_and_its_end() {
    let host = ScriptedHost::new("dgx-a100", 2);
    let gpushd = host.start_with_layouts(&format!("auto_reconcile = true\n{CONFIG}")).await;
    gpushd.until_layouts_are_settled().await;
    let has = async |layout: &[&str]| {
        gpushd.until("the layout", async || (host.gpus.instances(0) == layout).then_some(())).await;
        gpushd.operations().await;
    };
    gpushd.short_override().await;
    has(&HALVES).await;
    gpushd.done(&whole("to be cleared")).await;
    // While the override is active, a repair of drift restores the layout of the override.
    assert_eq!(gpushd.apply_once(&["0"], &["1g.10gb"]).await.state, OperationState::Done);
    gpushd.post::<Value>("/v1/config/reload", &json!({})).await.expect("it is taken");
    has(&WHOLE).await;
    gpushd.delete::<Value>("/v1/overrides/0").await.expect("it is cleared");
    has(&HALVES).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn new_boot_applies_the_active_override() {
    let gpushd = started().await;
    let host = Arc::clone(&gpushd.host);
    gpushd.done(&whole("also after a reboot")).await;
    gpushd.stop().await;
    host.reboot();
    let gpushd = host.start_with_layouts(CONFIG).await;
    gpushd.until_layouts_are_settled().await;
    assert_eq!(
        (host.gpus.instances(0), host.gpus.instances(1)),
        (WHOLE.map(str::to_owned).to_vec(), HALVES.map(str::to_owned).to_vec())
    );
    assert!(gpushd.gpus().await.iter().all(|gpu| gpu.drift.is_empty()));
    assert_eq!(gpushd.only_override().await.reason, "also after a reboot", "gpushd's own operation keeps it");
    gpushd.short_override().await;
    let expires_at = gpushd.only_override().await.expires_at.expect("an expiry");
    gpushd.kill();
    host.reboot();
    until_expired(expires_at).await;
    let gpushd = host.start_with_layouts(CONFIG).await;
    gpushd.until_layouts_are_settled().await;
    assert_eq!(
        (host.gpus.instances(0), gpushd.overrides().await.overrides.len()),
        (HALVES.map(str::to_owned).to_vec(), 0)
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn impossible_override_at_boot_leaves_the_gpu_and_is_reported() {
    let gpushd = started().await;
    let host = Arc::clone(&gpushd.host);
    gpushd.done(&whole("blocked at boot")).await;
    gpushd.stop().await;
    host.reboot();
    // A process uses the GPU before gpushd starts.
    host.gpus.create_by_hand(0, "1g.10gb", 0);
    host.gpus.use_first_device(0, std::process::id());
    let gpushd = host.start_with_layouts(CONFIG).await;
    let reported = gpushd
        .until("the error", async || {
            let errors = format!("{:?}", gpushd.health().await.errors);
            Some(errors).filter(|errors| errors.contains("this layout is an override by"))
        })
        .await;
    assert!(reported.contains("1g.10gb@0 is in use") && reported.contains("`gpushctl gpu holders 0`"), "{reported}");
    assert!(reported.contains("the GPU is in use: gpushd tries again"), "{reported}");
    gpushd.until("the layout of GPU 1", async || (host.gpus.instances(1) == HALVES).then_some(())).await;
    assert_eq!(host.gpus.instances(0), ["1g.10gb@0"], "neither the override's layout nor the rule's");
    assert_eq!(gpushd.gpu(0).await.drift, ["missing 7g.80gb", "extra 1g.10gb@0"]);
    assert_eq!(gpushd.only_override().await.reason, "blocked at boot");
}

/// The layout is applied, but it is not desired any more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn override_that_expires_in_the_queue_is_not_set() {
    let gpushd = started().await;
    gpushd.gpus.use_first_device(0, std::process::id());
    let expires_at = jiff::Timestamp::now() + jiff::SignedDuration::from_secs(1);
    let mut body = whole("too late");
    (body["expires_at"], body["wait_s"]) = (json!(expires_at.to_string()), json!(600));
    let waiting: Operation = gpushd.post("/v1/mig/apply", &body).await.expect("it waits");
    until_expired(expires_at).await;
    gpushd.gpus.end_processes(0);
    assert_eq!(gpushd.ended(&waiting).await.state, OperationState::Done);
    assert_eq!((gpushd.overrides().await, gpushd.gpus.instances(0)), (empty(0), WHOLE.map(str::to_owned).to_vec()));
}
