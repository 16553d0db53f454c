//! Reports about MPS daemons: events for new states, too many clients, and unsupported protocol
//! versions. Other tests check that gpushd truncates logs before they fill a disk.

use std::{
    fs::{self, OpenOptions},
    io::Write,
    os::unix::fs::{PermissionsExt, symlink},
    path::Path,
};

use gpush_api::{EventKind, EventPayload, MpsState};
use gpush_tests::{
    agent::Listener,
    host::{Host, program},
    mps::{Client, Served, act, becomes, daemon, fault, signal},
};
use nix::sys::signal::Signal;
use serde_json::json;

/// Returns the state and the reasons in the next event.
fn next(listener: &mut Listener) -> (MpsState, String) {
    let EventPayload::Mps(change) = listener.next_of(EventKind::Mps).what else { panic!("an event of another kind") };
    assert_eq!((change.gpu, change.uuid.as_str()), (Some(0), change.gpu_uuid.as_str()));
    (change.state, change.reasons.join("; "))
}

#[test]
fn daemon_state_changes_are_events() {
    let served = Served::up();
    let mut listener = served.agent.listen("?kinds=mps", None);
    assert_eq!(act(&served.agent, "0", "stop", &json!({ "force": true })).status, 200);
    assert_eq!([next(&mut listener).0, next(&mut listener).0], [MpsState::Stopping, MpsState::Stopped]);
    assert_eq!(act(&served.agent, "0", "start", &json!({})).status, 200);
    assert_eq!([next(&mut listener).0, next(&mut listener).0], [MpsState::Starting, MpsState::Ready]);
    let client = served.client();
    assert!(signal(daemon(&served.agent, "0").pid.expect("a pid").cast_signed(), Signal::SIGKILL));
    // The server still has a client, so gpushd cannot restart the daemon yet. The event says how
    // the daemon ended.
    let (state, why) = next(&mut listener);
    assert_eq!(state, MpsState::BackingOff);
    assert!(why.contains("was ended by signal 9"), "{why}");
    client.end();
    while next(&mut listener).0 != MpsState::Ready {}
}

/// Creates a directory with the simulated programs, in which a script starts the control daemon.
fn through(host: &Host, script: &str) -> std::path::PathBuf {
    let dir = host.dir().join("own");
    fs::create_dir(&dir).expect("a directory");
    symlink(program("gpush-sim"), dir.join("nvidia-cuda-mps-server")).expect("a link");
    let control = host.dir().join("bin/nvidia-cuda-mps-control");
    let path = dir.join("nvidia-cuda-mps-control");
    fs::write(&path, format!("#!/bin/sh\n{}\n", script.replace("CONTROL", &control.display().to_string())))
        .expect("a script");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("a program");
    dir
}

#[test]
fn silent_daemon_with_an_unsupported_protocol_is_reported() {
    let host = Host::up(Served::HOST);
    let programs = through(&host, "CUDA_MPS_PROTOCOL_VERSION=3 exec CONTROL \"$@\"");
    let served = Served::on(host, Some(&programs));
    fault(&served.host, "silent-hello");
    becomes(&served.agent, "0", "reported with its protocol", |daemon| {
        daemon.reasons.iter().any(|reason| reason == "the MPS daemon uses MPS v3, which gpushd does not support yet")
    });
}

#[test]
fn log_of_a_running_daemon_is_truncated_and_still_written() {
    let config = Served::CONFIG.replace("health_s = 1", "health_s = 1\nlog_mib = 1");
    let served = Served::of(Host::up(Served::HOST), "0", &config, None);
    let mut client = served.client();
    let logs = daemon(&served.agent, "0").log_directory.expect("logs");
    let log = Path::new(&logs).join("control.log");
    let mut grown = OpenOptions::new().append(true).open(&log).expect("its log");
    grown.write_all("some line of it\n".repeat(70_000).as_bytes()).expect("the log can be written");
    let length = |path: &Path| fs::metadata(path).map(|meta| meta.len()).unwrap_or_default();
    served.agent.await_that("the log is truncated", || length(&log) < 1 << 20);
    assert!(length(&Path::new(&logs).join("control.log.1")) > 1 << 20, "the earlier lines are kept");
    let cut = length(&log);
    let second = Client::start(&served.host, &served.environment);
    served.agent.await_that("the daemon writes more lines", || length(&log) > cut);
    assert!(second.first.starts_with("active") && client.lives());
    assert_eq!(daemon(&served.agent, "0").pid.map(u32::cast_signed), Some(served.pid));
}
