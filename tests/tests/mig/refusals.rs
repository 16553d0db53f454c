//! Invalid input and broken environments. The error names the object and a solution, and gpushd
//! changes nothing.

use gpush_api::{Code, GpuState, OperationState};
use gpush_tests::{
    agent::{Agent, Setup, real_layout},
    host::Host,
};
use serde_json::json;

#[test]
fn impossible_layouts_are_refused_with_a_precise_reason() {
    let host = Host::up("dgx-a100");
    let agent = Agent::start(&host, "");
    assert_eq!(agent.apply(&["0"], &["3g.40gb"]).state, OperationState::Done);
    let before = real_layout(&host, 0);
    host.start_trace();
    let mut tried = 0;
    for (entries, code, says) in [
        (&["9g.90gb"][..], Code::UnknownProfile, "has no profile 9g.90gb"),
        (&["1g.10gb*8"], Code::LayoutImpossible, "at most 7"),
        (&["4g.40gb", "4g.40gb"], Code::LayoutImpossible, "4g.40gb"),
        (&["3g.40gb@2"], Code::LayoutImpossible, "can't start at memory slice 2"),
        (&["3g.40gb@0", "2g.20gb@2"], Code::LayoutImpossible, "overlap"),
        (&["7g.80gb", "1g.10gb"], Code::LayoutImpossible, "slices"),
        (&["9c.3g.40gb"], Code::BadRequest, "9c.3g.40gb"),
        (&["1c.3g.40gb*9"], Code::BadRequest, "*9"),
        (&["3g.40gb*0"], Code::BadRequest, "*0"),
        (&[""], Code::BadRequest, ""),
        (&[], Code::BadRequest, ""),
        (&["3g.40gb@x"], Code::BadRequest, "3g.40gb@x"),
        (&["\u{7f}"], Code::BadRequest, ""),
    ] {
        let refused = agent.begin(&["0"], entries).unwrap_err();
        assert_eq!(refused.code, code, "{entries:?}: {refused:?}");
        let text = format!("{} {}", refused.message, refused.causes.join(" "));
        assert!(text.contains(says), "{entries:?}: {refused:?}");
        assert!(refused.hint.is_some(), "{entries:?}: {refused:?}");
        tried += 1;
    }
    assert_eq!(
        agent.begin_with(&json!({"selectors": ["0"], "layout_source": {"named": "nope"}})).unwrap_err().code,
        Code::NotFound
    );
    assert_eq!(real_layout(&host, 0), before);
    assert_eq!(host.trace(), []);
    println!("{tried} layouts refused");
}

#[test]
fn gpus_without_mig_refuse_layouts() {
    let host = Host::up("[[gpu]]\nmodel = \"l4\"\n\n[[gpu]]\nmodel = \"a100-80\"\nmig = false\n");
    let agent = Agent::start(&host, "");
    host.start_trace();
    let refused = agent.begin(&["0"], &["1g.10gb"]).unwrap_err();
    assert_eq!(refused.code, Code::Unsupported, "{refused:?}");
    assert!(refused.message.contains("does not support MIG"), "{refused:?}");
    let error = agent.get("/v1/gpus/0/profiles").error();
    assert_eq!(error.code, Code::Unsupported);
    assert_eq!(host.trace(), []);
}

#[test]
fn invalid_config_stops_start_with_line_and_column() {
    let host = Host::up("a30x4");
    let mut tried = 0;
    for (config, says) in [
        (&b"[[gpu]]\nmatch = [\"0\"]\nmode = \"mig\"\nlayout = [\"2g.12gb\"\n"[..], ":4:20:"),
        (b"auto_reconcile = true\n\xff\xfe\n", "UTF-8"),
        (b"auto_reconsile = true\n", "auto_reconcile"),
        (b"auto_reconcile = \"yes\"\n", ":1:18:"),
        (b"[[gpu]]\nmatch = [\"0\"]\nmode = \"mig\"\nlayout = []\n", "none"),
        (b"[layouts]\na = [\"1g.6gb\"]\na = [\"1g.6gb\"]\n", ":3:"),
        (b"[[gpu]]\nmatch = [\"0\"]\nmode = \"hami\"\n", "hami"),
    ] {
        let (status, log) = Setup::on(&host).named(&format!("bad{tried}")).config(config).refused();
        assert_eq!(status.code(), Some(1), "{log}");
        assert!(log.starts_with("gpushd: ") && log.contains(says), "{says}: {log}");
        tried += 1;
    }
    println!("{tried} configs refused");
}

#[test]
fn invalid_config_at_reload_keeps_old_config() {
    let host = Host::up("a30x4");
    let mut agent = Agent::start(&host, "[layouts]\nsmall = [\"1g.6gb*4\"]\n");
    agent.write_config(b"[layouts]\nsmall = 7\n\xff");
    agent.signal(nix::sys::signal::Signal::SIGHUP);
    agent.wait_for("STATUS=the config has errors and was not loaded");
    let view = agent.get("/v1/config").json();
    assert_eq!(view["layouts"][0]["entries"], json!(["1g.6gb*4"]), "{view}");
    let health = agent.get("/v1/health").json();
    assert_eq!(health["errors"][0]["code"], "config_invalid", "{health}");
    agent.write_config("[layouts]\nsmall = [\"1g.6gb*2\"]\n");
    agent.signal(nix::sys::signal::Signal::SIGHUP);
    agent.wait_for("STATUS=the config was reloaded");
    assert_eq!(agent.get("/v1/config").json()["layouts"][0]["entries"], json!(["1g.6gb*2"]));
    assert_eq!(agent.get("/v1/health").json()["status"], "ok");
}

#[test]
fn broken_driver_is_explained_and_agent_keeps_running() {
    let host = Host::up("a30x4");
    let mut tried = 0;
    for (code, says) in [
        ("DRIVER_NOT_LOADED", "modprobe nvidia"),
        ("LIB_RM_VERSION_MISMATCH", "reboot, or reload the module"),
        ("UNKNOWN", ""),
    ] {
        host.fault(&format!("nvmlInit* --rc {code}"));
        let agent = Setup::on(&host).named(code).start();
        for path in ["/v1/gpus", "/v1/gpus/0", "/v1/gpus/0/profiles"] {
            let answer = agent.get(path);
            assert_eq!(answer.status, 503, "{code} {path}");
            let error = answer.error();
            assert_eq!(error.code, Code::DriverUnavailable, "{code}: {error:?}");
            assert!(error.hint.as_ref().unwrap().contains(says), "{code}: {error:?}");
        }
        assert_eq!(agent.begin(&["0"], &["1g.6gb"]).unwrap_err().code, Code::DriverUnavailable);
        assert_eq!(agent.get("/v1/health").json()["status"], "degraded");
        assert_eq!(agent.get("/v1/config").status, 200);
        host.clear_faults();
        // Each request makes the agent try to load the driver again.
        let mut tries = 0;
        while agent.get("/v1/gpus").status != 200 {
            tries += 1;
            assert!(tries < 20_000, "{}", agent.log());
        }
        assert_eq!(agent.gpus().len(), 4);
        assert_eq!(agent.get("/v1/health").json()["status"], "ok");
        agent.stop();
        tried += 1;
    }
    // The first path does not exist. The second file is not a library.
    let says = "set `library` under [driver]";
    for library in ["/nonexistent/libnvidia-ml.so.1", "/etc/passwd"] {
        let agent = Setup::on(&host).named(&format!("lib{tried}")).arg("--library").arg(library).start();
        let error = agent.get("/v1/gpus").error();
        assert_eq!(error.code, Code::DriverUnavailable, "{error:?}");
        assert!(error.hint.unwrap().contains(says) && error.message.contains(library), "{}", error.message);
        tried += 1;
    }
    println!("{tried} drivers that do not work");
}

#[test]
fn host_without_gpus_is_healthy_and_refuses_requests() {
    let host = Host::up("driver = \"550.163.01\"\n");
    let agent = Agent::start(&host, "");
    assert_eq!(agent.gpus(), []);
    let health = agent.get("/v1/health").json();
    assert_eq!((&health["status"], &health["gpu_count"]), (&json!("ok"), &json!(0)));
    for gpus in [&["0"][..], &["all"], &[]] {
        let refused = agent.begin(gpus, &["1g.10gb"]).unwrap_err();
        assert_eq!(refused.code, Code::NotFound, "{refused:?}");
    }
}

#[test]
fn lost_gpu_is_shown_and_others_work() {
    let host = Host::up("dgx-a100");
    let agent = Agent::start(&host, "");
    assert_eq!(agent.gpus().len(), 8);
    host.fault("nvmlDeviceGetMigMode --gpu 3 --times 1 --mutate lose");
    agent.settle_reads_except(3);
    let gpus = agent.gpus();
    assert_eq!(gpus.len(), 8, "{gpus:?}");
    let lost: Vec<_> = gpus.iter().filter(|gpu| gpu.state == GpuState::Lost).collect();
    assert_eq!(lost.len(), 1, "{gpus:?}");
    assert!(!lost[0].reasons.is_empty());
    assert_eq!(agent.apply(&["0"], &["7g.80gb"]).state, OperationState::Done);
}

#[test]
fn second_operation_on_gpu_names_the_running_one() {
    let host = Host::up("dgx-a100");
    let agent = Agent::start(&host, "");
    host.fault("nvmlDeviceCreateGpuInstance* --gpu 0 --times 1 --hang");
    let first = agent.begin(&["0", "1"], &["3g.40gb"]).unwrap();
    let refused = agent.begin(&["1", "2"], &["3g.40gb"]).unwrap_err();
    assert_eq!((refused.code, refused.retryable), (Code::Conflict, true), "{refused:?}");
    assert!(refused.message.contains("operation op-1"), "{refused:?}");
    // gpushd can still change other GPUs.
    assert_eq!(agent.apply(&["2"], &["3g.40gb"]).state, OperationState::Done);
    assert!(real_layout(&host, 0).is_empty());
    host.clear_faults();
    assert_eq!(agent.follow(first).state, OperationState::Done);
    assert_eq!(agent.apply(&["1"], &["none"]).state, OperationState::Done);
}
