//! Layouts: what gpushd refuses, which calls it makes, and in which order operations begin.

use gpush_api::{Code, OperationState};
use serde_json::json;

use super::{
    InProcess,
    call_rules::{CREATE, CREATE_COMPUTE, DESTROY, DESTROY_COMPUTE},
};

const MIG: &str = "[[gpu]]\nmatch = [\"all\"]\nmode = \"mig\"\nlayout = [\"1g.10gb\"]\n";

async fn host(gpus: usize) -> InProcess {
    InProcess::start("dgx-h100", gpus, MIG).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn layout_is_applied_and_read_back() {
    let host = host(2).await;
    let ended = host.apply(&["0"], &["3g.40gb", "2g.20gb"]).await;
    assert_eq!(ended.state, OperationState::Done, "{:?}", ended.error);
    assert_eq!(host.gpus.instances(0).len(), 2);
    assert!(host.gpus.instances(1).is_empty(), "the other GPU stays as it is");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_the_difference_is_changed() {
    let host = host(1).await;
    host.apply(&["0"], &["3g.40gb", "1g.10gb"]).await;
    host.gpus.take_changes();
    let ended = host.apply(&["0"], &["3g.40gb", "2g.20gb"]).await;
    assert_eq!(ended.state, OperationState::Done, "{:?}", ended.error);
    let changes = [DESTROY_COMPUTE, DESTROY, CREATE, CREATE_COMPUTE].map(|call| format!("{call} 0"));
    assert_eq!(host.gpus.take_changes(), changes, "the 3g.40gb instance is kept");
    let again = host.apply(&["0"], &["3g.40gb", "2g.20gb"]).await;
    assert_eq!((again.state, host.gpus.take_changes().len()), (OperationState::Done, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn impossible_layout_is_refused_before_any_call() {
    let host = host(1).await;
    for (layout, code) in [
        (&["4g.40gb", "4g.40gb"][..], Code::LayoutImpossible),
        (&["9g.90gb"], Code::UnknownProfile),
        (&["1g.10gb@7", "1g.10gb@7"], Code::LayoutImpossible),
    ] {
        let error = host.begin(&["0"], layout, &json!({})).await.unwrap_err();
        assert_eq!(error.code, code, "{layout:?}: {error:?}");
        assert!(error.hint.is_some(), "{error:?}");
    }
    let error = host.begin(&["5"], &["1g.10gb"], &json!({})).await.unwrap_err();
    assert_eq!(error.code, Code::NotFound, "{error:?}");
    assert!(host.gpus.take_changes().is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn used_instance_is_never_destroyed_and_the_process_is_named() {
    let host = host(1).await;
    host.apply(&["0"], &["3g.40gb"]).await;
    host.gpus.use_first_device(0, std::process::id());
    host.gpus.take_changes();
    let error = host.begin(&["0"], &["7g.80gb"], &json!({})).await.unwrap_err();
    assert_eq!(error.code, Code::Blocked, "{error:?}");
    assert!(format!("{error:?}").contains(&std::process::id().to_string()), "{error:?}");
    assert!(host.gpus.take_changes().is_empty());
    // An instance beside it can be created.
    let ended = host.apply(&["0"], &["3g.40gb", "1g.10gb"]).await;
    assert_eq!((ended.state, host.gpus.instances(0).len()), (OperationState::Done, 2));
    host.gpus.end_processes(0);
    assert_eq!(host.apply(&["0"], &["7g.80gb"]).await.state, OperationState::Done);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn second_change_of_a_gpu_is_refused_or_waits() {
    let host = host(2).await;
    host.gpus.hold(CREATE, 0);
    let first = host.begin(&["0"], &["3g.40gb"], &json!({})).await.expect("it begins");
    host.until("the call is held", async || (!host.gpus.changes().is_empty()).then_some(())).await;
    let refused = host.begin(&["0"], &["7g.80gb"], &json!({})).await.unwrap_err();
    assert_eq!((refused.code, refused.retryable), (Code::Conflict, true), "{refused:?}");
    assert!(format!("{refused:?}").contains(&first.id), "{refused:?}");
    let waits = host.begin(&["0"], &["7g.80gb"], &json!({ "wait_s": 600 })).await.expect("it waits");
    assert!(!waits.begun && !waits.state.is_final(), "{waits:?}");
    let other = host.apply(&["1"], &["7g.80gb"]).await;
    assert_eq!(other.state, OperationState::Done, "another GPU does not wait");
    host.gpus.release();
    assert_eq!(host.ended(&first).await.state, OperationState::Done);
    assert_eq!(host.ended(&waits).await.state, OperationState::Done);
    assert_eq!(host.gpus.instances(0), ["7g.80gb@0"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiting_operations_begin_in_their_order_and_can_be_cancelled() {
    let host = host(1).await;
    host.gpus.hold(CREATE, 0);
    let first = host.begin(&["0"], &["3g.40gb"], &json!({})).await.expect("it begins");
    let wait = json!({ "wait_s": 600 });
    let second = host.begin(&["0"], &["4g.40gb"], &wait).await.expect("it waits");
    let third = host.begin(&["0"], &["2g.20gb"], &wait).await.expect("it waits");
    let fourth = host.begin(&["0"], &["7g.80gb"], &wait).await.expect("it waits");
    let cancelled: gpush_api::Operation =
        host.post(&format!("/v1/operations/{}/cancel", third.id), &json!({})).await.expect("it is cancelled");
    assert_eq!(host.ended(&cancelled).await.error.expect("an error").code, Code::Cancelled);
    host.gpus.release();
    let mut ends = Vec::new();
    for operation in [&first, &second, &fourth] {
        let ended = host.ended(operation).await;
        assert_eq!(ended.state, OperationState::Done, "{:?}", ended.error);
        ends.push(ended.ended_at.expect("a time"));
    }
    assert!(ends.is_sorted(), "{ends:?}");
    assert_eq!(host.gpus.instances(0), ["7g.80gb@0"]);
}

/// A change creates an override, unless it has `once`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn applied_layout_stays_desired_only_without_once() {
    let host = host(1).await;
    let once = host.begin(&["0"], &["3g.40gb"], &json!({ "once": true })).await.expect("it begins");
    assert_eq!(host.ended(&once).await.state, OperationState::Done);
    let gpu = host.gpus().await.remove(0);
    assert!(gpu.overridden.is_none() && !gpu.drift.is_empty(), "{:?}", gpu.drift);
    host.apply(&["0"], &["3g.40gb"]).await;
    let gpu = host.gpus().await.remove(0);
    assert!(gpu.overridden.is_some() && gpu.drift.is_empty(), "{:?}", gpu.drift);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gpu_that_another_mode_owns_is_not_changed() {
    let config = "[[gpu]]\nmatch = [\"0\"]\nmode = \"exclusive\"\n[[gpu]]\nmatch = [\"1\"]\nmode = \"unmanaged\"\n";
    let host = InProcess::start("dgx-h100", 2, config).await;
    for gpu in ["0", "1"] {
        let error = host.begin(&[gpu], &["3g.40gb"], &json!({})).await.unwrap_err();
        assert!(!error.retryable && error.hint.is_some(), "GPU {gpu}: {error:?}");
    }
    assert!(host.gpus.take_changes().is_empty());
}
