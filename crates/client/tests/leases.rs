//! Requests about leases: method, path, body, key and deadline.
//!
//! Helper functions outside `#[test]` functions may also panic to fail a test.
#![allow(clippy::unwrap_used)]

mod served;

use std::time::Duration;

use gpush_api::{
    IdleAction, LeaseId, LeaseKeepRequest, LeaseRenewRequest, LeaseRequest, LeaseRevokeRequest, LeaseShare, LeaseWait,
};
use gpush_client::{Client, Kind, Origin, Socket};
use jiff::Timestamp;
use served::{answers_when_notified, serve};

#[tokio::test]
async fn lease_calls_have_their_paths_and_changes_have_keys() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("s");
    let asked = serve(&socket);
    let mut client = Client::new(Socket::given(&socket, Origin::Option)).deadline(Duration::from_secs(5));
    let request = LeaseRequest { share: LeaseShare::Whole {}, count: 2, process: Some(7), ..LeaseRequest::default() };
    let id = LeaseId(17);
    let revoke = LeaseRevokeRequest { reason: "fan".to_owned(), end: true, notice_s: Some(60), grace_s: None };
    assert_eq!(client.lease(&request).await.unwrap_err().kind, Kind::Answer);
    assert!(client.leases(0).await.is_err());
    assert!(client.leases(20).await.is_err());
    assert!(client.lease_of(id).await.is_err());
    assert!(client.lease_environment(id).await.is_err());
    assert!(client.lease_renew(id, LeaseRenewRequest { duration_s: 60 }).await.is_err());
    let keep = LeaseKeepRequest { duration_s: 7200, reason: "demo".to_owned() };
    assert!(client.lease_keep(id, &keep).await.is_err());
    assert!(client.idle_leases(Timestamp::UNIX_EPOCH, Some(IdleAction::Release)).await.is_err());
    assert!(client.lease_release(id).await.is_err());
    assert!(client.lease_revoke(id, &revoke).await.is_err());

    let asked = asked.lock().unwrap().clone();
    let lines: Vec<&str> = asked.iter().map(|(line, _)| line.as_str()).collect();
    assert_eq!(
        lines,
        [
            "POST /v1/leases {\"share\":{\"kind\":\"whole\"},\"count\":2,\"wait\":\"no\",\"process\":7}",
            "GET /v1/leases",
            "GET /v1/leases?ended=20",
            "GET /v1/leases/L17",
            "GET /v1/leases/L17/environment",
            "POST /v1/leases/L17/renew {\"duration_s\":60}",
            "POST /v1/leases/L17/keep {\"duration_s\":7200,\"reason\":\"demo\"}",
            "GET /v1/leases/idle?since=1970-01-01T00:00:00Z&action=release",
            "POST /v1/leases/L17/release {}",
            "POST /v1/leases/L17/revoke {\"reason\":\"fan\",\"end\":true,\"notice_s\":60}",
        ]
    );
    for (line, key) in &asked {
        assert_eq!(key.is_some(), line.starts_with("POST"), "{line}");
    }
}

/// The time limit for one answer does not limit the time in the queue.
#[tokio::test]
async fn lease_that_waits_outlasts_the_deadline_of_an_answer() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("s");
    let may_answer = answers_when_notified(&socket);
    let deadline = Duration::from_millis(20);
    let mut client = Client::new(Socket::given(&socket, Origin::Option)).deadline(deadline);
    let request = LeaseRequest { wait: LeaseWait::Seconds(600), ..LeaseRequest::default() };
    let mut waiting = std::pin::pin!(client.lease(&request));
    assert!(tokio::time::timeout(deadline * 5, &mut waiting).await.is_err(), "still waits");
    may_answer.notify_one();
    assert_eq!(waiting.await.unwrap_err().kind, Kind::Foreign);
}
