//! Starts that gpushd refuses, each with an error that names the object and a solution.

use gpush_tests::{
    agent::{Agent, Setup},
    host::{Host, program},
};

#[test]
fn start_with_bad_config_or_used_mps_directory_is_refused() {
    let host = Host::up("a30x4");
    for (name, config, says) in [
        ("columns", &b"[[gpu]]\nmatch = [\"0\"]\nmode = \"mig\"\nlayout = [\"2g.12gb\"\n"[..], ":4:20:"),
        ("bytes", b"auto_reconcile = true\n\xff\xfe\n", "UTF-8"),
        ("key", b"auto_reconsile = true\n", "auto_reconcile"),
    ] {
        let (status, log) = Setup::on(&host).named(name).config(config).refused();
        assert_eq!(status.code(), Some(1), "{log}");
        assert!(log.starts_with("gpushd: ") && log.contains(says), "{says}: {log}");
    }
    let absent = host.command(program("gpushd")).args(["--config", "/nonexistent/config.toml"]).output();
    let absent = absent.expect("gpushd can be started");
    let printed = String::from_utf8_lossy(&absent.stderr);
    assert!(!absent.status.success() && printed.contains("there is no config file"), "{printed}");
    assert!(printed.contains("`install -D -m 644 /dev/null "), "{printed}");

    // Two agents must not use one MPS directory: each would adopt and end the daemons of the other.
    let agent = Agent::start(&host, "");
    let (status, log) = Setup::on(&host).named("second").refused();
    assert_eq!(status.code(), Some(1), "{log}");
    assert!(log.contains(&format!("another gpushd (pid {}) uses the directory of MPS daemons", agent.pid())), "{log}");
    assert!(log.contains("--mps-dir"), "{log}");
    agent.stop();
    let _own = Setup::on(&host).named("second").start();
}
