//! Overrides, which replace the layouts of the config: how they begin, how they end, and what they
//! survive.

use std::time::{Duration, Instant};

use gpush_api::{ApiError, Code, Gpu, Operation, OperationState, Override, OverrideEnded, Overrides, Reloaded};
use gpush_tests::{
    agent::{Agent, Answer, Setup, gi_at, real_layout},
    host::Host,
};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

mod ends;
mod reloads;

const HOST: &str = "[[gpu]]\nmodel = \"a100-80\"\ncount = 2\n";

const CONFIG: &str = r#"
[[gpu]]
name = "training"
match = ["0-1"]
mode = "mig"
layout = ["3g.40gb*2"]
"#;

const HALVES: [&str; 2] = ["3g.40gb@0[3g.40gb@0]", "3g.40gb@4[3g.40gb@0]"];

const WHOLE: [&str; 1] = ["7g.80gb@0[7g.80gb@0]"];

/// Waits until gpushd has applied all layouts of its start.
fn settled(agent: Agent) -> Agent {
    agent.until("complete record", || {
        (agent.get("/v1/health").json()["layouts_at_start"]["complete"] == json!(true)).then_some(())
    });
    let _ = agent.settle();
    agent
}

fn started(host: &Host) -> Agent {
    settled(Agent::start(host, CONFIG))
}

fn overrides(agent: &Agent) -> Overrides {
    serde_json::from_value(agent.get("/v1/overrides").json()).expect("overrides")
}

/// Returns the only active override.
fn only(agent: &Agent) -> Override {
    let all = overrides(agent).overrides;
    assert_eq!(all.len(), 1, "{all:?}");
    all.into_iter().next().expect("one")
}

fn clear(agent: &Agent, gpu: &str) -> Answer {
    agent.request("DELETE", &format!("/v1/overrides/{gpu}"), "", b"")
}

fn reload(agent: &Agent, body: &Value) -> Result<Reloaded, ApiError> {
    let answer = agent.post("/v1/config/reload", body);
    if answer.status == 200 {
        Ok(serde_json::from_value(answer.json()).expect("a reload"))
    } else {
        Err(answer.error())
    }
}

fn whole(reason: &str) -> Value {
    json!({ "selectors": ["0"], "layout_source": { "entries": ["7g.80gb"] }, "reason": reason })
}

fn done(agent: &Agent, body: &Value) -> Operation {
    let operation = agent.follow(agent.begin_with(body).unwrap_or_else(|error| panic!("{error:?}")));
    assert_eq!(operation.state, OperationState::Done, "{operation:?}");
    operation
}

fn causes(agent: &Agent) -> String {
    agent.get("/v1/health").json()["errors"].to_string()
}

/// Creates an override that expires after three seconds.
fn short(agent: &Agent) -> Operation {
    let mut body = whole("for a moment");
    body["expires_at"] = json!((jiff::Timestamp::now() + jiff::SignedDuration::from_secs(3)).to_string());
    done(agent, &body)
}

#[test]
fn explicit_layout_is_desired_until_cleared() {
    let host = Host::up(HOST);
    let agent = started(&host);
    assert_eq!(overrides(&agent), Overrides { generation: 0, overrides: Vec::new() });
    let operation = done(&agent, &whole("one big run"));
    let one = only(&agent);
    assert_eq!((one.gpu, &one.layout[..], one.reason.as_str()), (Some(0), &["7g.80gb".to_owned()][..], "one big run"));
    assert_eq!((one.rule.as_deref(), one.by.uid, one.generation), (Some("training"), operation.by.uid, 1));
    assert!(one.created_at >= operation.created_at && one.expires_at.is_none());
    let shown = agent.gpu(0);
    assert_eq!((shown.overridden.as_ref(), shown.drift.len()), (Some(&one), 0));
    assert_eq!(shown.layout, Some(vec!["7g.80gb".to_owned()]), "what is wanted");
    assert_eq!(agent.gpu(1).overridden, None);

    // Without a layout and without GPUs, an apply or a plan uses the desired layouts.
    let plans = agent.post("/v1/mig/plan", &json!({})).json();
    assert_eq!(plans["plans"][0]["steps"], json!([]), "{plans}");
    done(&agent, &json!({}));
    assert_eq!(real_layout(&host, 0), WHOLE);
    agent.stop();
    for kill in [false, true] {
        let agent = Agent::start(&host, CONFIG);
        assert_eq!(only(&agent), one);
        assert!(agent.gpu(0).drift.is_empty());
        if kill { agent.kill() } else { agent.stop() }
    }

    let agent = Agent::start(&host, CONFIG);
    let answer = clear(&agent, "0");
    assert_eq!(answer.status, 200);
    let ended: OverrideEnded = serde_json::from_value(answer.json()).expect("what ended");
    assert_eq!((ended.generation, ended.ended), (2, one));
    assert_eq!(overrides(&agent), Overrides { generation: 2, overrides: Vec::new() });
    assert_eq!(agent.gpu(0).drift, ["missing 3g.40gb*2", "extra 7g.80gb@0"]);
    assert_eq!(real_layout(&host, 0), WHOLE, "nothing is reshaped by it");
    let again = clear(&agent, "0");
    assert_eq!((again.status, again.error().code), (404, Code::NotFound));
    assert_eq!(agent.request("DELETE", "/v1/overrides/0-1", "", b"").status, 400);
    done(&agent, &json!({}));
    assert_eq!(real_layout(&host, 0), HALVES);
}

#[test]
fn layout_applied_once_is_drift() {
    let host = Host::up(HOST);
    let agent = started(&host);
    assert_eq!(agent.apply_once(&["0"], &["7g.80gb"]).state, OperationState::Done);
    assert_eq!(overrides(&agent).overrides, []);
    assert_eq!(agent.gpu(0).drift, ["missing 3g.40gb*2", "extra 7g.80gb@0"]);
    // A layout that is applied with `once` does not end an active override.
    done(&agent, &whole("it stays"));
    assert_eq!(agent.apply_once(&["0"], &["1g.10gb"]).state, OperationState::Done);
    assert_eq!(only(&agent).reason, "it stays");
    assert_eq!(agent.gpu(0).drift, ["missing 7g.80gb", "extra 1g.10gb@6"]);
}

#[test]
fn rule_layout_ends_override_and_new_layout_replaces_it() {
    let host = Host::up(HOST);
    let agent = started(&host);
    done(&agent, &whole("first"));
    done(&agent, &json!({ "selectors": ["0"], "layout_source": { "entries": ["1g.10gb*2"] }, "reason": "second" }));
    assert_eq!((only(&agent).reason.as_str(), only(&agent).generation), ("second", 2));
    // If a request names the GPU but no layout, it ends the override.
    done(&agent, &json!({ "selectors": ["0"] }));
    assert_eq!((overrides(&agent).overrides, real_layout(&host, 0)), (Vec::new(), HALVES.map(str::to_owned).to_vec()));
    // If a request lists the entries of the rule's layout, it also ends the override.
    done(&agent, &whole("third"));
    done(&agent, &json!({ "selectors": ["0"], "layout_source": { "entries": ["3g.40gb", "3g.40gb"] } }));
    assert_eq!(overrides(&agent).overrides, [], "however it is written");
    // This request has a separate layout for each GPU, like a request from a mig-parted file. It
    // names only GPU 1, so GPU 0 keeps its override.
    done(&agent, &whole("fourth"));
    let each = json!([{ "selector": "1", "mig_enabled": true, "layout": ["1g.10gb*7"] }]);
    done(&agent, &json!({ "layout_source": { "per_gpu": each }, "reason": "fifth" }));
    let reasons: Vec<String> = overrides(&agent).overrides.into_iter().map(|one| one.reason).collect();
    assert_eq!(reasons, ["fourth", "fifth"]);
}

#[test]
fn unmanaged_gpu_has_no_override() {
    let host = Host::up(HOST);
    let agent = settled(Agent::start(&host, ""));
    assert_eq!(agent.apply(&["0"], &["7g.80gb"]).state, OperationState::Done);
    assert_eq!(overrides(&agent).overrides, []);
    let mut body = whole("");
    body["expires_at"] = json!("2126-01-01T00:00:00Z");
    let error = agent.begin_with(&body).unwrap_err();
    assert_eq!(error.code, Code::BadRequest, "{error:?}");
    assert!(error.message.contains("an expiry has no effect"), "{error:?}");
    body["expires_at"] = json!("2001-01-01T00:00:00Z");
    assert!(agent.begin_with(&body).unwrap_err().message.contains("has passed"));
    body["once"] = json!(true);
    assert!(agent.begin_with(&body).unwrap_err().message.contains("`expires_at` has no effect"));
}

#[test]
fn failed_operation_keeps_previous_override() {
    let host = Host::up(HOST);
    let agent = started(&host);
    let halves =
        |reason: &str| json!({ "selectors": ["0"], "layout_source": { "entries": ["4g.40gb"] }, "reason": reason });
    // At this point, there is no previous override.
    host.fault("nvmlDeviceCreateGpuInstance* --gpu 0 --times 1 --rc UNKNOWN");
    let operation = agent.follow(agent.begin_with(&whole("fails")).unwrap());
    assert_eq!(operation.state, OperationState::RolledBack);
    assert_eq!(overrides(&agent), Overrides { generation: 0, overrides: Vec::new() });
    assert!(agent.gpu(0).drift.is_empty(), "the rule's layout is wanted, and stands again");
    host.clear_faults();
    // At this point, there is a previous override.
    done(&agent, &whole("it stands"));
    host.fault("nvmlDeviceCreateGpuInstance* --gpu 0 --times 1 --rc UNKNOWN");
    let operation = agent.follow(agent.begin_with(&halves("fails")).unwrap());
    assert_eq!(operation.state, OperationState::RolledBack);
    host.clear_faults();
    let error = agent
        .begin_with(
            &json!({ "selectors": ["0"], "layout_source": { "entries": ["7g.80gb*2"] }, "reason": "impossible" }),
        )
        .unwrap_err();
    assert_eq!(error.code, Code::LayoutImpossible);
    assert_eq!(only(&agent).reason, "it stands");
    assert!(agent.gpu(0).drift.is_empty());
    // Cancel an operation while it is queued behind another operation.
    host.fault("nvmlDeviceCreateGpuInstance* --gpu 0 --times 1 --delay-ms 1500");
    let first = agent
        .begin_with(&json!({ "selectors": ["0"], "layout_source": { "entries": ["1g.10gb"] }, "once": true }))
        .unwrap();
    let mut body = halves("never begun");
    body["wait_s"] = json!(600);
    let second = agent.begin_with(&body).unwrap();
    assert_eq!(agent.post(&format!("/v1/operations/{}/cancel", second.id), &json!({})).status, 202);
    assert_eq!(agent.follow(second).state, OperationState::NotStarted);
    assert_eq!(agent.follow(first).state, OperationState::Done);
    assert_eq!(only(&agent).reason, "it stands");
}

#[test]
fn killed_agent_keeps_layout_and_override_consistent() {
    // The fault rule kills gpushd during a driver call. If the next gpushd cannot finish the
    // operation, it rolls the operation back.
    for carried_on in [true, false] {
        let host = Host::up(HOST);
        let agent = started(&host);
        host.fault("nvmlDeviceCreateGpuInstance* --gpu 0 --times 1 --delay-ms 800 --kill after");
        let mut body = whole("killed");
        body["expires_at"] = json!("2126-01-01T00:00:00Z");
        let operation = agent.begin_with(&body).unwrap();
        agent.kill();
        host.clear_faults();
        if !carried_on {
            host.fault("nvmlDeviceCreateGpuInstance* --gpu 0 --times 1 --rc UNKNOWN");
        }
        let agent = Agent::start(&host, CONFIG);
        assert_eq!(overrides(&agent).overrides.len(), 0, "not before it has ended");
        let operation = agent.follow(operation);
        if carried_on {
            assert_eq!(
                (operation.state, real_layout(&host, 0)),
                (OperationState::Done, WHOLE.map(str::to_owned).to_vec())
            );
            let one = only(&agent);
            assert_eq!((one.reason.as_str(), one.by.uid), ("killed", operation.by.uid));
            assert_eq!(one.expires_at.map(|at| at.to_string()).as_deref(), Some("2126-01-01T00:00:00Z"));
        } else {
            assert_eq!(operation.state, OperationState::RolledBack, "{operation:?}");
            assert_eq!(overrides(&agent).overrides, []);
        }
        assert!(agent.gpu(0).drift.is_empty(), "{:?}", agent.gpu(0));
    }
}
