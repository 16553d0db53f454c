//! The start and the end of a daemon, and how other programs find the daemon.

use std::{path::PathBuf, process::Stdio, time::Duration};

use gpush_api::Percentage;
use gpush_mps::protocol::{
    control::{Control, ControlError},
    lock,
    session::SessionError,
};
use nix::sys::signal::Signal;

use crate::daemon::{LONG, Setup, Trait, signal, until};

fn files(setup: &Setup) -> Vec<String> {
    let names = std::fs::read_dir(&setup.pipe).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.collect();
    names.sort();
    names
}

const LEFT: [&str; 3] = ["control", "control_lock", "control_privileged"];
const PID: &str = "nvidia-cuda-mps-control.pid";

async fn all(daemon: &crate::daemon::Daemon) -> Vec<&'static str> {
    let pid = daemon.has(Trait::WritesPidFile).await.then_some(PID);
    LEFT.into_iter().chain(["log"]).chain(pid).collect()
}

pub(crate) async fn quit_ends_the_daemon_and_makes_it_absent(setup: Setup) {
    let mut daemon = setup.start().await;
    assert_eq!(files(&daemon.setup), all(&daemon).await);
    daemon.control.quit(None, LONG).await.unwrap();
    assert_eq!(daemon.child.wait().unwrap().code(), Some(0));
    let gone = daemon.control.default_percentage(LONG).await.unwrap_err();
    assert!(matches!(gone, ControlError::Session(SessionError::Absent { .. })), "{gone:?}");
    assert_eq!(lock::holder(&daemon.setup.pipe).unwrap(), None);
    assert_eq!(files(&daemon.setup), LEFT);
}

pub(crate) async fn stopped_process_is_silent(setup: Setup) {
    let daemon = setup.start().await;
    signal(daemon.pid(), Signal::SIGSTOP);
    let silent = daemon.control.default_percentage(Duration::from_millis(200)).await.unwrap_err();
    assert!(matches!(silent, ControlError::Session(SessionError::Silent { .. })), "{silent:?}");
    assert_eq!(lock::holder(&daemon.setup.pipe).unwrap(), Some(daemon.pid()));
    signal(daemon.pid(), Signal::SIGCONT);
    assert_eq!(daemon.control.default_percentage(LONG).await.unwrap(), Percentage::ALL);
}

pub(crate) async fn killed_daemon_leaves_files_and_the_next_starts(setup: Setup) {
    for end in [Signal::SIGKILL, Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP] {
        let which = setup.which;
        let setup = Setup::of(which, "").unwrap();
        let mut daemon = setup.start().await;
        let all = all(&daemon).await;
        signal(daemon.pid(), end);
        daemon.child.wait().unwrap();
        assert_eq!(files(&daemon.setup), all, "{end}");
        let gone = daemon.control.daemon(LONG).await.unwrap_err();
        assert!(matches!(gone, ControlError::Session(SessionError::Absent { .. })), "{end}: {gone:?}");
        assert_eq!(lock::holder(&daemon.setup.pipe).unwrap(), None);
        daemon.child = daemon.setup.spawn();
        let next = until("the next answers", async || daemon.control.daemon(LONG).await.ok()).await;
        assert_eq!((next.pid, lock::holder(&daemon.setup.pipe).unwrap()), (daemon.pid(), Some(daemon.pid())));
    }
}

pub(crate) async fn second_daemon_in_a_directory_fails(setup: Setup) {
    let daemon = setup.start().await;
    for how in ["-f", "-d"] {
        let second = daemon.setup.command(&daemon.setup.control_program()).arg(how).output().unwrap();
        let message = String::from_utf8(second.stdout).unwrap();
        assert_eq!((second.status.code(), message.trim()), (Some(1), "An instance of this daemon is already running"));
    }
    assert_eq!(daemon.control.daemon(LONG).await.unwrap().pid, daemon.pid());
}

pub(crate) async fn path_of_88_bytes_is_too_long(setup: Setup) {
    let long = |setup: &Setup, length: usize| -> PathBuf {
        let short = setup.path("");
        let padded = "p".repeat(length - short.as_os_str().len());
        short.join(padded)
    };
    let at = long(&setup, 88);
    let (which, setup) = (setup.which, setup.at(at));
    let mut refused = setup.spawn();
    assert_eq!(refused.wait().unwrap().code(), Some(1));
    // The daemon does not say why it failed. It prints at most its usual start message.
    let message = std::fs::read_to_string(setup.path("out")).unwrap();
    let usual = ["Starting control daemon using socket", "To connect CUDA applications to this daemon"];
    assert!(message.lines().all(|line| usual.iter().any(|start| line.contains(start))), "{message}");
    let setup = Setup::of(which, "").unwrap();
    let at = long(&setup, 87);
    assert_eq!(at.as_os_str().len(), 87);
    let daemon = setup.at(at).start().await;
    assert_eq!(daemon.control.daemon(LONG).await.unwrap().pid, daemon.pid());
}

pub(crate) async fn daemon_continues_without_its_directory(setup: Setup) {
    let mut daemon = setup.start().await;
    std::fs::remove_dir_all(&daemon.setup.pipe).unwrap();
    let gone = daemon.control.daemon(LONG).await.unwrap_err();
    assert!(matches!(gone, ControlError::Session(SessionError::Absent { .. })), "{gone:?}");
    assert_eq!(lock::holder(&daemon.setup.pipe).unwrap(), None);
    let mut second = daemon.setup.spawn();
    let second_control = Control::of(&daemon.setup.pipe);
    let found = until("a second answers", async || second_control.daemon(LONG).await.ok()).await;
    assert_eq!(found.pid.cast_unsigned(), second.id());
    assert!(daemon.child.try_wait().unwrap().is_none(), "the first continues, and is unreachable");
    second.kill().unwrap();
    second.wait().unwrap();
}

pub(crate) async fn background_daemon_logs_to_its_directory(setup: Setup) {
    let mut start = setup.command(&setup.control_program());
    let started = start.arg("-d").stdout(Stdio::null()).status().unwrap();
    assert_eq!(started.code(), Some(0));
    let control = Control::of(&setup.pipe);
    let found = control.daemon(LONG).await.unwrap();
    control.quit(None, LONG).await.unwrap();
    until("it ends", async || (!crate::daemon::is_alive(found.pid)).then_some(())).await;
    let log = std::fs::read_to_string(setup.path("log/control.log")).unwrap();
    for part in ["Starting control daemon using socket", "NEW UI", "Cmd:get_server_list", "Exit with status 0"] {
        assert!(log.contains(part), "{part}: {log}");
    }
    let line = log.lines().next().unwrap();
    assert!(line.contains(&format!(" Control {:5}] ", found.pid)), "{line}");
    assert!(setup.path("log/server.log").exists());
}
