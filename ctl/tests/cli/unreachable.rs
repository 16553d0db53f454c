//! Tests of gpushctl if gpushd does not run, denies access or does not answer, or if another program listens on its
//! socket.

use std::os::unix::{fs::PermissionsExt, net::UnixListener, process::CommandExt};

use gpush_api::Version;
use insta::assert_snapshot;

use crate::support::{Agent, Answer, GPUSHCTL, Host};

/// Uid of a user without groups.
const NOBODY: u32 = 65_534;

#[test]
fn missing_stale_and_invalid_socket() {
    let host = Host::new();
    let mut text = host.run(&["status"]);
    drop(UnixListener::bind(host.path("gpushd.sock")).unwrap());
    text += &host.run(&["status"]);
    text += &host.run(&["--json", "gpu", "list"]);
    text += &host.run(&["version"]);
    text += &host.run(&["status", "--socket", "/"]);
    text += &host.run(&["status", "--socket", &"x".repeat(120)]);
    assert_snapshot!(text);
}

#[test]
fn denied_to_another_user() {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("SKIPPED: to be denied takes another user, and only root can become one");
        return;
    }
    let host = Host::new();
    // Copy the program, because other users may have no access to the build directory.
    let binary = host.path("gpushctl");
    // Copy with `cp`, a separate process. If this process wrote the file, another test could fork at that time. The
    // forked child would keep the file open for writing, and the file could not be executed ("text file busy").
    assert!(std::process::Command::new("cp").arg(GPUSHCTL).arg(&binary).status().unwrap().success());
    let mode = |path: &std::path::Path, mode| std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
    mode(host.dir.path(), 0o755);
    std::fs::create_dir(host.path("run")).unwrap();
    let socket = host.path("run/gpushd.sock");
    let _listener = UnixListener::bind(&socket).unwrap();
    // Every Debian system has a group `sys`, to which the user `nobody` does not belong.
    let sys = nix::unistd::Group::from_name("sys").unwrap().map(|g| g.gid);
    nix::unistd::chown(&socket, None, sys).unwrap();
    nix::unistd::chown(&host.path("run"), None, sys).unwrap();

    let run = |args: &[&str]| {
        let mut command = host.command(args);
        let environment: Vec<_> = command.get_envs().map(|(k, v)| (k.to_owned(), v.unwrap().to_owned())).collect();
        command = std::process::Command::new(&binary);
        command.args(args).env_clear().envs(environment).env("GPUSH_SOCKET", "run/gpushd.sock");
        command.current_dir(host.dir.path()).uid(NOBODY).gid(NOBODY);
        Host::transcript(args, &command.output().unwrap())
    };
    mode(&socket, 0o660);
    let mut text = run(&["status"]);
    mode(&socket, 0o600);
    text += &run(&["status"]);
    mode(&socket, 0o666);
    mode(&host.path("run"), 0o750);
    text += &run(&["status", "--json"]);
    assert_snapshot!(text);
}

#[test]
fn agent_does_not_answer() {
    let host = Host::new();
    Agent::listen(&host.path("gpushd.sock"), |_| Answer::Silence);
    let mut text = host.run(&["status", "--request-timeout", "0.05s"]);
    text += &host.run(&["mig", "apply", "--request-timeout", "0.05s"]);
    assert_snapshot!(text);
}

#[test]
fn agent_has_another_version() {
    let host = Host::new();
    Agent::listen(&host.path("gpushd.sock"), |request| match request.path.as_str() {
        "/v1/version" => Answer::ok(&Version { agent: "2.0.0".into(), api: "v2".into(), driver: None }),
        _ => Answer::Json(404, r#"{"title": "no such path"}"#.into()),
    });
    let mut text = host.run(&["status"]);
    text += &host.run(&["version", "--json"]);
    text += &host.run(&["gpu", "list"]);
    assert_snapshot!(text);
}

#[test]
fn another_program_answers() {
    let host = Host::new();
    Agent::listen(&host.path("gpushd.sock"), |_| Answer::Json(200, "<html>It works!</html>".into()));
    let mut text = host.run(&["status"]);
    text += &host.run(&["config", "show", "--json"]);
    assert_snapshot!(text);
}

#[test]
fn agent_closes_the_connection() {
    let host = Host::new();
    Agent::listen(&host.path("gpushd.sock"), |_| Answer::HangUp);
    let mut text = host.run(&["status"]);
    text += &host.run(&["mig", "apply", "--dry-run"]);
    assert_snapshot!(text);
}

#[test]
fn closed_stdout_is_not_an_error() {
    let host = Host::new();
    Agent::listen(&host.path("gpushd.sock"), |request| match request.path.as_str() {
        "/v1/gpus?profiles=true" => Answer::ok(&gpush_core::preset::gpus("dgx-a100").unwrap()),
        other => panic!("not asked for: {other}"),
    });
    // The output must be larger than the buffer of a pipe, so that a write fails in the middle.
    let mut child = host
        .command(&["gpu", "list", "--json"])
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), output.stderr.len()), (Some(0), 0), "{output:?}");
}

#[test]
fn wait_message_appears_after_two_seconds() {
    let host = Host::new();
    Agent::listen(&host.path("gpushd.sock"), |_| Answer::Silence);
    let text = host.run(&["status", "--request-timeout", "2.2s"]);
    assert!(
        text.contains("[stderr]\ngpushd has not answered yet; waiting up to 2.2s (--request-timeout)\nerror: "),
        "{text}"
    );
    assert!(text.ends_with("[exit 8]\n"), "{text}");
    let text = host.run(&["status", "--request-timeout", "2.2s", "--json"]);
    assert!(!text.contains("[stderr]") && text.ends_with("[exit 8]\n"), "{text}");
}
