//! Requests to the agent about MPS: method, path, body, and a key for each change.
//!
//! Helpers outside `#[test]` functions may panic too: that is how a test fails.
#![allow(clippy::unwrap_used)]

use std::{
    convert::Infallible,
    path::Path,
    sync::{Arc, Mutex},
    time::Duration,
};

use gpush_api::{MpsEndRequest, MpsSetRequest, MpsShareRequest};
use gpush_client::{Client, Kind, Origin, Socket};
use http_body_util::{BodyExt, Full};
use hyper::{Request, Response, body::Bytes, body::Incoming, service::service_fn};
use hyper_util::rt::TokioIo;
use tokio::net::UnixListener;

/// `METHOD path body`, and the key.
type Asked = Arc<Mutex<Vec<(String, Option<String>)>>>;

/// Starts an agent that answers 404 and records the requests.
fn serve(path: &Path) -> Asked {
    let listener = UnixListener::bind(path).unwrap();
    let asked = Asked::default();
    let all = Arc::clone(&asked);
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let all = Arc::clone(&all);
            tokio::spawn(async move {
                let service = service_fn(move |request: Request<Incoming>| {
                    let all = Arc::clone(&all);
                    async move {
                        let key = request.headers().get("idempotency-key").map(|key| key.to_str().unwrap().to_owned());
                        let head = format!("{} {}", request.method(), request.uri().path_and_query().unwrap());
                        let body = request.into_body().collect().await.unwrap().to_bytes();
                        let line = format!("{head} {}", String::from_utf8_lossy(&body));
                        all.lock().unwrap().push((line.trim_end().to_owned(), key));
                        let error = r#"{"code":"not_found","message":"no MPS here"}"#;
                        let answer = Response::builder().status(404).body(Full::new(Bytes::from(error)));
                        Ok::<_, Infallible>(answer.unwrap())
                    }
                });
                drop(hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service).await);
            });
        }
    });
    asked
}

#[tokio::test]
async fn targets_are_escaped_and_changes_have_keys() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("s");
    let asked = serve(&socket);
    let mut client = Client::new(Socket::given(&socket, Origin::Option)).deadline(Duration::from_secs(5));
    let target = "0:2g.20gb@2";
    let forced = MpsEndRequest { force: true, end_after_s: None };
    let drain = MpsEndRequest { force: false, end_after_s: Some(60) };
    let set = MpsSetRequest { percentage: "12.5".parse().ok(), ..MpsSetRequest::default() };
    let share = MpsShareRequest { memory_limit_mib: "8G".parse().ok(), for_s: Some(7), ..MpsShareRequest::default() };
    assert_eq!(client.mps().await.unwrap_err().kind, Kind::Answer);
    assert!(client.mps_daemon(target).await.is_err());
    assert!(client.mps_start(target).await.is_err());
    assert!(client.mps_stop(target, &forced).await.is_err());
    assert!(client.mps_restart(target, &MpsEndRequest::default()).await.is_err());
    assert!(client.mps_drain(target, &drain).await.is_err());
    assert!(client.mps_set(target, &set).await.is_err());
    assert!(client.mps_take_share("a/b", &share).await.is_err());
    assert!(client.mps_release("s12").await.is_err());
    assert!(client.mps_logs(target, 40, false).await.is_err());
    assert!(client.processes().await.is_err());

    let asked = asked.lock().unwrap().clone();
    let lines: Vec<&str> = asked.iter().map(|(line, _)| line.as_str()).collect();
    assert_eq!(
        lines,
        [
            "GET /v1/mps",
            "GET /v1/mps/0:2g.20gb%402",
            "POST /v1/mps/0:2g.20gb%402/start {}",
            "POST /v1/mps/0:2g.20gb%402/stop {\"force\":true}",
            "POST /v1/mps/0:2g.20gb%402/restart {}",
            "POST /v1/mps/0:2g.20gb%402/drain {\"end_after_s\":60}",
            "POST /v1/mps/0:2g.20gb%402/settings {\"percentage\":12.5}",
            "POST /v1/mps/a%2Fb/shares {\"memory_limit_mib\":8192,\"for_s\":7}",
            "DELETE /v1/mps/shares/s12",
            "GET /v1/mps/0:2g.20gb%402/logs?lines=40",
            "GET /v1/processes",
        ]
    );
    for (line, key) in &asked {
        assert_eq!(key.is_some(), !line.starts_with("GET"), "{line}");
    }
    let mut keys: Vec<_> = asked.iter().filter_map(|(_, key)| key.clone()).collect();
    let all = keys.len();
    keys.sort();
    keys.dedup();
    assert_eq!(keys.len(), all, "no key is used twice");
}
