//! GPU states: cordons by administrators and after faults, maintenance, and a database of a newer gpushd. The tests check the state of the
//! hardware.

use std::path::Path;

use gpush_api::{ApiError, Code, GpuState, GpuUuid, Health, OperationState};
use gpush_tests::{
    agent::{Agent, Setup, gi_at, real_layout},
    host::Host,
};
use serde_json::{Value, json};

const CONFIG: &str = r#"
[[gpu]]
name = "training"
match = ["0-1"]
mode = "mig"
layout = ["3g.40gb", "2g.20gb"]
"#;

fn health(agent: &Agent) -> Health {
    serde_json::from_value(agent.get("/v1/health").json()).expect("health")
}

fn cause<'h>(health: &'h Health, part: &str) -> Option<&'h ApiError> {
    health.errors.iter().find(|cause| cause.message.contains(part))
}

/// Sends a `POST` that must succeed. Returns the body of the response.
fn done(agent: &Agent, path: &str, reason: &str) -> Value {
    let answer = agent.post(path, &json!({ "reason": reason }));
    assert_eq!(answer.status, 200, "{path}: {}", String::from_utf8_lossy(&answer.body));
    answer.json()
}

/// Waits until both GPUs with a rule have their layouts.
fn laid_out(agent: &Agent) {
    agent.wait_for_layouts_at_start();
    assert!(agent.gpus()[..2].iter().all(|gpu| gpu.drift.is_empty() && gpu.mig.is_some()));
}

/// Returns the processes that have the simulated driver open.
fn clients(host: &Host) -> Vec<Value> {
    let listed: Value = serde_json::from_str(&host.sim("process", &["list", "--json"])).expect("JSON");
    let alive = |pid: &Value| Path::new(&format!("/proc/{pid}")).exists();
    listed["clients"].as_array().expect("clients").iter().filter(|pid| alive(pid)).cloned().collect()
}

#[test]
fn xid_cordons_gpu_and_uncordon_lasts_until_next_xid() {
    let host = Host::up("a30x4");
    let agent = Agent::start(&host, "");
    agent.settle_reads();
    // A program can cause Xid 13, so gpushd does not cordon the GPU for this Xid error.
    host.sim("xid", &["13", "--gpu", "0"]);
    agent.wait_for_log("Xid 13");
    host.sim("xid", &["79", "--gpu", "1"]);
    let gpu = agent.until("cordon", || Some(agent.gpu(1)).filter(|gpu| gpu.state == GpuState::Cordoned));
    assert_eq!((gpu.cordons[0].cause.as_str(), &gpu.cordons[0].by), ("xid-79", &None));
    assert!(gpu.reasons[0].contains("Xid 79 (the GPU has fallen off the bus)"), "{:?}", gpu.reasons);
    assert_eq!(agent.gpu(0).state, GpuState::Ready);
    let reported = health(&agent);
    let reported = cause(&reported, "GPU 1").expect("a fault is ill health");
    assert!(reported.hint.as_ref().unwrap().contains("gpushctl gpu uncordon 1"), "{reported:?}");
    done(&agent, "/v1/gpus/1/uncordon", "reset");
    assert_eq!(agent.gpu(1).state, GpuState::Ready);
    agent.stop();
    let agent = Agent::start(&host, "[health]\ncordon_xids = [31]\n");
    agent.settle_reads();
    assert_eq!(agent.gpu(1).state, GpuState::Ready);
    host.sim("xid", &["79", "--gpu", "1"]);
    host.sim("xid", &["31", "--gpu", "2"]);
    agent.until("cordon", || (agent.gpu(2).state == GpuState::Cordoned).then_some(()));
    assert_eq!(agent.gpu(1).state, GpuState::Ready, "not one of those that the config names");
    host.sim("xid", &["31", "--gpu", "1"]);
    agent.until("cordon", || (agent.gpu(1).state == GpuState::Cordoned).then_some(()));
}

#[test]
fn xid_is_received_after_worker_died() {
    let host = Host::up("a30x4");
    let agent = Agent::start(&host, "");
    agent.settle_reads();
    let before = clients(&host);
    let worker = i32::try_from(before[0].as_i64().unwrap()).unwrap();
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(worker), nix::sys::signal::Signal::SIGKILL).unwrap();
    // The agent must listen for driver events again although no client sends a request.
    agent.until("another worker", || {
        let now = clients(&host);
        (!now.is_empty() && now != before).then_some(())
    });
    agent.until("cordon", || {
        host.sim("xid", &["95", "--gpu", "3"]);
        (agent.gpu(3).state == GpuState::Cordoned).then_some(())
    });
}

#[test]
fn maintenance_closes_all_handles_and_survives_restart() {
    let host = Host::up("dgx-a100");
    let agent = Agent::start(&host, "");
    assert_eq!(agent.apply(&["0"], &["3g.40gb"]).state, OperationState::Done);
    // While an operation runs, gpushd refuses maintenance, and the error names the operation.
    host.fault("nvmlDeviceCreateGpuInstance* --gpu 1 --hang");
    let operation = agent.begin(&["1"], &["3g.40gb"]).unwrap();
    let refused = agent.post("/v1/maintenance/enter", &json!({})).error();
    assert_eq!(refused.code, Code::Conflict);
    assert!(refused.message.contains(&operation.id) && refused.message.contains("GPU 1 ("), "{refused:?}");
    assert!(refused.hint.unwrap().contains(&format!("gpushctl operation wait {}", operation.id)));
    host.clear_faults();
    assert_eq!(agent.follow(operation).state, OperationState::Done);
    // A queued operation does not block maintenance, and stays queued.
    let pid = host.process(&format!("--gpu 0 --gi {} --ci 0", gi_at(&host, 0, 4)));
    let order = json!({ "selectors": ["0"], "layout_source": { "entries": ["7g.80gb"] }, "wait_s": 600 });
    let waiting = agent.begin_with(&order).unwrap();

    assert!(!clients(&host).is_empty());
    let entered = done(&agent, "/v1/maintenance/enter", "new riser");
    assert_eq!(entered["maintenance"]["reason"], "new riser");
    assert_eq!(clients(&host), [] as [Value; 0], "no handle of ours is open");
    let gpu = agent.gpu(1);
    assert_eq!((gpu.state, gpu.stale), (GpuState::Maintenance, true));
    assert_eq!(gpu.mig.unwrap().instances.len(), 1, "what was seen last");
    assert!(gpu.reasons[0].contains("new riser"), "{:?}", gpu.reasons);
    for refused in [
        agent.begin(&["1"], &["7g.80gb"]).unwrap_err(),
        agent.begin_with(&order).unwrap_err(),
        agent.post("/v1/maintenance/enter", &json!({})).error(),
    ] {
        assert_eq!(refused.code, Code::Conflict, "{refused:?}");
        assert!(refused.message.contains("in maintenance") && refused.message.contains("new riser"), "{refused:?}");
        assert!(refused.hint.unwrap().contains("gpushctl maintenance leave"));
    }
    assert_eq!(health(&agent).maintenance.unwrap().reason.as_deref(), Some("new riser"));
    assert_eq!(clients(&host), [] as [Value; 0], "none of these opened one");
    agent.stop();

    let agent = Agent::start(&host, "");
    let unseen = agent.get("/v1/gpus").error();
    assert_eq!(unseen.code, Code::Conflict, "{unseen:?}");
    assert!(unseen.message.contains("new riser"), "{unseen:?}");
    assert_eq!(agent.get("/v1/version").json()["driver"], Value::Null);
    assert_eq!(clients(&host), [] as [Value; 0], "the driver was not even loaded");
    let state = |id: &str| agent.get(&format!("/v1/operations/{id}")).json()["state"].clone();
    assert!(["queued", "waiting"].map(Value::from).contains(&state(&waiting.id)), "{}", state(&waiting.id));
    host.end_process(pid);
    done(&agent, "/v1/maintenance/leave", "done");
    let ended =
        agent.follow(serde_json::from_value(agent.get(&format!("/v1/operations/{}", waiting.id)).json()).unwrap());
    assert_eq!(ended.state, OperationState::Done, "{ended:?}");
    assert_eq!(real_layout(&host, 0), ["7g.80gb@0[7g.80gb@0]"]);
    assert_eq!(agent.gpu(1).state, GpuState::Ready);
    assert_eq!(done(&agent, "/v1/maintenance/leave", "again"), json!({ "in_maintenance": false }));
}

#[test]
fn gpus_match_by_uuid_after_driver_upgrade() {
    let description = |driver: &str| {
        format!("driver = \"{driver}\"\nseed = 7\n[[gpu]]\nmodel = \"a100-80\"\ncount = 2\nmig = true\n")
    };
    let host = Host::up(&description("550.163.01"));
    let agent = Agent::start(&host, "");
    let uuids = |agent: &Agent| agent.gpus().into_iter().map(|gpu| gpu.uuid).collect::<Vec<_>>();
    let before = uuids(&agent);
    assert_eq!(agent.apply(&["1"], &["3g.40gb"]).state, OperationState::Done);
    done(&agent, "/v1/gpus/1/cordon", "waits for its card");
    assert_eq!(agent.get("/v1/version").json()["driver"]["version"], "550.163.01");
    done(&agent, "/v1/maintenance/enter", "driver 570");
    // This call fails if a process has the driver open.
    host.replace(&description("570.86.10"));
    done(&agent, "/v1/maintenance/leave", "");
    agent.until("the new driver", || {
        (agent.get("/v1/version").json()["driver"]["version"] == "570.86.10").then_some(())
    });
    agent.until("the GPUs", || agent.gpus().iter().all(|gpu| !gpu.stale).then_some(()));
    assert_eq!(uuids(&agent), before);
    assert_eq!([0, 1].map(|n| agent.gpu(n).state), [GpuState::Ready, GpuState::Cordoned]);
    assert_eq!(agent.gpu(1).mig.unwrap().instances, [], "what the new driver shows");
    agent.wait_for_log("the driver version is now 570.86.10, and was 550.163.01 before");
}

#[test]
fn health_reports_missing_and_mismatched_driver() {
    let host = Host::up("a30x4");
    host.fault("nvmlInit --rc DRIVER_NOT_LOADED");
    let agent = Agent::start(&host, "");
    let code = |agent: &Agent| health(agent).errors.first().map(|cause| (cause.code, cause.message.clone()));
    agent.until("no driver", || code(&agent).filter(|(code, _)| *code == Code::DriverUnavailable));
    host.clear_faults();
    agent.until("the driver", || code(&agent).is_none().then_some(()));
    let before: Vec<GpuUuid> = agent.gpus().into_iter().map(|gpu| gpu.uuid).collect();
    for (rc, words) in [("DRIVER_NOT_LOADED", "not loaded"), ("LIB_RM_VERSION_MISMATCH", "version")] {
        host.fault(&format!("nvmlInit --rc {rc}"));
        let worker = i32::try_from(clients(&host)[0].as_i64().unwrap()).unwrap();
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(worker), nix::sys::signal::Signal::SIGKILL).unwrap();
        let (_, printed) = agent.until(rc, || code(&agent).filter(|(code, _)| *code == Code::DriverUnavailable));
        assert!(printed.to_lowercase().contains(words), "{rc}: {printed}");
        host.clear_faults();
        agent.until("the driver again", || code(&agent).is_none().then_some(()));
        assert_eq!(agent.gpus().into_iter().map(|gpu| gpu.uuid).collect::<Vec<_>>(), before);
    }
}

#[test]
fn newer_database_is_read_and_changes_are_refused() {
    let host = Host::up("dgx-a100");
    let state = Setup::on(&host).state_dir();
    let agent = Agent::start(&host, CONFIG);
    laid_out(&agent);
    done(&agent, "/v1/gpus/3/cordon", "from before");
    agent.stop();
    let file = state.join("gpush.db");
    let newer = rusqlite::Connection::open(&file).unwrap();
    newer.execute_batch("PRAGMA user_version = 1000").unwrap();
    let sealed = seal(&["schema", "1000"]);
    newer.execute("UPDATE facts SET value = '1000', seal = ?1 WHERE name = 'schema'", [sealed]).unwrap();
    newer.close().unwrap();

    host.start_trace();
    let agent = Agent::start(&host, &CONFIG.replace("2g.20gb", "1g.10gb"));
    agent.settle_reads();
    assert_eq!(agent.gpu(3).state, GpuState::Cordoned, "what it can read holds");
    let refused = [
        agent.begin(&["0"], &["7g.80gb"]).unwrap_err(),
        agent.post("/v1/gpus/0/cordon", &json!({})).error(),
        agent.post("/v1/gpus/3/uncordon", &json!({})).error(),
        agent.post("/v1/maintenance/enter", &json!({})).error(),
        agent.post("/v1/recover", &json!({})).error(),
    ];
    for refused in refused {
        assert_eq!(refused.code, Code::Unavailable, "{refused:?}");
        assert!(refused.message.contains("newer gpushd") && refused.hint.is_some(), "{refused:?}");
    }
    assert!(cause(&health(&agent), "newer gpushd").is_some());
    assert_eq!(agent.gpu(3).state, GpuState::Cordoned);
    agent.stop();
    assert_eq!(host.trace(), []);
}

/// Returns the seal (a checksum) of a row of texts in the table `facts`.
fn seal(texts: &[&str]) -> i64 {
    let mut bytes = b"facts".to_vec();
    for text in texts {
        bytes.push(3);
        bytes.extend((text.len() as u64).to_le_bytes());
        bytes.extend(text.bytes());
    }
    let step = |state: u64, byte: &u8| (state ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, step).cast_signed()
}

#[test]
fn concurrent_requests_with_one_key_change_once() {
    let host = Host::up("dgx-a100");
    let agent = Agent::start(&host, "");
    agent.settle_reads();
    let ask = |path: &str, key: &str| {
        let headers = format!("content-type: application/json\r\nidempotency-key: {key}\r\n");
        agent.request("POST", path, &headers, b"{\"reason\": \"once\"}").status
    };
    let at_once = |path: &str, key: &str, then: &(dyn Fn() + Sync)| {
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    assert_eq!(ask(path, key), 200, "{}", agent.log());
                    then();
                });
            }
        });
    };
    let recorded = |action: &str| {
        let trail = agent.get("/v1/audit?limit=1000").json();
        trail.as_array().unwrap().iter().filter(|record| record["action"] == action).count()
    };
    at_once("/v1/gpus/2/cordon", "k-3", &|| {});
    assert_eq!(recorded("gpu.cordon"), 1);
    // When gpushd has entered maintenance, it has no handle open, even if a worker has hung.
    host.fault("nvmlDeviceGetMemoryInfo* --gpu 0 --hang");
    agent.until("a reading that hangs", || agent.gpu(0).stale.then_some(()));
    let no_handle_is_open = || {
        let listed: serde_json::Value = serde_json::from_str(&host.sim("process", &["list", "--json"])).unwrap();
        let clients = listed["clients"].as_array().unwrap().iter();
        let alive: Vec<_> = clients.filter(|pid| std::path::Path::new(&format!("/proc/{pid}")).exists()).collect();
        assert!(alive.is_empty(), "{alive:?}");
    };
    at_once("/v1/maintenance/enter", "k-4", &no_handle_is_open);
    assert_eq!(recorded("maintenance.enter"), 1);
}
