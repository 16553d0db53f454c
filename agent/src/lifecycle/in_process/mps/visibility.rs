//! What each route of the API shows to a user about the lease, program and MPS server of another user.

use gpush_api::{AuditRecord, Code};
use serde_json::{Value, json};

use crate::lifecycle::in_process::{
    InProcess,
    programs::{UserProgram, skips_other_users},
    user,
};

const OWNER: u32 = 1000;
const OTHER: u32 = 1001;

/// Routes that every user may read.
const ROUTES: &[&str] = &[
    "/v1/health",
    "/v1/gpus",
    "/v1/gpus?profiles=true",
    "/v1/gpus/0",
    "/v1/mps",
    "/v1/mps/0",
    "/v1/leases",
    "/v1/leases/L1",
    "/v1/processes",
    "/v1/operations",
    "/v1/config",
    "/v1/overrides",
];

/// Returns whether a JSON value contains a number, as a number or as a word of a string.
fn names(value: &Value, number: u32) -> bool {
    let word = number.to_string();
    match value {
        Value::Number(found) => found.to_string() == word,
        Value::String(text) => text.split(|letter: char| !letter.is_ascii_digit()).any(|found| found == word),
        Value::Array(list) => list.iter().any(|one| names(one, number)),
        Value::Object(fields) => fields.values().any(|one| names(one, number)),
        Value::Null | Value::Bool(_) => false,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_users_process_and_server_are_hidden_on_each_route() {
    if skips_other_users("what users see of each other") {
        return;
    }
    let host = InProcess::with_daemon("").await;
    let holder = UserProgram::sleep(OWNER);
    let body = json!({ "percentage": 10, "process": holder.pid(), "duration_s": 3600 });
    let granted = host.share_for(OWNER, "0", body).await.expect("a lease");
    let client = host.client("0", &granted).await;
    let seen = host.daemon("0").await;
    let server = seen.servers[0].pid.expect("root sees it");
    assert_eq!((seen.clients.len(), seen.clients[0].server), (1, Some(server)));
    let hidden = [("client", client.pid()), ("server", server), ("bound process", holder.pid())];
    let as_user = async |uid: u32, path: &str| host.get_as::<Value>(user(uid), path).await.expect("every user may");
    for route in ROUTES {
        let answer = as_user(OTHER, route).await;
        for (what, pid) in hidden {
            assert!(!names(&answer, pid), "{route} names the {what}, {pid}: {answer}");
        }
        assert!(!answer.to_string().contains("/bin/sleep"), "{route} shows a command: {answer}");
    }
    // Other users see the lease, its holder and its end.
    let other = as_user(OTHER, "/v1/mps/0").await;
    let shown = &other["granted_leases"][0];
    let id = granted.lease.id.to_string();
    assert_eq!((shown["holder"]["uid"].as_u64(), shown["id"].as_str()), (Some(OWNER.into()), Some(&*id)));
    assert!(shown["holder"]["user"] == "user1000" && shown["expires_at"].is_string(), "{other}");
    assert!(shown["request"].is_null() && shown["asked_by"].is_null(), "{other}");
    assert!(other["servers"][0]["uid"].is_null() && other["clients"][0]["uid"].is_null(), "{other}");
    // The owner sees every detail.
    let own = as_user(OWNER, "/v1/mps/0").await;
    assert!(hidden.iter().all(|(_, pid)| names(&own, *pid)), "{own}");
    // A user can see the lease of another user, but cannot use or change it.
    for (path, body) in [
        ("release", json!({})),
        ("renew", json!({ "duration_s": 60 })),
        ("revoke", json!({ "reason": "mine", "end": true })),
    ] {
        let path = format!("/v1/leases/{id}/{path}");
        let refused = host.post_as::<Value>(user(OTHER), &path, &body).await.unwrap_err();
        assert_eq!(refused.code, Code::Denied, "{path}: {refused:?}");
    }
    let path = format!("/v1/leases/{id}/environment");
    let refused = host.get_as::<Value>(user(OTHER), &path).await.unwrap_err();
    assert_eq!(refused.code, Code::Denied, "{refused:?}");
    let for_another = super::share("0", &json!({ "percentage": 1, "holder_uid": OWNER }));
    let refused = host.post_as::<Value>(user(OTHER), "/v1/leases", &for_another).await.unwrap_err();
    assert_eq!(refused.code, Code::Denied, "{refused:?}");
    assert_eq!(as_user(OWNER, &format!("/v1/leases/{id}")).await["state"], "active");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn binding_to_foreign_process_is_refused_like_missing_one() {
    if skips_other_users("processes of other users") {
        return;
    }
    let host = InProcess::with_daemon("").await;
    let holder = UserProgram::sleep(OWNER);
    let refused = async |pid: u32| {
        let error = host.share_for(OTHER, "0", json!({ "process": pid })).await.unwrap_err();
        assert_eq!(error.code, Code::BadRequest, "{error:?}");
        json!(error).to_string().replace(&pid.to_string(), "PID")
    };
    // The second pid cannot exist, because it is above the kernel's maximum.
    assert_eq!(refused(holder.pid()).await, refused(4_200_000).await);
}

/// The audit trail shows who made a request that only administrators may make. If one user makes many such requests, only
/// a few are recorded.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refused_administration_is_in_the_audit_trail() {
    let host = InProcess::with_daemon("").await;
    // 40 of the 60 attempts are changing requests: `limits.changes_burst` is 50.
    for _ in 0..20 {
        let denied = [
            host.post_as::<Value>(user(OTHER), "/v1/mps/0/stop", &json!({})).await,
            host.get_as::<Value>(user(OTHER), "/v1/audit").await,
            host.post_as::<Value>(user(OTHER), "/v1/gpus/0/cordon", &json!({})).await,
        ];
        denied.into_iter().for_each(|one| assert_eq!(one.unwrap_err().code, Code::Denied));
    }
    let denied = async || {
        let trail: Vec<AuditRecord> = host.get("/v1/audit?limit=1000").await;
        let is = |record: &AuditRecord| {
            record.action == "access.denied" && record.by.as_ref().is_some_and(|by| by.uid == OTHER)
        };
        trail.into_iter().filter(is).collect::<Vec<_>>()
    };
    let first = host.until("a record", async || denied().await.into_iter().next()).await;
    assert_eq!(first.result, "refused", "{first:?}");
    assert_eq!(first.detail["attempt"], "start and stop MPS daemons", "{first:?}");
    let count = denied().await.len();
    assert!(count <= 20, "60 attempts left {count} records");
}
