//! Overrides, which replace the layouts of the config: how they begin, and which requests and reloads end them.

use gpush_api::{
    AuditRecord, Code, Event, EventPayload, GpuIndex, Mode, Operation, OperationState, Override, OverrideEnded,
    Overrides,
};
use gpush_nvml::ErrorKind;
use hyper::{Method, StatusCode, header};
use serde_json::{Value, json};

use super::{
    InProcess,
    call_rules::{CREATE, CallEffect, CallRule, EndMoment},
    host::ScriptedHost,
    user,
};

pub(super) const CONFIG: &str = r#"
[[gpu]]
name = "training"
match = ["0-1"]
mode = "mig"
layout = ["3g.40gb*2"]
"#;

pub(super) const HALVES: [&str; 2] = ["3g.40gb@0", "3g.40gb@4"];
pub(super) const WHOLE: [&str; 1] = ["7g.80gb@0"];

/// Starts gpushd on a host with two GPUs, and waits until both have the layout of their rule.
pub(super) async fn started() -> InProcess {
    let gpushd = ScriptedHost::new("dgx-a100", 2).start_with_layouts(CONFIG).await;
    gpushd.until_layouts_are_settled().await;
    gpushd
}

impl InProcess {
    pub(super) async fn overrides(&self) -> Overrides {
        self.get("/v1/overrides").await
    }

    /// Returns the only active override.
    pub(super) async fn only_override(&self) -> Override {
        let mut all = self.overrides().await.overrides;
        assert_eq!(all.len(), 1, "{all:?}");
        all.remove(0)
    }

    pub(super) async fn done(&self, body: &Value) -> Operation {
        let begun = self.begin_with(body).await.unwrap_or_else(|error| panic!("{error:?}"));
        let ended = self.ended(&begun).await;
        assert_eq!(ended.state, OperationState::Done, "{ended:?}");
        ended
    }

    /// Creates an override that expires after three seconds.
    pub(super) async fn short_override(&self) {
        let mut body = whole("for a moment");
        body["expires_at"] = json!((jiff::Timestamp::now() + jiff::SignedDuration::from_secs(3)).to_string());
        self.done(&body).await;
    }
}

fn layout(gpu: &str, entries: &[&str], reason: &str) -> Value {
    json!({ "selectors": [gpu], "layout_source": { "entries": entries }, "reason": reason })
}

pub(super) fn whole(reason: &str) -> Value {
    layout("0", &["7g.80gb"], reason)
}

pub(super) fn empty(generation: u64) -> Overrides {
    Overrides { generation, overrides: Vec::new() }
}

/// `gpushctl apply --undo` sends the layout that an operation reports.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn layout_before_an_operation_is_reported_and_can_be_restored() {
    let gpushd = started().await;
    let changed = gpushd.done(&whole("big run")).await;
    let before = &changed.layouts_before[0];
    assert!(before.mig);
    assert_eq!(before.layout, HALVES);
    assert_eq!(gpushd.operation(&changed.id).await.layouts_before, changed.layouts_before, "also from the journal");
    let body = json!({ "selectors": [], "layout_source": { "per_gpu": changed.layouts_before }, "reason": "undo" });
    let restored = gpushd.done(&body).await;
    assert_eq!(restored.layouts_before[0].layout, WHOLE);
    assert_eq!(gpushd.only_override().await.layout, HALVES, "the override keeps the placements");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn explicit_layout_is_desired_until_cleared() {
    let gpushd = started().await;
    let host = std::sync::Arc::clone(&gpushd.host);
    assert_eq!(gpushd.overrides().await, empty(0));
    let operation = gpushd.done(&whole("one big run")).await;
    let one = gpushd.only_override().await;
    assert_eq!(
        (one.gpu, &one.layout[..], one.reason.as_str()),
        (Some(GpuIndex(0)), &["7g.80gb".to_owned()][..], "one big run")
    );
    assert_eq!((one.rule.as_deref(), one.by.uid, one.generation), (Some("training"), operation.by.uid, 1));
    assert!(one.created_at >= operation.created_at && one.expires_at.is_none());
    let shown = gpushd.gpu(0).await;
    assert_eq!((shown.overridden.as_ref(), shown.drift.len()), (Some(&one), 0));
    assert_eq!(shown.layout, Some(vec!["7g.80gb".to_owned()]), "the desired layout");
    assert_eq!(gpushd.gpu(1).await.overridden, None);

    // Without a layout and without GPUs, an apply or a plan uses the desired layouts.
    let plans: Value = gpushd.post("/v1/mig/plan", &json!({})).await.expect("plans");
    assert_eq!(plans["plans"][0]["steps"], json!([]), "{plans}");
    gpushd.done(&json!({})).await;
    assert_eq!(host.gpus.instances(0), WHOLE);
    gpushd.stop().await;
    for kill in [false, true] {
        let gpushd = host.start(CONFIG).await;
        assert_eq!(gpushd.only_override().await, one);
        assert!(gpushd.gpu(0).await.drift.is_empty());
        if kill { gpushd.kill() } else { gpushd.stop().await }
    }

    let gpushd = host.start(CONFIG).await;
    let ended: OverrideEnded = gpushd.delete("/v1/overrides/0").await.expect("it is cleared");
    assert_eq!((ended.generation, ended.ended), (2, one));
    assert_eq!(gpushd.overrides().await, empty(2));
    assert_eq!(gpushd.gpu(0).await.drift, ["missing 3g.40gb*2", "extra 7g.80gb@0"]);
    assert_eq!(host.gpus.instances(0), WHOLE, "this changes no layout");
    assert_eq!(gpushd.delete::<Value>("/v1/overrides/0").await.unwrap_err().code, Code::NotFound);
    assert_eq!(gpushd.delete::<Value>("/v1/overrides/0-1").await.unwrap_err().code, Code::BadRequest);
    gpushd.done(&json!({})).await;
    assert_eq!(host.gpus.instances(0), HALVES);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn layout_applied_once_is_drift() {
    let host = started().await;
    assert_eq!(host.apply_once(&["0"], &["7g.80gb"]).await.state, OperationState::Done);
    assert_eq!(host.overrides().await.overrides, []);
    assert_eq!(host.gpu(0).await.drift, ["missing 3g.40gb*2", "extra 7g.80gb@0"]);
    // A layout that is applied with `once` does not end an active override.
    host.done(&whole("it stays")).await;
    assert_eq!(host.apply_once(&["0"], &["1g.10gb"]).await.state, OperationState::Done);
    assert_eq!(host.only_override().await.reason, "it stays");
    assert_eq!(host.gpu(0).await.drift, ["missing 7g.80gb", "extra 1g.10gb@6"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn layout_of_the_rule_ends_override() {
    let host = started().await;
    host.done(&whole("first")).await;
    host.done(&layout("0", &["1g.10gb*2"], "second")).await;
    let only = host.only_override().await;
    assert_eq!((only.reason.as_str(), only.generation), ("second", 2));
    // If a request names the GPU but no layout, it ends the override.
    host.done(&json!({ "selectors": ["0"] })).await;
    assert_eq!(host.overrides().await.overrides, []);
    assert_eq!(host.gpus.instances(0), HALVES);
    // If a request lists the entries of the rule's layout, it also ends the override.
    host.done(&whole("third")).await;
    host.done(&layout("0", &["3g.40gb", "3g.40gb"], "")).await;
    assert_eq!(host.overrides().await.overrides, [], "however it is written");
    // This request has a separate layout for each GPU, like a request from a mig-parted file. It names only GPU 1, so
    // GPU 0 keeps its override.
    host.done(&whole("fourth")).await;
    let each = json!([{ "selector": "1", "mig_enabled": true, "layout": ["1g.10gb*7"] }]);
    host.done(&json!({ "layout_source": { "per_gpu": each }, "reason": "fifth" })).await;
    let reasons: Vec<String> = host.overrides().await.overrides.into_iter().map(|one| one.reason).collect();
    assert_eq!(reasons, ["fourth", "fifth"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gpu_without_a_rule_has_no_override() {
    let host = InProcess::start("dgx-a100", 1, "").await;
    assert_eq!(host.apply(&["0"], &["7g.80gb"]).await.state, OperationState::Done);
    assert_eq!(host.overrides().await.overrides, []);
    let mut body = whole("");
    body["expires_at"] = json!("2126-01-01T00:00:00Z");
    let error = host.begin_with(&body).await.unwrap_err();
    assert!(error.code == Code::BadRequest && error.message.contains("an expiry has no effect"), "{error:?}");
    body["expires_at"] = json!("2001-01-01T00:00:00Z");
    assert!(host.begin_with(&body).await.unwrap_err().message.contains("has passed"));
    body["once"] = json!(true);
    assert!(host.begin_with(&body).await.unwrap_err().message.contains("`expires_at` has no effect"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failed_operation_keeps_the_previous_override() {
    let host = started().await;
    // There is no previous override.
    host.gpus.fail(CREATE, 0, 1, ErrorKind::Unknown);
    let begun = host.begin_with(&whole("fails")).await.expect("it begins");
    assert_eq!(host.ended(&begun).await.state, OperationState::RolledBack);
    assert_eq!(host.overrides().await, empty(0));
    assert!(host.gpu(0).await.drift.is_empty(), "the layout of the rule is desired, and exists again");
    // There is a previous override.
    host.done(&whole("it stays")).await;
    host.gpus.fail(CREATE, 0, 1, ErrorKind::Unknown);
    let begun = host.begin_with(&layout("0", &["4g.40gb"], "fails")).await.expect("it begins");
    assert_eq!(host.ended(&begun).await.state, OperationState::RolledBack);
    let error = host.begin_with(&layout("0", &["7g.80gb*2"], "impossible")).await.unwrap_err();
    assert_eq!(error.code, Code::LayoutImpossible);
    assert_eq!(host.only_override().await.reason, "it stays");
    assert!(host.gpu(0).await.drift.is_empty());
    // An operation is cancelled while it is queued behind another operation.
    host.gpus.hold(CREATE, 0);
    let first = host.begin(&["0"], &["1g.10gb"], &json!({ "once": true })).await.expect("it begins");
    let mut body = layout("0", &["4g.40gb"], "never begun");
    body["wait_s"] = json!(600);
    let second = host.begin_with(&body).await.expect("it waits");
    host.cancel(&second.id).await.expect("it is cancelled");
    assert_eq!(host.ended(&second).await.state, OperationState::NotStarted);
    host.gpus.release();
    assert_eq!(host.ended(&first).await.state, OperationState::Done);
    assert_eq!(host.only_override().await.reason, "it stays");
}

/// If the next gpushd cannot finish the operation, it rolls the operation back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn layout_and_override_match_after_gpushd_has_ended() {
    for is_finished in [true, false] {
        let gpushd = started().await;
        let host = std::sync::Arc::clone(&gpushd.host);
        host.gpus.rule(CallRule::on(CREATE, 0).once().with(CallEffect::EndGpushd(EndMoment::After)));
        let mut body = whole("killed");
        body["expires_at"] = json!("2126-01-01T00:00:00Z");
        let operation = gpushd.begin_with(&body).await.expect("it begins");
        gpushd.died().await;
        if !is_finished {
            host.gpus.fail(super::call_rules::CREATE_COMPUTE, 0, 1, ErrorKind::Unknown);
        }
        let gpushd = host.start(CONFIG).await;
        let ended = gpushd.ended(&operation).await;
        if is_finished {
            assert_eq!(ended.state, OperationState::Done, "{ended:?}");
            assert_eq!(host.gpus.instances(0), WHOLE);
            let one = gpushd.only_override().await;
            assert_eq!((one.reason.as_str(), one.by.uid), ("killed", operation.by.uid));
            assert_eq!(one.expires_at.map(|at| at.to_string()).as_deref(), Some("2126-01-01T00:00:00Z"));
        } else {
            assert_eq!(ended.state, OperationState::RolledBack, "{ended:?}");
            assert_eq!(gpushd.overrides().await.overrides, []);
        }
        let gpu = gpushd.gpu(0).await;
        assert!(gpu.drift.is_empty(), "{gpu:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn override_changes_are_audited_and_are_events() {
    let host = started().await;
    host.done(&whole("to be replaced")).await;
    host.done(&layout("0", &["1g.10gb*2"], "to be cleared")).await;
    host.delete::<Value>("/v1/overrides/0").await.expect("it is cleared");
    host.done(&whole("to end with its rule")).await;
    assert_eq!(host.try_reload("", &json!({ "clear_overrides": true })).await.expect("it is taken").ended.len(), 1);
    host.reload(CONFIG).await;
    host.short_override().await;
    let expected = [
        "override.make",
        "override.make",
        "override.clear",
        "override.make",
        "override.clear",
        "override.make",
        "override.expire",
    ];
    let reported = host
        .until("the last event", async || {
            let events: Vec<Event> = host.get("/v1/events?follow=false&kinds=change").await;
            let action = |event: Event| match event.what {
                EventPayload::Change(change) => Some(change.action),
                _ => None,
            };
            let actions: Vec<String> = events.into_iter().filter_map(action).collect();
            Some(actions).filter(|actions| actions.last().is_some_and(|last| last == "override.expire"))
        })
        .await;
    assert_eq!(reported, expected);
    assert!(host.overrides().await.overrides.is_empty());
    let uuid = host.gpu(0).await.uuid;
    let mut trail: Vec<AuditRecord> = host.get("/v1/audit").await;
    trail.sort_by_key(|record| record.sequence);
    let about: Vec<&AuditRecord> = trail.iter().filter(|record| record.object == uuid.as_str()).collect();
    assert_eq!(about.iter().map(|record| record.action.as_str()).collect::<Vec<_>>(), expected);
    assert!(about[..6].iter().all(|record| record.by.is_some()) && about[6].by.is_none(), "{about:?}");
    assert_eq!(about[2].detail["reason"], "to be cleared");
    assert_eq!(trail.iter().filter(|record| record.action == "config.reload").count(), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn request_with_an_old_generation_is_refused() {
    let host = started().await;
    host.done(&whole("generation 1")).await;
    let json_type = ("content-type", "application/json");
    for path in ["/v1/overrides", "/v1/config"] {
        assert_eq!(host.request(Method::GET, path, &[], "").await.headers[header::ETAG], "\"1\"", "{path}");
    }
    let body = layout("0", &["1g.10gb"], "").to_string();
    for (method, path, body) in [
        (Method::POST, "/v1/mig/apply", body.as_str()),
        (Method::POST, "/v1/config/reload", "{}"),
        (Method::DELETE, "/v1/overrides/0", ""),
    ] {
        for (value, status) in [("0", 412), ("\"0\"", 412), ("2", 412), ("x", 400)] {
            let answer = host.request(method.clone(), path, &[json_type, ("if-match", value)], body).await;
            assert_eq!(answer.status, status, "{method} {path} {value}: {:?}", answer.error());
            assert_eq!(answer.error().code, if status == 412 { Code::Conflict } else { Code::BadRequest });
        }
    }
    assert_eq!(host.only_override().await.reason, "generation 1");
    assert_eq!(host.gpus.instances(0), WHOLE);
    assert!(host.health().await.errors.is_empty(), "a refused reload says nothing about the file");
    for value in ["*", "1", "\"1\""] {
        let answer = host.request(Method::POST, "/v1/config/reload", &[json_type, ("if-match", value)], "{}").await;
        assert_eq!(answer.status, StatusCode::OK, "{value}");
    }
    let cleared = host.request(Method::DELETE, "/v1/overrides/0", &[("if-match", "\"1\"")], "").await;
    assert_eq!(cleared.status, StatusCode::OK);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn running_operation_keeps_its_plan_after_a_reload() {
    const EXCLUSIVE: &str = "[[gpu]]\nmatch = [\"all\"]\nmode = \"exclusive\"\n";
    for kill in [false, true] {
        let gpushd = started().await;
        let host = std::sync::Arc::clone(&gpushd.host);
        host.gpus.rule(CallRule::on(CREATE, 0).once().held());
        let operation = gpushd.begin_with(&whole("begun before")).await.expect("it begins");
        gpushd.until_held().await;
        // The new rule does not give GPU 0 the mode `mig`.
        gpushd.reload(EXCLUSIVE).await;
        assert_eq!(gpushd.gpu(0).await.mode, Mode::Exclusive);
        let gpushd = if kill {
            gpushd.kill();
            host.start(EXCLUSIVE).await
        } else {
            host.gpus.release();
            gpushd
        };
        assert_eq!(gpushd.ended(&operation).await.state, OperationState::Done);
        assert_eq!(host.gpus.instances(0), WHOLE);
        // A new operation must follow the new rules.
        assert_eq!(gpushd.begin_with(&whole("after")).await.unwrap_err().code, Code::Conflict);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reload_of_an_overridden_rule_is_refused_until_cleared() {
    let host = started().await;
    host.done(&whole("leave it")).await;
    // gpushd accepts a file that changes another rule or the name of a rule.
    let other = "[[gpu]]\nname = \"other\"\nmatch = [\"0\"]\nmode = \"mig\"\nlayout = [\"3g.40gb*2\"]\n\
                 [[gpu]]\nmatch = [\"1\"]\nmode = \"exclusive\"\n";
    let other = format!("auto_reconcile = false\n[log]\nlevel = \"debug\"\n{other}");
    let reloaded = host.reload(&other).await;
    assert_eq!((reloaded.generation, reloaded.ended.len()), (2, 0));
    assert_eq!(reloaded.settings.iter().map(|one| one.key.as_str()).collect::<Vec<_>>(), ["log.level"]);
    let gpus: Vec<_> = reloaded.gpus.iter().map(|one| (one.gpu, one.in_force.rule.clone())).collect();
    assert_eq!(gpus, [(GpuIndex(0), Some("training".to_owned())), (GpuIndex(1), Some("training".to_owned()))]);
    assert_eq!(host.reload(&other).await.generation, 2, "nothing changed");

    let uuid = host.gpu(0).await.uuid;
    for changed in [
        "[[gpu]]\nmatch = [\"0\"]\nmode = \"mig\"\nlayout = [\"1g.10gb*7\"]\n",
        "[[gpu]]\nmatch = [\"0\"]\nmode = \"exclusive\"\n",
        "",
    ] {
        let error = host.try_reload(changed, &json!({})).await.unwrap_err();
        assert_eq!(error.code, Code::Conflict, "{error:?}");
        assert!(error.message.contains(&format!("GPU 0 ({uuid}) has an override by")), "{error:?}");
        assert!(error.message.contains(": leave it"), "{error:?}");
        let hint = error.hint.as_deref().unwrap_or_default();
        assert!(hint.contains("--clear-overrides") && hint.contains("config diff"), "{hint}");
        let health = format!("{:?}", host.health().await.errors);
        assert!(health.contains("the previous config stays in effect"), "{health}");
        for path in ["/v1/config/diff", "/v1/config"] {
            assert_eq!(host.get::<Value>(path).await["trouble"]["code"], "conflict", "{path}");
        }
        assert_eq!(host.gpu(0).await.rule.as_deref(), Some("other"));
    }
    assert_eq!(host.only_override().await.reason, "leave it");

    let changed = "[[gpu]]\nmatch = [\"0\"]\nmode = \"mig\"\nlayout = [\"1g.10gb*7\"]\n";
    let reloaded = host.try_reload(changed, &json!({ "clear_overrides": true })).await.expect("it is taken");
    assert_eq!(reloaded.ended.iter().map(|one| one.reason.as_str()).collect::<Vec<_>>(), ["leave it"]);
    assert_eq!(host.overrides().await, empty(reloaded.generation));
    assert_eq!(host.gpu(0).await.drift.len(), 2);
    assert_eq!(host.gpus.instances(0), WHOLE);
    assert!(host.health().await.errors.is_empty());
    // Even with `clear_overrides`, gpushd refuses an invalid file, and keeps the config.
    let invalid = host.try_reload("nonsense", &json!({ "clear_overrides": true })).await.unwrap_err();
    assert_eq!(invalid.code, Code::ConfigInvalid);
    assert_eq!(host.get::<Value>("/v1/config/diff").await["trouble"]["code"], "config_invalid");
    assert_eq!(host.health().await.errors[0].code, Code::ConfigInvalid);
    assert_eq!(host.gpu(0).await.layout, Some(vec!["1g.10gb*7".to_owned()]));
    host.reload(changed).await;
    assert!(host.health().await.errors.is_empty());
    let denied = host.send(user(1000), Method::DELETE, "/v1/overrides/0", None).await;
    assert_eq!(denied.0, StatusCode::FORBIDDEN);
}
