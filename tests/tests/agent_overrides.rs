//! Layouts that stand above the config's: what makes them, what ends them, what they survive.

use std::time::{Duration, Instant};

use gpush_api::{ApiError, Code, Gpu, Operation, OperationState, Override, OverrideEnded, Overrides, Reloaded};
use gpush_tests::{
    agent::{Agent, Answer, Setup, gi_at, truth},
    host::Host,
};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

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

/// Waits until no layout of this boot is due any more.
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

/// The one that stands, by what it wants and why.
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
    json!({ "gpus": ["0"], "layout": { "entries": ["7g.80gb"] }, "reason": reason })
}

fn done(agent: &Agent, body: &Value) -> Operation {
    let operation = agent.follow(agent.begin_with(body).unwrap_or_else(|error| panic!("{error:?}")));
    assert_eq!(operation.state, OperationState::Done, "{operation:?}");
    operation
}

fn causes(agent: &Agent) -> String {
    agent.get("/v1/health").json()["causes"].to_string()
}

#[test]
fn an_explicit_layout_is_wanted_until_it_is_cleared_and_outlives_the_agent() {
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

    // What is wanted is also what a request without layout and GPUs means, and a plan for it.
    let plans = agent.post("/v1/mig/plan", &json!({})).json();
    assert_eq!(plans["plans"][0]["steps"], json!([]), "{plans}");
    done(&agent, &json!({}));
    assert_eq!(truth(&host, 0), WHOLE);
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
    assert_eq!(truth(&host, 0), WHOLE, "nothing is reshaped by it");
    let again = clear(&agent, "0");
    assert_eq!((again.status, again.error().code), (404, Code::NotFound));
    assert_eq!(agent.request("DELETE", "/v1/overrides/0-1", "", b"").status, 400);
    done(&agent, &json!({}));
    assert_eq!(truth(&host, 0), HALVES);
}

#[test]
fn what_is_applied_once_is_drift() {
    let host = Host::up(HOST);
    let agent = started(&host);
    assert_eq!(agent.apply_once(&["0"], &["7g.80gb"]).state, OperationState::Done);
    assert_eq!(overrides(&agent).overrides, []);
    assert_eq!(agent.gpu(0).drift, ["missing 3g.40gb*2", "extra 7g.80gb@0"]);
    // And it leaves one that stands alone.
    done(&agent, &whole("it stays"));
    assert_eq!(agent.apply_once(&["0"], &["1g.10gb"]).state, OperationState::Done);
    assert_eq!(only(&agent).reason, "it stays");
    assert_eq!(agent.gpu(0).drift, ["missing 7g.80gb", "extra 1g.10gb@6"]);
}

#[test]
fn the_rules_own_layout_ends_an_override_and_a_new_one_takes_its_place() {
    let host = Host::up(HOST);
    let agent = started(&host);
    done(&agent, &whole("first"));
    done(&agent, &json!({ "gpus": ["0"], "layout": { "entries": ["1g.10gb*2"] }, "reason": "second" }));
    assert_eq!((only(&agent).reason.as_str(), only(&agent).generation), ("second", 2));
    // Named, without a layout.
    done(&agent, &json!({ "gpus": ["0"] }));
    assert_eq!((overrides(&agent).overrides, truth(&host, 0)), (Vec::new(), HALVES.map(str::to_owned).to_vec()));
    // The same, written out.
    done(&agent, &whole("third"));
    done(&agent, &json!({ "gpus": ["0"], "layout": { "entries": ["3g.40gb", "3g.40gb"] } }));
    assert_eq!(overrides(&agent).overrides, [], "however it is written");
    // One of several GPUs by name, as in files of mig-parted; the other keeps what it has.
    done(&agent, &whole("fourth"));
    let each = json!([{ "gpu": "1", "mig": true, "layout": ["1g.10gb*7"] }]);
    done(&agent, &json!({ "layout": { "per_gpu": each }, "reason": "fifth" }));
    let reasons: Vec<String> = overrides(&agent).overrides.into_iter().map(|one| one.reason).collect();
    assert_eq!(reasons, ["fourth", "fifth"]);
}

#[test]
fn a_gpu_that_no_rule_claims_has_nothing_to_override() {
    let host = Host::up(HOST);
    let agent = settled(Agent::start(&host, ""));
    assert_eq!(agent.apply(&["0"], &["7g.80gb"]).state, OperationState::Done);
    assert_eq!(overrides(&agent).overrides, []);
    let mut body = whole("");
    body["expires_at"] = json!("2126-01-01T00:00:00Z");
    let error = agent.begin_with(&body).unwrap_err();
    assert_eq!(error.code, Code::BadRequest, "{error:?}");
    assert!(error.message.contains("nothing that could expire"), "{error:?}");
    body["expires_at"] = json!("2001-01-01T00:00:00Z");
    assert!(agent.begin_with(&body).unwrap_err().message.contains("has passed"));
    body["once"] = json!(true);
    assert!(agent.begin_with(&body).unwrap_err().message.contains("applied once"));
}

#[test]
fn an_operation_that_is_refused_or_rolled_back_leaves_the_override_from_before() {
    let host = Host::up(HOST);
    let agent = started(&host);
    let halves = |reason: &str| json!({ "gpus": ["0"], "layout": { "entries": ["4g.40gb"] }, "reason": reason });
    // Without one from before.
    host.fault("nvmlDeviceCreateGpuInstance* --gpu 0 --times 1 --rc UNKNOWN");
    let operation = agent.follow(agent.begin_with(&whole("in vain")).unwrap());
    assert_eq!(operation.state, OperationState::RolledBack);
    assert_eq!(overrides(&agent), Overrides { generation: 0, overrides: Vec::new() });
    assert!(agent.gpu(0).drift.is_empty(), "the rule's layout is wanted, and stands again");
    host.clear_faults();
    // With one.
    done(&agent, &whole("it stands"));
    host.fault("nvmlDeviceCreateGpuInstance* --gpu 0 --times 1 --rc UNKNOWN");
    let operation = agent.follow(agent.begin_with(&halves("in vain")).unwrap());
    assert_eq!(operation.state, OperationState::RolledBack);
    host.clear_faults();
    let error = agent
        .begin_with(&json!({ "gpus": ["0"], "layout": { "entries": ["7g.80gb*2"] }, "reason": "impossible" }))
        .unwrap_err();
    assert_eq!(error.code, Code::LayoutImpossible);
    assert_eq!(only(&agent).reason, "it stands");
    assert!(agent.gpu(0).drift.is_empty());
    // In line behind another, and cancelled there.
    host.fault("nvmlDeviceCreateGpuInstance* --gpu 0 --times 1 --delay-ms 1500");
    let first =
        agent.begin_with(&json!({ "gpus": ["0"], "layout": { "entries": ["1g.10gb"] }, "once": true })).unwrap();
    let mut body = halves("never begun");
    body["wait_s"] = json!(600);
    let second = agent.begin_with(&body).unwrap();
    assert_eq!(agent.post(&format!("/v1/operations/{}/cancel", second.id), &json!({})).status, 202);
    assert_eq!(agent.follow(second).state, OperationState::RolledBack);
    assert_eq!(agent.follow(first).state, OperationState::Done);
    assert_eq!(only(&agent).reason, "it stands");
}

#[test]
fn a_killed_agent_finishes_the_operation_and_its_override_stands_or_neither() {
    // Killed within a driver call. The next agent carries the operation on, or can't, and goes back.
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
            assert_eq!((operation.state, truth(&host, 0)), (OperationState::Done, WHOLE.map(str::to_owned).to_vec()));
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

/// An override that ends in a moment.
fn short(agent: &Agent) -> Operation {
    let mut body = whole("for a moment");
    body["expires_at"] = json!((jiff::Timestamp::now() + jiff::SignedDuration::from_secs(3)).to_string());
    done(agent, &body)
}

#[test]
fn an_override_expires_for_good_and_nothing_is_reshaped() {
    let host = Host::up(HOST);
    let agent = started(&host);
    short(&agent);
    assert_eq!(only(&agent).reason, "for a moment");
    let drifts = |gpu: Gpu| (gpu.overridden.is_none() && gpu.drift.len() == 2).then_some(());
    agent.until("expiry", || drifts(agent.gpu(0)));
    agent.until("record of it", || (overrides(&agent).generation == 2).then_some(()));
    assert!(agent.log().contains("has expired"), "{}", agent.log());
    agent.stop();
    let agent = Agent::start(&host, CONFIG);
    assert_eq!(overrides(&agent), Overrides { generation: 2, overrides: Vec::new() });
    assert_eq!(truth(&host, 0), WHOLE);
    // One that expires while there is no agent.
    short(&agent);
    agent.kill();
    let agent = Agent::start(&host, CONFIG);
    agent.until("expiry", || (overrides(&agent).generation == 4).then_some(()));
    assert_eq!((overrides(&agent).overrides, truth(&host, 0)), (Vec::new(), WHOLE.map(str::to_owned).to_vec()));
}

#[test]
fn with_auto_reconcile_an_override_is_kept_and_its_end_reshapes() {
    let host = Host::up(HOST);
    let agent = settled(Agent::start(&host, &format!("auto_reconcile = true\n{CONFIG}")));
    short(&agent);
    agent.until("the rule's layout", || (truth(&host, 0) == HALVES).then_some(()));
    done(&agent, &whole("to be cleared"));
    // Drift from the override is put right to the override.
    assert_eq!(agent.apply_once(&["0"], &["1g.10gb"]).state, OperationState::Done);
    agent.signal(Signal::SIGHUP);
    agent.until("the override's layout", || (truth(&host, 0) == WHOLE).then_some(()));
    let _ = agent.settle();
    assert_eq!(clear(&agent, "0").status, 200);
    agent.until("the rule's layout", || (truth(&host, 0) == HALVES).then_some(()));
}

#[test]
fn a_new_boot_gets_the_overrides_layout() {
    let host = Host::up(HOST);
    let agent = started(&host);
    done(&agent, &whole("also after a reboot"));
    agent.stop();
    host.sim::<&str>("reboot", &[]);
    let agent = started(&host);
    assert_eq!(
        (truth(&host, 0), truth(&host, 1)),
        (WHOLE.map(str::to_owned).to_vec(), HALVES.map(str::to_owned).to_vec())
    );
    assert!(agent.gpus().iter().all(|gpu| gpu.drift.is_empty()));
    assert_eq!(only(&agent).reason, "also after a reboot", "the agent's own operation leaves it");
    // One that has expired by then is not what boots.
    short(&agent);
    agent.stop();
    host.sim::<&str>("reboot", &[]);
    let expired = Instant::now() + Duration::from_secs(3);
    while Instant::now() < expired {
        std::thread::sleep(Duration::from_millis(50));
    }
    let agent = started(&host);
    assert_eq!((truth(&host, 0), overrides(&agent).overrides.len()), (HALVES.map(str::to_owned).to_vec(), 0));
}

#[test]
fn an_override_that_can_not_be_at_boot_leaves_the_gpu_as_it_is_and_says_so() {
    let host = Host::up(HOST);
    let agent = started(&host);
    done(&agent, &whole("blocked at boot"));
    agent.stop();
    host.sim::<&str>("reboot", &[]);
    // Somebody was there first.
    let other = Setup::on(&host).named("first").start();
    assert_eq!(other.apply(&["0"], &["1g.10gb@0"]).state, OperationState::Done);
    other.stop();
    let _ = host.process(&format!("--gpu 0 --gi {} --ci 0", gi_at(&host, 0, 0)));
    let agent = started(&host);
    assert_eq!(truth(&host, 0), ["1g.10gb@0[1g.10gb@0]"], "neither the override's layout nor the rule's");
    assert_eq!(truth(&host, 1), HALVES);
    let said = causes(&agent);
    assert!(said.contains("this layout is an override by") && said.contains("1g.10gb@0 (GPU instance"), "{said}");
    assert!(said.contains("`gpushctl mig apply` does"), "a command that does not end the override: {said}");
    assert_eq!(agent.gpu(0).drift, ["missing 7g.80gb", "extra 1g.10gb@0"]);
    assert_eq!(only(&agent).reason, "blocked at boot");
}

#[test]
fn a_reload_that_changes_an_overridden_rule_is_refused_until_told_to_end_it() {
    let host = Host::up(HOST);
    let agent = started(&host);
    done(&agent, &whole("leave it"));
    // What changes another rule, or a name, is taken.
    let other = "[[gpu]]\nname = \"other\"\nmatch = [\"0\"]\nmode = \"mig\"\nlayout = [\"3g.40gb*2\"]\n\
                 [[gpu]]\nmatch = [\"1\"]\nmode = \"exclusive\"\n";
    agent.write_config(format!("auto_reconcile = false\n[log]\nlevel = \"debug\"\n{other}"));
    let reloaded = reload(&agent, &json!({})).unwrap();
    assert_eq!((reloaded.generation, reloaded.ended.len()), (2, 0));
    let keys: Vec<_> = reloaded.settings.iter().map(|one| one.key.as_str()).collect();
    assert_eq!(keys, ["log.level"]);
    let gpus: Vec<_> = reloaded.gpus.iter().map(|one| (one.gpu, one.in_force.rule.clone())).collect();
    assert_eq!(gpus, [(0, Some("training".to_owned())), (1, Some("training".to_owned()))]);
    assert_eq!(reload(&agent, &json!({})).unwrap().generation, 2, "nothing changed");

    for changed in [
        "[[gpu]]\nmatch = [\"0\"]\nmode = \"mig\"\nlayout = [\"1g.10gb*7\"]\n",
        "[[gpu]]\nmatch = [\"0\"]\nmode = \"exclusive\"\n",
        "",
    ] {
        agent.write_config(changed);
        let error = reload(&agent, &json!({})).unwrap_err();
        assert_eq!(error.code, Code::Conflict, "{error:?}");
        let uuid = agent.gpu(0).uuid;
        assert!(error.message.contains(&format!("GPU 0 ({uuid}) has an override by")), "{error:?}");
        assert!(error.message.contains(": leave it"), "{error:?}");
        let hint = error.hint.clone().unwrap();
        assert!(hint.contains("--clear-overrides") && hint.contains("config diff"), "{hint}");
        assert!(causes(&agent).contains("the config read before stays in force"), "{}", causes(&agent));
        let diff = agent.get("/v1/config/diff").json();
        assert_eq!(diff["trouble"]["code"], "conflict", "{diff}");
        assert_eq!(agent.get("/v1/config").json()["trouble"]["code"], "conflict");
        assert_eq!(agent.gpu(0).rule.as_deref(), Some("other"));
    }
    // A signal is refused in the same way.
    let before = agent.log().matches("has an override by").count();
    agent.signal(Signal::SIGHUP);
    agent.until("refusal", || (agent.log().matches("has an override by").count() > before).then_some(()));
    assert_eq!((only(&agent).reason.as_str(), agent.gpu(0).rule.as_deref()), ("leave it", Some("other")));

    agent.write_config("[[gpu]]\nmatch = [\"0\"]\nmode = \"mig\"\nlayout = [\"1g.10gb*7\"]\n");
    let reloaded = reload(&agent, &json!({ "clear_overrides": true })).unwrap();
    let ended: Vec<_> = reloaded.ended.iter().map(|one| one.reason.as_str()).collect();
    assert_eq!(ended, ["leave it"]);
    assert_eq!(overrides(&agent), Overrides { generation: reloaded.generation, overrides: Vec::new() });
    assert_eq!((agent.gpu(0).drift.len(), truth(&host, 0)), (2, WHOLE.map(str::to_owned).to_vec()));
    assert_eq!(agent.get("/v1/health").json()["status"], "ok");
    // What is wrong is refused as ever.
    agent.write_config("nonsense");
    assert_eq!(reload(&agent, &json!({ "clear_overrides": true })).unwrap_err().code, Code::ConfigInvalid);
    assert_eq!(agent.get("/v1/config/diff").json()["trouble"]["code"], "config_invalid");
}

#[test]
fn a_rule_that_was_changed_while_the_agent_was_down_makes_the_override_idle_or_leaves_it() {
    let host = Host::up(HOST);
    let agent = started(&host);
    done(&agent, &whole("still there"));
    agent.stop();
    let agent = Agent::start(&host, "[[gpu]]\nmatch = [\"all\"]\nmode = \"mig\"\nlayout = [\"1g.10gb*7\"]\n");
    assert!(agent.gpu(0).drift.is_empty(), "the override stands above the new rule as well");
    agent.stop();
    let agent = Agent::start(&host, "[[gpu]]\nmatch = [\"all\"]\nmode = \"exclusive\"\n");
    let gpu = agent.gpu(0);
    assert_eq!((gpu.layout, gpu.drift.len()), (None, 1), "a GPU that is to be whole is not cut by an override");
    assert_eq!(only(&agent).reason, "still there");
}

#[test]
fn an_operation_keeps_the_plan_that_it_began_with() {
    for kill in [false, true] {
        let host = Host::up(HOST);
        let agent = started(&host);
        host.fault("nvmlDeviceCreateGpuInstance* --gpu 0 --times 1 --delay-ms 1000");
        let operation = agent.begin_with(&whole("begun before")).unwrap();
        // GPU 0 is no longer to be cut at all.
        let exclusive = "[[gpu]]\nmatch = [\"all\"]\nmode = \"exclusive\"\n";
        agent.write_config(exclusive);
        reload(&agent, &json!({})).unwrap();
        assert_eq!(agent.gpu(0).mode, gpush_api::Mode::Exclusive);
        let agent = if kill {
            agent.kill();
            Agent::start(&host, exclusive)
        } else {
            agent
        };
        let operation = agent.follow(operation);
        assert_eq!((operation.state, truth(&host, 0)), (OperationState::Done, WHOLE.map(str::to_owned).to_vec()));
        // A new one is by the new rules.
        assert_eq!(agent.begin_with(&whole("after")).unwrap_err().code, Code::Conflict);
    }
}

#[test]
fn a_request_of_another_generation_is_refused() {
    let host = Host::up(HOST);
    let agent = started(&host);
    let json = "content-type: application/json\r\n";
    let tag = |answer: &Answer| {
        let line = answer.head.lines().find_map(|line| line.strip_prefix("etag: ").map(str::to_owned));
        line.unwrap_or_else(|| panic!("no etag: {}", answer.head))
    };
    done(&agent, &whole("generation 1"));
    assert_eq!(tag(&agent.get("/v1/overrides")), "\"1\"");
    assert_eq!(tag(&agent.get("/v1/config")), "\"1\"");
    let body = json!({ "gpus": ["0"], "layout": { "entries": ["1g.10gb"] } }).to_string();
    let mut refused = 0;
    for (method, path, body) in [
        ("POST", "/v1/mig/apply", body.as_str()),
        ("POST", "/v1/config/reload", "{}"),
        ("DELETE", "/v1/overrides/0", ""),
    ] {
        for (value, status) in [("0", 412), ("\"0\"", 412), ("2", 412), ("x", 400)] {
            let answer = agent.request(method, path, &format!("{json}if-match: {value}\r\n"), body.as_bytes());
            assert_eq!(answer.status, status, "{method} {path} {value}: {:?}", answer.error());
            assert_eq!(answer.error().code, if status == 412 { Code::Conflict } else { Code::BadRequest });
            refused += 1;
        }
    }
    println!("{refused} requests refused");
    assert_eq!((only(&agent).reason.as_str(), truth(&host, 0)), ("generation 1", WHOLE.map(str::to_owned).to_vec()));
    assert_eq!(agent.get("/v1/health").json()["status"], "ok", "a refused reload says nothing of the file");
    for value in ["*", "1", "\"1\""] {
        let answer = agent.request("POST", "/v1/config/reload", &format!("{json}if-match: {value}\r\n"), b"{}");
        assert_eq!(answer.status, 200, "{value}");
    }
    assert_eq!(agent.request("DELETE", "/v1/overrides/0", "if-match: \"1\"\r\n", b"").status, 200);
}

#[test]
fn what_becomes_of_overrides_is_on_the_trail_and_told() {
    let host = Host::up(HOST);
    let agent = started(&host);
    done(&agent, &whole("to be replaced"));
    done(&agent, &json!({ "gpus": ["0"], "layout": { "entries": ["1g.10gb*2"] }, "reason": "to be cleared" }));
    assert_eq!(clear(&agent, "0").status, 200);
    done(&agent, &whole("to end with its rule"));
    agent.write_config("");
    assert_eq!(reload(&agent, &json!({ "clear_overrides": true })).unwrap().ended.len(), 1);
    agent.write_config(CONFIG);
    reload(&agent, &json!({})).unwrap();
    short(&agent);
    agent.until("expiry", || overrides(&agent).overrides.is_empty().then_some(()));
    let told = agent.until("the last event", || {
        let events = agent.get("/v1/events?follow=false&kinds=change").json();
        events.to_string().contains("override.expire").then_some(events)
    });
    let uuid = agent.gpu(0).uuid;
    let told: Vec<_> = told.as_array().expect("a list").iter().map(|event| event["action"].clone()).collect();
    let made_and_ended = [
        "override.make",
        "override.make",
        "override.clear",
        "override.make",
        "override.clear",
        "override.make",
        "override.expire",
    ];
    assert_eq!(told, made_and_ended);
    let trail = agent.get("/v1/audit").json();
    let mut trail = trail.as_array().expect("a list").clone();
    trail.sort_by_key(|record| record["sequence"].as_u64());
    let about: Vec<&Value> = trail.iter().filter(|record| record["object"] == json!(uuid)).collect();
    assert_eq!(about.iter().map(|record| &record["action"]).collect::<Vec<_>>(), made_and_ended);
    assert!(about[..6].iter().all(|record| record["by"]["uid"].is_u64()) && about[6]["by"].is_null(), "{about:?}");
    assert_eq!(about[2]["detail"]["reason"], "to be cleared");
    let reloads = trail.iter().filter(|record| record["action"] == "config.reload").count();
    assert_eq!(reloads, 2);
}
