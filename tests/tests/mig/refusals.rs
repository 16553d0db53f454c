//! Invalid input and broken environments. The error names the object and a solution, and gpushd
//! changes nothing.

use gpush_api::Code;
use gpush_tests::{agent::Setup, host::Host};

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
