//! Requests about MPS: method, path, body, and a key for each change.
//!
//! Helper functions outside `#[test]` functions may also panic to fail a test.
#![allow(clippy::unwrap_used)]

mod served;

use std::time::Duration;

use gpush_api::{MpsActionRequest, MpsSetRequest};
use gpush_client::{Client, Kind, Origin, Socket};
use served::serve;

#[tokio::test]
async fn targets_are_escaped_and_changes_have_idempotency_keys() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("s");
    let asked = serve(&socket);
    let mut client = Client::new(Socket::given(&socket, Origin::Option)).deadline(Duration::from_secs(5));
    let target = "0:2g.20gb@2";
    let forced = MpsActionRequest { force: true, end_after_s: None };
    let drain = MpsActionRequest { force: false, end_after_s: Some(60) };
    let set = MpsSetRequest { percentage: "12.5".parse().ok(), ..MpsSetRequest::default() };
    assert_eq!(client.mps().await.unwrap_err().kind, Kind::Answer);
    assert!(client.mps_daemon(target).await.is_err());
    assert!(client.mps_start(target).await.is_err());
    assert!(client.mps_stop(target, &forced).await.is_err());
    assert!(client.mps_restart(target, &MpsActionRequest::default()).await.is_err());
    assert!(client.mps_drain(target, &drain).await.is_err());
    assert!(client.mps_set(target, &set).await.is_err());
    assert!(client.mps_start("a/b").await.is_err());
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
            "POST /v1/mps/a%2Fb/start {}",
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
