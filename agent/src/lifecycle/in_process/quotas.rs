//! Quotas and rules for teams: what users see of them, what they refuse, and what they add to a request.

use gpush_api::{ApiError, Code, Lease, LeaseGrant, LeaseKind, QuotaResource, QuotaView, Reloaded};
use serde_json::json;

use super::{
    InProcess,
    lease_requests::{WHOLE, whole, whole_gpus},
    leases::{devices, waiting},
    programs::{UserProgram, skips_other_users},
    user,
};

const CONFIG: &str = "[[gpu]]\nmatch = [\"all\"]\nmode = \"mig\"\nlayout = \"dynamic\"\n\
                      [[quota]]\neverybody = true\nkinds = [\"mig\"]\nleases = 2\nmemory = \"40G\"\nlongest = \"12h\"\n";

fn limit(quota: &QuotaView, resource: QuotaResource) -> (f64, Option<f64>, Option<f64>) {
    let limit = quota.limits.iter().find(|limit| limit.resource == resource).expect("the limit");
    (limit.used, limit.maximum, limit.amount_left)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn quota_of_caller_shows_what_is_left() {
    let host = InProcess::start("dgx-h100", 1, CONFIG).await;
    let quota = async |uid| {
        let all: Vec<QuotaView> = host.get_as(user(uid), "/v1/quotas").await.expect("the own quota");
        assert_eq!((all.len(), all[0].uid), (1, uid));
        all.into_iter().next().expect("one quota")
    };
    let before = quota(1000).await;
    assert_eq!((before.quota.as_deref(), before.longest_s), (Some("everybody"), Some(43_200)));
    assert_eq!(limit(&before, QuotaResource::Leases), (0.0, Some(2.0), Some(2.0)));
    let granted = host.lease(1000, &devices("1g.10gb", 1)).await.expect("a lease");
    let now = quota(1000).await;
    assert_eq!(limit(&now, QuotaResource::Leases), (1.0, Some(2.0), Some(1.0)));
    let (used, maximum, left) = limit(&now, QuotaResource::MemoryMib);
    #[expect(clippy::cast_precision_loss, reason = "a few thousand MiB")]
    let size = granted.lease.members[0].memory_mib as f64;
    assert_eq!((used, maximum, left), (size, Some(40_960.0), Some(40_960.0 - size)));
    assert_eq!(limit(&quota(1001).await, QuotaResource::Leases).0, 0.0, "another user");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn quotas_of_other_users_are_for_administrators() {
    let host = InProcess::start("dgx-h100", 1, CONFIG).await;
    host.lease(1000, &devices("1g.10gb", 1)).await.expect("a lease");
    for path in ["/v1/quotas?uid=1000", "/v1/quotas?all=true"] {
        let refused: ApiError = host.get_as::<Vec<QuotaView>>(user(1001), path).await.unwrap_err();
        assert_eq!(refused.code, Code::Denied, "{path}");
        let seen: Vec<QuotaView> = host.get(path).await;
        assert_eq!(seen.iter().map(|quota| quota.uid).collect::<Vec<_>>(), [1000], "{path}");
    }
    let root: Vec<QuotaView> = host.get("/v1/quotas").await;
    assert!(root[0].quota.is_none() && root[0].limits.iter().all(|limit| limit.maximum.is_none()), "{root:?}");
    let bad = host.get_as::<Vec<QuotaView>>(user(1000), "/v1/quotas?user=anna").await.unwrap_err();
    assert_eq!(bad.code, Code::BadRequest);
}

/// Returns the first cause and the hint of a refusal.
fn cause_and_hint(refused: &ApiError) -> (&str, &str) {
    (refused.causes.first().map_or("", String::as_str), refused.hint.as_deref().unwrap_or_default())
}

/// The hint names a smaller share and a lease, and both commands work.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refusal_beyond_the_memory_quota_says_the_sums() {
    let host = InProcess::start("dgx-h100", 1, CONFIG).await;
    let held = host.lease(1000, &devices("2g.20gb", 1)).await.expect("a lease");
    let refused = host.lease(1000, &devices("3g.40gb", 1)).await.unwrap_err();
    let id = held.lease.id;
    let (cause, hint) = cause_and_hint(&refused);
    assert_eq!(refused.code, Code::Denied);
    assert!(refused.message.starts_with("cannot grant 3g.40gb: your leases would hold 5"), "{refused:?}");
    assert!(refused.message.ends_with(" GiB of at most 40 GiB"), "{refused:?}");
    assert!(cause.starts_with("1 lease holds 1") && cause.contains(&format!("({id}: 1")), "{refused:?}");
    assert_eq!(refused.causes[1], "the quota for everybody applies");
    let release = format!("or release a lease: `gpushctl lease end {id}`");
    assert_eq!(hint, format!("request less, such as `--mig 2g.20gb`, {release}"));
    host.lease(1000, &devices("2g.20gb", 1)).await.expect("what the hint proposes");
    let refused = host.lease(1000, &devices("1g.10gb", 1)).await.unwrap_err();
    assert_eq!(refused.message, "cannot grant 1g.10gb: you hold 2 leases of at most 2");
    assert_eq!(
        cause_and_hint(&refused).1,
        format!("use {id}: `gpushctl run --lease {id} -- COMMAND`, or release it: `gpushctl lease end {id}`")
    );
    // An administrator who requests a lease for the user reads the name of the user.
    let mut body = devices("1g.10gb", 1);
    body["holder_uid"] = json!(1000);
    let refused = host.lease(0, &body).await.unwrap_err();
    assert_eq!(refused.message, "cannot grant 1g.10gb: user1000 holds 2 leases of at most 2");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn request_without_a_share_gets_the_default_of_the_quota() {
    let config = format!("{CONFIG}default = \"mig=1g.10gb,for=4h\"\n");
    let host = InProcess::start("dgx-h100", 1, &config).await;
    let granted = host.lease(1000, &json!({})).await.expect("a lease");
    let request = granted.lease.request.as_ref().expect("the own request");
    assert_eq!((granted.lease.kind, request.duration_s), (LeaseKind::Mig, Some(14_400)));
    assert!(granted.lease.expires_at.is_some(), "{granted:?}");
    let note = "the request names no share, so it is the default of the quota: mig=1g.10gb,for=4h";
    assert_eq!(granted.quota_notes, [note]);
    let named = host.lease(1000, &json!({ "share": { "kind": "mig_profile", "profile": "2g.20gb" } })).await;
    let named = named.expect("a lease");
    assert_eq!(named.lease.request.expect("the own request").duration_s, Some(43_200), "the longest that is allowed");
    let note = "the request names no duration, so the lease lasts 12h, the maximum of the quota";
    assert_eq!(named.quota_notes, [note]);
    let seen: Vec<QuotaView> = host.get_as(user(1000), "/v1/quotas").await.expect("the own quota");
    assert_eq!(seen[0].default_request.as_deref(), Some("mig=1g.10gb,for=4h"));
    let by_root = host.lease(0, &json!({ "duration_s": 600 })).await.expect("a lease");
    assert!(by_root.quota_notes.is_empty(), "root has no quota");
}

/// A rule that permits everybody.
const OPEN: &str = "[[gpu]]\nmatch = \"0\"\nmode = \"exclusive\"\n";

const TEAMS: &str = "[[gpu]]\nname = \"vision\"\nmatch = [\"0\"]\nmode = \"exclusive\"\nusers = [\"user1000\"]\n\
                     [[gpu]]\nmatch = [\"1\"]\nmode = \"exclusive\"\ngroups = [\"group1\"]\n\
                     [[gpu]]\nmatch = [\"all\"]\nmode = \"exclusive\"\n";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gpus_of_a_team_are_for_its_members() {
    let host = whole_gpus(3).start(TEAMS).await;
    let refused = host.lease(1001, &whole("0", 1)).await.unwrap_err();
    assert_eq!((refused.code, refused.retryable), (Code::Denied, false));
    assert_eq!(refused.message, "cannot lease GPU 0: its rule permits only other users");
    assert_eq!(
        cause_and_hint(&refused),
        ("`users` of rule `vision` permits only user user1000 on GPU 0", "choose a GPU that you may lease: `-g 1,2`")
    );
    let refused = host.lease(1002, &whole("0-1", 1)).await.unwrap_err();
    assert_eq!(refused.message, "cannot lease GPUs 0, 1: their rules permit only other users");
    assert_eq!(refused.hint.as_deref(), Some("choose a GPU that you may lease: `-g 2`"));
    // A request without GPUs chooses among those that the user may lease.
    let free: LeaseGrant = host.lease(1002, &whole("all", 1)).await.expect("the open GPU");
    let index = async |grant: &LeaseGrant| {
        let gpus = host.gpus().await;
        gpus.iter().find(|gpu| gpu.uuid == grant.lease.members[0].gpu_uuid).expect("the GPU").index
    };
    assert_eq!(index(&free).await, 2);
    assert_eq!(host.lease(1002, &whole("all", 1)).await.unwrap_err().code, Code::Blocked, "GPU 2 is leased");
    let member = host.lease(1001, &whole("1", 1)).await.expect("a member of the group");
    assert_eq!(index(&member).await, 1);
    // The rights of the holder count, not those of the administrator. Root may lease every GPU.
    let for_user = |uid: u32| {
        let mut body = whole("0", 1);
        body["holder_uid"] = json!(uid);
        body
    };
    assert_eq!(host.lease(0, &for_user(1002)).await.unwrap_err().code, Code::Denied);
    let own = host.lease(0, &for_user(1000)).await.expect("the user of the rule");
    host.release(&own).await;
    host.wait_until_ended(&own).await;
    host.lease(0, &whole("0", 1)).await.expect("root");
}

/// Faults: the hints named kinds that the quota or the rules did not allow, and GPUs without a rule.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hint_names_only_what_the_user_may_lease() {
    let config = "[[gpu]]\nmatch = \"0\"\nmode = \"mig\"\nlayout = [\"1g.10gb*7\"]\n\
                  [[gpu]]\nmatch = \"1\"\nmode = \"exclusive\"\ngroups = [\"group1\"]\n\
                  [[quota]]\nusers = [\"user1000\", \"user1001\"]\nkinds = [\"mig\", \"whole\"]\n\
                  [[quota]]\nusers = [\"user1003\"]\nkinds = [\"mps\"]\n";
    let host = InProcess::start("dgx-a100", 3, config).await;
    host.apply_rules(&["0-1"]).await;
    let shares = [json!({ "kind": "mps" }), json!({ "kind": "whole" }), json!({ "kind": "default" })];
    let mig = "`gpushctl run --mig 1g.10gb -- COMMAND`";
    let ask = "ask an administrator for access: the rules of the config say who may lease the GPUs";
    for (uid, share, expected) in [
        (1000, &shares[0], "request an allowed kind, such as `--mig 1g.10gb`".to_owned()),
        (1001, &shares[0], "request an allowed kind, such as `--mig 1g.10gb` or `--whole`".to_owned()),
        (1000, &shares[1], format!("request a share that you may lease: {mig}")),
        (1003, &shares[1], ask.to_owned()),
        (1002, &shares[1], format!("request a share that you may lease: {mig}")),
        (1001, &shares[2], "add `--mig 1g.10gb` or `--whole`".to_owned()),
    ] {
        let refused = host.lease(uid, &json!({ "share": share })).await.unwrap_err();
        assert_eq!(refused.hint, Some(expected), "{uid} {share}: {refused:?}");
    }
}

/// Faults: for a request that the MIG devices cannot meet, the hint named a smaller device, and not the GPU that can.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hint_for_a_large_request_names_what_is_large_enough() {
    let config = "[[gpu]]\nmatch = \"0\"\nmode = \"mig\"\nlayout = [\"1g.10gb*7\"]\n\
                  [[gpu]]\nmatch = \"1\"\nmode = \"exclusive\"\n";
    let host = InProcess::start("dgx-a100", 2, config).await;
    host.apply_rules(&["all"]).await;
    for (gpus, expected) in
        [("all", "request `--whole`; or less: `--mig 1g.10gb`"), ("0", "request less: `--mig 1g.10gb`")]
    {
        let share = json!({ "kind": "mig_size", "memory_mib": 20_480 });
        let refused = host.lease(1000, &json!({ "share": share, "selectors": [gpus] })).await.unwrap_err();
        assert_eq!(refused.hint.as_deref(), Some(expected), "{gpus}: {refused:?}");
    }
}

/// Fault: a request that waited got a GPU that a reload had closed to its user.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiting_request_is_refused_when_a_reload_closes_its_gpu() {
    let host = whole_gpus(1).start(OPEN).await;
    let _holder = host.lease(0, &whole("0", 1)).await.expect("a lease");
    let client = host.begin_post(user(1002), "/v1/leases", &waiting(whole("0", 1)));
    host.wait_for_queued(1).await;
    host.reload(&format!("{OPEN}groups = [\"group1\"]\n")).await;
    let refused = client.await.expect("an answer").error();
    assert_eq!(refused.message, "cannot lease GPU 0: its rule permits only other users");
    let cause = "the config has changed while the request waited";
    assert!(refused.code == Code::Denied && refused.causes.iter().any(|one| one == cause), "{refused:?}");
}

/// Fault: a request that waited got more than the quota of a reload allowed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiting_request_obeys_the_quota_of_a_reload() {
    let host = whole_gpus(1).start(OPEN).await;
    let holder = host.lease(0, &whole("0", 1)).await.expect("a lease");
    let client = host.begin_post(user(1002), "/v1/leases", &waiting(whole("0", 1)));
    let queued = host.wait_for_queued(1).await[0].id;
    host.reload(&format!("{OPEN}[[quota]]\neverybody = true\nleases = 0\n")).await;
    host.release(&holder).await;
    host.wait_until_ended(&holder).await;
    host.until_denied(queued, "each user may hold").await;
    host.reload(OPEN).await;
    let granted: LeaseGrant = client.await.expect("an answer").document().expect("the quota allows it again");
    assert_eq!(granted.lease.id, queued);
}

/// Fault: a user renewed a lease again and again on a GPU that a reload had closed to the user.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lease_on_a_gpu_that_a_reload_has_closed_is_not_renewed() {
    let host = whole_gpus(1).start(OPEN).await;
    let mut body = whole("0", 1);
    body["duration_s"] = json!(3600);
    let held = host.lease(1002, &body).await.expect("a lease");
    let renew = async || {
        let path = format!("/v1/leases/{}/renew", held.lease.id);
        host.post_as::<Lease>(user(1002), &path, &json!({ "duration_s": 7200 })).await
    };
    renew().await.expect("a renewal");
    host.reload(&format!("{OPEN}groups = [\"group1\"]\n")).await;
    let refused = renew().await.unwrap_err();
    assert_eq!((refused.code, refused.message.contains("only other users")), (Code::Denied, true), "{refused:?}");
    host.reload(&format!("{OPEN}[[quota]]\neverybody = true\ngpus = \"1\"\n")).await;
    let refused = renew().await.unwrap_err();
    assert!(refused.message.starts_with("cannot renew lease"), "{refused:?}");
}

/// Fault: the default of a quota set the share after the check of the count, so one lease got two MPS shares.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn count_is_checked_for_the_share_of_the_quota() {
    let config = "[[gpu]]\nmatch = \"all\"\nmode = \"timeslice\"\ntimeslice = { replicas = 2 }\n\
                  [[quota]]\neverybody = true\ndefault = \"timeslice,for=1h\"\n";
    let host = whole_gpus(2).start(config).await;
    host.apply_rules(&["all"]).await;
    let refused = host.lease(1000, &json!({ "count": 2 })).await.unwrap_err();
    assert_eq!(refused.code, Code::BadRequest, "{refused:?}");
    host.lease(1000, &json!({})).await.expect("one replica");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn users_of_a_rule_are_shown() {
    let host = whole_gpus(3).start(TEAMS).await;
    let shown = host.gpus().await.into_iter().map(|gpu| gpu.access.map(|access| access.to_string()));
    let expected = [Some("user user1000".to_owned()), Some("group group1".to_owned()), None];
    assert_eq!(shown.collect::<Vec<_>>(), expected);
    let seen: Vec<QuotaView> = host.get_as(user(1001), "/v1/quotas").await.expect("the own quota");
    assert_eq!(seen[0].closed_gpus, [0]);
}

/// Fault: only the log named a misspelt group, so everybody got the quota for everybody.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reload_reports_names_that_the_host_does_not_have() {
    let host = whole_gpus(1).start(WHOLE).await;
    let text = format!("[[quota]]\ngroups = [\n\"group7\",\n\"studnets\"]\nleases = 1\n{WHOLE}");
    let reloaded: Reloaded = host.try_reload(&text, &json!({})).await.expect("the config is loaded");
    let [finding] = reloaded.findings.as_slice() else { panic!("{:?}", reloaded.findings) };
    let note = ":4: this host has no group `studnets`, so `quota.groups` ignores this name";
    assert!(finding.ends_with(note), "{finding}");
}

/// Fault: a quota refused the second of two commands that run one after the other, because the lease of the first had not
/// ended yet.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lease_that_is_about_to_end_does_not_prevent_the_next() {
    if skips_other_users("leases of a user with a quota") {
        return;
    }
    let host = InProcess::start("dgx-h100", 1, &CONFIG.replace("leases = 2", "leases = 1")).await;
    for number in 0..20 {
        let program = UserProgram::sleep(1000);
        let mut body = devices("1g.10gb", 1);
        body["process"] = json!(program.pid());
        let granted = host.lease(1000, &body).await;
        assert!(granted.is_ok(), "request {number}: {granted:?}");
        drop(program);
    }
}

/// Fault: the hint proposed to release a lease that was releasing already.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn releasing_lease_is_not_proposed_for_release() {
    if skips_other_users("leases of a user with a quota") {
        return;
    }
    let host = InProcess::start("dgx-h100", 1, &CONFIG.replace("leases = 2", "leases = 1")).await;
    let granted = host.lease(1000, &devices("1g.10gb", 1)).await.expect("a lease");
    let program = UserProgram::with_environment(1000, &granted.environment);
    let refused = host.lease(1000, &devices("1g.10gb", 1)).await.unwrap_err();
    assert!(cause_and_hint(&refused).1.contains("lease end L1"), "{refused:?}");
    host.release(&granted).await;
    let refused = host.lease(1000, &devices("1g.10gb", 1)).await.unwrap_err();
    assert!(!cause_and_hint(&refused).1.contains("lease end"), "{refused:?}");
    drop(program);
    host.wait_until_ended(&granted).await;
}

/// Faults: with as many leases as the quota allows, refusals for other reasons proposed requests that were refused at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refusal_at_the_limit_of_leases_first_names_a_lease_to_release() {
    let host = InProcess::start("dgx-h100", 2, CONFIG).await;
    let held = host.lease(1000, &devices("1g.10gb", 1)).await.expect("a lease").lease.id;
    host.lease(1000, &devices("1g.10gb", 1)).await.expect("a lease");
    let first = format!(
        "the quota allows no further lease: use {held}: `gpushctl run --lease {held} -- COMMAND`, or release it: \
         `gpushctl lease end {held}`; after that, "
    );
    let hint = async |body: serde_json::Value| host.lease(1000, &body).await.unwrap_err().hint.unwrap_or_default();
    let kind = hint(json!({ "share": { "kind": "whole" }, "duration_s": 60 })).await;
    assert_eq!(kind, format!("{first}request an allowed kind, such as `--mig 1g.10gb`"));
    let mut long = devices("1g.10gb", 1);
    long["duration_s"] = json!(48 * 3600);
    assert_eq!(hint(long).await, format!("{first}use `--for 12h` or a shorter duration"));
    let other = hint(json!({ "share": { "kind": "mps", "percentage": 10 }, "duration_s": 60 })).await;
    assert!(other.starts_with(&first), "{other}");
    // A user without leases reads only what to request.
    let free = host.lease(1001, &json!({ "share": { "kind": "whole" }, "duration_s": 60 })).await.unwrap_err();
    assert_eq!(free.hint.as_deref(), Some("request an allowed kind, such as `--mig 1g.10gb`"));
}

/// Fault: a request that the host can never meet was refused with "add `--for 2h`".
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn impossible_request_without_an_end_is_refused_for_its_share() {
    let host = InProcess::start("dgx-h100", 1, CONFIG).await;
    let refused = async |share: serde_json::Value| {
        host.lease(1000, &json!({ "share": share, "bind_to": "cgroup" })).await.unwrap_err()
    };
    // The quota sets a duration for its users, so only root needs one.
    let by_root = async |share: serde_json::Value| {
        host.lease(0, &json!({ "share": share, "bind_to": "cgroup" })).await.unwrap_err()
    };
    assert_eq!(refused(json!({ "kind": "whole" })).await.code, Code::Denied);
    let unknown = by_root(json!({ "kind": "mig_profile", "profile": "1g.10gbb" })).await;
    assert!(unknown.code == Code::UnknownProfile && unknown.hint.unwrap_or_default().contains("1g.10gb"));
    let endless = by_root(json!({ "kind": "mig_profile", "profile": "1g.10gb" })).await;
    assert!(endless.message.contains("needs an end"), "{endless:?}");
}
