//! The API as plain HTTP. Every response is JSON, every error names the mistake, and no client can
//! block gpushd.

use std::{
    io::{Read, Write},
    time::{Duration, Instant},
};

use gpush_api::{ApiError, Code, OperationState};
use gpush_tests::{
    agent::{Agent, parse},
    host::Host,
};
use serde_json::{Value, json};

#[test]
fn head_that_is_not_http_is_answered_in_json() {
    let host = Host::up("a30x4");
    let agent = Agent::start(&host, "");
    let long = format!("GET /v1/version HTTP/1.1\r\nhost: x\r\nx-long: {}\r\n\r\n", "x".repeat(20_000));
    let many = format!("GET /v1/version HTTP/1.1\r\nhost: x\r\n{}\r\n", "a: b\r\n".repeat(200));
    let path = format!("GET /{} HTTP/1.1\r\nhost: x\r\n\r\n", "x".repeat(70_000));
    for (bytes, statuses) in [
        (&b"this is not HTTP\r\n\r\n"[..], &[400][..]),
        (b"GET /v1/version HTTP/1.1\r\nho st: x\r\n\r\n", &[400]),
        (b"GET /v1/version HTTP/1.1\r\nhost: x\r\ncontent-length: x\r\n\r\n", &[400]),
        (long.as_bytes(), &[431]),
        (many.as_bytes(), &[431]),
        (path.as_bytes(), &[414, 431]),
    ] {
        let answer = parse(&agent.raw(bytes)).unwrap_or_else(|| panic!("{}", String::from_utf8_lossy(bytes)));
        assert!(statuses.contains(&answer.status), "{}", answer.head);
        let error = answer.error();
        assert!(error.code == Code::BadRequest && error.hint.is_some(), "{error:?}");
    }
    // On one connection, an invalid head follows a valid request.
    let mixed = b"GET /v1/version HTTP/1.1\r\nhost: x\r\n\r\nnot HTTP\r\n\r\n";
    assert!(agent.raw(mixed).starts_with(b"HTTP/1.1 200 "));
}

#[test]
fn each_invalid_request_gets_json_error_and_status() {
    let host = Host::up("a30x4");
    let agent = Agent::start(&host, "");
    let json_type = "content-type: application/json\r\n";
    let large = vec![b' '; 70_000];
    let list = |what: &str, count: usize| format!("[{}]", vec![format!("{what:?}"); count].join(","));
    let selectors = format!("{{\"selectors\": {}}}", list("0", 257)).into_bytes();
    let layout = |entries: String| format!("{{\"layout_source\": {{\"entries\": {entries}}}}}").into_bytes();
    let (entries, long) = (layout(list("1g.6gb", 65)), layout(list(&"x".repeat(5000), 1)));
    let mut tried = 0;
    for (method, path, headers, body, status, says) in [
        ("GET", "/", "", &b""[..], 404, "has no path"),
        ("GET", "/v1/gpu", "", b"", 404, "/v1/gpu"),
        ("GET", "/v1/gpus/", "", b"", 404, "/v1/gpus/"),
        ("GET", "/v1/gpus/9", "", b"", 404, "no GPU 9"),
        ("GET", "/v1/gpus/all", "", b"", 400, "matches 4 GPUs"),
        ("GET", "/v1/gpus/%ff", "", b"", 400, "UTF-8"),
        ("GET", "/v1/gpus?profile=1", "", b"", 400, "profiles"),
        ("GET", "/v1/gpus?profiles=maybe", "", b"", 400, "not `true` or `false`"),
        ("GET", "/v1/operations/op-7", "", b"", 404, "op-7"),
        ("GET", "/v1/operations/op-7?after=x", "", b"", 400, "invalid digit"),
        ("PUT", "/v1/gpus", "", b"", 405, "PUT"),
        ("DELETE", "/v1/operations/op-1", "", b"", 405, "DELETE"),
        ("GET", "/v1/mig/apply", "", b"", 405, "GET"),
        ("BREW", "/v1/gpus", "", b"", 405, "BREW"),
        ("POST", "/v1/mig/apply", "", b"{}", 415, "content-type"),
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
        let answer = agent.request(method, path, headers, body);
        assert_eq!(answer.status, status, "{method} {path}: {}", String::from_utf8_lossy(&answer.body));
        let error = answer.error();
        let text = format!("{} {} {}", error.message, error.causes.join(" "), error.hint.unwrap_or_default());
        assert!(text.contains(says), "{method} {path}: {text}");
        assert!(!answer.head.to_lowercase().contains("\r\nserver:"), "{}", answer.head);
        tried += 1;
    }
    println!("{tried} mistakes answered");
}

#[test]
fn openapi_description_is_served_and_lists_every_path() {
    let host = Host::up("a30x4");
    let agent = Agent::start(&host, "");
    let answer = agent.get("/v1/openapi.json");
    assert_eq!(answer.status, 200);
    let described = answer.json();
    assert!(described["openapi"].as_str().unwrap().starts_with("3.1"), "{described}");
    for path in ["/v1/gpus", "/v1/mig/apply", "/v1/operations/{id}", "/v1/health"] {
        assert!(described["paths"][path].is_object(), "{path}");
    }
    // The list of GPUs has no profiles. The response about one GPU has them.
    assert!(agent.gpus().iter().all(|gpu| gpu.mig.as_ref().unwrap().profiles.is_empty()));
    assert!(!agent.gpu(0).mig.unwrap().profiles.is_empty());
    let listed = agent.get("/v1/gpus?profiles=true").json();
    assert_eq!(listed[3]["mig"]["profiles"], agent.get("/v1/gpus/3/profiles").json());
}

#[test]
fn unknown_query_parameter_is_refused_on_every_route() {
    let host = Host::up("a30x4");
    let agent = Agent::start(&host, "");
    let described = agent.get("/v1/openapi.json").json();
    let mut tried = 0;
    for (path, methods) in described["paths"].as_object().expect("paths") {
        let parts: Vec<&str> = path.split('/').map(|part| if part.starts_with('{') { "0" } else { part }).collect();
        let path = parts.join("/");
        for method in methods.as_object().expect("methods").keys().map(|method| method.to_uppercase()) {
            for query in ["misspelt=1", "misspelt", "%6disspelt=%00&x=y"] {
                let headers = "content-type: application/json\r\n";
                let answer = agent.request(&method, &format!("{path}?{query}"), headers, b"{}");
                assert_eq!(answer.status, 400, "{method} {path}?{query}: {}", String::from_utf8_lossy(&answer.body));
                let error = answer.error();
                assert!(error.code == Code::BadRequest && error.hint.is_some(), "{method} {path}: {error:?}");
                assert!(error.message.contains("isspelt"), "{method} {path}: {error:?}");
            }
            tried += 1;
        }
    }
    assert!(tried >= 40, "{tried} routes");
    // gpushd has changed nothing. An empty query is valid.
    assert_eq!(agent.get("/v1/operations").json(), json!([]));
    assert_eq!(agent.get("/v1/version?").status, 200);
}

#[test]
fn gpu_is_found_by_index_uuid_and_pci_address() {
    let host = Host::up("dgx-a100");
    let agent = Agent::start(&host, "");
    let gpu = agent.gpu(5);
    for name in [&gpu.uuid, &gpu.uuid[..12], &gpu.pci, &gpu.pci.to_uppercase(), &gpu.uuid.to_uppercase()] {
        let found = agent.get(&format!("/v1/gpus/{name}"));
        assert_eq!(found.status, 200, "{name}: {}", String::from_utf8_lossy(&found.body));
        assert_eq!(found.json()["index"], 5, "{name}");
    }
}

#[test]
fn incomplete_request_head_times_out() {
    let host = Host::up("a30x4");
    let agent = Agent::start(&host, "");
    let mut tried = 0;
    for start in [&b""[..], b"GET /v1/gpus HTTP/1.1\r\nhost: x\r\n"] {
        let mut slow = agent.connect();
        slow.write_all(start).unwrap();
        // While the incomplete connection is still open, the agent answers other clients.
        assert_eq!(agent.get("/v1/version").status, 200);
        let mut rest = Vec::new();
        slow.read_to_end(&mut rest).unwrap();
        assert!(rest.is_empty() || parse(&rest).unwrap().status >= 400, "{}", String::from_utf8_lossy(&rest));
        tried += 1;
    }
    // If the body of a request does not arrive, the agent answers 408 when the time limit for the
    // body has passed.
    let mut slow = agent.connect();
    slow.write_all(
        b"POST /v1/mig/plan HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n{",
    )
    .unwrap();
    let mut rest = Vec::new();
    let _ = slow.read_to_end(&mut rest);
    assert_eq!(parse(&rest).unwrap().status, 408, "{}", String::from_utf8_lossy(&rest));
    println!("{} slow clients", tried + 1);
}

/// A client that sends single bytes must not get more time than a client that sends nothing.
#[test]
fn client_sending_byte_by_byte_times_out() {
    let host = Host::up("a30x4");
    let agent = Agent::start(&host, "");
    let body = format!("{{\"selectors\": [{}\"0\"]}}", " ".repeat(500));
    let head = "POST /v1/mig/plan HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: ";
    let long = format!("GET /v1/version HTTP/1.1\r\nhost: x\r\nx-filler: {}\r\n\r\n", "x".repeat(500));
    let slow = |at_once: String, byte_by_byte: String| {
        let mut stream = agent.connect();
        stream.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        stream.write_all(at_once.as_bytes()).unwrap();
        let (mut sent, mut answer) = (0, Vec::new());
        let mut buffer = [0; 4096];
        // After each byte, the test waits up to 100 ms for a response. This wait is the pause
        // between two bytes.
        for byte in byte_by_byte.bytes() {
            if stream.write_all(&[byte]).is_err() {
                break;
            }
            sent += 1;
            match stream.read(&mut buffer) {
                Ok(0) => break,
                Ok(length) => answer.extend(&buffer[..length]),
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(_) => break,
            }
        }
        assert!(sent < byte_by_byte.len(), "all of it was waited for");
        assert_eq!(agent.get("/v1/version").status, 200);
        (sent, parse(&answer).map(|answer| answer.status))
    };
    let (of_head, answer) = slow(String::new(), long);
    assert!(answer.is_none_or(|status| status >= 400), "{answer:?}");
    let (of_body, answer) = slow(format!("{head}{}\r\n\r\n", body.len()), body);
    assert_eq!(answer, Some(408));
    println!("closed after {of_head} bytes of a head, {of_body} of a body");
}

/// If a client sends more than the maximum size of a request, gpushd reads only up to this size.
#[test]
fn ten_megabyte_body_is_refused_before_it_is_read() {
    let host = Host::up("a30x4");
    let agent = Agent::start(&host, "");
    let most = 10 << 20;
    let head = "POST /v1/mig/plan HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n";
    let reported = format!("{head}content-length: {most}\r\n\r\n");
    // Send one request with a content length, and one without.
    let chunked = format!("{head}transfer-encoding: chunked\r\n\r\n{most:x}\r\n");
    let mut tried = 0;
    for start in [reported, chunked] {
        let mut stream = agent.connect();
        stream.write_all(start.as_bytes()).unwrap();
        let piece = vec![b' '; 64 << 10];
        let mut sent = 0;
        while sent < most && stream.write_all(&piece).is_ok() {
            sent += piece.len();
        }
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        assert!(sent < most, "all of it was taken");
        // The test was still writing when gpushd closed the connection, so the kernel may have
        // dropped the response.
        if let Some(answer) = parse(&answer) {
            assert_eq!(answer.status, 413);
        }
        assert_eq!(agent.get("/v1/version").status, 200);
        tried += 1;
    }
    println!("{tried} large bodies refused");
}

#[test]
fn connection_carries_several_requests() {
    let host = Host::up("a30x4");
    let agent = Agent::start(&host, "");
    let mut stream = agent.connect();
    for _ in 0..3 {
        stream.write_all(b"GET /v1/version HTTP/1.1\r\nhost: x\r\n\r\n").unwrap();
        let mut read = Vec::new();
        let mut byte = [0];
        while !read.ends_with(b"\r\n\r\n") {
            stream.read_exact(&mut byte).unwrap();
            read.push(byte[0]);
        }
        let head = String::from_utf8(read).unwrap();
        let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")).unwrap().parse().unwrap();
        let mut body = vec![0; length];
        stream.read_exact(&mut body).unwrap();
        assert_eq!(serde_json::from_slice::<Value>(&body).unwrap()["api"], "v1");
    }
}

#[test]
fn long_polls_return_with_each_change_and_at_the_end() {
    let host = Host::up("dgx-a100");
    let agent = Agent::start(&host, "");
    let mut operation = agent.begin(&["0"], &["3g.40gb", "1g.10gb*4"]).unwrap();
    let mut revisions = vec![operation.revision];
    while !operation.state.is_final() {
        let path = format!("/v1/operations/op-1?after={}&wait_ms=30000", operation.revision);
        operation = serde_json::from_value(agent.get(&path).json()).unwrap();
        revisions.push(operation.revision);
    }
    assert_eq!(operation.state, OperationState::Done);
    assert!(revisions.windows(2).all(|pair| pair[0] < pair[1]), "{revisions:?}");
    println!("{} answers until the end", revisions.len());
    // The response now comes from the journal. The journal does not have every step, but it has the
    // revision.
    assert_eq!(agent.operation("op-1").revision, operation.revision);
    // If the operation has ended, the response comes immediately, even if the request names a later
    // revision.
    let begun = Instant::now();
    let answer = agent.get("/v1/operations/op-1?after=999999&wait_ms=60000");
    assert_eq!(answer.json()["state"], "done");
    assert!(begun.elapsed() < Duration::from_secs(30));
    assert_eq!(agent.get("/v1/operations").json().as_array().unwrap().len(), 1);
}

#[test]
fn operations_are_listed_without_plans_in_pages() {
    let host = Host::up("a30x4");
    let agent = Agent::start(&host, "");
    for round in 0..5 {
        let layout: &[&str] = if round % 2 == 0 { &["2g.12gb*2"] } else { &["none"] };
        assert_eq!(agent.apply(&["0", "2"], layout).state, OperationState::Done);
    }
    let ids = |path: &str| -> Vec<String> {
        let listed = agent.get(path).json();
        listed.as_array().unwrap().iter().map(|one| one["id"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(ids("/v1/operations"), ["op-1", "op-2", "op-3", "op-4", "op-5"]);
    assert_eq!(ids("/v1/operations?limit=2"), ["op-4", "op-5"]);
    assert_eq!(ids("/v1/operations?limit=2&before=op-4"), ["op-2", "op-3"]);
    assert_eq!(ids("/v1/operations?limit=2&before=op-2"), ["op-1"]);
    assert!(ids("/v1/operations?before=op-1").is_empty());
    let listed = agent.get("/v1/operations?limit=1").json();
    let (short, long) = (&listed[0], agent.get("/v1/operations/op-5").json());
    assert!(short["plans"].is_null() && long["plans"].is_array(), "{short}");
    assert_eq!((&short["gpu_indexes"], &short["state"], &short["by"]), (&json!([0, 2]), &long["state"], &long["by"]));
    assert_eq!((&short["done"], &short["total"]), (&json!(8), &json!(8)));
    for (query, status, says) in [
        ("limit=0", 400, "1 to 200"),
        ("limit=201", 400, "1 to 200"),
        ("limit=x", 400, "invalid digit"),
        ("before=op-09", 400, "op-09"),
        ("after=1", 400, "before"),
    ] {
        let answer = agent.get(&format!("/v1/operations?{query}"));
        let error = answer.error();
        assert_eq!(answer.status, status, "{query}: {error:?}");
        assert!(error.message.contains(says), "{query}: {error:?}");
    }
}

#[test]
fn readings_are_coalesced_and_hung_gpu_is_stale() {
    let host = Host::up("dgx-a100");
    let agent = Agent::start(&host, "[driver]\nread_ms = 3000\n");
    assert_eq!(agent.gpus().len(), 8);
    host.fault("nvmlDeviceGetMigMode --gpu 4 --times 1 --hang");
    agent.settle_reads_except(4);
    // The API shows the last reading of the GPU that hangs, and current readings of the other GPUs.
    let gpus = agent.gpus();
    assert_eq!(gpus.len(), 8);
    assert!(gpus[4].stale, "{:?}", gpus[4]);
    assert!(gpus.iter().filter(|gpu| gpu.stale).count() < 8);
    assert_eq!(gpus[4].mig.as_ref().unwrap().memory_slices, 8);
    assert_eq!(agent.apply(&["3"], &["7g.80gb"]).state, OperationState::Done);
    host.clear_faults();
    agent.settle_reads();
}

#[test]
fn concurrent_requests_get_the_same_answer() {
    let host = Host::up("dgx-a100");
    let agent = Agent::start(&host, "");
    let answers: Vec<Vec<u8>> = std::thread::scope(|scope| {
        let askers: Vec<_> = (0..24).map(|_| scope.spawn(|| agent.get("/v1/gpus").body)).collect();
        askers.into_iter().map(|asker| asker.join().unwrap()).collect()
    });
    for body in &answers {
        let gpus: Value = serde_json::from_slice(body).unwrap();
        assert_eq!(gpus.as_array().unwrap().len(), 8);
    }
    println!("{} askers at once", answers.len());
}

#[test]
fn plan_lists_steps_per_gpu_and_changes_nothing() {
    let host = Host::up("mixed");
    let agent = Agent::start(&host, "");
    host.start_trace();
    let answer = agent.post("/v1/mig/plan", &json!({"selectors": ["all"], "layout_source": {"entries": ["1g.10gb"]}}));
    assert_eq!(answer.status, 200);
    let plans = answer.json();
    let plans = plans["plans"].as_array().unwrap();
    assert_eq!(plans.len(), 6);
    let refusal = |n: usize| plans[n]["refusal"]["reason"].as_str();
    assert_eq!(refusal(0), None);
    assert_eq!(refusal(1), Some("unknown_profile"), "an A30 has no 1g.10gb");
    assert_eq!(refusal(4), Some("no_mig"));
    assert!(plans[1]["error"]["hint"].as_str().unwrap().contains("1g.6gb"), "{}", plans[1]);
    assert_eq!(host.trace(), []);
    // If a request asks gpushd to apply these plans, gpushd refuses the whole request.
    let refused = agent.begin(&["all"], &["1g.10gb"]).unwrap_err();
    assert_eq!(refused.code, Code::UnknownProfile);
    assert_eq!(refused.message, "4 of 6 GPUs cannot be changed: GPUs 1, 3, 4, 5");
    let own: Vec<ApiError> =
        plans.iter().filter_map(|plan| serde_json::from_value(plan["error"].clone()).ok()).collect();
    assert_eq!((refused.errors.len(), refused.causes.len()), (4, 0), "{refused:?}");
    assert_eq!(refused.errors.to_vec(), own, "each as its own plan has it");
    assert!(refused.outcome.as_ref().is_some_and(|outcome| outcome.contains("no GPU was changed")), "{refused:?}");
    assert_eq!(host.trace(), []);
}
