//! Who may see and do what.

use gpush_api::{AuditRecord, Code, Health, HealthStatus, Lease, LeaseGrant};
use serde_json::{Value, json};

use super::{InProcess, in_container, user};

const DYNAMIC: &str = "[[gpu]]\nmatch = [\"all\"]\nmode = \"mig\"\nlayout = \"dynamic\"\n";

fn device(more: &Value) -> Value {
    let share = json!({ "kind": "mig_profile", "profile": "1g.10gb" });
    let mut body = json!({ "share": share, "duration_s": 600 });
    if let (Some(body), Some(more)) = (body.as_object_mut(), more.as_object()) {
        body.extend(more.clone());
    }
    body
}

/// Fault: health showed every user the errors of the config file, which contain names of quotas and paths of hooks.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn errors_of_the_config_file_are_for_administrators_only() {
    let host = InProcess::start("dgx-h100", 1, "[mode_change]\nbefore = \"opt/secret/hook\"\n").await;
    let seen: Health = host.get("/v1/health").await;
    assert!(format!("{:?}", seen.errors).contains("opt/secret/hook"), "{:?}", seen.errors);
    let seen: Health = host.get_as(user(1000), "/v1/health").await.expect("health");
    let text = format!("{:?}", seen.errors);
    assert!(seen.status == HealthStatus::Degraded && !text.contains("secret") && !text.contains("line 2"), "{text}");
    assert!(text.contains("gpushctl config show"), "{text}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refused_attempts_to_act_for_others_are_recorded() {
    let host = InProcess::start("dgx-h100", 1, DYNAMIC).await;
    let body = device(&json!({ "holder_uid": 1001 }));
    let refused = host.post_as::<LeaseGrant>(user(1000), "/v1/leases", &body).await.unwrap_err();
    assert!(refused.code == Code::Denied && refused.hint.is_some(), "{refused:?}");
    let trail = host
        .until("the record", async || {
            let trail: Vec<AuditRecord> = host.get("/v1/audit").await;
            Some(trail).filter(|trail| trail.iter().any(|record| record.action == "access.denied"))
        })
        .await;
    let record = trail.iter().find(|record| record.action == "access.denied").expect("a record");
    assert_eq!(record.by.as_ref().map(|by| by.uid), Some(1000));
    assert_eq!(record.detail["attempt"], "request leases for other users");
    let granted: LeaseGrant = host.post("/v1/leases", &body).await.expect("root may");
    assert_eq!(granted.lease.holder.uid, 1001);
}

/// Fault: gpushd answered a caller with uid 0 that only the holder, uid 0, may release the lease.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refusal_names_the_container_of_a_caller_with_uid_0() {
    let host = InProcess::start("dgx-h100", 1, DYNAMIC).await;
    let granted: LeaseGrant = host.post("/v1/leases", &device(&json!({}))).await.expect("a lease of the host's root");
    for verb in ["release", "renew"] {
        let path = format!("/v1/leases/{}/{verb}", granted.lease.id);
        let body = if verb == "renew" { json!({ "duration_s": 600 }) } else { json!({}) };
        let refused = host.post_as::<Value>(in_container(0), &path, &body).await.unwrap_err();
        assert_eq!(refused.code, Code::Denied, "{refused:?}");
        assert!(refused.causes[0].contains("container") && refused.hint.is_some(), "{refused:?}");
    }
    let path = format!("/v1/leases/{}", granted.lease.id);
    let seen: Lease = host.get_as(in_container(0), &path).await.expect("the view of any user");
    assert!(seen.request.is_none() && seen.asked_by.is_none());
    let refused = host.post_as::<Value>(user(1000), &format!("{path}/release"), &json!({})).await.unwrap_err();
    assert!(refused.code == Code::Denied && refused.message.contains("root holds it"), "{refused:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ended_lease_of_another_user_is_not_found() {
    let host = InProcess::start("dgx-h100", 1, DYNAMIC).await;
    let granted: LeaseGrant = host.post_as(user(1000), "/v1/leases", &device(&json!({}))).await.expect("a lease");
    let path = format!("/v1/leases/{}", granted.lease.id);
    let open: Lease = host.get_as(user(1001), &path).await.expect("an open lease");
    assert!(open.request.is_none());
    host.post_as::<Value>(user(1000), &format!("{path}/release"), &json!({})).await.expect("it is released");
    host.until("the lease ends", async || {
        let all: Vec<Lease> = host.get("/v1/leases").await;
        all.is_empty().then_some(())
    })
    .await;
    let never = host.get_as::<Lease>(user(1001), "/v1/leases/L999").await.unwrap_err();
    let ended = host.get_as::<Lease>(user(1001), &path).await.unwrap_err();
    assert_eq!(ended.message.replace(&granted.lease.id.to_string(), "L999"), never.message);
    assert_eq!((ended.code, ended.hint), (never.code, never.hint));
    host.get_as::<Lease>(user(1000), &path).await.expect("its holder sees it");
}

/// Fault: gpushctl compared the holders with its own uid, which a process in a user namespace does not know. So
/// `lease list --mine` was empty there, and root of a container saw the leases of the host's root as its own.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn own_leases_are_those_that_gpushd_counts_for_the_caller() {
    let host = InProcess::start("dgx-h100", 1, DYNAMIC).await;
    let mut granted = Vec::new();
    for uid in [0, 1000, 1001, 1000] {
        let lease: LeaseGrant = host.post_as(user(uid), "/v1/leases", &device(&json!({}))).await.expect("a lease");
        granted.push(lease.lease.id);
    }
    let own = async |peer, query: &str| -> Vec<_> {
        let leases: Vec<Lease> = host.get_as(peer, &format!("/v1/leases?mine=true{query}")).await.expect("a list");
        leases.into_iter().map(|lease| lease.id).collect()
    };
    assert_eq!(own(user(1000), "").await, [granted[1], granted[3]]);
    assert_eq!(own(in_container(1000), "").await, [granted[1], granted[3]]);
    assert_eq!((own(user(0), "").await, own(in_container(0), "").await), (vec![granted[0]], vec![]));
    for (uid, id) in [(0, granted[0]), (1001, granted[2])] {
        host.post_as::<Value>(user(uid), &format!("/v1/leases/{id}/release"), &json!({}))
            .await
            .expect("it is released");
    }
    host.until("two leases end", async || {
        let all: Vec<Lease> = host.get("/v1/leases").await;
        (all.len() == 2).then_some(())
    })
    .await;
    assert_eq!(own(user(0), "&ended=9").await, [granted[0]], "not the ended leases of users");
    assert_eq!(own(in_container(0), "&ended=9").await, []);
    assert_eq!(own(user(1001), "&ended=9").await, [granted[2]]);
    let before = format!("&ended=9&before={}", granted[0]);
    assert_eq!(own(user(0), &before).await, []);
}

/// Fault: the audit trail of a GPU had no records of its leases.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn audit_of_gpu_lease_or_holder_has_the_grant() {
    let host = InProcess::start("dgx-h100", 2, DYNAMIC).await;
    let granted: LeaseGrant =
        host.post_as(user(1000), "/v1/leases", &device(&json!({ "selectors": ["0"] }))).await.expect("a lease");
    let id = granted.lease.id.to_string();
    for (object, is_there) in [("0", true), (id.as_str(), true), ("user1000", true), ("1", false), ("user1001", false)]
    {
        let trail: Vec<AuditRecord> = host.get(&format!("/v1/audit?object={object}")).await;
        assert_eq!(trail.iter().any(|record| record.action == "lease.grant"), is_there, "{object}: {trail:?}");
    }
}
