//! Requests and answers: invalid requests, long polls, lists in pages, and readings that several requests share.

use gpush_api::{Code, Operation, OperationState, OperationSummary};
use hyper::Method;
use serde_json::{Value, json};

use super::{
    InProcess,
    call_rules::{CallRule, READ},
    user,
};

/// Every error names the mistake.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_invalid_request_gets_an_error_and_a_status() {
    let host = InProcess::start("a30x4", 4, "").await;
    host.gpus().await;
    let json_type = &[("content-type", "application/json")][..];
    let list = |what: &str, count: usize| format!("[{}]", vec![format!("{what:?}"); count].join(","));
    let selectors = format!("{{\"selectors\": {}}}", list("0", 257)).into_bytes();
    let layout = |entries: String| format!("{{\"layout_source\": {{\"entries\": {entries}}}}}").into_bytes();
    let (large, entries, long) = (vec![b' '; 70_000], layout(list("1g.6gb", 65)), layout(list(&"x".repeat(5000), 1)));
    for (method, path, headers, body, status, says) in [
        ("GET", "/", &[][..], &b""[..], 404, "has no path"),
        ("GET", "/v1/gpu", &[], b"", 404, "/v1/gpu"),
        ("GET", "/v1/gpus/", &[], b"", 404, "/v1/gpus/"),
        ("GET", "/v1/gpus/9", &[], b"", 404, "no GPU 9"),
        ("GET", "/v1/gpus/all", &[], b"", 400, "matches 4 GPUs"),
        ("GET", "/v1/gpus/%ff", &[], b"", 400, "UTF-8"),
        ("GET", "/v1/gpus?profile=1", &[], b"", 400, "profiles"),
        ("GET", "/v1/gpus?profiles=maybe", &[], b"", 400, "not `true` or `false`"),
        ("GET", "/v1/operations/op-7", &[], b"", 404, "op-7"),
        ("GET", "/v1/operations/op-7?after=x", &[], b"", 400, "invalid digit"),
        ("PUT", "/v1/gpus", &[], b"", 405, "PUT"),
        ("DELETE", "/v1/operations/op-1", &[], b"", 405, "DELETE"),
        ("GET", "/v1/mig/apply", &[], b"", 405, "GET"),
        ("BREW", "/v1/gpus", &[], b"", 405, "BREW"),
        ("POST", "/v1/mig/apply", &[], b"{}", 415, "content-type"),
        ("POST", "/v1/mig/apply", json_type, b"", 400, "the body"),
        ("POST", "/v1/mig/apply", json_type, b"{\"selectors\": [", 400, "line 1 column 15"),
        ("POST", "/v1/mig/apply", json_type, b"[1]", 400, "the body"),
        ("POST", "/v1/mig/apply", json_type, b"{\"gpu\": []}", 400, "expected one of `selectors`, `layout_source`"),
        ("POST", "/v1/mig/apply", json_type, b"{\"layout_source\": {\"entries\": 7}}", 400, "layout_source.entries"),
        ("POST", "/v1/mig/apply", json_type, b"\xff\xfe", 400, "the body"),
        ("POST", "/v1/mig/apply", json_type, &large, 413, "larger than"),
        ("POST", "/v1/mig/plan", json_type, &selectors, 400, "the limit is 256"),
        ("POST", "/v1/mig/apply", json_type, &entries, 400, "more than 64 entries"),
        ("POST", "/v1/mig/plan", json_type, &long, 413, "longer than 4096 bytes"),
    ] {
        let method = Method::from_bytes(method.as_bytes()).expect("a method");
        let answer = host.request(method.clone(), path, headers, body).await;
        let error = answer.error();
        assert_eq!(answer.status, status, "{method} {path}: {error:?}");
        let text = format!("{} {} {}", error.message, error.causes.join(" "), error.hint.unwrap_or_default());
        assert!(text.contains(says), "{method} {path}: {text}");
        assert!(!answer.headers.contains_key("server"));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unknown_query_parameter_is_refused_on_every_route() {
    let host = InProcess::start("a30x4", 1, "").await;
    let described: Value = host.get("/v1/openapi.json").await;
    assert!(described["openapi"].as_str().is_some_and(|version| version.starts_with("3.1")), "{described}");
    let mut tried = 0;
    for (path, methods) in described["paths"].as_object().expect("paths") {
        let parts: Vec<&str> = path.split('/').map(|part| if part.starts_with('{') { "0" } else { part }).collect();
        let path = parts.join("/");
        for method in methods.as_object().expect("methods").keys() {
            let method = Method::from_bytes(method.to_uppercase().as_bytes()).expect("a method");
            for query in ["misspelt=1", "misspelt", "%6disspelt=%00&x=y"] {
                let headers = [("content-type", "application/json")];
                let answer = host.request(method.clone(), &format!("{path}?{query}"), &headers, "{}").await;
                let error = answer.error();
                assert!(error.code == Code::BadRequest && error.hint.is_some(), "{method} {path}: {error:?}");
                assert!(error.message.contains("isspelt"), "{method} {path}: {error:?}");
            }
            tried += 1;
        }
    }
    assert!(tried >= 40, "{tried} routes");
    // gpushd has changed nothing. An empty query is valid.
    assert_eq!(host.get::<Value>("/v1/operations").await, json!([]));
    host.get::<Value>("/v1/version?").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn profiles_are_in_the_answer_about_one_gpu() {
    let host = InProcess::start("a30x4", 4, "").await;
    assert!(host.gpus().await.iter().all(|gpu| gpu.mig.as_ref().is_some_and(|mig| mig.profiles.is_empty())));
    assert!(!host.gpu(0).await.mig.expect("MIG").profiles.is_empty());
    let listed: Value = host.get("/v1/gpus?profiles=true").await;
    assert_eq!(listed[3]["mig"]["profiles"], host.get::<Value>("/v1/gpus/3/profiles").await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn long_polls_return_with_each_change_and_at_the_end() {
    let host = InProcess::start("dgx-a100", 1, "").await;
    let mut operation = host.begin(&["0"], &["3g.40gb", "1g.10gb*4"], &json!({})).await.expect("it begins");
    let mut revisions = vec![operation.revision];
    while !operation.state.is_final() {
        let path = format!("/v1/operations/op-1?after={}&wait_ms=30000", operation.revision);
        operation = host.get(&path).await;
        revisions.push(operation.revision);
    }
    assert_eq!(operation.state, OperationState::Done);
    assert!(revisions.windows(2).all(|pair| pair[0] < pair[1]), "{revisions:?}");
    // The answer now comes from the journal. The journal does not have every step, but it has the revision.
    assert_eq!(host.operation("op-1").await.revision, operation.revision);
    // If the operation has ended, the answer comes at once, even if the request names a later revision.
    let poll = host.get::<Operation>("/v1/operations/op-1?after=999999&wait_ms=3600000");
    let answer = tokio::time::timeout(super::PATIENCE, poll).await.expect("an answer");
    assert_eq!(answer.state, OperationState::Done);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn operations_are_listed_without_plans_in_pages() {
    let host = InProcess::start("a30x4", 3, "").await;
    for layout in ["2g.12gb*2", "none", "2g.12gb*2", "none", "2g.12gb*2"] {
        assert_eq!(host.apply(&["0", "2"], &[layout]).await.state, OperationState::Done);
    }
    for (query, expected) in [
        ("", &["op-1", "op-2", "op-3", "op-4", "op-5"][..]),
        ("?limit=2", &["op-4", "op-5"]),
        ("?limit=2&before=op-4", &["op-2", "op-3"]),
        ("?limit=2&before=op-2", &["op-1"]),
        ("?before=op-1", &[]),
    ] {
        let listed: Vec<OperationSummary> = host.get(&format!("/v1/operations{query}")).await;
        assert_eq!(listed.iter().map(|one| one.id.as_str()).collect::<Vec<_>>(), expected, "{query}");
    }
    let (short, long) =
        (host.get::<Value>("/v1/operations?limit=1").await, host.get::<Value>("/v1/operations/op-5").await);
    let short = &short[0];
    assert!(short["plans"].is_null() && long["plans"].is_array(), "{short}");
    assert_eq!((&short["gpu_indexes"], &short["state"], &short["by"]), (&json!([0, 2]), &long["state"], &long["by"]));
    assert_eq!((&short["done"], &short["total"]), (&json!(8), &json!(8)));
    for (query, says) in [
        ("limit=0", "1 to 200"),
        ("limit=201", "1 to 200"),
        ("limit=x", "invalid digit"),
        ("before=op-09", "op-09"),
        ("after=1", "before"),
    ] {
        let error = host.get_as::<Value>(user(0), &format!("/v1/operations?{query}")).await.unwrap_err();
        assert!(error.code == Code::BadRequest && error.message.contains(says), "{query}: {error:?}");
    }
}

/// The API shows the last reading of a GPU that hangs, and current readings of the other GPUs. Requests that arrive
/// together share a reading.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readings_are_coalesced_and_a_hung_gpu_is_stale() {
    let host = InProcess::start("dgx-a100", 4, "# --constants driver.read=3000ms\n").await;
    let before = host.gpus.calls();
    let asking: Vec<_> = (0..24)
        .map(|_| host.begin_request(super::requests::request(user(0), Method::GET, "/v1/gpus", &[], Vec::new())))
        .collect();
    for one in asking {
        assert_eq!(one.await.expect("an answer").json().as_array().map(Vec::len), Some(4));
    }
    // A reading of the host is a list and four GPUs. On a busy machine, it may become too old before the last request.
    let calls = host.gpus.calls() - before;
    assert!(calls <= 24, "{calls} calls for 24 requests");
    host.gpus.rule(CallRule::on(READ, 2).once().held());
    host.until("a reading that hangs", async || {
        host.gpus().await;
        host.gpus.is_held().then_some(())
    })
    .await;
    let shown = host
        .until("a stale GPU", async || {
            let gpus = host.gpus().await;
            (gpus[2].stale && gpus.iter().filter(|gpu| gpu.stale).count() == 1).then_some(gpus)
        })
        .await;
    assert_eq!(shown[2].mig.as_ref().map(|mig| mig.memory_slices), Some(8));
    assert_eq!(host.apply(&["3"], &["7g.80gb"]).await.state, OperationState::Done);
    host.gpus.release();
    host.until("a new reading", async || (!host.gpus().await[2].stale).then_some(())).await;
}
