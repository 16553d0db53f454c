//! Repeated requests with the same idempotency key are answered, and not executed again.

use gpush_api::{AuditRecord, Code, Gpu, GpuState, Operation, OperationState, OperationSummary};
use hyper::{Method, StatusCode};
use serde_json::{Value, json};

use super::{
    InProcess,
    call_rules::{CallRule, DESTROY, READ},
    host::ScriptedHost,
    requests, user,
};

fn layout(entry: &str) -> Value {
    json!({ "selectors": ["0"], "layout_source": { "entries": [entry] } })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn repeated_apply_gets_the_same_operation_also_after_restarts() {
    let host = ScriptedHost::new("dgx-a100", 1);
    let mut gpushd = host.start("").await;
    // Send several requests at the same time, while gpushd reads the GPU. All answers name the same operation.
    host.gpus.rule(CallRule::on(READ, 0).once().held());
    let headers = [("content-type", "application/json"), ("idempotency-key", "k-1")];
    let asking: Vec<_> = (0..8)
        .map(|_| {
            let body = layout("7g.80gb").to_string().into_bytes();
            gpushd.begin_request(requests::request(user(0), Method::POST, "/v1/mig/apply", &headers, body))
        })
        .collect();
    gpushd.until_held().await;
    host.gpus.release();
    for one in asking {
        let operation: Operation = one.await.expect("an answer").document().expect("an operation");
        assert_eq!(operation.id, "op-1");
    }
    assert_eq!(gpushd.ended(&gpushd.operation("op-1").await).await.state, OperationState::Done);
    // The next gpushd also knows the key. It still refuses a different request with this key.
    for _ in 0..2 {
        gpushd.kill();
        gpushd = host.start("").await;
        let again = gpushd.post_with_key("/v1/mig/apply", "k-1", &layout("7g.80gb")).await;
        assert_eq!((again.status, &again.json()["id"]), (StatusCode::ACCEPTED, &json!("op-1")));
        let other = gpushd.post_with_key("/v1/mig/apply", "k-1", &layout("1g.10gb")).await;
        assert_eq!(other.error().code, Code::Conflict);
    }
    // A cancel request can also have a key.
    host.gpus.rule(CallRule::on(DESTROY, 0).once().held());
    let operation = gpushd.begin_with(&layout("1g.10gb")).await.expect("it begins");
    let path = format!("/v1/operations/{}/cancel", operation.id);
    gpushd.until_held().await;
    assert_eq!(gpushd.post_with_key(&path, "k-2", &json!({})).await.status, StatusCode::ACCEPTED);
    host.gpus.release();
    assert_eq!(gpushd.ended(&operation).await.state, OperationState::RolledBack);
    assert_eq!(gpushd.post_with_key(&path, "k-2", &json!({})).await.status, StatusCode::ACCEPTED);
    assert_eq!(gpushd.cancel(&operation.id).await.unwrap_err().code, Code::Conflict);
    let all: Vec<OperationSummary> = gpushd.get("/v1/operations").await;
    assert_eq!(all.iter().map(|one| one.id.as_str()).collect::<Vec<_>>(), ["op-1", "op-2"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn repeated_cordon_gets_the_present_state() {
    let host = InProcess::start("a30x4", 3, "").await;
    let send = async |verb: &str, key: &str, reason: &str| {
        host.post_with_key(&format!("/v1/gpus/2/{verb}"), key, &json!({ "reason": reason })).await
    };
    let state = |answer: requests::HttpAnswer| answer.document::<Gpu>().expect("a GPU").state;
    assert_eq!(state(send("cordon", "k1", "x").await), GpuState::Cordoned);
    assert_eq!(state(send("uncordon", "k2", "y").await), GpuState::Ready);
    assert_eq!(state(send("cordon", "k1", "x").await), GpuState::Ready, "the same request, sent again");
    assert_eq!(send("cordon", "k1", "z").await.error().code, Code::Conflict, "another one under its key");
    assert_eq!(host.gpu(2).await.state, GpuState::Ready);
    let trail: Vec<AuditRecord> = host.get("/v1/audit").await;
    assert_eq!(trail.iter().filter(|record| record.action == "gpu.cordon").count(), 1);
    let long = host.post::<Value>("/v1/gpus/2/cordon", &json!({ "reason": "x".repeat(501) })).await;
    assert_eq!(long.unwrap_err().code, Code::BadRequest);
    assert_eq!(host.post::<Value>("/v1/gpus/9/cordon", &json!({})).await.unwrap_err().code, Code::NotFound);
}
