//! Services and hooks around an operation: gpushd stops the services that run. It starts them again when the operation
//! ends, also after a failure or a crash.

use std::sync::Arc;

use gpush_api::{Health, Operation, OperationState};
use gpush_host::helper::End;
use gpush_nvml::ErrorKind;
use serde_json::json;

use super::{
    InProcess,
    call_rules::{CREATE, CallEffect, CallRule, EndMoment},
    host::ScriptedHost,
    user,
};

const CONFIG: &str = "[mode_change]\nservices = [\"dcgm\", \"nvsm\"]\n# --constants systemctl=/bin/true\n\
    before = \"/bin/true\"\nafter = \"/bin/true\"\n";
const LAYOUT: &[&str] = &["3g.40gb"];

/// Returns a host with this number of GPUs without instances, on which the service `dcgm` runs.
fn host(gpus: usize) -> Arc<ScriptedHost> {
    let host = ScriptedHost::new("dgx-h100", gpus);
    host.gpus.without_mig();
    host.services.start("dcgm");
    host
}

fn reason(operation: &Operation) -> String {
    operation.error.as_ref().map_or_else(String::new, |error| error.sentences().join("; "))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_services_that_ran_are_started_again() {
    let host = host(1);
    let gpushd = host.start(CONFIG).await;
    assert_eq!(gpushd.apply(&["0"], LAYOUT).await.state, OperationState::Done);
    let calls = ["is-active dcgm", "stop dcgm", "is-active nvsm", "hook-before", "hook-after done", "start dcgm"];
    assert_eq!(host.services.take_calls(), calls);
    assert!(host.services.runs("dcgm") && !host.services.runs("nvsm"));
    // A change of the layout alone needs neither services nor hooks.
    assert_eq!(gpushd.apply(&["0"], &["3g.40gb", "2g.20gb"]).await.state, OperationState::Done);
    assert_eq!(host.services.take_calls(), [] as [String; 0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failure_before_the_steps_restarts_the_services() {
    for (call, end, says, runs_hook) in [
        ("is-active nvsm", End::TimedOut, "the check of the state of nvsm failed", false),
        ("stop dcgm", End::Exited(1), "stopping dcgm failed", false),
        ("hook-before", End::Exited(7), "the hook /bin/true failed: the command ended with status 7", true),
    ] {
        let host = host(1);
        host.services.end(call, end);
        let gpushd = host.start(CONFIG).await;
        let ended = gpushd.apply(&["0"], LAYOUT).await;
        assert_eq!(ended.state, OperationState::RolledBack, "{call}: {ended:?}");
        assert!(reason(&ended).contains(says), "{call}: {ended:?}");
        assert_eq!(host.gpus.take_changes(), [] as [String; 0], "{call}");
        let calls = host.services.take_calls();
        assert!(calls.ends_with(&["start dcgm".to_owned()]) && host.services.runs("dcgm"), "{call}: {calls:?}");
        assert_eq!(calls.iter().any(|call| call == "hook-after rolled_back"), runs_hook, "{call}: {calls:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hook_after_a_rollback_gets_its_result() {
    let host = host(1);
    let gpushd = host.start(CONFIG).await;
    host.gpus.fail(CREATE, 0, 1, ErrorKind::Unknown);
    host.services.end("hook-after", End::Exited(1));
    let ended = gpushd.apply(&["0"], LAYOUT).await;
    assert_eq!(ended.state, OperationState::RolledBack, "{ended:?}");
    assert!(host.services.take_calls().contains(&"hook-after rolled_back".to_owned()));
    // Its failure is only noted.
    assert!(ended.notes.iter().any(|note| note.contains("the hook /bin/true ended with status 1")), "{ended:?}");
    assert!(host.services.runs("dcgm"));
    // The hook runs once, because a second run might do harm. The next gpushd does not run it again.
    gpushd.stop().await;
    let gpushd = host.start(CONFIG).await;
    gpushd.stop().await;
    assert_eq!(host.services.take_calls(), [] as [String; 0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn service_that_does_not_start_is_reported_until_it_runs() {
    let host = host(1);
    let gpushd = host.start(CONFIG).await;
    host.services.end("start dcgm", End::Exited(1));
    let ended = gpushd.apply(&["0"], LAYOUT).await;
    assert_eq!(ended.state, OperationState::Done, "{ended:?}");
    assert!(
        ended.notes.iter().any(|note| note.starts_with("dcgm was stopped and cannot be started again")),
        "{ended:?}"
    );
    let tries = host.services.take_calls().iter().filter(|call| *call == "start dcgm").count();
    assert_eq!(tries, 3);
    let reported = async |gpushd: &InProcess| {
        let health: Health = gpushd.get("/v1/health").await;
        health.errors.iter().any(|error| error.message.contains("dcgm was stopped for operation op-1"))
    };
    assert!(reported(&gpushd).await);
    // The next gpushd tries again.
    gpushd.kill();
    host.services.clear_faults();
    let gpushd = host.start(CONFIG).await;
    gpushd.until("the service", async || host.services.runs("dcgm").then_some(())).await;
    assert!(!reported(&gpushd).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn service_starts_when_the_last_operation_that_stopped_it_ends() {
    let host = host(2);
    let gpushd = host.start(CONFIG).await;
    host.gpus.hold(CREATE, 0);
    let first = gpushd.begin(&["0"], LAYOUT, &json!({})).await.expect("it begins");
    gpushd.until_held().await;
    let second = gpushd.apply(&["1"], LAYOUT).await;
    assert_eq!(second.state, OperationState::Done, "{second:?}");
    assert!(!host.services.runs("dcgm"), "the first operation needs it stopped");
    host.gpus.release();
    assert_eq!(gpushd.ended(&first).await.state, OperationState::Done);
    assert!(host.services.runs("dcgm"));
    assert_eq!(host.services.take_calls().iter().filter(|call| *call == "start dcgm").count(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn next_gpushd_starts_the_services_that_a_crash_left_stopped() {
    for moment in [EndMoment::Before, EndMoment::After] {
        let host = host(1);
        let gpushd = host.start(CONFIG).await;
        host.gpus.rule(CallRule::on(CREATE, 0).once().with(CallEffect::EndGpushd(moment)));
        let body = json!({ "selectors": ["0"], "layout_source": { "entries": LAYOUT } });
        let asked = gpushd.begin_post(user(0), "/v1/mig/apply", &body);
        gpushd.died().await;
        drop(asked);
        assert!(!host.services.runs("dcgm"), "{moment:?}");
        let gpushd = host.start(CONFIG).await;
        let ended = gpushd.ended(&gpushd.operation("op-1").await).await;
        assert_eq!(ended.state, OperationState::Done, "{moment:?}: {ended:?}");
        assert!(host.services.runs("dcgm"), "{moment:?}");
        let calls = host.services.take_calls();
        assert_eq!(calls.iter().filter(|call| call.starts_with("hook-after")).count(), 1, "{moment:?}: {calls:?}");
    }
}
