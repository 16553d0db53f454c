//! What happens to active overrides if the config file changes, or if other clients send requests.

use super::*;

#[test]
fn reload_of_overridden_rule_is_refused_until_cleared() {
    let host = Host::up(HOST);
    let agent = started(&host);
    done(&agent, &whole("leave it"));
    // gpushd accepts a file that changes another rule or the name of a rule.
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
        assert!(causes(&agent).contains("the previous config stays in effect"), "{}", causes(&agent));
        let diff = agent.get("/v1/config/diff").json();
        assert_eq!(diff["trouble"]["code"], "conflict", "{diff}");
        assert_eq!(agent.get("/v1/config").json()["trouble"]["code"], "conflict");
        assert_eq!(agent.gpu(0).rule.as_deref(), Some("other"));
    }
    // gpushd also refuses this file if a signal, and not an API request, asks for the reload.
    let before = agent.log().matches("has an override by").count();
    agent.signal(Signal::SIGHUP);
    agent.until("refusal", || (agent.log().matches("has an override by").count() > before).then_some(()));
    assert_eq!((only(&agent).reason.as_str(), agent.gpu(0).rule.as_deref()), ("leave it", Some("other")));

    agent.write_config("[[gpu]]\nmatch = [\"0\"]\nmode = \"mig\"\nlayout = [\"1g.10gb*7\"]\n");
    let reloaded = reload(&agent, &json!({ "clear_overrides": true })).unwrap();
    let ended: Vec<_> = reloaded.ended.iter().map(|one| one.reason.as_str()).collect();
    assert_eq!(ended, ["leave it"]);
    assert_eq!(overrides(&agent), Overrides { generation: reloaded.generation, overrides: Vec::new() });
    assert_eq!((agent.gpu(0).drift.len(), real_layout(&host, 0)), (2, WHOLE.map(str::to_owned).to_vec()));
    assert_eq!(agent.get("/v1/health").json()["status"], "ok");
    // Even with `clear_overrides`, gpushd refuses an invalid file.
    agent.write_config("nonsense");
    assert_eq!(reload(&agent, &json!({ "clear_overrides": true })).unwrap_err().code, Code::ConfigInvalid);
    assert_eq!(agent.get("/v1/config/diff").json()["trouble"]["code"], "config_invalid");
}

#[test]
fn rule_changed_while_agent_was_down_can_suspend_override() {
    let host = Host::up(HOST);
    let agent = started(&host);
    done(&agent, &whole("still there"));
    agent.stop();
    let agent = Agent::start(&host, "[[gpu]]\nmatch = [\"all\"]\nmode = \"mig\"\nlayout = [\"1g.10gb*7\"]\n");
    assert!(agent.gpu(0).drift.is_empty(), "the override also replaces the new rule's layout");
    agent.stop();
    let agent = Agent::start(&host, "[[gpu]]\nmatch = [\"all\"]\nmode = \"exclusive\"\n");
    let gpu = agent.gpu(0);
    assert_eq!((gpu.layout, gpu.drift.len()), (None, 1), "a GPU that is to be whole is not cut by an override");
    assert_eq!(only(&agent).reason, "still there");
}

#[test]
fn running_operation_keeps_its_plan_after_reload() {
    for kill in [false, true] {
        let host = Host::up(HOST);
        let agent = started(&host);
        host.fault("nvmlDeviceCreateGpuInstance* --gpu 0 --times 1 --delay-ms 1000");
        let operation = agent.begin_with(&whole("begun before")).unwrap();
        // The new rule does not give GPU 0 the mode `mig`.
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
        assert_eq!((operation.state, real_layout(&host, 0)), (OperationState::Done, WHOLE.map(str::to_owned).to_vec()));
        // A new operation must follow the new rules.
        assert_eq!(agent.begin_with(&whole("after")).unwrap_err().code, Code::Conflict);
    }
}

#[test]
fn request_with_old_generation_is_refused() {
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
    let body = json!({ "selectors": ["0"], "layout_source": { "entries": ["1g.10gb"] } }).to_string();
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
    assert_eq!(
        (only(&agent).reason.as_str(), real_layout(&host, 0)),
        ("generation 1", WHOLE.map(str::to_owned).to_vec())
    );
    assert_eq!(agent.get("/v1/health").json()["status"], "ok", "a refused reload says nothing of the file");
    for value in ["*", "1", "\"1\""] {
        let answer = agent.request("POST", "/v1/config/reload", &format!("{json}if-match: {value}\r\n"), b"{}");
        assert_eq!(answer.status, 200, "{value}");
    }
    assert_eq!(agent.request("DELETE", "/v1/overrides/0", "if-match: \"1\"\r\n", b"").status, 200);
}

#[test]
fn override_changes_are_audited_and_are_events() {
    let host = Host::up(HOST);
    let agent = started(&host);
    done(&agent, &whole("to be replaced"));
    done(
        &agent,
        &json!({ "selectors": ["0"], "layout_source": { "entries": ["1g.10gb*2"] }, "reason": "to be cleared" }),
    );
    assert_eq!(clear(&agent, "0").status, 200);
    done(&agent, &whole("to end with its rule"));
    agent.write_config("");
    assert_eq!(reload(&agent, &json!({ "clear_overrides": true })).unwrap().ended.len(), 1);
    agent.write_config(CONFIG);
    reload(&agent, &json!({})).unwrap();
    short(&agent);
    agent.until("expiry", || overrides(&agent).overrides.is_empty().then_some(()));
    let reported = agent.until("the last event", || {
        let events = agent.get("/v1/events?follow=false&kinds=change").json();
        events.to_string().contains("override.expire").then_some(events)
    });
    let uuid = agent.gpu(0).uuid;
    let reported: Vec<_> = reported.as_array().expect("a list").iter().map(|event| event["action"].clone()).collect();
    let made_and_ended = [
        "override.make",
        "override.make",
        "override.clear",
        "override.make",
        "override.clear",
        "override.make",
        "override.expire",
    ];
    assert_eq!(reported, made_and_ended);
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
